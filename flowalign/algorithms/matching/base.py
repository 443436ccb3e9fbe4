"""The matching family: clean samples on the forward process, however they were made.

A method of the family is a few answers: whose samples (`rollout.weights`, or pictures of the data), what they weigh
(`credit`), which errors its loss compares (`compares`), and the loss of a sample at a noise level (`loss`). Errors are
e(v), the mean over elements of (v - (noise - x0))^2, under the policy, the `old` snapshot and the reference.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Generic, Literal

import torch
from pydantic import Field
from torch import Generator, Tensor

from flowalign.algorithms import base
from flowalign.algorithms.base import RecordT
from flowalign.config import Config, Named
from flowalign.core.divergences import velocity_mse
from flowalign.core.seams import MissingMethod, checked_loss
from flowalign.data.batches import Batch
from flowalign.errors import ConfigError, nearest
from flowalign.policies.diffusion import CleanSamples, DiffusersPolicy, Noised, Rollout
from flowalign.rollouts.pictures import DiffusionSampler
from flowalign.rollouts.sampler import RolloutT
from rewards import Scores
from samplers import derive_seed


class MatchingSettings(base.AlgorithmSettings):
    """Settings that the whole family has; a method adds its own."""

    levels: Named = Named(name="schedule")
    """Name in `flowalign list levels`, with its settings."""
    levels_of: Literal["sample", "micro_batch", "group", "batch"] = "sample"
    """Unit with noise levels of its own; `micro_batch`: as many neighbours of a group as fill one with their levels."""
    noise_of: Literal["sample", "group"] = "sample"
    """Unit that has noise of its own, at each level."""
    guidance: float | None = Field(None, ge=1)
    """Scale of the trained velocities; default 1, or the rollout's where the scale is an input of the network."""
    kl_weight: float = Field(0.0, ge=0)
    """Weight of the mean squared difference from the start weights' velocity."""
    reference: str | None = None
    """Snapshot (`training.snapshots`) in the place of the start weights in the loss and its penalty."""
    reference_guidance: float | None = Field(None, ge=1)
    """Classifier-free scale of the reference's velocity; default `guidance`."""


@dataclass(kw_only=True)
class Points:
    """N samples, each noised to a level, under the current weights; gradients flow through `velocity`."""

    noised: Noised
    velocity: Tensor
    """[N, ...] the policy's velocity."""
    advantage: Tensor
    """[N]"""
    reward: Tensor
    """[N]"""
    group: Tensor
    """[N] integers"""
    old: Tensor | None = None
    """[N, ...] the velocity of the snapshot `old`, None where the loss does not compare with it"""
    reference: Tensor | None = None
    """[N, ...] the velocity of the start weights, None where the loss does not use it"""
    held: Tensor | float = 1.0
    """[N] factor of the divergence from the start weights."""
    size: int = 1
    """Samples of an item, which are side by side: a whole group where the loss looks at groups."""
    rollout: Rollout | None = None
    """Rollout that made them, None where they are pictures of the data."""
    taught: Tensor | None = None
    """[N, ...] the velocity of a teacher, where there is one."""

    def of_item(self, values: Tensor) -> Tensor:
        """[N / size, size] values [N] of the samples, an item a row."""
        return values.view(-1, self.size)

    @cached_property
    def error(self) -> Tensor:
        """[N] e(v) of the policy."""
        return self.noised.error(self.velocity)

    @cached_property
    def error_old(self) -> Tensor:
        """[N] e(v) of the snapshot `old`."""
        assert self.old is not None
        return self.noised.error(self.old)

    @cached_property
    def error_reference(self) -> Tensor:
        """[N] e(v) of the start weights."""
        assert self.reference is not None
        return self.noised.error(self.reference)


