"""The rollout workers of a process that learns, on Ray: started, given parts of batches, replaced if they die."""

import contextlib
import importlib
import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowalign.config import BaseConfig
from flowalign.config.workers import RolloutWorkers
from flowalign.data.batches import Batch
from flowalign.errors import ConfigError, FlowalignError
from flowalign.policies.base import Policy
from flowalign.rollouts.engine import Generated, SamplingWeights
from flowalign.training.distributed.sharding import copied
from flowalign.training.workers.worker import RolloutWorker, received

logger = logging.getLogger(__name__)

MOST_DEATHS = 3
"""Deaths of workers at one task after which the run ends: the task itself must be the cause."""
PATIENCE = 5.0
"""Seconds without an answer after which Ray's own processes count as lost."""
JOINING = 60.0
"""Seconds that the machines of a Ray that was started elsewhere may take to join it."""
TOKEN = Path.home() / ".ray" / "auth_token"
"""File of the token by which `ray start` of Ray 2.60 and later admits others."""


class LostRay(FlowalignError):
    """Ray's head, or its process on this machine, is gone; with a new Ray, the same command continues the run."""

    exit_code = 75
    """EX_TEMPFAIL, as in `Stopped`."""


@dataclass(eq=False)
class PublishedWeights:
    """Weights in Ray's store."""

    weights: SamplingWeights
    ref: Any


@dataclass(eq=False, kw_only=True)
class WorkerTask:
    """A part of a batch that a worker samples."""

    fleet: "Fleet"
    part: Batch
    published: PublishedWeights
    ref: Any = None
    deaths: int = 0
    """Deaths of workers at this task."""

    def result(self) -> Generated:
        """See `Fleet.result`."""
        return self.fleet.result(self)


@dataclass(eq=False)
class WorkerSlot:
    """A worker and its open tasks, in order."""

    worker: Any
    tasks: list[WorkerTask] = field(default_factory=list)
    published: PublishedWeights | None = None
    """Weights that the worker has when it begins the next task."""


