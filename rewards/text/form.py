"""Rewards of how long a text is, what it repeats, and which words of reasoning it has."""

import hashlib
import math
import re
from collections import Counter
from collections.abc import Sequence

import torch

from rewards.base import Around, Metadata, Reward, Scores, Spec, as_reward, groups, score, spec_of
from rewards.text.shape import CountsTokens
from rewards.text.steps import LINES, step_ends

_TEXT = frozenset({"text", "prompt"})


class CosineLength(CountsTokens):
    """Cosine of the length between four rewards: of a short and a long right text, of a short and a long wrong one.

    By default right texts lose by their length and wrong ones gain, so that the model thinks longer where it fails
    (arXiv 2502.03373, eq. 1, and the authors' code, where repetition is punished in wrong texts alone). A text of
    `limit` tokens or more gets `exceeded`.

    Args:
        reward: the verifier; from 1/2 on is right.
        limit: length in tokens of the model in training, or characters where there is none.
        right, wrong: rewards of the shortest and of the longest text.
        repetition: what each n-gram that came before costs a wrong text.
        ngram: words of one.
    """

    def __init__(
        self,
        reward: Reward,
        limit: int,
        right: tuple[float, float] = (2.0, 1.0),
        wrong: tuple[float, float] = (-10.0, 0.0),
        exceeded: float = -10.0,
        repetition: float = 0.0,
        ngram: int = 40,
    ) -> None:
        if limit < 1 or ngram < 1:
            raise ValueError("cosine_length: limit and ngram at least 1")
        self.reward: Reward = as_reward(reward)
        self.limit, self.right, self.wrong, self.exceeded = limit, right, wrong, exceeded
        self.repetition, self.ngram = repetition, ngram
        self.name = f"cosine_length({self.reward.name})"
        spec = spec_of(self.reward)
        self.spec = Spec(spec.needs, spec.kind, deterministic=spec.deterministic)

    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        scores = score(self.reward, samples, prompts, metadata)
        value = torch.tensor(
            [self._of(text, verdict) for text, verdict in zip(samples, scores.value.tolist(), strict=True)]
        )
        return Scores(value, {self.reward.name: scores.value}, weight=scores.weight)

    def _of(self, text: str, verdict: float) -> float:
        length = self.length(text)
        if length >= self.limit:
            return self.exceeded
        short, long = self.right if verdict >= 0.5 else self.wrong
        cosine = long + (short - long) * (1 + math.cos(math.pi * length / self.limit)) / 2
        return cosine if verdict >= 0.5 else cosine - self.repetition * repeated(text, self.ngram)


def repeated(text: str, size: int) -> int:
    """How many of a text's n-grams of words came before in it."""
    words = text.lower().split()
    grams = [tuple(words[i : i + size]) for i in range(len(words) - size + 1)]
    return len(grams) - len(set(grams))


class Repetition:
    """Minus the share of a text's n-grams of words that came before in it, in [-1, 0] (as in arXiv 2502.03373).

    Args:
        ngram: words of one.
    """

    name = "repetition"
    spec = Spec(_TEXT)

    def __init__(self, ngram: int = 4) -> None:
        if ngram < 1:
            raise ValueError("repetition: ngram at least 1")
        self.ngram = ngram

    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        most = [max(1, len(text.split()) - self.ngram + 1) for text in samples]
        return Scores(torch.tensor([-repeated(text, self.ngram) / n for text, n in zip(samples, most, strict=True)]))


class StepCount:
    """Steps of a text over `most`, at most 1: a bonus of exploration beside an outcome (after RLSP's abstract, arXiv
    2502.06773).

    Args:
        most: number of steps that pays in full.
        separator: a regular expression of what ends a step.
    """

    name = "step_count"
    spec = Spec(_TEXT)

    def __init__(self, most: int = 10, separator: str = LINES) -> None:
        if most < 1:
            raise ValueError("step_count: most at least 1")
        self.most, self.separator = most, separator

    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        counts = [len(step_ends(text, self.separator)) if text.strip() else 0 for text in samples]
        return Scores(torch.tensor([min(count, self.most) / self.most for count in counts]))


