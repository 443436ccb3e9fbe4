"""A LoRA at strength 0 is the base, at 1 itself, at 2 one of twice the alpha; what cannot be told apart is said."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image

from flowalign.errors import ConfigError
from flowalign.evaluation.scores import Evaluated
from flowalign.evaluation.strength import StrengthCurve
from flowalign.policies.diffusion import DiffusersPolicy

PROMPTS = ["a red circle", "two blue squares"]


def test_strengths_scale_what_the_adapter_adds(tiny_policy: Callable[..., DiffusersPolicy]) -> None:
    def final(policy: DiffusersPolicy) -> torch.Tensor:
        return policy.sample(PROMPTS, [0, 1], steps=2).trajectory.final

    policy, twice = tiny_policy(), tiny_policy()
    base = final(policy)
    policy.add_lora(2, 4)
    twice.add_lora(2, 8)
    generator = torch.Generator().manual_seed(0)
    weights = {name: 0.1 * torch.randn(p.shape, generator=generator) for name, p in policy.trainable().items()}
    for own in (policy, twice):
        own.network.load_state_dict(weights, strict=False)
    trained = final(policy)
    assert (trained - base).abs().max() > 0.01
    with policy.strength(0.0):
        torch.testing.assert_close(final(policy), base)
    with policy.strength(2.0):
        torch.testing.assert_close(final(policy), final(twice))
    torch.testing.assert_close(final(policy), trained, rtol=0, atol=0)
    with pytest.raises(ConfigError, match="a strength is of a LoRA"), tiny_policy().strength(0.5):
        pass


def evaluated(values: list[float], colour: int = 0) -> Evaluated:
    """Four pictures of each of eight prompts."""
    prompts = [f"p{i // 4}" for i in range(32)]
    pictures = [Image.fromarray(np.full((8, 8, 3), colour, np.uint8))] * 32
    numbers = list(range(32))
    return Evaluated(
        prompts=prompts,
        metadata=[{}] * 32,
        seeds=numbers,
        value=values,
        parts={},
        samples=pictures,
        rows=numbers,
    )


def test_what_the_samples_cannot_tell_from_the_best_is_named() -> None:
    rng = np.random.default_rng(0)
    base = rng.normal(0, 1, 32)
    better, alike = base + 1, base + 1 + np.tile(np.repeat([0.5, -0.4], 4), 4)
    curve = StrengthCurve(
        {0.0: evaluated(base.tolist()), 1.0: evaluated(better.tolist()), 1.5: evaluated(alike.tolist(), 255)}
    )
    assert curve.best == 1.5 and curve.as_good() == [1.0, 1.5]
    film = curve.film(2)
    assert [len(row) for row in film.rows] == [3, 3] and film.captions[1] == ["0: p1", "1", "1.5"]
    assert film.rows[0][2].getpixel((0, 0)) == (255, 255, 255)
