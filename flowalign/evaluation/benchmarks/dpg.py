"""DPG-Bench (arXiv 2403.05135): dense prompts as graphs of questions; one whose parent is answered no counts as no."""

import csv
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from flowalign.data import Prompts
from flowalign.evaluation.benchmarks.base import SampleScores, Suite
from flowalign.evaluation.benchmarks.judged import QWEN, described, says_yes
from flowalign.evaluation.benchmarks.published import Published, located
from rewards import Metadata
from rewards.judges.base import Judge
from rewards.judges.local import Local
from rewards.judges.served import Served

DATA = Published(
    *("TencentQQGYLab/ELLA", "3c228f1dc6c4d3cad0a47493816151a419f14db3", "dpg_bench/dpg_bench.csv"), "Apache-2.0"
)


class DPGBench(Suite):
    """DPG-Bench: 1,065 dense prompts, 4 pictures each; the share of a prompt's questions that are answered yes.

    Args:
        data: a copy of dpg_bench.csv.
        judge: answers yes or no. The published figures are of mPLUG-large (ModelScope); figures of another judge can
            only be compared with each other.
    """

    name = "dpg"
    headline = ("dpg",)

    def __init__(self, data: str | None = None, judge: Local | Served | None = None) -> None:
        self.data, self.judge = data, judge or Local(QWEN, dtype="bfloat16")

    @cached_property
    def _judge(self) -> Judge:
        return self.judge.build(self.name)

    def prompts(self) -> Prompts:
        with open(located(DATA, self.data, "dpg.data"), encoding="utf-8-sig", newline="") as file:
            return graphs(list(csv.DictReader(file)))

    def score(self, samples: Sequence[Any], prompts: Sequence[str], metadata: Metadata) -> list[SampleScores]:
        questions = [
            (image, text) for image, graph in zip(samples, metadata, strict=True) for text in graph["questions"]
        ]
        yes = iter(says_yes(self._judge, questions))
        return [graded([next(yes) for _ in graph["questions"]], graph) for graph in metadata]

    def settings(self) -> Mapping[str, Any]:
        return described(self.judge)


def graphs(rows: Sequence[Mapping[str, str]]) -> Prompts:
    """Prompts, one for each 'item_id', with their questions: numbers, parents' numbers and categories."""
    texts: dict[str, str] = {}
    metadata: dict[str, dict[str, list[Any]]] = {}
    # the authors' reader skips the first row
    for row in rows[1:]:
        texts.setdefault(row["item_id"], row["text"])
        graph = metadata.setdefault(row["item_id"], {"questions": [], "numbers": [], "parents": [], "categories": []})
        graph["questions"].append(row["question_natural_language"])
        graph["numbers"].append(int(row["proposition_id"]))
        graph["parents"].append([int(number) for number in row["dependency"].split(",")])
        graph["categories"].append(row["tuple"].partition("(")[0].partition("-")[0].strip())
    return Prompts(list(texts.values()), list(metadata.values()))


def graded(yes: Sequence[bool], graph: Mapping[str, Any]) -> SampleScores:
    """The share of questions answered yes with all their parents, in the order of the file; categories ignore parents.

    Args:
        graph: 'numbers' of the questions, 'parents' of each (0 is none) and 'categories'.
    """
    counts = dict(zip(graph["numbers"], yes, strict=True))
    for number, parents in zip(graph["numbers"], graph["parents"], strict=True):
        counts[number] = counts[number] and all(counts[parent] for parent in parents if parent)
    scores: SampleScores = {"dpg": sum(counts.values()) / len(counts)}
    for category in dict.fromkeys(graph["categories"]):
        scores[category] = [float(one) for one, name in zip(yes, graph["categories"], strict=True) if name == category]
    return scores
