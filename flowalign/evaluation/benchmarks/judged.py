"""Helpers of the suites that ask a vision-language model."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from PIL.Image import Image

from rewards.judges.base import Judge, Question
from rewards.judges.local import Local
from rewards.judges.served import Served

QWEN = "Qwen/Qwen3-VL-8B-Instruct"


def described(judge: Local | Served) -> dict[str, Any]:
    """Describe a judge for the results: its model, dtype, and if it is served; no address or device."""
    settings = {name: value for name, value in asdict(judge).items() if name in ("model", "dtype")}
    return {"judge": settings.pop("model"), **settings, "served": isinstance(judge, Served)}


def says_yes(judge: Judge, pairs: Sequence[tuple[Image, str]]) -> list[bool]:
    """True for each picture and question where yes is likelier than no; False if the reply begins with neither."""
    questions = [Question((image,), f"{question} Answer with yes or no.") for image, question in pairs]
    answers = judge.choose(questions, ["yes", "no"])
    return [answer is not None and answer[0] > answer[1] for answer in answers]
