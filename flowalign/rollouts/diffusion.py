"""What an algorithm for pictures and videos acts through: policy, reward, rollout settings, the other processes."""

import contextlib
import math
from typing import Any, Literal

import torch
from accelerate import Accelerator
from torch import Tensor

from flowalign.config import Config
from flowalign.core.record import Record
from flowalign.data.batches import Batch
from flowalign.policies.diffusion import DiffusersPolicy, Rollout
from flowalign.policies.diffusion.context_parallel import TokenParts
from flowalign.rollouts.base import Actor
from flowalign.rollouts.dense import Estimator, ValueHead, agreement, persistence
from flowalign.rollouts.pictures import DiffusionSampler
from flowalign.runs.checkpoint import optimizer_state, optimizer_tensors
from rewards import Reward, Scores, spec_of
from samplers import derive_seed
from samplers.completion import completions


class DiffusionActor(Actor):
    """Samples and scores one process's pictures, and keeps what adapts while it does."""

    config: Config
    policy: DiffusersPolicy
    sampler: DiffusionSampler

    def __init__(self, config: Config, policy: DiffusersPolicy, reward: Reward, accelerator: Accelerator) -> None:
        super().__init__(config, policy, reward, accelerator)
        self.sampler = DiffusionSampler(config, policy, spec_of(reward).needs)
        self._head: ValueHead | None = None
        self._token_parts = (
            TokenParts(policy.every_network, self.processes.mesh) if self.processes.columns > 1 else None
        )
        policy.family.parts = self.processes.columns

    def values(self, rollout: Rollout, batch: Batch, final: Tensor, estimator: Estimator) -> Tensor:
        """[B, T + 1] what each state of each trajectory is worth, R_0 .. R_T.

        Args:
            final: [B] rewards of the finished samples, R_T.
        """
        # exact ones need no network that learns
        estimator = Estimator() if self._alone else estimator
        exact = self._completed(rollout, batch, final, None) if estimator.is_exact(batch.iteration) else None
        if exact is not None:
            lasting = persistence(exact, torch.tensor(batch.group))
            self.metrics |= {f"dense/persistence/{k}": v for k, v in enumerate(lasting.tolist()) if not math.isnan(v)}
        if estimator.kind == "ode":
            assert exact is not None
            return exact
        if estimator.kind == "learned":
            values = self._predicted(rollout, batch.iteration, final, exact)
        else:
            values = self._completed(rollout, batch, final, estimator.count, estimator.order)
        if exact is not None:
            for name, per_step in agreement(values, exact).items():
                self.metrics |= {f"dense/{name}/{k}": v for k, v in enumerate(per_step.tolist())}
            if estimator.kind == "learned" and batch.iteration < estimator.warmup:
                return exact
        return values

    def _completed(
        self, rollout: Rollout, batch: Batch, final: Tensor, count: int | None, order: Literal[1, 2] = 1
    ) -> Tensor:
        size = self.config.rollout.batch_size
        made = completions(self.policy.at(rollout), rollout.trajectory, count, size, order)
        extra = slice(len(rollout), None)
        scores = self.score(
            self.sampler.ends(rollout, made, extra), batch, made.samples[extra].tolist(), made.steps[extra].tolist()
        )
        return torch.cat([final, scores.value])[made.index.cpu()]

    def _predicted(self, rollout: Rollout, iteration: int, final: Tensor, exact: Tensor | None) -> Tensor:
        """[B, T + 1] values by the learned head, which learns the exact ones of all processes where they are given."""
        trajectory = rollout.trajectory
        batch, states = trajectory.latents.shape[:2]
        condition = self._condition(rollout)
        if self._head is None:
            self._new_head(trajectory.latents.shape[2], condition.shape[1])
        assert self._head is not None
        x = trajectory.latents.flatten(0, 1)
        sigma = trajectory.sigmas.repeat(batch)
        condition = condition.repeat_interleave(states, 0)
        with torch.no_grad():
            values = self._head(x, sigma, condition).unflatten(0, (batch, states)).cpu()
        if exact is not None:
            # every process learns the same, so that there is one head
            target = exact.flatten().to(self.device)
            x, sigma, condition, target = (self.gather(values) for values in (x, sigma, condition, target))
            generator = torch.Generator().manual_seed(derive_seed(self.config.training.seed, iteration, 4))
            loss = self._head.distill(x, sigma, condition, target, self._head_optimizer, generator)
            self.metrics["dense/head_loss"] = loss.item()
        # the last state's reward is known
        values[:, -1] = final
        return values

    def _condition(self, rollout: Rollout) -> Tensor:
        """[B, D] one vector a prompt: the mean over tokens of its embedding."""
        return self.policy.prompt_vectors(rollout.prompts, rollout.sources).to(self.device)

    def _new_head(self, channels: int, condition_size: int) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.config.training.seed)
            self._head = ValueHead(channels, condition_size).to(self.device)
        self._head_optimizer = torch.optim.Adam(self._head.parameters(), 1e-3)

    def undivided(self) -> contextlib.AbstractContextManager[None]:
        return self._token_parts.joined() if self._token_parts else super().undivided()

    def record(self, rollout: Rollout, batch: Batch, scores: Scores, reward: Tensor) -> Record:
        """The record of all processes.

        Args:
            reward: [B] or [B, T] of this process's samples.
        """
        trajectory = rollout.trajectory
        rewards, weights = self.separate(scores)
        return Record(
            log_prob=self.gather(trajectory.log_prob),
            mask=self.gather(rollout.mask),
            reward=self.gather(reward.to(self.device)),
            group=self.gather(torch.tensor(batch.group, device=self.device)),
            rewards=rewards,
            weights=weights,
            names=tuple(named.name for named in self.config.rewards),
            seed=derive_seed(self.config.training.seed, batch.iteration, 3),
            weight=self.advantage_weight(scores),
        )

    def record_of_samples(self, batch: Batch, scores: Scores) -> Record:
        """The record of all processes where a sample is one action, whose probability nobody asks for."""
        rewards, weights = self.separate(scores)
        value = self.gather(scores.value.to(self.device))
        return Record(
            log_prob=torch.zeros_like(value)[:, None],
            mask=torch.ones_like(value, dtype=torch.bool)[:, None],
            reward=value,
            group=self.gather(torch.tensor(batch.group, device=self.device)),
            rewards=rewards,
            weights=weights,
            names=tuple(named.name for named in self.config.rewards),
            seed=derive_seed(self.config.training.seed, batch.iteration, 3),
            weight=self.advantage_weight(scores),
        )

    def calibrate(self, step_reward: Tensor, mask: Tensor) -> None:
        """Let an adaptive plan learn from the step rewards [B, T] of all processes."""
        if hasattr(self.sampler.plan, "update") and not self._alone:
            self.sampler.plan.update(step_reward.cpu(), mask.cpu())
            etas = self.sampler.plan.etas(self.config.rollout.steps, self.config.rollout.eta, 0, 0)
            self.metrics |= {f"plan/eta/{k}": value for k, value in enumerate(etas.tolist())}

    # What adapts, for the checkpoint

    def state(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        tensors, rest = super().state()
        if hasattr(self.sampler.plan, "state_dict"):
            rest["plan"] = self.sampler.plan.state_dict()
        if self._head is None:
            return tensors, rest
        moments, rest["value_head"] = optimizer_tensors(self._head_optimizer.state_dict())
        weights = self._head.state_dict()
        rest["value_head"] |= {"channels": self._head.channels, "condition_size": self._head.condition_size}
        return {"value_head": weights, "value_head_optimizer": moments}, rest

    def load_state(self, tensors: dict[str, dict[str, Tensor]], rest: dict[str, Any]) -> None:
        super().load_state(tensors, rest)
        if "plan" in rest:
            self.sampler.plan.load_state_dict(rest["plan"])
        if "value_head" in rest:
            head = rest["value_head"]
            self._new_head(head["channels"], head["condition_size"])
            assert self._head is not None
            self._head.load_state_dict(tensors["value_head"])
            self._head_optimizer.load_state_dict(optimizer_state(tensors["value_head_optimizer"], head))
