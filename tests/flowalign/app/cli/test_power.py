"""`flowalign power`: seeds and pictures that a difference takes, from the scores of stored runs."""

import json
import shutil
from pathlib import Path

import pytest

from flowalign.app.cli.main import main
from flowalign.evaluation.power import detectable


@pytest.fixture
def three(trained_run: Path, tmp_path: Path) -> list[Path]:
    """A run, and two like it with other seeds whose samples score otherwise."""
    runs = []
    for seed, shift in enumerate((0.0, 0.1, -0.1)):
        runs.append(Path(shutil.copytree(trained_run, tmp_path / str(seed))))
        config = (runs[-1] / "config.yaml").read_text()
        (runs[-1] / "config.yaml").write_text(config.replace("\n  seed: 0", f"\n  seed: {seed}"))
        file = runs[-1] / "scores/iteration-000002.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        file.write_text("".join(json.dumps(line | {"reward": line["reward"] + shift}) + "\n" for line in lines))
    return runs


def power(*words: str | Path) -> int:
    with pytest.raises(SystemExit) as left:
        main(["power", *map(str, words)])
    return int(left.value.code or 0)


def test_the_command_says_how_many_seeds(three: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "power.json"
    assert power(*three, "--difference", "0.5", "--json", path) == 0
    record, printed = json.loads(path.read_text()), capsys.readouterr().out
    assert record["spread"]["measured"]["mean"] == pytest.approx(0.1)
    assert record["seeds"]["seeds"] == 3 and record["seeds"]["high"] > 3
    assert record["detectable"]["3"] == pytest.approx(detectable(0.1, 3))
    assert "standard deviation from seed to seed: 0.100 (95% interval 0.052 to 0.628)" in printed
    assert "a difference of 0.5 takes 3 seeds of each recipe (2 to" in printed
    assert set(record["pictures"]) == {"2", "3", "5"} and "with 3 seeds of each recipe: " in printed


def test_runs_that_differ_in_more_than_the_seed(three: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert power(three[0]) == 2 and power(three[0], three[0]) == 2
    assert "each once" in capsys.readouterr().err
    assert power(*three, "--score", "beauty") == 2 and "--score beauty:" in capsys.readouterr().err
    config = (three[1] / "config.yaml").read_text()
    (three[1] / "config.yaml").write_text(config.replace("learning_rate: 0.03", "learning_rate: 0.01"))
    assert power(*three) == 2 and "in more than the seed (training)" in capsys.readouterr().err
    (three[1] / "config.yaml").write_text(config.replace("\n  seed: 1", "\n  seed: 0"))
    assert power(*three) == 2 and "have one seed" in capsys.readouterr().err
