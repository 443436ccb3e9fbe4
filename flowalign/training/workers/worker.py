"""A rollout worker: it has a policy of its own, and samples with the newest weights that it got."""

import io
import os
import re
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from flowalign.config import BaseConfig, kind_of
from flowalign.data.batches import Batch
from flowalign.policies.base import Policy
from flowalign.policies.diffusion import Rollout
from flowalign.rollouts.engine import Generated, SamplingWeights
from flowalign.rollouts.sampler import Sampler
from flowalign.settings import parse
from flowalign.training.building import build_accelerator, build_policy, build_sampler, make_trainable
from flowalign.training.distributed.sharding import restore
from flowalign.training.learner import parameter_groups
from flowalign.training.memory import while_it_fits

SENT = frozenset({"image", "text", "prompt"})
"""Kinds of samples that workers send, by the names of a reward's needs."""
LAUNCHED = re.compile("(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|(ACCELERATE|FSDP)_.*")
"""Environment variables of a launched learner, which a worker must not inherit: it is not one of the processes."""


class Sent(NamedTuple):
    """Message of a worker to the learner."""

    result: bytes
    """`Generated` by torch.save: shared memory is sent once, and tensors are loaded to the learner's device."""
    forwards: int
    """Number of the network's evaluations for it."""
    seconds: float
    """Seconds of sampling."""


class RolloutWorker:
    """Samples in a separate process.

    Args:
        config: keys and values of the run's configuration.
        folder: folder from which relative paths in the configuration start.
        threads: number of the learner's threads; sums over another number would round differently.
    """

    def __init__(self, config: Mapping[str, Any], folder: str, threads: int) -> None:
        for name in filter(LAUNCHED.fullmatch, list(os.environ)):
            del os.environ[name]
        os.chdir(folder)
        torch.set_num_threads(threads)
        self.config: BaseConfig = parse(kind_of(config), config)
        self.iteration: int | None = None
        """Iteration of the loaded weights."""

    @cached_property
    def algorithm_and_sampler(self) -> tuple[Any, Sampler]:
        """The algorithm and its sampler; built at the first use, so that the caller gets the error if this fails."""
        accelerator = build_accelerator()
        algorithm = self.config.build_algorithm()
        policy = build_policy(self.config, accelerator.device)
        make_trainable(policy, self.config.model, self._reference)
        sampler = build_sampler(self.config, policy, SENT)
        groups = parameter_groups(policy, {**policy.companions, **algorithm.modules(policy)})
        self.parameters = {name: parameter for group in groups for name, parameter in group.items()}
        return algorithm, sampler

    @property
    def _reference(self) -> bool:
        return self.config.rollout.weights == "reference"

    def load(self, weights: SamplingWeights) -> None:
        """Load weights to sample with from now on."""
        algorithm, sampler = self.algorithm_and_sampler
        restore(self.parameters, weights.tensors)
        algorithm.progress(weights.rest["progress"])
        algorithm.updates = weights.rest["updates"]
        sampler.load_state(weights.rest)
        self.iteration = weights.iteration

    def sample(self, batch: Batch, iteration: int) -> Sent:
        """Sample a batch by the algorithm's rollout.

        Args:
            iteration: iteration of the weights that must be loaded.
        """
        begin = time.perf_counter()
        algorithm, sampler = self.algorithm_and_sampler
        assert self.iteration == iteration, "weights are loaded before samples of theirs are asked for"
        sampler.policy.forwards = 0

        def sampled() -> tuple[Any, Batch, list[Any]]:
            rollout, branched = algorithm.rollout(sampler, batch)
            return rollout, branched, algorithm.decode(sampler, rollout)

        with sampler.policy.reference() if self._reference else nullcontext():
            rollout, branched, samples = while_it_fits(self.config, "rollout", "batch_size", sampled, lambda: True)
        if isinstance(rollout, Rollout):
            # the learner puts its own policy there
            rollout = replace(rollout, policy=None)
        buffer = io.BytesIO()
        torch.save((rollout, branched, samples), buffer)
        return Sent(buffer.getvalue(), sampler.policy.forwards, time.perf_counter() - begin)


def received(sent: bytes, policy: Policy) -> Generated:
    """Read a worker's message, for the learner's policy."""
    # torch.load does not take 'cpu:0', which accelerate gives with several processes
    device = policy.device if policy.device.type != "cpu" else "cpu"
    result = Generated(*torch.load(io.BytesIO(sent), map_location=device, weights_only=False))
    if isinstance(result.rollout, Rollout):
        result.rollout.policy = policy
    return result
