"""Samples as bytes: what the reward server and its client send each other. Nothing is pickled.

A request is the JSON object {"samples": [...], "prompts": [...], "metadata": [...]} with pictures anywhere in samples
(a picture each, a list of frames, or a text) and metadata. Two encodings:

    application/json               pictures as {"$png": base64}
    application/x-safetensors      the JSON as the uint8 tensor "request", pictures as {"$image": n} that point to the
                                   uint8 tensors "0", "1", ... [height, width] or [height, width, channels]
"""

import base64
import io
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from PIL import Image
from safetensors.numpy import save

from rewards.base import Metadata

Encoding = Literal["safetensors", "png"]
FILES = ("reference", "image")  # keys of metadata that hold pictures, or files where a reward runs in process
BROKEN = (
    KeyError,
    TypeError,
    AttributeError,
    OSError,
    ValueError,
    SyntaxError,
    RecursionError,
    Image.DecompressionBombError,
)
"""Errors from reading bytes that are no request."""
JSON, SAFETENSORS = "application/json", "application/x-safetensors"


def encode(samples: Sequence[Any], prompts: Sequence[str], metadata: Metadata, encoding: Encoding) -> tuple[bytes, str]:
    """The body of a request and its content type.

    Raises:
        TypeError: metadata that is neither JSON nor a picture.
    """
    request = {"samples": list(samples), "prompts": list(prompts), "metadata": [dict(record) for record in metadata]}
    if encoding == "png":
        return json.dumps(_replace(request, lambda image: {"$png": png(image)})).encode(), JSON
    tensors: dict[str, Any] = {}

    def store(image: Image.Image) -> dict[str, int]:
        tensors[str(len(tensors))] = np.array(image if image.mode in ("L", "RGB", "RGBA") else image.convert("RGB"))
        return {"$image": len(tensors) - 1}

    text = json.dumps(_replace(request, store))
    tensors["request"] = np.frombuffer(text.encode(), dtype=np.uint8)
    return save(tensors), SAFETENSORS


class TooLarge(ValueError):
    """A request that would take more memory than it may."""


def decode(
    body: bytes | bytearray, content_type: str, budget: "MemoryBudget | None" = None
) -> tuple[list[Any], list[str], list[dict[str, Any]]]:
    """Samples, prompts and metadata of a request.

    Args:
        budget: memory of its decoded pictures and JSON, counted before they are; default endless. A picture
            that stands in several places counts in each.

    Raises:
        TooLarge: more than the budget.
        ValueError: bytes that are no such request.
    """
    try:
        budget = budget or MemoryBudget(2**60)
        text, tensors = body, {}
        if content_type.partition(";")[0].strip() == SAFETENSORS:
            tensors = _tensors(body, budget)
            text = tensors["request"].tobytes()
        restored = _restore(_json(text, budget), tensors, budget)
        samples, prompts, metadata = (restored[key] for key in ("samples", "prompts", "metadata"))
        if not all(isinstance(given, list) for given in (samples, prompts, metadata)):
            raise ValueError("samples, prompts and metadata must be lists")
        if not all(isinstance(prompt, str) for prompt in prompts):
            raise ValueError("prompts must be texts")
        if not all(isinstance(record, dict) for record in metadata):
            raise ValueError("metadata must be objects")
    except TooLarge:
        raise
    except BROKEN as error:
        raise ValueError(f"not a request for a reward: {type(error).__name__}: {error}") from error
    if not (len(samples) == len(prompts) == len(metadata)):
        raise ValueError(f"{len(samples)} samples, {len(prompts)} prompts and {len(metadata)} records of metadata")
    return samples, prompts, metadata


class MemoryBudget:
    """Bytes that a request may take."""

    def __init__(self, memory: int) -> None:
        self.memory, self.taken = memory, 0

    def take(self, amount: int) -> None:
        """Raises TooLarge where they are more than are left."""
        self.taken += amount
        if self.taken > self.memory:
            raise TooLarge(f"its pictures and texts take more than {self.memory / 2**20:.0f} MB")

    def picture(self, width: int, height: int, mode: str) -> None:
        # Pillow keeps colours in four bytes a pixel
        self.take(width * height * (1 if mode in ("1", "L", "P") else 4))


def _json(text: bytes | bytearray, budget: MemoryBudget) -> Any:
    """Parsed where it fits: a list, a dictionary or an entry takes about 100 bytes; base64 has none of their signs."""
    budget.take(100 * sum(text.count(sign) for sign in (b"[", b"{", b",")))
    return json.loads(text)


def _tensors(body: bytes | bytearray, budget: MemoryBudget) -> dict[str, Any]:
    """The uint8 tensors of a safetensors file, which share its memory."""
    start = 8 + int.from_bytes(body[:8], "little")
    if len(body) < 8 or start > len(body):
        raise ValueError("the file ends within its header")
    data, tensors = memoryview(body)[start:], {}
    for name, entry in _json(body[8:start], budget).items():
        if name != "__metadata__":
            first, last = entry["data_offsets"]
            if entry["dtype"] != "U8" or not 0 <= first <= last <= len(data):
                raise ValueError(f"tensor '{name}' is not of bytes within the file")
            tensors[name] = np.frombuffer(data[first:last], dtype=np.uint8).reshape(entry["shape"])
    return tensors


def png(image: Image.Image) -> str:
    """A picture as base64 of its PNG file."""
    file = io.BytesIO()
    image.save(file, format="PNG", compress_level=1)
    return base64.b64encode(file.getvalue()).decode()


def _replace(value: object, picture: Callable[[Image.Image], Any]) -> object:
    if isinstance(value, Image.Image):
        return picture(value)
    if isinstance(value, Mapping):
        return {key: _replace(item, picture) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace(item, picture) for item in value]
    return value


def _restore(value: object, tensors: Mapping[str, Any], budget: MemoryBudget) -> Any:
    if isinstance(value, list):
        return [_restore(item, tensors, budget) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"$image"}:
        pixels = tensors[str(value["$image"])]
        height, width = pixels.shape[:2]
        budget.picture(width, height, "L" if pixels.ndim == 2 else "RGB")
        return Image.fromarray(pixels)
    if value.keys() == {"$png"}:
        image = Image.open(io.BytesIO(base64.b64decode(value["$png"])), formats=["PNG"])
        budget.picture(*image.size, image.mode)
        image.load()
        return image
    return {key: _restore(item, tensors, budget) for key, item in value.items()}
