"""Rewards of a text's steps: tokens, lines, turns. `algorithm.advantage: {name: process}` learns from each."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rewards.base import Metadata, Reward, RewardError, Scores, Spec, Steps, groups, score
from rewards.compose import Composition
from rewards.text.model import AsksModel, CausalModel, Context, refuse_pictures
from rewards.text.process import clip_bound, delta_bound, gated, implicit_reward, information_gain, trust_weight
from rewards.text.turns import Transcript
from rewards.text.verifiers import answers

LINES = r"\n+"


def step_ends(text: str, separator: str = LINES) -> list[int]:
    """Number of characters up to the end of each step; a separator belongs to the step before it.

    A text without any has one step, and so has an empty one.
    """
    ends = [match.end() for match in re.finditer(separator, text) if match.end() < len(text)]
    return [*ends, len(text)]


def as_steps(ends: Sequence[Sequence[int]], values: Tensor) -> list[Steps]:
    """Steps of each text, from where they end and their rewards [B, K], the first ones of which count."""
    return [list(zip(cut, row.tolist()[: len(cut)], strict=True)) for cut, row in zip(ends, values, strict=True)]


def step_values(steps: Sequence[Steps]) -> tuple[Tensor, Tensor]:
    """[B, K] rewards of the steps, padded on the right, and their mask."""
    width = max(1, *map(len, steps))
    values = torch.tensor([[value for _, value in row] + [0.0] * (width - len(row)) for row in steps])
    return values, torch.arange(width) < torch.tensor([len(row) for row in steps])[:, None]


class ImplicitPRM:
    """beta * (log pi - log pi_ref) of each token, pi a model trained on outcomes (arXiv 2412.01981; PRIME, 2502.01456).

    PRIME goes on training pi on the outcomes of the texts it sees; here it stays as it is.

    Args:
        model: folder or hub name of pi.
        reference: pi_ref, the model it was trained from, with the same tokens.
    """

    name = "implicit_prm"
    spec = Spec(frozenset({"text", "prompt"}))

    def __init__(self, model: str, reference: str, beta: float = 0.05) -> None:
        self.beta = beta
        self.model, self.reference = CausalModel.load(model), CausalModel.load(reference)

    def bind(self, model: CausalModel) -> None:
        """Refuse a model in training that sees pictures."""
        refuse_pictures(self.name, model)

    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        log_probs = []
        for model in (self.model, self.reference):
            begun = [model.begin(prompt, record) for prompt, record in zip(prompts, metadata, strict=True)]
            texts = [model.tokens(text) for text in samples]
            values, mask = model.log_probs(begun, texts)
            log_probs.append(values)
        if log_probs[0].shape != log_probs[1].shape:
            raise RewardError(f"reward '{self.name}': model and reference have different tokens")
        reward = implicit_reward(log_probs[0], log_probs[1], self.beta).where(mask, 0)
        return Scores(reward.sum(1), steps=as_steps([self.model.ends(text) for text in samples], reward))


class InformationGain(AsksModel):
    """Gain of the right answer's probability by each turn; the last turn gets the outcome (IGPO, 2510.14967).

    With an environment, the answer's probability is asked for where a turn begins, after what the environment answered
    to the one before, as in the authors' code. Without one a text's steps count as turns.

    Args:
        reward: the outcome: a verifier, or what the `environment` paid.
        model: default the one that is trained, as published.
        key: key of the right answer in the metadata.
        separator: a regular expression of what ends a turn, without an environment.
        lead: comes before the answer.
    """

    def __init__(
        self,
        reward: Reward,
        model: str | None = None,
        key: str = "answer",
        separator: str = LINES,
        lead: str = "\nAnswer: ",
    ) -> None:
        super().__init__(model)
        self.reward, self.key, self.separator, self.lead = reward, key, separator, lead
        self.name = f"information_gain({reward.name})"
        self.spec = Spec(frozenset({"text", "prompt", "metadata"}), deterministic=self.frozen)

    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        outcome = score(self.reward, samples, prompts, metadata)
        right = [self.model.tokens(answer) for answer in answers(self.name, prompts, metadata, self.key)]
        turns = [self._turns(*row) for row in zip(samples, prompts, metadata, strict=True)]
        contexts = [context for _, befores in turns for context in befores]
        targets = [tokens for (_, befores), tokens in zip(turns, right, strict=True) for _ in befores]
        values, mask = self.model.log_probs(contexts, targets)
        likelihood = (values.where(mask, 0).sum(1) / mask.sum(1)).exp()
        steps, likelihoods = [], likelihood.split([len(befores) for _, befores in turns])
        for (ends, _), likely, verdict in zip(turns, likelihoods, outcome.value.tolist(), strict=True):
            gains = information_gain(likely[None])[0]
            steps.append(list(zip(ends, [*gains.tolist(), verdict], strict=True)))
        value = step_values(steps)[0].sum(1)
        return Scores(value, outcome.parts | {self.reward.name: outcome.value}, steps, outcome.weight)

    def _turns(self, text: str, prompt: str, record: Mapping[str, Any]) -> tuple[list[int], list[Context]]:
        """Each turn's end, and what comes before the answer at its begin; a frozen model has its own token ids."""
        model = self.model
        begun = model.begin(prompt, record)
        if not isinstance(text, Transcript):
            ends = step_ends(text, self.separator)
            return ends, [begun + model.tokens(text[:end] + self.lead) for end in [0, *ends[:-1]]]
        ends = [turn.end for turn in text.turns]
        if self.frozen:
            return ends, [begun + model.tokens(text[: turn.begin] + self.lead) for turn in text.turns]
        return ends, [text.tokens[: turn.context] + model.tokens(self.lead) for turn in text.turns]


