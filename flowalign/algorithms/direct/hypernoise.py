"""HyperNoise (arXiv 2508.09968): a LoRA network moves the start noise, and the generator stays as it was.

The noise that a sample starts from is x + delta(x): delta is what the adapter changes of the network's answer at the
first noise level, 0 before training. From there the start weights sample. The loss is -reward of the finished sample
plus `move_weight` times the mean square of delta, by which the moved noise stays near to what the generator knows.

Authors' code (ExplainableML/HyperNoise, training/trainer.py): one step of SANA-Sprint or FLUX.1-schnell, weight 0.5,
HPSv2 5, ImageReward 1, PickScore 0.05, CLIP 0.01; SGD with rate 1e-3 for SANA, AdamW with 2e-5 for FLUX.

Departure: their delta is the network's answer with its last layer's own weights left out, ours its difference from
the answer without the adapter.

To use the adapter in plain diffusers: call the denoiser at the start noise with the adapter on and off, add the
difference to the noise, and give the sum to the pipeline as `latents`, with the adapter off.
"""

from collections.abc import Mapping

import torch
from pydantic import Field
from torch import Tensor, nn

from flowalign.algorithms.direct import base
from flowalign.algorithms.direct.base import DirectAlgorithm, DirectExperience
from flowalign.config import Config
from flowalign.errors import ConfigError
from flowalign.policies.diffusion import DiffusersPolicy, Rollout
from flowalign.policies.diffusion.window import GradientWindow


class HyperNoiseSettings(base.DirectSettings):
    move_weight: float = Field(0.5, ge=0)
    """Weight of the mean square of the change of the noise."""


class HyperNoise(DirectAlgorithm):
    """HyperNoise: a LoRA that moves the start noise of a generator that stays as it was (arXiv 2508.09968)."""

    name = "hypernoise"
    Settings = HyperNoiseSettings
    settings: HyperNoiseSettings
    idle = "the reward does not depend on the start noise"
    samples_otherwise = True
    combines = DirectAlgorithm.combines - {"shards", "whole"}

    def check(self, config: Config) -> None:
        super().check(config)
        if config.model.lora is None:
            raise ConfigError("model.lora: hypernoise trains an adapter beside the generator; {rank: 32} works")
        if config.model.gradient_checkpointing:
            raise ConfigError(
                "model.gradient_checkpointing: blocks would be computed again when the adapter is back on; whole steps "
                "are computed again anyway, so that false works, with a smaller training.micro_batch_size"
            )
        if config.rollout.merge_lora:
            raise ConfigError("rollout.merge_lora: the generator samples without the adapter; false works")
        if config.algorithm.settings.get("kl_weight"):
            raise ConfigError("algorithm.kl_weight: the generator keeps its weights; move_weight holds the noise")

    def windows(self, steps: int) -> range:
        return range(1)

    def modules(self, policy: DiffusersPolicy) -> Mapping[str, nn.Module]:
        def moved(start: Rollout) -> Tensor:
            rows = torch.arange(len(start), device=policy.device)
            noise = start.trajectory.latents[:, 0]
            return noise + self.delta(GradientWindow(policy, start, rows), noise)

        policy.start_noise, policy.frozen = moved, True
        return {}

    def verify(self, policy: DiffusersPolicy, experience: DirectExperience) -> None:
        with policy.reference():
            super().verify(policy, experience)

    def delta(self, window: GradientWindow, noise: Tensor) -> Tensor:
        """[N, ...] what the adapter changes at the start noise [N, ...] of the window's samples."""
        with torch.no_grad(), window.policy.reference():
            start = window.velocity(noise, 0)
        return window.velocity(noise, 0) - start

    def losses(
        self, policy: DiffusersPolicy, experience: DirectExperience, items: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        samples, rollout = items[:, 0], experience.rollout
        assert rollout.unmoved is not None
        noise = rollout.unmoved[samples]
        delta = self.delta(GradientWindow(policy, rollout, samples), noise)
        finished = GradientWindow(policy, rollout, samples, frozen=True).walk(noise + delta, 0)
        scores = experience.score(samples, experience.finished(policy, finished, samples))
        loss, metrics = self.loss(scores)
        moved = delta.square().flatten(1).mean(1)
        return loss + self.settings.move_weight * moved, metrics | {"policy/moved": moved}
