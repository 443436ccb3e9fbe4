"""The direct engine: the gradient of a differentiable reward through (part of) the sampling.

A rollout without gradients stores its states. An update walks a *window* of its steps again with gradients, decodes
what comes out to pixels that carry them, and asks the reward for a value of these pixels. A method says which window
(`finished`). All else is here: the loss -reward, or relu(margin - reward) where there is a margin, plus the mean
squared difference of the window's velocities from the start weights'.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.utils._pytree import tree_map

from flowalign.algorithms import base
from flowalign.algorithms.direct.differentiable import check_made, check_named
from flowalign.config import Config
from flowalign.core.seams import MissingMethod, checked_loss
from flowalign.data.batches import Batch
from flowalign.errors import ConfigError
from flowalign.policies.diffusion import DiffusersPolicy, Rollout
from flowalign.policies.diffusion.window import GradientWindow
from flowalign.rollouts.pictures import DiffusionSampler, SampledPictures
from flowalign.rollouts.processes import Processes
from rewards import DifferentiableReward, Latents, Reward, Scores, spec_of
from rewards.gradients import score_with_gradient
from samplers import derive_seed
from samplers.noise import generators, normal


class DirectSettings(base.AlgorithmSettings):
    """Settings that the whole family has; an algorithm adds its own."""

    reward_weight: float = Field(1.0, gt=0)
    """Weight of the reward in the loss."""
    margin: float | None = None
    """Reward above which a sample has no gradient: the loss is relu(margin - reward); null: it is -reward."""
    kl_weight: float = Field(0.0, ge=0)
    """Weight of the mean squared difference of the window's velocities from the start weights'."""


@dataclass(kw_only=True)
class DirectExperience(base.Experience):
    """B samples of one process, to be walked again."""

    rollout: Rollout
    reward: DifferentiableReward
    metadata: Sequence[Mapping[str, Any]]
    """[B] metadata of the samples, for the reward."""
    first: Tensor
    """[B] the step at which each sample's window begins"""

    def noise(self, samples: Tensor, number: int = 0) -> Tensor:
        """[N, ...] standard normal noise of these samples [N], the same whenever this number is asked for."""
        seeds = [derive_seed(self.batch.noise_seeds[i], 6, number) for i in samples.tolist()]
        return normal(self.rollout.trajectory.latents.shape[2:], generators(seeds), samples.device)

    def uniform(self, samples: Tensor, number: int = 0) -> Tensor:
        """[N] numbers in [0, 1) of these samples [N], the same whenever this number is asked for."""
        return uniform([self.batch.noise_seeds[i] for i in samples.tolist()], 7, number).to(samples.device)

    def finished(self, policy: DiffusersPolicy, latents: Tensor, samples: Tensor) -> Tensor | Latents:
        """Finished latents [N, ...] of these samples [N] as the reward scores them: pixels, or with no VAE between."""
        whole = self.rollout.whole(latents, samples)
        return policy.latents_of(whole) if "latents" in spec_of(self.reward).needs else policy.decode_pixels(whole)

    def score(self, samples: Tensor, made: Tensor | Latents, prompts: Sequence[str] | None = None) -> Scores:
        """The reward's scores of what `finished` made of these samples [N], with gradients.

        Args:
            prompts: N, in the place of the samples' own.
        """
        rows = samples.tolist()
        prompts = [self.rollout.prompts[i] for i in rows] if prompts is None else prompts
        return score_with_gradient(self.reward, made, prompts, [self.metadata[i] for i in rows])


def uniform(seeds: Sequence[int], *number: int) -> Tensor:
    """[N] numbers in [0, 1), one a seed."""
    return torch.cat([torch.rand(1, generator=rng) for rng in generators([derive_seed(s, *number) for s in seeds])])


