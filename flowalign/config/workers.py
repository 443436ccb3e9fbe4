"""Rollout workers: processes of their own that sample, on Ray (docs/rollout-workers.md)."""

import os
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from pydantic import Field

from flowalign.config.engines import check_staleness
from flowalign.config.method import Method
from flowalign.errors import ConfigError
from flowalign.settings import Section


class RolloutWorkers(Section):
    """Processes of their own that sample (extra `ray`)."""

    count: int = Field(ge=1)
    """Number of workers for each process that learns."""
    staleness: int = Field(0, ge=0)
    """Iterations that workers sample ahead, with weights that are as old; 0: same numbers as without workers."""
    gpus: float | None = Field(None, ge=0, le=1)
    """GPUs of each worker; below 1 several share one; default 1 where the run has GPUs, else 0."""

    def check(self, config: Any, algorithm: Method, groups: int, processes: int) -> None:
        """Refuse settings that do not work with workers, before a model loads.

        Args:
            config: the whole configuration.
            groups: number of groups of a process in an iteration.
        """
        if find_spec("ray") is None:
            raise ConfigError("rollout.workers: ray is not installed; pip install 'flowalign[ray]', or leave them out")
        if [int(number) for number in version("ray").split(".")[:2]] < [2, 60]:
            raise ConfigError(
                f"rollout.workers: Ray {version('ray')} lets in whoever reaches its ports; from 2.60 on it asks for a "
                "token: pip install -U 'ray>=2.60'"
            )
        if self.count > groups:
            raise ConfigError(
                f"rollout.workers.count: {self.count} workers, and an iteration has {groups} groups for them, which "
                f"stay whole; at most {groups} works"
            )
        if config.rollout.search is not None:
            raise ConfigError("rollout.workers: a search asks for rewards, and workers have none; search: null works")
        if config.rows(processes) != processes:
            raise ConfigError(
                "rollout.workers: a worker samples alone, and model.context_parallel shares each sample among "
                "processes; one of the two works"
            )
        if processes > 1 and "RAY_ADDRESS" not in os.environ:
            raise ConfigError(
                f"rollout.workers: {processes} processes learn, and share a Ray that was started for them: set "
                "RAY_ADDRESS=host:port, as scripts/slurm_ray.sh does"
            )
        if self.staleness:
            check_staleness("rollout.workers", config, algorithm)
