"""Measure what the completions of a rollout cost: flowalign's engine against two straightforward loops.

    python scripts/benchmark_completions.py                              # the shipped tiny SD3
    python scripts/benchmark_completions.py --model FOLDER --steps 10 --batch-size 16 --size 512 --dtype bfloat16

One loop takes one state after another: it finishes it by the ODE and decodes it. The other takes the states of a step,
one of every sample, together, and goes on to the next step. The engine takes the states of all steps together, starts
from the velocities that the rollout recorded, and completes once what ends in the same picture. All end in pictures of
every state of every sample; the largest difference between their latents is reported. They take turns, and each figure
is the median over --repeats turns.
"""

import flowalign  # noqa: F401  before torch: it lets threads that wait sleep

# isort: split
import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowalign.data import ASSETS, Prompts
from flowalign.errors import FlowalignError
from flowalign.policies.diffusion import DiffusersPolicy, Rollout
from flowalign.runs.files import write_atomically
from samplers import KERNELS, All, Window
from samplers.completion import completions


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny_sd3", help="shipped model, a folder, or a hub name (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=8, help="samples of the rollout (%(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="denoising steps (%(default)s)")
    parser.add_argument("--window", type=int, help="stochastic steps, from the second on (all but the last)")
    parser.add_argument("--size", type=int, help="height and width of the pictures in pixels (the pipeline's own)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=9, help="turns that the medians are over (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write every figure here")
    arguments = parser.parse_args(argv)
    if arguments.device == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
    try:
        figures = benchmark(arguments)
    except (FlowalignError, OSError, ValueError) as error:
        parser.error(" ".join(str(error).split()))
    print(
        f"{arguments.model}, {arguments.batch_size} samples, {arguments.steps} steps, {figures['stochastic']} of them "
        f"stochastic; {figures['device']}"
    )
    for name, row in figures["seconds"].items():
        ratios = figures["ratio"].get(name, {})
        print(
            f"{name:30s} {row['all']:.3f} s, without decoding {row['latents']:.3f} s"
            + "".join(f"; engine takes {ratio:.2f} of it {note}" for note, ratio in ratios.items())
        )
    print(f"largest difference of latents {figures['largest_difference']:.1e}")
    if arguments.json is not None:
        write_atomically(arguments.json, json.dumps(figures, indent=2) + "\n")


def benchmark(arguments: argparse.Namespace) -> dict[str, Any]:
    """Sample one batch, complete it both ways in turns, and return every figure."""
    shipped = ASSETS / arguments.model
    encode = {"max_sequence_length": 0} if arguments.model == "tiny_sd3" else {}
    policy = DiffusersPolicy.from_pretrained(
        shipped if shipped.is_dir() else arguments.model,
        arguments.dtype,
        torch.device(arguments.device),
        encode_options=encode,
    )
    plan = All() if arguments.window is None else Window(arguments.window, start=1)
    size = {} if arguments.size is None else {"height": arguments.size, "width": arguments.size}
    rollout = policy.sample(
        Prompts.read("shapes_heldout").spread(arguments.batch_size).texts,
        list(range(arguments.batch_size)),
        steps=arguments.steps,
        kernel=KERNELS["flow_sde"],
        eta=plan.etas(arguments.steps, 0.7, 0, 0),
        **size,
    )
    ways: dict[str, Callable[[], list[Tensor]]] = {
        "one state after another": lambda: loop(policy, rollout, 1),
        "one step after another": lambda: loop(policy, rollout, len(rollout)),
        "engine": lambda: [engine(policy, rollout)[0]],
    }
    seconds = measure(ways, lambda latents: [policy.decode_latents(x, 64) for x in latents], arguments.repeats)
    distinct, index = engine(policy, rollout)
    literal = torch.cat(ways["one state after another"]()).unflatten(0, (-1, len(rollout))).transpose(0, 1)
    on_gpu = arguments.device == "cuda"
    return {
        "device": torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads",
        "stochastic": int(rollout.trajectory.mask[0].sum()),
        "seconds": seconds,
        "ratio": {
            name: {
                "in all": seconds["engine"]["all"] / row["all"],
                "without": seconds["engine"]["latents"] / row["latents"],
            }
            for name, row in seconds.items()
            if name != "engine"
        },
        "largest_difference": (distinct[index] - literal).abs().max().item(),
    }


def engine(policy: DiffusersPolicy, rollout: Rollout) -> tuple[Tensor, Tensor]:
    """[M, ...] distinct finished samples, and [B, T + 1] which of them each state ends in."""
    made = completions(policy.at(rollout), rollout.trajectory, batch_size=64)
    return made.latents, made.index


@torch.no_grad()
def loop(policy: DiffusersPolicy, rollout: Rollout, together: int) -> list[Tensor]:
    """Finished states, step after step and in each `together` samples at once."""
    trajectory, velocity = rollout.trajectory, policy.at(rollout)
    steps = trajectory.mask.shape[1]
    finished = []
    for first in range(steps + 1):
        for samples in torch.arange(len(rollout), device=trajectory.latents.device).split(together):
            x = trajectory.latents[samples, first]
            for k in range(first, steps):
                v = velocity(x, samples, torch.full_like(samples, k)).float()
                x = x + v * (trajectory.sigmas[k + 1] - trajectory.sigmas[k])
            finished.append(x)
    return finished


def measure(
    ways: dict[str, Callable[[], list[Tensor]]], decode: Callable[[list[Tensor]], object], repeats: int
) -> dict[str, dict[str, float]]:
    """Median seconds of each way, with and without decoding, over turns; a first turn warms up."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        for name, run in ways.items():
            begin = clock()
            latents = run()
            finished = clock()
            decode(latents)
            if turn > 0:
                seconds[name].append((finished - begin, clock() - begin))
    return {
        name: dict(zip(("latents", "all"), map(statistics.median, zip(*rows, strict=True)), strict=True))
        for name, rows in seconds.items()
    }


def clock() -> float:
    """Seconds, once the GPU has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
