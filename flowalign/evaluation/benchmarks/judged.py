"""What the suites that ask a vision-language model have in common."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from PIL.Image import Image

from rewards.judges.base import Judge, Question
from rewards.judges.local import Local
from rewards.judges.served import Served

QWEN = "Qwen/Qwen3-VL-8B-Instruct"


def described(judge: Local | Served) -> dict[str, Any]:
    """A judge as it stands in the results: the model and how it runs, without where."""
    here = {name: value for name, value in asdict(judge).items() if name in ("model", "dtype")}
    return {"judge": here.pop("model"), **here, "served": isinstance(judge, Served)}


def says_yes(judge: Judge, asked: Sequence[tuple[Image, str]]) -> list[bool]:
    """Whether yes is likelier than no, for each picture and question; no where the reply begins with neither."""
    questions = [Question((image,), f"{question} Answer with yes or no.") for image, question in asked]
    answers = judge.choose(questions, ["yes", "no"])
    return [answer is not None and answer[0] > answer[1] for answer in answers]
