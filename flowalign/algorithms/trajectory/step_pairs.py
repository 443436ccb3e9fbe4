"""The step pairs: preferences between denoising steps of recorded rollouts, by their log-ratios to the reference.

An algorithm of the family answers how to roll out (`rollout`), what each step's outcome is worth (`step_reward`), and
which samples of a group are compared (`compared`). The loss here is D3PO's, SPO's and LPO's: -log sigmoid of how much
more probable than under the start weights the better of two steps became, above the worse one.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from flowalign.algorithms import base
from flowalign.algorithms.trajectory.base import check_noise, learned_steps
from flowalign.config import Config
from flowalign.core.credit import preferred
from flowalign.core.record import Record, masked_mean
from flowalign.core.step_losses import step_preference_loss
from flowalign.data.batches import Batch
from flowalign.policies.diffusion import DiffusersPolicy, Rollout
from flowalign.rollouts.pictures import DiffusionSampler, SampledPictures, record_of_steps
from flowalign.rollouts.processes import Processes
from flowalign.rollouts.scoring import Scorer, score_metrics
from rewards import Scores


class StepPairSettings(base.AlgorithmSettings):
    """Settings that the family has; an algorithm has its own defaults."""

    beta: float = Field(0.1, gt=0)
    """Factor of the log-ratios to the start weights, which are means over a sample's elements."""
    clip_range: float = Field(0.1, gt=0, lt=1)
    """Clip of ratios, to 1 +- clip_range; a step whose ratio left it has no gradient any more."""


@dataclass(kw_only=True)
class PairExperience(base.Experience):
    """One process's trajectories of an iteration, and what is compared of them."""

    rollout: Rollout
    scores: Scores
    reward: Tensor
    """[B, T] reward of each step."""
    steps: Tensor
    """[S] steps to learn from."""
    members: int
    preference: Tensor
    """[B, T] 1 for a step that is preferred to another of its group, -1 for the other one, 0 elsewhere"""
    all_teach: bool
    """Whether ties are pairs too."""

    def outcome(self) -> tuple[Tensor, Tensor]:
        return self.scores.value, masked_mean(self.preference.abs(), self.rollout.mask)

    def counted(self, items: Tensor) -> Tensor | None:
        return None if self.all_teach else self.preference[items[:, 0], items[:, -1]] != 0


class StepPairs(base.Algorithm[Config, DiffusionSampler, DiffusersPolicy, Rollout, Record, PairExperience]):
    """Base of the family; an item is (better sample, worse sample, step)."""

    Settings: ClassVar[type[base.AlgorithmSettings]] = StepPairSettings
    settings: StepPairSettings
    headline = "reward/mean"
    unit = "steps"
    combines = base.Algorithm.combines | {"refill", "workers", "served"}
    uses_reference = True
    ties_teach: ClassVar[bool] = False

    def check(self, config: Config) -> None:
        check_noise(config)

    def items(self, config: Config) -> int:
        return len(learned_steps(config))

    def step_reward(self, sampled: SampledPictures, processes: Processes) -> Tensor:
        """[B, T] what each step's outcome is worth; here the finished sample's reward."""
        return sampled.scores.value[:, None].expand(sampled.rollout.mask.shape)

    def threshold(self, rollout: Rollout) -> Tensor | float:
        """[T] or one for all steps: the gap, as of `preferred`, that a pair must exceed."""
        return 0.0

    def steps(self, rollout: Rollout) -> Tensor:
        """[S] the steps that are learned from."""
        return rollout.mask.any(0).nonzero()[:, 0]

    def compared(self, reward: Tensor, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """The best and the worst member of each group, step by step.

        Args:
            reward: [G, M, T].

        Returns:
            [G, S, 3] items, and [G, M, T] preferences as of `PairExperience`.
        """
        best, worst, valid = preferred(reward, self.threshold(rollout))
        numbers, steps = torch.arange(reward.shape[1], device=reward.device)[:, None], self.steps(rollout)
        preference = (numbers == best[:, None]).int() - (numbers == worst[:, None]).int()
        preference = (preference * valid[:, None]).index_select(2, steps)
        first = torch.arange(len(reward), device=reward.device)[:, None] * reward.shape[1]
        pairs = [first + best[:, steps], first + worst[:, steps], steps.expand(len(reward), -1)]
        return torch.stack(pairs, 2), torch.zeros_like(reward).index_copy(2, steps, preference.to(reward.dtype))

    def record(self, sampled: SampledPictures, processes: Processes) -> Record:
        """The record of all processes, whose rewards say what each step's outcome is worth."""
        return record_of_steps(sampled, self.step_reward(sampled, processes), processes)

    def experience(self, sampled: SampledPictures, record: Record, processes: Processes) -> PairExperience:
        rollout, batch, scores = sampled.rollout, sampled.batch, sampled.scores
        # groups are compared within, and a group is on one process
        reward = processes.own(record.reward, len(batch))
        groups = len(set(batch.group))
        items, preference = self.compared(reward.unflatten(0, (groups, -1)), rollout)
        metrics = score_metrics(scores, record.group, processes)
        experience = PairExperience(
            batch=batch,
            metrics=metrics,
            items=items.flatten(0, 1),
            rollout=rollout,
            scores=scores,
            reward=reward,
            steps=self.steps(rollout),
            members=len(batch) // groups,
            preference=preference.flatten(0, 1),
            all_teach=self.ties_teach,
        )
        counted = experience.counted(experience.items)
        if counted is not None:
            metrics["preference/pairs"] = processes.gather(counted).float().mean().item()
        return experience

    def verify(self, policy: DiffusersPolicy, experience: PairExperience) -> None:
        policy.verify(experience.rollout)

    def losses(
        self, policy: DiffusersPolicy, experience: PairExperience, items: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        better, worse, steps = items.unbind(1)
        s = self.settings
        log_prob, reference = self.log_probs(policy, experience, torch.cat([better, worse]), steps.repeat(2))
        log_ratio = log_prob - reference
        chosen, rejected = log_ratio.chunk(2)
        loss, logit = step_preference_loss(chosen, rejected, s.beta, s.clip_range)
        ratio = log_ratio.detach().exp().view(2, -1)
        counted = experience.counted(items)
        assert counted is not None
        return loss.where(counted, 0), {
            "preference/accuracy": (logit > 0).float() + (logit == 0) / 2,
            "preference/logit": logit,
            "policy/ratio": ratio.mean(0),
            "policy/clip_fraction": ((ratio - 1).abs() > s.clip_range).float().mean(0),
        }

    def log_probs(
        self, policy: DiffusersPolicy, experience: PairExperience, samples: Tensor, steps: Tensor
    ) -> tuple[Tensor, Tensor]:
        """[N] log-probabilities of stored steps, with gradients, and [N] under the start weights."""
        with torch.no_grad(), policy.reference():
            reference = self.log_prob(policy, experience, samples, steps)
        return self.log_prob(policy, experience, samples, steps), reference

    def log_prob(self, policy: DiffusersPolicy, experience: PairExperience, samples: Tensor, steps: Tensor) -> Tensor:
        """[N] log-probabilities of stored steps."""
        return policy.score(experience.rollout, samples, steps).log_prob

    def show(self, sampler: DiffusionSampler, scorer: Scorer, batch: Batch) -> base.Preview:
        seen = self.at_once(sampler, scorer, batch)
        return base.Preview(
            rollout=seen.rollout,
            batch=seen.batch,
            images=sampler.decode(seen.rollout, shown=True),
            scores=seen.scores,
            reward=seen.scores.value,
            advantage=seen.preference.where(seen.rollout.mask, torch.nan),
        )
