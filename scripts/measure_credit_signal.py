"""How much of a policy gradient is signal, by the credit that steps get, on the shipped tiny Stable Diffusion 3.

The same batches, noises and start weights for every credit; a batch has other prompts and noises than the next. With
the mean gradient g_i of batch i and products of different batches, in which noise cancels on average:

- **signal**: mean g_i . g_j over mean |g_i|^2: the share of a batch's squared length that other batches have too,
- **per sample**: signal over noise, as a multiple of the first credit's: 2 says that half as many samples do,
- **per forward**: the same at as many forwards of the network (rollouts, completions and the update),
- **direction**: the cosine with the first credit's gradient, both without their noise.

Standard errors leave one batch out at a time. Settings of every run follow the names of the credits:

    OMP_NUM_THREADS=1 python scripts/measure_credit_signal.py flow_grpo dense_grpo tp_grpo vgpo --batches 8 \\
        --set rollout.steps=20 --set rollout.sigmas=null --set 'rollout.plan={name: window, start: 1, size: 10}'
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from safetensors.torch import save_file
from torch import Tensor

from flowalign.config import load, recipe
from flowalign.training import Trainer


def gradients(credit: str, batches: int, changed: list[str]) -> tuple[Tensor, float]:
    """[batches, D] the gradient of each batch's mean loss, and the forwards of a batch."""
    with tempfile.TemporaryDirectory() as folder:
        own = [f"algorithm={credit if credit.startswith('{') else f'{{name: {credit}}}'}", f"output={folder}"]
        own += ["evaluation.prompts=null", "training.previews=0"]
        run = Trainer(load(recipe("tiny_sd3/short_flow_grpo"), [*changed, *own]), progress=False)
        found = []
        for number in range(batches):
            experience = run.collect(run.groups.draw(number))
            found.append(run.learner.gradient(experience, experience.items))
        return torch.stack(found), run.policy.forwards / batches


def products(first: Tensor, second: Tensor) -> Tensor:
    """Mean product of the gradients [B, D] of different batches; noise cancels on average."""
    return (first.sum(0) @ second.sum(0) - (first * second).sum()) / (len(first) * (len(first) - 1))


def signal(own: Tensor) -> Tensor:
    return products(own, own) / own.square().sum(1).mean()


def per_sample(own: Tensor, first: Tensor) -> Tensor:
    share, of_first = signal(own), signal(first)
    return share / (1 - share) * (1 - of_first) / of_first


def direction(own: Tensor, first: Tensor) -> Tensor:
    return products(own, first) / (products(own, own) * products(first, first)).sqrt()


def told(figure: Callable[..., Tensor], *gradients: Tensor, times: float = 1.0) -> str:
    """A figure of gradients [B, D] with its standard error, by leaving out one batch at a time."""
    count = len(gradients[0])
    kept = [[i for i in range(count) if i != left] for left in range(count)]
    without = torch.stack([figure(*(own[rows] for own in gradients)) for rows in kept])
    error = ((count - 1) * without.var(correction=0)).sqrt()
    return f"{times * figure(*gradients).item():.3f} ± {times * error.item():.3f}"


def main(
    credits: Annotated[list[str], typer.Argument(help="Algorithms, or YAML such as '{name: dense_grpo}'.")],
    batches: Annotated[int, typer.Option(min=3)] = 8,
    changed: Annotated[list[str] | None, typer.Option("--set", help="A setting of every run.")] = None,
    output: Annotated[Path | None, typer.Option(help="Safetensors file to keep the gradients in.")] = None,
) -> None:
    print("| credit | forwards | signal | per sample | per forward | direction |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    kept: dict[str, Tensor] = {}
    first, cheapest = None, 0.0
    for credit in credits:
        own, forwards = gradients(credit, batches, changed or [])
        kept[credit] = own
        if first is None:
            first, cheapest = own, forwards
        cells = [f"{forwards:,.0f}", told(signal, own), told(per_sample, own, first)]
        cells += [told(per_sample, own, first, times=cheapest / forwards), told(direction, own, first)]
        print(f"| `{credit}` | " + " | ".join(cells) + " |", flush=True)
    if output is not None:
        save_file(kept, output)


if __name__ == "__main__":
    typer.run(main)
