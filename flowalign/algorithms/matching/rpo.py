"""RPO: a subject's picture against the start weights' samples, labelled by a reward (arXiv 2407.12164).

Each picture of the data meets a sample of its prompt. Which of the two is preferred is drawn: the picture with the
probability sigmoid(R(picture) - R(sample)), where R is the configuration's reward, `lambda_harmonic` in the paper. The
loss is the picture's error, and the cross-entropy of that label under the policy's implicit reward. Noise and levels of
the two are independent.

The paper also stops at the iteration whose samples score highest: `evaluation: {every: ..., watch: {early_stop: ...}}`.
"""

import dataclasses

import torch
from pydantic import Field
from torch import Generator, Tensor
from torch.nn import functional as F

from flowalign.algorithms.matching import base
from flowalign.algorithms.matching.files import SampledFiles, latents, opened
from flowalign.algorithms.matching.pairs import PairMatching, PairSettings, gains, judged
from flowalign.config import Config, Data
from flowalign.data import Prompts, Targets
from flowalign.data.batches import Batch
from flowalign.errors import ConfigError
from flowalign.rollouts.pictures import DiffusionSampler
from flowalign.rollouts.processes import Processes
from flowalign.rollouts.scoring import score_metrics
from samplers import derive_seed


class RPOSettings(PairSettings):
    beta: float = Field(1.0, gt=0)
    """Factor of the squared error's mean over elements; published: 1."""


class RPO(PairMatching):
    """RPO: pictures of a subject against samples, labelled by a reward such as lambda_harmonic (arXiv 2407.12164)."""

    name = "rpo"
    Settings = RPOSettings
    settings: RPOSettings
    compares = frozenset({"reference"})

    @property
    def sampling_weights(self) -> str:
        return "reference"

    def read(self, data: Data) -> Prompts:
        return Targets.of(data)

    def check(self, config: Config) -> None:
        if self.settings.votes is not None:
            raise ConfigError("algorithm.votes: rpo learns from one picture a line, not from choices; dpo works")
        super().check(config)

    def lessons(self, sampled: SampledFiles, processes: Processes) -> base.MatchingExperience:
        sampler, batch, score = sampled.sampler, sampled.batch, sampled.scorer.score
        rollout = sampler.rollout(batch, torch.zeros(sampler.config.rollout.steps))
        scores = score(sampler.decode(rollout), batch)
        target_scores = score([opened(record["target"]) for record in batch.metadata], batch)
        sampled_latents = rollout.whole(rollout.trajectory.final)
        experience = self.learned(sampler, batch, [latents(sampler, batch, "target"), sampled_latents])
        experience.noise_seeds[len(batch) :] = [derive_seed(seed, 9) for seed in batch.noise_seeds]
        generators = [Generator().manual_seed(derive_seed(seed, 10)) for seed in batch.noise_seeds]
        draws = torch.stack([torch.rand((), generator=generator) for generator in generators])
        # 1 where the picture is preferred to the sample
        label = (draws < (target_scores.value - scores.value).sigmoid().cpu()).float().to(processes.device)
        experience.reward = label.repeat(2)
        experience.metrics |= score_metrics(scores, experience.group[: len(batch)], processes)
        return experience

    def drawn_levels(self, sampler: DiffusionSampler, batch: Batch) -> Tensor:
        """[B, 1] the second half's are its own."""
        first, second = batch[: len(batch) // 2], batch[len(batch) // 2 :]
        # numbers that no other group has
        second = dataclasses.replace(second, group=[2**31 + group for group in second.group])
        return torch.cat([super(RPO, self).drawn_levels(sampler, half) for half in (first, second)])

    def loss(self, points: base.Points) -> tuple[Tensor, dict[str, Tensor]]:
        chosen, sampled = gains(points)
        logit, label = self.settings.beta * (chosen - sampled), points.reward.chunk(2)[0]
        cross_entropy = F.binary_cross_entropy_with_logits(logit, label, reduction="none")
        loss = points.error.chunk(2)[0] + cross_entropy
        return loss, judged(logit, chosen, sampled) | {"rpo/label": label}
