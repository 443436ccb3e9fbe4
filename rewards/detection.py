"""GenEval's rules on what a transformers object detector finds (arXiv 2310.11513)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image as PIL
from PIL.Image import Image
from torch.nn import functional as F

from rewards.base import Metadata, RewardError, Scores, Spec
from rewards.clip import load_dual_encoder
from rewards.hub import hub
from rewards.segmentation import instances
from rewards.vision import pick_device


@dataclass(frozen=True)
class DetectedObject:
    """A detected object; the box is left, top, right, bottom in pixels."""

    label: str
    score: float
    box: tuple[float, float, float, float]
    mask: NDArray[np.bool_] | None = None
    """[height, width] the object's pixels, where the detector says."""


# COCO's names and the Pascal VOC ones that RT-DETR's checkpoints use, to GenEval's
GENEVAL_NAMES = {
    "mouse": "computer mouse",
    "remote": "tv remote",
    "keyboard": "computer keyboard",
    "motorbike": "motorcycle",
    "aeroplane": "airplane",
    "sofa": "couch",
    "pottedplant": "potted plant",
    "diningtable": "dining table",
    "tvmonitor": "tv",
    "hair dryer": "hair drier",
}


def geneval_name(label: str) -> str:
    """A class as GenEval calls it."""
    return GENEVAL_NAMES.get(label, label)


@cache
def load_detector(model: str, device: str) -> tuple[Any, Any]:
    """Picture processor and network of a transformers object detector; rewards that name the same one share it."""
    from transformers import AutoConfig, AutoImageProcessor, AutoModelForObjectDetection
    from transformers import Mask2FormerForUniversalSegmentation as Mask2Former

    segments = AutoConfig.from_pretrained(**hub(model)).model_type == "mask2former"
    network: Any = (Mask2Former if segments else AutoModelForObjectDetection).from_pretrained(**hub(model))
    return AutoImageProcessor.from_pretrained(**hub(model)), network.to(pick_device(device)).eval().requires_grad_(
        False
    )


THRESHOLDS = {"mask2former": (0.3, 0.9), "rt_detr": (0.3, 0.6), "rt_detr_v2": (0.3, 0.6)}
"""Least confidence by kind of detector, and for prompts that count: Mask2Former's are GenEval's; RT-DETR's those of its
page in transformers and of its authors' demo (`draw`, 0.6), not measured on GenEval."""
MOST_OBJECTS = 16
"""Objects of a class that GenEval looks at."""


