"""Clean samples on the forward process, for every model family on a tiny random pipeline of its real class."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from PIL import Image

from flowalign.errors import ConfigError
from flowalign.planning.tiny_pipelines import Tiny
from flowalign.policies.diffusion import DiffusersPolicy
from tests.flowalign.policies.diffusion.test_conformance import (
    NEGATIVE,
    PROMPTS,
    SEEDS,
    STEPS,
    a_megapixel_is_much,
    name,
    pairs,
    pictures,
    policy,
    roll,
    tiny,
)

__all__ = ["a_megapixel_is_much", "name", "pictures", "policy", "tiny"]


def metadata(policy: DiffusersPolicy, tiny: Tiny) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = [{"image": own.images, "mask": own.mask} for own in tiny.sources or ()]
    if not policy.family.negative(3.0):
        return records
    return [
        record | {"negative_prompt": text}
        for record, text in zip(records or [{}] * len(PROMPTS), NEGATIVE, strict=True)
    ]


def test_the_denoiser_is_asked_as_in_a_rollout_though_it_does_not_run(policy: DiffusersPolicy, tiny: Tiny) -> None:
    # a finished video is noised as a whole
    tiny = replace(tiny, call={key: value for key, value in tiny.call.items() if key != "chunks"})
    rollout = roll(policy, tiny)
    final, known = rollout.trajectory.final, metadata(policy, tiny)
    forwards = policy.forwards

    def clean(**at: Any) -> Any:
        return policy.clean(PROMPTS, final, SEEDS, guidance=rollout.guidance, metadata=known, **tiny.call, **at)

    if policy.family.samples_sound:
        with pytest.raises(ConfigError, match="denoises a sound along with the pictures"):
            clean(steps=STEPS)
        return
    samples, steps = pairs(rollout)
    x, sigmas = rollout.trajectory.latents[samples, steps], rollout.trajectory.sigmas
    own = clean(steps=STEPS)
    assert policy.forwards == forwards
    assert torch.equal(own.sigmas, sigmas[:-1])
    with torch.no_grad():
        mine = policy.velocity_of(own, own.noised(samples, steps, [0] * len(samples)), x)
        theirs = policy._velocity(x, sigmas[steps], rollout.conditions, samples, steps, rollout.guidance)
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6 * float(theirs.abs().max()))
        # and at levels of no schedule
        free = clean(levels=torch.tensor([0.9, 0.55, 0.2]))
        assert (free.sigmas.diff() < 0).all() and free.sigmas[-1] > 0 and free.sigmas[0] < 1
        rows = torch.arange(len(PROMPTS))
        assert policy.velocity_of(free, free.noised(rows, rows % 3, SEEDS)).isfinite().all()
        made = policy.decode(rollout)
        if policy.family.makes_sound:
            with pytest.raises(ConfigError, match="makes sounds, and files of them are not read"):
                policy.encode(made)
            return
        sides = ("height", "width", "num_frames")
        encoded = policy.encode(made, **{side: tiny.call[side] for side in sides if side in tiny.call})
    wanted = policy.clean(PROMPTS, encoded, SEEDS, steps=STEPS, metadata=known, **tiny.call).x0
    assert wanted.shape == final.shape
    still = [Image.new("RGB", (32, 32))] * 2
    if isinstance(made[0], list):
        with pytest.raises(ConfigError, match="makes videos, and a picture was given to learn from"):
            policy.encode(still)
    else:
        with pytest.raises(ConfigError, match="makes pictures, and a video was given to learn from"):
            policy.encode([still])


@pytest.mark.parametrize("kind", ["sd15", "sd2_v"])
def test_the_error_of_a_ddpm_is_its_own_predictions(kind: str) -> None:
    """A squared error of the velocity, weighed, is the one of epsilon or of the v-prediction that the UNet makes."""
    from flowalign.planning.tiny_pipelines import PIPELINES, build

    policy = DiffusersPolicy(build(kind), encode_options=PIPELINES[kind].encode)
    x0 = policy.sample(["a"] * 3, [1, 2, 3], steps=2, **PIPELINES[kind].call).trajectory.final
    clean = policy.clean(["a"] * 3, x0, [1, 2, 3], levels=torch.tensor([0.9, 0.5, 0.1]), **PIPELINES[kind].call)
    noised = clean.noised(torch.arange(3), torch.arange(3), [4, 5, 6])
    timesteps = (torch.tensor([0.9, 0.5, 0.1]) * 999).round().long()
    kept = policy.pipeline.scheduler.alphas_cumprod[timesteps].view(-1, 1, 1, 1)
    x = kept.sqrt() * x0 + (1 - kept).sqrt() * noised.noise
    text, _ = policy.pipeline.encode_prompt(["a"] * 3, "cpu", 1, False)
    with torch.no_grad():
        made = policy.pipeline.unet(x, timesteps, encoder_hidden_states=text).sample
        error = noised.error(policy.velocity_of(clean, noised))
    wanted = noised.noise if kind == "sd15" else kept.sqrt() * noised.noise - (1 - kept).sqrt() * x0
    torch.testing.assert_close(error, (made - wanted).square().flatten(1).mean(1), rtol=1e-4, atol=1e-5)


def test_features_from_the_middle_depend_on_every_sample_alone(policy: DiffusersPolicy, tiny: Tiny) -> None:
    if not policy.family.middle or policy.family.unpadded or len(policy.networks) > 1:
        pytest.skip("no features are looked for")
    rollout = roll(policy, tiny, guidance=1.0)
    final, records = rollout.trajectory.final, [{"image": own.images, "mask": own.mask} for own in tiny.sources or ()]
    clean = policy.clean(PROMPTS, final, SEEDS, steps=STEPS, metadata=records, **tiny.call)
    rows = torch.arange(len(final))
    x0 = final.float().requires_grad_()
    at = replace(clean.noised(rows, rows % STEPS, SEEDS), x0=x0)
    features = policy.features_of(clean, at)
    assert features.shape == (len(final), features.shape[1], policy.family.width(policy.denoiser))
    (gradient,) = torch.autograd.grad(features[1].square().sum(), x0)
    assert gradient[1].abs().max() > 0 and not gradient[[0, 2]].any()
