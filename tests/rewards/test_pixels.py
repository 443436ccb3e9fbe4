"""Every differentiable reward is worth of pixels what it is of their picture, to what 8 bits round off."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from flowalign import registry
from rewards import Spec, score
from rewards.clip import CLIPImage, CLIPScore, GoalBaseline, LambdaHarmonic
from rewards.compose import (
    Agreement,
    Gate,
    JudgedBy,
    MeanMinusSpread,
    Normalized,
    Product,
    Rescaled,
    ScheduledSum,
    WeightedSum,
    WorstCase,
)
from rewards.frames import PerFrame
from rewards.judges import JudgeReward, Local
from rewards.learned_sum import LearnedSum
from rewards.references import BoundedCentred, LogSigmoidSum
from rewards.routed import Routed
from rewards.shapes import draw, parse
from rewards.shapes.clip import TINY_CLIP, TinyCLIP
from rewards.shapes.mass import ShapesMass
from rewards.transport import PISCES

PROMPTS = ["a red circle", "two blue squares", "two blue squares"]
CLIP = str(TINY_CLIP)
MADE: dict[str, Callable[[], object]] = {
    "tiny_clip": TinyCLIP,
    "shapes_mass": ShapesMass,
    "pisces": lambda: PISCES(CLIP),
    "clip_score": lambda: CLIPScore(CLIP),
    "goal_baseline": lambda: GoalBaseline(model=CLIP),
    "clip_i": lambda: CLIPImage(CLIP),
    "lambda_harmonic": lambda: LambdaHarmonic(model=CLIP),
    "vlm_judge": lambda: JudgeReward("reward_dance_reference", Local("tiny_vlm")),
    "weighted_sum": lambda: WeightedSum([TinyCLIP(), ShapesMass()], [0.1, 2.0]),
    "normalized": lambda: Normalized([TinyCLIP(), ShapesMass()], over="batch"),
    "product": lambda: Product([TinyCLIP(), ShapesMass()]),
    "worst_case": lambda: WorstCase([TinyCLIP(), ShapesMass()]),
    "mean_minus_spread": lambda: MeanMinusSpread([TinyCLIP(), ShapesMass()]),
    "agreement": lambda: Agreement(TinyCLIP()),
    "bounded_centred": lambda: BoundedCentred(TinyCLIP(), reference=20.0, scale=5.0),
    "log_sigmoid": lambda: LogSigmoidSum([TinyCLIP(), ShapesMass()], scales=[5.0, 1.0], reference=1.0),
    "routed": lambda: Routed("task", {}, otherwise=TinyCLIP()),
    "gate": lambda: Gate(ShapesMass(), TinyCLIP(), threshold=0.0),
    "rescaled": lambda: Rescaled(TinyCLIP(), 0, 40),
    "judged_by": lambda: JudgedBy(TinyCLIP(), "means"),
    "learned_sum": lambda: LearnedSum(TinyCLIP(), [ShapesMass()]),
    "scheduled": lambda: ScheduledSum([TinyCLIP(), ShapesMass()], [[(0, 1)], [(0, 3)]]),
}
"""small ones of each name; per_frame takes videos and has a test below"""
PUBLISHED = {"pick_score", "hpsv2", "hpsv3", "hpsv3_plus", "edit_reward", "aesthetic", "aesthetic_v25", "image_reward"}
PUBLISHED |= {"clip_t5", "q_align", "deqa"}
"""the same test, on their authors' networks, in test_originals.py"""
TEXTS = ("rewards.text", "rewards.judges.steps", "flowalign")
"""beginnings of the modules of rewards of texts, and of those that training brings"""
ELSEWHERE = {"per_frame", "video_reward", "dina", "calibrated"}
"""below, in test_video_reward.py and in test_latent.py; the last one's value is a count, and it says so"""


def check_pixels(reward: object, pixels: Tensor, prompts: list[str], metadata: list[dict]) -> None:
    """Compare pixels [B, 3, H, W] with the pictures that they are rounded to.

    Rounding moves each number by a uniform error of variance (1 / 255)^2 / 12, and so the value, to first order, by
    one of the gradient's norm times its deviation.
    """
    pixels = pixels.clone().requires_grad_()
    mine = reward.score_pixels(pixels, prompts, metadata).value
    rounded = (pixels.detach() * 255).round().byte().permute(0, 2, 3, 1).numpy()
    theirs = score(reward, [Image.fromarray(row) for row in rounded], prompts, metadata).value
    for value, other in zip(mine, theirs, strict=True):
        [gradient] = torch.autograd.grad(value, pixels, retain_graph=True)
        assert gradient.any()
        assert abs(value.detach() - other) <= 6 * gradient.norm() / 255 / 12**0.5 + 2e-5 * abs(other)


