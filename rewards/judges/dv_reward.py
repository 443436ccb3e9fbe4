"""DVReward: a prompt split into yes/no questions, which any judge answers about the picture (AlphaGRPO, 2605.12495)."""

import re
from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Any, Literal

import torch

from rewards.base import Metadata, RewardError, Scores, Spec, UnreadReplies
from rewards.judges.base import Judge, Question
from rewards.judges.local import Local
from rewards.judges.reward import MOST_UNPARSED
from rewards.judges.served import Served
from rewards.judges.template import load_template

KINDS = ("semantic", "quality")
SPLIT = """Split a request for a picture into questions that can be answered by looking at the picture, with yes or no.
Write one question a line, and begin each with "semantic:" or "quality:". A semantic question is about one thing that
the request says: an object, how many there are, a colour, a relation, a text. A quality question is about how well one
of these things is drawn: its shape, its parts, the light on it. The right answer is yes. Write nothing else.

Request: {prompt}"""


class DVReward:
    """Decompositional verifiable reward: the share of yes to questions about what a prompt says, and how it is drawn.

    The value is sqrt(S Q), S and Q the means over the semantic and over the quality questions of P(yes) / (P(yes) +
    P(no)), from the first token of the judge's reply; 1 where there are none of a kind. As of the authors' rewards.py.

    Questions stand in a prompt's metadata, lists `semantic_questions` and `quality_questions` of texts or of records
    with a `question`, as in their data. A prompt without them is split by the `writer`, once; how it is asked to is our
    own wording.

    Args:
        judge: where the model that looks is, local or served.
        writer: where the model that splits prompts is.
        combine: how the two means make one: geometric, mean, or the mean of all questions alike.
        template: what the judge is asked, with a question in the place of {prompt}; a file, or one that comes along.
    """

    name = "dv_reward"
    spec = Spec(frozenset({"image", "prompt", "metadata"}))

    def __init__(
        self,
        judge: Local | Served,
        writer: Local | Served | None = None,
        combine: Literal["geometric", "mean", "all"] = "geometric",
        template: str = "dv_question",
    ) -> None:
        self.template = load_template(template)
        if self.template.answer != "probability" or self.template.questions[0].pictures != ["sample"]:
            raise ValueError(
                f"template '{template}': dv_reward asks for a probability about the sample; dv_question works"
            )
        self.judge: Judge = judge.build(self.name) if isinstance(judge, Local | Served) else judge
        self.writer: Judge | None = writer.build(self.name) if isinstance(writer, Local | Served) else writer
        self.combine = combine
        self.split: dict[str, dict[str, list[str]]] = {}
        """Questions of each kind that the writer has written, by prompt."""

    def __call__(self, samples: Sequence[Any], prompts: Sequence[str], metadata: Metadata) -> Scores:
        asked = self.template.questions[0]
        of = [self.questions(prompt, record) for prompt, record in zip(prompts, metadata, strict=True)]
        rows = [(i, kind, text) for i, each in enumerate(of) for kind in KINDS for text in each[kind]]
        questions = [
            Question((samples[i],), self.template.text(asked, text, metadata[i]), asked.system) for i, _, text in rows
        ]
        chances = self.judge.choose(questions, asked.labels)
        unparsed = sum(chance is None for chance in chances)
        if unparsed > MOST_UNPARSED * len(chances):
            raise UnreadReplies(
                f"reward '{self.name}': {unparsed} of {len(chances)} replies began with neither yes nor no; another "
                "judge may know the format"
            )
        answers: list[dict[str, list[float]]] = [{kind: [] for kind in KINDS} for _ in samples]
        for (i, kind, _), chance in zip(rows, chances, strict=True):
            answers[i][kind].append(chance[0] if chance else 0.0)
        means = [{kind: _mean(each[kind]) for kind in KINDS} for each in answers]
        values = [self._value(mean, each) for mean, each in zip(means, answers, strict=True)]
        parts = {kind: torch.tensor([mean[kind] for mean in means]) for kind in KINDS}
        return Scores(torch.tensor(values), parts | {"unparsed": torch.full((len(samples),), unparsed / len(chances))})

    def questions(self, prompt: str, record: Mapping[str, Any]) -> dict[str, list[str]]:
        """A prompt's questions of each kind."""
        given: dict[str, list[str]] = {}
        for kind in KINDS:
            listed = record.get(f"{kind}_questions") or []
            given[kind] = [each["question"] if isinstance(each, Mapping) else str(each) for each in listed]
        if not any(given.values()):
            given = self.split[prompt] if prompt in self.split else self._written(prompt)
        return given

    def _written(self, prompt: str) -> dict[str, list[str]]:
        if self.writer is None:
            raise RewardError(
                f"reward '{self.name}': the prompt {prompt!r} has neither semantic_questions nor quality_questions; "
                "give them in its line, or a writer: {model: ...}"
            )
        (reply,) = self.writer.reply([Question((), SPLIT.replace("{prompt}", prompt))], 0.0, 1024, 0)
        found = {kind: re.findall(rf"^\W*{kind}\W*:\s*(.+\?)\s*$", reply, re.M | re.I) for kind in KINDS}
        if not any(found.values()):
            raise RewardError(
                f"reward '{self.name}': the writer split {prompt!r} into no questions ({reply[:200]!r}); another "
                "writer may"
            )
        self.split[prompt] = found
        return found

    def _value(self, mean: Mapping[str, float], answers: Mapping[str, list[float]]) -> float:
        if self.combine == "all":
            return _mean([value for kind in KINDS for value in answers[kind]])
        semantic, quality = (mean[kind] for kind in KINDS)
        return sqrt(semantic * quality) if self.combine == "geometric" else (semantic + quality) / 2


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 1.0
