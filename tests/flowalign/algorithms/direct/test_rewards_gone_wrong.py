"""What the direct methods say of rewards without a usable gradient."""

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flowalign.errors import FlowalignError
from rewards import Latents, RewardError, Scores, Spec, WeightedSum
from rewards.frames import PerFrame
from rewards.gradients import score_with_gradient
from rewards.routed import Routed
from tests.flowalign.small_run import small_run


class Odd:
    """A reward of one's own that may go wrong in `score_pixels`."""

    name = "odd"
    spec = Spec(frozenset({"image"}), differentiable=True)

    def __init__(self, wrong: str) -> None:
        self.wrong = wrong

    def __call__(self, samples, prompts, metadata) -> Scores:
        return Scores(torch.zeros(len(samples)))

    def score_pixels(self, pixels: Tensor, prompts, metadata) -> Scores:
        value = pixels.flatten(1).mean(1)
        other = torch.zeros(len(pixels), requires_grad=True)
        wrong = {
            "detached": value.detach(),
            "cut off": value.detach() + other,
            "too few": value[:-1],
            "a scalar": value.mean(),
            "texts": ["good"] * len(value),
            "not finite": value / 0,
            "right": value,
        }
        if self.wrong == "a tensor":
            return value  # type: ignore[return-value]
        if self.wrong == "steep":
            # finite, of an infinite gradient
            return Scores(value + (pixels - pixels.detach()).sum().sqrt())
        return Scores(wrong[self.wrong])


WRONG = {
    "detached": "has no gradient to the pixels",
    "cut off": "has no gradient to the pixels",
    "too few": "returned 1 values for 2 samples",
    "a scalar": r"must be \[2\]",
    "texts": "returned no numbers",
    "not finite": "returned inf for the prompt 'a'",
    "a tensor": "must return rewards.Scores",
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_score_pixels_returns_is_checked(wrong: str) -> None:
    """By itself and as a part of another reward, whose other parts may have gradients."""
    pixels = torch.rand(2, 3, 4, 4, requires_grad=True)
    parts = [Odd("right"), Odd(wrong)]
    routed = Routed("kind", {"a": parts[0], "b": parts[1]})
    for reward in (Odd(wrong), WeightedSum(parts, [1.0, 1.0]), routed):
        with pytest.raises(RewardError, match=WRONG[wrong] if reward is not routed else "reward 'odd'"):
            score_with_gradient(reward, pixels, ["a", "b"], [{"kind": "a"}, {"kind": "b"}])
    with pytest.raises(RewardError, match="reward 'odd'"):
        score_with_gradient(PerFrame(Odd(wrong), frames=1), pixels[:, :, None], ["a", "b"], [{}, {}])


def test_a_gradient_to_latents_is_asked_for_too() -> None:
    class OfLatents:
        name = "of latents"
        spec = Spec(frozenset({"latents"}), differentiable=True)

        def score_latents(self, latents, prompts, metadata) -> Scores:
            return Scores(latents.values.flatten(1).mean(1).detach())

    with pytest.raises(RewardError, match="no gradient to the latents"):
        score_with_gradient(OfLatents(), Latents(torch.rand(2, 4, 2, 2, requires_grad=True), ("vae",)), ["", ""], [])


@pytest.mark.parametrize("name", ["draft", "adjoint_matching"])
def test_a_run_whose_updates_were_all_skipped_says_so(name: str, tmp_path: Path, caplog) -> None:
    """Instead of a KeyError of the headline; its weights stay as they were."""
    run = small_run(f"tiny_sd3/{name}", tmp_path, "training.iterations=2", "training.previews=0", reward=Odd("steep"))
    start = [parameter.clone() for parameter in run.policy.trainable().values()]
    with caplog.at_level(logging.WARNING), pytest.raises(FlowalignError, match="nothing was learned: all 2 updates"):
        run.train()
    assert "an update was skipped" in caplog.text
    assert [each["policy/skipped_updates"] for each in run.metrics.read()] == [1, 1]
    assert all(torch.equal(a, b) for a, b in zip(start, run.policy.trainable().values(), strict=True))
