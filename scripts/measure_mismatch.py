"""Measure how far log-probabilities of a replay are from the rollout's before any update, by precision and model.

    python scripts/measure_mismatch.py                       # tiny_sd3 and a tiny random pipeline of every class
    python scripts/measure_mismatch.py tiny_sd3 flux wan --steps 10 --json mismatch.json
    python scripts/measure_mismatch.py stabilityai/stable-diffusion-3.5-medium --size 512 --device cuda

The rollout is one batch; the replay takes the same steps in random batches, as an update does. Printed is the mean
|log ratio| of the step where it is largest: what a clip range has to be far above. The last column is the same for
ratios that refer to a replay in the updates' own batches (training.old_log_prob: replayed), in any precision.
"""

import flowalign  # noqa: F401  before torch: it lets threads that wait sleep

# isort: split
import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from flowalign.data import ASSETS
from flowalign.errors import FlowalignError
from flowalign.planning.tiny_pipelines import PIPELINES, build
from flowalign.policies.diffusion import DiffusersPolicy, Rollout
from flowalign.runs.files import write_atomically
from samplers import flow_sde

DTYPES = ("float32", "bfloat16", "float16", "autocast")
"""Precisions; autocast is bfloat16 over weights in float32."""
PROMPTS = ["a red fox", "two blue squares", "rain", "a bird"]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    plain = [name for name, tiny in PIPELINES.items() if not tiny.images]
    parser.add_argument("models", nargs="*", default=["tiny_sd3", *plain], help="tiny pipelines, folders, hub names")
    parser.add_argument("--steps", type=int, default=10, help="denoising steps, all but the last noisy (%(default)s)")
    parser.add_argument("--samples", type=int, default=4, help="samples of the rollout (%(default)s)")
    parser.add_argument("--micro-batch-size", type=int, default=1, help="steps a replay takes at once (%(default)s)")
    parser.add_argument("--guidance", type=float, default=1.0, help="(%(default)s)")
    parser.add_argument("--eta", type=float, default=0.7, help="noise level of flow_sde (%(default)s)")
    parser.add_argument("--size", type=int, help="height and width in pixels, of models that are not tiny")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures of every step here")
    arguments = parser.parse_args(argv)
    if arguments.device == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
    figures: dict[str, dict[str, list[float]]] = {}
    print(f"| {' | '.join(('model', *DTYPES, 'replayed'))} |")
    print("| --- | --- | --- | --- | --- | --- |")
    for model in arguments.models:
        figures[model] = {}
        for dtype in DTYPES:
            try:
                sampled, replayed = measured(load(model, dtype, arguments.device), model, arguments)
            except (FlowalignError, OSError) as error:
                parser.error(" ".join(str(error).split()))
            figures[model] |= {dtype: sampled, f"{dtype}, replayed": replayed}
        # of torch, whose maximum is NaN where a precision overflows
        worst = {name: torch.tensor(steps).max().item() for name, steps in figures[model].items()}
        again = max(value for name, value in worst.items() if "replayed" in name)
        print(f"| {' | '.join((model, *(f'{worst[dtype]:.1e}' for dtype in DTYPES), f'{again:g}'))} |", flush=True)
    if arguments.json is not None:
        write_atomically(arguments.json, json.dumps(figures, indent=2) + "\n")


def load(model: str, dtype: str, device: str) -> DiffusersPolicy:
    """The policy that a run would train, with a LoRA that has moved."""
    autocast, dtype = ("bfloat16", "float32") if dtype == "autocast" else (None, dtype)
    if model in PIPELINES:
        pipeline = build(model).to(getattr(torch, dtype))
        policy = DiffusersPolicy(pipeline, device, encode_options=PIPELINES[model].encode)
    else:
        shipped = ASSETS / model
        encode = {"max_sequence_length": 0} if model == "tiny_sd3" else {}
        path = shipped if shipped.is_dir() else model
        policy = DiffusersPolicy.from_pretrained(path, dtype, device, encode_options=encode)
    policy.set_autocast(autocast)
    torch.manual_seed(0)
    policy.add_lora(rank=4, alpha=8)
    for parameter in policy.trainable().values():
        torch.nn.init.normal_(parameter, std=0.01)
    return policy


@torch.no_grad()
def measured(policy: DiffusersPolicy, model: str, arguments: argparse.Namespace) -> tuple[list[float], list[float]]:
    """The mean |log ratio| of each noisy step: of a replay to the rollout, and of a replay to that replay."""
    call = {} if arguments.size is None else {"height": arguments.size, "width": arguments.size}
    if model in PIPELINES:
        call = PIPELINES[model].call
    eta = torch.full((arguments.steps,), arguments.eta)
    eta[-1] = 0
    rollout = policy.sample(
        [PROMPTS[i % len(PROMPTS)] for i in range(arguments.samples)],
        list(range(arguments.samples)),
        steps=arguments.steps,
        guidance=arguments.guidance,
        kernel=flow_sde,
        eta=eta,
        **call,
    )
    places = rollout.mask.nonzero()
    places = places[torch.randperm(len(places)).to(places.device)]
    first, second = (replay(policy, rollout, places, arguments.micro_batch_size) for _ in range(2))
    sampled = rollout.trajectory.log_prob[places.unbind(1)]

    def by_step(log_ratio: Tensor) -> list[float]:
        steps = places[:, 1].unique().tolist()
        return [log_ratio[places[:, 1] == step].abs().mean().item() for step in steps]

    return by_step(first - sampled), by_step(second - first)


def replay(policy: DiffusersPolicy, rollout: Rollout, places: Tensor, size: int) -> Tensor:
    """[N] log-probabilities of stored steps, [N, 2] pairs of sample and step, in batches of this size."""
    return torch.cat([policy.score(rollout, *part.unbind(1)).log_prob for part in places.split(size)])


if __name__ == "__main__":
    main()
