"""scripts/plot_overoptimisation.py: a league's runs over time, from their files."""

import importlib.util
import json
from pathlib import Path

import pytest

from flowalign.errors import FlowalignError

SCRIPT = Path(__file__).parents[2] / "scripts" / "plot_overoptimisation.py"
SPEC = importlib.util.spec_from_file_location("plot_overoptimisation", SCRIPT)
assert SPEC is not None and SPEC.loader is not None
script = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(script)


def write_run(folder: Path, judged: list[float], verdicts: list[str]) -> Path:
    """A run of four iterations of 100 forwards, evaluated at 0, 2 and 4; the reward it trains on rises to 0.9."""
    folder.mkdir(parents=True)
    (folder / "league.json").write_text("{}")
    metrics = [{"iteration": i, "forwards": 100 * (i + 1)} for i in range(4)]
    rows = zip((0, 2, 4), (0.5, 0.7, 0.9), judged, verdicts, strict=True)
    lines = [{"iteration": i, "all/trained": own, "all/strict": other, "verdict": said} for i, own, other, said in rows]
    for name, records in (("metrics", metrics), ("evaluations", lines)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_a_row_says_what_became_of_both_rewards(tmp_path: Path) -> None:
    good = [
        script.read(write_run(tmp_path / f"good-seed{i}", [0.5, 0.6, 0.7], ["good"] * 3), "all/strict") for i in (0, 1)
    ]
    falls = [
        script.read(write_run(tmp_path / "falls-seed0", [0.5, 0.4, 0.2], ["good", "suspect", "hacked"]), "all/strict"),
        script.read(write_run(tmp_path / "falls-seed1", [0.5, 0.4, 0.4], ["good", "good", "suspect"]), "all/strict"),
    ]
    head, _, best, worst = script.table({"falls": falls, "good": good}).splitlines()
    assert head.count("|") == best.count("|")
    assert best == "| `good` | 0.500 | 0.700 ± 0.000 | 0.900 ± 0.000 | 0.500 | 0.600 ± 0.000 | 0.700 ± 0.000 |  |"
    assert worst.endswith("0.400 ± 0.000 | 0.300 ± 0.141 | 2 of 2 runs, from 200 forwards on |")
    script.plot({"falls": falls, "good": good}, "all/strict", tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000


def test_a_league_that_was_not_evaluated_so_is_refused(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run-seed0", [0.5, 0.6, 0.7], ["good"] * 3)
    with pytest.raises(FlowalignError, match="no 'all/soft' in its evaluations"):
        script.read(folder, "all/soft")
