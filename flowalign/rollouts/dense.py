"""Step-level dense reward estimators: the value of a half-denoised sample.

The exact value of a state is the reward of its completion by the ODE. Cheaper estimators finish in fewer steps, score
the one-step x0 estimate, or evaluate a small network that learned to predict the exact value; `agreement` measures how
good they are.
"""

from dataclasses import dataclass
from math import isnan
from typing import Any, Literal

import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

from flowalign.core.groups import group_mean_std
from flowalign.rollouts.pictures import SampledPictures
from flowalign.rollouts.processes import Processes
from flowalign.runs.checkpoint import optimizer_state, optimizer_tensors
from samplers import derive_seed
from samplers.completion import completions


@dataclass(kw_only=True)
class Estimator:
    """Settings for estimating the values of states.

    Args:
        kind: 'ode' completes with all remaining steps of the schedule (exact), 'n_step' in `steps` ODE steps,
            'one_step' scores the x0 estimate, 'learned' evaluates a `ValueHead`.
        steps: ODE steps of 'n_step', including the one by the known velocity.
        check_every: iterations between comparisons with the exact values, which are then computed too; 0: never. The
            learned estimator trains in each of these iterations, and in the first `warmup` ones.
        warmup: iterations at the start in which the learned estimator uses and learns the exact values.
        order: order of the solver of 'n_step': 1 is Euler's rule, 2 DPM-Solver++, which needs fewer steps.
    """

    kind: Literal["ode", "n_step", "one_step", "learned"] = "ode"
    steps: int = 2
    check_every: int = 0
    warmup: int = 10
    order: Literal[1, 2] = 1

    def __post_init__(self) -> None:
        if self.steps < 1 or self.check_every < 0 or self.warmup < 0:
            raise ValueError("estimator: steps must be at least 1, check_every and warmup at least 0")
        if self.order == 2 and self.kind != "n_step":
            raise ValueError(f"estimator: order 2 goes with kind n_step; '{self.kind}' takes Euler's steps or none")
        if self.kind == "learned" and self.warmup + self.check_every == 0:
            raise ValueError("estimator: a learned one needs warmup or check_every iterations to learn in")

    @property
    def count(self) -> int | None:
        """ODE steps of a completion, None for all."""
        return {"one_step": 1, "n_step": self.steps}.get(self.kind)

    def is_exact(self, iteration: int) -> bool:
        """True if an iteration computes the exact values."""
        check = self.check_every > 0 and iteration % self.check_every == 0
        return self.kind == "ode" or check or (self.kind == "learned" and iteration < self.warmup)