def drawn(prompts: list[str]) -> Tensor:
    """[B, 3, 32, 32] drawings of prompts under noise of no whole number of levels."""
    rng = np.random.default_rng(0)
    pictures = torch.tensor(np.stack([draw(parse(text), rng) for text in prompts])).permute(0, 3, 1, 2) / 255
    return (pictures + 0.05 * torch.randn_like(pictures)).clamp(0, 1)


@pytest.mark.parametrize("name", MADE)
def test_pixels_are_worth_their_picture(name: str) -> None:
    references = [Image.fromarray(draw(parse(text), np.random.default_rng(1))) for text in PROMPTS]
    metadata = [{"reference": picture, "means": PROMPTS[0]} for picture in references]
    check_pixels(MADE[name](), drawn(PROMPTS), PROMPTS, metadata)


def test_videos_are_worth_their_frames() -> None:
    reward, video = PerFrame(TinyCLIP(), frames=2, attenuation=0.5), drawn([PROMPTS[0]] * 3).transpose(0, 1)[None]
    frames = (video[0].transpose(0, 1) * 255).round().byte().permute(0, 2, 3, 1).numpy()
    theirs = score(reward, [[Image.fromarray(frame) for frame in frames]], PROMPTS[:1], [{}]).value
    torch.testing.assert_close(reward.score_pixels(video, PROMPTS[:1], [{}]).value, theirs, atol=0.05, rtol=0)


def test_no_differentiable_reward_is_left_out() -> None:
    known = set(MADE) | PUBLISHED | ELSEWHERE
    for name, path in registry.names("rewards").items():
        # of texts, of steps of texts, of pictures that are drawn from texts, or by a judge's written answer
        if name in known or name in ("text_judge", "vlm_regions") or path.startswith(TEXTS):
            continue
        kind = registry.resolve("rewards", name)
        spec = getattr(kind, "spec", Spec())
        # a property: it depends on parts or settings
        may = hasattr(kind, "score_pixels") and (isinstance(spec, property) or spec.differentiable)
        assert not may, f"{name} needs a line in MADE"


def test_a_judges_gradient_is_that_of_its_probability() -> None:
    """By central differences along a random direction, of one question and of a comparison in both orders."""
    pixels, direction = drawn(PROMPTS), torch.randn(3, 3, 32, 32)
    metadata = [{"reference": Image.fromarray(draw(parse("one green triangle"), np.random.default_rng(2)))}] * 3
    for template in ("shapes_show", "reward_dance_reference"):
        reward = JudgeReward(template, Local("tiny_vlm"))
        value = reward.score_pixels(pixels.requires_grad_(), PROMPTS, metadata).value
        [gradient] = torch.autograd.grad(value.sum(), pixels)
        above, below = (
            reward.score_pixels((pixels + step * direction).detach(), PROMPTS, metadata).value for step in (1e-3, -1e-3)
        )
        expected = (gradient * direction).flatten(1).sum(1)
        assert expected.abs().min() > 1e-5
        torch.testing.assert_close((above - below) / 2e-3, expected, rtol=0.02, atol=1e-3)
        assert ((value > 0) & (value < 1)).all()


def test_mass_is_of_the_colours_and_the_number_asked_for() -> None:
    """Drawings are worth more for their own prompt than for one of another colour or number."""
    reward, rng = ShapesMass(), np.random.default_rng(0)
    for prompt, other in (("four red squares", "four blue squares"), ("four red squares", "one red square")):
        pictures = [Image.fromarray(draw(parse(prompt), rng)) for _ in range(8)]
        own, wrong = (score(reward, pictures, [text] * 8, [{}] * 8).value for text in (prompt, other))
        assert own.min() > 0.6 and wrong.max() < own.min() - 0.1


def test_a_judge_that_gives_no_gradient_says_so(tmp_path: Path) -> None:
    assert JudgeReward("shapes_show", Local("tiny_vlm")).spec.differentiable
    kept = Local("tiny_vlm", cache=str(tmp_path))
    for other in (JudgeReward("shapes_describe", Local("tiny_vlm")), JudgeReward("shapes_show", kept)):
        assert not other.spec.differentiable