class Detection:
    """GenEval (arXiv 2310.11513): does a detector find the objects the prompt asks for.

    In [0, 1]; with `graded` at most 1, and below 0 where a picture shows far more objects than asked for. The parts
    `strict`, `soft` and `graded` are given in any case.

    The metadata are GenEval's: "include" lists {"class", "count", "color", "position": [relation, index]}, "exclude"
    lists {"class", "count"} of which fewer must be found. For colours a CLIP names the colour of each object, cut out
    of the picture along its mask where the detector gives masks. Classes go by GenEval's names or the detector's; one
    that the detector does not know is an error.

    Args:
        model: folder or hub name of a transformers object detector, or of a Mask2Former for instances.
        threshold: least confidence of an object; `counting_threshold` for prompts tagged "counting". The defaults
            are those of the kind of detector (`THRESHOLDS`); a detector of another kind needs both.
        strict_weight: weight of meeting every requirement; the rest goes to the share of requirements met.
        graded: pay as Flow-GRPO does (`graded`); then there is no `strict_weight`.
        colour_model: CLIP of transformers that names colours; needed only where prompts ask for them.
        batch_size, device: of the detector.
    """

    name = "detection"
    spec = Spec(frozenset({"image", "metadata"}))
    colours = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")

    def __init__(
        self,
        model: str = "PekingU/rtdetr_r50vd_coco_o365",
        threshold: float | None = None,
        counting_threshold: float | None = None,
        strict_weight: float = 1.0,
        graded: bool = False,
        colour_model: str | None = None,
        batch_size: int = 16,
        device: str = "auto",
    ) -> None:
        if graded and strict_weight != 1:
            raise ValueError("'detection' is either graded or has a strict_weight")
        self.graded = graded
        self.strict_weight, self.batch_size, self.device = strict_weight, batch_size, pick_device(device)
        self.processor, self.network = load_detector(model, device)
        kind = self.network.config.model_type
        if kind not in THRESHOLDS and None in (threshold, counting_threshold):
            raise ValueError(f"'detection' knows no thresholds for a {kind}; set threshold and counting_threshold")
        usual, counting = THRESHOLDS.get(kind, (0.0, 0.0))
        self.threshold = usual if threshold is None else threshold
        self.counting_threshold = counting if counting_threshold is None else counting_threshold
        self.colour_model = load_dual_encoder(colour_model, device=device) if colour_model else None

    def __call__(self, samples: Sequence[Image], prompts: Sequence[str], metadata: Metadata) -> Scores:
        found = [
            objects
            for i in range(0, len(samples), self.batch_size)
            for objects in self.detect(samples[i : i + self.batch_size])
        ]
        rows = []
        for image, prompt, record, objects in zip(samples, prompts, metadata, found, strict=True):
            least = self.counting_threshold if record.get("tag") == "counting" else self.threshold
            met, grade = self.judge(image, prompt, record, [item for item in objects if item.score > least])
            rows.append((sum(met) / len(met), all(met), grade))
        columns = torch.tensor(rows, dtype=torch.float32).reshape(-1, 3).unbind(dim=1)
        values = dict(zip(("soft", "strict", "graded"), columns, strict=True))
        both = self.strict_weight * values["strict"] + (1 - self.strict_weight) * values["soft"]
        return Scores(values["graded"] if self.graded else both, values)

    @torch.no_grad()
    def detect(self, images: Sequence[Image]) -> list[list[DetectedObject]]:
        """The objects of each picture above the lower threshold, the surest first."""
        detected = map(self._segmented, images) if self.segments else self._boxed(images)
        return [sorted(objects, key=lambda item: -item.score) for objects in detected]

    @property
    def segments(self) -> bool:
        """Whether the network finds masks."""
        return bool(self.network.config.model_type == "mask2former")

    def _inputs(self, images: Sequence[Image]) -> Any:
        return self.processor(images=[image.convert("RGB") for image in images], return_tensors="pt").to(self.device)

    def _boxed(self, images: Sequence[Image]) -> list[list[DetectedObject]]:
        results = self.processor.post_process_object_detection(
            self.network(**self._inputs(images)),
            threshold=min(self.threshold, self.counting_threshold),
            target_sizes=[(image.height, image.width) for image in images],
        )
        return [
            [
                DetectedObject(self._name(label), score, tuple(box))
                for label, score, box in zip(
                    result["labels"].tolist(), result["scores"].tolist(), result["boxes"].tolist(), strict=True
                )
            ]
            for result in results
        ]

    def _segmented(self, image: Image) -> list[DetectedObject]:
        """Objects of one picture alone: the padding of a batch, which the network sees, would change them."""
        inputs, least = self._inputs([image]), min(self.threshold, self.counting_threshold)
        output, seen = self.network(**inputs), inputs["pixel_mask"][0]
        inner = (int(seen.any(dim=1).sum()), int(seen.any(dim=0).sum()))
        queries = output.class_queries_logits[0].float(), output.masks_queries_logits[0].float()
        columns = instances(*queries, tuple(seen.shape), inner, (image.height, image.width))
        rows = zip(*(column.cpu() for column in columns), strict=True)
        return [
            DetectedObject(self._name(int(label)), float(score), tuple(box.tolist()), mask.numpy())
            for label, score, box, mask in rows
            if score > least
        ]

    def _name(self, label: int) -> str:
        return geneval_name(self.network.config.id2label[label])

    def judge(
        self, image: Image, prompt: str, record: Mapping[str, Any], objects: Sequence[DetectedObject]
    ) -> tuple[list[bool], float]:
        """Whether each thing that the metadata ask for is met, and the graded reward."""
        if "include" not in record:
            raise RewardError(f"reward 'detection': the metadata of the prompt {prompt!r} have no 'include'")
        for wanted in (*record["include"], *record.get("exclude", ())):
            self._check_known(wanted["class"], prompt)
        colour = self._colours(image, prompt)
        return requirements(record, objects, colour), graded(record, objects, colour)

    def _check_known(self, wanted: str, prompt: str) -> None:
        """Refuse a class that the detector does not know, which would score 0 whatever the picture shows."""
        if geneval_name(wanted) not in map(geneval_name, self.network.config.id2label.values()):
            raise RewardError(f"reward 'detection': the detector knows no '{wanted}', which {prompt!r} asks for")

    def _colours(self, image: Image, prompt: str) -> Callable[[DetectedObject], str]:
        """Names the colours of the objects of a picture, each once."""
        named: dict[int, str] = {}

        def colour(item: DetectedObject) -> str:
            if id(item) not in named:
                named[id(item)] = self._colour(image, item, prompt)
            return named[id(item)]

        return colour

    @torch.no_grad()
    def _colour(self, image: Image, item: DetectedObject, prompt: str) -> str:
        """The colour that a CLIP sees: each is the mean of GenEval's three wordings."""
        encoder = self.colour_model
        if encoder is None:
            raise RewardError(f"reward 'detection': the prompt {prompt!r} asks for a colour; set colour_model")
        pixels = encoder.preprocess.images([cut_out(image, item)]).to(encoder.device, encoder.dtype)
        wordings = [
            f"a photo of a {words}"
            for colour in self.colours
            for words in (f"{colour} {item.label}", f"{colour}-colored {item.label}", f"{colour} object")
        ]
        names = F.normalize(encoder.texts(wordings).unflatten(0, (len(self.colours), 3)).mean(dim=1), dim=-1)
        return self.colours[int((names @ encoder.images(pixels)[0]).argmax())]


