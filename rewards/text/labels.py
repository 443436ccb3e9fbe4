"""Labels of a taxonomy in a text, compared with the right ones level by level."""

import re
from collections.abc import Sequence

import torch

from rewards.base import Metadata, Scores, Spec
from rewards.text.checks import needed


class Taxonomy:
    """How many labels of a taxonomy a text gets right, level by level (the multi-level reward of MagicAssessor, arXiv
    2509.10260, after the abstract).

    A label is a path such as `anatomy/hand/fingers`. Of each level the paths up to it are compared as sets, by F1; a
    level without any path on either side is right. So a text that names the right kind and a wrong detail earns
    something. The assessment in words is for another reward, such as `text_similarity`; rare labels get their share of
    the prompts by the selection `shares`.

    Args:
        weights: weights of the levels, from the top; levels below the last one are not compared.
        key: key of the metadata with the list of right labels; empty where nothing is wrong.
        pattern: a regular expression whose first group is a label; it may match several times.
    """

    name = "taxonomy"
    spec = Spec(frozenset({"text", "prompt", "metadata"}))

    def __init__(
        self,
        weights: Sequence[float] = (1.0, 1.0),
        key: str = "labels",
        pattern: str = r"^\s*[-*]?\s*(\w[\w ]*(?:/\w[\w ]*)+)",
    ) -> None:
        if not weights or min(weights) < 0 or sum(weights) == 0:
            raise ValueError("taxonomy: weights of the levels are 0 or more, and one is above 0")
        self.weights, self.key = list(weights), key
        self.pattern = re.compile(pattern, re.MULTILINE)

    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        right = needed(self.name, self.key, prompts, metadata)
        columns = [
            torch.tensor(
                [
                    f1(prefixes(self.pattern.findall(text), level), prefixes(labels, level))
                    for text, labels in zip(samples, right, strict=True)
                ]
            )
            for level in range(1, len(self.weights) + 1)
        ]
        total = sum(weight * column for weight, column in zip(self.weights, columns, strict=True))
        parts = {f"level_{number}": column for number, column in enumerate(columns, 1)}
        return Scores(torch.as_tensor(total) / sum(self.weights), parts)


def prefixes(labels: Sequence[str], level: int) -> set[tuple[str, ...]]:
    """The labels' paths up to a level, of those that go so far."""
    paths = [tuple(part.strip().lower() for part in label.split("/")) for label in labels]
    return {path[:level] for path in paths if len(path) >= level}


def f1(found: set[tuple[str, ...]], right: set[tuple[str, ...]]) -> float:
    """Harmonic mean of precision and recall; 1 where both sets are empty."""
    return 2 * len(found & right) / (len(found) + len(right)) if found or right else 1.0
