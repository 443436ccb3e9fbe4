"""The small run that tests train: one iteration of a shipped recipe on four prompts, in a second or two."""

import functools
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flowalign.algorithms.trajectory.base import TrajectoryAlgorithm
from flowalign.config import Weighted, load, recipe
from flowalign.data import ASSETS
from flowalign.policies.diffusion.storage import load_pipeline
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


def small_run(name: str, folder: Path, *overrides: str, whole: bool = False, **more: Any) -> Trainer:
    """A trainer of the recipe `name`, such as tiny_sd3/flow_grpo, with its results in folder/run.

    Args:
        overrides: applied after `SMALL`.
        whole: whether the shipped picture model has all its blocks, and draws what it was asked for.
        more: of `Trainer`.
    """
    config = load(recipe(name), [*SMALL, f"output={folder}", *overrides])
    # hicogen weights the parts of `shapes`
    if config.model.path == "tiny_sd3" and not whole and name != "tiny_sd3/hicogen":
        config.model.path = two_blocks().name
        asked = any(setting.startswith("rewards=") for setting in overrides)
        if not asked and [reward.name for reward in config.rewards] == ["shapes"]:
            # no shape is in them, so that no group would have a spread
            config.rewards = [Weighted(name="image_statistic", statistic="brightness")]
    return Trainer(config, progress=False, **more)


@functools.cache
def two_blocks() -> tempfile.TemporaryDirectory[str]:
    """The shipped picture model with its first and last block alone: its pictures are noise, in half of the time."""
    pipe = load_pipeline(ASSETS / "tiny_sd3", torch.float32)
    network = pipe.transformer
    network.transformer_blocks = nn.ModuleList([network.transformer_blocks[0], network.transformer_blocks[-1]])
    network.register_to_config(num_layers=2)
    folder = tempfile.TemporaryDirectory()
    pipe.save_pretrained(folder.name)
    return folder
