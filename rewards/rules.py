"""Rewards by rule: text in the picture, file size, image statistics, diversity of a group."""

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL.Image import Image, Resampling
from scipy import ndimage
from scipy.spatial.distance import cdist
from torch import Tensor

from rewards.base import Metadata, RewardError, Scores, Spec, groups
from rewards.clip import load_dual_encoder


class OCR:
    """Share of the wanted text that can be read in the picture, in [0, 1].

    The wanted text is metadata["text"], or what the prompt has in quotation marks. Reads with RapidOCR (PP-OCR by
    onnxruntime; `pip install flowalign[ocr]`), models included.

    Args:
        measure: "similarity" (`similarity`, where text that was not asked for counts against the picture),
            "containment" (`containment`, which Flow-GRPO trains on), or "exact": 1 where the text is right to the
            letter, else 0. All are parts.
        case_sensitive: whether capitals matter; spaces at ends and line breaks never do.
    """

    name = "ocr"
    spec = Spec(frozenset({"image", "prompt", "metadata"}), off_device=True)

    def __init__(
        self,
        measure: Literal["similarity", "containment", "exact"] = "similarity",
        case_sensitive: bool = False,
    ) -> None:
        try:
            from rapidocr import RapidOCR
        except ImportError as error:
            raise ValueError("'ocr' needs RapidOCR; pip install 'flowalign[ocr]'") from error
        self.measure, self.case_sensitive = measure, case_sensitive
        self.engine = RapidOCR(params={"Global.log_level": "error"})

    def __call__(self, samples: Sequence[Image], prompts: Sequence[str], metadata: Metadata) -> Scores:
        wanted = [self._plain(wanted_text(p, m)) for p, m in zip(prompts, metadata, strict=True)]
        read = [self._plain(self.read(image)) for image in samples]
        pairs = list(zip(read, wanted, strict=True))
        measures = {
            "similarity": torch.tensor([similarity(a, b) for a, b in pairs]),
            "containment": torch.tensor([containment(a, b) for a, b in pairs]),
            "exact": torch.tensor([float(a == b) for a, b in pairs]),
        }
        return Scores(measures[self.measure], measures)

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
    return " ".join("".join(match) for match in quoted)


def similarity(found: str, wanted: str) -> float:
    """1 - edit distance / length of the longer text."""
    return 1 - edit_distance(found, wanted) / max(len(found), len(wanted), 1)


def containment(found: str, wanted: str) -> float:
    """Flow-GRPO's reward (arXiv 2505.05470, flow_grpo/ocr.py): 1 where the wanted text is part of what was found, else
    1 - edit distance / length of the wanted text, at least 0. Spaces do not count."""
    found, wanted = found.replace(" ", ""), wanted.replace(" ", "")
    if wanted in found:
        return 1.0
    return 1 - min(edit_distance(found, wanted), len(wanted)) / len(wanted)


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
        quality: quality of the JPEG, 1 to 95.
        prefer: "small" gives minus the size.
    """

    name = "jpeg_size"
    spec = Spec(frozenset({"image"}))

    def __init__(self, quality: int = 95, prefer: Literal["small", "large"] = "small") -> None:
        self.quality, self.sign = quality, -1 if prefer == "small" else 1

    def __call__(self, samples: Sequence[Image], prompts: Sequence[str], metadata: Metadata) -> Scores:
        sizes = []
        for image in samples:
            file = io.BytesIO()
            image.convert("RGB").save(file, format="JPEG", quality=self.quality)
            sizes.append(file.tell() / 1000)
        return Scores(self.sign * torch.tensor(sizes))


STATISTICS = ("brightness", "saturation", "colour_entropy", "edge_density", "sharpness", "grid")
PERIODS = (8, 16)
"""Periods of grids in pixels: patches of most latent models."""


def image_statistics(image: Image) -> dict[str, float]:
    """Statistics of one picture that say nothing of what it shows.

    brightness: mean luma in [0, 1]. saturation: mean of (max - min) / max of RGB, in [0, 1]. colour_entropy: bits, of
    the histogram of 8 x 8 x 8 colours, in [0, 9]. edge_density: share of pixels where luma changes by more than 0.1 a
    pixel. sharpness: standard deviation of the Laplacian of luma. grid: see `grid`.
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
        "grid": grid(luma),
    }


