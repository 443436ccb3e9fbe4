"""What the host waits for on an accelerator, for every family: rollout, completions, replay and gradient window.

A wait is fine before the first step of a rollout; within the denoising loop, and between micro-batches, only the places
below may have one. Mixing the host's tensors with the device's raises.
"""

from collections import Counter
from typing import Any

import pytest
import torch

from flowalign.data import Source
from flowalign.planning.tiny_pipelines import PIPELINES, build
from flowalign.policies.diffusion import DiffusersPolicy
from flowalign.policies.diffusion.window import GradientWindow
from samplers import flow_sde
from samplers.completion import completions
from tests.flowalign.policies.diffusion.test_conformance import a_megapixel_is_much, pictures, train
from tests.test_device import forked

__all__ = ["a_megapixel_is_much", "pictures"]

STARTS = {
    "flowalign/policies/diffusion/scheduler.py:_start": "the schedule's levels are checked at a rollout's first step",
    "samplers/trajectory.py:__init__": "and go to the device with the plan's noise levels",
    "flowalign/policies/diffusion/families/stable_diffusion.py:sigmas": "as do those of DDPM's timesteps",
}
ALLOWED = {
    "flowalign/policies/diffusion/conditions.py:_at": "captions of different lengths travel in lists (Z-Image)",
    "flowalign/policies/diffusion/conditions.py:split": "prompts of different lengths are called apart",
    "flowalign/policies/diffusion/conditions.py:expert": "which of two networks a step asks (Wan 2.2 14B)",
    "flowalign/policies/diffusion/families/hidream.py:experts": "how many tokens ask an expert (HiDream)",
    "flowalign/policies/diffusion/experts.py:forward": "which of two networks a step asks (Wan 2.2 14B)",
}
THEIRS = {
    "aura_flow",
    "chroma",
    "chrono_edit",
    "dit",
    "ernie_image",
    "glm_image",
    "hidream",
    "hunyuan_image",
    "hunyuan_video15",
    "hunyuan_video15_i2v",
    "lumina2",
    "mochi",
    "qwen_image",
    "qwen_image21",
    "qwen_image_edit_plus",
    "wan22_14b",
}
"""Families whose network or pipeline in diffusers waits by itself."""
FAST = ["sd35", "sd15", "wan"]
VARIANTS = {"flux2", "flux2_klein", "hunyuan_image_distilled", "sd2_v", "sdxl_v"}
VARIANTS |= {"prx_pixel", "wan22_5b", "wan22_5b_i2v", "wan22_14b_i2v"}
VARIANTS |= {"sd3_inpaint", "sdxl_inpaint", "kandinsky5_video", "qwen_image_edit"}
"""Families with the networks of another one, whose pictures another one has too."""
STEPS = 3
NOT_OURS = ("diffusers", "transformers", "elsewhere")
"""Beginnings of places; a backward pass has no line of Python, and waits where the network's forward did."""


def ours(waits: Counter[str]) -> set[str]:
    """Places of ours that waited."""
    return {place for place in waits if not place.startswith(NOT_OURS)} - ALLOWED.keys()


def theirs(waits: Counter[str]) -> set[str]:
    """Places of the networks' libraries."""
    return {place for place in waits if place.startswith(NOT_OURS)}


@pytest.mark.parametrize(
    "name",
    [
        name if name in FAST else pytest.param(name, marks=pytest.mark.slow)
        for name in sorted(PIPELINES.keys() - VARIANTS)
    ],
)
def test_a_family_neither_mixes_devices_nor_waits_in_its_loops(name: str, pictures: list[str]) -> None:
    tiny = PIPELINES[name]
    source = Source(tuple(pictures[: tiny.images]), pictures[4] if tiny.masked else None) if tiny.images else None
    given: Any = {} if source is None else {"metadata": [{"image": source.images, "mask": source.mask}] * 2}

    def work() -> None:
        from tests.device import DEVICE, Device

        with Device() as device:
            policy, calls = DiffusersPolicy(build(name), DEVICE, tiny.encode), []
            train(policy)
            for network in policy.networks.values():
                network.register_forward_pre_hook(lambda *_: calls.append(Counter(device.waits)))
            rollout = policy.sample(
                "a red circle", n=2, steps=STEPS, guidance=3.0, eta=0.7, kernel=flow_sde, **given, **tiny.call
            )
            # a pipeline that makes one sample at a time begins again with the second; a causal one is called for its
            # conditions first
            twice = policy.family.largest_batch == 1 or policy.family.causal
            loop = calls[len(calls) // 2 :] if twice else list(calls)
            each = len(loop) // (STEPS * tiny.call.get("chunks", 1))
            assert ours(loop[each] - loop[0]) <= STARTS.keys()
            assert ours(loop[-1] - loop[each]) == set()
            waited = theirs(loop[-1] - loop[each])

            # chunks are not completed
            if "chunks" not in tiny.call:
                begin = len(calls)
                completions(policy.at(rollout), rollout.trajectory)
                assert len(calls) > begin + 1 and ours(calls[-1] - calls[begin]) == set()

            pairs = torch.tensor([[0, 0], [1, 2], [1, 1], [0, 2]]).to(DEVICE)
            before = Counter(device.waits)
            for samples, steps in (part.unbind(1) for part in pairs.split(2)):
                policy.score(rollout, samples, steps).log_prob.sum().backward()
            assert ours(device.waits - before) == set()
            # the second of two networks has the steps that were not taken
            unused = (*tiny.unused, "transformer_2.")
            without = [key for key, parameter in policy.trainable().items() if parameter.grad is None]
            assert all(any(part in key for part in unused) for key in without)

            before, window = Counter(device.waits), GradientWindow(policy, rollout, pairs[:2, 0])
            window.velocity(window.state(1), 1).sum().backward()
            assert ours(device.waits - before) == set()
            waited |= theirs(device.waits - before)
            if not policy.family.samples_sound:
                final = rollout.trajectory.final
                # a finished video is noised as a whole
                call = {key: value for key, value in tiny.call.items() if key != "chunks"}
                clean = policy.clean(["a red circle"] * 2, final, [0, 1], steps=STEPS, **given, **call)
                before = Counter(device.waits)
                noised = clean.noised(pairs[:2, 0], pairs[:2, 1], [1, 2])
                noised.error(policy.velocity_of(clean, noised)).sum().backward()
                assert ours(device.waits - before) == set()
                waited |= theirs(device.waits - before)
            assert bool(waited) == (name in THEIRS), waited

    forked(work)
