"""Rewards of places: a score by the rank that it gives its document, and comparisons by one reward after the other."""

import re
from collections.abc import Sequence
from typing import Any

import torch

from rewards.base import AroundSeveral, Metadata, Reward, Scores, Spec, as_reward, score, spec_of
from rewards.text.checks import NUMBER, needed


class Ranked:
    """Reward of a document's score by the rank that it takes among the others of its list (after ERank's abstract,
    arXiv
    2509.00520).

    A text is a score of one document for one query; documents of a query share `list` in their metadata. Each other
    document is represented by the mean of its members' scores. A relevant document earns 1 / rank, one that is not
    relevant minus that; a text without a score -1. All documents of a list must be in one iteration: selection
    `together` by the same key brings them.

    Args:
        list: key of the metadata that names the list.
        relevant: key of the metadata that is true where the document is relevant.
        pattern: a regular expression whose first group is the score, its last match counting.
    """

    name = "ranked"
    spec = Spec(frozenset({"text", "prompt", "metadata"}), "set")

    def __init__(self, list: str = "list", relevant: str = "relevant", pattern: str = f"({NUMBER})") -> None:
        self.list, self.relevant, self.pattern = list, relevant, re.compile(pattern, re.DOTALL)

    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        lists = needed(self.name, self.list, prompts, metadata)
        relevant = needed(self.name, self.relevant, prompts, metadata)
        found = [self.pattern.findall(text) for text in samples]
        scores = [float(numbers[-1]) if numbers else None for numbers in found]
        of_document: dict[tuple[Any, str], list[float]] = {}
        for name, prompt, number in zip(lists, prompts, scores, strict=True):
            of_document.setdefault((name, prompt), []).extend([] if number is None else [number])
        means = {document: sum(row) / len(row) for document, row in of_document.items() if row}
        value = torch.full((len(samples),), -1.0)
        for i, number in enumerate(scores):
            if number is not None:
                others = [mean for (name, prompt), mean in means.items() if name == lists[i] and prompt != prompts[i]]
                share = 1 / (1 + sum(other > number for other in others))
                value[i] = share if relevant[i] else -share
        return Scores(value, {"unscored": torch.tensor([float(number is None) for number in scores])})


class Lexicographic(AroundSeveral):
    """A comparison by the most important reward; where two samples are about equal by it, by the next (HERON, after the
    abstract). `win_rate` or `compared` makes a reward of it.

    Args:
        rewards: from the most important one to the least.
        margins: difference of each reward up to which two samples are equal by it; default 0.
    """

    def __init__(self, rewards: Sequence[Reward], margins: Sequence[float] | None = None) -> None:
        self.rewards = [as_reward(reward) for reward in rewards]
        self.margins = [0.0] * len(self.rewards) if margins is None else list(margins)
        if not self.rewards or len(self.margins) != len(self.rewards) or min(self.margins) < 0:
            raise ValueError("lexicographic: at least one reward, and a margin of at least 0 for each")
        if any(spec_of(reward).kind != "pointwise" for reward in self.rewards):
            raise ValueError("lexicographic: its rewards score each sample alone (pointwise)")
        self.name = f"lexicographic({','.join(reward.name for reward in self.rewards)})"
        specs = [spec_of(reward) for reward in self.rewards]
        needs = frozenset().union(*(spec.needs for spec in specs))
        self.spec = Spec(needs, "pairwise", deterministic=all(spec.deterministic for spec in specs))

    def compare(
        self, first: Sequence[Any], second: Sequence[Any], prompts: Sequence[str], metadata: Metadata
    ) -> Scores:
        """1 where `first` is better, 0 where `second` is, 0.5 where they are equal by all rewards."""
        value = torch.full((len(prompts),), 0.5)
        for reward, margin in zip(reversed(self.rewards), reversed(self.margins), strict=True):
            gap = score(reward, first, prompts, metadata).value - score(reward, second, prompts, metadata).value
            value = torch.where(gap > margin, 1.0, torch.where(gap < -margin, 0.0, value))
        return Scores(value)
