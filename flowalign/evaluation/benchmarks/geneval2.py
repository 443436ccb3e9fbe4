"""GenEval 2 (arXiv 2512.16853): Soft-TIFA, the probability that a judge gives each right answer about a picture."""

import json
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from flowalign.data import Prompts
from flowalign.evaluation.benchmarks.base import SampleScores, Suite
from flowalign.evaluation.benchmarks.judged import QWEN, described
from flowalign.evaluation.benchmarks.published import Published, located
from rewards import Metadata
from rewards.judges.base import Question
from rewards.judges.local import Local, LocalJudge

DATA = Published(
    *("facebookresearch/GenEval2", "a6e82d2289e8d418f27f0adee77908b07060eea3", "geneval2_data.jsonl"),
    *("CC BY-NC 4.0", "09233adbc9f877fba205f1a20efa4a8640e7e62a91dfd55893562bed8a928e43"),
)
DIGITS = dict(zip("one two three four five six seven eight nine ten".split(), map(str, range(1, 11)), strict=True))


class GenEval2(Suite):
    """GenEval 2: 800 prompts, a picture each; Soft-TIFA's geometric mean over a prompt's questions, and by skill.

    Args:
        data: a copy of geneval2_data.jsonl.
        judge: a local model, since all of its first token's probabilities are needed; the published figures are of
            Qwen3-VL-8B-Instruct.
    """

    name = "geneval2"
    pictures = 1
    headline = ("soft_tifa_gm",)

    def __init__(self, data: str | None = None, judge: Local | None = None) -> None:
        self.data, self.local = data, judge or Local(QWEN, dtype="bfloat16")

    @cached_property
    def _judge(self) -> LocalJudge:
        judge = self.local.build(self.name)
        assert isinstance(judge, LocalJudge), "answers in words are what a cache keeps"
        return judge

    def prompts(self) -> Prompts:
        path = located(DATA, self.data, "geneval2.data")
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return Prompts([record["prompt"] for record in records], records)

    def score(self, samples: Sequence[Any], prompts: Sequence[str], metadata: Metadata) -> list[SampleScores]:
        entries = [
            (image, *pair) for image, record in zip(samples, metadata, strict=True) for pair in record["vqa_list"]
        ]
        questions = [Question((image,), f"{question} Answer in one word.") for image, question, _ in entries]
        probabilities = iter(
            self._judge.begins(questions, [answers(question, answer) for _, question, answer in entries])
        )
        return [soft_tifa([next(probabilities) for _ in record["vqa_list"]], record["skills"]) for record in metadata]

    def settings(self) -> Mapping[str, Any]:
        return described(self.local)


def answers(question: str, answer: str) -> list[str]:
    """The spellings that count as right: a number in words and in digits, else yes."""
    if not question.startswith("How many"):
        return ["Yes", "yes", " yes", " Yes"]
    digit = DIGITS.get(answer, "other")
    return [answer, answer.capitalize(), f" {answer}", f" {answer.capitalize()}", digit, f" {digit}"]


def soft_tifa(sure: Sequence[float], skills: Sequence[str]) -> SampleScores:
    """The arithmetic and the geometric mean of a prompt's probabilities, and each skill's probabilities."""
    geometric = math.exp(sum(map(math.log, sure)) / len(sure)) if min(sure) > 0 else 0.0
    scores: SampleScores = {"soft_tifa_gm": geometric, "soft_tifa_am": sum(sure) / len(sure)}
    for skill in dict.fromkeys(skills):
        scores[skill] = [value for value, name in zip(sure, skills, strict=True) if name == skill]
    return scores
