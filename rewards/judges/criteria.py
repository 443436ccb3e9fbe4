"""Judging by criteria of each sample's own, and writing them."""

import json
import re
from collections.abc import Sequence
from typing import Any

import torch

from rewards.base import Metadata, Reward, RewardError, Scores, Spec, as_reward, bind, score, spec_of
from rewards.judges.base import Judge, Question

WRITE = """The task was: {prompt}

Answers of several experts:
{committee}

A student's answer:
{student}

Which things do most of the experts get right that the student misses or gets wrong, and which does the student get \
right too? Write a checklist for judging answers to this task: one JSON object a line, \
{{"criterion": "...", "weight": w}}, where the criterion goes on after 'the answer is one that ...' and the weight is \
1 (minor) to 3 (essential). Write nothing else."""


class WeightedCriteria:
    """The mean of a judge's values of a sample by criteria of its prompt's own, each times its weight (RubiCap, arXiv
    2603.09160, after the abstract and summaries).

    The metadata has `criteria`, a list of {"criterion": text, "weight": number} or of texts that weigh 1;
    `scripts/write_criteria.py` writes them. The judge's template asks about one {criterion}: text_criterion, or your
    own.

    Args:
        reward: the judge, such as {name: text_judge, template: text_criterion, judge: ...}.
        key: key of the metadata with the criteria.
    """

    def __init__(self, reward: Reward, key: str = "criteria") -> None:
        self.reward: Reward = as_reward(reward)
        self.key = key
        self.name = f"weighted_criteria({self.reward.name})"
        inner = spec_of(self.reward)
        self.spec = Spec(
            inner.needs | {"metadata"}, inner.kind, deterministic=inner.deterministic, off_device=inner.off_device
        )

    def bind(self, model: Any) -> None:
        """Hand the model in training to the judge."""
        bind(self.reward, model)

    def __call__(self, samples: Sequence[Any], prompts: Sequence[str], metadata: Metadata) -> Scores:
        lists = [self._criteria(record, prompt) for record, prompt in zip(metadata, prompts, strict=True)]
        rows = [i for i, criteria in enumerate(lists) for _ in criteria]
        asked = [pair for criteria in lists for pair in criteria]
        # members of a group are compared by the same criterion
        records = [
            dict(metadata[i]) | {"criterion": text, "group": f"{metadata[i].get('group')}/{text}"}
            for i, (text, _) in zip(rows, asked, strict=True)
        ]
        values = score(self.reward, [samples[i] for i in rows], [prompts[i] for i in rows], records).value
        weights = torch.tensor([weight for _, weight in asked])
        where = torch.tensor(rows)
        total = torch.zeros(len(samples)).index_add(0, where, weights)
        value = torch.zeros(len(samples)).index_add(0, where, weights * values) / total
        met = torch.zeros(len(samples)).index_add(0, where, (values > 0.5).float())
        return Scores(value, {"met": met, "criteria": torch.tensor([float(len(criteria)) for criteria in lists])})

    def _criteria(self, record: Any, prompt: str) -> list[tuple[str, float]]:
        found = [as_criterion(each) for each in record.get(self.key, ())]
        if not found or None in found:
            raise RewardError(
                f"reward '{self.name}': the metadata of the prompt {prompt!r} has no list of criteria under "
                f"'{self.key}', each a text or {{criterion, weight}} with a weight above 0"
            )
        return [pair for pair in found if pair is not None]


def as_criterion(value: object) -> tuple[str, float] | None:
    """A criterion and its weight; None where it is none."""
    text, weight = (value.get("criterion"), value.get("weight", 1.0)) if isinstance(value, dict) else (value, 1.0)
    if not isinstance(text, str) or not text.strip() or isinstance(weight, bool) or not isinstance(weight, int | float):
        return None
    return (text.strip(), float(weight)) if 0 < weight < float("inf") else None


def written_criteria(
    judge: Judge,
    prompts: Sequence[str],
    committees: Sequence[Sequence[str]],
    students: Sequence[str],
    pictures: Sequence[Sequence[Any]] | None = None,
    max_tokens: int = 1024,
) -> list[list[dict[str, Any]]]:
    """Criteria of each prompt, from what a committee's answers agree on and the policy's answer lacks.

    Args:
        judge: the model that writes.
        committees: answers of several other models to each prompt.
        students: the policy's answer to each prompt.
        pictures: what each prompt shows; default nothing.

    Returns:
        What `weighted_criteria` reads; an empty list where nothing that was written could be read.
    """
    questions = []
    for i, (prompt, committee, student) in enumerate(zip(prompts, committees, students, strict=True)):
        answers = "\n".join(f"{number}. {text}" for number, text in enumerate(committee, 1))
        shown = () if pictures is None else tuple(pictures[i])
        questions.append(Question(shown, WRITE.format(prompt=prompt, committee=answers, student=student)))
    return [read_criteria(reply) for reply in judge.reply(questions, 0.0, max_tokens, 0)]


def read_criteria(reply: str) -> list[dict[str, Any]]:
    """The criteria of a reply, one JSON object a line; other lines, and reasoning, are left out."""
    found = []
    for line in re.findall(r"\{[^{}]*\}", reply.rpartition("</think>")[2]):
        try:
            pair = as_criterion(json.loads(line))
        except ValueError:
            continue
        if pair is not None:
            found.append({"criterion": pair[0], "weight": pair[1]})
    return found
