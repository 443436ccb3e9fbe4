"""Words to be read in pictures."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from flowalign.data import Prompts
from flowalign.evaluation.benchmarks.base import SampleScores, Suite, columns
from rewards import Metadata
from rewards.rules import OCR


class Words(Suite):
    """Text that can be read in pictures, by RapidOCR.

    'containment' is Flow-GRPO's measure (arXiv 2505.05470), which reads with PaddleOCR; its own prompts are
    dataset/ocr/test.txt of github.com/yifan123/flow_grpo. 'similarity' is 1 - edit distance / length of the longer
    text, and 'exact' is right to the letter.

    Args:
        prompts: a file of prompts that quote the words, or a shipped list.
    """

    name = "ocr"
    headline = ("containment",)

    def __init__(self, prompts: str = "words_heldout") -> None:
        self.source = prompts

    @cached_property
    def _reward(self) -> OCR:
        return OCR()

    def prompts(self) -> Prompts:
        return Prompts.read(self.source)

    def score(self, samples: Sequence[Any], prompts: Sequence[str], metadata: Metadata) -> list[SampleScores]:
        rows = columns(self._reward, samples, prompts, metadata)
        return [{name: row[name] for name in ("containment", "similarity", "exact")} for row in rows]

    def settings(self) -> Mapping[str, Any]:
        return {"prompts": self.source}
