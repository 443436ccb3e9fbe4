"""A listener: a frozen, independent judge re-reads the reasoning of a reply, and says how sure it is of the answer."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rewards.base import Metadata, RewardError, Scores, Spec, source_images
from rewards.judges.base import Judge, Question
from rewards.judges.local import Local
from rewards.judges.served import Served
from rewards.judges.template import load_template


class Listener:
    """Probability of the right answer to a frozen judge that reads a reply's reasoning without its verdict.

    Listener-rewarded thinking (arXiv 2506.22832): reasoning that contradicts its own verdict, or persuades nobody,
    earns less than reasoning that leads another model to the right answer. It shapes the reward of the verdict: the
    paper's sum is format + 0.5 accuracy + 0.5 listener, three rewards with these weights. (The paper's text was not at
    hand: the sum is as a summary of it gives it, the wording of the question is our own.)

    Args:
        judge: where the listener is, local or served; not the model in training.
        template: one question with the field {text}, the reasoning, and {prompt}; its labels are the answers there
            are. The listener sees the prompt's pictures too, those that the metadata names under 'image'.
        key: key of the right answer in the metadata, one of the labels.
        pattern: a regular expression whose first group is the reasoning. A reply without a match gets 0, and the part
            `unparsed` says how often that happens.
    """

    name = "listener"
    spec = Spec(frozenset({"text", "prompt", "metadata"}))

    def __init__(
        self,
        judge: Local | Served,
        template: str = "listener",
        key: str = "answer",
        pattern: str = r"<think>(.*?)</think>",
    ) -> None:
        self.template = load_template(template)
        question = self.template.questions[0]
        if self.template.answer != "probability" or "text" not in self.template.fields or len(question.pictures) > 0:
            raise ValueError(
                f"template '{template}': a listener is asked for a probability by a question with the field text, and "
                "pictures: [] since it sees the prompt's pictures; listener works"
            )
        self.judge: Judge = judge.build(self.name) if isinstance(judge, Local | Served) else judge
        self.key, self.pattern = key, re.compile(pattern, re.DOTALL)

    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        question = self.template.questions[0]
        value, unparsed = torch.zeros(len(samples)), torch.ones(len(samples))
        rows, questions, right = [], [], []
        for i, (text, prompt, record) in enumerate(zip(samples, prompts, metadata, strict=True)):
            if match := self.pattern.search(text):
                text = self.template.text(question, prompt, dict(record) | {"text": match[1].strip()})
                pictures = source_images([record])[0] if "image" in record else []
                rows.append(i)
                questions.append(Question(tuple(pictures), text, question.system))
                right.append(self._label(prompt, record, question.labels))
        for i, label, chances in zip(rows, right, self.judge.choose(questions, question.labels), strict=True):
            # a served listener that begins with none of the labels is sure of none
            value[i], unparsed[i] = chances[label] if chances else 0.0, 0.0
        return Scores(value, {"unparsed": unparsed})

    def _label(self, prompt: str, record: Mapping[str, Any], labels: Sequence[str]) -> int:
        """Number of the right answer's label."""
        answer = str(record.get(self.key, "")).strip().lower()
        known = [label.lower() for label in labels]
        if answer not in known:
            raise RewardError(
                f"reward '{self.name}': the prompt {prompt!r} has {self.key}={answer!r}, and template "
                f"'{self.template.name}' knows the answers {', '.join(labels)}"
            )
        return known.index(answer)
