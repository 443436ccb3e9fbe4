"""Verifications of solutions, step by step, that several replies of a model agree on, for a verifier to imitate."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rewards.judges.base import Judge, Question
from rewards.judges.template import load_template

VERDICT = re.compile(r"^Step (\d+): ([01])\s*$", re.MULTILINE)
CRITIQUE = """{question}

A verification of it:
{reply}

Is the verification right? Say what it overlooks or gets wrong, then write the whole verification again, with a line \
"Step k: 1" or "Step k: 0" for each step."""


def verdicts(reply: str) -> dict[int, int]:
    """Each step's verdict, by its number; a step that has two different ones has none. Reasoning is not read."""
    found: dict[int, set[int]] = {}
    for number, verdict in VERDICT.findall(reply.rpartition("</think>")[2]):
        found.setdefault(int(number), set()).add(int(verdict))
    return {number: given.pop() for number, given in found.items() if len(given) == 1}


def agreed(replies: Sequence[str]) -> dict[int, int]:
    """The verdict on each step that more replies give than the other one; steps with a tie have none."""
    votes = Counter((number, verdict) for reply in replies for number, verdict in verdicts(reply).items())
    steps = {number for number, _ in votes}
    return {n: int(votes[n, 1] > votes[n, 0]) for n in sorted(steps) if votes[n, 1] != votes[n, 0]}


def verified(
    judge: Judge,
    prompts: Sequence[str],
    texts: Sequence[str],
    samples: int = 8,
    critiques: int = 1,
    temperature: float = 0.7,
    max_tokens: int = 2048,
) -> list[dict[str, Any] | None]:
    """A line for `text_sft` about each solution, {"prompt", "completion", "steps"}: the verification that says what
    most of all say of each step, or None where none does (SPARK, arXiv 2512.03244, after the abstract).

    Args:
        judge: the model that verifies; no right answers are needed.
        samples: verifications of a solution (parallel self-consistency).
        critiques: times that each is criticised and written again (sequential meta-critique).
    """
    template = load_template("text_verify")
    asked = [
        template.text(template.questions[0], prompt, {"text": text})
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    replies: list[list[str]] = [[] for _ in asked]
    for sample in range(samples):
        written = judge.reply([Question((), text) for text in asked], temperature, max_tokens, sample)
        for number in range(critiques):
            questions = [
                Question((), CRITIQUE.format(question=text, reply=reply.rpartition("</think>")[2].strip()))
                for text, reply in zip(asked, written, strict=True)
            ]
            seed = samples * (number + 1) + sample
            again = judge.reply(questions, temperature, max_tokens, seed)
            # what cannot be read changes nothing
            written = [new if verdicts(new) else old for new, old in zip(again, written, strict=True)]
        for row, reply in zip(replies, written, strict=True):
            row.append(reply.rpartition("</think>")[2].strip())
    lines: list[dict[str, Any] | None] = []
    for text, row in zip(asked, replies, strict=True):
        steps = agreed(row)
        same = [reply for reply in row if steps and verdicts(reply) == steps]
        found = {"prompt": text, "completion": same[0], "steps": list(steps.values())} if same else None
        lines.append(found)
    return lines
