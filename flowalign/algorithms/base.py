"""What the trainer knows of an algorithm: how it samples, what it records and learns from, and the loss of an item.

An item is what is learned from in one piece: a step of a trajectory, a noised pair of pictures. The families are
subclasses: `trajectory/` learns from stochastic steps that were recorded, `text/` from tokens (both by
`policy_gradient.py`), `matching/` from noised clean samples.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from PIL.Image import Image
from pydantic import ValidationInfo, field_validator
from torch import Tensor, nn

from flowalign.config import BaseConfig, Data, Named
from flowalign.data import Prompts
from flowalign.data.batches import Batch
from flowalign.policies.base import Policy
from flowalign.policies.settings import Role, Snapshot
from flowalign.rollouts.processes import Processes
from flowalign.rollouts.sampler import RolloutT, Sampled, SamplerT
from flowalign.rollouts.scoring import Scorer
from flowalign.settings import Section
from rewards import Reward, Scores
from samplers.stored import Stored


class AlgorithmSettings(Section):
    """An algorithm's own settings; where a default has a name, settings without one change the default's, and a name
    alone is one without settings."""

    @field_validator("*", mode="before")
    @classmethod
    def _with_name(cls, value: object, field: ValidationInfo) -> object:
        assert field.field_name is not None
        default = cls.model_fields[field.field_name].default
        if isinstance(default, Named) and isinstance(value, str):
            return {"name": value}
        if isinstance(default, Named) and isinstance(value, Mapping) and "name" not in value:
            return default.model_dump() | dict(value)
        return value


@dataclass
class Experience:
    """One process's part of an iteration."""

    batch: Batch
    metrics: dict[str, float]
    items: Tensor
    """[N, ...] integers that name the items, as many for every group, group after group."""

    def outcome(self) -> tuple[Tensor, Tensor] | None:
        """[B] rewards of the batch's samples and [B] mean sizes of their advantages; None where there are none."""
        return None

    def useful(self, items: Tensor) -> Tensor | None:
        """[N] bool: the items whose loss has a gradient; None where all have."""
        return None

    def counted(self, items: Tensor) -> Tensor | None:
        """[N] bool: the items that an update's mean loss is over; None where it is over all."""
        return None

    def size(self, items: Tensor) -> Tensor:
        """[N] mean sizes of the items' advantages, where there are some."""
        raise NotImplementedError


@dataclass(kw_only=True)
class Preview:
    """A batch that was sampled and scored for people to look at."""

    rollout: Any
    batch: Batch
    images: list[Image]
    scores: Scores
    reward: Tensor
    """[B] reward of each sample: its score, or the algorithm's own value."""
    advantage: Tensor | None = None
    """[B, T], NaN for steps that nothing is learned from; None where the algorithm has no advantages."""
    sparse: Tensor | None = None
    """[B] advantage by the finished samples' rewards, where `advantage` is of rewards of the steps."""
    wins: Tensor | None = None
    """[B, B] share of the row's wins over the column, NaN for pairs that did not meet; None without comparisons"""


ConfigT = TypeVar("ConfigT", bound=BaseConfig)
PolicyT = TypeVar("PolicyT", bound=Policy[Any])
ExperienceT = TypeVar("ExperienceT", bound=Experience)
RecordT = TypeVar("RecordT")


