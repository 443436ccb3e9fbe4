"""What a rollout worker does: it holds a policy of its own, and samples with the weights that it was last given."""

import io
import os
import re
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowalign.config import BaseConfig, kind_of
from flowalign.data.batches import Batch
from flowalign.policies.diffusion import Rollout
from flowalign.rollouts.base import Actor
from flowalign.rollouts.draw import Made
from flowalign.settings import parse
from flowalign.training.building import build_accelerator, build_actor, build_policy, make_trainable
from flowalign.training.distributed.sharding import restore
from flowalign.training.learner import parameter_groups
from flowalign.training.memory import while_it_fits
from rewards import as_reward

LAUNCHED = re.compile("(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|(ACCELERATE|FSDP)_.*")
"""environment of a learner among others, by which a worker would take itself for one of them"""


@dataclass
class Weights:
    """What samples depend on besides the batch."""

    iteration: int
    """before which the weights were these"""
    tensors: dict[str, Tensor]
    """what is trained, by name, whole and on the CPU"""
    rest: dict[str, Any]
    """JSON: 'progress' and 'updates' that the algorithm is told, and the 'plan' where it adapts"""


class Sent(NamedTuple):
    """What a worker sends back."""

    made: bytes
    """`Made` by torch.save: tensors that share memory go once, and land on the device of who loads them"""
    seconds: float
    """that it took"""


class Worker:
    """Samples in a process of its own.

    Args:
        config: keys and values of the run's configuration.
        folder: that relative paths in it start from.
        threads: of the learner; sums over another number of threads would round otherwise.
    """

    def __init__(self, config: Mapping[str, Any], folder: str, threads: int) -> None:
        for name in filter(LAUNCHED.fullmatch, list(os.environ)):
            del os.environ[name]
        os.chdir(folder)
        torch.set_num_threads(threads)
        self.config: BaseConfig = parse(kind_of(config), config)
        self.iteration: int | None = None
        """of the weights that it has"""

    @cached_property
    def parts(self) -> tuple[Any, Actor]:
        """The algorithm, and the actor that it samples through; built at the first use, so that who asks is told what
        fails."""
        accelerator = build_accelerator()
        algorithm = self.config.build_algorithm()
        policy = build_policy(self.config, accelerator.device)
        make_trainable(policy, self.config.model, self._reference)
        actor = build_actor(self.config, policy, as_reward(_unscored), accelerator)
        groups = parameter_groups(policy, {**policy.companions, **algorithm.modules(policy)})
        self.parameters = {name: parameter for group in groups for name, parameter in group.items()}
        return algorithm, actor

    @property
    def _reference(self) -> bool:
        return getattr(self.config.rollout, "weights", None) == "reference"

    def load(self, weights: Weights) -> None:
        """Sample with these from now on."""
        algorithm, actor = self.parts
        restore(self.parameters, weights.tensors)
        algorithm.progress(weights.rest["progress"])
        algorithm.updates = weights.rest["updates"]
        if "plan" in weights.rest:
            actor.plan.load_state_dict(weights.rest["plan"])  # type: ignore[attr-defined]
        self.iteration = weights.iteration

    def sample(self, batch: Batch, iteration: int) -> Sent:
        """What the algorithm's rollout makes of a batch.

        Args:
            iteration: of the weights that are meant.
        """
        begin = time.perf_counter()
        algorithm, actor = self.parts
        assert self.iteration == iteration, "weights are loaded before samples of theirs are asked for"
        actor.policy.forwards = 0

        def sampled() -> Made:
            return algorithm.made(actor, batch)

        with actor.policy.reference() if self._reference else nullcontext():
            made = while_it_fits(self.config, "rollout", "batch_size", sampled, lambda: True)
        rollout = made.rollout
        if isinstance(rollout, Rollout):
            # the learner's stands in for it there
            rollout = replace(rollout, policy=None)
        buffer = io.BytesIO()
        torch.save(tuple(made._replace(rollout=rollout, forwards=actor.policy.forwards)), buffer)
        return Sent(buffer.getvalue(), time.perf_counter() - begin)


def received(sent: bytes, actor: Actor) -> Made:
    """What a worker sent, for the learner's actor."""
    # accelerate's 'cpu:0' of several processes is no place that a file can be read to
    device = actor.device if actor.device.type != "cpu" else "cpu"
    made = Made(*torch.load(io.BytesIO(sent), map_location=device, weights_only=False))
    if isinstance(made.rollout, Rollout):
        made.rollout.policy = actor.policy
    return made


def _unscored(samples: list[Any], prompts: list[str]) -> list[float]:
    raise AssertionError("rewards are the learner's")