def grid(luma: NDArray[np.float64]) -> float:
    """How far lines or seams that repeat every 8 or 16 pixels stand out: about 0 without, above 1 if plainly visible.

    The steps of luma from pixel to pixel have a median at each column, and at each row; the power spectrum of these
    medians has peaks at the multiples of 1/8 or 1/16 cycles a pixel where there is a grid (after Wang, Bovik and Evans,
    Blind measurement of blocking artifacts, ICIP 2000). The value is the log10 of a peak over its neighbours, mean over
    peaks, rows and columns, the larger one of both periods; 0 of pictures with a side below 32 pixels.

    Args:
        luma: [height, width] in [0, 1].
    """
    if min(luma.shape) < 2 * max(PERIODS):
        return 0.0
    spectra = [_step_spectrum(luma), _step_spectrum(luma.T)]
    return max(float(np.mean([_peaks(spectrum, period) for spectrum in spectra])) for period in PERIODS)


def _step_spectrum(luma: NDArray[np.float64]) -> NDArray[np.float64]:
    """log10 of the power spectrum of the median steps between columns, over a whole number of periods."""
    steps = np.median(np.abs(np.diff(luma, axis=1)), axis=0)
    width = luma.shape[1] // max(PERIODS) * max(PERIODS)
    # W columns have W - 1 steps between them
    steps = np.append(steps, steps.mean())[:width]
    # the floor is far below steps of one level of 255
    return np.log10(np.abs(np.fft.rfft(steps - steps.mean())) ** 2 + 1e-6)


def _peaks(spectrum: NDArray[np.float64], period: int) -> float:
    """Mean height of the spectrum at the multiples of 1 / period cycles a pixel, above up to 8 neighbours a side."""
    spacing = 2 * (len(spectrum) - 1) // period
    reach = max(1, min(spacing // 2, 8))
    heights = []
    for peak in range(spacing, len(spectrum) - reach, spacing):
        beside = [*spectrum[peak - reach : peak], *spectrum[peak + 1 : peak + 1 + reach]]
        heights.append(spectrum[peak] - np.mean(beside))
    return float(np.mean(heights))


class ImageStatistic:
    """One of `image_statistics`, or how near it is to a target.

    Args:
        statistic: brightness, saturation, colour_entropy, edge_density, sharpness or grid.
        target: the value is minus the distance to it; default the statistic itself.
    """

    name = "image_statistic"
    spec = Spec(frozenset({"image"}))

    def __init__(
        self,
        statistic: Literal["brightness", "saturation", "colour_entropy", "edge_density", "sharpness", "grid"],
        target: float | None = None,
    ) -> None:
        self.statistic, self.target = statistic, target
        self.name = statistic

    def __call__(self, samples: Sequence[Image], prompts: Sequence[str], metadata: Metadata) -> Scores:
        values = torch.tensor([image_statistics(image)[self.statistic] for image in samples])
        return Scores(values if self.target is None else -(values - self.target).abs())


class GroupDiversity:
    """Mean distance of a picture from the others of its group; 0 for one alone.

    Args:
        model: a CLIP of transformers: 1 - cosine of the pictures' embeddings, in [0, 2]. Default none: the root mean
            square difference of thumbnails, in [0, 1].
        nearest: how far it is from the one that is most like it.
    """

    name = "group_diversity"
    spec = Spec(frozenset({"image", "prompt"}), kind="group")

    def __init__(
        self, model: str | None = None, batch_size: int = 32, device: str = "auto", nearest: bool = False
    ) -> None:
        self.encoder = load_dual_encoder(model, device=device) if model else None
        self.batch_size, self.nearest = batch_size, nearest

    def __call__(self, samples: Sequence[Image], prompts: Sequence[str], metadata: Metadata) -> Scores:
        values = torch.zeros(len(samples))
        for members in groups(prompts, metadata):
            if len(members) > 1:
                distance = self._distances([samples[i] for i in members])
                mean, itself = distance.sum(dim=1) / (len(members) - 1), torch.eye(len(members)).bool()
                values[members] = distance.masked_fill(itself, torch.inf).amin(dim=1) if self.nearest else mean
        return Scores(values)

    def _distances(self, images: Sequence[Image]) -> Tensor:
        """[N, N] with zeros on the diagonal."""
        if self.encoder is None:
            return torch.from_numpy(thumbnail_distances(images)).float()
        unit = self.encoder.pictures(images, self.batch_size)
        return (1 - unit @ unit.T).fill_diagonal_(0)


def thumbnail(image: Image, side: int = 16) -> NDArray[np.float64]:
    """[side, side, 3] in [0, 1]: what is left of a picture from afar."""
    return np.asarray(image.convert("RGB").resize((side, side), Resampling.BOX), dtype=np.float64) / 255


def thumbnail_distances(images: Sequence[Image]) -> NDArray[np.float64]:
    """[N, N] root mean square differences of thumbnails."""
    small = np.stack([thumbnail(image).ravel() for image in images])
    return cdist(small, small) / small.shape[1] ** 0.5
