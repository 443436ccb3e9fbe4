"""The trajectory family: policy gradients over the stochastic denoising steps of recorded rollouts.

An algorithm of the family is a few answers, each a method with the plain one here: how to roll out (`rollout`), what
the pictures are worth (`score`), which reward every step gets (`step_reward`), how rewards become advantages
(`credit`), and the loss of an action (`loss`). The plain answers are Flow-GRPO's, with the advantage and the loss that
the settings name.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from types import UnionType
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from flowalign.algorithms import base
from flowalign.algorithms.policy_gradient import ActionExperience, PolicyGradient, PolicyGradientSettings
from flowalign.config import Config, Named
from flowalign.core.divergences import gaussian_kl, velocity_mse
from flowalign.core.groups import group_advantage
from flowalign.core.record import Actions, Record
from flowalign.core.seams import checked_loss
from flowalign.core.step_losses import guard_log_ratio
from flowalign.data.batches import Batch
from flowalign.errors import ConfigError
from flowalign.policies.diffusion import DiffusersPolicy, Rollout
from flowalign.rollouts.dense import StateValues
from flowalign.rollouts.pictures import DiffusionSampler, SampledPictures, record_of_steps
from flowalign.rollouts.processes import Processes
from flowalign.rollouts.scoring import Scorer
from samplers import Transition
from samplers.kernels import gaussian_log_prob, traits_of
from samplers.plans import Single, Tree
from samplers.stored import Stored


def check_noise(config: Config) -> None:
    """Refuse a kernel that adds no noise where the plan wants a step to learn from."""
    wanted, stochastic = config.noise()
    silent = (wanted & ~stochastic).nonzero().flatten().tolist()
    if silent:
        raise ConfigError(
            f"rollout.kernel: '{config.rollout.kernel}' adds no noise at step {silent[0]} of {config.rollout.steps}, "
            "where the plan wants an action to learn from; flow_sde works"
        )


def learned_steps(config: Config) -> list[int]:
    """The stochastic steps of an iteration that are learned from; a plan may place them elsewhere in the next."""
    plan = config.build_plan()
    etas = plan.etas(config.rollout.steps, config.rollout.eta, 0, 0)
    steps: list[int] = (etas > 0).nonzero().flatten().tolist()
    return steps[: len(steps) - getattr(plan, "unlearned", 0)]


class PolicySettings(PolicyGradientSettings):
    """Settings that the whole family has; an algorithm adds its own."""

    advantage: Named = Named(name="grpo", clip=5.0)
    loss: Named = Named(name="ppo", clip_range=1e-4)
    """Log-probabilities are means over a sample's elements, so that ratios stay close to 1."""
    ratio: Literal["plain", "guard"] = "plain"
    """Ratio that the loss clips: of the log-probabilities, or GRPO-Guard's, centred and equally wide at every step."""
    step_fraction: float = Field(1.0, gt=0, le=1)
    """Share of the stochastic steps of each trajectory to learn from, drawn at random; the loss is their mean."""
    divergence: Literal["kl", "kl_dt", "velocity_mse"] = "kl"
    """Divergence that `kl_weight` weighs: a step's KL, -dt times it, or the mean squared velocity difference."""
    drop_zero_advantage: bool = False
    """Whether samples whose advantages are all 0 leave the KL and the number that the loss is divided by, as in
    Flow-GRPO's code; otherwise they keep their KL and count."""
    pool_prompts: bool = False
    """Whether groups of a prompt that an iteration draws twice are one group to advantages, as in Flow-GRPO's code."""


