"""Diffusion-DPO for flow models: learn from pairs that people chose between (arXiv 2311.12908).

Data: a prompt, the picture that was chosen and the one that was not, as the gallery's votes are exported. Both
pictures of a pair are noised by the same noise to the same level. Loss: -log sigmoid of how much more the policy's
error than the reference's fell on the chosen one than on the rejected one. For a flow model it is the error of the
velocity (Flow-DPO, arXiv 2501.13918, with constant beta, which its authors found better than beta (1 - t)^2).

A group is a pair; its members are noise levels, drawn from equally probable parts of `levels` and then shifted as the
pipeline shifts its schedule: uniform as in the method's own code, or the logistic function of a standard normal, as
SD3 was trained (2403.03206) and as Flow-GRPO's authors run DPO on it. Only previews and the evaluation sample and
score pictures.

Departure: a picture's latents are the mean of the VAE's posterior, not a draw from it.
"""

from dataclasses import dataclass
from typing import Literal

import PIL.Image
import torch
from pydantic import Field
from torch import Tensor

from flowalign.actors.diffusion import DiffusionActor
from flowalign.actors.draw import Draw
from flowalign.algorithms import base
from flowalign.config import Config, Data
from flowalign.core.losses import preference_loss
from flowalign.data import Preferences
from flowalign.data.batches import Batch, draw_batch
from flowalign.policies.diffusion import DiffusersPolicy, NoisedSamples
from samplers import derive_seed


class DPOSettings(base.AlgorithmSettings):
    beta: float = Field(2000.0, gt=0)
    """of the squared error's mean over elements; published: 2000 for SD1.5, 5000 for SDXL; 100 by Flow-GRPO for SD3"""
    levels: Literal["uniform", "logit_normal"] = "uniform"
    """where noise levels are drawn from, before the pipeline's shift"""
    heldout: str | None = None
    """a file of preferences whose accuracy is measured at each evaluation"""


@dataclass
class Experience(base.Experience):
    """B noised pairs."""

    noised: NoisedSamples
    """of 2 B pictures, the chosen ones first"""


class DPO(base.Algorithm):
    """Diffusion-DPO: preferences between pictures, without a reward or rollouts (arXiv 2311.12908, 2501.13918)."""

    Settings = DPOSettings
    settings: DPOSettings
    headline = "preference/accuracy"
    unit = "noise levels"
    uses_reference = True

    def read(self, data: Data) -> Preferences:
        return Preferences.of(data).of_pictures()

    def check(self, config: Config) -> None:
        if self.settings.heldout is not None:
            Preferences.read(self.settings.heldout).of_pictures()

    def items(self, config: Config) -> int:
        return config.training.group_size

    def collect(self, actor: DiffusionActor, draw: Draw) -> Experience:
        return self.pairs(actor, draw.batch)

    def pairs(self, actor: DiffusionActor, batch: Batch) -> Experience:
        """The pictures of these preferences, noised."""
        size = {k: v for k, v in actor.config.rollout.arguments().items() if k in ("height", "width", "batch_size")}
        files = [record[key] for key in ("chosen", "rejected") for record in batch.metadata]
        opened = {file: PIL.Image.open(file).convert("RGB") for file in dict.fromkeys(files)}
        seeds = [derive_seed(seed, 0) for seed in batch.noise_seeds]
        noised = actor.policy.noised(
            batch.prompts * 2, self._levels(batch).repeat(2), [opened[file] for file in files], seeds * 2, **size
        )
        items = torch.arange(len(batch), device=noised.x0.device)[:, None]
        return Experience(batch, {}, items, noised)

    def _levels(self, batch: Batch) -> Tensor:
        """[B] in (0, 1), each in its member's equally probable part of the distribution."""
        members = batch.group.count(batch.group[0])
        draws = [torch.rand((), generator=torch.Generator().manual_seed(seed)) for seed in batch.noise_seeds]
        shares = (torch.arange(len(batch)) % members + torch.stack(draws).clamp(1e-3, 1 - 1e-3)) / members
        return shares if self.settings.levels == "uniform" else torch.special.ndtri(shares).sigmoid()

    def verify(self, policy: DiffusersPolicy, experience: Experience) -> None:
        prompts = experience.batch.prompts[:4]
        policy.verify(policy.sample(prompts, list(range(len(prompts))), steps=2))

    def losses(
        self, policy: DiffusersPolicy, experience: Experience, items: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        noised, chosen = experience.noised, items[:, 0]
        rows = torch.cat([chosen, chosen + len(experience.batch)])
        error = self._error(policy, noised, rows)
        with torch.no_grad(), policy.reference():
            reference = self._error(policy, noised, rows)
        chosen_gain, rejected_gain = (reference - error).chunk(2)
        logit = self.settings.beta / 2 * (chosen_gain - rejected_gain)
        return preference_loss(logit), {
            "preference/accuracy": (logit > 0).float() + (logit == 0) / 2,
            "preference/logit": logit,
            "preference/chosen_gain": chosen_gain,
            "preference/rejected_gain": rejected_gain,
        }

    @staticmethod
    def _error(policy: DiffusersPolicy, noised: NoisedSamples, rows: Tensor) -> Tensor:
        """[N] squared errors of the velocity, the mean over elements."""
        return (policy.velocity_of(noised, rows) - noised.velocity[rows]).square().flatten(1).mean(1)

    @torch.no_grad()
    def measure(self, actor: DiffusionActor) -> dict[str, float]:
        """Share of the held-out pairs whose chosen picture has the higher implicit reward, a tie counting half."""
        if self.settings.heldout is None:
            return {}
        pairs, levels = Preferences.read(self.settings.heldout), actor.config.training.group_size
        batch = draw_batch(pairs, 0, len(pairs), levels, actor.config.evaluation.seed, False)
        whole_pairs = max(1, actor.config.rollout.batch_size // levels) * levels
        logits = []
        with actor.alone():
            for rows in torch.arange(len(batch)).split(whole_pairs):
                experience = self.pairs(actor, batch[rows.tolist()])
                logits.append(self.losses(actor.policy, experience, experience.items)[1]["preference/logit"])
        logit = torch.cat(logits).view(len(pairs), levels).mean(1)
        return {"preference/accuracy": ((logit > 0).float() + (logit == 0) / 2).mean().item()}
