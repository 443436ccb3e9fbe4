"""Agreement in the place of right answers, on prompts that behave as those with a right answer do."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rewards.base import Metadata, Reward, Scores, Spec, as_reward, bind, groups, score, spec_of
from rewards.text.model import CausalModel
from rewards.text.shape import Majority


class Vetted:
    """A verifier where the data has the right answer, elsewhere the group's majority, of vetted prompts alone (after
    TraPO's abstract, arXiv 2512.13106).

    A prompt's trajectory are its pass rates at each time that it was drawn, by the verifier or by the majority. One
    without an answer is vetted by the cosine of its trajectory with the mean one of prompts with an answer: the most
    similar `share` of those that were drawn often enough, and all that reach `similarity`. Others teach nothing.

    Args:
        outcome: the verifier of prompts that have `key`; from 1/2 on is right.
        key: key of the metadata with the right answer.
        pattern: a regular expression of a text's answer, as of `majority`.
        share: share of the unlabelled prompts that is vetted, the most similar ones.
        similarity: cosine from which on a prompt is vetted anyway.
        visits: draws of a prompt before it can be.
    """

    def __init__(
        self,
        outcome: Reward,
        key: str = "answer",
        pattern: str | None = None,
        share: float = 0.1,
        similarity: float = 0.99,
        visits: int = 2,
    ) -> None:
        if not 0 <= share <= 1 or visits < 1:
            raise ValueError("vetted: share from 0 to 1, visits at least 1")
        self.outcome: Reward = as_reward(outcome)
        self.majority = Majority(pattern)
        self.key, self.share, self.similarity, self.visits = key, share, similarity, visits
        self.name = f"vetted({self.outcome.name})"
        self.spec = Spec(spec_of(self.outcome).needs | {"text", "prompt", "metadata"}, "group", deterministic=False)
        self.labelled: dict[str, list[float]] = {}
        """Pass rates of each prompt with an answer."""
        self.unlabelled: dict[str, list[float]] = {}
        """Shares of the majority of each prompt without."""

    def bind(self, model: CausalModel) -> None:
        """Hand the language model in training to the verifier."""
        bind(self.outcome, model)

    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        known, value = self._judged(samples, prompts, metadata)
        vetted = self.vetted()
        missing = ~known & ~torch.tensor([prompt in vetted for prompt in prompts])
        trusted = (~missing).float().where(~known, torch.nan)
        return Scores(value.where(~missing, 0), {"vetted": trusted}, missing=missing)

    def learn(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> dict[str, float]:
        known, value = self._judged(samples, prompts, metadata)
        for members in groups(prompts, metadata):
            table = self.labelled if known[members[0]] else self.unlabelled
            table.setdefault(prompts[members[0]], []).append(value[members].mean().item())
        vetted = self.vetted()
        return {"vetted": len(vetted) / max(1, len(self.unlabelled))}

    def vetted(self) -> set[str]:
        """The prompts without an answer whose majority is trusted."""
        seen = {prompt: self._cosine(row) for prompt, row in self.unlabelled.items() if len(row) >= self.visits}
        # without any labelled prompt there is nothing to be similar to
        near = {prompt: cosine for prompt, cosine in seen.items() if cosine is not None}
        best = sorted(near, key=near.__getitem__, reverse=True)[: int(self.share * len(near))]
        return {*best, *(prompt for prompt, cosine in near.items() if cosine >= self.similarity)}

    def _cosine(self, trajectory: list[float]) -> float | None:
        """With the labelled prompts' mean pass rates at the same numbers of draws; None where there are none."""
        rates = []
        for draw in range(len(trajectory)):
            column = [row[draw] for row in self.labelled.values() if len(row) > draw]
            if not column:
                break
            rates.append(sum(column) / len(column))
        if not rates:
            return None
        return F.cosine_similarity(torch.tensor(trajectory[: len(rates)]), torch.tensor(rates), dim=0).item()

    def _judged(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> tuple[Tensor, Tensor]:
        """[B] bool whether there is a right answer, and [B] values by verifier or majority."""
        known = torch.tensor([self.key in record for record in metadata])
        value = torch.zeros(len(samples))
        for reward, rows in (
            (self.outcome, known.nonzero()[:, 0].tolist()),
            (self.majority, (~known).nonzero()[:, 0].tolist()),
        ):
            if rows:
                chosen = ([column[i] for i in rows] for column in (samples, prompts, metadata))
                value[rows] = (score(reward, *chosen).value >= 0.5).float()
        return known, value

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return {}, {"labelled": self.labelled, "unlabelled": self.unlabelled}

    def load_state(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        self.labelled, self.unlabelled = (
            {prompt: list(row) for prompt, row in state[name].items()} for name in ("labelled", "unlabelled")
        )
