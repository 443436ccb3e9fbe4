"""Sampling pictures and videos: rollouts with a plan and a kernel, branches, trees, searches, finished samples."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flowalign.config import Config
from flowalign.core.record import Record
from flowalign.data import Source
from flowalign.data.batches import Batch
from flowalign.data.sizes import one_size
from flowalign.errors import ConfigError
from flowalign.policies.diffusion import DiffusersPolicy, Rollout
from flowalign.policies.diffusion.caching import caching
from flowalign.rollouts.processes import Processes
from flowalign.rollouts.sampler import Sampled, Sampler
from flowalign.rollouts.scoring import Scorer
from samplers import Recorder, derive_seed
from samplers.completion import Completions, complete, fork, path, perturb
from samplers.kernels import Kernel
from samplers.plans import Tree
from samplers.tree import grow


class DiffusionSampler(Sampler):
    """Samples pictures or videos with a policy, with the settings of the rollout section.

    Args:
        needs: needs of the rewards, as in `rewards.Spec`; they decide what a finished sample is.
    """

    config: Config
    policy: DiffusersPolicy

    def __init__(self, config: Config, policy: DiffusersPolicy, needs: frozenset[str]) -> None:
        super().__init__(config, policy)
        self.needs, self.shares_start_noise = needs, config.rollout.share_start_noise
        self.kernel = config.build_kernel()
        self.plan = config.build_plan(silent=True)
        self.unlearned: int = getattr(self.plan, "unlearned", 0)
        self.search: Callable[[Batch], Tensor] | None = None
        """Search that finds finished latents [B, ...] for a batch."""
        self.scorer: Scorer | None = None
        """Scorer of a run that trains, for rollouts that look at samples on their way."""
        cache = config.rollout.cache
        self.cache = None if cache is None else cache.part("caches", "rollout.cache")
        """Cache of features, in rollouts."""
        if self.cache is not None:
            with caching(policy, self.cache):
                pass  # raises if it does not fit the network
        policy.guidance_gradient = config.rollout.guidance_gradient
        if policy.guidance_gradient == "conditional" and not policy.family.negative(config.rollout.largest_guidance):
            raise ConfigError(
                f"rollout.guidance_gradient: the guidance of {type(policy.pipeline).__name__} is "
                f"{policy.family.guidance}, without an unconditional branch; leave it out"
            )

    def etas(self, batch: Batch) -> Tensor:
        """Noise levels [T] of this iteration's plan, or [B, T] if the plan is drawn for each group."""
        settings, seed = self.config.rollout, self.config.training.seed
        if getattr(self.plan, "of", "iteration") == "iteration":
            return self.plan.etas(settings.steps, settings.eta, batch.iteration, seed)
        seeds = [derive_seed(seed, group) for group in batch.group]
        return torch.stack(
            [self.plan.etas(settings.steps, settings.eta, batch.iteration, group_seed) for group_seed in seeds]
        )

    def arguments(self, batch: Batch, kept: Sequence[int] | None = None) -> dict[str, Any]:
        """Arguments of the policy's `sample` for a batch, whose lines may ask for their own size.

        Raises:
            ConfigError: the batch holds several sizes.
        """
        return self.config.rollout.arguments(kept) | one_size(batch.metadata)

    def cuts(self, batch: Batch) -> list[int]:
        family, starts = self.policy.family, batch.starts(self.config.rollout.batch_size)
        if batch.shares_start_noise and len(set(batch.group)) < len(batch):
            # batches of the shared steps hold one sample a group
            return [0]
        sources: list[Any] = [Source.of(record) for record in batch.metadata] if family.images[1] else []
        if any(source is not None for source in sources) or family.unpadded:
            # network batches end where these change
            alike = batch.prompts if family.unpadded else sources
            return [i for i in starts if i == 0 or alike[i] != alike[i - 1]]
        return starts

    def rollout(
        self,
        batch: Batch,
        eta: Tensor | None = None,
        kernel: Kernel | None = None,
        kept: Sequence[int] | None = None,
        until: int | None = None,
    ) -> Rollout:
        """Sample one trajectory for every sample of the batch, stochastic at the plan's steps.

        If groups share their start noise, the steps before the first stochastic one are computed once per group.

        Args:
            eta: [T] or [B, T] noise levels instead of the plan's.
            kernel: kernel instead of the configured one.
            kept: take only these steps of the schedule, which must be configured, and those after the last stochastic
                one by a second-order solver.
            until: the step of each chunk that is the last, as of `DiffusersPolicy.sample`.
        """
        kernel = kernel or self.kernel
        eta = self.etas(batch) if eta is None else eta
        sampling = self.arguments(batch, kept) | ({} if kept is None else {"order": 2})
        eta_kept = eta if kept is None else eta[kept]
        shared = batch.shares_start_noise and len(set(batch.group)) < len(batch)
        with self.merged():
            if shared and eta.dim() == 1 and (eta > 0).any():
                rollout = self._forked(batch, eta_kept, kernel, sampling)
            else:
                rollout = self.policy.sample(
                    batch.prompts,
                    batch.seeds,
                    noise_seeds=batch.noise_seeds,
                    kernel=kernel,
                    eta=eta_kept,
                    metadata=batch.metadata,
                    cache=self.cache,
                    allocate=self.allocate,
                    until=until,
                    **sampling,
                )
        return replace(rollout, unlearned=self.unlearned)

    def merged(self) -> contextlib.AbstractContextManager[None]:
        """Within it the policy samples with its LoRA in the weights, if the configuration says so."""
        return self.policy.merged() if self.config.rollout.merge_lora else contextlib.nullcontext()

    @torch.no_grad()
    def pruned(self, batch: Batch, prune: Mapping[int, Callable[[Tensor, Tensor], Tensor]]) -> tuple[Rollout, Batch]:
        """Sample trajectories of which some end early, by the rewards of the pictures predicted at their states.

        Args:
            prune: the choice of samples before a step, by its number: (rewards [N], groups [N]) -> bool [N].

        Returns:
            The trajectories that were not ended, and their batch.
        """
        assert self.scorer is not None
        size, eta = self.config.rollout.batch_size, self.etas(batch)
        sampling: dict[str, Any] = {"noise_seeds": batch.noise_seeds, "metadata": batch.metadata}
        start = self.policy.sample(batch.prompts, batch.seeds, dry=True, **sampling | self.arguments(batch))
        velocity, sigmas = self.policy.at(start), start.trajectory.sigmas
        recorder = Recorder(start.trajectory.latents[:, 0], sigmas, self.kernel, eta, batch.noise_seeds)
        rows, group = (torch.tensor(numbers, device=self.device) for numbers in (range(len(batch)), batch.group))
        with self.merged():
            for step in range(len(sigmas) - 1):
                here = torch.full_like(rows, step)
                parts = zip(recorder.x.split(size), rows.split(size), here.split(size), strict=True)
                v = torch.cat([velocity(*part).float() for part in parts])
                if step in prune:
                    predicted = start.whole(recorder.x - sigmas[step] * v, rows)
                    pictures = self.policy.finished(predicted, size, self.needs)
                    scores = self.scorer.score(pictures, batch, rows.tolist(), here.tolist())
                    kept = prune[step](scores.value.to(self.device), group[rows]).nonzero().squeeze(1)
                    recorder.keep(kept)
                    rows, v = rows[kept], v[kept]
                recorder.step(v)
        rollout = start.branch(recorder.trajectory(), rows, kernel=self.kernel, unlearned=self.unlearned)
        return rollout, batch[rows.tolist()]

    def found(self, batch: Batch) -> Rollout:
        """Samples that a search finds, one for every sample of the batch, without the steps that led to them.

        The first few have the steps of plain sampling, since replay is verified with them.
        """
        assert self.search is not None
        call = self.arguments(batch)
        rollouts = [
            self.policy.sample(chunk.prompts, chunk.seeds, metadata=chunk.metadata, dry=begin > 0, **call)
            for begin, chunk in ((0, batch[range(min(4, len(batch)))]), (4, batch[range(4, len(batch))]))
            if len(chunk)
        ]
        rollout = Rollout.cat(rollouts)
        rollout.trajectory.latents[:, -1] = self.search(batch)
        return rollout

    def _forked(self, batch: Batch, eta: Tensor, kernel: Kernel, sampling: dict[str, Any]) -> Rollout:
        numbers = list(dict.fromkeys(batch.group))
        roots = batch[[batch.group.index(g) for g in numbers]]
        start = self.policy.sample(roots.prompts, roots.seeds, metadata=roots.metadata, dry=True, **sampling)
        samples = torch.tensor([numbers.index(g) for g in batch.group], device=self.device)
        forked = fork(
            self.policy.at(start),
            start.trajectory.latents[:, 0],
            start.trajectory.sigmas,
            kernel,
            samples,
            eta,
            batch.noise_seeds,
            self.config.rollout.batch_size,
            sampling["order"],
        )
        return start.branch(forked, samples, kernel=kernel)

    def trunk(self, batch: Batch, steps: int) -> Rollout:
        """The first `steps` steps of the deterministic trajectory of every sample, to branch from or after them."""
        settings = self.arguments(batch)
        start = self.policy.sample(batch.prompts, batch.seeds, eta=0.0, metadata=batch.metadata, dry=True, **settings)
        x, everyone = start.trajectory.latents[:, 0], torch.arange(len(start), device=self.device)
        self._complete(start, x, everyone, [path(0, steps)] * len(x), record=start.trajectory)
        return replace(start, unlearned=self.unlearned)

    def branches(self, trunk: Rollout, samples: Tensor, steps: Tensor, seeds: Sequence[int]) -> Rollout:
        """Sample N trajectories that leave the trunk by one stochastic step and finish by the ODE.

        Args:
            samples, steps: [N] trajectories and steps of the trunk where they leave it.
            seeds: N seeds of the noise of that step.
        """
        eta = torch.full(steps.shape, self.config.rollout.eta, device=steps.device)
        branches = perturb(trunk.trajectory, self.kernel, samples, steps, eta, seeds)
        left = branches.latents[torch.arange(len(steps)), steps + 1]
        paths = [path(first, self.config.rollout.steps) for first in (steps + 1).tolist()]
        self._complete(trunk, left, samples, paths, record=branches)
        return trunk.branch(branches, samples, kernel=self.kernel)

    def finish(self, rollout: Rollout, samples: Tensor, steps: Tensor, stride: int) -> Tensor:
        """Take states [N] of a rollout to the end by every `stride`-th ODE step.

        Its own states and velocities are known, so that a first leap of one step and the one after it ask nothing.
        """
        last, trajectory = self.config.rollout.steps, rollout.trajectory
        ways = [path(first, last, stride=stride) for first in steps.tolist()]
        ways = [way[1:] if way[1:2] == [way[0] + 1] else way for way in ways]
        at = torch.tensor([way[0] for way in ways], device=self.device)
        known = trajectory.velocity[samples, at.clamp(max=last - 1)]
        return self._complete(rollout, trajectory.latents[samples, at], samples, ways, start_velocity=known)

    def _complete(
        self, rollout: Rollout, x: Tensor, samples: Tensor, paths: Sequence[Sequence[int]], **known: Any
    ) -> Tensor:
        size, sigmas = self.config.rollout.batch_size, rollout.trajectory.sigmas
        with self.merged():
            return complete(self.policy.at(rollout), x, samples, paths, sigmas, batch_size=size, **known)

    def tree(self, batch: Batch) -> tuple[Rollout, Tensor]:
        """Grow a tree from the start noise of every sample: the rollout of the leaves, and the sample of each leaf."""
        assert isinstance(self.plan, Tree)
        trunk = self.trunk(batch, 1)
        size = self.config.rollout.batch_size
        etas, velocity = self.etas(batch), self.policy.at(trunk)
        with self.merged():
            leaves, samples = grow(velocity, trunk.trajectory, self.kernel, self.plan, etas, batch.noise_seeds, size)
        return trunk.branch(leaves, samples, kernel=self.kernel), samples

    def decode(self, rollout: Rollout, shown: bool = False) -> list[Any]:
        size, shown = self.config.rollout.batch_size, shown or self.shown
        return self.policy.samples(rollout, size, self.needs, shown)

    def ends(
        self, rollout: Rollout, completed: Completions, rows: slice = slice(None), shown: bool = False
    ) -> list[Any]:
        """The finished samples of a rollout's completions."""
        whole = rollout.whole(completed.latents[rows], completed.samples[rows])
        return self.policy.finished(whole, self.config.rollout.batch_size, self.needs, shown)

    def cat(self, rollouts: Sequence[Rollout]) -> Rollout:
        return Rollout.cat(rollouts)

    def restore(self, tensors: dict[str, Tensor], rest: dict[str, Any], batch: Batch) -> Rollout:
        """Rebuild a rollout: one sample is drawn again for the conditions, which a prompt's samples share."""
        first = batch[[0]]
        redrawn = self.policy.sample(first.prompts, first.seeds, metadata=first.metadata, **self.arguments(first))
        own: dict[str, Any] = {name: value.to(self.device) for name, value in tensors.items()}
        trajectory = replace(redrawn.trajectory, **own)
        rows = torch.zeros(len(batch), dtype=torch.long, device=self.device)
        return self.stored(redrawn.branch(trajectory, rows, kernel=self.kernel, unlearned=self.unlearned))

    def stored(self, rollout: Rollout) -> Rollout:
        return rollout if self.allocate is None else rollout.stored(self.allocate)

    def calibrate(self, step_reward: Tensor, mask: Tensor) -> None:
        """Let an adaptive plan learn from the step rewards [B, T] of all processes."""
        if hasattr(self.plan, "update"):
            self.plan.update(step_reward.cpu(), mask.cpu())
            etas = self.plan.etas(self.config.rollout.steps, self.config.rollout.eta, 0, 0)
            self.metrics |= {f"plan/eta/{k}": value for k, value in enumerate(etas.tolist())}

    def state(self) -> dict[str, Any]:
        return {"plan": self.plan.state_dict()} if hasattr(self.plan, "state_dict") else {}

    def load_state(self, state: dict[str, Any]) -> None:
        if "plan" in state:
            self.plan.load_state_dict(state["plan"])


SampledPictures = Sampled[DiffusionSampler, Rollout]


def record_of_steps(sampled: SampledPictures, reward: Tensor, processes: Processes) -> Record:
    """The record of all processes, where a denoising step is an action.

    Args:
        reward: [B] or [B, T] rewards of this process's samples.
    """
    return Record(
        log_prob=processes.gather(sampled.rollout.trajectory.log_prob),
        mask=processes.gather(sampled.rollout.mask),
        reward=processes.gather(reward.to(processes.device)),
        **sampled.gathered(processes),
    )


def record_of_samples(sampled: SampledPictures, processes: Processes) -> Record:
    """The record of all processes, where a sample is one action, whose probability is not used."""
    reward = processes.gather(sampled.scores.value.to(processes.device))
    return Record(
        log_prob=torch.zeros_like(reward)[:, None],
        mask=torch.ones_like(reward, dtype=torch.bool)[:, None],
        reward=reward,
        **sampled.gathered(processes),
    )