class ValueHead(nn.Module):
    """A small network that predicts the final reward of a half-denoised sample.

    Args:
        channels: channels of the latents.
        condition_size: length of the prompt's embedding.
        width: width of the hidden layers.
    """

    def __init__(self, channels: int, condition_size: int, width: int = 64) -> None:
        super().__init__()
        self.channels, self.condition_size = channels, condition_size
        self.image = nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1),
            nn.SiLU(),
            nn.Conv2d(width, width, 3, stride=2, padding=1),
            nn.SiLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.SiLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        )
        self.value = nn.Sequential(nn.Linear(4 * width + condition_size + 1, width), nn.SiLU(), nn.Linear(width, 1))

    def forward(self, x: Tensor, sigma: Tensor, condition: Tensor) -> Tensor:
        """Predicted rewards [N] of latents [N, C, H, W] at noise levels [N] for embeddings [N, condition_size]."""
        features = torch.cat([self.image(x.float()), sigma[:, None], condition.float()], 1)
        return self.value(features)[:, 0]

    def distill(
        self,
        x: Tensor,
        sigma: Tensor,
        condition: Tensor,
        value: Tensor,
        optimizer: torch.optim.Optimizer,
        generator: torch.Generator,
    ) -> Tensor:
        """Learn exact values [N] in one pass of squared-error steps, in an order that the generator draws.

        Returns:
            the mean of the losses before each step, a scalar.
        """
        losses = []
        for rows in torch.randperm(len(value), generator=generator).split(128):
            loss = ((self(x[rows], sigma[rows], condition[rows]) - value[rows]) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean()


def agreement(estimate: Tensor, exact: Tensor) -> dict[str, Tensor]:
    """Compare estimated values [B, T + 1] with exact ones, per step.

    Returns:
        'rank_correlation' (Spearman over the samples; NaN where one side is constant) and 'bias' (mean of
        estimate - exact), each [T + 1].
    """
    rank = [
        torch.nan if len(e.unique()) < 2 or len(x.unique()) < 2 else float(spearmanr(e, x).statistic)
        for e, x in zip(estimate.T.cpu(), exact.T.cpu(), strict=True)
    ]
    return {"rank_correlation": torch.tensor(rank), "bias": (estimate - exact).mean(0).cpu()}


def persistence(values: Tensor, group: Tensor) -> Tensor:
    """Correlation of each state's value with the final reward, within groups: how much of the value lasts.

    If the state before a step has a correlation below 1/2, the gain R_k - R_{k-1} of that step is noisier than the
    final reward itself.

    Args:
        values: [B, T + 1] exact values, R_0 .. R_T.
        group: [B] integers.

    Returns:
        [T + 1]; NaN for states that a group shares.
    """
    centred = values - group_mean_std(values, group)[0]
    size = centred.square().sum(0).sqrt()
    # rounding leaves a group's equal values a little apart
    size = size.where(size > 1e-4 * len(values) ** 0.5, torch.nan)
    return (centred * centred[:, -1:]).sum(0) / (size * size[-1])


class StateValues:
    """Values of all states of trajectories, with the network of an estimator that learns.

    Args:
        estimator: settings for estimating values.
    """

    def __init__(self, estimator: Estimator) -> None:
        self.estimator = estimator
        self.head: ValueHead | None = None
        """The network of a learned estimator, once there are states."""

    def __call__(self, sampled: SampledPictures, processes: Processes) -> Tensor:
        """Values [B, T + 1], R_0 .. R_T, of this process's trajectories; R_T is the finished sample's reward."""
        # alone, values are exact: a network that learns needs the other processes
        estimator = Estimator() if processes.apart else self.estimator
        iteration, final = sampled.batch.iteration, sampled.scores.value
        exact = self._completed(sampled, None) if estimator.is_exact(iteration) else None
        if exact is not None:
            lasting = persistence(exact, torch.tensor(sampled.batch.group))
            sampled.metrics |= {f"dense/persistence/{k}": v for k, v in enumerate(lasting.tolist()) if not isnan(v)}
        if estimator.kind == "ode":
            assert exact is not None
            return exact
        if estimator.kind == "learned":
            values = self._predicted(sampled, exact, processes)
            # the last state's reward is known
            values[:, -1] = final
        else:
            values = self._completed(sampled, estimator.count, estimator.order)
        if exact is not None:
            for name, per_step in agreement(values, exact).items():
                sampled.metrics |= {f"dense/{name}/{k}": v for k, v in enumerate(per_step.tolist())}
            if estimator.kind == "learned" and iteration < estimator.warmup:
                return exact
        return values

    def _completed(self, sampled: SampledPictures, count: int | None, order: Literal[1, 2] = 1) -> Tensor:
        """Rewards [B, T + 1] of the states' completions in `count` ODE steps; None: all steps of the schedule."""
        rollout, sampler = sampled.rollout, sampled.sampler
        size = sampler.config.rollout.batch_size
        with sampler.merged():
            ends = completions(sampler.policy.at(rollout), rollout.trajectory, count, size, order)
        # the first completions are the finished samples themselves, which have their scores already
        further = slice(len(rollout), None)
        scores = sampled.scorer.score(
            sampler.ends(rollout, ends, further),
            sampled.batch,
            ends.samples[further].tolist(),
            ends.steps[further].tolist(),
        )
        return torch.cat([sampled.scores.value, scores.value])[ends.index.cpu()]

    def _predicted(self, sampled: SampledPictures, exact: Tensor | None, processes: Processes) -> Tensor:
        """Values [B, T + 1] by the network; it learns the exact values of all processes, if they are given."""
        rollout, seed = sampled.rollout, sampled.sampler.config.training.seed
        trajectory = rollout.trajectory
        batch, states = trajectory.latents.shape[:2]
        # one vector for each prompt: the mean of its embedding over tokens
        condition = sampled.sampler.policy.prompt_vectors(rollout.prompts, rollout.sources).to(processes.device)
        if self.head is None:
            self._begin(trajectory.latents.shape[2], condition.shape[1], seed, processes.device)
        assert self.head is not None
        x = trajectory.latents[:].flatten(0, 1)
        sigma = trajectory.sigmas.repeat(batch)
        condition = condition.repeat_interleave(states, 0)
        with torch.no_grad():
            values = self.head(x, sigma, condition).unflatten(0, (batch, states)).cpu()
        if exact is not None:
            # every process learns from the same values, so that their networks stay equal
            target = exact.flatten().to(processes.device)
            x, sigma, condition, target = (processes.gather(column) for column in (x, sigma, condition, target))
            generator = torch.Generator().manual_seed(derive_seed(seed, sampled.batch.iteration, 4))
            loss = self.head.distill(x, sigma, condition, target, self.optimizer, generator)
            sampled.metrics["dense/head_loss"] = loss.item()
        return values

    def _begin(self, channels: int, condition_size: int, seed: int, device: torch.device) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.head = ValueHead(channels, condition_size).to(device)
        self.optimizer = torch.optim.Adam(self.head.parameters(), 1e-3)

    def state(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        """Tensors by file, and JSON, for the checkpoint."""
        if self.head is None:
            return {}, {}
        moments, extra = optimizer_tensors(self.optimizer.state_dict())
        extra |= {"channels": self.head.channels, "condition_size": self.head.condition_size}
        return {"value_head": self.head.state_dict(), "value_head_optimizer": moments}, {"value_head": extra}

    def load_state(self, tensors: dict[str, dict[str, Tensor]], state: dict[str, Any], device: torch.device) -> None:
        """The inverse of `state`."""
        if "value_head" in state:
            extra = state["value_head"]
            self._begin(extra["channels"], extra["condition_size"], 0, device)
            assert self.head is not None
            self.head.load_state_dict(tensors["value_head"])
            self.optimizer.load_state_dict(optimizer_state(tensors["value_head_optimizer"], extra))
