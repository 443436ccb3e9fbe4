"""Rewards by rule: text in the picture, file size, image statistics, detected objects, diversity of a group."""

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL.Image import Image, Resampling
from scipy import ndimage
from torch import Tensor

from rewards.base import RewardError, Scores, Spec, groups
from rewards.clip import load_dual_encoder
from rewards.vision import pick_device


class OCR:
    """How much of the wanted text can be read in the picture: 1 - normalised edit distance, in [0, 1].

    The wanted text is metadata["text"], or what the prompt has in quotation marks. Text that was not asked for counts
    against the picture. Reads with RapidOCR (PP-OCR by onnxruntime; `pip install flowalign[ocr]`), models included.

    Args:
        measure: "similarity", or "exact": 1 where the text is right to the letter, else 0. Both are parts.
        case_sensitive: whether capitals matter; spaces at ends and line breaks never do.
    """

    name = "ocr"
    spec = Spec(frozenset({"image", "prompt", "metadata"}))

    def __init__(self, measure: Literal["similarity", "exact"] = "similarity", case_sensitive: bool = False) -> None:
        try:
            from rapidocr import RapidOCR
        except ImportError as error:
            raise ValueError("'ocr' needs RapidOCR; pip install 'flowalign[ocr]'") from error
        self.measure, self.case_sensitive = measure, case_sensitive
        self.engine = RapidOCR(params={"Global.log_level": "error"})

    def __call__(
        self, images: Sequence[Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> Scores:
        wanted = [self._plain(wanted_text(p, m)) for p, m in zip(prompts, metadata, strict=True)]
        found = [self._plain(self.read(image)) for image in images]
        parts = {
            "similarity": torch.tensor([similarity(a, b) for a, b in zip(found, wanted, strict=True)]),
            "exact": torch.tensor([float(a == b) for a, b in zip(found, wanted, strict=True)]),
        }
        return Scores(parts[self.measure], parts)

    def read(self, image: Image) -> str:
        """All text in a picture, line after line."""
        return " ".join(self.engine(image.convert("RGB")).txts or ())

    def _plain(self, text: str) -> str:
        text = " ".join(text.split())
        return text if self.case_sensitive else text.lower()


def wanted_text(prompt: str, record: Mapping[str, Any]) -> str:
    """metadata["text"], or what the prompt has in quotation marks.

    Raises:
        RewardError: neither.
    """
    if "text" in record:
        return str(record["text"])
    quoted = re.findall(r'"([^"]+)"|“([^”]+)”|(?<!\w)\'(.+?)\'(?!\w)', prompt)
    if not quoted:
        raise RewardError(f"reward 'ocr': the prompt {prompt!r} quotes no text; quote it or put it in metadata 'text'")
    return " ".join("".join(found) for found in quoted)


def similarity(found: str, wanted: str) -> float:
    """1 - edit distance / length of the longer text."""
    return 1 - edit_distance(found, wanted) / max(len(found), len(wanted), 1)


def edit_distance(first: str, second: str) -> int:
    """Letters to insert, delete or replace to make one text of the other (Levenshtein)."""
    row = list(range(len(second) + 1))
    for i, a in enumerate(first, start=1):
        diagonal, row[0] = row[0], i
        for j, b in enumerate(second, start=1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (a != b))
    return row[-1]


class JPEGSize:
    """Size of the picture as a JPEG, in kilobytes: DDPO's (in)compressibility (arXiv 2305.13301).

    Args:
        quality: of the JPEG, 1 to 95.
        prefer: "small" gives minus the size.
    """

    name = "jpeg_size"
    spec = Spec(frozenset({"image"}))

    def __init__(self, quality: int = 95, prefer: Literal["small", "large"] = "small") -> None:
        self.quality, self.sign = quality, -1 if prefer == "small" else 1

    def __call__(
        self, images: Sequence[Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> Scores:
        sizes = []
        for image in images:
            file = io.BytesIO()
            image.convert("RGB").save(file, format="JPEG", quality=self.quality)
            sizes.append(file.tell() / 1000)
        return Scores(self.sign * torch.tensor(sizes))


STATISTICS = ("brightness", "saturation", "colour_entropy", "edge_density", "sharpness")


def image_statistics(image: Image) -> dict[str, float]:
    """Statistics of one picture that say nothing of what it shows.

    brightness: mean luma in [0, 1]. saturation: mean of (max - min) / max of RGB, in [0, 1]. colour_entropy: bits, of
    the histogram of 8 x 8 x 8 colours, in [0, 9]. edge_density: share of pixels where luma changes by more than 0.1 a
    pixel. sharpness: standard deviation of the Laplacian of luma.
    """
    rgb = np.asarray(image.convert("RGB"), dtype=np.float64) / 255
    luma = rgb @ (0.299, 0.587, 0.114)
    high, low = rgb.max(axis=-1), rgb.min(axis=-1)
    bins = (rgb * 255).astype(int) // 32 @ (64, 8, 1)
    share = np.bincount(bins.ravel(), minlength=512) / bins.size
    slope = np.hypot(ndimage.sobel(luma, 0), ndimage.sobel(luma, 1)) / 8
    return {
        "brightness": float(luma.mean()),
        "saturation": float(np.divide(high - low, high, out=np.zeros_like(high), where=high > 0).mean()),
        "colour_entropy": float(-(share[share > 0] * np.log2(share[share > 0])).sum()),
        "edge_density": float((slope > 0.1).mean()),
        "sharpness": float(ndimage.laplace(luma).std()),
    }


class ImageStatistic:
    """One of `image_statistics`, or how near it is to a target.

    Args:
        statistic: brightness, saturation, colour_entropy, edge_density or sharpness.
        target: the value is minus the distance to it; default the statistic itself.
    """

    name = "image_statistic"
    spec = Spec(frozenset({"image"}))

    def __init__(
        self,
        statistic: Literal["brightness", "saturation", "colour_entropy", "edge_density", "sharpness"],
        target: float | None = None,
    ) -> None:
        self.statistic, self.target = statistic, target
        self.name = statistic

    def __call__(
        self, images: Sequence[Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> Scores:
        values = torch.tensor([image_statistics(image)[self.statistic] for image in images])
        return Scores(values if self.target is None else -(values - self.target).abs())


@dataclass(frozen=True)
class Found:
    """A detected object; the box is left, top, right, bottom in pixels."""

    label: str
    score: float
    box: tuple[float, float, float, float]


class Detection:
    """GenEval (arXiv 2310.11513): does a detector find the objects the prompt asks for; in [0, 1].

    The metadata are GenEval's: "include" lists {"class", "count", "color", "position": [relation, index]}, "exclude"
    lists {"class", "count"} of which fewer must be found. For colours a CLIP names the colour of each object.

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
        from transformers import AutoImageProcessor, AutoModelForObjectDetection

        self.threshold, self.counting_threshold = threshold, counting_threshold
        self.strict_weight, self.batch_size, self.device = strict_weight, batch_size, pick_device(device)
        self.processor = AutoImageProcessor.from_pretrained(model)
        self.network = AutoModelForObjectDetection.from_pretrained(model).to(self.device).eval().requires_grad_(False)
        self.colour_model = load_dual_encoder(colour_model, device=device) if colour_model else None

    def __call__(
        self, images: Sequence[Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> Scores:
        found = [
            objects
            for i in range(0, len(images), self.batch_size)
            for objects in self.detect(images[i : i + self.batch_size])
        ]
        soft, strict = [], []
        for image, prompt, record, objects in zip(images, prompts, metadata, found, strict=True):
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
        names = self.network.config.id2label
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
            own = [item for item in objects if item.label == want["class"]]
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
            met.append(sum(item.label == ban["class"] for item in objects) < int(ban.get("count", 1)))
        return met

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


class GroupDiversity:
    """How far a picture is from the others of its group, on average; 0 for one alone.

    Args:
        model: a CLIP of transformers: 1 - cosine of the pictures' embeddings, in [0, 2]. Default none: the root mean
            square difference of thumbnails, in [0, 1].
    """

    name = "group_diversity"
    spec = Spec(frozenset({"image", "prompt"}), kind="group")

    def __init__(self, model: str | None = None, batch_size: int = 32, device: str = "auto") -> None:
        self.encoder = load_dual_encoder(model, device=device) if model else None
        self.batch_size = batch_size

    def __call__(
        self, images: Sequence[Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> Scores:
        values = torch.zeros(len(images))
        for members in groups(prompts, metadata):
            if len(members) > 1:
                distance = self._distances([images[i] for i in members])
                values[members] = distance.sum(dim=1) / (len(members) - 1)
        return Scores(values)

    def _distances(self, images: Sequence[Image]) -> Tensor:
        """[N, N] with zeros on the diagonal."""
        if self.encoder is None:
            return torch.from_numpy(thumbnail_distances(images)).float()
        vectors = []
        for i in range(0, len(images), self.batch_size):
            pixels = self.encoder.preprocess.images(images[i : i + self.batch_size])
            with torch.no_grad():
                vectors.append(self.encoder.images(pixels.to(self.encoder.device, self.encoder.dtype)).cpu())
        unit = torch.cat(vectors)
        return (1 - unit @ unit.T).fill_diagonal_(0)


def thumbnail(image: Image, side: int = 16) -> NDArray[np.float64]:
    """[side, side, 3] in [0, 1]: what is left of a picture from afar."""
    return np.asarray(image.convert("RGB").resize((side, side), Resampling.BOX), dtype=np.float64) / 255


def thumbnail_distances(images: Sequence[Image]) -> NDArray[np.float64]:
    """[N, N] root mean square differences of thumbnails."""
    small = np.stack([thumbnail(image).ravel() for image in images])
    return np.sqrt(((small[:, None] - small[None]) ** 2).mean(axis=-1))