REASONING = (
    "first",
    "next",
    "therefore",
    "let me",
    "i need to",
    "we know that",
    "on the other hand",
    "wait",
    "let me check",
    "in other words",
    "finally",
)


class Phrases:
    """Different phrases of reasoning that a text has, over `most`, at most 1 (RPR, arXiv 2505.22653, after the
    abstract).

    It does not look at the answer; the paper adds it to a noisy reward, whose mistakes it makes up for.

    Args:
        phrases: whole words, whatever their case.
        most: number of different ones that pays in full.
    """

    name = "phrases"
    spec = Spec(_TEXT)

    def __init__(self, phrases: Sequence[str] = REASONING, most: int = 4) -> None:
        if not phrases or most < 1:
            raise ValueError("phrases: at least one phrase, and most at least 1")
        self.most = most
        self.patterns = [re.compile(rf"\b{re.escape(phrase)}\b", re.IGNORECASE) for phrase in phrases]

    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        counts = [sum(bool(pattern.search(text)) for pattern in self.patterns) for text in samples]
        return Scores(torch.tensor([min(count, self.most) / self.most for count in counts]))


class Flipped(Around):
    """A reward in [0, 1] with a share of its values turned into 1 - value: does training stand noise (arXiv
    2505.22653)?

    Which texts are hit depends on the text, its prompt and the seed alone.

    Args:
        reward: the reward.
        share: share of the values that are turned.
    """

    def __init__(self, reward: Reward, share: float = 0.4, seed: int = 0) -> None:
        if not 0 <= share <= 1:
            raise ValueError("flipped: share in [0, 1]")
        self.reward: Reward = as_reward(reward)
        self.share, self.seed = share, seed
        self.name = f"flipped({self.reward.name})"
        self.spec = spec_of(self.reward)

    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        scores = score(self.reward, samples, prompts, metadata)
        hit = torch.tensor([self._hits(text, prompt) for text, prompt in zip(samples, prompts, strict=True)])
        value = torch.where(hit, 1 - scores.value, scores.value)
        return Scores(value, {self.reward.name: scores.value, "flipped": hit.float()}, weight=scores.weight)

    def _hits(self, text: str, prompt: str) -> bool:
        digest = hashlib.sha256(f"{self.seed}\0{prompt}\0{text}".encode()).digest()
        return int.from_bytes(digest[:8], "big") < self.share * 2**64


class Frequency:
    """Share of the group that gives a text's answer, less `certainty` times the entropy of the group's answers (TTRV,
    arXiv
    2510.06783): no right answer needed.

    The entropy is one number a group, so that advantages within groups do not see it; those over the whole iteration
    (`reinforce_pp`) do.

    Args:
        pattern: a regular expression whose first group is the answer, its last match counting; default the whole
            text. A text without an answer gets 0 and has no vote.
        certainty: weight of the entropy, in nats.
    """

    name = "frequency"
    spec = Spec(_TEXT, "group")

    def __init__(self, pattern: str | None = None, certainty: float = 0.0) -> None:
        self.pattern = re.compile(pattern, re.DOTALL) if pattern else None
        self.certainty = certainty

    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        value, entropies = torch.zeros(len(samples)), torch.zeros(len(samples))
        for members in groups(prompts, metadata):
            given = {i: self._answer(samples[i]) for i in members}
            votes = Counter(answer for answer in given.values() if answer)
            shares = {answer: count / votes.total() for answer, count in votes.items()}
            entropy = -sum(share * math.log(share) for share in shares.values())
            for i in members:
                entropies[i] = entropy
                value[i] = shares[given[i]] - self.certainty * entropy if given[i] else 0.0
        return Scores(value, {"answer_entropy": entropies})

    def _answer(self, text: str) -> str:
        if self.pattern is None:
            return text.strip()
        answers = self.pattern.findall(text)
        return str(answers[-1]).strip() if answers else ""