@dataclass(kw_only=True)
class Steps(Actions):
    """N stored denoising steps under the current weights; gradients flow through mean and velocity too."""

    rollout: Rollout
    samples: Tensor
    """[N] numbers of the samples."""
    steps: Tensor
    """[N] numbers of the steps."""
    velocity: Tensor
    """[N, ...]"""
    transition: Transition
    velocity_reference: Tensor | None = None
    """[N, ...] under the weights that the divergence refers to, None without a divergence"""

    @cached_property
    def mean_old(self) -> Tensor:
        """[N, ...] mean of the transition under the weights that sampled."""
        return self._mean(self.rollout.trajectory.velocity[self.samples, self.steps])

    @cached_property
    def mean_reference(self) -> Tensor:
        """[N, ...] mean of the transition under the weights that the divergence refers to."""
        assert self.velocity_reference is not None
        return self._mean(self.velocity_reference)

    def _mean(self, velocity: Tensor) -> Tensor:
        with torch.no_grad():
            trajectory = self.rollout.trajectory
            return trajectory.score(self.rollout.kernel, velocity, self.samples, self.steps).mean

    @property
    def dt(self) -> Tensor:
        """[N] change of sigma over the step, negative."""
        at, to = self.rollout.trajectory.levels(self.steps)
        return to - at


