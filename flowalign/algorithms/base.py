"""What the trainer knows of an algorithm: how it samples, what it records and learns from, and the loss of an item.

An item is what is learned from in one piece: a step of a trajectory, a noised pair of pictures. The families are
subclasses: `trajectory/` learns from stochastic steps that were recorded, `text/` from tokens (both by
`policy_gradient.py`), `matching/` from noised clean samples.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from PIL.Image import Image
from pydantic import ValidationInfo, field_validator
from torch import Tensor, nn

from flowalign.config import Data, Named
from flowalign.data import Prompts
from flowalign.data.batches import Batch
from flowalign.policies.settings import Role, Snapshot
from flowalign.rollouts.draw import Made, Sampled
from flowalign.settings import Section
from rewards import Scores


class AlgorithmSettings(Section):
    """An algorithm's own settings; where a default has a name, settings without one change the default's, and a name
    alone is one without settings."""

    @field_validator("*", mode="before")
    @classmethod
    def _with_name(cls, value: Any, field: ValidationInfo) -> Any:
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
    """[N, ...] integers that name what is learned from, as many for every group, group after group"""

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


@dataclass
class Seen:
    """A batch that was sampled and scored for people to look at."""

    rollout: Any
    """Of the policy's kind."""
    batch: Batch
    images: list[Image]
    scores: Scores
    reward: Tensor
    """[B] what a sample is rewarded with: its score, or what the algorithm makes of it"""
    advantage: Tensor | None = None
    """[B, T], NaN for steps that nothing is learned from; None where the algorithm has no advantages"""
    wins: Tensor | None = None
    """[B, B] share of the row's wins over the column, NaN for pairs that did not meet; None without comparisons"""


class Algorithm:
    """Base of all families.

    Args:
        settings: the algorithm's own, validated.
    """

    Settings: ClassVar[type[AlgorithmSettings]] = AlgorithmSettings
    kind: ClassVar[Literal["pictures", "text"]] = "pictures"
    """of the samples that it learns from"""
    scored: ClassVar[bool] = True
    """finished samples are decoded and scored before anything is learned from them"""
    combines: frozenset[str] = frozenset({"text_lora", "shards"})
    """What a run may combine it with, of these names:

    - text_lora: text encoders can be trained, since its losses ask for velocities of a rollout's states
    - shards: its network may be in shards
    - refill: it samples what it draws, group by group, so that groups can be replaced
    - replay: a group of an earlier iteration can stand in for one
    - search: it learns from finished samples alone, so that a search may have found them
    - workers: its `rollout` is all that it needs of sampling, so that other processes can do it
    - ratios: it compares the policy with the one that sampled, action by action
    - advantages: items have advantages, whose size tells how much they teach
    """
    moves_start: ClassVar[bool] = False
    """what it trains moves the start noise of a generator that stays as it is, and is asked whenever that samples"""
    headline: ClassVar[str]
    """the metric that the progress bar shows"""
    unit: ClassVar[str]
    """what items are, in messages"""
    idle: ClassVar[str] = ""
    """why its gradient may be 0, for people; empty: what is usual for its kind of samples"""
    noise: ClassVar[Literal["kernel", "own", "start"]] = "kernel"
    """what makes the samples of a group differ: noise of the configured kernel, of the algorithm, or of the start"""

    updates: int = 0
    """that the weights have had, told before each iteration"""

    def __init__(self, settings: AlgorithmSettings) -> None:
        self.settings = settings

    @property
    def uses_reference(self) -> bool:
        """Whether the loss compares with the start weights."""
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
        """What draws the next samples unless `rollout.weights` says otherwise."""
        return "policy"

    def check(self, config: Any) -> None:
        """Refuse configurations that cannot work with this algorithm, saying what would."""

    def without_effect(self, config: Any) -> list[str]:
        """Settings that are not as by default, and that this method does not look at."""
        return []

    def check_reward(self, reward: Any, config: Any) -> None:
        """Refuse a reward that it cannot learn from, before the model that is trained loads."""

    def check_pipeline(self, config: Any, name: str) -> None:
        """Refuse data that a pipeline of this class cannot learn from, before its weights are read."""

    def read(self, data: Data) -> Prompts:
        """What batches are drawn from."""
        return Prompts.of(data)

    def items(self, config: Any) -> int:
        """How many items a group has."""
        raise NotImplementedError

    def branches(self, config: Any) -> int:
        """How many groups of samples an iteration makes of a prompt."""
        return 1

    def modules(self, policy: Any) -> Mapping[str, nn.Module]:
        """Networks of the algorithm's own that are trained and saved with the policy."""
        return {}

    def progress(self, done: float) -> None:
        """Told before each iteration what share of training is done, in [0, 1]."""

    def rollout(self, sampler: Any, batch: Batch) -> tuple[Any, Batch]:
        """The trajectories to learn from, and the samples they are of; a group's stand side by side."""
        return sampler.rollout(batch), batch

    def scorer(self, actor: Any) -> Callable[[Sequence[Any], Batch], Scores]:
        """The function (samples, batch) -> scores of finished samples; here the reward.

        It may run in a thread of its own while the policy samples further groups, and so leaves the policy alone.
        """
        score: Callable[[Sequence[Any], Batch], Scores] = actor.score
        return score

    def record(self, sampled: Sampled, actor: Any) -> Any:
        """What advantages are worked out from, gathered from all processes; here nothing."""
        return None

    def experience(self, sampled: Sampled, record: Any, actor: Any) -> Any:
        """What this process learns from, with what was measured on the way."""
        raise NotImplementedError

    def made(self, sampler: Any, batch: Batch) -> Made:
        """The rollout of a batch and its finished samples; also what a rollout worker makes."""
        rollout, own = self.rollout(sampler, batch)
        return Made(rollout, own, sampler.decode(rollout) if self.scored else None)

    def at_once(self, actor: Any, batch: Batch) -> Any:
        """The experience of a batch that is sampled and scored at once, to look at."""
        rollout, own, samples, _ = self.made(actor.sampler, batch)
        sampled = Sampled(rollout, own, None if samples is None else self.scorer(actor)(samples, own))
        return self.experience(sampled, self.record(sampled, actor), actor)

    def verify(self, policy: Any, experience: Any) -> None:
        """Before the first update: refuse a pipeline that replay does not reproduce."""
        raise NotImplementedError

    def losses(self, policy: Any, experience: Any, items: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """[N] losses of items under the present weights, and named [N] values for the metrics."""
        raise NotImplementedError

    def role_losses(self, role: str, policy: Any, experience: Any, items: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The same of another set of weights, which the policy has meanwhile; its own are the snapshot 'policy'."""
        raise NotImplementedError

    def redrawn(self, experience: Any, number: int) -> Any:
        """The experience for the update of this number, from 0, of another set of weights; with noise of its own."""
        return experience

    @property
    def measures(self) -> bool:
        """Whether `measure` adds figures to an evaluation."""
        return False

    def measure(self, actor: Any) -> dict[str, float]:
        """Further figures of an evaluation; called on the main process alone."""
        return {}

    def show(self, actor: Any, batch: Batch) -> Seen:
        """Sample and score a batch for people to look at; here by a plain rollout."""
        rollout = actor.sampler.rollout(batch)
        images = actor.sampler.decode(rollout, shown=True)
        scores = actor.score(images, batch)
        return Seen(rollout, batch, images, scores, scores.value)