@dataclass(kw_only=True)
class MatchingExperience(base.Experience):
    """B clean samples of one process, each at L noise levels."""

    clean: CleanSamples
    level_index: Tensor
    """[B, L] the numbers of its levels in `clean`"""
    noise_seeds: list[int]
    """Seeds of each sample's noise, before its level counts; not used where there is `noise`."""
    advantage: Tensor
    """[B]"""
    reward: Tensor
    """[B]"""
    group: Tensor
    """[B]"""
    guided: CleanSamples | None = None
    """The same under the reference's guidance, where it is another."""
    rollout: Rollout | None = None
    """Rollout that made them, None where they are pictures of the data."""
    scores: Scores | None = None
    only_advantages: bool = False
    """Whether the loss is one of advantages alone."""
    kept: Tensor | None = None
    """[B] bool: the samples that an update's mean is over, None: all"""
    held: Tensor | None = None
    """[B] factor of each sample's divergence from the start weights; None: 1."""
    chosen: Tensor | None = None
    """[groups, M] the samples of a group's item; None: all."""
    noise: Tensor | None = None
    """[B, L, ...] noise of each sample at each of its levels; None: drawn by the seeds."""
    state: Tensor | None = None
    """[B, L] numbers of the states that this noise leads to; equal ones are one state. None: each is another."""

    def outcome(self) -> tuple[Tensor, Tensor] | None:
        return None if self.scores is None else (self.scores.value, self.advantage.abs())

    def useful(self, items: Tensor) -> Tensor | None:
        return self._any(self.advantage.ne(0), items) if self.only_advantages else None

    def counted(self, items: Tensor) -> Tensor | None:
        return None if self.kept is None else self._any(self.kept, items)

    def size(self, items: Tensor) -> Tensor:
        return self.advantage[self.members(items)].abs().view(len(items), -1).mean(1)

    def _any(self, of_samples: Tensor, items: Tensor) -> Tensor:
        return of_samples[self.members(items)].view(len(items), -1).any(1)

    def members(self, items: Tensor) -> Tensor:
        """[N * M] the samples of these items: one each, a whole group, or those chosen of it."""
        if self.chosen is not None:
            return self.chosen[items[:, 0]].flatten()
        size = len(self.batch) * self.level_index.shape[1] // len(self.items)
        return (items[:, :1] * size + torch.arange(size, device=items.device)).flatten()

    def places(self, items: Tensor) -> Tensor:
        """[N * M] the place of each member's level among its sample's."""
        return items[:, 1].repeat_interleave(len(self.members(items)) // len(items))

    def noised(self, items: Tensor) -> Noised:
        """The samples of these items, at their levels."""
        samples, columns = self.members(items), self.places(items)
        if self.noise is not None:
            noised = self.clean.noised_by(samples, self.level_index[samples, columns], self.noise[samples, columns])
            return noised if self.state is None else replace(noised, state=self.state[samples, columns])
        pairs = zip(samples.tolist(), columns.tolist(), strict=True)
        seeds = [derive_seed(self.noise_seeds[sample], column) for sample, column in pairs]
        return self.clean.noised(samples, self.level_index[samples, columns], seeds)


class Matching(
    base.Algorithm[Config, DiffusionSampler, DiffusersPolicy, RolloutT, RecordT, MatchingExperience],
    Generic[RolloutT, RecordT],
):
    """Base of the family."""

    Settings: ClassVar[type[base.AlgorithmSettings]] = MatchingSettings
    settings: MatchingSettings
    unit = "noise levels"
    noise: Literal["kernel", "own", "start"] = "start"
    combines = base.Algorithm.combines - {"text_lora"}
    compares: ClassVar[frozenset[str]] = frozenset()
    """Weights that the loss compares the policy with: 'old', 'reference'."""
    whole_groups: ClassVar[bool] = False
    """Whether the loss looks at all members of a group at once: an item is a group at a level."""

    def __init__(self, settings: MatchingSettings) -> None:
        super().__init__(settings)
        self.draw_levels = settings.levels.part("levels", "algorithm.levels")

    @property
    def compares_reference(self) -> bool:
        """Whether points are asked of the reference too."""
        return "reference" in self.compares or self.settings.kl_weight > 0

    @property
    def uses_reference(self) -> bool:
        return self.compares_reference

    def check(self, config: Config) -> None:
        try:
            self.level_count(config)
        except ValueError as error:
            raise ConfigError(f"algorithm.levels: {error}") from error
        if self.settings.reference_guidance is not None and not self.uses_reference:
            raise ConfigError("algorithm.reference_guidance: the loss has no reference; set algorithm.kl_weight too")
        named, known = self.settings.reference, [*self.snapshots, *config.training.snapshots]
        if named is not None and named not in known:
            raise ConfigError(
                f"algorithm.reference: no snapshot is called '{named}'; {nearest(named, known)}; training.snapshots "
                "makes some"
            )

    def level_count(self, config: Config) -> int:
        """L, the noise levels of each sample."""
        return len(self.draw_levels(config.rollout.steps, Generator()))

    def items(self, config: Config) -> int:
        return self.level_count(config) * (1 if self.whole_groups else config.training.group_size)

    def clean(
        self, sampler: DiffusionSampler, batch: Batch, x0: Tensor, **more: Any
    ) -> tuple[CleanSamples, CleanSamples | None, Tensor]:
        """Samples ready to be noised, the same for the reference where it is guided otherwise, and [B, L] levels.

        Args:
            more: of `ForwardProcess.of`.
        """
        drawn, wanted = self.drawn_levels(sampler, batch), self.settings.reference_guidance
        guidance = self.guidance(sampler)
        clean, level_index = self.at_levels(sampler, batch, x0, drawn, guidance, **more)
        guided = None if wanted in (None, guidance) else self.at_levels(sampler, batch, x0, drawn, wanted, **more)[0]
        return clean, guided, level_index

    def guidance(self, sampler: DiffusionSampler) -> float | tuple[float, ...]:
        """The scale of the velocities that are trained."""
        if self.settings.guidance is not None:
            return self.settings.guidance
        if sampler.policy.family.negative(2.0):
            return 1.0
        scale = sampler.config.rollout.guidance
        if isinstance(scale, list):
            raise ConfigError(
                "algorithm.guidance: rollout.guidance has a scale for each step, and noised samples have levels of "
                f"their own; one number works, e.g. {max(scale):g}"
            )
        return scale

    def at_levels(
        self,
        sampler: DiffusionSampler,
        batch: Batch,
        x0: Tensor,
        drawn: Tensor,
        guidance: float | tuple[float, ...],
        **more: Any,
    ) -> tuple[CleanSamples, Tensor]:
        """Samples ready to be noised to levels as `drawn_levels` draws them, and [B, L] their numbers."""
        sigmas = None
        if drawn.is_floating_point():
            falling, drawn = (-drawn).unique(return_inverse=True)
            sigmas = -falling
        return self.conditioned(sampler, batch, x0, guidance, sigmas, **more), drawn.to(x0.device)

    @staticmethod
    def conditioned(
        sampler: DiffusionSampler,
        batch: Batch,
        x0: Tensor,
        guidance: float | tuple[float, ...],
        sigmas: Tensor | None = None,
        **more: Any,
    ) -> CleanSamples:
        """Samples with conditions of the denoiser under a guidance, at sigmas or, by default, along the schedule."""
        call = sampler.arguments(batch)
        for name in ("steps", "guidance", "guidance_2", "order") + (() if sigmas is None else ("sigmas",)):
            call.pop(name)
        # all frames of a noised video have one level
        call.pop("chunks", None)
        at: dict[str, Any] = {"steps": sampler.config.rollout.steps} if sigmas is None else {"levels": sigmas}
        at |= {name: value for name, value in call.items() if value is not None}
        return sampler.policy.clean(
            batch.prompts, x0, batch.seeds, metadata=batch.metadata, guidance=guidance, **at, **more
        )

    def drawn_levels(self, sampler: DiffusionSampler, batch: Batch) -> Tensor:
        """[B, L] as the named levels are drawn: points of the schedule, or levels before the pipeline's shift."""
        steps = sampler.config.rollout.steps
        return torch.stack([self.draw_levels(steps, self._generator(sampler, batch, row)) for row in range(len(batch))])

    def _generator(self, sampler: DiffusionSampler, batch: Batch, row: int) -> Generator:
        """Generator of a sample's levels: its own, its neighbours', its group's, or that of the whole iteration."""
        seed, iteration, group = sampler.config.training.seed, batch.iteration, batch.group[row]
        neighbours = max(1, sampler.config.training.micro_batch_size // self.level_count(sampler.config))
        neighbourhood = (row - batch.group.index(group)) // neighbours
        keys = {
            "sample": (batch.noise_seeds[row], 1),
            "micro_batch": (seed, iteration, group, 5, neighbourhood),
            "group": (seed, iteration, group, 5),
            "batch": (seed, iteration, 5),
        }
        return Generator().manual_seed(derive_seed(*keys[self.settings.levels_of]))

    def noise_seeds(self, sampler: DiffusionSampler, batch: Batch) -> list[int]:
        """Seed of each sample's noise."""
        if self.settings.noise_of == "sample":
            return batch.noise_seeds
        return [derive_seed(sampler.config.training.seed, batch.iteration, group, 6) for group in batch.group]

    def item_numbers(self, batch: Batch, levels: int, device: torch.device) -> Tensor:
        """[N, 2] (sample, place among its levels), or (group, place), group after group."""
        count = len(set(batch.group)) if self.whole_groups else len(batch)
        return torch.cartesian_prod(torch.arange(count, device=device), torch.arange(levels, device=device))

    def losses(
        self, policy: DiffusersPolicy, experience: MatchingExperience, items: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        points = self.points(policy, experience, items)
        source, count = f"{type(self).__name__}.loss", len(points.velocity)
        loss, values = checked_loss(source, self.loss(points), [count], [len(items)])
        penalty, more = self.penalized(torch.zeros_like(points.error), points)
        loss = by_item(loss, items) + by_item(penalty, items)
        counted = experience.counted(items)
        # one is left on a process whose every item does not count
        loss = loss if counted is None else loss * counted
        return loss, {name: by_item(value, items) for name, value in {**values, **more}.items()}

    def points(self, policy: DiffusersPolicy, experience: MatchingExperience, items: Tensor) -> Points:
        """The samples of these items at their levels, asked of the policy and of what its loss compares it with."""
        noised = experience.noised(items)
        clean, guided = experience.clean, experience.guided or experience.clean
        old = reference = None
        with torch.no_grad():
            if "old" in self.compares:
                with policy.snapshot("old"):
                    old = policy.velocity_of(clean, noised).float()
            if self.compares_reference:
                named = self.settings.reference
                with policy.reference() if named is None else policy.snapshot(named):
                    reference = policy.velocity_of(guided, noised).float()
        velocity = policy.velocity_of(clean, noised).float()
        rows = noised.samples
        return Points(
            noised=noised,
            velocity=velocity,
            advantage=experience.advantage[rows],
            reward=experience.reward[rows],
            group=experience.group[rows],
            old=old,
            reference=reference,
            held=1.0 if experience.held is None else experience.held[rows],
            size=len(rows) // len(items),
            rollout=experience.rollout,
        )

    def penalized(self, loss: Tensor, points: Points) -> tuple[Tensor, dict[str, Tensor]]:
        """Losses with the weighted divergence from the reference, and what the metrics say of each point."""
        values = {"matching/error": points.error}
        if self.settings.kl_weight:
            values["matching/kl"] = self.divergence(points)
            loss = loss + self.settings.kl_weight * points.held * values["matching/kl"]
        return loss, values

    def divergence(self, points: Points) -> Tensor:
        """[N] mean squared difference from the reference's velocity."""
        assert points.reference is not None
        return velocity_mse(points.velocity, points.reference)

    def loss(self, points: Points) -> tuple[Tensor, dict[str, Tensor]]:
        """[N] loss of each sample at its level, or one of each item, and named values for the metrics, shaped so."""
        raise MissingMethod(self, "loss")


def by_item(values: Tensor, items: Tensor) -> Tensor:
    """[N] means over each item's members; values of items are theirs."""
    return values.view(len(items), -1).mean(1)
