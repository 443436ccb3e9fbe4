"""DMD2: distribution matching distillation of a generator of a few steps (arXiv 2405.14867).

What the generator predicts at one of its steps is diffused by fresh noise. Its samples are made as they are at use:
with `stochastic`, `rollout.kernel: cps` and `eta: 1`, every step puts fresh noise on its prediction of x0, as the
authors' generator does; the default is the ODE. With `gan`, a discriminator tells its samples from real ones, which
makes the teacher's errors good.

Departure: both losses see a sample at the same noise and level, where the authors draw others for the discriminator.
"""

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor, nn

from flowalign.algorithms.matching import base, distribution
from flowalign.algorithms.matching.adversarial import AdversarialExperience, Discriminator, Gan, passing, telling_apart
from flowalign.algorithms.matching.distribution import DistributionMatching, DistributionSettings
from flowalign.algorithms.matching.files import check_files, latents
from flowalign.config import Config, Data
from flowalign.core.record import Record
from flowalign.data import Prompts, Targets
from flowalign.data.batches import Batch
from flowalign.errors import ConfigError
from flowalign.policies.diffusion import DiffusersPolicy, Noised
from flowalign.policies.diffusion.families import family_of
from flowalign.policies.settings import Role
from flowalign.rollouts.pictures import DiffusionSampler, SampledPictures
from flowalign.rollouts.processes import Processes
from samplers import derive_seed


class DMD2Settings(DistributionSettings):
    fake: Role = Role(updates=5)
    """Optimizer of the generator's own score; published: 5 updates for one of the generator, 10 for SD 1.5."""
    gan: Gan | None = None
    """Discriminator beside the two scores; {} has the authors' weights."""


class DMD2(DistributionMatching):
    """DMD2: a few-step generator by the difference of two scores (arXiv 2405.14867)."""

    name = "dmd2"
    Settings = DMD2Settings
    settings: DMD2Settings
    experience_type = AdversarialExperience
    discriminator: Discriminator

    def __init__(self, settings: DMD2Settings) -> None:
        super().__init__(settings)
        if settings.gan is not None:
            self.combines = self.combines - {"shards"}

    def read(self, data: Data) -> Prompts:
        gan = self.settings.gan
        return Targets.of(data) if gan and gan.real == "files" else super().read(data)

    def check(self, config: Config) -> None:
        super().check(config)
        if self.settings.gan is None:
            return
        hidden = {
            "model.compile: true": config.model.compile,
            "model.context_parallel": config.model.context_parallel.degree > 1,
            "model.dtype: float16": config.model.compute_dtype == "float16",
            "algorithm.guidance": (self.settings.guidance or 1) > 1,
        }
        for setting in (name for name, given in hidden.items() if given):
            raise ConfigError(f"{setting}: algorithm.gan needs the network's features as they are; leave it off")

    def check_pipeline(self, config: Config, name: str) -> None:
        if self.settings.gan is None:
            return
        family = family_of(name)
        if not family.middle or family.unpadded:
            raise ConfigError(
                f"algorithm.gan: {name} is not one of the pipelines whose features are known; Stable Diffusion, SDXL, "
                "SD3, Flux, Qwen-Image and Wan work"
            )
        if self.settings.gan.real == "files":
            check_files(self.read(config.data), name)

    def modules(self, policy: DiffusersPolicy) -> Mapping[str, nn.Module]:
        if self.settings.gan is None:
            return {}
        if len(policy.networks) > 1:
            raise ConfigError("algorithm.gan: the pipeline has two denoisers; dmd2 works on it without")
        self.discriminator = Discriminator(policy.family.width(policy.denoiser)).to(policy.device)
        return {"discriminator": self.discriminator}

    def experience(self, sampled: SampledPictures, record: Record, processes: Processes) -> base.MatchingExperience:
        experience = super().experience(sampled, record, processes)
        assert isinstance(experience, AdversarialExperience)
        if self.settings.gan is not None:
            experience.real = self.real(sampled.sampler, experience.batch, self.settings.gan)
        return experience

    def real(self, sampler: DiffusionSampler, batch: Batch, gan: Gan) -> Tensor:
        """[B, ...] latents of real samples of these prompts."""
        if gan.real == "files":
            return latents(sampler, batch, "target")
        scale = self.settings.reference_guidance or sampler.config.rollout.guidance
        sampling = sampler.arguments(batch) | {"steps": gan.steps, "sigmas": None, "guidance": scale}
        seeds = [derive_seed(seed, 14) for seed in batch.seeds]
        with sampler.policy.reference():
            return sampler.policy.sample(batch.prompts, seeds, metadata=batch.metadata, **sampling).trajectory.final

    def role_losses(
        self, role: str, policy: DiffusersPolicy, experience: base.MatchingExperience, items: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        assert isinstance(experience, distribution.DistributionExperience)
        loss, values = super().role_losses(role, policy, experience, items)
        gan = self.settings.gan
        if gan is None:
            return loss, values
        assert isinstance(experience, AdversarialExperience)
        state = experience.states(items)
        noised = self.diffused(experience, items, state, state.x0)
        fake, real = (self.logit(policy, experience, at) for at in (noised, experience.noised_real(items)))
        loss = loss + gan.fake_weight * base.by_item(telling_apart(fake, real), items)
        said = {"discriminator/made": fake.sigmoid(), "discriminator/real": real.sigmoid()}
        return loss, values | {name: base.by_item(value, items) for name, value in said.items()}

    def distilled(
        self, policy: DiffusersPolicy, experience: distribution.DistributionExperience, noised: Noised, x0: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        loss, values = super().distilled(policy, experience, noised, x0)
        gan = self.settings.gan
        if gan is None:
            return loss, values
        at = x0.detach().requires_grad_()
        with policy.snapshot("fake"):
            passed = passing(self.logit(policy, experience, replace(noised, x0=at)), x0, at)
        # the authors' distance to the target has the factor 1/2, and this one has not
        return loss + 2 * gan.weight * passed, values | {"discriminator/passed": passed}

    def logit(self, policy: DiffusersPolicy, experience: distribution.DistributionExperience, noised: Noised) -> Tensor:
        """[N] how real noised samples are, under the network's current weights."""
        logit: Tensor = self.discriminator(policy.features_of(experience.clean, noised))
        return logit
