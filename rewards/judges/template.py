"""Templates: what a judge is asked and how its reply is read, as data files.

A template is a YAML file in templates/ or anywhere else:

    source:     paper and model that answer in this format
    answer:     probability (of the first label), echo (of the prompt), score (numbers in the reply), or winner
    fields:     names in braces besides {prompt}, with their defaults; a sample's metadata of that name comes first. A
                template that shows no pictures, or the prompt's alone, judges texts: {text}, or {first} and {second} of
                a pair
    combine:    of the questions' values: mean, min, product or geometric_mean
    video:      true where the samples are videos, of which the judge sees frames
    questions:
      - name:       shown as a part of the scores
        pictures:   of sample, reference (metadata["reference"]), first and second (the two samples of a pair), and
                    prompt: those that the metadata has under image, where it has any
        ask:        the text; system: a system message
        compares:   true where two pictures compete: it is asked in both orders, and the two answers averaged
        labels:     probability: [the good answer, the bad one]; winner: how a reply names the first, and the second,
                    which are the answers that `flowalign pair-questions` writes
        scores:     score: name of a part -> regular expression with {number} in it
        every:      score: take the mean of all numbers that match, as where objects are scored one by one
        range:      score: [lowest, highest] that may be given
        good:       score: "high" (default) or "low"
        combine:    of the parts' values, as above
        winner:     winner: first, second and tie -> regular expressions
        totals:     winner, instead: first and second -> regular expressions with {number} in them; the side whose
                    numbers add up to more wins, and both must have as many
        official:   names of the texts in the authors' Python file that make up the question, joined by line breaks, for
                    the setting `wording`; without, it is the longest text there with {prompt}
        reworded:   what is replaced in those texts, by what
        after:      only what follows this marker is read, and a reply without it cannot be

Reasoning in <think> is never read. A reply that holds no number, one out of range, or two different ones for the same
part; no winner, or two: each is unparsed (None). What becomes of it is the reward's business, and it is never 0 in
silence.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml

Answer = Literal["probability", "echo", "score", "winner"]
Combine = Literal["mean", "min", "product", "geometric_mean"]
Unparsed = Literal["group_mean", "lowest", "error"]
NUMBER = r"([-+]?\d+(?:\.\d+)?)(?!\w|\.\d)"
SHIPPED = Path(str(resources.files("rewards"))) / "judges" / "templates"


@dataclass(kw_only=True)
class TemplateQuestion:
    """One question of a template."""

    name: str
    ask: str
    pictures: list[str] = field(default_factory=lambda: ["sample"])
    system: str = ""
    compares: bool = False
    labels: list[str] = field(default_factory=lambda: ["yes", "no"])
    scores: dict[str, str] = field(default_factory=dict)
    every: bool = False
    range: tuple[float, float] = (0.0, 1.0)
    good: Literal["high", "low"] = "high"
    combine: Combine = "mean"
    winner: dict[str, str] = field(default_factory=dict)
    totals: dict[str, str] = field(default_factory=dict)
    official: list[str] = field(default_factory=list)
    reworded: dict[str, str] = field(default_factory=dict)
    after: str = ""

    def read_scores(self, reply: str) -> dict[str, float] | None:
        """Each part's value in [0, 1], 1 the best; None if the reply cannot be parsed."""
        text = self._verdict(reply)
        if text is None:
            return None
        low, high = self.range
        values = {}
        for name, pattern in self.scores.items():
            numbers = _numbers(pattern, text)
            clear = numbers and (self.every or len(set(numbers)) == 1)
            if not clear or any(not low <= number <= high for number in numbers):
                return None
            value = (sum(numbers) / len(numbers) - low) / (high - low)
            values[name] = value if self.good == "high" else 1 - value
        return values

    def read_winner(self, reply: str) -> float | None:
        """1 if the first picture wins, 0 if the second, 0.5 for a tie; None if the reply cannot be parsed."""
        text = self._verdict(reply)
        if text is None:
            return None
        if self.totals:
            first, second = (_numbers(self.totals[side], text) for side in ("first", "second"))
            if not first or len(first) != len(second):
                return None
            gap = sum(first) - sum(second)
            return 0.5 if abs(gap) < 1e-6 else float(gap > 0)
        worth = {"first": 1.0, "second": 0.0, "tie": 0.5}
        named = [worth[who] for who, pattern in self.winner.items() if re.search(pattern, text, flags=re.IGNORECASE)]
        return named[0] if len(named) == 1 else None

    def _verdict(self, reply: str) -> str | None:
        """A reply without its reasoning; None if that has no end or the marker is missing."""
        if ("<think>" in reply and "</think>" not in reply) or self.after not in reply:
            return None
        verdict = reply.rpartition(self.after)[2] if self.after else reply
        return verdict.rpartition("</think>")[2]


