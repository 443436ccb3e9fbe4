"""`flowalign compare`: one page of runs against each other."""

import json
import re
import shutil
from pathlib import Path

import pytest
from PIL import Image

from flowalign.app.cli.main import main
from flowalign.app.gallery.comparison import as_yaml
from flowalign.evaluation.scores import Evaluated
from flowalign.runs.samples import save_samples


def command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(["compare", *arguments])
    return int(left.value.code or 0)


@pytest.fixture
def two(trained_run: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A run, and one like it that gets 0.5 more on every sample, with another learning rate."""
    one, other = (Path(shutil.copytree(trained_run, tmp_path / name)) for name in ("one", "other"))
    file = other / "scores/iteration-000002.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(line | {"reward": line["reward"] + 0.5}) + "\n" for line in lines))
    config = (other / "config.yaml").read_text()
    (other / "config.yaml").write_text(config.replace("learning_rate: 0.03", "learning_rate: 0.01"))
    record = {"prompt": "a <b>circle</b>", "seed": 7, "metadata": {}}
    for run, colour, reward in ((one, "red", 0.1), (other, "blue", 0.9)):
        samples = [(Image.new("RGB", (8, 8), colour), record | {"reward": reward})]
        save_samples(run, 2, [*samples, (Image.new("RGB", (8, 8)), record | {"seed": 8, "reward": 0.5})])
    return one, other


def test_the_page_says_what_differs(two: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert command(*map(str, two), "-o", str(out), "--json", str(tmp_path / "out.json")) == 0
    page = (out / "index.html").read_text()
    text = " ".join(re.sub(r"<[^>]+>", " ", page).split())
    # all of 4 prompts gain the same: 2 of 16 patterns of signs make as much of it
    verdict = "No clear difference between other and one: +0.500 [+0.500, +0.500], p = 0.12"
    assert verdict in text and verdict in capsys.readouterr().out
    assert "+0.500 ± 0.000 +0.500 to +0.500 0.12 100%" in text
    assert re.search(r"all reward 0\.\d{3} ± 0\.\d{3} 0\.\d{3} ± 0\.\d{3} \+0\.500", text)
    assert "training.optimizer.learning_rate 0.03 0.01" in text
    assert "8 samples of 4 held-out prompts" in text and page.count("<polyline") >= 4
    # the sample that differs most comes first, and a prompt is text
    assert text.index("seed 7 · +0.800") < text.index("seed 8 · +0.000")
    assert "a &lt;b&gt;circle" in page and "<b>" not in page
    colours = [Image.open(out / name).getpixel((0, 0)) for name in re.findall(r'<img src="(.*?)"', page)][:2]
    assert colours == [(255, 0, 0), (0, 0, 255)]
    assert all((out / name).is_file() for name in re.findall(r'href="(assets/.*?)"', page))
    assert json.loads((tmp_path / "out.json").read_text())["differences"]["other"]["all"]["reward"]["mean"] == 0.5


def test_runs_of_other_prompts_are_sampled_again(
    two: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = two
    file = other / "scores/iteration-000002.jsonl"
    file.write_text("".join(file.read_text().splitlines(True)[:6]))
    assert command(str(one), str(other)) == 2
    assert "--again samples both alike" in capsys.readouterr().err
    assert command(str(one)) == 2 and "takes two runs" in capsys.readouterr().err
    out = tmp_path / "again"
    assert command(str(one), str(other), "--again", "--pictures", "1", "-o", str(out)) == 0
    page = (out / "index.html").read_text()
    # the same weights, so the same samples
    assert "4 samples of 4 held-out prompts" in page and "+0.000 [+0.000, +0.000], p = 1." in page
    names = re.findall(r'<img src="(.*?)"', page)
    assert len(names) == 8 and (out / names[0]).read_bytes() == (out / names[1]).read_bytes()


@pytest.mark.parametrize(
    "own", ["{name: jpeg_size}", "{name: shapes, weight: 2.0}", "{name: shapes, strict_weight: 1.0}"]
)
def test_figures_by_different_rewards_are_not_compared(
    own: str, two: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Both have 'reward' and the pictures' statistics, which say nothing of each other; runs without score cards."""
    one, other = two
    for run in two:
        (run / "scores/iteration-000002.card.json").unlink()
    config = (other / "config.yaml").read_text()
    rewards = re.search(r"^rewards:\n(?:[- ].*\n)+", config, re.MULTILINE)
    assert rewards is not None
    (other / "config.yaml").write_text(config.replace(rewards.group(), f"rewards: [{own}]\n"))
    assert command(str(one), str(other)) == 2
    error = capsys.readouterr().err
    assert re.search(
        r"one and other were .* protocols \(rewards .* against .*\); --again samples and judges all alike", error
    )


def test_figures_of_other_sampling_are_compared_on_request(
    two: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = two
    file = other / "scores/iteration-000002.card.json"
    card = json.loads(file.read_text())
    assert (card["prompts"], card["samples"], card["rewards"][0]["name"]) == (4, 8, "shapes")
    sampling, versions = card["sampling"] | {"guidance": 3.0}, card["versions"] | {"torch": "1.0"}
    file.write_text(json.dumps(card | {"sampling": sampling}))
    words = [str(one), str(other), "-o", str(tmp_path / "out")]
    assert command(*words) == 2 and "card.json has no score card" in capsys.readouterr().err
    result = Evaluated.read(other / "scores/iteration-000002.jsonl")
    file.write_text(json.dumps(result.card(sampling, card["rewards"], versions)))
    assert command(*words) == 2
    told = (
        f"(sampling.guidance 1.0 against 3.0; versions.torch {card['versions']['torch']} against 1.0); --any-sampling"
    )
    assert told in capsys.readouterr().err
    assert command(*words, "--any-sampling") == 0


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "null"), (True, "true"), (0.03, "0.03"), ("a b", "a b"), ([{"name": "shapes"}], "[{name: shapes}]")],
)
def test_settings_are_shown_as_they_are_written(value: object, text: str) -> None:
    assert as_yaml(value) == text
