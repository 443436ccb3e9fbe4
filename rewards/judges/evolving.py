"""A judge whose rubric another model rewrites while the policy learns."""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rewards.base import Metadata, Reward, Scores, Spec, as_reward, bind, score, spec_of
from rewards.judges.base import Judge, Question
from rewards.judges.local import Local
from rewards.judges.own import OwnModel
from rewards.judges.served import Served

REFINE = """A language model learns to answer tasks. A judge rewards each answer for being one that:
{rubric}

Answers of now, with the judge's reward from 0 (bad) to 1 (good):
{examples}

First say where the rewards are wrong: good answers that earn little, and bad ones that earn much, such as answers \
that please the judge and do not do the task. Then write a rubric under which they would be right, as a description \
that goes on after 'an answer that', between <rubric> and </rubric>."""

MERGE = """Several reviewers have rewritten the rubric of a judge that rewards answers to tasks. The old one:
{rubric}

The new ones:
{examples}

Merge them into one rubric of at most {words} words that keeps what most of them agree on, as a description that goes \
on after 'an answer that', between <rubric> and </rubric>."""


class EvolvingJudge:
    """A judge by a rubric, which a meta reward model rewrites every few iterations from the texts and their scores of
    then, so that what fools the judge stops to pay (MPO, arXiv 2504.20157, after the abstract and summaries).

    The rubric is the field {criterion} of the judge's template: text_criterion, or your own. `reviews` times the meta
    model looks at other texts, says what is wrong with their scores and writes a rubric; then it merges these. A reply
    without a rubric changes nothing. The wording is ours. The rubric of now is in the run's checkpoints.

    Args:
        reward: the judge, pointwise or by group.
        meta: the model that rewrites: local, served, or the one in training.
        rubric: the rubric at the start.
        every: iterations between two rewrites.
        reviews: rubrics that are merged.
        shown: texts that a review shows.
        words: largest length that a merged rubric is asked for.
    """

    def __init__(
        self,
        reward: Reward,
        meta: Local | Served | OwnModel,
        rubric: str = "does all that the task asks for, and is correct",
        every: int = 10,
        reviews: int = 3,
        shown: int = 4,
        words: int = 200,
        max_tokens: int = 1024,
    ) -> None:
        if min(every, reviews, shown) < 1:
            raise ValueError("evolving_judge: every, reviews and shown at least 1")
        self.reward: Reward = as_reward(reward)
        self.name = f"evolving_judge({self.reward.name})"
        self.meta: Judge = meta.build(f"{self.name}/meta") if isinstance(meta, Local | Served | OwnModel) else meta
        self.rubric, self.every, self.reviews, self.shown = rubric, every, reviews, shown
        self.words, self.max_tokens = words, max_tokens
        inner = spec_of(self.reward)
        self.spec = Spec(inner.needs | {"text", "prompt", "metadata"}, inner.kind, deterministic=False)
        self.iterations, self.rewrites = 0, 0

    def bind(self, model: Any) -> None:
        """Hand the model in training on."""
        bind(self.reward, model)
        bind(self.meta, model)

    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        return score(self.reward, samples, prompts, [dict(record) | {"criterion": self.rubric} for record in metadata])

    def learn(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> dict[str, float]:
        self.iterations += 1
        if self.iterations % self.every == 0 and (written := self._rewritten(samples, prompts, metadata)):
            self.rubric = written
            self.rewrites += 1
        return {"rewrites": float(self.rewrites), "rubric_words": float(len(self.rubric.split()))}

    def _rewritten(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> str | None:
        """The rubric that follows from an iteration's texts; None where none could be read."""
        random = torch.Generator().manual_seed(self.iterations)
        rows = torch.randperm(len(samples), generator=random).tolist()[: self.reviews * self.shown]
        values = score(self, [samples[i] for i in rows], [prompts[i] for i in rows], [metadata[i] for i in rows]).value
        lines = [
            f"Task: {prompts[i]}\nAnswer: {samples[i]}\nReward: {value:.2f}"
            for i, value in zip(rows, values.tolist(), strict=True)
        ]
        reviews = [lines[at : at + self.shown] for at in range(0, len(lines), self.shown)]
        questions = [REFINE.format(rubric=self.rubric, examples="\n\n".join(review)) for review in reviews]
        read = [rubric for reply in self._asked(questions) if (rubric := read_rubric(reply))]
        if len(read) < 2:
            return read[0] if read else None
        merge = MERGE.format(rubric=self.rubric, examples="\n\n".join(read), words=self.words)
        return read_rubric(self._asked([merge])[0])

    def _asked(self, questions: list[str]) -> list[str]:
        return self.meta.reply([Question((), text) for text in questions], 0.0, self.max_tokens, self.iterations)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return {}, {"rubric": self.rubric, "iterations": self.iterations, "rewrites": self.rewrites}

    def load_state(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        self.rubric = str(state["rubric"])
        self.iterations, self.rewrites = int(state["iterations"]), int(state["rewrites"])


def read_rubric(reply: str) -> str | None:
    """The last rubric of a reply; None without one."""
    found = re.findall(r"<rubric>(.*?)</rubric>", reply.rpartition("</think>")[2], re.DOTALL)
    return found[-1].strip() or None if found else None
