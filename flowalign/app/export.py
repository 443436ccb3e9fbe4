"""Export of trained weights for other programs: LoRA files with their names, a merged model, and the hub."""

import contextlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

import diffusers
import torch
from diffusers.utils.peft_utils import recurse_remove_peft_layers
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import get_pattern_key
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from flowalign.config import BaseConfig, Config
from flowalign.data import shipped
from flowalign.errors import ConfigError, FlowalignError
from flowalign.policies.diffusion import DiffusersPolicy
from flowalign.policies.diffusion.families import family_of
from flowalign.policies.diffusion.lora_formats import converted, layout_of, pairs_of
from flowalign.policies.diffusion.storage import described_by, load_config, lora_file
from flowalign.runs.checkpoint import check_weights, order_metadata
from flowalign.runs.version import __version__
from rewards.hub import hub

Kind = Literal["diffusers", "kohya", "comfyui"]
MODEL_FILES = (".safetensors", ".json", ".txt", ".model", ".jinja", ".md")
"""Endings of the files that transformers and peft save."""
ARCHITECTURES = {
    "StableDiffusionPipeline": "stable-diffusion-v1",
    "StableDiffusionInpaintPipeline": "stable-diffusion-v1",
    "StableDiffusionXLPipeline": "stable-diffusion-xl-v1-base",
    "StableDiffusionXLInpaintPipeline": "stable-diffusion-xl-v1-base",
    "StableDiffusion3Pipeline": "stable-diffusion-3",
    "StableDiffusion3InpaintPipeline": "stable-diffusion-3",
    "FluxPipeline": "flux-1-dev",
    "ChromaPipeline": "chroma",
}
"""Architecture by pipeline, with the names of Stability AI's model specification and kohya's sd-scripts."""


def check_format(config: BaseConfig, kind: Kind) -> None:
    """Refuse a format that has no names for the trained layers, before anything is written."""
    if kind == "diffusers":
        return
    if not isinstance(config, Config) or config.model.lora is None:
        raise ConfigError(f"--format {kind} is of LoRAs of pictures' models, which this run did not train")
    saved = load_config(_base(config))
    layout_of(kind, saved[family_of(saved["_class_name"]).denoiser][1])


def write_lora(run: Path, config: Config, kind: Kind, folder: Path) -> list[Path]:
    """Write a run's LoRA in a format, a description of the run in the file's metadata, and what its writer learned.

    Returns:
        paths of the files: one, or one for each of two networks, and the writer's folder.

    Raises:
        ConfigError: there is nothing to write, or the format has no form for the writer.
    """
    check_weights(run / "lora")
    writers = sorted(child for child in (run / "lora").glob("*") if child.is_dir())
    if writers and kind != "diffusers":
        raise ConfigError(f"--format {kind}: it has no form for the writer in {writers[0]}; diffusers works")
    base = _base(config)
    saved = load_config(base)
    denoiser = family_of(saved["_class_name"]).denoiser
    written = []
    for name in (denoiser, "transformer_2"):
        source = run / "lora" / lora_file(name)
        if not source.is_file() or (name != denoiser and source.name == lora_file(denoiser)):
            continue
        with safe_open(source, "pt") as file:
            metadata = file.metadata() or {}
        facts = described(run, config, saved["_class_name"])
        weights = load_file(source)
        if kind == "diffusers":
            path, tensors = folder / source.name, weights
        else:
            prefix = f"{denoiser}." if any(key.startswith(f"{denoiser}.") for key in weights) else ""
            adapter = json.loads(metadata["lora_adapter_metadata"])
            adapter = {key.removeprefix(prefix): value for key, value in adapter.items()}
            layout = layout_of(kind, saved[denoiser][1])
            pairs = pairs_of(weights, prefix, partial(_alpha, adapter))
            tensors = converted(pairs, layout, _widths(base, name, saved[name][1]))
            path = folder / f"{run.resolve().name}{'' if name == denoiser else f'-{name}'}.safetensors"
            metadata = {}
            if layout.underscores:
                metadata = {"ss_network_module": "networks.lora", "ss_network_dim": str(adapter["r"])}
                metadata["ss_network_alpha"] = str(adapter["lora_alpha"])
        save_file(tensors, path, metadata | facts | {"format": "pt"})
        order_metadata(path)
        written.append(path)
    if not written:
        raise ConfigError(f"{run} has exported no LoRA yet; a run that is saving its first checkpoint will")
    for writer in writers:
        copy_weights(writer, folder / writer.name)
        written.append(folder / writer.name)
    return written


