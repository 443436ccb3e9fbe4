"""How much of a direct method's gradient is signal: the cosine of the gradients of two batches of different prompts.

Of the start weights of the shipped tiny Stable Diffusion 3, for windows of 1 step to all and for other methods. A
cosine near 0 says that a batch this large shows no direction yet, whatever the gradient's norm.

    python scripts/measure_gradient_noise.py [--reward shapes_mass] [--prompts 24]
"""

import argparse
import tempfile
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from flowalign import registry
from flowalign.config import load, recipe
from flowalign.data.batches import draw_batch
from flowalign.training import Trainer

METHODS: list[tuple[str, dict[str, Any]]] = [
    ("draft", {"last_steps": 1}),
    ("draft", {"last_steps": 2}),
    ("draft", {"last_steps": 3}),
    ("draft", {"last_steps": None}),
    ("refl", {"steps": (3, 4)}),
    ("leap_align", {}),
    ("leap_align", {"discount": 0.0}),
    ("r0", {}),
    ("srpo", {"steps": (1, 4), "margin": None, "wanted": [""], "unwanted": ["no"]}),
    ("srpo", {"steps": (1, 4), "margin": None, "wanted": [""], "unwanted": ["black triangle"]}),
]


def gradient(run: Trainer, name: str, settings: dict[str, Any], iteration: int, prompts: int) -> Tensor:
    """Of the mean loss of two samples of each prompt that this iteration draws."""
    kind = registry.resolve("algorithms", name)
    algorithm = kind(kind.Settings(**settings))
    experience = algorithm.at_once(run.sampler, run.scorer, draw_batch(run.prompts, iteration, prompts, 2, 0, False))
    return run.learner.gradient(experience, experience.items, algorithm.losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reward", default="tiny_clip")
    parser.add_argument("--prompts", type=int, default=24, help="of a batch, two samples each")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        own = [f"rewards=[{{name: {given.reward}}}]", "evaluation.prompts=null", "training.previews=0"]
        run = Trainer(load(recipe("tiny_sd3/draft"), [*own, f"output={folder}"]), progress=False)
        finished: Tensor | None = None
        print(
            "| method | norm | cosine of two batches | with the finished picture's (draft, 1 step) |\n|---|---|---|---|"
        )
        for name, settings in METHODS:
            first, second = (gradient(run, name, settings, iteration, given.prompts) for iteration in (0, 1))
            mean = (first + second) / 2
            finished = mean if finished is None else finished
            said = ", ".join(f"{key} {value}" for key, value in settings.items())
            cosines = F.cosine_similarity(first, second, 0), F.cosine_similarity(mean, finished, 0)
            print(f"| {name} {said} | {first.norm():.2f} | {cosines[0]:.2f} | {cosines[1]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
