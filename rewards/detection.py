"""GenEval's rules on what a transformers object detector finds (arXiv 2310.11513)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from PIL.Image import Image

from rewards.base import Metadata, RewardError, Scores, Spec
from rewards.clip import load_dual_encoder
from rewards.vision import pick_device


@dataclass(frozen=True)
class Found:
    """A detected object; the box is left, top, right, bottom in pixels."""

    label: str
    score: float
    box: tuple[float, float, float, float]


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
    from transformers import AutoImageProcessor, AutoModelForObjectDetection

    network = AutoModelForObjectDetection.from_pretrained(model).to(pick_device(device)).eval().requires_grad_(False)
    return AutoImageProcessor.from_pretrained(model), network


class Detection:
    """GenEval (arXiv 2310.11513): does a detector find the objects the prompt asks for; in [0, 1].

    The metadata are GenEval's: "include" lists {"class", "count", "color", "position": [relation, index]}, "exclude"
    lists {"class", "count"} of which fewer must be found. For colours a CLIP names the colour of each object.
    Classes go by GenEval's names or the detector's; one that the detector does not know is an error.

    Args:
        model: folder or hub name of a transformers object detector.
        threshold: least confidence of an object; `counting_threshold` for prompts tagged "counting".
        strict_weight: weight of meeting every requirement; the rest goes to the share of requirements met.
        colour_model: CLIP of transformers that names colours; needed only where prompts ask for them.
        batch_size, device: of the detector.
    """

    name = "detection"
    spec = Spec(frozenset({"image", "metadata"}))
    colours = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")

    def __init__(
        self,
        model: str = "PekingU/rtdetr_r50vd_coco_o365",
        threshold: float = 0.3,
        counting_threshold: float = 0.9,
        strict_weight: float = 1.0,
        colour_model: str | None = None,
        batch_size: int = 16,
        device: str = "auto",
    ) -> None:
        self.threshold, self.counting_threshold = threshold, counting_threshold
        self.strict_weight, self.batch_size, self.device = strict_weight, batch_size, pick_device(device)
        self.processor, self.network = load_detector(model, device)
        self.colour_model = load_dual_encoder(colour_model, device=device) if colour_model else None

    def __call__(self, samples: Sequence[Image], prompts: Sequence[str], metadata: Metadata) -> Scores:
        found = [
            objects
            for i in range(0, len(samples), self.batch_size)
            for objects in self.detect(samples[i : i + self.batch_size])
        ]
        soft, strict = [], []
        for image, prompt, record, objects in zip(samples, prompts, metadata, found, strict=True):
            least = self.counting_threshold if record.get("tag") == "counting" else self.threshold
            met = self.requirements(image, prompt, record, [o for o in objects if o.score > least])
            soft.append(sum(met) / len(met))
            strict.append(float(all(met)))
        parts = {"soft": torch.tensor(soft), "strict": torch.tensor(strict)}
        return Scores(self.strict_weight * parts["strict"] + (1 - self.strict_weight) * parts["soft"], parts)

    @torch.no_grad()
    def detect(self, images: Sequence[Image]) -> list[list[Found]]:
        """The objects of each picture above the lower threshold, the surest first."""
        pictures = [image.convert("RGB") for image in images]
        inputs = self.processor(images=pictures, return_tensors="pt").to(self.device)
        results = self.processor.post_process_object_detection(
            self.network(**inputs),
            threshold=min(self.threshold, self.counting_threshold),
            target_sizes=[(image.height, image.width) for image in images],
        )
        names = {number: geneval_name(label) for number, label in self.network.config.id2label.items()}
        return [
            sorted(
                (
                    Found(names[label], score, tuple(box))
                    for label, score, box in zip(
                        result["labels"].tolist(), result["scores"].tolist(), result["boxes"].tolist(), strict=True
                    )
                ),
                key=lambda item: -item.score,
            )
            for result in results
        ]

    def requirements(
        self, image: Image, prompt: str, record: Mapping[str, Any], objects: Sequence[Found]
    ) -> list[bool]:
        """Whether each thing that the metadata ask for is met."""
        if "include" not in record:
            raise RewardError(f"reward 'detection': the metadata of the prompt {prompt!r} have no 'include'")
        met: list[bool] = []
        chosen: list[list[Found]] = []
        for want in record["include"]:
            name = self._known(want["class"], prompt)
            own = [item for item in objects if item.label == name]
            count = int(want.get("count", 1))
            if record.get("tag") == "counting":
                met.append(len(own) == count)
            else:
                met.append(len(own) >= count)
            own = own[:count]
            if "color" in want:
                own = [item for item in own if self._colour(image, item, prompt) == want["color"]]
                met.append(len(own) >= count)
            if want.get("position"):
                relation, other = want["position"]
                met.append(any(stands(relation, a, b) for a in own for b in chosen[other]))
            chosen.append(own)
        for ban in record.get("exclude", ()):
            name = self._known(ban["class"], prompt)
            met.append(sum(item.label == name for item in objects) < int(ban.get("count", 1)))
        return met

    def _known(self, wanted: str, prompt: str) -> str:
        """The class as found objects are labelled; an unknown one would score 0 whatever the picture shows."""
        name = geneval_name(wanted)
        if name not in map(geneval_name, self.network.config.id2label.values()):
            raise RewardError(f"reward 'detection': the detector knows no '{wanted}', which {prompt!r} asks for")
        return name

    def _colour(self, image: Image, item: Found, prompt: str) -> str:
        encoder = self.colour_model
        if encoder is None:
            raise RewardError(f"reward 'detection': the prompt {prompt!r} asks for a colour; set colour_model")
        left, top, right, bottom = (round(side) for side in item.box)
        crop = image.crop((left, top, right, bottom))
        pixels = encoder.preprocess.images([crop]).to(encoder.device, encoder.dtype)
        names = encoder.texts([f"a photo of a {colour} {item.label}" for colour in self.colours])
        with torch.no_grad():
            return self.colours[int((names @ encoder.images(pixels)[0]).argmax())]


def stands(relation: str, first: Found, second: Found) -> bool:
    """Whether `first` is "left of", "right of", "above" or "below" `second`, by GenEval's rule.

    Along each axis the distance of the centres counts beyond a tenth of the two sizes, and must then be more than
    half of the whole distance.
    """
    a, b = (np.array(item.box).reshape(2, 2) for item in (first, second))
    offset = a.mean(axis=0) - b.mean(axis=0)
    margin = 0.1 * ((a[1] - a[0]) + (b[1] - b[0]))
    beyond = np.sign(offset) * np.maximum(np.abs(offset) - margin, 0)
    dx, dy = beyond / max(float(np.linalg.norm(offset)), 1e-9)
    return {"left of": dx < -0.5, "right of": dx > 0.5, "above": dy < -0.5, "below": dy > 0.5}[relation]