class PathFaithfulness(AsksModel):
    """Probability of the rest of a right reasoning after each step of a text (after P2S, arXiv 2601.20649).

    Step k gets 1 / K of the geometric mean probability of what the right reasoning says from its step k + 1 on, K the
    text's steps. P2S makes the right reasoning itself, from the answer; here the data must bring it. Its exact formula
    was not at hand.

    Args:
        model: default the one that is trained, as published.
        key: key of the right reasoning in the metadata.
        separator: a regular expression of what ends a step.
    """

    name = "path_faithfulness"

    def __init__(self, model: str | None = None, key: str = "reasoning", separator: str = LINES) -> None:
        super().__init__(model)
        self.key, self.separator = key, separator
        self.spec = Spec(frozenset({"text", "prompt", "metadata"}), deterministic=self.frozen)

    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        model = self.model
        ends = [step_ends(text, self.separator) for text in samples]
        contexts, rest = [], []
        begun = [model.begin(prompt, record) for prompt, record in zip(prompts, metadata, strict=True)]
        for text, row_ends, before, right in zip(
            samples, ends, begun, answers(self.name, prompts, metadata, self.key), strict=True
        ):
            # beyond its last step the right reasoning has nothing left but that step
            starts = [0, *step_ends(right, self.separator)[:-1]]
            for k, end in enumerate(row_ends):
                contexts.append(before + model.tokens(text[:end]))
                rest.append(model.tokens(right[starts[min(k + 1, len(starts) - 1)] :]))
        values, mask = model.log_probs(contexts, rest)
        each = (values.where(mask, 0).sum(1) / mask.sum(1).clamp(min=1)).exp().tolist()
        steps = []
        for row_ends in ends:
            steps.append([(end, each.pop(0) / len(row_ends)) for end in row_ends])
        return Scores(step_values(steps)[0].sum(1), steps=steps)


