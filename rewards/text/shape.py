"""Rewards of how a text is written: its form, its length, its agreement with the group's others."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from rewards.base import Around, Metadata, Reward, RewardError, Scores, Spec, as_reward, groups, score, spec_of
from rewards.hub import hub
from rewards.text.model import CausalModel


class TextFormat:
    """1 where a regular expression matches the whole text, by default `<think>..</think> <answer>..</answer>`.

    Args:
        pattern: the expression; a dot matches line ends too.
    """

    name = "text_format"
    spec = Spec(frozenset({"text", "prompt"}))

    def __init__(self, pattern: str = r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*") -> None:
        self.pattern = re.compile(pattern, re.DOTALL)

    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        return Scores(torch.tensor([float(bool(self.pattern.fullmatch(text))) for text in samples]))


class SoftLength:
    """0 up to `free` tokens, then falling to -1 at `limit` (DAPO's soft overlong punishment, arXiv 2503.14476).

    The end token is not among them. The paper has 16384 and 20480.

    Args:
        tokenizer: folder or hub name; default the trained model's.
    """

    name = "soft_length"
    spec = Spec(frozenset({"text", "prompt"}))

    def __init__(self, free: int, limit: int, tokenizer: str | None = None) -> None:
        if not 0 <= free < limit:
            raise ValueError(f"soft_length: free={free} must be below limit={limit}")
        self.free, self.limit = free, limit
        self.own = None if tokenizer is None else _tokenizer(tokenizer)
        self.tokenizer = self.own

    def bind(self, model: CausalModel) -> None:
        """Take the tokenizer of the model that is trained, where none was named."""
        self.tokenizer = self.own or model.tokenizer

    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        if self.tokenizer is None:
            raise RewardError(
                "reward 'soft_length' counts the tokens of the language model that is trained, and there is none here; "
                "`tokenizer: PATH` names one"
            )
        ids = self.tokenizer(list(samples), add_special_tokens=False).input_ids
        over = torch.tensor([float(len(row) - self.free) for row in ids])
        return Scores(-(over / (self.limit - self.free)).clamp(0, 1))


def _tokenizer(path: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(**hub(path))
    except (OSError, ValueError) as error:
        raise ValueError(f"no tokenizer at '{path}': {' '.join(str(error).split())[:300]}") from error


class CountsTokens(Around):
    """Base of a reward around another that counts tokens of the model in training, or characters where there is
    none."""

    tokenizer: Any = None

    def bind(self, model: CausalModel) -> None:
        """Take the tokenizer of the model that is trained."""
        super().bind(model)
        self.tokenizer = model.tokenizer

    def length(self, text: str) -> int:
        """Number of a text's tokens."""
        return len(text if self.tokenizer is None else self.tokenizer(text, add_special_tokens=False).input_ids)


class LengthSwitch(CountsTokens):
    """GRPO-lambda (arXiv 2505.18086): right texts of a group lose by their length only where the group is mostly right.

    Where the share of right texts is below the threshold the reward stays 0 or 1, so that accuracy does not collapse
    while texts get shorter. Above it a right text gets 1 - weight * its length's place between the group's shortest
    and longest right text.

    Lengths are in tokens of the model that is trained; of characters where there is none. Departure: the paper chooses
    the best groups of a batch; here a fixed share of right texts is the switch.

    Args:
        reward: the verifier; above 1/2 is right.
        threshold: share of right texts from which on length counts.
        weight: penalty of the longest right text.
    """

    def __init__(self, reward: Reward, threshold: float = 0.75, weight: float = 0.5) -> None:
        self.reward: Reward = as_reward(reward)
        self.threshold, self.weight = threshold, weight
        self.name = f"length_switch({self.reward.name})"
        self.spec = Spec(spec_of(self.reward).needs, "group")

    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        scores = score(self.reward, samples, prompts, metadata)
        verdict = scores.value
        value = verdict.clone()
        for members in groups(prompts, metadata):
            right = [i for i in members if verdict[i] > 0.5]
            lengths = [self.length(samples[i]) for i in right]
            if right and len(right) / len(members) >= self.threshold and max(lengths) > min(lengths):
                for i, length in zip(right, lengths, strict=True):
                    value[i] -= self.weight * (length - min(lengths)) / (max(lengths) - min(lengths))
        return Scores(value, {self.reward.name: verdict}, weight=scores.weight)


class Majority:
    """1 where a text's answer is the one that most of its group give (TTRL, arXiv 2504.16084): no right answer needed.

    Args:
        pattern: a regular expression whose first group is the answer, its last match counting; default the whole
            text. A text without an answer gets 0 and has no vote. Ties go to the answer given first.
    """

    name = "majority"
    spec = Spec(frozenset({"text", "prompt"}), "group")

    def __init__(self, pattern: str | None = None) -> None:
        self.pattern = re.compile(pattern, re.DOTALL) if pattern else None

    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        answers = [self._answer(text) for text in samples]
        value = torch.zeros(len(samples))
        for members in groups(prompts, metadata):
            votes = Counter(answers[i] for i in members if answers[i])
            if votes:
                ((most, _),) = votes.most_common(1)
                for i in members:
                    value[i] = float(answers[i] == most)
        return Scores(value)

    def _answer(self, text: str) -> str:
        if self.pattern is None:
            return text.strip()
        answers = self.pattern.findall(text)
        return str(answers[-1]).strip() if answers else ""
