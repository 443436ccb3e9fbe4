"""Judges of texts: the same templates and backends as for pictures, a template's fields holding what is judged."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Unpack

import torch

from rewards.base import Metadata, Scores
from rewards.judges.local import Local
from rewards.judges.reward import AskingSettings, PairwiseVLMJudge, VLMJudge
from rewards.judges.served import Served
from rewards.judges.template import Unparsed
from rewards.text.process import thoughts
from rewards.text.steps import LINES, as_steps, step_ends

_NEEDS = frozenset({"text", "prompt", "metadata"})


class TextJudge(VLMJudge):
    """A judge's score of each text in [0, 1], by a template with the field {text}.

    Shipped: text_rubric (yes/no questions, one about the metadata's `criterion`), text_principles (the judge writes the
    principles that matter first, as SPCT's does, arXiv 2504.02495).

    Args:
        template, judge, unparsed, asking: as of `VLMJudge`.
    """

    def __init__(
        self,
        template: str,
        judge: Local | Served,
        unparsed: Unparsed = "group_mean",
        **asking: Unpack[AskingSettings],
    ) -> None:
        super().__init__(template, judge, unparsed, **asking)
        if "text" not in self.template.fields:
            raise ValueError(f"template '{template}' judges pictures; text_judge takes one with the field text")
        self.spec = replace(self.spec, needs=_NEEDS)

    def __call__(self, samples: Sequence[Any], prompts: Sequence[str], metadata: Metadata) -> Scores:
        told = [dict(record) | {"text": text} for text, record in zip(samples, metadata, strict=True)]
        return super().__call__(samples, prompts, told)


class PairwiseTextJudge(PairwiseVLMJudge):
    """A judge that compares two texts by a template with the fields {first} and {second}; see `win_rate`, `compared`.

    Args:
        template, judge, asking: as of `PairwiseVLMJudge`.
    """

    def __init__(self, template: str, judge: Local | Served, **asking: Unpack[AskingSettings]) -> None:
        super().__init__(template, judge, **asking)
        self.spec = replace(self.spec, needs=_NEEDS)

    def compare(
        self,
        first: Sequence[Any],
        second: Sequence[Any],
        prompts: Sequence[str],
        metadata: Metadata,
    ) -> Scores:
        told = [dict(record) | {"first": a, "second": b} for a, b, record in zip(first, second, metadata, strict=True)]
        return super().compare(first, second, prompts, told)


class ThoughtPRM:
    """A judge says of every step whether it is right; runs of one verdict are thoughts, worth +-1 / their number.

    The units are TP-GRPO's (arXiv 2507.23317), whose evaluation and ability-adaptive rewards were not at hand.

    Args:
        judge: where the model is, local or served.
        template: judges a {step} after the {text} before it, e.g. text_step; at least 1/2 is right. What cannot be read
            is wrong.
        separator: a regular expression of what ends a step.
        asking: as of `VLMJudge`.
    """

    name = "thought_prm"

    def __init__(
        self,
        judge: Local | Served,
        template: str = "text_step",
        separator: str = LINES,
        **asking: Unpack[AskingSettings],
    ) -> None:
        self.judge, self.separator = TextJudge(template, judge, "lowest", **asking), separator
        self.spec = replace(self.judge.spec, kind="pointwise")

    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        ends = [step_ends(text, self.separator) for text in samples]
        before, asked, told = [], [], []
        for text, own, prompt, record in zip(samples, ends, prompts, metadata, strict=True):
            for start, end in zip([0, *own[:-1]], own, strict=True):
                before.append(text[:start])
                asked.append(prompt)
                told.append(dict(record) | {"step": text[start:end]})
        verdicts = (self.judge(before, asked, told).value >= 0.5).tolist()
        width = max(map(len, ends))
        right, mask = torch.zeros(2, len(samples), width, dtype=torch.bool)
        for row, own in enumerate(ends):
            mask[row, : len(own)] = True
            right[row, : len(own)] = torch.tensor([verdicts.pop(0) for _ in own])
        value = thoughts(right, mask)
        return Scores(value.sum(1), steps=as_steps(ends, value))
