"""The rollout workers of a process that learns, on Ray: started, given parts of batches, replaced where they die."""

import contextlib
import importlib
import logging
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flowalign.config import BaseConfig
from flowalign.config.workers import RolloutWorkers
from flowalign.data.batches import Batch
from flowalign.errors import ConfigError, FlowalignError
from flowalign.policies.base import Policy
from flowalign.training.workers.worker import RolloutWorker, SamplingWeights, WorkerResult, received

logger = logging.getLogger(__name__)

MOST_DEATHS = 3
"""Deaths of workers at one task, after which the task is to blame."""
PATIENCE = 5.0
"""Seconds without an answer after which Ray's own processes are given up."""
JOINING = 60.0
"""Seconds that the machines of a Ray that was started elsewhere may take to join it."""
TOKEN = Path.home() / ".ray" / "auth_token"
"""Token file by which `ray start` of Ray 2.60 and later admits others."""


class LostRay(FlowalignError):
    """Ray's head, or its process on this machine, is gone; the command is to be given again with a new one."""

    exit_code = 75
    """EX_TEMPFAIL, as of `Stopped`."""


@dataclass(eq=False)
class PublishedWeights:
    """Weights in Ray's store."""

    weights: SamplingWeights
    ref: Any


@dataclass(eq=False, kw_only=True)
class Task:
    """A part of a batch that a worker samples."""

    part: Batch
    published: PublishedWeights
    ref: Any = None
    deaths: int = 0
    """Deaths of workers at this task."""


@dataclass(eq=False)
class WorkerSlot:
    """A worker, and what it still has to do, in order."""

    worker: Any
    tasks: list[Task] = field(default_factory=list)
    published: PublishedWeights | None = None
    """Weights that it has when it comes to the next task."""


