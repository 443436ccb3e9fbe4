"""How far a model could get: the best of n of its samples by the checker, and what its VAE keeps of real pictures.

    python scripts/measure_ceiling.py configs/tiny_sd3/short_flow_grpo.yaml [KEY=VALUE ...] --pictures 64

Prints the share of held-out prompts of which at least one of n samples meets every requirement, without bias from
all samples of a prompt (the estimator of arXiv 2107.03374), and the share of drawings of the same prompts that still do
after they were encoded and decoded.
"""

from math import comb
from pathlib import Path
from statistics import fmean
from typing import Annotated

import numpy as np
import typer
from PIL import Image

from flowalign.config import load
from flowalign.data import Prompts
from flowalign.evaluation.scores import evaluate
from flowalign.policies.diffusion import DiffusersPolicy
from flowalign.training import Trainer
from flowalign.training.league import SEED
from rewards import score
from rewards.shapes.draw import draw
from rewards.shapes.grammar import parse


def pass_at(n: int, samples: int, right: int) -> float:
    """Probability that one of n samples is right, if `right` of `samples` are."""
    return 1 - comb(samples - right, n) / comb(samples, n)


def main(
    config: Path,
    changed: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE ...]")] = None,
    pictures: Annotated[int, typer.Option(min=1, help="Samples of each held-out prompt.")] = 64,
) -> None:
    trainer = Trainer(load(config, changed or []), progress=False)
    policy, settings, reward = trainer.policy, trainer.config.evaluation, trainer.evaluator.reward
    assert isinstance(policy, DiffusersPolicy), "the checker looks at pictures"
    prompts = Prompts.of(settings.model_copy(update={"limit": None}))
    strict = np.array(evaluate(policy, reward, prompts, settings, pictures, SEED).parts["strict"])
    right = (strict.reshape(len(prompts), pictures) == 1).sum(1).tolist()
    print("| best of | strict |\n| ---: | ---: |")
    for n in (2**k for k in range(pictures.bit_length())):
        print(f"| {n} | {fmean(pass_at(n, pictures, count) for count in right):.1%} |")
    rng = np.random.default_rng(0)
    drawn = [Image.fromarray(draw(parse(text), rng)) for text in prompts.texts for _ in range(pictures)]
    texts = [text for text in prompts.texts for _ in range(pictures)]
    metadata = [record for record in prompts.metadata for _ in range(pictures)]
    for name, seen in (("as drawn", drawn), ("by the VAE", policy.decode_latents(policy.encode(drawn)))):
        kept = float(score(reward, seen, texts, metadata).parts["strict"].mean())
        print(f"drawings of these prompts, {name}: {kept:.1%}")


if __name__ == "__main__":
    typer.run(main)
