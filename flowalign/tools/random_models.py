"""Models of random weights: tiny ones that stand for a family, and those that configuration files describe."""

from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from flowalign.data import ASSETS, shipped
from flowalign.errors import ConfigError
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.tools.tiny_pipelines import PIPELINES, build

FAMILIES = {
    "stabilityai/stable-diffusion-3": "sd35",
    "black-forest-labs/flux.1": "flux",
    "black-forest-labs/flux.1-kontext": "flux_kontext",
    "black-forest-labs/flux.1-fill": "flux_fill",
    "black-forest-labs/flux.1-canny": "flux_control",
    "black-forest-labs/flux.1-depth": "flux_control",
    "black-forest-labs/flux.2": "flux2",
    "black-forest-labs/flux.2-klein": "flux2_klein",
    "qwen/qwen-image": "qwen_image",
    "qwen/qwen-image-edit": "qwen_image_edit",
    "qwen/qwen-image-edit-2": "qwen_image_edit_plus",
    "tongyi-mai/z-image": "z_image",
    "lodestones/chroma": "chroma",
    "alpha-vllm/lumina-image-2": "lumina2",
    "efficient-large-model/sana": "sana",
    "lightricks/ltx-video": "ltx",
    "lightricks/ltx-2": "ltx2",
    "wan-ai/wan2": "wan",
    "wan-ai/wan2.1-i2v": "wan_i2v",
    "wan-ai/wan2.2-ti2v-5b": "wan22_5b",
    "wan-ai/wan2.2-t2v-a14b": "wan22_14b",
    "wan-ai/wan2.2-i2v-a14b": "wan22_14b_i2v",
    "kandinskylab/kandinsky-5.0-t2i": "kandinsky5_image",
    "kandinskylab/kandinsky-5.0-i2i": "kandinsky5_edit",
    "kandinskylab/kandinsky-5.0-t2v": "kandinsky5_video",
    "kandinskylab/kandinsky-5.0-i2v": "kandinsky5_i2v",
    "hunyuanvideo-community/hunyuanvideo": "hunyuan_video",
    "hunyuanvideo-community/hunyuanvideo-1.5": "hunyuan_video15",
    "hunyuanvideo-community/hunyuanvideo-1.5-480p_i2v": "hunyuan_video15_i2v",
    "hunyuanvideo-community/hunyuanvideo-1.5-720p_i2v": "hunyuan_video15_i2v",
    "hunyuanvideo-community/hunyuanimage": "hunyuan_image",
    "thudm/cogview4": "cogview4",
    "zai-org/cogview4": "cogview4",
    "stabilityai/stable-diffusion-2": "sd2_v",
    "stabilityai/stable-diffusion-2-inpainting": "sd15_inpaint",
    "stabilityai/stable-diffusion-xl": "sdxl",
    "diffusers/stable-diffusion-xl-1.0-inpainting": "sdxl_inpaint",
    "stable-diffusion-v1-5/": "sd15",
    "stable-diffusion-v1-5/stable-diffusion-inpainting": "sd15_inpaint",
}
"""beginnings of hub names, in lower case, and the tiny pipeline of the same class; the longest that fits counts"""


def tiny_name(path: str) -> str:
    """The tiny pipeline that stands for a model: a hub name, a folder, or one shipped with flowalign."""
    local = Path(shipped(path))
    if local.is_dir():
        own = DiffusionPipeline.load_config(str(local))["_class_name"]
        for name in PIPELINES:
            if type(build(name)).__name__ == own:
                return name
        raise ConfigError(f"model.path: no tiny pipeline is of the class {own}; --full builds one from '{path}' itself")
    fitting = [prefix for prefix in FAMILIES if path.lower().startswith(prefix) and FAMILIES[prefix] in PIPELINES]
    if not fitting:
        raise ConfigError(
            f"model.path: which family '{path}' is of cannot be told from its name; with its configuration files in "
            "the hub's cache or in a folder, --full builds it"
        )
    return FAMILIES[max(fitting, key=len)]


def random_pipeline(path: str, dtype: torch.dtype, device: torch.device) -> DiffusionPipeline:
    """A pipeline of random weights from its configuration files alone, in a folder or in the hub's cache."""
    import diffusers
    import transformers

    source = str(shipped(path))
    try:
        index = DiffusionPipeline.load_config(source, local_files_only=True)
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
                parts[name] = target.from_pretrained(source, subfolder=name, local_files_only=True)
                continue
            # the denoiser where it is trained, the others where they stay
            with torch.device(device if name in ("transformer", "unet") else "cpu"), _default(dtype):
                if library == "diffusers":
                    parts[name] = target.from_config(target.load_config(source, subfolder=name, local_files_only=True))
                else:
                    own = transformers.AutoConfig.from_pretrained(source, subfolder=name, local_files_only=True)
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
        own = AutoConfig.from_pretrained(source, local_files_only=True)
        reader = kind.readers.from_pretrained(source, local_files_only=True)
    except OSError as error:
        raise _no_files(path, error) from error
    with torch.device(device):
        return kind.networks.from_config(own, dtype=dtype), reader


def tiny_language_model(kind: type[LanguagePolicy], dtype: torch.dtype, device: torch.device) -> tuple[Any, Any]:
    """A small model that reads any text, byte by byte, or the shipped one with eyes: random weights."""
    if kind.networks is not LanguagePolicy.networks:
        return random_language_model("tiny_vlm", kind, dtype, device)
    tokens = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32768,
        pad_token_id=tokens.pad_token_id,
        bos_token_id=tokens.bos_token_id,
        eos_token_id=tokens.eos_token_id,
    )
    return LlamaForCausalLM(config).to(device, dtype), tokens


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


class _default:
    """Context manager: new floating-point tensors have this dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.own = dtype, torch.get_default_dtype()

    def __enter__(self) -> None:
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *exception: object) -> None:
        torch.set_default_dtype(self.own)
