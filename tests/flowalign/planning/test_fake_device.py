"""What the host waits for: rollout, completions, replay, gradient window and updates on a device without hardware.

Mixing the host's tensors with the device's raises there. A wait is fine before the first step of a rollout and between
the parts of an iteration; within the denoising loop, and between micro-batches, only the places below may have one.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from flowalign.config import load, recipe
from flowalign.data import Source
from flowalign.planning.fake_device import DEVICE, FakeDevice
from flowalign.planning.tiny_pipelines import PIPELINES, build
from flowalign.policies.diffusion import DiffusersPolicy
from flowalign.policies.diffusion.window import GradientWindow
from flowalign.training import Trainer
from samplers import flow_sde
from samplers.completion import completions
from tests.flowalign.policies.diffusion.test_conformance import a_megapixel_is_much, pictures

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
    "flowalign/policies/diffusion/experts.py:forward": "which of two networks a step asks (Wan 2.2 14B)",
    "flowalign/algorithms/matching/base.py:noised": "which samples' seeds draw the noise of a micro-batch",
    "flowalign/algorithms/direct/base.py:score": "which samples' prompts the reward is asked about",
    "samplers/trajectory.py:distinct": "how many states of a micro-batch are different, where groups share their start",
}
THEIRS = {
    "chroma",
    "hunyuan_image",
    "hunyuan_video15",
    "hunyuan_video15_i2v",
    "lumina2",
    "qwen_image21",
    "wan22_14b",
    "wan22_14b_i2v",
}
"""whose network or pipeline in diffusers waits by itself"""
FAST = ["sd35", "sd15", "wan"]
VARIANTS = {"hunyuan_image_distilled", "sd2_v", "sdxl_v", "wan22_5b"}
"""with the pipeline and networks of another one"""
BY_VALUES = {"ltx2_i2v"}
"""whose pipeline finds the sound's first step among noise levels by their values, which are not there"""
FAMILIES = sorted(PIPELINES.keys() - VARIANTS - BY_VALUES)
STEPS = 3


NOT_OURS = ("diffusers", "transformers", "flowalign/planning/test_")
"""beginnings of places; a backward pass that this file asks for waits where the network's forward did"""


def ours(device: FakeDevice, begin: int, end: int | None = None) -> set[str]:
    """Places of ours that waited, by numbers of the device's waits."""
    return {wait.place for wait in device.waits[begin:end] if not wait.place.startswith(NOT_OURS)} - ALLOWED.keys()


def theirs(device: FakeDevice, begin: int, end: int | None = None) -> set[str]:
    """Those of the networks' libraries."""
    return {wait.place for wait in device.waits[begin:end] if wait.place.startswith(NOT_OURS)}


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    with FakeDevice() as made:
        yield made