class Fleet:
    """Starts workers, which build the configuration's policy and sample the parts of batches.

    With RAY_ADDRESS in the environment they are on that Ray; otherwise a Ray is started here, on the GPUs that no
    process learns on, and ends with this process.

    Args:
        device: device of the learner.
        processes: number of processes that learn, each with a fleet on the same Ray.

    Raises:
        ConfigError: no Ray answers there, or it is too small.
    """

    def __init__(self, config: BaseConfig, workers: RolloutWorkers, device: torch.device, processes: int = 1) -> None:
        self.config, self.workers = config, workers
        self.deaths, self.seconds, self.lags = 0, 0.0, list[int]()
        """Deaths of workers, seconds of sampling, and ages of weights in iterations, since the last `measured`."""
        self.policy: Policy | None = None
        """Policy of the learner, once it is there."""
        # by default Ray ends this process a minute after its head is gone, in the middle of an update
        os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "86400")
        # a Ray that is started here sends no usage statistics
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # the run waits for its workers, which at Ray's niceness of 15 wait for whatever else computes
        os.environ.setdefault("RAY_worker_niceness", "0")
        if "RAY_ADDRESS" in os.environ and TOKEN.is_file():
            # a Ray that needs no token ignores it
            os.environ.setdefault("RAY_AUTH_MODE", "token")
        self.ray: Any = importlib.import_module("ray")
        gpus = workers.gpus if workers.gpus is not None else float(device.type == "cuda")
        self._own = not self.ray.is_initialized()
        if self._own:
            self._connect(device)
        self._check_resources(workers.count * processes, gpus)
        node = self.ray.get_runtime_context().get_node_id()
        [local] = [entry for entry in self.ray.nodes() if entry["NodeID"] == node]
        self._ray_addresses = {
            "Ray's head": self.ray.get_runtime_context().gcs_address,
            "Ray's process on this machine": f"{local['NodeManagerAddress']}:{local['NodeManagerPort']}",
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
        """Refuse more workers than Ray has room for, since they would never start."""
        begin = time.monotonic()
        while self._missing(count, gpus):
            if "RAY_ADDRESS" not in os.environ or time.monotonic() - begin > JOINING:
                raise ConfigError(
                    f"rollout.workers: {count} workers take {self._missing(count, gpus)}; a lower count works, or a "
                    "lower share of a GPU for each (gpus)"
                )
            time.sleep(1)

    def _missing(self, count: int, gpus: float) -> str:
        """Describe the resource that Ray has too little of; '' if it has enough."""
        resources = self.ray.cluster_resources()
        for name, per_worker in (("CPU", 1.0), ("GPU", gpus)):
            if count * per_worker > resources.get(name, 0.0):
                return f"{count * per_worker:g} {name}s, and Ray has {resources.get(name, 0.0):g}"
        return ""

    def publish(self, iteration: int, parameters: Mapping[str, Tensor], state: dict[str, Any]) -> PublishedWeights:
        return self.republish(SamplingWeights(iteration, copied(parameters), state))

    def republish(self, weights: SamplingWeights) -> PublishedWeights:
        """Put weights into Ray's store, for parts to begin with."""
        self._check_ray_addresses()
        return PublishedWeights(weights, self.ray.put(weights))

    def generate(self, parts: Sequence[Batch], published: PublishedWeights) -> list[WorkerTask]:
        """Begin to sample parts of a batch, each by the worker with the fewest tasks."""
        tasks = [WorkerTask(fleet=self, part=part, published=published) for part in parts]
        for task in tasks:
            self._give(min(self.slots, key=lambda slot: len(slot.tasks)), task)
        return tasks

    def _give(self, slot: WorkerSlot, task: WorkerTask) -> None:
        # a worker handles its calls in order, so that it loads the weights before it samples
        if slot.published is not task.published:
            slot.worker.load.remote(task.published.ref)
            slot.published = task.published
        task.ref = slot.worker.sample.remote(task.part, task.published.weights.iteration)
        slot.tasks.append(task)

    def result(self, task: WorkerTask) -> Generated:
        """Wait for the samples of a task; if its worker dies, another one makes them.

        Raises:
            FlowalignError: the task failed, killed its workers, or took longer than training.timeout.
            LostRay: Ray is gone.
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
        self.policy.forwards += sent.forwards
        return received(sent.result, self.policy)

    def _wait(self, ref: object) -> None:
        begin = time.monotonic()
        while not self.ray.wait([ref], timeout=1.0)[0]:
            self._check_ray_addresses()
            if time.monotonic() - begin > self.config.training.timeout:
                raise FlowalignError(
                    f"a rollout worker did not answer in training.timeout={self.config.training.timeout:g} seconds; "
                    "--resume goes on from the run's last checkpoint"
                )

    def _replace(self, slot: WorkerSlot, reason: str) -> None:
        """Replace a worker that died by another one, which repeats all open tasks."""
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
        # it may still run, if Ray only lost the connection to it
        self.ray.kill(slot.worker)
        tasks, slot.tasks = slot.tasks, []
        slot.worker, slot.published = self._start(), None
        for task in tasks:
            self._give(slot, task)

    def _check_ray_addresses(self) -> None:
        """Raise if Ray itself no longer answers, as opposed to a worker that died."""
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
        """Metrics of this process's workers since the last call."""
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
    """Context in which CUDA_VISIBLE_DEVICES leaves out the learner's GPU, if there are others."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = before.split(",") if before else [str(i) for i in range(torch.cuda.device_count())]
    if device.type != "cuda" or len(names) == 1:
        yield
        return
    learner = device.index or 0
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(name for i, name in enumerate(names) if i != learner)
    try:
        yield
    finally:
        os.environ.pop("CUDA_VISIBLE_DEVICES")
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
