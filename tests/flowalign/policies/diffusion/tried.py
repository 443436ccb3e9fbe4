"""What was run for each family: the table of docs/models.md, and one iteration of each engine on its tiny pipelines.

`python -m tests.flowalign.policies.diffusion.tried [NAME ...]` runs an iteration of flow_grpo, nft and draft on these
pipelines of tiny_pipelines.json (default all, in a few minutes), records those that passed in tried.json, and writes
the table. `python -m tests.flowalign.policies.diffusion.tried --table` writes the table alone.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
from PIL import Image

from flowalign.planning import published_pipelines
from flowalign.planning.dry_run import StandIn
from flowalign.planning.tiny_pipelines import PIPELINES, build
from flowalign.policies.diffusion import DiffusersPolicy
from flowalign.policies.diffusion.families import family_of
from flowalign.registry import names, resolve
from flowalign.runs.files import write_atomically
from flowalign.training import Trainer
from rewards.frames import PerFrame
from tests.flowalign.policies.diffusion.test_conformance import network_of, of_small_areas

TRIED = Path(__file__).with_suffix(".json")
PAGE = Path(__file__).parents[4] / "docs" / "models.md"
METHODS = ("flow_grpo", "nft", "draft")
"""One of each engine that trains."""


def iterate(name: str, method: str, folder: Path) -> dict[str, float]:
    """Metrics of one iteration of a method on a tiny pipeline; its files go to a folder."""
    tiny = PIPELINES[name]
    policy = DiffusersPolicy(build(name), encode_options=tiny.encode)
    line: dict[str, Any] = {"prompt": policy.family.example or "two red circles"}
    rng = np.random.default_rng(0)
    for file in [*(f"{i}.png" for i in range(tiny.images)), *(["mask.png"] if tiny.masked else [])]:
        Image.fromarray(rng.integers(0, 255, (40, 40, 3)).astype(np.uint8)).save(folder / file)
    line |= {"image": [f"{i}.png" for i in range(tiny.images)]} if tiny.images else {}
    line |= {"mask": "mask.png"} if tiny.masked else {}
    (folder / "prompts.jsonl").write_text(json.dumps(line) + "\n")
    lora = {"rank": 2, "alpha": 4} if policy.family.lora_targets else None
    # Cosmos 2 guides above 2 only
    scale = 3.0 if name == "cosmos2" else 2.0
    noisy: dict[str, dict[str, Any]] = {
        "flow_grpo": {"eta": 0.7, "guidance": scale},
        "nft": {"chunks": 1},
        "draft": {"kernel": "ode", "guidance": scale, "chunks": 1},
    }
    config: dict[str, Any] = {
        "model": {"path": "tiny_sd3", "lora": lora, "encode": tiny.encode},
        "data": {"prompts": str(folder / "prompts.jsonl")},
        "rewards": [{"name": "shapes"}],
        "algorithm": {"name": method} | ({"last_steps": 1} if method == "draft" else {}),
        "rollout": {"steps": 2, "batch_size": 4} | tiny.call | noisy[method],
        "training": {
            "iterations": 1,
            "prompts_per_iteration": 1,
            "group_size": 2,
            "previews": 0,
            "optimizer": {"learning_rate": 1e-3},
        },
        "output": str(folder),
        "name": method,
    }
    reward = PerFrame(StandIn(), frames=2) if "num_frames" in tiny.call else StandIn()
    trainer = Trainer(config, policy, reward=reward, progress=False)
    before = {key: value.detach().clone() for key, value in policy.trainable().items()}
    trainer.train()
    moved = [float((value.detach() - before[key]).abs().max()) for key, value in policy.trainable().items()]
    assert 0 < max(moved) < np.inf, "nothing moved"
    [metrics] = trainer.metrics.read()
    assert all(np.isfinite(value) for value in metrics.values() if isinstance(value, float)), metrics
    if method == "flow_grpo":
        assert abs(metrics["policy/ratio"] - 1) < 1e-4, metrics["policy/ratio"]
    return metrics


def tried() -> dict[str, list[str]]:
    """Methods with which an iteration passed, by the tiny pipeline."""
    record: dict[str, Any] = json.loads(TRIED.read_text(encoding="utf-8"))
    return dict(record["passed"])


def table() -> str:
    """A row for each family, from the lists that the tests go through."""
    heads = ["family", "equal to its pipe, replayed, on two processes", "LoRA in diffusers", "plan", "iteration"]
    rows = [f"| {' | '.join(heads)} |", f"| {' | '.join(['---'] * len(heads))} |"]
    passed = tried()
    for family in names("models"):
        tiny = [name for name, one in PIPELINES.items() if family_of(one.pipeline).name == family]
        first = {next(other for other in PIPELINES if network_of(other) == network_of(name)) for name in tiny}
        weights = "" if resolve("models", family).lora_targets else "all weights: "
        trip = [f"{weights}{name}" if name in tiny else f"as {name}" for name in sorted(first)]
        kinds = {PIPELINES[name].pipeline for name in tiny}
        sizes = [name for name, one in published_pipelines.PIPELINES.items() if one.pipeline in kinds]
        methods = [method for method in METHODS if tiny and all(method in passed.get(name, []) for name in tiny)]
        cells = [family, ", ".join(tiny), ", ".join(trip), ", ".join(sizes) or "-", ", ".join(methods) or "-"]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def on_page() -> tuple[str, str, str]:
    """The page before its table, the table, and what comes after."""
    before, mark, rest = PAGE.read_text(encoding="utf-8").partition("| family | equal to its pipe")
    shown, gap, after = (mark + rest).partition("\n\n")
    return before, shown + "\n", gap[1:] + after


def main(words: list[str]) -> int:
    """Try pipelines, write down what passed, and tell how many failed."""
    failed = 0
    passed = tried()
    with pytest.MonkeyPatch.context() as patch:
        of_small_areas(patch)
        for name in [] if words == ["--table"] else words or sorted(PIPELINES):
            passed[name] = []
            for method in METHODS:
                with tempfile.TemporaryDirectory() as folder:
                    try:
                        iterate(name, method, Path(folder))
                        passed[name].append(method)
                    except Exception as error:
                        failed += 1
                        print(f"{name} {method}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
            print(f"{name}: {', '.join(passed[name])}", flush=True)
            record = {"diffusers": diffusers.__version__, "passed": dict(sorted(passed.items()))}
            write_atomically(TRIED, json.dumps(record, indent=1) + "\n")
    before, _, after = on_page()
    write_atomically(PAGE, before + table() + after)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