class OfSteps(Composition):
    """Base: `change` makes other step rewards of a reward's steps; a reward without any has one, the whole text."""

    def change(self, values: Tensor, mask: Tensor, scores: Sequence[Scores]) -> Tensor:
        """[B, K] from the step rewards [B, K] of the first reward and the scores of all."""
        raise NotImplementedError

    def combine(self, values: Tensor, prompts: Sequence[str], metadata: Metadata) -> Tensor:
        return values[0]

    def __call__(self, samples: Sequence[Any], prompts: Sequence[str], metadata: Metadata) -> Scores:
        scores = [score(reward, samples, prompts, metadata) for reward in self.rewards]
        steps = scores[0].steps or [[(len(t), v)] for t, v in zip(samples, scores[0].value.tolist(), strict=True)]
        values, mask = step_values(steps)
        bounded = self.change(values, mask, scores).where(mask, 0)
        changed = as_steps([[end for end, _ in row] for row in steps], bounded)
        return replace(self._collect(scores, prompts, metadata), value=bounded.sum(1), steps=changed)


class ClipBound(OfSteps):
    """min(r - threshold, 0) of every step, so that more steps never pay (Clip, arXiv 2410.15115).

    Args:
        reward: reward of steps.
    """

    bounds_sum = True
    """Whether it bounds the sum of steps, which advantages that centre each step would undo."""

    def __init__(self, reward: Reward, threshold: float = 0.0) -> None:
        super().__init__([reward], "clip")
        self.threshold = threshold

    def change(self, values: Tensor, mask: Tensor, scores: Sequence[Scores]) -> Tensor:
        return clip_bound(values, self.threshold)


class DeltaBound(OfSteps):
    """r_k - r_{k+1} of every step, so that a text earns its first step's reward whatever follows (Delta, 2410.15115).

    Args:
        reward: reward of steps.
    """

    bounds_sum = True
    """Whether it bounds the sum of steps, which advantages that centre each step would undo."""

    def __init__(self, reward: Reward) -> None:
        super().__init__([reward], "delta")

    def change(self, values: Tensor, mask: Tensor, scores: Sequence[Scores]) -> Tensor:
        return delta_bound(values, mask)


class Gated(OfSteps):
    """Step rewards count only in texts whose outcome reaches the gate; the outcome is not added (G-RA, 2508.10548).

    Args:
        reward: reward of steps.
        outcome: reward that decides.
    """

    def __init__(self, reward: Reward, outcome: Reward, gate: float = 0.5) -> None:
        super().__init__([reward, outcome], "gated")
        self.gate = gate

    def change(self, values: Tensor, mask: Tensor, scores: Sequence[Scores]) -> Tensor:
        return gated(values, scores[1].value, self.gate)


class TrustWeighted(Composition):
    """An outcome, plus a reward of the thought as far as it tells right from wrong (Trust-GRPO, arXiv 2505.17018).

    Args:
        outcome: a verifier; from 1/2 on is right.
        thought: a reward of the thought in [0, 1], e.g. a `text_judge`.
        weight: weight of the thought, before trust; 0.3 in the authors' code.
        decay: share of training after which the thought counts 1 / e.
    """

    kind = "group"

    def __init__(self, outcome: Reward, thought: Reward, weight: float = 0.3, decay: float = 0.5) -> None:
        super().__init__([outcome, thought], "trust")
        self.weight, self.decay, self.done = weight, decay, 0.0

    @property
    def spec(self) -> Spec:
        inner = super().spec
        return Spec(inner.needs, inner.kind, deterministic=inner.deterministic, scheduled=True)

    def advance(self, progress: float) -> None:
        super().advance(progress)
        self.done = progress

    def combine(self, values: Tensor, prompts: Sequence[str], metadata: Metadata) -> Tensor:
        outcome, thought = values
        group = torch.zeros(len(prompts), dtype=torch.long)
        for number, members in enumerate(groups(prompts, metadata)):
            group[members] = number
        trust = trust_weight(thought, outcome >= 0.5, group, self.done, self.decay)
        return outcome + self.weight * trust * thought
