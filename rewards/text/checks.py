"""Rules that check what a text says: boxes, numbers, clicks, keywords, assignments, and how sure it is of itself."""

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment

from rewards.base import Around, Metadata, Reward, RewardError, Scores, Spec, as_reward, score, spec_of
from rewards.text.verifiers import answers

_NEEDS = frozenset({"text", "prompt", "metadata"})
NUMBER = r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?"
Box = Sequence[float]


def needed(name: str, key: str, prompts: Sequence[str], metadata: Metadata) -> list[Any]:
    """What each prompt's metadata has under a key.

    Raises:
        RewardError: a prompt has nothing there.
    """
    for prompt, record in zip(prompts, metadata, strict=True):
        if key not in record:
            raise RewardError(f"reward '{name}': the prompt {prompt!r} has no '{key}'")
    return [record[key] for record in metadata]


def overlap(first: Box, second: Box) -> float:
    """Intersection over union of two boxes of left, top, right and bottom."""
    width = min(first[2], second[2]) - max(first[0], second[0])
    height = min(first[3], second[3]) - max(first[1], second[1])
    shared = max(width, 0.0) * max(height, 0.0)
    areas = [max(box[2] - box[0], 0.0) * max(box[3] - box[1], 0.0) for box in (first, second)]
    union = sum(areas) - shared
    return shared / union if union > 0 else 0.0


class Boxes:
    """Overlap of the boxes that a text names with those of the metadata (Visual-RFT, arXiv 2503.01785; VLAA-Thinking).

    Boxes are matched one to one so that their overlaps, intersection over union, add up to most; those below
    `threshold` count 0, and the sum is over the larger number of boxes. With `confidence` a text's JSON also says how
    sure it is of each box, and c for a box with a partner or 1 - c for one without, a mean over boxes, is added: the
    paper's reward of confidences. A text without boxes gets 0, or 1 where there are none to be named.

    Args:
        key: key of the metadata with a list of boxes of left, top, right and bottom.
        threshold: smallest overlap of partners.
        confidence: read boxes from JSON records {"Position": [l, t, r, b], "Confidence": c}; otherwise four numbers in
            brackets are a box.
    """

    name = "boxes"
    spec = Spec(_NEEDS)
    bracketed = re.compile(r"[\[(]\s*" + r"\s*,\s*".join([f"({NUMBER})"] * 4) + r"\s*[\])]")

    def __init__(self, key: str = "boxes", threshold: float = 0.5, confidence: bool = False) -> None:
        if not 0 <= threshold < 1:
            raise ValueError("boxes: threshold in [0, 1)")
        self.key, self.threshold, self.confidence = key, threshold, confidence

    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        rows = []
        for text, prompt, right in zip(samples, prompts, needed(self.name, self.key, prompts, metadata), strict=True):
            if not isinstance(right, list) or not all(_is_box(box) for box in right):
                raise RewardError(
                    f"reward 'boxes': '{self.key}' of the prompt {prompt!r} is no list of boxes [l, t, r, b]"
                )
            rows.append(self._of(text, right))
        overlaps, sure = (torch.tensor(column) for column in zip(*rows, strict=True))
        return Scores(overlaps + sure if self.confidence else overlaps, {"overlap": overlaps})

    def _of(self, text: str, right: Sequence[Box]) -> tuple[float, float]:
        named, confidences = self._named(text)
        if not named or not right:
            return float(not named and not right), float(not named and not right)
        table = np.array([[overlap(box, other) for other in right] for box in named])
        table[table < self.threshold] = 0
        rows, columns = linear_sum_assignment(table, maximize=True)
        partners = {
            row: table[row, column] for row, column in zip(rows, columns, strict=True) if table[row, column] > 0
        }
        sure = [c if row in partners else 1 - c for row, c in enumerate(confidences)]
        return float(sum(partners.values())) / max(len(named), len(right)), sum(sure) / len(sure)

    def _named(self, text: str) -> tuple[list[Box], list[float]]:
        """Boxes of a text, and how sure it is of each."""
        if not self.confidence:
            boxes = [tuple(map(float, match.groups())) for match in self.bracketed.finditer(text)]
            return list(boxes), [1.0] * len(boxes)
        found = re.findall(r"\{[^{}]*\}", text)
        records = [record for record in map(_record, found) if record is not None]
        return [record[0] for record in records], [record[1] for record in records]


def _is_box(box: object) -> bool:
    return isinstance(box, list | tuple) and len(box) == 4 and all(isinstance(side, int | float) for side in box)


def _record(text: str) -> tuple[Box, float] | None:
    """Box and confidence of a JSON record, which others write with single quotes."""
    try:
        record = json.loads(text.replace("'", '"'))
        box, sure = record.get("Position"), record.get("Confidence", 1.0)
        if not _is_box(box) or not isinstance(sure, int | float) or not 0 <= sure <= 1:
            return None
        return [float(side) for side in box], float(sure)
    except (ValueError, RecursionError, OverflowError):
        return None


