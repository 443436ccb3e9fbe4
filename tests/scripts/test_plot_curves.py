"""scripts/plot_curves.py: runs' held-out scores over training, from their files."""

import importlib.util
import json
from pathlib import Path

import pytest
from PIL import Image

from flowalign.errors import FlowalignError

SCRIPT = Path(__file__).parents[2] / "scripts" / "plot_curves.py"
SPEC = importlib.util.spec_from_file_location("plot_curves", SCRIPT)
assert SPEC is not None and SPEC.loader is not None
script = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(script)


def write_run(folder: Path, strict: list[list[float]]) -> Path:
    """A run of two iterations of 100 forwards, evaluated before and after on two prompts of two samples each."""
    (folder / "scores").mkdir(parents=True)
    metrics = [{"iteration": i, "forwards": 100 * (i + 1), "reward_calls": 10 * (i + 1)} for i in range(2)]
    for name, lines in (("metrics", metrics), ("evaluations", [{"iteration": 0}, {"iteration": 2}])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for iteration, scores in zip((0, 2), strict, strict=True):
        samples = [
            {"prompt": "ab"[i // 2], "seed": i, "metadata": {}, "reward": score, "parts": {"strict": score}}
            for i, score in enumerate(scores)
        ]
        file = folder / "scores" / f"iteration-{iteration:06d}.jsonl"
        file.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return folder


def test_a_curve_is_the_mean_over_seeds_with_the_error_of_the_prompts(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / "run-0", [[0, 0, 1, 0], [1, 1, 1, 1]]),
        write_run(tmp_path / "run-1", [[0, 0, 1, 0], [1, 0, 0, 0]]),
    ]
    runs = [script.read(folder, "strict") for folder in folders]
    assert runs[1].spent == {"iteration": [0, 2], "forwards": [0, 200], "reward_calls": [0, 20]}
    before, after = script.pooled(runs)
    # prompt a has 0 of 4 before and 3 of 4 after, prompt b 2 of 4 and 2 of 4: errors are half the differences
    assert (before.mean, before.error) == (0.25, 0.25)
    assert (after.mean, after.error) == (0.625, 0.125)
    assert script.table({"method": runs}).splitlines()[1] == "method | 0: 25 2: 25 | 200 forwards, 20 scored"
    script.plot({"method": runs, "one": runs[:1]}, ["forwards", "reward_calls"], "strict", tmp_path / "curves.png")
    assert Image.open(tmp_path / "curves.png").width > 800


def test_what_was_not_scored_so_is_refused(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [[0, 0, 1, 0], [1, 1, 1, 1]])
    with pytest.raises(FlowalignError, match="no score 'soft' there; it has strict"):
        script.read(folder, "soft")
    with pytest.raises(FlowalignError, match="no evaluations there"):
        script.read(tmp_path, "strict")