class Fleet:
    """Starts workers that build the configuration's policy; one at the other end of every part that is begun.

    With RAY_ADDRESS in the environment they are on that Ray; otherwise one is started here, on the GPUs that no process
    learns on, and ends with this process.

    Args:
        device: of the learner.
        processes: that learn, each with a fleet on the same Ray.

    Raises:
        ConfigError: no Ray answers there, or it is too small.
    """

    def __init__(self, config: BaseConfig, workers: RolloutWorkers, device: torch.device, processes: int = 1) -> None:
        self.config, self.workers = config, workers
        self.deaths, self.seconds, self.lags = 0, 0.0, list[int]()
        """Since the last `measured`: deaths of workers, seconds of sampling, age of the weights in iterations."""
        self.policy: Policy | None = None
        """Policy of the learner, once it is there."""
        # without it Ray ends this process in the middle of an update, a minute after its head is gone
        os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "86400")
        # what started here tells nobody
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        if "RAY_ADDRESS" in os.environ and TOKEN.is_file():
            # a Ray that asks for none does not mind
            os.environ.setdefault("RAY_AUTH_MODE", "token")
        self.ray: Any = importlib.import_module("ray")
        gpus = workers.gpus if workers.gpus is not None else float(device.type == "cuda")
        self._own = not self.ray.is_initialized()
        if self._own:
            self._connect(device)
        self._check_resources(workers.count * processes, gpus)
        node = self.ray.get_runtime_context().get_node_id()
        [own] = [entry for entry in self.ray.nodes() if entry["NodeID"] == node]
        self._ray_addresses = {
            "Ray's head": self.ray.get_runtime_context().gcs_address,
            "Ray's process on this machine": f"{own['NodeManagerAddress']}:{own['NodeManagerPort']}",
        }
        start = self.ray.remote(RolloutWorker).options(num_cpus=1, num_gpus=gpus, scheduling_strategy="SPREAD")
        self._start = lambda: start.remote(config.model_dump(mode="json"), os.getcwd(), torch.get_num_threads())
        self.slots = [WorkerSlot(self._start()) for _ in range(workers.count)]

    def _connect(self, device: torch.device) -> None:
        address = os.environ.get("RAY_ADDRESS")
        quiet = {"log_to_driver": False, "logging_level": logging.CRITICAL}
        if address is None:
            with _other_gpus(device):
                self.ray.init("local", num_cpus=self.workers.count, include_dashboard=False, **quiet)
            return
        try:
            self.ray.init(address, **quiet)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"rollout.workers: no Ray answers at RAY_ADDRESS={address}, or it wants a token that is not in {TOKEN}"
            ) from error

    def _check_resources(self, count: int, gpus: float) -> None:
        """Refuse more workers than there is room for: they would be waited for without end."""
        begin = time.monotonic()
        while self._missing(count, gpus):
            if "RAY_ADDRESS" not in os.environ or time.monotonic() - begin > JOINING:
                raise ConfigError(
                    f"rollout.workers: {count} workers take {self._missing(count, gpus)}; a lower count works, or a "
                    "lower share of a GPU for each (gpus)"
                )
            time.sleep(1)

    def _missing(self, count: int, gpus: float) -> str:
        """What Ray has too little of."""
        there = self.ray.cluster_resources()
        for name, each in (("CPU", 1.0), ("GPU", gpus)):
            if count * each > there.get(name, 0.0):
                return f"{count * each:g} {name}s, and Ray has {there.get(name, 0.0):g}"
        return ""

    def put(self, weights: SamplingWeights) -> PublishedWeights:
        """Weights that parts may be begun with."""
        self._check_ray_addresses()
        return PublishedWeights(weights, self.ray.put(weights))

    def begin(self, parts: Sequence[Batch], published: PublishedWeights) -> list[Task]:
        """Begin with parts of a batch, each by the worker that has the fewest to do."""
        tasks = [Task(part=part, published=published) for part in parts]
        for task in tasks:
            self._give(min(self.slots, key=lambda slot: len(slot.tasks)), task)
        return tasks

    def _give(self, slot: WorkerSlot, task: Task) -> None:
        # a worker does what it is asked in the order of the asking
        if slot.published is not task.published:
            slot.worker.load.remote(task.published.ref)
            slot.published = task.published
        task.ref = slot.worker.sample.remote(task.part, task.published.weights.iteration)
        slot.tasks.append(task)

    def result(self, task: Task) -> WorkerResult:
        """What was made of a part; where its worker dies, by another one.

        Raises:
            FlowalignError: it failed, killed its workers, or did not come in training.timeout; `LostRay`.
        """
        from ray.exceptions import RayActorError, RayTaskError

        assert self.policy is not None
        [slot] = [slot for slot in self.slots if task in slot.tasks]
        while True:
            self._wait(task.ref)
            try:
                sent = self.ray.get(task.ref)
                break
            except RayActorError as error:
                self._check_ray_addresses()
                self._replace(slot, " ".join(str(error).split())[:300])
            except RayTaskError as error:
                if isinstance(error.cause, FlowalignError):
                    raise error.cause from None
                if isinstance(error.cause, torch.OutOfMemoryError):
                    raise FlowalignError(
                        "a rollout worker's memory ran out, with rollout.batch_size 1 too; what helps: "
                        "model.offload_vae: true, smaller pictures, a larger rollout.workers.gpus"
                    ) from error
                raise
        slot.tasks.remove(task)
        self.seconds += sent.seconds
        self.lags.append(task.part.iteration - task.published.weights.iteration)
        result = received(sent.result, self.policy)
        self.policy.forwards += result.forwards
        return result

    def _wait(self, ref: Any) -> None:
        begin = time.monotonic()
        while not self.ray.wait([ref], timeout=1.0)[0]:
            self._check_ray_addresses()
            if time.monotonic() - begin > self.config.training.timeout:
                raise FlowalignError(
                    f"a rollout worker did not answer in training.timeout={self.config.training.timeout:g} seconds; "
                    "--resume goes on from the run's last checkpoint"
                )

    def _replace(self, slot: WorkerSlot, reason: str) -> None:
        """Another worker in the place of one that died; it redoes what was not collected."""
        logger.warning("a rollout worker died, and another one does its groups again: %s", reason)
        self.deaths += 1
        first = slot.tasks[0]
        first.deaths += 1
        if first.deaths == MOST_DEATHS:
            numbers = sorted(set(first.part.group))
            raise FlowalignError(
                f"{MOST_DEATHS} rollout workers died at groups {numbers[0]} to {numbers[-1]} of iteration "
                f"{first.part.iteration}, the last one: {reason}"
            )
        # one that Ray only lost sight of
        self.ray.kill(slot.worker)
        tasks, slot.tasks = slot.tasks, []
        slot.worker, slot.published = self._start(), None
        for task in tasks:
            self._give(slot, task)

    def _check_ray_addresses(self) -> None:
        """Raise where Ray itself no longer answers; a worker that dies is another matter."""
        for name, address in self._ray_addresses.items():
            begin = time.monotonic()
            while not _answers(address):
                if time.monotonic() - begin > PATIENCE:
                    self._own = False
                    raise LostRay(
                        f"rollout.workers: {name} at {address} is gone; with Ray started again, --resume goes on from "
                        "the run's last checkpoint"
                    )
                time.sleep(0.5)

    def measured(self) -> dict[str, float]:
        """What the workers of this process did since the last time."""
        metrics = {
            "workers/staleness": sum(self.lags) / max(1, len(self.lags)),
            "workers/restarts": float(self.deaths),
            "seconds/workers": self.seconds,
        }
        self.deaths, self.seconds, self.lags = 0, 0.0, []
        return metrics

    def close(self) -> None:
        """End the workers, and a Ray that was started for them."""
        for slot in self.slots:
            self.ray.kill(slot.worker)
        self.slots = []
        if self._own:
            self.ray.shutdown()


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=2).close()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _other_gpus(device: torch.device) -> Any:
    """Within it CUDA_VISIBLE_DEVICES is without the learner's GPU, where there are others."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = before.split(",") if before else [str(i) for i in range(torch.cuda.device_count())]
    if device.type != "cuda" or len(names) == 1:
        yield
        return
    own = device.index or 0
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(name for i, name in enumerate(names) if i != own)
    try:
        yield
    finally:
        os.environ.pop("CUDA_VISIBLE_DEVICES")
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
