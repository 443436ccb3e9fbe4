"""What `training.subsample` saves of an update, and what noise it adds to the gradient, on the shipped tiny SD3.

Of the start weights and one batch: the mean squared distance of a subsampled gradient from the whole one, over the
whole one's square, by 2000 draws from the gradients of all items; and the processor time of an update over the whole
one's, medians of turns.

    OMP_NUM_THREADS=1 python scripts/measure_subsampling.py
"""

import argparse
import tempfile
import time
from statistics import median

import torch
from torch import Tensor

from flowalign.config import load, recipe
from flowalign.config.sections import Subsample
from flowalign.core.subsampling import inclusion, subsample
from flowalign.training import Trainer

DRAWS = 2000
SETTINGS = [(share, by) for share in (0.5, 0.25) for by in ("uniform", "advantage")]


def gradients(run: Trainer, experience: object, items: Tensor) -> Tensor:
    """[N, P] of each item's loss."""
    parameters = list(run.policy.trainable().values())
    rows = []
    for item in items.split(1):
        loss, _ = run.algorithm.losses(run.policy, experience, item)
        parts = torch.autograd.grad(loss.sum(), parameters, allow_unused=True)
        rows.append(torch.cat([part.flatten() for part in parts if part is not None]))
    return torch.stack(rows)


def seconds(run: Trainer, experience: object, items: Tensor, settings: Subsample | None) -> float:
    """Processor time of an update."""
    run.config.training.subsample = settings
    begin = time.process_time()
    run.learner.update(experience, items, seed=0)  # type: ignore[arg-type]
    return time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=["flow_grpo", "nft"])
    parser.add_argument("--prompts", type=int, default=6, help="of the batch, eight samples each (%(default)s)")
    parser.add_argument("--turns", type=int, default=5, help="of measuring an update (%(default)s)")
    given = parser.parse_args()
    print("| recipe | share, by | noise of the gradient | share of the time |\n| --- | --- | ---: | ---: |")
    for name in given.recipes:
        with tempfile.TemporaryDirectory() as folder:
            own = ["evaluation.prompts=null", "training.previews=0", "training.optimizer.learning_rate=1.0e-9"]
            own += [f"training.prompts_per_iteration={given.prompts}", "training.updates_per_iteration=1"]
            run = Trainer(load(recipe(f"tiny_sd3/{name}"), [*own, f"output={folder}"]), progress=False)
        experience = run.collect(run.groups.draw(0))
        items = run.learner._with_gradient(experience, experience.items)
        each = gradients(run, experience, items)
        products = each @ each.T
        turns = {setting: list[float]() for setting in [None, *SETTINGS]}
        for _ in range(given.turns):
            for setting, own_turns in turns.items():
                wanted = None if setting is None else Subsample(share=setting[0], by=setting[1])  # type: ignore[arg-type]
                own_turns.append(seconds(run, experience, experience.items, wanted))
        whole = median(turns[None])
        for share, by in SETTINGS:
            size = experience.size(items) if by == "advantage" else torch.ones(len(items))
            probability = inclusion(size, share, 0.5 if by == "advantage" else 0.0)
            draws = [subsample(probability, torch.Generator().manual_seed(seed)) - 1 for seed in range(DRAWS)]
            noise = torch.stack([draw @ products @ draw for draw in draws]).mean() / products.sum()
            print(f"| {name} | {share}, {by} | {noise:.2f} | {median(turns[share, by]) / whole:.2f} |", flush=True)


if __name__ == "__main__":
    main()
