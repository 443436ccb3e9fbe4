"""A tree of the steps of a text: how often each leads to a right answer, and how soon one is found."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rewards.base import Reward, as_reward, score
from rewards.text.answering import beginnings
from rewards.text.model import CausalModel
from rewards.text.steps import LINES, step_ends


@dataclass(kw_only=True)
class StepNode:
    """A beginning of a text."""

    text: str
    ended: bool = False
    """Whether the model ended the text here."""
    children: list["StepNode"] = field(default_factory=list)
    visits: int = 0
    """Number of finished texts that begin so."""
    total: float = 0.0
    """Sum of their outcomes."""
    check: float | None = None
    """A tool's verdict on the last step, in [0, 1]."""

    @property
    def value(self) -> float:
        """Mean outcome of the texts that begin so: the chance that this leads to a right answer."""
        return self.total / max(self.visits, 1)

    def __iter__(self) -> Iterator["StepNode"]:
        """The nodes below it, parents first."""
        for child in self.children:
            yield child
            yield from child


@dataclass(kw_only=True)
class StepTree:
    """What a search made of a prompt."""

    root: StepNode
    iterations: int
    """Iterations until the first right text; one more than there were where none was right."""
    right: list[str]
    """Different right texts, in the order in which they came."""


class TreeSearch:
    """Monte-Carlo tree search over the steps of a model's texts.

    An iteration goes down by the upper confidence bound to a beginning without further steps, finishes it `width`
    times, takes the first step of each as a child, and adds the outcomes up on the way back. The values of steps are
    those that ReST-MCTS* trains on (arXiv 2406.03816, its value by distance left out); the number of iterations to a
    right text is ThinkLite's difficulty (2504.07934); `check` gives each step the verdict of a tool, as GroundedPRM
    does (2510.14942).

    Args:
        model: a language model.
        outcome: a verifier of finished texts.
        check: a verifier of texts so far, of which it judges the last step.
        width: steps that are tried from one beginning.
        most: largest number of tokens of what finishes a text.
        explore: weight of beginnings that were seldom tried.
        right: outcome from which on a text is right.
        separator: a regular expression of what ends a step.
    """

    def __init__(
        self,
        model: CausalModel,
        outcome: Reward,
        check: Reward | None = None,
        width: int = 3,
        most: int = 256,
        temperature: float = 1.0,
        explore: float = 1.0,
        right: float = 0.5,
        separator: str = LINES,
    ) -> None:
        if width < 1 or temperature <= 0:
            raise ValueError("tree search: width at least 1, temperature above 0, so that steps differ")
        self.model, self.outcome = model, as_reward(outcome)
        self.check = None if check is None else as_reward(check)
        self.width, self.most, self.temperature = width, most, temperature
        self.explore, self.right, self.separator = explore, right, separator

    def __call__(self, prompt: str, record: Mapping[str, Any], iterations: int, seed: int = 0) -> StepTree:
        """The tree after so many iterations, or fewer where every text that is left has ended."""
        root, solved = StepNode(text=""), iterations + 1
        right: list[str] = []
        for number in range(1, iterations + 1):
            path = self._down(root)
            if path[-1].ended:
                break
            found = self._expand(path, prompt, record, seed * iterations + number)
            right += [text for text in dict.fromkeys(found) if text not in right]
            solved = min(solved, number if found else solved)
        return StepTree(root=root, iterations=solved, right=right)

    def _down(self, root: StepNode) -> list[StepNode]:
        """The way to a beginning without further steps; to one that ended where nothing else is left."""
        path = [root]
        while path[-1].children:
            node = path[-1]
            open_ones = [child for child in node.children if not _closed(child)] or node.children
            path.append(max(open_ones, key=lambda child: self._bound(child, node.visits)))
        return path

    def _bound(self, node: StepNode, before: int) -> float:
        return node.value + self.explore * math.sqrt(math.log(before) / node.visits)

    def _expand(self, path: Sequence[StepNode], prompt: str, record: Mapping[str, Any], seed: int) -> list[str]:
        """Finish the last node's text several times; the right texts."""
        node = path[-1]
        contexts = beginnings(
            "tree", self.model, [node.text] * self.width, [prompt] * self.width, [record] * self.width
        )
        texts = [node.text + rest for rest in self.model.continued(contexts, self.most, self.temperature, seed)]
        outcomes = score(self.outcome, texts, [prompt] * len(texts), [record] * len(texts)).value.tolist()
        for text, outcome in zip(texts, outcomes, strict=True):
            step = next(end for end in step_ends(text, self.separator) if end > len(node.text) or end == len(text))
            child = next((one for one in node.children if one.text == text[:step]), None)
            if child is None:
                child = StepNode(
                    text=text[:step], ended=step == len(text), check=self._checked(text[:step], prompt, record)
                )
                node.children.append(child)
            for each in [*path, child]:
                each.visits, each.total = each.visits + 1, each.total + outcome
        return [text for text, outcome in zip(texts, outcomes, strict=True) if outcome >= self.right]

    def _checked(self, text: str, prompt: str, record: Mapping[str, Any]) -> float | None:
        return None if self.check is None else score(self.check, [text], [prompt], [record]).value.item()


def _closed(node: StepNode) -> bool:
    """Whether all texts that begin so have ended."""
    return node.ended or (bool(node.children) and all(map(_closed, node.children)))


def step_lines(
    tree: StepTree, prompt: str, weight: float = 0.5, verdicts: Mapping[str, bool] | None = None
) -> list[dict[str, Any]]:
    """Lines to train a process reward model on, one a step: the text so far, its value and its label.

    The value is the mean outcome, or with a tool's verdict weight * verdict + (1 - weight) * outcome (GroundedPRM; the
    abstract gives no weight). A step is right where its value is above 0, as in Math-Shepherd's hard labels, with a
    verdict from 1/2 on. With a judge's verdicts only steps on which both agree are left (arXiv 2501.07301).

    Args:
        verdicts: whether a judge calls the step right, by the text so far.
    """
    lines = []
    for node in tree.root:
        value = node.value if node.check is None else weight * node.check + (1 - weight) * node.value
        label = value > 0 if node.check is None else value >= 0.5
        if verdicts is None or verdicts.get(node.text) == label:
            lines.append({"prompt": prompt, "completion": node.text, "value": value, "label": label})
    return lines
