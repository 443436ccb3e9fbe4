"""`flowalign forecast`: a curve that is written into a stored run."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from flowalign.app.cli.main import main


def forecast(*words: str | Path) -> int:
    with pytest.raises(SystemExit) as left:
        main(["forecast", *map(str, words)])
    return int(left.value.code or 0)


def test_where_a_run_goes(trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Path(shutil.copytree(trained_run, tmp_path / "run"))
    rng = np.random.default_rng(0)
    scores = [(t, 0.9 - 0.4 * float(np.exp(-t / 60)) + 0.005 * rng.normal()) for t in range(0, 180, 20)]
    (run / "evaluations.jsonl").write_text("".join(f'{{"iteration": {t}, "all/reward": {v}}}\n' for t, v in scores))
    path = tmp_path / "forecast.json"
    assert forecast(run, "--target", "0.8", "--iterations", "320", "--most", "1", "--json", path) == 0
    printed, record = capsys.readouterr().out, json.loads(path.read_text())
    assert record["end"]["low"] < 0.9 < record["end"]["high"] and record["target"]["mean"] == pytest.approx(83, abs=15)
    assert "plateau: 0.9" in printed and "318 more iterations of " in printed and record["hours"] > 0
    # two evaluations, and two iterations
    assert forecast(trained_run) == 0 and forecast(trained_run, "--training") == 0
    assert capsys.readouterr().out.count("cannot tell: 6 points") == 2
    assert forecast(trained_run, "--score", "beauty") == 2 and "--score: " in capsys.readouterr().err
    assert forecast(tmp_path) == 2 and forecast(run, "--target", "nan") == 2
