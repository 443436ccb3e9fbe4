"""VideoReward trained on votes on videos, with small networks in the files of the published one."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from PIL import Image
from typer.testing import CliRunner

from flowalign.algorithms.matching.files import opened
from flowalign.app.cli.rewards import train_reward
from flowalign.data import Preferences
from flowalign.errors import ConfigError
from flowalign.reward_training.scorer import split
from flowalign.reward_training.video import VideoScorer, files_of
from flowalign.runs.samples import save_picture
from rewards import score
from rewards.video_reward import VideoReward
from tests.rewards.published import video_reward

app = typer.Typer()
app.command()(train_reward)


@pytest.fixture(scope="module")
def votes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A rater who likes the darker of two videos, which are saved as a run saves them."""
    folder, rng = tmp_path_factory.mktemp("votes"), np.random.default_rng(0)
    with open(folder / "votes.jsonl", "w") as lines:
        for i in range(6):
            record = {"prompt": f"number {i}", "rater": "Ada"}
            for name, level in (("chosen", 40), ("rejected", 200)):
                frames = (level + rng.integers(-40, 40, (4, 32, 32, 3))).astype(np.uint8)
                video = [Image.fromarray(frame) for frame in frames]
                record[name] = save_picture(video, folder / f"{name}{i}", "png", lossless=True).name
            lines.write(json.dumps(record) + "\n")
    return folder / "votes.jsonl"


@pytest.mark.slow
def test_votes_on_videos_train_a_reward_that_loads_as_the_published_one(votes: Path, tmp_path: Path) -> None:
    base, out = str(video_reward(tmp_path / "before")), tmp_path / "after"
    options = ["--learning-rate", "3e-3", "--epochs", "2", "--batch-size", "2", "--min-pairs", "6"]
    done = CliRunner().invoke(
        app, [str(votes), "--model", str(tmp_path / "before"), "--processor", base, "--out", str(out), *options]
    )
    assert done.exit_code == 0, done.output
    assert "name: video_reward, weights: " in " ".join(done.output.split())
    report = json.loads((out / "reward.json").read_text())
    assert report["heldout_accuracy_after"] == 1.0
    _, heldout = split(Preferences.read(str(votes)), 0.1, 0)
    own = {"base": base, "device": "cpu"}
    before, after = (
        [
            score(
                VideoReward(**files_of(folder), **own, dtype="float32"),
                [opened(record[key]) for record in heldout.metadata],
                heldout.texts,
                heldout.metadata,
            ).value
            for key in ("chosen", "rejected")
        ]
        for folder in (tmp_path / "before", out)
    )
    gained = (after[0] - after[1]) - (before[0] - before[1])
    assert (gained > 0).all() and (after[0] > after[1]).all()


def test_margins_are_differences_of_the_rewards_scores(votes: Path, tmp_path: Path) -> None:
    base = str(video_reward(tmp_path))
    pairs = Preferences.read(str(votes)).take(range(3))
    settings = {"device": "cpu", "dtype": "float32"}
    with torch.no_grad():
        margins = VideoScorer(files_of(tmp_path), base, **settings).margins(pairs, [2, 0])[0]
    reward = VideoReward(**files_of(tmp_path), base=base, **settings)
    sides = [
        score(reward, [opened(record[key]) for record in pairs.metadata], pairs.texts, [{}] * 3).value
        for key in ("chosen", "rejected")
    ]
    torch.testing.assert_close(margins, (sides[0] - sides[1])[[2, 0]], atol=1e-5, rtol=0)
    Image.new("RGB", (32, 32)).save(tmp_path / "picture.png")
    with pytest.raises(ConfigError, match="picture.png: VideoReward is trained on videos"):
        VideoScorer(files_of(tmp_path), base, **settings).film(str(tmp_path / "picture.png"))
