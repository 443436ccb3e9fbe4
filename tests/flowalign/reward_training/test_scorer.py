"""A reward trained on preferences."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from PIL import Image, ImageEnhance
from typer.testing import CliRunner

from flowalign.app.cli.rewards import train_reward
from flowalign.data import ASSETS, Preferences
from flowalign.errors import ConfigError, FlowalignError
from flowalign.reward_training.scorer import ClipScorer, split
from rewards import score
from rewards.clip import PickScore
from rewards.shapes import draw, heldout_requests, sample_requests
from rewards.shapes.clip import TINY_CLIP

app = typer.Typer()
app.command()(train_reward)
TINY = str(TINY_CLIP)


@pytest.fixture(scope="module")
def votes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A rater who likes the darker of two drawings of a prompt."""
    folder, rng = tmp_path_factory.mktemp("votes"), np.random.default_rng(0)
    with open(folder / "votes.jsonl", "w") as lines:
        for i, request in enumerate(sample_requests(heldout_requests(), 120, rng)):
            record = {"prompt": request.prompt, "rater": "Ada"}
            for name, brightness in (("chosen", 0.7), ("rejected", 1.0)):
                picture = Image.fromarray(draw(request, rng))
                record[name] = f"{name}{i}.png"
                ImageEnhance.Brightness(picture).enhance(brightness).save(folder / record[name])
            lines.write(json.dumps(record) + "\n")
    return folder / "votes.jsonl"


def test_margins_are_differences_of_the_rewards_scores(votes: Path) -> None:
    pairs = Preferences.read(str(votes)).take(range(6))
    with torch.no_grad():
        margins = ClipScorer(TINY, device="cpu").margins(pairs, [3, 0, 5])[0]
    reward = PickScore(TINY, processor=None, device="cpu")
    sides = [
        score(reward, [Image.open(record[key]) for record in pairs.metadata], pairs.texts, [{}] * 6).value
        for key in ("chosen", "rejected")
    ]
    torch.testing.assert_close(margins, (sides[0] - sides[1])[[3, 0, 5]], atol=1e-3, rtol=0)


def test_training_raises_the_accuracy_on_heldout_prompts_and_pick_score_loads_the_result(
    votes: Path, tmp_path: Path
) -> None:
    out = tmp_path / "made" / "reward"
    settings = ["--learning-rate", "3e-4", "--epochs", "4", "--batch-size", "16"]
    done = CliRunner().invoke(app, [str(votes), "--model", "tiny_clip", "--out", str(out), *settings])
    assert done.exit_code == 0, done.output
    report = json.loads((out / "reward.json").read_text())
    assert report["pairs"] + report["heldout_pairs"] == 120
    assert report["heldout_accuracy_before"] < 0.7 and report["heldout_accuracy_after"] > 0.9
    _, heldout = split(Preferences.read(str(votes)), 0.1, 0)
    reward = PickScore(str(out), processor=None, device="cpu")
    sides = [
        score(reward, [Image.open(r[key]) for r in heldout.metadata], heldout.texts, heldout.metadata).value
        for key in ("chosen", "rejected")
    ]
    assert (sides[0] > sides[1]).float().mean().item() == pytest.approx(report["heldout_accuracy_after"])
    assert [path.name for path in out.parent.iterdir()] == ["reward"]


def test_no_prompt_is_on_both_sides_of_the_split(votes: Path) -> None:
    pairs = Preferences.read(str(votes))
    train, test = split(pairs, 0.1, 0)
    assert not set(train.texts) & set(test.texts) and len(train) + len(test) == len(pairs)
    one = pairs.take([0, 0])
    with pytest.raises(ConfigError, match="one prompt"):
        split(one, 0.1, 0)


def test_mistakes_are_one_line(votes: Path, tmp_path: Path) -> None:
    def error(*arguments: str, kind: type[FlowalignError] = ConfigError) -> str:
        done = CliRunner().invoke(app, list(arguments))
        assert isinstance(done.exception, kind)
        return str(done.exception)

    (tmp_path / "there").mkdir()
    new = str(tmp_path / "new")
    assert "no preferences at" in error("nowhere.jsonl", "--out", new)
    assert "is there already" in error(str(votes), "--out", str(tmp_path / "there"))
    assert "no model to train at 'no/such'" in error(str(votes), "--out", new, "--model", "no/such")
    wild = [str(votes), "--out", new, "--model", "tiny_clip", "--learning-rate", "1e30"]
    assert "not finite" in error(*wild, "--batch-size", "64", kind=FlowalignError)
    assert "dual encoder" in error(str(votes), "--out", new, "--model", str(ASSETS / "tiny_sd3" / "text_encoder"),
                                   "--processor", TINY)  # fmt: skip