def on_device(name: str, device: FakeDevice, source: Source | None = None) -> DiffusersPolicy:
    """The tiny pipeline with a LoRA, its prompts encoded on the host before."""
    tiny = PIPELINES[name]
    pipeline = build(name)
    host = DiffusersPolicy(pipeline, "cpu", tiny.encode)
    size = (tiny.call["width"], tiny.call["height"])
    host.encoder.encode(["a red circle"], [source], size)
    if host.family.negative(3.0):
        host.encoder.encode([""], [source], size, negative=True)
    policy = DiffusersPolicy(pipeline, DEVICE, tiny.encode)
    policy.encoder.embeddings = host.encoder.embeddings
    policy.add_lora(2, 2)
    return policy


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_a_family_neither_mixes_devices_nor_waits_in_its_loops(
    name: str, device: FakeDevice, pictures: list[str]
) -> None:
    tiny = PIPELINES[name]
    source = Source(tuple(pictures[: tiny.images]), pictures[4] if tiny.masked else None) if tiny.images else None
    given = {} if source is None else {"metadata": [{"image": source.images, "mask": source.mask}] * 2}
    policy, calls = on_device(name, device, source), []
    for network in policy.networks.values():
        network.register_forward_pre_hook(lambda *_: calls.append(len(device.waits)))
    rollout = policy.sample(
        "a red circle", n=2, steps=STEPS, guidance=3.0, eta=0.7, kernel=flow_sde, **given, **tiny.call
    )
    # a pipeline that makes one sample at a time begins again with the second
    loop = calls[len(calls) // 2 :] if policy.family.largest_batch == 1 else list(calls)
    each = len(loop) // STEPS
    assert ours(device, loop[0], loop[each]) <= STARTS.keys()
    assert ours(device, loop[each], loop[-1]) == set()
    waited = theirs(device, loop[each], loop[-1])

    begin = len(calls)
    completions(policy.at(rollout), rollout.trajectory)
    assert len(calls) > begin + 1 and ours(device, calls[begin], calls[-1]) == set()

    pairs = torch.tensor([[0, 0], [1, 2], [1, 1], [0, 2]]).to(DEVICE)
    begin = len(device.waits)
    for samples, steps in (part.unbind(1) for part in pairs.split(2)):
        policy.score(rollout, samples, steps).log_prob.sum().backward()
    assert ours(device, begin) == set()
    # the second of two networks has the steps that were not taken
    unused = (*tiny.unused, "transformer_2.")
    without = [key for key, parameter in policy.trainable().items() if parameter.grad is None]
    assert all(any(part in key for part in unused) for key in without)

    begin, window = len(device.waits), GradientWindow(policy, rollout, pairs[:2, 0])
    window.velocity(window.state(1), 1).sum().backward()
    assert ours(device, begin) == set()
    waited |= theirs(device, begin)
    if not policy.family.samples_sound:
        clean = policy.clean(["a red circle"] * 2, rollout.trajectory.final, [0, 1], steps=STEPS, **given, **tiny.call)
        begin = len(device.waits)
        noised = clean.noised(pairs[:2, 0], pairs[:2, 1], [1, 2])
        noised.error(policy.velocity_of(clean, noised)).sum().backward()
        assert ours(device, begin) == set()
        waited |= theirs(device, begin)
    assert bool(waited) == (name in THEIRS), waited


@pytest.mark.parametrize("name", ["flow_grpo", "nft", "draft"])
def test_an_update_does_not_wait_between_micro_batches(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: FakeDevice
) -> None:
    overrides = ["evaluation.prompts=null", "training.iterations=1", "training.prompts_per_iteration=2"]
    overrides += ["training.group_size=4", "training.micro_batch_size=4", "training.updates_per_iteration=1"]
    config: Any = load(recipe(f"tiny_sd3/{name}"), [*overrides, "name=run", f"output={tmp_path}"])
    config.model.encode = PIPELINES["sd35"].encode
    config.rollout = config.rollout.model_copy(update=PIPELINES["sd35"].call)
    monkeypatch.setattr(Accelerator, "device", DEVICE)
    policy = on_device("sd35", device)
    trainer = Trainer(config, policy, progress=False)
    # nothing has values there to compare
    monkeypatch.setattr(policy, "verify", lambda _: 0.0)
    monkeypatch.setattr(trainer.learner, "_with_gradient", lambda _, items: items)
    own, found = trainer.learner.backward, []

    def backward(*args: Any) -> Any:
        begin = len(device.waits)
        result = own(*args)
        found.append((len(args[1].split(args[3])), ours(device, begin)))
        return result

    monkeypatch.setattr(trainer.learner, "backward", backward)
    metrics = trainer.iterate()
    assert metrics["policy/gradient_norm"] == 1
    [(parts, waits)] = found
    # a reward for pixels that runs on the host fetches them
    assert parts > 1 and waits <= {
        "rewards/vision.py:score_pixels",
        "flowalign/training/optimization.py:_backpropagate",
    }


def test_values_of_the_device_are_waited_for_and_mixing_raises(device: FakeDevice) -> None:
    there, here = torch.zeros(4, device=DEVICE), torch.arange(4.0)
    for read in (lambda: there.sum().item(), lambda: there[there > 0], lambda: there.cpu(), lambda: here.to(DEVICE)):
        before = len(device.waits)
        read()
        assert len(device.waits) == before + 1
    assert here.to(DEVICE, non_blocking=True).device == DEVICE and len(device.waits) == 4
    with pytest.raises(RuntimeError, match="device"):
        there + here


def test_memory_is_that_of_the_tensors_alive(device: FakeDevice) -> None:
    kept = torch.zeros(1000, device=DEVICE)
    assert device.live == 4000
    for _ in range(3):
        kept = kept + 1
    assert device.live == 4000 and device.peak == 8000
    # what the host sent is known there
    for sent in (torch.tensor([2, 3]).to(DEVICE), torch.tensor([2, 3], device=DEVICE)):
        assert sent.cumsum(0).tolist() == [2, 5]
