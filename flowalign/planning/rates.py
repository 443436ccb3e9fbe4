"""What another batch or length than the recipe's means for the learning rate."""

import math
from collections.abc import Iterator

from flowalign.config.sections import BaseConfig, Training

LASTING = ("constant", "constant_with_warmup")
"""Schedules whose rate does not follow the run's length."""


def samples_an_update(training: Training) -> float:
    """Samples that one update of the weights learns from."""
    return training.prompts_per_iteration * training.group_size / training.updates_per_iteration


def rate_notes(recipe: BaseConfig, config: BaseConfig) -> Iterator[str]:
    """A line where a run has another batch than its recipe at the same rate, and one where its schedule is stretched.

    Adam's steps follow the noise of the gradient and hardly its size, so that a rate times sqrt(k) at k times the
    batch keeps the path that training takes (arXiv 2205.10287, the square root scaling rule). Without Adam this does
    not hold.
    """
    before, now = recipe.training, config.training
    rate, size = now.optimizer.learning_rate, samples_an_update(now)
    ratio = size / samples_an_update(before)
    if ratio != 1 and rate == before.optimizer.learning_rate:
        yield (
            f"training.optimizer.learning_rate: an update has {size:g} samples and the recipe's "
            f"{samples_an_update(before):g}; its rate times sqrt({ratio:.3g}) is {rate * math.sqrt(ratio):.2g}"
        )
    longer = now.iterations / before.iterations
    if longer > 1 and rate == before.optimizer.learning_rate and now.optimizer.schedule not in LASTING:
        yield (
            f"training.optimizer.schedule: {now.optimizer.schedule} is stretched to {longer:.3g} times the recipe's "
            "length, so that the rate stays high for as much longer; find one that holds with constant first "
            "(docs/long-runs.md)"
        )
