"""The rollouts that a run keeps in its folder: rollouts/iteration-000010-rank0.safetensors."""

from pathlib import Path
from typing import Any

from flowalign.config import BaseConfig, Config
from flowalign.policies.diffusion import Rollout
from flowalign.rollouts.contract import describe, write
from flowalign.rollouts.processes import Processes
from flowalign.rollouts.sampler import Sampled

FOLDER = "rollouts"
KEPT = 8
"""Newest files of each process that stay."""


class SavedRollouts:
    """Writes the trajectories of every `rollout.save_every`-th iteration, whichever way they were sampled.

    Args:
        run: the run's folder.
    """

    def __init__(self, config: BaseConfig, run: Path, processes: Processes) -> None:
        self.config, self.folder, self.processes = config, run / FOLDER, processes

    def save(self, sampled: Sampled[Any, Any]) -> None:
        """Write an iteration's samples of this process, while the policy has the weights that sampled them.

        Raises:
            FlowalignError: a file cannot describe them, or cannot be written.
        """
        iteration, processes = sampled.batch.iteration, self.processes
        if not isinstance(self.config, Config) or not isinstance(sampled.rollout, Rollout):
            return
        settings = self.config.rollout
        if not settings.save_every or iteration % settings.save_every:
            return
        file = describe(sampled.rollout, sampled.batch, settings, processes.row, processes.rows)
        if processes.column == 0:
            rank = f"rank{processes.row}.safetensors"
            write(self.folder / f"iteration-{iteration:06d}-{rank}", file)
            for old in sorted(self.folder.glob(f"iteration-*-{rank}"))[:-KEPT]:
                old.unlink()
