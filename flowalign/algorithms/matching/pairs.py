"""Matching on pairs of pictures or videos: the chosen and the rejected one of a prompt.

Both of a pair are noised by the same noise to the same level.
"""

from collections.abc import Mapping
from dataclasses import replace
from os.path import isfile
from pathlib import Path

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from flowalign.algorithms.matching import base
from flowalign.algorithms.matching.files import FileMatching, FileSettings, SampledFiles, latents
from flowalign.config import Config, Data
from flowalign.data import Preferences, Prompts
from flowalign.data.batches import Batch, draw_batch
from flowalign.data.votes import FEW, Votes
from flowalign.policies.diffusion import DiffusersPolicy, Rollout
from flowalign.rollouts.pictures import DiffusionSampler
from flowalign.rollouts.processes import Processes


class PairSettings(FileSettings):
    """Settings of all methods that learn from pairs."""

    heldout: str | None = None
    """File of preferences whose accuracy is measured at each evaluation."""
    votes: str | None = None
    """A gallery's file of votes, such as runs/one/gallery/votes.sqlite, read before every iteration; without a file, or
    with fewer choices than `min_pairs`, pairs come from the preferences alone."""
    min_pairs: int = Field(FEW, ge=1)
    """Fewest pairs of the data to train on, and choices in `votes` to draw from; fewer make a model worse."""
    votes_share: float = Field(0.5, gt=0, le=1)
    """Share of an iteration's pairs that are drawn from the votes."""


class PairMatching(FileMatching):
    """Base of the methods that learn from pairs."""

    Settings = PairSettings
    settings: PairSettings
    data = Preferences
    headline = "preference/accuracy"
    votes: Mapping[str, float] = {}
    """Metrics of the people's choices in the last batch."""

    def read(self, data: Data) -> Prompts:
        return Preferences.of(data).of_pictures()

    def check(self, config: Config) -> None:
        super().check(config)
        pairs = self.read(config.data)
        if isinstance(pairs, Preferences):
            pairs.check_enough(self.settings.min_pairs, "algorithm.min_pairs")
        if self.settings.heldout is not None:
            Preferences.read(self.settings.heldout).of_pictures()

    def rollout(self, sampler: DiffusionSampler, batch: Batch) -> tuple[Rollout | None, Batch]:
        if self.settings.votes is not None:
            batch, self.votes = self.with_votes(batch, sampler.config.training.seed)
        return super().rollout(sampler, batch)

    def with_votes(self, batch: Batch, seed: int) -> tuple[Batch, dict[str, float]]:
        """The batch with choices of people in the place of some of its pairs, and how many there are of both."""
        assert self.settings.votes is not None
        file = Path(self.settings.votes)
        choices = Votes(file).preferences() if file.is_file() else []
        choices = [
            line for line in choices if "medium" not in line and all(isfile(line[k]) for k in Preferences.samples)
        ]
        chosen = {}
        for group in dict.fromkeys(batch.group) if len(choices) >= self.settings.min_pairs else ():
            draws = np.random.default_rng([seed, batch.iteration, group])
            if draws.random() < self.settings.votes_share:
                chosen[group] = choices[draws.integers(len(choices))]
        lines = [chosen.get(group) for group in batch.group]
        voted = replace(
            batch,
            prompts=[line["prompt"] if line else original for line, original in zip(lines, batch.prompts, strict=True)],
            metadata=[line or original for line, original in zip(lines, batch.metadata, strict=True)],
        )
        share = len(chosen) / len(set(batch.group))
        return voted, {"preference/votes": float(len(choices)), "preference/votes_share": share}

    def lessons(self, sampled: SampledFiles, processes: Processes) -> base.MatchingExperience:
        experience = self.pairs(sampled.sampler, sampled.batch)
        experience.metrics |= self.votes
        return experience

    def pairs(self, sampler: DiffusionSampler, batch: Batch) -> base.MatchingExperience:
        """The pictures of these preferences, the chosen ones first, each at a level."""
        return self.learned(sampler, batch, [latents(sampler, batch, key) for key in Preferences.samples])

    def losses(
        self, policy: DiffusersPolicy, experience: base.MatchingExperience, items: Tensor
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

    @property
    def measures(self) -> bool:
        return self.settings.heldout is not None

    @torch.no_grad()
    def measure(self, sampler: DiffusionSampler) -> dict[str, float]:
        """Share of the held-out pairs whose chosen picture has the higher implicit reward, a tie counting half."""
        assert self.settings.heldout is not None
        pairs, members = Preferences.read(self.settings.heldout), sampler.config.training.group_size
        batch = draw_batch(pairs, 0, len(pairs), members, sampler.config.evaluation.seed, False)
        whole_pairs = max(1, sampler.config.rollout.batch_size // members) * members
        logits = []
        with sampler.policy.uncounted():
            for rows in torch.arange(len(batch)).split(whole_pairs):
                experience = self.pairs(sampler, batch[rows.tolist()])
                logits.append(self.losses(sampler.policy, experience, experience.items)[1]["preference/logit"])
        logit = torch.cat(logits).view(len(pairs), members).mean(1)
        return {"preference/accuracy": won(logit).mean().item()}


def won(logit: Tensor) -> Tensor:
    """Pairs that the policy orders as the data does, a tie counting half."""
    return (logit > 0).float() + (logit == 0) / 2


def gains(points: base.Points) -> tuple[Tensor, Tensor]:
    """[N] how much lower the policy's error than the reference's is, on the chosen ones and on the rejected ones."""
    chosen, rejected = (points.error_reference - points.error).chunk(2)
    return chosen, rejected


def judged(logit: Tensor, chosen_gain: Tensor, rejected_gain: Tensor) -> dict[str, Tensor]:
    """Metrics of pairs."""
    return {
        "preference/accuracy": won(logit),
        "preference/logit": logit,
        "preference/chosen_gain": chosen_gain,
        "preference/rejected_gain": rejected_gain,
    }
