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
from flowalign.planning.tiny_pipelines import DATA, PIPELINES, Unguarded, part
from flowalign.policies.diffusion.storage import BUILT, check_index, load_config
from flowalign.policies.language.masked import MaskedPolicy
from flowalign.policies.language.policy import LanguagePolicy
from rewards.hub import hub

FAMILIES: dict[str, str] = DATA["hub_names"]
"""Beginnings of hub names, in lower case, and the tiny pipeline of the same class; the longest that fits counts."""


def tiny_name(path: str) -> str:
    """The tiny pipeline that stands for a model: a hub name, a folder, or one shipped with flowalign."""
    local = Path(shipped(path))
    if local.is_dir():
        class_name = load_config(local)["_class_name"]
        for name, tiny in PIPELINES.items():
            if tiny.pipeline == class_name:
                return name
        raise ConfigError(
            f"model.path: no tiny pipeline is of the class {class_name}; --full builds one from '{path}' itself"
        )
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
        device: device of the denoiser; the other networks are made on the CPU, or there too if `everything`.
    """
    import diffusers
    import transformers

    source = str(shipped(path))
    try:
        index = DiffusionPipeline.load_config(**hub(source), local_files_only=True)
        check_index(source, index)
        components: dict[str, Any] = {}
        for name, entry in index.items():
            if name.startswith("_") or not isinstance(entry, list):
                continue
            if name in BUILT.get(index["_class_name"], ()):
                components[name] = Unguarded()
                continue
            if isinstance(entry[0], int | float):
                components[name] = entry
                continue
            library, class_name = entry
            if library is None:
                components[name] = None
                continue
            component = getattr(diffusers if library == "diffusers" else transformers, class_name)
            if not issubclass(component, nn.Module):
                components[name] = component.from_pretrained(**hub(source), subfolder=name, local_files_only=True)
                continue
            there = everything or name in ("transformer", "transformer_2", "unet")
            with torch.device(device if there else "cpu"), default_dtype(dtype):
                if library == "diffusers":
                    components[name] = component.from_config(
                        component.load_config(**hub(source), subfolder=name, local_files_only=True)
                    )
                else:
                    config = transformers.AutoConfig.from_pretrained(
                        **hub(source), subfolder=name, local_files_only=True
                    )
                    components[name] = component(config)
    except OSError as error:
        raise _no_files(path, error) from error
    return getattr(diffusers, index["_class_name"])(**components)


def random_language_model(
    path: str, kind: type[LanguagePolicy], dtype: torch.dtype, device: torch.device
) -> tuple[Any, Any]:
    """A model of random weights from its configuration files alone, and its tokenizer or processor.

    Args:
        kind: class of the policy, which knows its classes of networks and of tokenizers or processors.
    """
    source = str(shipped(path))
    try:
        config = AutoConfig.from_pretrained(**hub(source), local_files_only=True)
        reader = kind.readers.from_pretrained(**hub(source), local_files_only=True)
    except OSError as error:
        raise _no_files(path, error) from error
    with torch.device(device):
        return kind.networks.from_config(config, dtype=dtype), reader


def tiny_language_model(kind: type[LanguagePolicy], dtype: torch.dtype, device: torch.device) -> tuple[Any, Any]:
    """A small model of random weights: one that reads any text byte by byte, or a shipped one that sees pictures or
    opens masks."""
    if issubclass(kind, MaskedPolicy):
        return random_language_model("tiny_masked_lm", kind, dtype, device)
    if kind.networks is not LanguagePolicy.networks:
        return random_language_model("tiny_vlm", kind, dtype, device)
    tokens = byte_tokenizer()
    return part("byte_llama").to(device, dtype), tokens


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token a byte, with a chat template."""
    special = ["<pad>", "<s>", "</s>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate([*special, *alphabet])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    template = "{% for turn in messages %}{{ turn.role }}: {{ turn.content }}</s>{% endfor %}"
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        padding_side="left",
        chat_template=template + "{% if add_generation_prompt %}assistant: {% endif %}",
    )


def is_shipped(path: str) -> bool:
    """True if this model ships with flowalign; it is tiny already."""
    return (ASSETS / path).is_dir()


def _no_files(path: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"model.path: no configuration files of '{path}' on this machine ({' '.join(str(error).split())}); "
        f"`hf download {path} --exclude '*.safetensors' '*.bin'` fetches them without the weights"
    )


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Context in which new floating-point tensors have this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