class Algorithm(ABC, Generic[ConfigT, SamplerT, PolicyT, RolloutT, RecordT, ExperienceT]):
    """Base of all families, each of a kind of configuration, sampler, policy, rollout, record and experience.

    Args:
        settings: the algorithm's own, validated.
    """

    Settings: ClassVar[type[AlgorithmSettings]] = AlgorithmSettings
    kind: ClassVar[Literal["pictures", "text"]] = "pictures"
    """Kind of samples that it learns from."""
    combines: frozenset[str] = frozenset({"text_lora", "shards", "overlap", "store", "whole"})
    """Features that a run may combine it with, of these names:

    - text_lora: text encoders can be trained, since its losses ask for velocities of a rollout's states
    - shards: its network may be in shards
    - overlap: finished samples are scored before anything is learned from them, while others are sampled
    - store: it learns from trajectories, which can wait outside of the device
    - refill: it samples what it draws, group by group, so that groups can be replaced
    - replay: a group of an earlier iteration can stand in for one
    - search: it learns from finished samples alone, so that a search may have found them
    - workers: its `rollout` is all that it needs of sampling, so that other processes can do it
    - served: its `rollout` passes on whole trajectories as the sampler draws them, so that a server can draw them
    - ratios: it compares the policy with the one that sampled, action by action
    - passes: its items may be learned from several times in an iteration
    - chunks: it learns from videos that are made chunk by chunk
    - lines: a group is one line of the data, so that it may have one member
    - whole: each state of its trajectories was drawn from the one before, so that a file can describe them
    - advantages: items have advantages, whose size tells how much they teach
    """
    headline: ClassVar[str]
    """Metric that the progress bar shows."""
    unit: ClassVar[str]
    """Noun for its items, in messages."""
    idle: ClassVar[str] = ""
    """Reason why its gradient may be 0, for people; empty: what is usual for its kind of samples."""
    noise: Literal["kernel", "own", "start"] = "kernel"
    """Noise that makes the samples of a group differ: the configured kernel's, the algorithm's own, or the start's."""

    def __init__(self, settings: AlgorithmSettings) -> None:
        self.settings = settings
        self.updates = 0
        """Updates that the weights have had, told before each iteration."""

    @property
    def uses_reference(self) -> bool:
        """Whether the loss compares with the start weights."""
        return False

    @property
    def samples_otherwise(self) -> bool:
        """Whether samples need more on the policy than its weights, from `modules`: moved start noise, a writer."""
        return False

    @property
    def snapshots(self) -> Mapping[str, Snapshot]:
        """Copies of the weights that the method needs, by name; `training.snapshots` may set them otherwise."""
        return {}

    @property
    def roles(self) -> Mapping[str, Role]:
        """Further sets of weights that are trained, by name, in this order and before the policy in every update."""
        return {}

    @property
    def sampling_weights(self) -> str:
        """Weights that draw the next samples unless `rollout.weights` says otherwise."""
        return "policy"

    def check(self, config: ConfigT) -> None:
        """Refuse configurations that cannot work with this algorithm, saying what would."""

    def without_effect(self, config: ConfigT) -> tuple[list[str], str]:
        """Settings that are not as by default and that this method does not look at, and why."""
        return [], ""

    def check_reward(self, reward: Reward, config: ConfigT) -> None:
        """Refuse a reward that it cannot learn from, before the model that is trained loads."""

    def check_pipeline(self, config: ConfigT, name: str) -> None:
        """Refuse data that a pipeline of this class cannot learn from, before its weights are read."""

    def read(self, data: Data) -> Prompts:
        """Prompts that batches are drawn from."""
        return Prompts.of(data)

    @abstractmethod
    def items(self, config: ConfigT) -> int:
        """Number of items that a group has."""

    def branches(self, config: ConfigT) -> int:
        """Number of groups of samples that an iteration makes of a prompt."""
        return 1

    def modules(self, policy: PolicyT) -> Mapping[str, nn.Module]:
        """Networks of the algorithm's own that are trained and saved with the policy."""
        return {}

    def progress(self, done: float) -> None:
        """Told before each iteration what share of training is done, in [0, 1]."""

    def rollout(self, sampler: SamplerT, batch: Batch) -> tuple[RolloutT, Batch]:
        """The trajectories to learn from, and the samples they are of; a group's stand side by side."""
        return sampler.rollout(batch), batch

    def decode(self, sampler: SamplerT, rollout: RolloutT) -> list[Any] | None:
        """Finished samples to be scored; None where nothing is scored before anything is learned."""
        return sampler.decode(rollout)

    def score(self, scorer: Scorer, samples: Sequence[Any], batch: Batch) -> Scores:
        """Scores of finished samples; here the reward's.

        It may run in a thread of its own while the policy samples further groups, and so leaves the policy alone.
        """
        return scorer.score(samples, batch)

    @abstractmethod
    def record(self, sampled: Sampled[SamplerT, RolloutT], processes: Processes) -> RecordT:
        """Record for the advantages, gathered from all processes."""

    @abstractmethod
    def experience(self, sampled: Sampled[SamplerT, RolloutT], record: RecordT, processes: Processes) -> ExperienceT:
        """Experience that this process learns from, with its metrics."""

    def at_once(self, sampler: SamplerT, scorer: Scorer, batch: Batch) -> ExperienceT:
        """The experience of a batch that is sampled and scored at once, to look at."""
        rollout, batch = self.rollout(sampler, batch)
        samples = self.decode(sampler, rollout)
        scores = None if samples is None else self.score(scorer, samples, batch)
        sampled = Sampled(rollout=rollout, batch=batch, scores=scores, sampler=sampler, scorer=scorer)
        return self.experience(sampled, self.record(sampled, scorer.processes), scorer.processes)

    @abstractmethod
    def verify(self, policy: PolicyT, experience: ExperienceT) -> None:
        """Before the first update: refuse a pipeline that replay does not reproduce."""

    def reads(self, experience: ExperienceT, items: Tensor) -> Iterable[tuple[Stored, tuple[Tensor, ...]]]:
        """What `losses` of these items, on the host, reads of trajectories there, with the indices; while the items
        before are learned from it is copied to the device. Nothing: it is copied when it is read."""
        return ()

    @abstractmethod
    def losses(self, policy: PolicyT, experience: ExperienceT, items: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """[N] losses of items under the current weights, and named [N] values for the metrics."""

    def role_losses(
        self, role: str, policy: PolicyT, experience: ExperienceT, items: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The same of another set of weights, which the policy has meanwhile; its own are the snapshot 'policy'."""
        raise NotImplementedError

    def redrawn(self, experience: ExperienceT, number: int) -> ExperienceT:
        """The experience for the update of this number, from 0, of another set of weights; with noise of its own."""
        return experience

    @property
    def measures(self) -> bool:
        """Whether `measure` adds figures to an evaluation."""
        return False

    def measure(self, sampler: SamplerT) -> dict[str, float]:
        """Further figures of an evaluation; called on the main process alone."""
        return {}

    def show(self, sampler: SamplerT, scorer: Scorer, batch: Batch) -> Preview:
        """Sample and score a batch for people to look at; here by a plain rollout."""
        rollout = sampler.rollout(batch)
        images = sampler.decode(rollout, shown=True)
        scores = scorer.score(images, batch)
        return Preview(rollout=rollout, batch=batch, images=images, scores=scores, reward=scores.value)

    def state(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        """Tensors by file, and JSON, of what it learned beside the weights, for the checkpoint."""
        return {}, {}

    def load_state(self, tensors: dict[str, dict[str, Tensor]], state: dict[str, Any], device: torch.device) -> None:
        """The inverse of `state`."""