class NumberWithin:
    """1 where the last number of a text is within a share of the right one, as of values read off charts (Mixed-R1,
    arXiv
    2505.24164; ChartQA's 5%).

    Args:
        key: key of the right number in the metadata.
        tolerance: largest distance as a share of the right number.
        pattern: a regular expression whose first group is the text's number, its last match counting.
    """

    name = "number_within"
    spec = Spec(_NEEDS)

    def __init__(self, key: str = "answer", tolerance: float = 0.05, pattern: str = f"({NUMBER})") -> None:
        if not tolerance >= 0:
            raise ValueError("number_within: tolerance at least 0")
        self.key, self.tolerance, self.pattern = key, tolerance, re.compile(pattern, re.DOTALL)

    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        value = []
        for text, prompt, answer in zip(samples, prompts, answers(self.name, prompts, metadata, self.key), strict=True):
            right = _float(answer.strip().rstrip("%"))
            if right is None:
                raise RewardError(
                    f"reward 'number_within': '{self.key}' of the prompt {prompt!r} is no number: {answer!r}"
                )
            matches = self.pattern.findall(text.replace(",", ""))
            given = _float(matches[-1]) if matches else None
            value.append(float(given is not None and abs(given - right) <= self.tolerance * abs(right)))
        return Scores(torch.tensor(value))


def _float(text: str) -> float | None:
    try:
        number = float(text.replace(",", ""))
    except ValueError:
        return None
    return number if math.isfinite(number) else None


class Click:
    """Whether a text's last point is in a box, for agents that click (HyperClick, arXiv 2510.27266, after the
    abstract).

    With `spread` a click in the box is worth what a Gaussian around its middle is there, 1 in the middle; outside it is
    0. That is the target of `stated_confidence`.

    Args:
        key: key of the box in the metadata: left, top, right and bottom.
        spread: standard deviation as a share of the box's sides.
    """

    name = "click"
    spec = Spec(_NEEDS)
    point = re.compile(rf"({NUMBER})\s*,\s*({NUMBER})")

    def __init__(self, key: str = "box", spread: float | None = None) -> None:
        if spread is not None and spread <= 0:
            raise ValueError("click: spread above 0")
        self.key, self.spread = key, spread

    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        boxes = needed(self.name, self.key, prompts, metadata)
        for prompt, box in zip(prompts, boxes, strict=True):
            if not _is_box(box) or box[0] >= box[2] or box[1] >= box[3]:
                raise RewardError(
                    f"reward 'click': '{self.key}' of the prompt {prompt!r} is no box [l, t, r, b]: {box!r}"
                )
        return Scores(torch.tensor([self._of(text, box) for text, box in zip(samples, boxes, strict=True)]))

    def _of(self, text: str, box: Box) -> float:
        points = self.point.findall(text)
        if not points:
            return 0.0
        x, y = map(float, points[-1])
        if not (box[0] <= x <= box[2] and box[1] <= y <= box[3]):
            return 0.0
        if self.spread is None:
            return 1.0
        across = (x - (box[0] + box[2]) / 2) / (self.spread * (box[2] - box[0]))
        down = (y - (box[1] + box[3]) / 2) / (self.spread * (box[3] - box[1]))
        return math.exp(-(across**2 + down**2) / 2)


class StatedConfidence(Around):
    """Brier score 1 - (c - outcome)^2 of how sure a text says that it is, c in [0, 1] (HyperClick, arXiv 2510.27266).

    A text that does not say gets 0. It is added to the outcome.

    Args:
        outcome: a reward in [0, 1].
        pattern: a regular expression whose first group is the confidence, its last match counting; above 1 it is in
            percent.
    """

    def __init__(self, outcome: Reward, pattern: str = rf"(?i)confidence\W+({NUMBER})") -> None:
        self.reward: Reward = as_reward(outcome)
        self.pattern = re.compile(pattern)
        self.name = f"stated_confidence({self.reward.name})"
        self.spec = spec_of(self.reward)

    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        outcome = score(self.reward, samples, prompts, metadata)
        stated = torch.tensor([self._stated(text) for text in samples])
        value = (1 - (stated - outcome.value) ** 2).where(~stated.isnan(), 0)
        return Scores(value, {self.reward.name: outcome.value, "confidence": stated}, weight=outcome.weight)

    def _stated(self, text: str) -> float:
        """Confidence in [0, 1]; NaN where the text states none."""
        stated = self.pattern.findall(text)
        number = float(stated[-1]) if stated else math.nan
        number = number / 100 if number > 1 else number
        return number if 0 <= number <= 1 else math.nan


