"""What an algorithm for pictures and videos acts through: policy, reward, rollout settings, the other processes."""

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from accelerate import Accelerator
from torch import Tensor

from flowalign import registry
from flowalign.config import Config
from flowalign.core.record import Record
from flowalign.data.batches import Batch
from flowalign.errors import ConfigError
from flowalign.policies.diffusion import DiffusersPolicy, Rollout
from flowalign.policies.diffusion.caching import caching
from flowalign.policies.diffusion.context_parallel import TokenParts
from flowalign.rollouts.base import Actor
from flowalign.rollouts.dense import Estimator, ValueHead, agreement, persistence
from flowalign.runs.checkpoint import optimizer_state, optimizer_tensors
from rewards import Reward, Scores, spec_of
from samplers import Trajectory, derive_seed
from samplers.completion import Completions, complete, completions, fork, path, perturb
from samplers.plans import Tree
from samplers.tree import grow


class DiffusionActor(Actor):
    """Samples and scores one process's pictures, and keeps what adapts while it does."""

    config: Config
    policy: DiffusersPolicy

    def __init__(self, config: Config, policy: DiffusersPolicy, reward: Reward, accelerator: Accelerator) -> None:
        super().__init__(config, policy, reward, accelerator)
        self.kernel = registry.resolve("kernels", config.rollout.kernel)
        self.plan = config.build_plan(silent=True)
        self.unlearned: int = getattr(self.plan, "unlearned", 0)
        self.search: Callable[[DiffusionActor, Batch], Tensor] | None = None
        """finds finished latents [B, ...] for a batch"""
        self._head: ValueHead | None = None
        self._token_parts = (
            TokenParts(policy.every_network, self.processes.mesh) if self.processes.columns > 1 else None
        )
        policy.family.parts = self.processes.columns
        cache = config.rollout.cache
        self.cache = None if cache is None else cache.part("caches", "rollout.cache")
        """of features, in rollouts"""
        if self.cache is not None:
            with caching(policy, self.cache):
                pass  # it fits the network
        policy.guidance_gradient = config.rollout.guidance_gradient
        if policy.guidance_gradient == "conditional" and not policy.family.negative(config.rollout.guidance):
            raise ConfigError(
                f"rollout.guidance_gradient: the guidance of {type(policy.pipeline).__name__} is "
                f"{policy.family.guidance}, without an unconditional branch; leave it out"
            )

    def etas(self, batch: Batch) -> Tensor:
        """[T] noise levels of this iteration's plan, or [B, T] where it is drawn for each group."""
        settings, seed = self.config.rollout, self.config.training.seed
        if getattr(self.plan, "of", "iteration") == "iteration":
            return self.plan.etas(settings.steps, settings.eta, batch.iteration, seed)
        seeds = [derive_seed(seed, group) for group in batch.group]
        return torch.stack([self.plan.etas(settings.steps, settings.eta, batch.iteration, own) for own in seeds])

    def rollout(
        self, batch: Batch, eta: Tensor | None = None, kernel: Any = None, kept: Sequence[int] | None = None
    ) -> Rollout:
        """One trajectory for every sample of the batch, stochastic as the plan says.

        Where groups share their start noise, the steps before the first stochastic one are computed once a group.

        Args:
            eta: [T] or [B, T] in the place of the plan's.
            kernel: in the place of the configured one.
            kept: walk only these steps of the schedule, which must be configured, and those after the last stochastic
                one by a second-order solver.
        """
        kernel = kernel or self.kernel
        eta = self.etas(batch) if eta is None else eta
        sampling = self.config.rollout.arguments(kept) | ({} if kept is None else {"order": 2})
        if batch.shares_start_noise and len(set(batch.group)) < len(batch) and eta.dim() == 1 and (eta > 0).any():
            rollout = self._forked(batch, eta if kept is None else eta[kept], kernel, sampling)
        else:
            rollout = self.policy.sample(
                batch.prompts,
                batch.seeds,
                noise_seeds=batch.noise_seeds,
                kernel=kernel,
                eta=eta if kept is None else eta[kept],
                metadata=batch.metadata,
                cache=self.cache,
                **sampling,
            )
        rollout.unlearned = self.unlearned
        return rollout

    def found(self, batch: Batch) -> Rollout:
        """What a search finds for every sample of the batch, without the steps that led there.

        The steps of the first few, by which replay is verified, are plain sampling's.
        """
        assert self.search is not None
        call: dict[str, Any] = self.config.rollout.arguments()
        parts = [
            self.policy.sample(own.prompts, own.seeds, metadata=own.metadata, dry=begin > 0, **call)
            for begin, own in ((0, batch[range(min(4, len(batch)))]), (4, batch[range(4, len(batch))]))
            if len(own)
        ]
        rollout = Rollout.cat(parts)
        rollout.trajectory.latents[:, -1] = self.search(self, batch)
        return rollout

    def _forked(self, batch: Batch, eta: Tensor, kernel: Any, sampling: dict[str, Any]) -> Rollout:
        numbers = list(dict.fromkeys(batch.group))
        first = int((eta > 0).nonzero()[0])
        roots = batch[[batch.group.index(g) for g in numbers]]
        trunk = self.policy.sample(roots.prompts, roots.seeds, metadata=roots.metadata, **sampling | {"order": 1})
        samples = torch.tensor([numbers.index(g) for g in batch.group], device=self.device)
        made = fork(
            self.policy.at(trunk),
            trunk.trajectory,
            kernel,
            samples,
            first,
            eta,
            batch.noise_seeds,
            self.config.rollout.batch_size,
            order=sampling["order"],
        )
        rollout = trunk.branch(made, samples)
        rollout.kernel = kernel
        return rollout

    def trunk(self, batch: Batch) -> Rollout:
        """The deterministic trajectory of every sample of the batch, to branch from."""
        return self.rollout(batch, torch.zeros(self.config.rollout.steps))

    def branches(self, trunk: Rollout, samples: Tensor, steps: Tensor, seeds: Sequence[int]) -> Rollout:
        """N trajectories that leave the trunk by one stochastic step and finish by the ODE.

        Args:
            samples, steps: [N] where they leave it.
            seeds: N seeds of the noise of that step.
        """
        eta = torch.full(steps.shape, self.config.rollout.eta, device=steps.device)
        made = perturb(trunk.trajectory, self.kernel, samples, steps, eta, seeds)
        made.latents[:, -1] = self.finish(trunk, made.latents[torch.arange(len(steps)), steps + 1], samples, steps + 1)
        branched = trunk.branch(made, samples)
        branched.kernel = self.kernel
        return branched

    def finish(self, rollout: Rollout, x: Tensor, samples: Tensor, steps: Tensor, stride: int = 1) -> Tensor:
        """States [N, ...] of these samples at these steps, taken to the end by every `stride`-th ODE step."""
        last = self.config.rollout.steps
        paths = [path(first, last, stride=stride) for first in steps.tolist()]
        size = self.config.rollout.batch_size
        return complete(self.policy.at(rollout), x, samples, paths, rollout.trajectory.sigmas, batch_size=size)

    def tree(self, batch: Batch) -> tuple[Rollout, Tensor]:
        """A tree from the start noise of every sample: the leaves' rollout, and the sample of each."""
        assert isinstance(self.plan, Tree)
        trunk = self.trunk(batch)
        size = self.config.rollout.batch_size
        leaves, samples = grow(
            self.policy.at(trunk), trunk.trajectory, self.kernel, self.plan, self.etas(batch), batch.noise_seeds, size
        )
        rollout = trunk.branch(leaves, samples)
        rollout.kernel = self.kernel
        return rollout, samples

    def decode(self, rollout: Rollout, shown: bool = False) -> list[Any]:
        size, shown = self.config.rollout.batch_size, shown or self.extremes is not None
        return self.policy.samples(rollout, size, spec_of(self.reward).needs, shown)

    def ends(self, rollout: Rollout, made: Completions, rows: slice = slice(None), shown: bool = False) -> list[Any]:
        """The finished samples that completions of a rollout end in."""
        whole = rollout.whole(made.latents[rows], made.samples[rows])
        return self.policy.finished(whole, self.config.rollout.batch_size, spec_of(self.reward).needs, shown)

    def cat(self, rollouts: Sequence[Rollout]) -> Rollout:
        return Rollout.cat(rollouts)

    def restore(self, tensors: dict[str, Tensor], rest: dict[str, Any], batch: Batch) -> Rollout:
        """One sample is drawn again for what the denoiser is called with, which is the same for all of a prompt."""
        one = batch[[0]]
        again = self.policy.sample(one.prompts, one.seeds, metadata=one.metadata, **self.config.rollout.arguments())
        trajectory = Trajectory(**{name: value.to(self.device) for name, value in tensors.items()})
        rollout = again.branch(trajectory, torch.zeros(len(batch), dtype=torch.long, device=self.device))
        rollout.kernel, rollout.unlearned = self.kernel, self.unlearned
        return rollout

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
            self.ends(rollout, made, extra), batch, made.samples[extra].tolist(), made.steps[extra].tolist()
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
        if hasattr(self.plan, "update") and not self._alone:
            self.plan.update(step_reward.cpu(), mask.cpu())
            etas = self.plan.etas(self.config.rollout.steps, self.config.rollout.eta, 0, 0)
            self.metrics |= {f"plan/eta/{k}": value for k, value in enumerate(etas.tolist())}

    # What adapts, for the checkpoint

    def state(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        tensors, rest = super().state()
        if hasattr(self.plan, "state_dict"):
            rest["plan"] = self.plan.state_dict()
        if self._head is None:
            return tensors, rest
        moments, rest["value_head"] = optimizer_tensors(self._head_optimizer.state_dict())
        weights = self._head.state_dict()
        rest["value_head"] |= {"channels": self._head.channels, "condition_size": self._head.condition_size}
        return {"value_head": weights, "value_head_optimizer": moments}, rest

    def load_state(self, tensors: dict[str, dict[str, Tensor]], rest: dict[str, Any]) -> None:
        super().load_state(tensors, rest)
        if "plan" in rest:
            self.plan.load_state_dict(rest["plan"])
        if "value_head" in rest:
            head = rest["value_head"]
            self._new_head(head["channels"], head["condition_size"])
            assert self._head is not None
            self._head.load_state_dict(tensors["value_head"])
            self._head_optimizer.load_state_dict(optimizer_state(tensors["value_head_optimizer"], head))
