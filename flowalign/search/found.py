"""What the search of a prompt came to: its best sample, and the tree of what was tried."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from PIL import Image

from flowalign.runs.samples import Picture, frames_of
from flowalign.runs.show import Grid

SMALL = 96
"""Pixels of the longer side of a node's picture."""


@dataclass(kw_only=True)
class Node:
    """A state that a search scored."""

    parent: int | None
    """Number of the node that it came from."""
    step: int
    """Number of the step: 0 the start noise, T a finished sample."""
    score: float
    """Reward of the finished sample, or of the x0 predicted there."""
    forwards: int
    """Network evaluations up to its score."""
    kept: bool = True
    """False where the search went on without it."""


@dataclass
class Candidate:
    """A finished sample."""

    score: float
    node: int
    sample: Any
    """A picture, or a video as a list of them."""


@dataclass(kw_only=True)
class SearchResult:
    """Samples of one method for one prompt."""

    prompt: str
    method: str
    steps: int
    nodes: list[Node] = field(default_factory=list)
    forwards: int = 0
    """Network evaluations, each branch of guidance one; a gradient counts as two more."""
    reward_calls: int = 0
    """Samples scored."""
    log_mean: float | None = None
    """Estimate of log E[exp(strength * reward)] over plain samples, from methods that weigh particles."""
    first: Candidate | None = None
    best: Candidate | None = None
    worst: Candidate | None = None
    small: dict[int, Image.Image] | None = None
    """Pictures of nodes to look at, by number; the first frame of a video. None: nobody wants to look at them."""

    @property
    def score(self) -> float:
        """Score of the best sample."""
        assert self.best is not None
        return self.best.score

    @property
    def sample(self) -> Any:
        """The best sample."""
        assert self.best is not None
        return self.best.sample

    @property
    def curve(self) -> list[tuple[int, float]]:
        """(forwards used, best score so far) whenever a finished sample was better than all before it."""
        best: dict[int, float] = {}
        for node in self.nodes:
            if node.step == self.steps and node.score > max(best.values(), default=-math.inf):
                best[node.forwards] = node.score
        return list(best.items())

    def path(self, node: int | None = None) -> list[int]:
        """Numbers of the nodes from the first to a node, by default the best sample's."""
        assert self.best is not None
        walked = [self.best.node if node is None else node]
        while (parent := self.nodes[walked[-1]].parent) is not None:
            walked.append(parent)
        return walked[::-1]

    def add(self, node: Node, sample: Any = None) -> int:
        """Remember a scored state; returns its number.

        Args:
            sample: scored sample; for an unfinished state the predicted one.
        """
        number = len(self.nodes)
        self.nodes.append(node)
        if self.small is not None and sample is not None:
            self.small[number] = _reduced(sample)
        if node.step == self.steps:
            candidate = Candidate(node.score, number, sample)
            self.first = self.first or candidate
            self.best = candidate if self.best is None or candidate.score > self.best.score else self.best
            self.worst = candidate if self.worst is None or candidate.score < self.worst.score else self.worst
        return number

    def record(self) -> dict[str, Any]:
        """The result as JSON, without the samples."""
        ends = {name: getattr(self, name) for name in ("first", "best", "worst")}
        known = {name: {"node": end.node, "score": end.score} for name, end in ends.items() if end is not None}
        names = ("prompt", "method", "steps", "forwards", "reward_calls", "log_mean")
        values = {name: getattr(self, name) for name in names}
        return values | known | {"nodes": [asdict(node) for node in self.nodes]}

    @classmethod
    def of(cls, record: dict[str, Any], samples: dict[str, Any]) -> "SearchResult":
        """The inverse of `record`.

        Args:
            samples: by 'first', 'best' and 'worst'.
        """
        ends = {name: Candidate(sample=samples[name], **record[name]) for name in ("first", "best", "worst")}
        return cls(**record | {"nodes": [Node(**node) for node in record["nodes"]]} | ends)


class Searches(list[SearchResult]):
    """Results of several prompts; a notebook shows the best samples."""

    @property
    def samples(self) -> list[Picture]:
        """The best sample of each."""
        return [result.sample for result in self]

    @property
    def scores(self) -> list[float]:
        """Scores of the best samples."""
        return [result.score for result in self]

    def _repr_html_(self) -> str:
        captions = [f"{result.prompt}: {result.score:.4g}" for result in self]
        return Grid([self.samples], [captions])._repr_html_()


def _reduced(sample: Picture) -> Image.Image:
    picture = frames_of(sample)[0].convert("RGB")
    picture.thumbnail((SMALL, SMALL))
    return picture
