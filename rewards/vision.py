"""What the model rewards share: pictures to normalised tensors, and batches through a frozen model."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL.Image import Image, Resampling
from PIL.Image import new as new_image
from torch import Tensor
from torch.nn import functional as F

from rewards.base import Metadata, Scores, Spec
from rewards.hub import split_revision

Dtype = Literal["float32", "bfloat16", "float16"]
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_MODES = {Resampling.BICUBIC: "bicubic", Resampling.BILINEAR: "bilinear"}


def allow_tf32(allowed: bool) -> None:
    """Allow or forbid TF32 for this process's float32 products and convolutions on NVIDIA GPUs."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed


@dataclass(frozen=True)
class Preprocess:
    """Picture settings of a model."""

    size: tuple[int, int]
    """Height and width in pixels."""
    fit: Literal["crop", "pad", "squash", "square"] = "crop"
    """crop: the shorter side to `shorter`, then the centre; pad: the longer side to size, then black bars; squash:
    both sides; square: bars of the mean colour make it square first"""
    shorter: int | None = None
    """Pixels to which `crop` scales the shorter side; default the shorter side of size."""
    mean: tuple[float, ...] = CLIP_MEAN
    std: tuple[float, ...] = CLIP_STD
    resample: Resampling = Resampling.BICUBIC
    round_centre: bool = True
    """Whether half an odd margin is rounded to an even number, as in torchvision; False: down, as in transformers."""

    def images(self, images: Sequence[Image]) -> Tensor:
        """[B, 3, H, W] normalised float32 on the CPU; resized by PIL in 8 bits, as the checkpoints were trained.

        Only `pad` (HPSv2) is resized as a tensor, as its authors do.
        """
        if self.fit == "pad":
            return torch.cat([self.pixels(to_tensor(image)[None]) for image in images])
        resized = []
        for image in images:
            if self.fit == "square":
                image = self._squared(image.convert("RGB"))
            height, width = self._resized(image.height, image.width)
            resized.append(self._cropped(to_tensor(image.convert("RGB").resize((width, height), self.resample))))
        return self._normalized(torch.stack(resized))

    def pixels(self, pixels: Tensor) -> Tensor:
        """[B, 3, H, W] normalised, from [B, 3, h, w] in [0, 1] with the gradient."""
        if self.fit == "square":
            side = max(pixels.shape[-2:])
            down, across = (side - have for have in pixels.shape[-2:])
            bars = (across // 2, across - across // 2, down // 2, down - down // 2)
            colour = torch.tensor(self._bar_colour).to(pixels)[:, None, None] / 255
            pixels = F.pad(pixels - colour, bars) + colour
        size = self._resized(*pixels.shape[-2:])
        if size != pixels.shape[-2:]:
            pixels = F.interpolate(pixels, size, mode=_MODES[self.resample], antialias=True, align_corners=False)
        return self._normalized(self._cropped(pixels))

    @property
    def _bar_colour(self) -> tuple[int, ...]:
        return tuple(int(255 * channel) for channel in self.mean)

    def _squared(self, image: Image) -> Image:
        side = max(image.size)
        square = new_image("RGB", (side, side), self._bar_colour)
        square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
        return square

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        if self.fit in ("squash", "square"):
            return self.size
        if self.fit == "pad":
            scale = self.size[0] / max(height, width)
            return round(height * scale), round(width * scale)
        short, goal = min(height, width), self.shorter or min(self.size)
        return (int(goal * height / short), int(goal * width / short))

    def _cropped(self, pixels: Tensor) -> Tensor:
        """The centre of [..., H, W], or with black bars where it is smaller."""
        down, across = (goal - have for goal, have in zip(self.size, pixels.shape[-2:], strict=True))
        if down > 0 or across > 0:
            pixels = F.pad(pixels, (across // 2, across - across // 2, down // 2, down - down // 2))
        top, left = (self._margin(have - goal) for goal, have in zip(self.size, pixels.shape[-2:], strict=True))
        return pixels[..., top : top + self.size[0], left : left + self.size[1]]

    def _margin(self, excess: int) -> int:
        return round(excess / 2) if self.round_centre else excess // 2

    def _normalized(self, pixels: Tensor) -> Tensor:
        mean, std = (torch.tensor(rgb).to(pixels, non_blocking=True)[:, None, None] for rgb in (self.mean, self.std))
        return (pixels - mean) / std


def to_tensor(image: Image) -> Tensor:
    """[3, H, W] in [0, 1]."""
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).float() / 255


def pick_device(device: str) -> torch.device:
    """'auto' is this process's GPU (CUDA, Apple's, ...), or the CPU where there is none."""
    if device != "auto":
        return torch.device(device)
    chip = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if chip is None else torch.device(chip.type, torch.accelerator.current_device_index())


class ModelReward(ABC):
    """Base of rewards that are a frozen, differentiable model.

    Args:
        batch_size: pictures a call of the model.
    """

    name: str
    spec = Spec(differentiable=True)
    preprocess: Preprocess
    device: torch.device
    dtype: torch.dtype

    def __init__(self, batch_size: int) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size {batch_size} must be at least 1")
        self.batch_size = batch_size

    @abstractmethod
    def model_scores(self, pixels: Tensor, prompts: Sequence[str], metadata: Metadata) -> Scores:
        """Scores of preprocessed pictures [B, 3, H, W] on the model's device."""

    def __call__(self, samples: Sequence[Image], prompts: Sequence[str], metadata: Metadata) -> Scores:
        batches = []
        for i in range(0, len(samples), self.batch_size):
            rows = slice(i, i + self.batch_size)
            pixels = self.preprocess.images(samples[rows]).to(self.device, self.dtype)
            with torch.no_grad():
                batches.append(self.model_scores(pixels, prompts[rows], metadata[rows]))
        scores = Scores.cat(batches)
        return Scores(scores.value.float().cpu(), {name: values.float().cpu() for name, values in scores.parts.items()})

    def score_pixels(self, pixels: Tensor, prompts: Sequence[str], metadata: Metadata) -> Scores:
        """See `DifferentiableReward.score_pixels`. The resize is torch's, not PIL's in 8 bits: values differ a little
        from what `score` gives the same pictures, except at the model's own size."""
        prepared = self.preprocess.pixels(pixels.to(self.device, torch.float32)).to(self.dtype)
        scores = self.model_scores(prepared, prompts, metadata)
        return Scores(scores.value.float(), {name: values.detach().float() for name, values in scores.parts.items()})


def weights_file(source: str | Path) -> Path:
    """A file of weights: a local one, or 'owner/repository/file' or 'owner/repository@commit/file' on the hub.

    Raises:
        FileNotFoundError: neither.
    """
    path = Path(source)
    if path.is_file():
        return path
    owner, repository, file = (*str(source).split("/", 2), "", "")[:3]
    name, revision = split_revision(f"{owner}/{repository}")
    if path.is_absolute() or not file:
        raise FileNotFoundError(f"no weights at '{source}'; give a file, or 'owner/repository/file' on the hub")
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(name, file, revision=revision))


def load_weights(source: str | Path) -> dict[str, Tensor]:
    """Tensors of a .safetensors file, or of a published .pt or .pth one, read without unpickling objects."""
    path = weights_file(source)
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    tensors = torch.load(path, map_location="cpu", weights_only=True)
    return tensors.get("state_dict", tensors)


WEIGHTS = "pytorch_model*.bin"
"""Files of weights that transformers writes; others, such as training_args.bin, are pickles of any kind."""


def load_repository(source: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config.json and all tensors of a folder or a hub name, however many files they are in.

    For networks whose class transformers does not have, so that its `from_pretrained` cannot read them.

    Args:
        source: folder or hub name; an @ in it begins a branch, a tag or a commit.

    Raises:
        FileNotFoundError: there are none.
    """
    folder = Path(source)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        name, revision = split_revision(source)
        patterns = ["*.json", "*.model", "*.safetensors", WEIGHTS]
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob(WEIGHTS))
    if not files or not (folder / "config.json").is_file():
        raise FileNotFoundError(f"no config.json and weights at '{source}'")
    tensors = {name: tensor for file in files for name, tensor in load_weights(file).items()}
    return json.loads((folder / "config.json").read_text(encoding="utf-8")), tensors


def without_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors of a part, by their names in it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
