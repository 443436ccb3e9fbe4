"""Tiny random pipelines of the real classes, a few thousand weights each, made without any download.

tiny_pipelines.json describes them: `parts`, each a class with its arguments, and `pipelines`, which name their parts.
An entry that is `like` another one changes it key by key. Weights are drawn in the order of a pipeline's components.

All tokenizers are the CLIP tokenizer of the shipped pipeline: it only matters here that prompts differ, in content
and in length.
"""

import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderSAME, DiffusionPipeline
from PIL.Image import Image
from torch import nn
from transformers import CLIPTokenizer, PreTrainedModel

from flowalign.data import ASSETS, Source


@dataclass(kw_only=True)
class Tiny:
    """How to make a pipeline and call it."""

    pipeline: str
    """Class of the pipeline in diffusers."""
    components: dict[str, Any]
    """Components by name, and further arguments of the class; those that begin with _ are drawn and dropped."""
    call: dict[str, Any]
    """Arguments of the pipeline's call."""
    encode: dict[str, Any] = field(default_factory=dict)
    """Arguments of its prompt encoding; they are also arguments of its call."""
    attributes: dict[str, Any] = field(default_factory=dict)
    """Attributes set on the pipeline once it is built."""
    negative: bool = False
    """Whether the pipeline's call guides only when given a negative prompt, or given none by `Family.arguments`."""
    unused: tuple[str, ...] = ()
    """Fragments of names of weights that the network cannot use: the last block's text stream leads nowhere."""
    images: int = 0
    """Pictures that a sample is made from."""
    masked: bool = False
    inputs: dict[str, Any] = field(default_factory=lambda: {"image": "first"})
    """Arguments of the call that take the 'first' picture, 'all' or the 'mask', and what goes with them."""
    ratio: float = 1e-5
    """Largest distance of a replayed step's ratio from 1."""
    alone: bool = False
    """Whether the pipeline's call makes one sample at a time."""
    sources: list[Source] | None = None
    """Picture files of each prompt of a test."""

    def source_inputs(self, images: list[Image], mask: Image | None) -> dict[str, Any]:
        """The arguments of the pipeline's call that hold its pictures and mask."""
        pictures = {"first": images[0], "all": images, "mask": mask}
        return {name: pictures[value] if isinstance(value, str) else value for name, value in self.inputs.items()}


def _resolved(entries: Mapping[str, Any], name: str) -> dict[str, Any]:
    """An entry on top of the one that it is `like`."""
    entry = {key: value for key, value in entries[name].items() if key not in ("like", "note", "source")}
    if "like" not in entries[name]:
        return entry
    base = _resolved(entries, entries[name]["like"])
    nested = {key: base[key] | entry[key] for key in entry if isinstance(entry[key], dict) and key in base}
    return base | entry | nested


NETWORKS = ("unet", "transformer", "transformer_2", "unconditional_transformer")
"""Names of denoisers in pipelines."""


def build(name: str) -> DiffusionPipeline:
    """Build a tiny pipeline; its weights are the same each time."""
    torch.manual_seed(0)
    pipe = assembled(PIPELINES[name], part)
    networks = [pipe.components[name] for name in NETWORKS if name in pipe.components]
    with torch.no_grad():
        for parameter in (p for network in networks if network is not None for p in network.parameters()):
            # some start at zero and some uninitialised
            if parameter.dim() < 2 or not parameter.any() or not parameter.isfinite().all():
                parameter.normal_(1.0 if parameter.dim() == 1 and bool((parameter == 1).all()) else 0.0, 0.1)
        vae = pipe.components.get("vae")
        for parameter in vae.parameters() if isinstance(vae, AutoencoderSAME) else ():
            # every block of it begins as nothing, and its sounds as silence
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.15)
    for component in pipe.components.values():
        if isinstance(component, nn.Module):
            component.eval()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def assembled(tiny: Tiny, make: Callable[[str], Any]) -> DiffusionPipeline:
    """A pipeline whose parts `make` makes by their names, in the order of its components."""
    parts = {key: make(value) if isinstance(value, str) else value for key, value in tiny.components.items()}
    pipe = _class(f"diffusers.{tiny.pipeline}")(**{key: value for key, value in parts.items() if key[0] != "_"})
    for attribute, value in tiny.attributes.items():
        setattr(pipe, attribute, [tuple(size) for size in value] if isinstance(value, list) else value)
    return pipe


def part(name: str, parts: Mapping[str, Any] | None = None) -> Any:
    """Make a part by its name, from these parts or by default this file's: a random network, tokenizer or scheduler."""
    return _made({"like": name}, DATA["parts"] if parts is None else parts)


def _made(described: dict[str, Any], parts: Mapping[str, Any]) -> Any:
    settings = _resolved({**parts, "": described}, "")
    kind = settings.pop("class")
    if kind == "tokenizer":
        return _tokenizer(**settings)
    buffers = settings.pop("buffers", {})
    for name, value in settings.items():
        if isinstance(value, dict) and value.keys() & {"class", "like"}:
            settings[name] = _made(value, parts)
    target = _class(kind)
    network = target(target.config_class(**settings)) if issubclass(target, PreTrainedModel) else target(**settings)
    for name, (method, *arguments) in buffers.items():
        getattr(network.get_buffer(name), method)(*arguments)
    return network


def _tokenizer(
    chat_template: str | None = None,
    padding_side: str = "right",
    added_tokens: list[str] | None = None,
    model_max_length: int | None = None,
) -> CLIPTokenizer:
    tokenizer = CLIPTokenizer.from_pretrained(ASSETS / "tiny_sd3" / "tokenizer")
    tokenizer.model_max_length = model_max_length or tokenizer.model_max_length
    tokenizer.chat_template, tokenizer.padding_side = chat_template, padding_side
    tokenizer.add_tokens(added_tokens or [], special_tokens=True)
    return tokenizer


def _class(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def pipelines_of(data: Mapping[str, Any]) -> dict[str, Tiny]:
    """The pipelines that a file describes."""
    return {name: Tiny(**_resolved(data["pipelines"], name)) for name in data["pipelines"]}


class Unguarded:
    """Stands where NVIDIA's guardrail stands in pipelines of published weights."""

    def to(self, device: object) -> None:
        """Stay."""

    def check_text_safety(self, prompt: str) -> bool:
        """Whether a prompt may be drawn."""
        return True

    def check_video_safety(self, frames: np.ndarray) -> np.ndarray:
        """[F, H, W, 3] frames as they may be shown."""
        return frames


DATA: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
PIPELINES = pipelines_of(DATA)
