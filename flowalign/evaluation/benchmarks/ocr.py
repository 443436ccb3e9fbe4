"""Words to be read in pictures."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from flowalign.data import Prompts
from flowalign.evaluation.benchmarks.base import SampleScores, Suite, columns
from rewards import Metadata
from rewards.rules import OCR


class Words(Suite):
    """OCR accuracy: 1 - normalised edit distance of what RapidOCR reads; 'exact' is right to the letter.

    Flow-GRPO (arXiv 2505.05470) measures text rendering so, with PaddleOCR; its own prompts are dataset/ocr/test.txt of
    github.com/yifan123/flow_grpo.

    Args:
        prompts: a file of prompts that quote the words, or a shipped list.
    """

    name = "ocr"
    headline = ("similarity",)

    def __init__(self, prompts: str = "words_heldout") -> None:
        self.source = prompts

    @cached_property
    def _reward(self) -> OCR:
        return OCR()

    def prompts(self) -> Prompts:
        return Prompts.read(self.source)

    def score(self, samples: Sequence[Any], prompts: Sequence[str], metadata: Metadata) -> list[SampleScores]:
        rows = columns(self._reward, samples, prompts, metadata)
        return [{name: row[name] for name in ("similarity", "exact")} for row in rows]

    def settings(self) -> Mapping[str, Any]:
        return {"prompts": self.source}
