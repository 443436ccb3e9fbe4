"""What a gradient through the last K steps costs: peak memory, and time against the bare network.

    python scripts/measure_gradient_window.py                      # the shipped tiny Stable Diffusion 3
    python scripts/measure_gradient_window.py --model FOLDER --batch 2 --side 512

For each K the window is walked, decoded, and the mean of the pixels differentiated: as the engine does it, which
computes each step again in the backward pass, and with all that the network computed kept. The bare network is K times
what a step must take (two forward passes and a backward one), without window, decoder and reward.
"""

import argparse
import time
import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from flowalign.data import shipped
from flowalign.policies.base import best_device
from flowalign.policies.diffusion import DiffusersPolicy, window
from flowalign.policies.diffusion.window import GradientWindow

STEPS = 10


class Live(TorchDispatchMode):
    """Counts the bytes of the tensors that live at once, made within it, on any device."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        tree_map_only(Tensor, self._count, made)
        return made

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key in self._seen:
            return

        def gone(_: object) -> None:
            del self._seen[key]
            self.now -= size

        self._seen[key] = weakref.ref(storage, gone)
        self.now += size
        self.most = max(self.most, self.now)


def measured(run: Callable[[], object]) -> tuple[float, float]:
    """Seconds of a run, and of another one the MiB that it held at most."""
    begin = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    with Live() as live:
        run()
    return seconds, live.most / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny_sd3")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--side", type=int, help="pixels; default the pipeline's own")
    given = parser.parse_args()
    device = best_device()
    encode = {"max_sequence_length": 0} if given.model == "tiny_sd3" else {}
    policy = DiffusersPolicy.from_pretrained(shipped(given.model), given.dtype, device, encode_options=encode)
    policy.add_lora(8, 16)
    parameters = list(policy.trainable().values())
    size = {} if given.side is None else {"height": given.side, "width": given.side}
    rollout = policy.sample(["a red circle"] * given.batch, steps=STEPS, batch_size=given.batch, **size)
    samples = torch.arange(given.batch, device=device)

    def through(last: int) -> None:
        walked = GradientWindow(policy, rollout, samples)
        pixels = policy.decode_pixels(walked.walk(walked.state(STEPS - last), STEPS - last))
        torch.autograd.grad(pixels.mean(), parameters)

    def bare(last: int) -> None:
        x = rollout.trajectory.latents[:, -2].requires_grad_()
        steps = torch.full_like(samples, STEPS - 1)
        for _ in range(last):
            with torch.no_grad():
                policy.velocity(rollout, samples, steps, x)
            velocity: Tensor = policy.velocity(rollout, samples, steps, x)
            torch.autograd.grad(velocity.mean(), [x, *parameters])

    through(1)
    print("| K | MiB | MiB, all kept | seconds | seconds, all kept | seconds, bare network |\n|---" + "|---" * 5 + "|")
    for last in (1, 2, 5, 10):
        seconds, memory = measured(lambda last=last: through(last))  # type: ignore[misc]
        with patch.object(window, "checkpoint", lambda function, x, **_: function(x)):
            seconds_kept, memory_kept = measured(lambda last=last: through(last))  # type: ignore[misc]
        alone, _ = measured(lambda last=last: bare(last))  # type: ignore[misc]
        print(f"| {last} | {memory:.0f} | {memory_kept:.0f} | {seconds:.2f} | {seconds_kept:.2f} | {alone:.2f} |")


if __name__ == "__main__":
    main()
