"""Matching on pairs of pictures or videos: the chosen and the rejected one of a prompt, from files.

Both of a pair are noised by the same noise to the same level. A group is a pair; its members are noise levels, drawn
together (`training.group_size`). Only previews and the evaluation sample and score pictures.

Departure: a picture's latents are the mean of the VAE's posterior, not a draw from it.
"""

from typing import Literal

import torch
from torch import Tensor

from flowalign.actors.diffusion import DiffusionActor
from flowalign.actors.draw import Draw
from flowalign.algorithms.matching import base
from flowalign.algorithms.matching.files import latents_of
from flowalign.config import Config, Data, Named
from flowalign.data import Preferences
from flowalign.data.batches import Batch, draw_batch
from flowalign.policies.diffusion import DiffusersPolicy


class PairSettings(base.MatchingSettings):
    """Settings of all methods that learn from pairs."""

    levels: Named = Named(name="uniform")
    """`flowalign list levels`, with its settings but their number, which is `training.group_size`"""
    levels_of: Literal["group"] = "group"
    noise_of: Literal["sample"] = "sample"
    heldout: str | None = None
    """a file of preferences whose accuracy is measured at each evaluation"""


class PairMatching(base.Matching):
    """Base of the methods that learn from pairs."""

    Settings = PairSettings
    settings: PairSettings
    headline = "preference/accuracy"

    def read(self, data: Data) -> Preferences:
        return Preferences.of(data).of_pictures()

    def check(self, config: Config) -> None:
        super().check(config)
        if self.settings.heldout is not None:
            Preferences.read(self.settings.heldout).of_pictures()

    def items(self, config: Config) -> int:
        return config.training.group_size

    def collect(self, actor: DiffusionActor, draw: Draw) -> base.Experience:
        return self.pairs(actor, draw.batch)

    def pairs(self, actor: DiffusionActor, batch: Batch) -> base.Experience:
        """The pictures of these preferences, the chosen ones first, each at a level."""
        both = Batch.cat([batch, batch])
        files = [record[key] for key in ("chosen", "rejected") for record in batch.metadata]
        clean, guided, levels = self.clean(actor, both, latents_of(actor, files))
        nothing = torch.zeros(len(both), device=actor.device)
        group = torch.tensor(both.group, device=actor.device)
        items = self.item_numbers(batch, 1, actor.device)
        return base.Experience(batch, {}, items, clean, levels, both.noise_seeds, nothing, nothing, group, guided)

    def drawn_levels(self, actor: DiffusionActor, batch: Batch) -> Tensor:
        """[B, 1] of every pair's levels one for each of its members."""
        members = batch.group.count(batch.group[0]) // 2
        of_pairs = {
            group: self.draw_levels(
                actor.config.rollout.steps, self._generator(actor, batch, batch.group.index(group)), count=members
            )
            for group in dict.fromkeys(batch.group)
        }
        return torch.cat([of_pairs[group] for group in dict.fromkeys(batch.group)]).repeat(2)[:, None]

    def verify(self, policy: DiffusersPolicy, experience: base.Experience) -> None:
        prompts, metadata = experience.batch.prompts[:4], experience.batch.metadata[:4]
        policy.verify(policy.sample(prompts, list(range(len(prompts))), steps=2, metadata=metadata))

    def losses(
        self, policy: DiffusersPolicy, experience: base.Experience, items: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        rejected = items + torch.tensor([len(experience.batch), 0], device=items.device)
        points = self.points(policy, experience, torch.cat([items, rejected]))
        loss, values = self.loss(points)
        penalized, more = self.penalized(torch.zeros_like(points.error), points)
        halves = {name: value.view(2, -1).mean(0) for name, value in more.items()}
        return loss + penalized.view(2, -1).mean(0), values | halves

    def loss(self, points: base.Points) -> tuple[Tensor, dict[str, Tensor]]:
        """[N] losses of pairs, of which the chosen ones are the first half of the points, and named [N] values."""
        raise NotImplementedError

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
        return {"preference/accuracy": won(logit).mean().item()}


def won(logit: Tensor) -> Tensor:
    """Which pairs the policy orders as the data does, a tie counting half."""
    return (logit > 0).float() + (logit == 0) / 2