class WithStateValues:
    """Part of a method that asks what states are worth: what its estimator learned is in the checkpoint."""

    values: StateValues

    def state(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        return self.values.state()

    def load_state(self, tensors: dict[str, dict[str, Tensor]], state: dict[str, Any], device: torch.device) -> None:
        self.values.load_state(tensors, state, device)


class TrajectoryAlgorithm(PolicyGradient[Config, DiffusionSampler, DiffusersPolicy, Rollout]):
    """Base of the family."""

    Settings: ClassVar[type[base.AlgorithmSettings]] = PolicySettings
    settings: PolicySettings
    unit = "stochastic steps"
    plan: ClassVar[tuple[type | UnionType, str] | None] = None
    """Kind of plan that it needs, and an example."""

    def check(self, config: Config) -> None:
        super().check(config)
        plan, rollout = config.build_plan(), config.rollout
        if self.plan is not None and not isinstance(plan, self.plan[0]):
            raise ConfigError(
                f"rollout.plan: {config.algorithm.name} does not work with the plan '{rollout.plan.name}'; "
                f"plan: {self.plan[1]} works"
            )
        if self.noise == "kernel":
            check_noise(config)
        if self.settings.off_policy is not None and self.noise == "own":
            raise ConfigError(
                f"algorithm.off_policy: steps are scored again by the kernel's density, and {config.algorithm.name} "
                "learns its noise; null works"
            )
        if self.settings.off_policy is not None and rollout.weights not in (None, "policy"):
            raise ConfigError(
                f"rollout.weights: '{rollout.weights}' would sample the steps and score them again, so that "
                "algorithm.off_policy weighs nothing; one of the two works"
            )
        if self.settings.ratio == "guard" and self.noise == "own":
            raise ConfigError(
                f"algorithm.ratio: GRPO-Guard's corrects Gaussians of fixed width, and {config.algorithm.name} learns "
                "its noise; plain works"
            )
        kernel = config.build_kernel()
        if self.settings.ratio == "guard" and traits_of(kernel).log_prob is not gaussian_log_prob:
            raise ConfigError(
                f"rollout.kernel: GRPO-Guard's ratio corrects Gaussian log-probabilities, and '{rollout.kernel}' has "
                "others; cps and flow_sde work"
            )
        # of which the network is asked outside of the pipeline's call
        branching = isinstance(plan, Tree) or (self.plan is not None and self.plan[0] is Single)
        if rollout.cache is not None and branching:
            raise ConfigError(
                f"rollout.cache: {config.algorithm.name} makes its branches outside of the pipeline's call, where the "
                "cache is; null works"
            )
        if rollout.order == 2 and (self.dense or branching):
            raise ConfigError(
                f"rollout.order: {config.algorithm.name} branches from and completes trajectories by Euler's rule; "
                "order: 1 works"
            )
        if rollout.order == 2 and getattr(plan, "of", "iteration") == "group":
            raise ConfigError(
                "rollout.order: the solver begins after the last stochastic step, which rollout.plan.of: group puts "
                "elsewhere in each group; order: 1 works, or of: iteration"
            )
        if self.settings.pool_prompts and self.branches(config) > 1:
            raise ConfigError(
                f"algorithm.pool_prompts: the groups that {config.algorithm.name} makes of a prompt left its path at "
                "different steps, and are not alike; false works"
            )

    def items(self, config: Config) -> int:
        return config.training.group_size * len(learned_steps(config)) * config.rollout.chunks

    def rescored(self, sampler: DiffusionSampler, rollout: Rollout) -> Rollout:
        """The trajectories, with velocities and log-probabilities of the current weights at the stochastic steps."""
        trajectory, kernel = rollout.trajectory, rollout.kernel
        again = replace(trajectory, velocity=trajectory.velocity.clone(), log_prob=trajectory.log_prob.clone())
        for items in rollout.mask.nonzero().split(sampler.config.rollout.batch_size):
            samples, steps = items.unbind(1)
            with torch.no_grad():
                velocity = sampler.policy.velocity(rollout, samples, steps)
            again.velocity[samples, steps] = velocity.float()
            again.log_prob[samples, steps] = again.score(kernel, velocity, samples, steps).log_prob
        return replace(rollout, trajectory=again)

    def gathered(self, sampled: SampledPictures, reward: Tensor, processes: Processes) -> Record:
        return record_of_steps(sampled, reward, processes)

    def record(self, sampled: SampledPictures, processes: Processes) -> Record:
        record = super().record(sampled, processes)
        if self.settings.pool_prompts:
            record.group = processes.gather(torch.tensor(sampled.batch.pooled, device=processes.device))
        if record.reward.dim() == 2 and not processes.apart:
            sampled.sampler.calibrate(record.reward, record.mask)
        return record

    def experience(self, sampled: SampledPictures, record: Record, processes: Processes) -> ActionExperience:
        experience = super().experience(sampled, record, processes)
        experience.drops_rows = self.settings.drop_zero_advantage
        return experience

    def items_of(self, rollout: Rollout) -> Tensor:
        """[N, 2] (sample, step) of every stochastic step that is learned from, group after group."""
        return rollout.mask.nonzero()

    def advantages(self, record: Record) -> Tensor:
        advantage = super().advantages(record)
        return advantage * self._learned(record) if self.settings.step_fraction < 1 else advantage

    def _learned(self, record: Record) -> Tensor:
        """[B, T] a random share of each trajectory's stochastic steps, the same draw on every process: 0 elsewhere, and
        there the factor by which their sum stands for the sum over all steps."""
        mask = record.mask.cpu()
        steps = mask.sum(1, keepdim=True)
        count = (steps * self.settings.step_fraction).int().clamp(min=1)
        order = torch.rand(mask.shape, generator=torch.Generator().manual_seed(record.seed)) - mask.float()
        return ((order.argsort(1).argsort(1) < count) * steps / count).to(record.mask.device)

    def loss(self, actions: Steps) -> tuple[Tensor, dict[str, Tensor]]:
        """[N] loss of each action, and named [N] values for the metrics: the policy loss and the divergence."""
        loss, metrics = self.policy_loss(actions)
        penalty, more = self.penalty(actions)
        return loss + penalty, metrics | more

    def policy_loss(self, actions: Steps) -> tuple[Tensor, dict[str, Tensor]]:
        """[N] the named loss, of the ratio that the settings say."""
        if self.settings.ratio == "plain":
            return self.named_loss(actions)
        log_ratio = self.log_ratio(actions)
        loss, metrics = self.named_loss(replace(actions, log_prob=log_ratio, old_log_prob=torch.zeros_like(log_ratio)))
        return loss / -actions.dt, metrics

    def penalty(self, actions: Steps) -> tuple[Tensor, dict[str, Tensor]]:
        """[N] weighted divergence from the weights that it refers to, 0 where it has no weight."""
        if self.settings.kl_weight == 0:
            return torch.zeros_like(actions.log_prob), {}
        assert actions.velocity_reference is not None
        if self.settings.divergence == "velocity_mse":
            divergence = velocity_mse(actions.velocity, actions.velocity_reference)
        else:
            step = actions.transition
            divergence = gaussian_kl(step.mean, actions.mean_reference, step.std)
            if self.settings.divergence == "kl_dt":
                # as Flow-GRPO's authors have it, who divide by twice the diffusion^2, not by twice the variance
                divergence = divergence * -actions.dt
        return self.settings.kl_weight * divergence, {"policy/kl": divergence}

    def show(self, sampler: DiffusionSampler, scorer: Scorer, batch: Batch) -> base.Preview:
        seen = self.at_once(sampler, scorer, batch)
        return base.Preview(
            rollout=seen.rollout,
            batch=seen.batch,
            images=sampler.decode(seen.rollout, shown=True),
            scores=seen.scores,
            reward=seen.reward,
            advantage=seen.advantage.where(seen.rollout.mask, torch.nan),
            sparse=group_advantage(seen.scores.value, seen.group.cpu()) if self.dense else None,
            wins=self.wins(len(seen.batch)),
        )

    def wins(self, rows: int) -> Tensor | None:
        """[B, B] verdicts of the comparisons that the last rewards came from, as in `Preview`; None without any."""
        return None

    def reads(self, experience: ActionExperience, items: Tensor) -> Iterator[tuple[Stored, tuple[Tensor, ...]]]:
        reads: Iterator[tuple[Stored, tuple[Tensor, ...]]] = experience.rollout.reads(*items.unbind(1))
        return reads

    def losses(
        self, policy: DiffusersPolicy, experience: ActionExperience, items: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        reference = None
        if self.settings.kl_weight > 0:
            with torch.no_grad(), self.referred(policy):
                reference = policy.velocity(experience.rollout, *items.unbind(1))
        actions = self.actions(policy, experience, items)
        actions.velocity_reference = reference
        loss, values = checked_loss(f"{type(self).__name__}.loss", self.loss(actions), [len(items)])
        counted = experience.counted(items)
        if counted is not None:
            loss = loss.where(counted, 0)
        return loss, {**values, "policy/ratio": actions.ratio}

    def replays_old(self, config: Config) -> bool:
        # what an engine of another library computes is not what the learner would
        return config.rollout.engine.served(config.model.kind) is not None

    def few(self, experience: ActionExperience) -> Tensor:
        return experience.items[: 4 * experience.rollout.mask.shape[1]]

    def replay(self, policy: DiffusersPolicy, experience: ActionExperience, items: Tensor, keep: bool) -> Tensor:
        actions = self.actions(policy, experience, items)
        trajectory, fresh = experience.rollout.trajectory, experience.fresh[actions.samples]
        log_ratio = self.log_ratio(actions).detach()
        if keep:
            index = actions.samples[fresh], actions.steps[fresh]
            trajectory.velocity[index] = actions.velocity.detach().float()[fresh]
            trajectory.log_prob[index] = actions.log_prob.detach()[fresh]
        ratios = torch.full((len(items), trajectory.mask.shape[1]), torch.nan, device=items.device)
        return ratios.scatter(1, actions.steps[:, None], log_ratio.where(fresh, torch.nan)[:, None])

    def log_ratio(self, actions: Steps) -> Tensor:
        """[N] what the loss clips the exponential of."""
        if self.settings.ratio == "plain":
            return actions.log_prob - actions.old_log_prob
        step = actions.transition
        return guard_log_ratio(step.log_prob, actions.old_log_prob, step.mean, actions.mean_old, step.std)

    def actions(self, policy: DiffusersPolicy, experience: ActionExperience, items: Tensor) -> Steps:
        """The stored actions of [N, 2] (sample, step) pairs, scored under the current weights."""
        samples, steps = items.unbind(1)
        rollout = experience.rollout
        velocity = policy.velocity(rollout, samples, steps)
        transition = rollout.trajectory.score(rollout.kernel, velocity, samples, steps)
        return Steps(
            log_prob=transition.log_prob,
            old_log_prob=rollout.trajectory.log_prob[samples, steps],
            advantage=(experience.advantage * experience.loss_weight)[samples, steps],
            mask=rollout.mask[samples, steps],
            group=experience.group[samples],
            reward=experience.reward[samples],
            rollout=rollout,
            samples=samples,
            steps=steps,
            velocity=velocity,
            transition=transition,
        )
