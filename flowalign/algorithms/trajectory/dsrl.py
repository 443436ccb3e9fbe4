"""DSRL (arXiv 2506.15799): a small policy over the start noise, by policy gradient; the generator stays as it is.

The action is the start noise, drawn from a Gaussian whose mean and deviation a small network gives for the prompt. It
begins as N(0, I), what the generator was made for, and `kl_weight` holds it there. Samples then follow the ODE, so
that the noise is all the choice there is: a trajectory is one action, with its log-density, on the same record,
advantages and losses as denoising steps.

Authors' code (ajwagen/dsrl): SAC with a critic of the noise for robots' flow policies, whose noise is bounded by 1.5.

Departures: advantages come from groups in the place of a critic; the noise is Gaussian, and its mean and log-deviation
are bounded by 1.5.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from flowalign.algorithms.policy_gradient import ActionExperience, PolicyGradient, PolicyGradientSettings
from flowalign.config import Config, Named
from flowalign.core.divergences import standard_normal_kl
from flowalign.core.record import Actions, Record
from flowalign.errors import ConfigError
from flowalign.policies.diffusion import DiffusersPolicy, Rollout
from flowalign.rollouts.pictures import DiffusionSampler, SampledPictures, record_of_samples
from flowalign.rollouts.processes import Processes
from samplers.kernels import gaussian_log_prob
from samplers.start import StartNoise


class DSRLSettings(PolicyGradientSettings):
    advantage: Named = Named(name="grpo", clip=5.0)
    loss: Named = Named(name="ppo", clip_range=1e-2)
    """Loss of the policy. Log-densities are means over elements, so that ratios stay close to 1."""
    kl_weight: float = 0.01
    """Weight of the divergence from N(0, I)."""


class DSRL(PolicyGradient[Config, DiffusionSampler, DiffusersPolicy, Rollout]):
    """DSRL: a small policy over the start noise of a generator that stays as it is (arXiv 2506.15799)."""

    name = "dsrl"
    Settings = DSRLSettings
    settings: DSRLSettings
    unit = "start noises"
    noise = "start"
    samples_otherwise = True
    combines = PolicyGradient.combines - {"whole", "served"}
    network: StartNoise

    def check(self, config: Config) -> None:
        if self.settings.off_policy is not None:
            raise ConfigError("algorithm.off_policy: dsrl's only action is its start noise; null works")
        if self.settings.kl_reference != "reference":
            raise ConfigError("algorithm.kl_reference: the divergence is from N(0, I); leave it out")
        if config.noise()[1].any():
            raise ConfigError(
                "rollout.kernel: dsrl learns which start noise is good, and step noise hides it; ode works"
            )
        if config.model.lora is None:
            raise ConfigError("model.lora: dsrl leaves the generator as it is; {rank: 1}, which stays 0, works")

    def items(self, config: Config) -> int:
        return config.training.group_size

    def modules(self, policy: DiffusersPolicy) -> Mapping[str, nn.Module]:
        size = policy.prompt_vectors([""]).shape[1]
        self.network = StartNoise(policy.latent_channels, size).to(policy.device)

        def moved(start: Rollout) -> Tensor:
            drawn = start.trajectory.latents[:, 0]
            mean, std = self.network(self.condition(policy, start.prompts), drawn.shape)
            return mean + std * drawn

        policy.start_noise = moved
        return {"start_noise": self.network}

    def condition(self, policy: DiffusersPolicy, prompts: list[str]) -> Tensor:
        """[B, D] a vector of each prompt."""
        return policy.prompt_vectors(prompts).to(policy.device)

    def gathered(self, sampled: SampledPictures, reward: Tensor, processes: Processes) -> Record:
        rollout, samples = sampled.rollout, torch.arange(len(sampled.batch), device=processes.device)
        with torch.no_grad():
            log_prob = self.density(sampled.sampler.policy, rollout, samples)[0]
        rollout.trajectory.log_prob[:, 0] = log_prob
        return replace(record_of_samples(sampled, processes), log_prob=processes.gather(log_prob[:, None]))

    def items_of(self, rollout: Rollout) -> Tensor:
        """[N, 2] (sample, its only action)."""
        samples = torch.arange(len(rollout), device=rollout.trajectory.latents.device)
        return torch.stack([samples, torch.zeros_like(samples)], 1)

    def density(self, policy: DiffusersPolicy, rollout: Rollout, samples: Tensor) -> tuple[Tensor, Tensor]:
        """[N] log-density of the start noise of these samples under the present network, and its KL to N(0, I)."""
        noise = rollout.trajectory.latents[samples, 0]
        prompts = [rollout.prompts[i] for i in samples.tolist()]
        mean, std = self.network(self.condition(policy, prompts), noise.shape)
        return gaussian_log_prob(noise, mean, std), standard_normal_kl(mean, std)

    def losses(
        self, policy: DiffusersPolicy, experience: ActionExperience, items: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        samples, rollout = items[:, 0], experience.rollout
        log_prob, kl = self.density(policy, rollout, samples)
        actions = Actions(
            log_prob=log_prob,
            old_log_prob=rollout.trajectory.log_prob[samples, 0],
            advantage=experience.advantage[samples, 0],
            mask=torch.ones_like(log_prob, dtype=torch.bool),
            group=experience.group[samples],
            reward=experience.reward[samples],
        )
        loss, metrics = self.named_loss(actions)
        metrics |= {"policy/kl": kl, "policy/ratio": actions.ratio}
        return loss + self.settings.kl_weight * kl, metrics

    def few(self, experience: ActionExperience) -> Tensor:
        return experience.items[:4]

    def replay(self, policy: DiffusersPolicy, experience: ActionExperience, items: Tensor, keep: bool) -> Tensor:
        samples, old = items[:, 0], experience.rollout.trajectory.log_prob
        with torch.no_grad():
            log_prob = self.density(policy, experience.rollout, samples)[0]
        log_ratio = log_prob - old[samples, 0]
        if keep:
            old[samples, 0] = log_prob
        return log_ratio[:, None]
