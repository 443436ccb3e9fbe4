"""Named by dotted path in configurations of subprocesses: a smooth reward, and Flow-GRPO that writes its advantages."""

import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor

from flowalign.algorithms.trajectory.flow_grpo import FlowGRPO
from flowalign.core.record import Record


def brightness(images: Sequence[Image], prompts: Sequence[str]) -> list[float]:
    """The mean of all pixels, in [0, 1]."""
    return [float(np.asarray(image, dtype=np.float64).mean() / 255) for image in images]


def brightness_of_squares(images: Sequence[Image], prompts: Sequence[str]) -> list[float]:
    """The same for prompts of squares, 0 for others, whose groups are all alike."""
    return [value * ("square" in prompt) for value, prompt in zip(brightness(images, prompts), prompts, strict=True)]


def late_brightness(images: Sequence[Image], prompts: Sequence[str]) -> list[float]:
    """Takes 40 seconds on the second process."""
    if os.environ.get("RANK") == "1":
        time.sleep(40)
    return brightness(images, prompts)


class CrowdedFlowGRPO(FlowGRPO):
    """Samples as on devices of which the second holds four samples at a time."""

    def rollout(self, sampler: Any, batch: Any) -> Any:
        if os.environ.get("RANK") != "1":
            return super().rollout(sampler, batch)

        def check(module: Any, args: Any, kwargs: Any) -> None:
            if len((*args, *kwargs.values())[0]) > 4:
                raise torch.OutOfMemoryError("CUDA out of memory")

        hook = sampler.policy.denoiser.register_forward_pre_hook(check, with_kwargs=True)
        try:
            return super().rollout(sampler, batch)
        finally:
            hook.remove()


class RecordingFlowGRPO(FlowGRPO):
    """Appends the advantages of each iteration to the file named in FLOWALIGN_ADVANTAGES, a part a process."""

    def credit(self, record: Record) -> Tensor:
        advantage = super().credit(record)
        path = f"{os.environ['FLOWALIGN_ADVANTAGES']}.{os.environ.get('RANK', '0')}"
        earlier = torch.load(path, weights_only=True) if os.path.exists(path) else []
        torch.save([*earlier, advantage.cpu()], path)
        return advantage
