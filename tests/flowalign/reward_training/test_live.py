"""The reward that learns people's votes while they are given."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from flowalign.data.votes import Pair, Votes
from flowalign.errors import ConfigError
from flowalign.registry import build
from flowalign.reward_training.live import LiveVotes
from rewards.shapes.clip import TinyCLIP

PROMPT = "a red circle"


def picture(seed: int, blue: bool) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 120, (32, 32, 3), dtype=np.uint8)
    pixels[..., 2 if blue else 0] += 130
    return Image.fromarray(pixels)


@pytest.fixture
def vote(tmp_path: Path) -> Callable[[int, str], None]:
    """Votes on pair n: a red and a blue picture."""
    votes = Votes(tmp_path / "votes.sqlite")

    def vote(number: int, verdict: str) -> None:
        files = [tmp_path / f"{number}-{name}.png" for name in ("red", "blue")]
        for file, blue in zip(files, (False, True), strict=True):
            picture(2 * number + blue, blue).save(file)
        votes.add("Ada", Pair(str(number), PROMPT, "0", *files), verdict)

    return vote


def reward(tmp_path: Path, **settings: float) -> LiveVotes:
    made = build(
        "rewards", "votes", {"votes": str(tmp_path / "votes.sqlite"), "model": "tiny_clip", **settings}, "rewards"
    )
    assert isinstance(made, LiveVotes)
    return made


def corrections(made: LiveVotes, count: int = 8) -> torch.Tensor:
    """[2, count] what votes add to the model's values of new pictures, red and blue ones."""
    pictures = [picture(1000 + n, n >= count) for n in range(2 * count)]
    scores = made(pictures, [PROMPT] * len(pictures), [{}] * len(pictures))
    return (scores.value - scores.parts["model"]).view(2, -1)


def test_without_votes_it_is_the_model_and_with_some_it_prefers_as_people_do(tmp_path: Path, vote) -> None:
    made, pictures = reward(tmp_path), [picture(0, True), picture(1, False)]
    made.advance(0.0)
    scores = made(pictures, [PROMPT] * 2, [{}] * 2)
    torch.testing.assert_close(scores.value, TinyCLIP()(pictures, [PROMPT] * 2, [{}] * 2).value)
    assert scores.parts["choices"].eq(0).all() and scores.parts["foreseen"].isnan().all()
    for number in range(6):
        vote(number, "second")
    assert corrections(made).eq(0).all(), "votes count from the next iteration on"
    made.advance(0.1)
    red, blue = corrections(made)
    few = float((blue - red).mean())
    assert blue.min() > red.max()
    foreseen = float(made(pictures, [PROMPT] * 2, [{}] * 2).parts["foreseen"][0])
    # a circle that is not even red: the model alone did not expect it
    assert foreseen == 0
    for number in range(6, 30):
        vote(number, "second")
    vote(30, "tie")
    vote(31, "skip")
    made.advance(0.2)
    red, blue = corrections(made)
    assert (blue - red).mean() > few, "more of the same votes say it louder"
    assert made(pictures, [PROMPT] * 2, [{}] * 2).parts["choices"].eq(31).all()
    Votes(tmp_path / "votes.sqlite").undo("Ada", map(str, range(31)))
    made.advance(0.3)
    assert len(made.learned) == 30


def test_it_is_the_most_probable_function_under_its_prior(tmp_path: Path, vote) -> None:
    for number, verdict in enumerate(["second", "first", "second", "tie", "second"]):
        vote(number, verdict)
    made = reward(tmp_path, prior=2.0)
    made.advance(0.0)
    x = torch.stack([made._difference(own) for own in made.learned])
    y = torch.tensor([1.0, 0.0, 1.0, 0.5, 1.0])
    weight = 2.0 * x.square().sum(1).mean()
    w = made.correction.clone().requires_grad_()
    logit = made._model(x) + x @ w
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logit, y, reduction="sum") + weight / 2 * w @ w
    (gradient,) = torch.autograd.grad(loss, w)
    assert gradient.norm() < 1e-4 * (x.T @ (y - 0.5)).norm()
    # values differ by the log-odds
    pictures = [Image.open(file) for _, *files, _ in made.learned for file in files]
    value = made(pictures, [PROMPT] * len(pictures), [{}] * len(pictures)).value
    torch.testing.assert_close(value.view(-1, 2).diff().squeeze(1), logit.detach(), atol=1e-4, rtol=1e-4)


def test_what_is_not_there_is_left_out_and_gradients_flow(tmp_path: Path, vote) -> None:
    made = reward(tmp_path)
    pixels = torch.rand(2, 3, 32, 32, requires_grad=True)
    vote(0, "second")
    vote(1, "second")
    (tmp_path / "1-red.png").unlink()
    made.advance(0.0)
    assert len(made.learned) == 1
    made.score_pixels(pixels, [PROMPT] * 2, [{}] * 2).value.sum().backward()
    assert pixels.grad.norm() > 0
    with pytest.raises(ConfigError, match="prior 0 must be above 0"):
        reward(tmp_path, prior=0)
