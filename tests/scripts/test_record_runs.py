"""A recording of a run is the same when it is made again, and a number that changed is named."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from rewards.usage import usage_of

SCRIPT = Path(__file__).parents[2] / "scripts" / "record_runs.py"


def test_a_change_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    spec = importlib.util.spec_from_file_location("record_runs", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    monkeypatch.setattr(sys, "argv", ["record_runs.py", str(before), "--only", "grpo"])
    assert script.main() == 0
    monkeypatch.setattr(sys, "argv", ["record_runs.py", str(after), "--only", "grpo", "--against", str(before)])
    # a judge that somebody else in this process asked is no part of the run
    usage_of("another").add(requests=3)
    assert script.main() == 0 and "1 runs recorded, all as before" in capsys.readouterr().out
    changed = json.loads(before.read_text())
    changed["grpo"]["metrics"][1]["reward/mean"] += 1e-9
    changed["grpo"]["weights"] = "0"
    before.write_text(json.dumps(changed))
    assert script.main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[0] == "grpo, iteration 1: reward/mean " + lines[0].rpartition("mean ")[2] and lines[1] == "grpo: weights"
    )
