"""MixGRPO: SDE steps in a sliding window, ODE elsewhere (arXiv 2507.21802).

Rollout: `window` consecutive stochastic steps, moved on every `every` iterations from the early, noisy steps to the
late ones. MixGRPO-Flash (`flash`) walks only a share of the steps after the window, by second-order DPM-Solver++.
Credit: each reward is normalised within its group and the advantages are summed. Loss: PPO's clip on the steps of the
window only.

Departures: the window keeps its size at the end of the schedule and then starts over; the released one shrinks
until an iteration trains nothing. Flash keeps steps of the configured schedule, the released code spaces new ones.
"""

from pydantic import Field

from flowalign.algorithms.trajectory import base as trajectory
from flowalign.algorithms.trajectory.base import TrajectoryAlgorithm
from flowalign.config import Config, Named
from flowalign.data.batches import Batch
from flowalign.errors import ConfigError
from flowalign.policies.diffusion import Rollout
from flowalign.rollouts.pictures import DiffusionSampler
from samplers import Window
from samplers.completion import path


class MixGRPOSettings(trajectory.PolicySettings):
    advantage: Named = Named(name="per_reward", clip=5.0, unbiased=True, eps=1e-8)
    flash: float | None = Field(None, gt=0, lt=1)
    """Share of the steps after the window that are walked (published: 0.4); null: all, by Euler's rule."""


class MixGRPO(TrajectoryAlgorithm):
    """MixGRPO: a window of stochastic steps that slides over the schedule (arXiv 2507.21802)."""

    name = "mix_grpo"
    Settings = MixGRPOSettings
    settings: MixGRPOSettings
    plan = (Window, "{name: window, size: 4, order: progressive, every: 25}")

    def check(self, config: Config) -> None:
        super().check(config)
        if self.settings.flash is not None and config.rollout.sigmas is None:
            raise ConfigError(
                "algorithm.flash: leaves out steps of a schedule that must be given; "
                "rollout.sigmas: [1.0, 0.9, ...], one a step and before the pipeline's own shift, works"
            )
        if self.settings.flash is not None and getattr(config.build_plan(), "of", "iteration") == "group":
            raise ConfigError("rollout.plan.of: algorithm.flash leaves out steps after one window; of: iteration works")
        if self.settings.flash is not None and config.data.replay is not None:
            raise ConfigError(
                "data.replay: with algorithm.flash every place of the window has a schedule of its own, and groups of "
                "several cannot be learned from together; algorithm.flash: null works"
            )

    def rollout(self, sampler: DiffusionSampler, batch: Batch) -> tuple[Rollout, Batch]:
        if self.settings.flash is None:
            return super().rollout(sampler, batch)
        eta = sampler.etas(batch)
        after = int((eta > 0).nonzero()[-1]) + 1
        count = max(1, int(self.settings.flash * (len(eta) - after)))
        walked = [*range(after), *path(after, len(eta), count)[:-1]]
        return sampler.rollout(batch, eta, kept=walked), batch