def _numbers(pattern: str, text: str) -> list[float]:
    """All numbers that a pattern finds in a text."""
    # not str.format: patterns have braces of their own
    return [float(number) for number in re.findall(pattern.replace("{number}", NUMBER), text, flags=re.IGNORECASE)]


@dataclass(kw_only=True)
class Template:
    """A template read from its file."""

    name: str
    source: str
    answer: Answer
    questions: list[TemplateQuestion]
    fields: dict[str, str] = field(default_factory=dict)
    combine: Combine = "mean"
    video: bool = False

    @property
    def texts(self) -> bool:
        """Whether it judges texts, which stand in its fields, and not pictures."""
        return not any(set(question.pictures) - {"prompt"} for question in self.questions)

    @property
    def pairwise(self) -> bool:
        """Whether it compares two samples, instead of judging one."""
        return "first" in self.fields or any("first" in question.pictures for question in self.questions)

    @property
    def needs(self) -> frozenset[str]:
        """Needs as in `rewards.base.Spec`."""
        if self.texts:
            return frozenset({"text", "prompt", "metadata"})
        extra = {"reference"} if any("reference" in question.pictures for question in self.questions) else set()
        extra |= {"metadata"} if self.fields else set()
        return frozenset({"frames" if self.video else "image", "prompt"} | extra)

    def text(self, question: TemplateQuestion, prompt: str, metadata: Mapping[str, Any]) -> str:
        """The question about one sample."""
        values = {name: str(metadata.get(name, default)) for name, default in self.fields.items()}
        values["prompt"] = prompt
        return re.sub(r"\{(\w+)\}", lambda match: values[match[1]], question.ask)

    def check(self) -> None:
        """Raise ValueError where the file contradicts itself."""
        known = {"prompt", *self.fields}
        for question in self.questions:
            where = f"template '{self.name}', question '{question.name}'"
            unknown = set(re.findall(r"\{(\w+)\}", question.ask)) - known
            if unknown:
                raise ValueError(f"{where}: {{{min(unknown)}}} is neither {{prompt}} nor one of its fields")
            if wrong := set(question.pictures) - {"sample", "reference", "first", "second", "prompt"}:
                raise ValueError(
                    f"{where}: pictures are sample, reference, first, second or prompt, not '{min(wrong)}'"
                )
            if self.answer == "score" and not question.scores:
                raise ValueError(f"{where}: a score needs `scores`, a regular expression for each part")
            if question.totals and question.totals.keys() != {"first", "second"}:
                raise ValueError(f"{where}: `totals` has first and second")
            known_sides = {"first", "second"} <= question.winner.keys() <= {"first", "second", "tie"}
            if self.answer == "winner" and not (question.totals or known_sides):
                raise ValueError(f"{where}: a winner needs `winner` with first and second, and perhaps tie")
            if question.compares and (len(question.pictures) != 2 or self.answer not in ("probability", "winner")):
                raise ValueError(f"{where}: `compares` is for two pictures and a probability or a winner")


def load_template(name: str) -> Template:
    """A shipped template by name, or a YAML file by path.

    Raises:
        ValueError: no such file, or one that contradicts itself.
    """
    path = SHIPPED / f"{name}.yaml"
    if not path.is_file():
        path = Path(name)
    if not path.is_file():
        shipped = ", ".join(sorted(file.stem for file in SHIPPED.glob("*.yaml")))
        raise ValueError(f"no template '{name}'; give the path of a YAML file, or one of {shipped}")
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    try:
        questions = [TemplateQuestion(**question) for question in values.pop("questions")]
        template = Template(name=path.stem, questions=questions, **values)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path}: {error}") from error
    template.check()
    return template


def combined(values: Sequence[float], how: Combine) -> float:
    """One value of several in [0, 1]."""
    if how == "min":
        return min(values)
    if how == "mean":
        return sum(values) / len(values)
    product = math.prod(values)
    return product if how == "product" else product ** (1 / len(values))
