"""What can be known of the Dockerfile without Docker: its stages, what it copies, and how the process is started."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINES = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text()).splitlines()
STEPS = [tuple(line.split(maxsplit=1)) for line in LINES if line and not line.startswith("#")]


def values(instruction: str) -> list[str]:
    return [value for name, value in STEPS if name == instruction]


def test_each_base_that_can_be_asked_for_is_a_stage() -> None:
    assert values("ARG") == ["BASE=cuda"]
    stages = [value.split(" AS ")[1] for value in values("FROM")]
    assert stages == ["base-cuda", "base-cpu", "flowalign"]
    assert values("FROM")[-1].startswith("base-${BASE} ")
    assert {name for name, _ in STEPS} <= set("ARG FROM ENV RUN WORKDIR COPY ENTRYPOINT CMD".split())


def test_what_it_copies_is_there_and_is_what_the_package_is_made_of() -> None:
    copied = [source for value in values("COPY") for source in value.split()[:-1]]
    assert all((ROOT / source).exists() for source in copied)
    assert {"samplers", "rewards", "flowalign", "configs", "pyproject.toml", "constraints.txt"} <= set(copied)
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert not set(copied) & set(ignored) and ".venv" in ignored


def test_signals_reach_the_run_itself() -> None:
    # a shell before it would keep SIGTERM to itself, and no checkpoint would be saved
    assert json.loads(values("ENTRYPOINT")[0]) == ["flowalign"]
    assert json.loads(values("CMD")[0]) == ["--help"]
