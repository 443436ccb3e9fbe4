# `make demo` and `make test` need only make and Python >= 3.11: the first use creates .venv.
#   make PYTHON=python3.12 test     another interpreter (for a new .venv)
#   make demo ARGS="--seeds 3"      arguments for `flowalign demo`

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS  :=
# A process a core; the tests of a file share what it has trained.
PARALLEL := -n auto --dist loadfile --no-loadscope-reorder
# Threads that wait for others sleep in the place of spinning (flowalign sets it too); one of your own wins.
export OMP_WAIT_POLICY ?= PASSIVE
# Containers often set it, and then every process compiles torch and diffusers anew: ten seconds each.
unexport PYTHONDONTWRITEBYTECODE
# Tried in this order; the first that is new enough and can make a virtual environment is taken.
PYTHON := python3.14 python3.13 python3.12 python3.11 python3

.PHONY: help demo test all-tests fast-test lowest gpu lint docs clean
.DEFAULT_GOAL := help

help:  ## print the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(STAMP)  ## align the tiny Stable Diffusion 3 that ships with flowalign; ends on its gallery
	@$(BIN)/flowalign demo $(ARGS)

test: $(STAMP)  ## everything CI runs: lint, and all tests beside it, so that no core waits for mypy
	@$(MAKE) --no-print-directory --jobs 2 lint all-tests

all-tests: $(STAMP)
	@$(BIN)/python -m pytest $(PARALLEL)

fast-test: $(STAMP)  ## the unit tests only
	@$(BIN)/python -m pytest $(PARALLEL) -m "not slow"

lowest: $(STAMP)  ## the unit tests with the lowest versions that pyproject.toml allows, in an environment of their own
	@mkdir -p build
	@$(BIN)/python scripts/lowest_versions.py > build/lowest.txt
	@$(BIN)/python -m venv --clear build/lowest
	@build/lowest/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -e '.[dev]' -c build/lowest.txt
	@build/lowest/bin/python -m pytest $(PARALLEL) -m "not slow"

gpu: $(STAMP)  ## on a machine with a GPU: all tests on it, replay in 16 bits, benchmarks at full size, a real sglang
	@$(BIN)/python -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "make gpu: torch finds no CUDA device here")'
	@$(BIN)/python -m pytest -m "not slow"
	@$(BIN)/python scripts/measure_mismatch.py --device cuda
	@for model in sd35_medium flux_dev qwen_image wan_1_3b; do \
	  for how in "" "--compile" "--gradient-checkpointing --compile"; do \
	    $(BIN)/python scripts/benchmark_gpu.py $$model --batch-size 4 $$how || exit 1; \
	  done; \
	done
	@$(BIN)/python -m venv build/sglang
	@build/sglang/bin/python -m pip install --quiet --disable-pip-version-check 'sglang[diffusion]==0.5.23'
	@$(BIN)/python scripts/train_on_sglang.py --sglang build/sglang/bin/sglang

lint: $(STAMP)  ## ruff (lint and format) and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

docs: $(STAMP)  ## the documentation as a site, in build/site
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]' -c constraints.txt
	@$(BIN)/mkdocs build --strict --quiet && echo "build/site/index.html"

clean:  ## remove .venv, caches and builds (runs/ stays)
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache build dist
	find samplers rewards flowalign scripts tests -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

$(STAMP): pyproject.toml constraints.txt
	@if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	  for python in $(PYTHON); do \
	    if $$python -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	      found=$$python; break; \
	    fi; \
	  done; \
	  if [ -z "$$found" ]; then \
	    echo "flowalign needs Python >= 3.11 with venv; none found among: $(PYTHON)" >&2; exit 1; \
	  fi; \
	  echo "Creating $(VENV) with $$($$found --version)."; \
	  $$found -m venv --clear $(VENV); \
	fi
	@echo "Installing flowalign into $(VENV) (once; torch is large, so this takes minutes)."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -e '.[dev]' -c constraints.txt
	@touch $@
