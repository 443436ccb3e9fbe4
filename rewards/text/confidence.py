"""Rewards from how sure a model is of the answer that a text gives itself."""

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from rewards.base import Metadata, Reward, Scores, Spec, as_reward, bind, groups, score, spec_of
from rewards.text.model import AsksModel, CausalModel


class OwnAnswer(AsksModel):
    """Base: the mean probability of the tokens of a text's own answer.

    Args:
        model: folder or hub name of a frozen one; default the model that is trained.
        pattern: a regular expression whose first group is the answer, its last match counting; default the whole text.
    """

    def __init__(self, model: str | None, pattern: str | None) -> None:
        super().__init__(model)
        self.pattern = None if pattern is None else re.compile(pattern, re.DOTALL)

    def sure(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Tensor:
        """[B] mean probabilities of the answers' tokens after all that comes before; 0 without an answer."""
        model = self.model
        contexts, targets = [], []
        for text, prompt, record in zip(samples, prompts, metadata, strict=True):
            before, answer = self._cut(text)
            contexts.append(model.begin(prompt, record) + model.tokens(before))
            targets.append(model.tokens(answer))
        values, mask = model.log_probs(contexts, targets)
        return values.exp().where(mask, 0).sum(1) / mask.sum(1).clamp(min=1)

    def _cut(self, text: str) -> tuple[str, str]:
        """What comes before the answer, and the answer."""
        if self.pattern is None:
            return "", text
        matches = list(self.pattern.finditer(text))
        return (text[: matches[-1].start(1)], matches[-1][1]) if matches else (text, "")


class AnswerConfidence(OwnAnswer):
    """Mean probability of a text's own answer's tokens (CRew, arXiv 2510.13501); with an outcome, minus it where the
    answer is wrong.

    CRew-DPO makes pairs of a model's texts by confidence and correctness: `online_text_dpo` with an `outcome` here.

    Args:
        outcome: a verifier; from 1/2 on is right. Default: confidence alone, for which no answers are needed.
        model, pattern: as of `OwnAnswer`.
    """

    name = "answer_confidence"

    def __init__(self, outcome: Reward | None = None, model: str | None = None, pattern: str | None = None) -> None:
        super().__init__(model, pattern)
        self.outcome = None if outcome is None else as_reward(outcome)
        needs = frozenset({"text", "prompt"}) if self.outcome is None else spec_of(self.outcome).needs
        self.spec = Spec(needs, deterministic=self.frozen)

    def bind(self, model: CausalModel) -> None:
        """Take the model that is trained, and hand it on."""
        super().bind(model)
        bind(self.outcome, model)

    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        sure = self.sure(samples, prompts, metadata)
        if self.outcome is None:
            return Scores(sure)
        verdict = score(self.outcome, samples, prompts, metadata)
        value = torch.where(verdict.value >= 0.5, sure, -sure)
        return Scores(value, {self.outcome.name: verdict.value, "confidence": sure}, weight=verdict.weight)


class Consistency(OwnAnswer):
    """An outcome, plus a bonus for right texts whose reasoning makes their answer more probable than that of their
    group's
    other right ones does (GRPO-CARE, arXiv 2506.16141).

    A slow average of the weights is asked how probable the answer is after the reasoning. The paper leaves the KL out
    (`kl_weight: 0`). Departure: above the mean of the group's right texts, since its exact comparison was not at hand.

    Args:
        outcome: a verifier; from 1/2 on is right.
        bonus: what consistency adds.
        weights: name of the snapshot in `training.snapshots`, e.g. {slow: {decay: 0.99}}; null: the current weights.
        model, pattern: as of `OwnAnswer`.
    """

    asks_snapshots = True

    def __init__(
        self,
        outcome: Reward,
        bonus: float = 0.5,
        weights: str | None = None,
        model: str | None = None,
        pattern: str | None = None,
    ) -> None:
        super().__init__(model, pattern)
        self.outcome, self.bonus, self.weights = as_reward(outcome), bonus, weights
        self.name = f"consistency({self.outcome.name})"
        self.spec = Spec(spec_of(self.outcome).needs, "group", deterministic=self.frozen)

    def bind(self, model: CausalModel) -> None:
        """Take the model that is trained, and hand it on."""
        super().bind(model)
        bind(self.outcome, model)

    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        verdict = score(self.outcome, samples, prompts, metadata)
        with self.model.under(self.weights):
            sure = self.sure(samples, prompts, metadata)
        earned = torch.zeros(len(samples))
        for members in groups(prompts, metadata):
            right = [i for i in members if verdict.value[i] >= 0.5]
            if right:
                earned[right] = (sure[right] > sure[right].mean()).float()
        value = verdict.value + self.bonus * earned
        return Scores(value, {self.outcome.name: verdict.value, "consistent": earned}, weight=verdict.weight)
