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
from safetensors import SafetensorError
from safetensors.numpy import load, save

from rewards.base import Metadata

Encoding = Literal["safetensors", "png"]
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


def decode(body: bytes, content_type: str) -> tuple[list[Any], list[str], list[dict[str, Any]]]:
    """Samples, prompts and metadata of a request.

    Raises:
        ValueError: bytes that are no such request.
    """
    try:
        if content_type.partition(";")[0].strip() == SAFETENSORS:
            tensors = load(body)
            request = json.loads(tensors["request"].tobytes())
        else:
            tensors = {}
            request = json.loads(body)
        restored = _restore(request, tensors)
        samples, prompts, metadata = restored["samples"], restored["prompts"], restored["metadata"]
    except (SafetensorError, KeyError, TypeError, OSError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"not a request for a reward: {type(error).__name__}: {error}") from error
    if not (len(samples) == len(prompts) == len(metadata)):
        raise ValueError(f"{len(samples)} samples, {len(prompts)} prompts and {len(metadata)} records of metadata")
    return samples, prompts, metadata


def png(image: Image.Image) -> str:
    """A picture as base64 of its PNG file."""
    file = io.BytesIO()
    image.save(file, format="PNG", compress_level=1)
    return base64.b64encode(file.getvalue()).decode()


def _replace(value: Any, picture: Callable[[Image.Image], Any]) -> Any:
    if isinstance(value, Image.Image):
        return picture(value)
    if isinstance(value, Mapping):
        return {key: _replace(item, picture) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace(item, picture) for item in value]
    return value


def _restore(value: Any, tensors: Mapping[str, Any]) -> Any:
    if isinstance(value, list):
        return [_restore(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"$image"}:
        return Image.fromarray(tensors[str(value["$image"])])
    if value.keys() == {"$png"}:
        image = Image.open(io.BytesIO(base64.b64decode(value["$png"])), formats=["PNG"])
        image.load()
        return image
    return {key: _restore(item, tensors) for key, item in value.items()}
