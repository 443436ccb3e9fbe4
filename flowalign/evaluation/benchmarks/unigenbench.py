"""UniGenBench (arXiv 2508.20751): a large vision-language model judges each test point of a prompt."""

import ast
import csv
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from flowalign.data import Prompts
from flowalign.errors import ConfigError
from flowalign.evaluation.benchmarks.base import SampleScores, Suite
from flowalign.evaluation.benchmarks.judged import described
from flowalign.evaluation.benchmarks.published import Published, located
from rewards import Metadata
from rewards.judges.base import Judge, Question
from rewards.judges.local import Local
from rewards.judges.served import Served

REPOSITORY = ("CodeGoat24/UniGenBench", "49d0bcebb0b9418d975d3957c2fee10f34811d14")
LICENCE = "Tencent's, see License.txt there"
DATA = Published(
    *(*REPOSITORY, "data/test_prompts_en.csv", LICENCE),
    "f82e8ce854985ef963378eaaf8ce12f2e3a57dd6f53e1aea84a61fbeadfe4459",
)
WORDING = Published(
    *(*REPOSITORY, "eval/src/eval_common.py", LICENCE),
    "c26c91cc65be7ed4234f07a310eed8812888c83b8b83b1934b77b1f48c463eb9",
)
PRIMARY = (
    *("Relationship", "Compound", "Attribute", "Entity Layout", "Action", "Grammar", "World Knowledge", "Style"),
    *("Text Generation", "Logical Reasoning"),
)


class UniGenBench(Suite):
    """UniGenBench: 600 English prompts, 4 pictures each; the mean over its ten dimensions of the points passed.

    The question is the authors' own, read from their eval_common.py, which is never run.

    Args:
        judge: the judge's model; the published figures are of Gemini 2.5 Pro, or of the authors' served judge.
        data, wording: copies of test_prompts_en.csv and eval_common.py.
        max_tokens: most tokens of the judge's analysis.
    """

    name = "unigenbench"
    headline = PRIMARY

    def __init__(
        self,
        judge: Served | Local | None = None,
        data: str | None = None,
        wording: str | None = None,
        max_tokens: int = 4096,
    ) -> None:
        if judge is None:
            raise ConfigError(
                "unigenbench needs a judge: --set unigenbench.judge='{url: http://127.0.0.1:8000/v1, model: NAME}'"
            )
        self.judge, self.data, self.wording, self.max_tokens = judge, data, wording, max_tokens

    @cached_property
    def _judge(self) -> Judge:
        return self.judge.build(self.name)

    @cached_property
    def _texts(self) -> dict[str, Any]:
        return constants(located(WORDING, self.wording, "unigenbench.wording"))

    def prompts(self) -> Prompts:
        with open(located(DATA, self.data, "unigenbench.data"), encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        # read now, so that a missing file is told before a model loads
        assert self._texts
        return Prompts([row["prompt_en"] for row in rows], [json.loads(row["sub_dims_en"]) for row in rows])

    def score(self, samples: Sequence[Any], prompts: Sequence[str], metadata: Metadata) -> list[SampleScores]:
        questions = [
            Question((image,), question(self._texts, prompt, record["Testpoints"], record["Testpoint Description"]))
            for image, prompt, record in zip(samples, prompts, metadata, strict=True)
        ]
        replies = self._judge.reply(questions, 0.0, self.max_tokens, 0)
        return [graded(reply, record["Testpoints"]) for reply, record in zip(replies, metadata, strict=True)]

    def settings(self) -> Mapping[str, Any]:
        return described(self.judge) | {"max_tokens": self.max_tokens}


def constants(path: Path) -> dict[str, Any]:
    """Constants of a Python file: names that it assigns a literal to. None of its code is run."""
    values = {}
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            try:
                values[statement.targets[0].id] = ast.literal_eval(statement.value)
            except ValueError:
                continue
    lacking = {"SYSTEM_PROMPT_EN_TEMPLATE", "EXPLANATION_DICT_EN"} - values.keys()
    if lacking:
        raise ConfigError(f"unigenbench.wording: {path} has no {' and no '.join(sorted(lacking))}")
    return values


def question(texts: Mapping[str, Any], prompt: str, points: Sequence[str], descriptions: Sequence[str]) -> str:
    """The authors' question about a picture.

    Args:
        texts: their file's constants.
        points: names of the test points.
        descriptions: what each point means for this prompt.
    """
    explained = "".join(f"\n{point}: {texts['EXPLANATION_DICT_EN'][point]}" for point in points)
    here = "".join(f"\n{point}: {text}" for point, text in zip(points, descriptions, strict=True))
    filled: str = texts["SYSTEM_PROMPT_EN_TEMPLATE"].format(
        prompt=prompt,
        testpoint=list(points),
        # spelt as in the authors' file
        explanation=f"Checkpoints Defination:「{explained}\n」",
        test_explanation=f"Checkpoints Description:「{here}\n」",
    )
    return filled


def graded(reply: str, points: Sequence[str]) -> SampleScores:
    """1 or 0 for each point, by its name and its dimension; a reply that cannot be read only counts as 'unparsed'."""
    tag = re.search(r"<score>(.*?)</score>", reply, re.DOTALL)
    try:
        marks = ast.literal_eval(tag[1].strip()) if tag else None
    except (ValueError, SyntaxError):
        marks = None
    if not isinstance(marks, list) or len(marks) != len(points):
        return {"unparsed": 1.0}
    scores: dict[str, list[float]] = {}
    for point, mark in zip(points, marks, strict=True):
        for name in dict.fromkeys((point.partition("-")[0].strip(), point)):
            scores.setdefault(name, []).append(float(mark == 1))
    return {**scores, "unparsed": 0.0}
