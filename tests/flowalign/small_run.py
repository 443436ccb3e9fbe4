"""The small run that tests train: one iteration of a shipped recipe on four prompts, in a second or two."""

from pathlib import Path
from typing import Any

from flowalign.algorithms.trajectory.base import TrajectoryAlgorithm
from flowalign.config import load, recipe
from flowalign.registry import names, resolve
from flowalign.training import Trainer

SMALL = [
    "evaluation.prompts=null",
    "training.iterations=1",
    "training.prompts_per_iteration=4",
    "training.updates_per_iteration=1",
    # a first update of rate 0 would show nothing
    "training.optimizer.warmup_updates=0",
    "name=run",
]
# which sample, score and record as flow_grpo or dense_grpo does; pro_grpo scores on its way, and has a test of its own
COLLECTING = [
    name
    for name in names("algorithms")
    if issubclass(resolve("algorithms", name), TrajectoryAlgorithm)
    and name not in ("flash_grpo", "flow_dppo", "flow_grpo_fast", "grpo_guard", "pro_grpo", "stepwise_flow_grpo")
    and name not in ("tafs_grpo", "vgpo")
    # whose prompts are written anew by every member
    and name != "uni_grpo"
]
"""One trajectory method for each way of collecting."""


def small_run(name: str, folder: Path, *overrides: str, **more: Any) -> Trainer:
    """A trainer of the recipe `name`, such as tiny_sd3/flow_grpo, with its results in folder/run.

    Args:
        overrides: applied after `SMALL`.
        more: of `Trainer`.
    """
    return Trainer(load(recipe(name), [*SMALL, f"output={folder}", *overrides]), progress=False, **more)
