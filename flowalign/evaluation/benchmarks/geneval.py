"""GenEval (arXiv 2310.11513): objects, counts, colours and places, found by a detector.

The prompts are drawn by the published rules (prompts/create_prompts.py of github.com/djghosh13/geneval, MIT, seed 43)
and are its 553, with its metadata.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from flowalign.data import Prompts
from flowalign.data.geneval import CLASSES, COLOURS, NUMBERS, TASKS
from flowalign.evaluation.benchmarks.base import SampleScores, Suite, columns
from rewards import Metadata
from rewards.detection import Detection

SEED, EACH = 43, 100
"""Seed of the published list, and the number of prompts drawn of each task but the first."""
RELATIONS = ("left of", "right of", "above", "below")


class GenEval(Suite):
    """GenEval: 553 prompts, 4 pictures each, its rules; the mean over its six tasks of the share that is right.

    Args:
        detector: Mask2Former or another detector of transformers. The official evaluation runs Mask2Former with a
            Swin-S backbone; figures of other detectors cannot be compared with published ones.
        colour_model: the CLIP model that names colours.
        device: device of both networks.
    """

    name = "geneval"
    headline = TASKS

    def __init__(
        self,
        detector: str = "facebook/mask2former-swin-small-coco-instance",
        colour_model: str = "openai/clip-vit-large-patch14",
        device: str = "auto",
    ) -> None:
        self.detector, self.colour_model, self.device = detector, colour_model, device

    @cached_property
    def _reward(self) -> Detection:
        return Detection(self.detector, colour_model=self.colour_model, device=self.device)

    def prompts(self) -> Prompts:
        records = published()
        metadata = [record | {"category": record["tag"]} for record in records]
        return Prompts([record["prompt"] for record in records], metadata)

    def score(self, samples: Sequence[Any], prompts: Sequence[str], metadata: Metadata) -> list[SampleScores]:
        rows = columns(self._reward, samples, prompts, metadata)
        return [{record["tag"]: row["strict"]} for row, record in zip(rows, metadata, strict=True)]

    def settings(self) -> Mapping[str, Any]:
        return {"detector": self.detector, "colour_model": self.colour_model}


def published() -> list[dict[str, Any]]:
    """The official list: prompts with 'tag', 'include' and 'exclude', equal ones once."""
    drawn = _drawn(np.random.default_rng(SEED))
    return list({json.dumps(record, sort_keys=True): record for record in drawn}.values())


def _drawn(rng: np.random.Generator) -> Iterator[dict[str, Any]]:
    """The records in the published order, from the same draws of the generator as the published code's."""
    for i in rng.choice(len(CLASSES), size=len(CLASSES), replace=False):
        yield _record("single_object", _article(CLASSES[i]), [_one(CLASSES[i])])
    for _ in range(EACH):
        a, b = _two(rng)
        yield _record("two_object", f"{_article(a)} and {_article(b)}", [_one(a), _one(b)])
    for _ in range(EACH):
        name, count = CLASSES[rng.choice(len(CLASSES))], int(rng.integers(2, 4, endpoint=True))
        record = _record("counting", f"{NUMBERS[count]} {name}{'es' if name[-1] == 's' else 's'}", [_one(name, count)])
        yield record | {"exclude": [_one(name, count + 1)]}
    for _ in range(EACH):
        # the first class is a person, and people get no colour
        name = CLASSES[rng.choice(len(CLASSES) - 1) + 1]
        colour = COLOURS[rng.choice(len(COLOURS))]
        yield _record("colors", f"{_article(colour)} {name}", [_one(name) | {"color": colour}])
    for _ in range(EACH):
        a, b = _two(rng)
        relation = RELATIONS[rng.choice(len(RELATIONS))]
        where = _one(a) | {"position": [relation, 0]}
        yield _record("position", f"{_article(a)} {relation} {_article(b)}", [_one(b), where])
    for _ in range(EACH):
        names = [CLASSES[i + 1] for i in rng.choice(len(CLASSES) - 1, size=2, replace=False)]
        colours = [COLOURS[i] for i in rng.choice(len(COLOURS), size=2, replace=False)]
        pairs = list(zip(names, colours, strict=True))
        text = " and ".join(f"{_article(colour)} {name}" for name, colour in pairs)
        yield _record("color_attr", text, [_one(name) | {"color": colour} for name, colour in pairs])


def _two(rng: np.random.Generator) -> tuple[str, str]:
    a, b = rng.choice(len(CLASSES), size=2, replace=False)
    return CLASSES[a], CLASSES[b]


def _one(name: str, count: int = 1) -> dict[str, Any]:
    return {"class": name, "count": count}


def _record(tag: str, text: str, include: list[dict[str, Any]]) -> dict[str, Any]:
    return {"tag": tag, "include": include, "prompt": f"a photo of {text}"}


def _article(words: str) -> str:
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"