def copy_weights(source: Path, folder: Path) -> None:
    """Copy a folder of weights as it is.

    Raises:
        ConfigError: it has files that are neither weights nor settings of a model.
    """
    check_weights(source)
    for file in sorted(source.rglob("*")):
        # code and pickles would be published under the user's name
        if file.is_file() and file.suffix not in MODEL_FILES:
            raise ConfigError(f"{file} is neither weights nor settings of a model; move it away to export the rest")
    shutil.copytree(source, folder, dirs_exist_ok=True)


def _base(config: Config) -> str | Path:
    """The folder or hub name that has the configuration files of the base model."""
    described = None if config.model.config is None else str(shipped(config.model.config))
    return described_by(shipped(config.model.path), described)


def _alpha(adapter: Mapping[str, Any], layer: str) -> float:
    """Alpha of a layer, from an adapter's settings in the way of peft."""
    patterns = adapter.get("alpha_pattern") or {}
    alpha = patterns.get(get_pattern_key(patterns.keys(), layer), adapter["lora_alpha"])
    return float(alpha)


def _widths(base: str | Path, name: str, network: str) -> Callable[[str], int]:
    """Function that gives the number of outputs of a network's layer, without loading its weights."""
    kind: Any = getattr(diffusers, network)
    with torch.device("meta"):
        whole = kind.from_config(kind.load_config(**hub(base), subfolder=name))
    return lambda layer: int(whole.get_submodule(layer).out_features)


def described(run: Path, config: BaseConfig, pipeline: str) -> dict[str, str]:
    """Metadata of a file that describe a run."""
    facts = {
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.title": run.resolve().name,
        "modelspec.date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "modelspec.implementation": "diffusers",
        "flowalign.version": __version__,
        "flowalign.base": config.model.path,
        "flowalign.algorithm": config.algorithm.name,
        "flowalign.rewards": ", ".join(f"{reward.weight:g} {reward.name}" for reward in config.rewards),
    }
    if pipeline in ARCHITECTURES:
        facts["modelspec.architecture"] = f"{ARCHITECTURES[pipeline]}/lora"
    return facts


def write_merged(policy: DiffusersPolicy, folder: Path) -> None:
    """Write a whole pipeline for `from_pretrained` with the LoRA merged in; the policy cannot be used afterwards."""
    for network in policy.pipeline.components.values():
        # text encoders may have adapters too
        if getattr(network, "peft_config", None):
            for layer in network.modules():
                if isinstance(layer, BaseTunerLayer):
                    layer.merge()
            recurse_remove_peft_layers(network)
            network.peft_config, network._hf_peft_config_loaded = {}, False
    policy.pipeline.save_pretrained(folder)


def push(folder: Path, name: str, private: bool = False, endpoint: str | None = None) -> str:
    """Upload a folder to the hub as the user who is logged in there (`hf auth login`, or HF_TOKEN).

    Args:
        name: owner/name, or a name alone for the user's own repository; it is created if it is missing.
        endpoint: address of another hub.

    Returns:
        the repository's address.

    Raises:
        FlowalignError: the hub refuses, cannot be reached, or has no such names.
    """
    from huggingface_hub import HfApi

    hub = HfApi(endpoint=endpoint)
    with _refused(name):
        repository = hub.create_repo(name, private=private or None, exist_ok=True)
        hub.upload_folder(folder_path=folder, repo_id=repository.repo_id, commit_message="Exported by flowalign")
    return str(repository)


@contextlib.contextmanager
def _refused(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the client's own errors, and its libraries'
        reason = re.sub(r"\s+", " ", str(error)).strip()[:300]
        raise FlowalignError(
            f"--push {name}: {reason}; what was exported stays, and `hf auth login` gives a token that may write"
        ) from error