class DirectAlgorithm(base.Algorithm[Config, DiffusionSampler, DiffusersPolicy, Rollout, None, DirectExperience]):
    """Base of the family."""

    Settings: ClassVar[type[base.AlgorithmSettings]] = DirectSettings
    settings: DirectSettings
    headline = "reward/mean"
    unit = "samples"
    combines = base.Algorithm.combines - {"overlap"}
    idle = "every reward is above algorithm.margin, or it does not depend on the picture"

    @property
    def uses_reference(self) -> bool:
        return self.settings.kl_weight > 0

    def check(self, config: Config) -> None:
        check_named(config.rewards)
        self.windows(config.rollout.steps)

    def check_reward(self, reward: Reward, config: Config) -> None:
        check_made(reward)
        kind, training = spec_of(reward).kind, config.training
        split = training.updates_per_iteration > 1 or training.micro_batch_size % training.group_size > 0
        if kind == "set" or (kind == "group" and split):
            works = "a training.micro_batch_size of whole groups and training.updates_per_iteration: 1 work"
            raise ConfigError(
                f"rewards: '{reward.name}' looks at more samples than one micro-batch has; "
                + ("a reward of groups works" if kind == "set" else works)
            )

    def items(self, config: Config) -> int:
        return config.training.group_size

    @abstractmethod
    def windows(self, steps: int) -> range:
        """The steps at which a window may begin, in a schedule of so many; a sample's is drawn among them.

        Raises:
            ConfigError: the settings do not fit the schedule.
        """

    def first_steps(self, batch: Batch, config: Config) -> Tensor:
        """[B] where each sample's window begins; here all possible steps are equally probable."""
        begins = self.windows(config.rollout.steps)
        return begins.start + (uniform(batch.noise_seeds, 5) * len(begins)).long()

    def decode(self, sampler: DiffusionSampler, rollout: Rollout) -> None:
        """Nothing is scored before the updates, which walk the steps again."""

    def record(self, sampled: SampledPictures, processes: Processes) -> None:
        """There is none."""

    def experience(self, sampled: SampledPictures, record: None, processes: Processes) -> DirectExperience:
        batch, scorer = sampled.batch, sampled.scorer
        scorer.calls += len(batch)
        return DirectExperience(
            batch=batch,
            metrics={},
            items=torch.arange(len(batch), device=processes.device)[:, None],
            rollout=sampled.rollout,
            reward=scorer.reward,  # type: ignore[arg-type]
            metadata=scorer.metadata(batch, range(len(batch))),
            first=self.first_steps(batch, sampled.sampler.config).to(processes.device),
        )

    def verify(self, policy: DiffusersPolicy, experience: DirectExperience) -> None:
        policy.verify(experience.rollout)

    def finished(self, window: GradientWindow, experience: DirectExperience) -> Tensor:
        """[M * N, ...] latents of finished samples with the gradient that the method learns by, M times all of them."""
        raise MissingMethod(self, "finished")

    def losses(
        self, policy: DiffusersPolicy, experience: DirectExperience, items: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        samples = items[:, 0]
        held = self.settings.kl_weight > 0
        window = GradientWindow(policy, experience.rollout, samples, compare=held)
        latents = self.finished(window, experience)
        owners = samples.repeat(len(latents) // len(samples))
        scores = self.scored(experience, owners, experience.finished(policy, latents, owners))
        source = f"{type(self).__name__}.loss"
        loss, metrics = checked_loss(source, self.loss(scores), [len(owners)], [len(samples)])
        loss, metrics = (tree_map(lambda own: own.view(-1, len(samples)).mean(0), each) for each in (loss, metrics))
        if held:
            divergence = window.divergence
            loss, metrics["policy/kl"] = loss + self.settings.kl_weight * divergence, divergence
        return loss, metrics

    def scored(self, experience: DirectExperience, samples: Tensor, made: Tensor | Latents) -> Scores:
        """Scores of what was made of these samples [N], with gradients; here the reward's."""
        return experience.score(samples, made)

    def loss(self, scores: Scores) -> tuple[Tensor, dict[str, Tensor]]:
        """[N] losses and named [N] values for the metrics."""
        value, margin = scores.value, self.settings.margin
        loss = -value if margin is None else (margin - value).relu()
        if scores.weight is not None:
            loss = loss * scores.weight.to(loss)
        metrics = {"reward/mean": value, **{f"reward/{name}": values for name, values in scores.parts.items()}}
        if margin is not None:
            metrics["reward/saturated"] = (value >= margin).float()
        return self.settings.reward_weight * loss, metrics