def cut_out(image: Image, item: DetectedObject) -> Image:
    """The box of an object; where its mask is known, on grey (#999) as GenEval shows it to its CLIP."""
    if item.mask is not None:
        grey = PIL.new("RGB", image.size, "#999")
        image = PIL.composite(image.convert("RGB"), grey, PIL.fromarray(item.mask))
    left, top, right, bottom = (round(side) for side in item.box)
    return image.crop((left, top, right, bottom))


def requirements(
    record: Mapping[str, Any], objects: Sequence[DetectedObject], colour: Callable[[DetectedObject], str]
) -> list[bool]:
    """Whether each thing that GenEval's metadata ask for is met; the picture is right where all are.

    Args:
        record: "include" and "exclude", as of `Detection`.
        objects: those sure enough, the surest first: of each class as many as asked for are looked at.
        colour: names an object's colour.
    """
    met: list[bool] = []
    chosen: list[list[DetectedObject]] = []
    for want in record["include"]:
        name, count = geneval_name(want["class"]), int(want.get("count", 1))
        matching = [item for item in objects if item.label == name]
        met.append(len(matching) == count if record.get("tag") == "counting" else len(matching) >= count)
        matching = matching[:count]
        if "color" in want:
            matching = [item for item in matching if colour(item) == want["color"]]
            met.append(len(matching) >= count)
        if want.get("position"):
            relation, other = want["position"]
            pairs = [stands(relation, a, b) for a in matching for b in chosen[other]]
            met.append(bool(pairs) and all(pairs))
        chosen.append(matching)
    for ban in record.get("exclude", ()):
        name = geneval_name(ban["class"])
        met.append(sum(item.label == name for item in objects) < int(ban.get("count", 1)))
    return met


def graded(
    record: Mapping[str, Any], objects: Sequence[DetectedObject], colour: Callable[[DetectedObject], str]
) -> float:
    """Flow-GRPO's graded reward: the mean over the prompt's requirements, at most 1 (arXiv 2505.05470).

    A count pays 1 - |asked - found| / asked, which is below 0 for more than twice as many. A colour pays the share of
    objects that have it, and a place pays 1. Both are looked at only where the count is right, else they pay 0. A
    wrong place pays 0 and 1, as in their code (`evaluate_reward` in github.com/yifan123/reward-server). "exclude" is
    not read.

    Args:
        record, objects, colour: as of `requirements`.
    """
    paid: list[float] = []
    complete: list[list[DetectedObject]] = []
    for want in record["include"]:
        name, count = geneval_name(want["class"]), int(want.get("count", 1))
        matching = [item for item in objects if item.label == name][:MOST_OBJECTS]
        paid.append(1 - abs(count - len(matching)) / count)
        right = len(matching) == count
        if not right and ("color" in want or want.get("position")):
            paid.append(0.0)
        if right and "color" in want:
            share = sum(colour(item) == want["color"] for item in matching) / count
            paid.append(share)
            right = share == 1
        if right and want.get("position"):
            relation, other = want["position"]
            pairs = [stands(relation, a, b) for a in matching for b in complete[other]]
            right = bool(pairs) and all(pairs)
            paid += [1.0] if right else [0.0, 1.0] if pairs else [0.0]
        complete.append(matching if right else [])
    return sum(paid) / len(paid)


def stands(relation: str, first: DetectedObject, second: DetectedObject) -> bool:
    """Whether `first` is "left of", "right of", "above" or "below" `second`, by GenEval's rule.

    Along each axis the distance of the centres counts beyond a tenth of the two sizes, and must then be more than
    half of the whole distance.
    """
    a, b = (np.array(item.box).reshape(2, 2) for item in (first, second))
    offset = a.mean(axis=0) - b.mean(axis=0)
    margin = 0.1 * ((a[1] - a[0]) + (b[1] - b[0]))
    beyond = np.sign(offset) * np.maximum(np.abs(offset) - margin, 0)
    if (np.abs(beyond) < 1e-3).all():
        return False
    dx, dy = beyond / np.linalg.norm(offset)
    return {"left of": dx < -0.5, "right of": dx > 0.5, "above": dy < -0.5, "below": dy > 0.5}[relation]
