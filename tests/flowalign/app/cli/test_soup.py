"""`flowalign soup`: of a run with itself every mixture is the run."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from flowalign.app.cli.main import main


def soup(*words: str | Path) -> int:
    with pytest.raises(SystemExit) as left:
        main(["soup", *map(str, words)])
    return int(left.value.code or 0)


def test_mixtures_are_scored_and_one_is_written(
    trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, path, out = tmp_path / "other", tmp_path / "soup.json", tmp_path / "lora"
    shutil.copytree(trained_run, other)
    assert soup(trained_run, other, "--steps", "2", "--pictures", "1", "--json", path) == 0
    mixtures = json.loads(path.read_text())["mixtures"]
    assert [mixture["shares"] for mixture in mixtures] == [[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]]
    cards = json.loads(path.read_text())["cards"]
    assert list(cards) == ["1, 0", "0.5, 0.5", "0, 1"] and len({card["sha256"] for card in cards.values()}) == 1
    assert len(cards["1, 0"]["rewards"]) == 2
    means = [reward["mean"] for mixture in mixtures for reward in mixture["rewards"]]
    assert len(means) == 6 and max(means) - min(means) < 1e-4
    assert soup(trained_run, other, "--shares", "0.5,0.5", "--out", out) == 0
    assert (out / "pytorch_lora_weights.safetensors").is_file()
    assert f"lora: {out}" in capsys.readouterr().out
    assert soup(trained_run, other, "--shares", "0.5,0.5", "--out", out) == 2
    assert "is there already" in capsys.readouterr().err


def test_what_cannot_be_mixed(trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = Path(shutil.copytree(trained_run, tmp_path / "other"))
    for words, message in (
        ([trained_run], "two runs or more"),
        ([trained_run, other, "--shares", "1", "--out", tmp_path / "out"], "give 2 numbers"),
        ([trained_run, other, "--shares", "1,1"], "--shares and --out go together"),
    ):
        assert soup(*words) == 2
        assert message in capsys.readouterr().err
    file = other / "config.yaml"
    config = yaml.safe_load(file.read_text())
    config["evaluation"]["guidance"] = 3.0
    file.write_text(yaml.safe_dump(config))
    assert soup(trained_run, other) == 2
    refused = capsys.readouterr().err
    assert "sampling.guidance" in refused and "--any-sampling" in refused
    shutil.rmtree(other / "lora")
    assert soup(trained_run, other) == 2 and "has no LoRA" in capsys.readouterr().err