class Keywords:
    """Share of a reference's keywords that a text has in their order: the longest row of them (RLVRR, after the
    abstract).

    Args:
        key: key of the metadata with the list of keywords, in order.
    """

    name = "keywords"
    spec = Spec(_NEEDS)

    def __init__(self, key: str = "keywords") -> None:
        self.key = key

    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        value = []
        for text, prompt, words in zip(samples, prompts, needed(self.name, self.key, prompts, metadata), strict=True):
            if not isinstance(words, list) or not words or not all(isinstance(word, str) and word for word in words):
                raise RewardError(f"reward 'keywords': '{self.key}' of the prompt {prompt!r} is no list of words")
            value.append(in_order(text, words) / len(words))
        return Scores(torch.tensor(value))


def in_order(text: str, words: Sequence[str]) -> int:
    """The most of these words that stand in a text in their order, each after the end of the one before."""
    # end[n]: where the shortest beginning of the text ends that holds n of the words seen so far
    end = [0]
    for word in words:
        pattern = re.compile(rf"(?<!\w){re.escape(word)}(?!\w)", re.IGNORECASE)
        matches = [pattern.search(text, at) for at in end]
        longer = [None if match is None else match.end() for match in matches]
        for number in range(len(end), 0, -1):
            reached = longer[number - 1]
            if reached is None:
                continue
            if number == len(end):
                end.append(reached)
            else:
                end[number] = min(end[number], reached)
    return len(end) - 1


class Bleu:
    """BLEU of a text and a short reference, of n-grams no longer than the reference (length-aware, after the abstract
    of PRS, arXiv 2512.07478), in [0, 1].

    The n-grams go up to `ngram` words or the reference's length, so that an answer of one word can be right; from two
    words on counts are raised by one (Lin and Och's smoothing). A text that is too short is punished as in BLEU, one
    that is too long by its precision. The paper's stages are `gate`: format first.

    Args:
        key: key of the reference in the metadata.
        pattern: a regular expression whose first group is the text's answer, its last match counting; a text without
            a match gets 0. Default: the whole text.
        ngram: longest n-gram.
        ignore_case: "Paris" is "paris".
    """

    name = "bleu"
    spec = Spec(_NEEDS)

    def __init__(
        self, key: str = "answer", pattern: str | None = None, ngram: int = 4, ignore_case: bool = True
    ) -> None:
        if ngram < 1:
            raise ValueError("bleu: ngram at least 1")
        self.key, self.ngram, self.same = key, ngram, str.lower if ignore_case else str
        self.pattern = None if pattern is None else re.compile(pattern, re.DOTALL)

    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        references = answers(self.name, prompts, metadata, self.key)
        value = []
        for text, reference in zip(samples, references, strict=True):
            found = [text] if self.pattern is None else self.pattern.findall(text)[-1:]
            given = WORD.findall(self.same("".join(found)))
            value.append(bleu(given, WORD.findall(self.same(reference)), self.ngram))
        return Scores(torch.tensor(value))


WORD = re.compile(r"\w+|[^\w\s]")


def bleu(text: Sequence[str], reference: Sequence[str], ngram: int = 4) -> float:
    """Sentence BLEU of words, of n-grams no longer than the reference; 0 where they share no word."""
    longest = min(ngram, len(reference))
    if not text or not longest:
        return 0.0
    logarithms = []
    for size in range(1, longest + 1):
        grams, right = (
            Counter(tuple(words[i : i + size]) for i in range(len(words) - size + 1)) for words in (text, reference)
        )
        shared, count = (grams & right).total(), max(1, grams.total())
        if size == 1 and not shared:
            return 0.0
        more = int(size > 1)
        logarithms.append(math.log((shared + more) / (count + more)))
    brevity = min(0.0, 1 - len(reference) / len(text))
    return math.exp(brevity + sum(logarithms) / longest)


class Assignment:
    """1 where the values that a text gives make every clause of a formula true: x1=1, x2=0 (SATQuest, arXiv
    2509.00930).

    Args:
        key: key of the clauses in the metadata, lists of numbers of variables, negative where negated, as
            `flowalign prompts formulas` writes them.
    """

    name = "assignment"
    spec = Spec(_NEEDS)
    given = re.compile(r"x(\d{1,6})\s*=\s*(0|1|true|false)\b", re.IGNORECASE)

    def __init__(self, key: str = "clauses") -> None:
        self.key = key

    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        formulas = needed(self.name, self.key, prompts, metadata)
        return Scores(torch.tensor([self._of(text, formula) for text, formula in zip(samples, formulas, strict=True)]))

    def _of(self, text: str, formula: Sequence[Sequence[int]]) -> float:
        values: Mapping[int, bool] = {
            int(number): said.lower() in ("1", "true") for number, said in self.given.findall(text)
        }
        known = {abs(literal) for clause in formula for literal in clause} <= values.keys()
        return float(known and all(any(values[abs(a)] == (a > 0) for a in clause) for clause in formula))
