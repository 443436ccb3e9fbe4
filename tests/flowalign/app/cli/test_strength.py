"""`flowalign strength`: its ends are what `flowalign eval --base` measures."""

import json
from pathlib import Path

import pytest
from PIL import Image

from flowalign.app.cli.main import main
from flowalign.app.gallery import build
from tests.flowalign.app.gallery.test_build import page_data


def command(*words: str | Path) -> int:
    with pytest.raises(SystemExit) as left:
        main([*map(str, words)])
    return int(left.value.code or 0)


def test_the_ends_are_the_base_and_the_run(
    trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    curve, scores, film = tmp_path / "curve.json", tmp_path / "scores.json", tmp_path / "film.png"
    words = ["strength", trained_run, "--strengths", "1,0,1.5", "--pictures", "1", "--panel", "tiny_clip"]
    slider = tmp_path / "slider"
    assert command(*words, "--json", curve, "--film", film, "--slider", slider) == 0
    printed = capsys.readouterr().out
    assert command("eval", trained_run, "--base", "--pictures", "1", "--panel", "tiny_clip", "--json", scores) == 0
    record, means = json.loads(curve.read_text()), json.loads(scores.read_text())["means"]
    # every strength is measured by the protocol that eval measures by
    cards = [*record["cards"].values(), *json.loads(scores.read_text())["cards"].values()]
    assert len(cards) == 5 and len({card["sha256"] for card in cards}) == 1
    assert f"score card: {cards[0]['sha256'][:12]}" in printed and "not by one protocol" not in printed
    rows = {row["strength"]: row for row in record["strengths"]}
    assert list(rows) == [0.0, 1.0, 1.5]
    for factor, label in ((0.0, "base"), (1.0, trained_run.name)):
        for name in ("reward", "strict", "panel/tiny_clip"):
            assert rows[factor][name]["mean"] == pytest.approx(means[label]["all"][name]["mean"], abs=1e-5)
    assert f"highest reward at strength {record['best']:g}" in printed
    assert Image.open(film).width > 3 * 192
    (shown,) = page_data(build([slider], tmp_path / "out"))["sliders"]
    assert shown["title"] == "LoRA strength" and [position["label"] for position in shown["positions"]] == [
        "0",
        "1",
        "1.5",
    ]
    for row, position in zip(record["strengths"], shown["positions"], strict=True):
        mean, low, high = position["figures"]["panel/tiny_clip"]
        assert mean == pytest.approx(row["panel/tiny_clip"]["mean"], abs=1e-5) and low < mean < high
        assert position["figures"]["strict"][0] == pytest.approx(row["strict"]["mean"], abs=1e-5)
        assert all((tmp_path / "out/pictures" / name).is_file() for name in position["pictures"])
    assert command(*words, "--slider", trained_run) == 2 and "name a new folder" in capsys.readouterr().err


@pytest.mark.parametrize("strengths", ["1", "0,one", "0,inf"])
def test_strengths_are_two_numbers(trained_run: Path, strengths: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("strength", trained_run, "--strengths", strengths) == 2
    assert "give two numbers or more" in capsys.readouterr().err
