"""Models of random weights: tiny ones that stand for a family, and those that configuration files describe."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import AutoConfig, PreTrainedTokenizerFast

from flowalign.data import ASSETS, shipped
from flowalign.errors import ConfigError
from flowalign.planning.tiny_pipelines import DATA, PIPELINES, part
from flowalign.policies.diffusion.storage import check_index, load_config
from flowalign.policies.language.policy import LanguagePolicy
from rewards.hub import hub

FAMILIES: dict[str, str] = DATA["hub_names"]
"""Beginnings of hub names, in lower case, and the tiny pipeline of the same class; the longest that fits counts."""


def tiny_name(path: str) -> str:
    """The tiny pipeline that stands for a model: a hub name, a folder, or one shipped with flowalign."""
    local = Path(shipped(path))
    if local.is_dir():
        own = load_config(local)["_class_name"]
        for name, tiny in PIPELINES.items():
            if tiny.pipeline == own:
                return name
        raise ConfigError(f"model.path: no tiny pipeline is of the class {own}; --full builds one from '{path}' itself")
    fitting = [prefix for prefix in FAMILIES if path.lower().startswith(prefix) and FAMILIES[prefix] in PIPELINES]
    if not fitting:
        raise ConfigError(
            f"model.path: which family '{path}' is of cannot be told from its name; with its configuration files in "
            "the hub's cache or in a folder, --full builds it"
        )
    return FAMILIES[max(fitting, key=len)]


def random_pipeline(path: str, dtype: torch.dtype, device: torch.device, everything: bool = False) -> DiffusionPipeline:
    """A pipeline of random weights from its configuration files alone, in a folder or in the hub's cache.

    Args:
        device: where the denoiser is made; the other networks are made where they stay, or there too if `everything`.
    """
    import diffusers
    import transformers

    source = str(shipped(path))
    try:
        index = DiffusionPipeline.load_config(**hub(source), local_files_only=True)
        check_index(source, index)
        parts: dict[str, Any] = {}
        for name, entry in index.items():
            if name.startswith("_") or not isinstance(entry, list):
                continue
            library, kind = entry
            if library is None:
                parts[name] = None
                continue
            target = getattr(diffusers if library == "diffusers" else transformers, kind)
            if not issubclass(target, nn.Module):
                parts[name] = target.from_pretrained(**hub(source), subfolder=name, local_files_only=True)
                continue
            there = everything or name in ("transformer", "transformer_2", "unet")
            with torch.device(device if there else "cpu"), default_dtype(dtype):
                if library == "diffusers":
                    parts[name] = target.from_config(
                        target.load_config(**hub(source), subfolder=name, local_files_only=True)
                    )
                else:
                    own = transformers.AutoConfig.from_pretrained(**hub(source), subfolder=name, local_files_only=True)
                    parts[name] = target(own)
    except OSError as error:
        raise _no_files(path, error) from error
    return getattr(diffusers, index["_class_name"])(**parts)


def random_language_model(
    path: str, kind: type[LanguagePolicy], dtype: torch.dtype, device: torch.device
) -> tuple[Any, Any]:
    """A model of random weights from its configuration files alone, and its tokenizer or processor.

    Args:
        kind: of policy, which says what models and readers it takes.
    """
    source = str(shipped(path))
    try:
        own = AutoConfig.from_pretrained(**hub(source), local_files_only=True)
        reader = kind.readers.from_pretrained(**hub(source), local_files_only=True)
    except OSError as error:
        raise _no_files(path, error) from error
    with torch.device(device):
        return kind.networks.from_config(own, dtype=dtype), reader


def tiny_language_model(kind: type[LanguagePolicy], dtype: torch.dtype, device: torch.device) -> tuple[Any, Any]:
    """A small model that reads any text, byte by byte, or the shipped one with eyes: random weights."""
    if kind.networks is not LanguagePolicy.networks:
        return random_language_model("tiny_vlm", kind, dtype, device)
    tokens = byte_tokenizer()
    return part("byte_llama").to(device, dtype), tokens


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token a byte, with a chat template."""
    special = ["<pad>", "<s>", "</s>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({token: i for i, token in enumerate([*special, *alphabet])}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    template = "{% for turn in messages %}{{ turn.role }}: {{ turn.content }}</s>{% endfor %}"
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        padding_side="left",
        chat_template=template + "{% if add_generation_prompt %}assistant: {% endif %}",
    )


def is_shipped(path: str) -> bool:
    """Whether flowalign brings this model, tiny already."""
    return (ASSETS / path).is_dir()


def _no_files(path: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"model.path: no configuration files of '{path}' on this machine ({' '.join(str(error).split())}); "
        f"`hf download {path} --exclude '*.safetensors' '*.bin'` fetches them without the weights"
    )


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """New floating-point tensors have this dtype."""
    own = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(own)
