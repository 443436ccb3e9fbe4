"""Pipelines of published sizes, from configurations that ship with flowalign: published_pipelines.json, with sources.

Nothing is invented there: a model whose configuration could not be traced to a public file is left out.
"""

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline

from flowalign.data import shipped
from flowalign.errors import ConfigError, nearest
from flowalign.planning.fake_device import DEVICE
from flowalign.planning.random_models import default_dtype, random_pipeline
from flowalign.planning.tiny_pipelines import Tiny, assembled, part, pipelines_of
from rewards.hub import split_revision

DATA: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
PARTS: dict[str, Any] = DATA["parts"]
PIPELINES = pipelines_of(DATA)
NAMES: dict[str, str] = DATA["hub_names"]
"""Hub names in lower case, and the pipelines of that size."""
TEXTS: dict[str, str] = DATA["texts"]
"""Hub names of language models in lower case, and the part of that size."""
REWARDS: dict[str, str] = DATA["rewards"]
"""Names of rewards, and the network of each."""


def published(path: str) -> Tiny | None:
    """Description of a published pipeline; None for one that is on this machine.

    Raises:
        ConfigError: names the nearest one that is known.
    """
    name = _known(path, NAMES)
    return None if name is None else PIPELINES[name]


def published_text(path: str) -> str | None:
    """The part that is a language model of this name; as `published`."""
    return _known(path, TEXTS)


def _known(path: str, names: Mapping[str, str]) -> str | None:
    if Path(shipped(path)).is_dir():
        return None
    path, _ = split_revision(path)
    if path.lower() not in names:
        raise ConfigError(
            f"model.path: no configuration of '{path}' comes with flowalign; {nearest(path.lower(), names)} "
            "A folder with its configuration files works too"
        )
    return names[path.lower()]


def build(path: str, dtype: torch.dtype) -> DiffusionPipeline:
    """The pipeline on the fake device, within `FakeDevice`; text encoders too."""
    tiny = published(path)
    with default_dtype(dtype):
        if tiny is None:
            pipe = random_pipeline(path, dtype, DEVICE, everything=True)
        else:
            pipe = assembled(tiny, network)
    for component in pipe.components.values():
        if isinstance(component, torch.nn.Module):
            component.eval()
            for module in component.modules():
                # a normed weight, computed from two others, cannot be moved on the fake device
                if hasattr(module, "weight_g"):
                    torch.nn.utils.remove_weight_norm(module)
    if hasattr(pipe, "generate_prior_tokens"):
        # each token follows from the one before, and on the fake device none has a value
        vars(pipe)["generate_prior_tokens"] = _undrawn
    return pipe


def _undrawn(prompts: Sequence[str], height: int, width: int, **_: object) -> tuple[torch.Tensor, None, None]:
    """Tokens of GLM-Image, one for 16 x 16 pixels, without its language model."""
    return torch.zeros(len(prompts), height * width // 256, dtype=torch.long, device=DEVICE), None, None


def network(name: str, device: torch.device = DEVICE) -> Any:
    """Make a part by its name; networks are made on this device, by default the fake one."""
    entry = PARTS[name]
    while "class" not in entry:
        entry = PARTS[entry["like"]]
    on_host = entry["class"].endswith(("tokenizer", "Scheduler", "Guidance", "Processor"))
    with contextlib.nullcontext() if on_host else device:
        return part(name, PARTS)
