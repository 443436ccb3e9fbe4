"""LoRA files as other programs name them: kohya's sd-scripts with the web UIs that read its files, and ComfyUI.

A LoRA adds (alpha / rank) * up @ down to a weight. kohya's names come from the models' first releases, with
underscores, and keep several of diffusers' layers as one: the q, k and v of an attention. Their LoRAs become one whose
`down` stacks the parts' own and whose `up` is block diagonal, which is the same sum exactly. ComfyUI
reads diffusers' own names of most transformers, but not diffusers' record of alpha, so that alpha / rank is multiplied
into `up` there.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flowalign.errors import ConfigError

Names = Mapping[str, tuple[str, ...]]
"""Another program's names of layers, {} for a block's number, each with the layers of diffusers that it is made of."""


@dataclass(frozen=True)
class LoraFactors:
    """The LoRA of one layer."""

    down: Tensor
    """[rank, inputs]"""
    up: Tensor
    """[outputs, rank]"""
    alpha: float

    @property
    def whole(self) -> Tensor:
        """[outputs, rank] with alpha / rank in it."""
        return self.up * (self.alpha / len(self.down))


@dataclass(frozen=True)
class Layout:
    """A program's names in the LoRA of a kind of network."""

    prefix: str
    names: Names | None = None
    """None: the names of diffusers."""
    underscores: bool = False
    """kohya's style: no dots in names, lora_down, lora_up and alpha; otherwise lora_A and lora_B."""


def _blocks(theirs: str, ours: str, layers: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    return {f"{theirs}.{{}}.{name}": tuple(f"{ours}.{{}}.{our}" for our in of.split()) for name, of in layers.items()}


SD3 = _blocks(
    "joint_blocks",
    "transformer_blocks",
    {
        "x_block.attn.qkv": "attn.to_q attn.to_k attn.to_v",
        "x_block.attn.proj": "attn.to_out.0",
        "x_block.attn2.qkv": "attn2.to_q attn2.to_k attn2.to_v",
        "x_block.attn2.proj": "attn2.to_out.0",
        "x_block.mlp.fc1": "ff.net.0.proj",
        "x_block.mlp.fc2": "ff.net.2",
        "x_block.adaLN_modulation.1": "norm1.linear",
        "context_block.attn.qkv": "attn.add_q_proj attn.add_k_proj attn.add_v_proj",
        "context_block.attn.proj": "attn.to_add_out",
        "context_block.mlp.fc1": "ff_context.net.0.proj",
        "context_block.mlp.fc2": "ff_context.net.2",
    },
)
FLUX = _blocks(
    "double_blocks",
    "transformer_blocks",
    {
        "img_attn.qkv": "attn.to_q attn.to_k attn.to_v",
        "img_attn.proj": "attn.to_out.0",
        "img_mlp.0": "ff.net.0.proj",
        "img_mlp.2": "ff.net.2",
        "img_mod.lin": "norm1.linear",
        "txt_attn.qkv": "attn.add_q_proj attn.add_k_proj attn.add_v_proj",
        "txt_attn.proj": "attn.to_add_out",
        "txt_mlp.0": "ff_context.net.0.proj",
        "txt_mlp.2": "ff_context.net.2",
        "txt_mod.lin": "norm1_context.linear",
    },
) | _blocks(
    "single_blocks",
    "single_transformer_blocks",
    {
        "linear1": "attn.to_q attn.to_k attn.to_v proj_mlp",
        "linear2": "proj_out",
        "modulation.lin": "norm.linear",
    },
)
WAN = _blocks(
    "blocks",
    "blocks",
    {
        "self_attn.q": "attn1.to_q",
        "self_attn.k": "attn1.to_k",
        "self_attn.v": "attn1.to_v",
        "self_attn.o": "attn1.to_out.0",
        "cross_attn.q": "attn2.to_q",
        "cross_attn.k": "attn2.to_k",
        "cross_attn.v": "attn2.to_v",
        "cross_attn.o": "attn2.to_out.0",
        "cross_attn.k_img": "attn2.add_k_proj",
        "cross_attn.v_img": "attn2.add_v_proj",
        "ffn.0": "ffn.net.0.proj",
        "ffn.2": "ffn.net.2",
    },
)
UNET = Layout("lora_unet_", underscores=True)
LAYOUTS: dict[str, dict[str, Layout]] = {
    "kohya": {
        "UNet2DConditionModel": UNET,
        "SD3Transformer2DModel": Layout("lora_unet_", SD3, underscores=True),
        "FluxTransformer2DModel": Layout("lora_unet_", FLUX, underscores=True),
        "ChromaTransformer2DModel": Layout("lora_unet_", FLUX, underscores=True),
    },
    "comfyui": {
        "UNet2DConditionModel": UNET,
        "SD3Transformer2DModel": Layout("transformer."),
        "FluxTransformer2DModel": Layout("transformer."),
        "ChromaTransformer2DModel": Layout("transformer."),
        "QwenImageTransformer2DModel": Layout("transformer."),
        "ZImageTransformer2DModel": Layout("transformer."),
        "LTXVideoTransformer3DModel": Layout("diffusion_model."),
        "WanTransformer3DModel": Layout("diffusion_model.", WAN),
    },
}


def layout_of(kind: str, network: str) -> Layout:
    """A format's names in the LoRA of this class of networks.

    Raises:
        ConfigError: that is not known here; says which formats are.
    """
    if network not in LAYOUTS[kind]:
        others = ["diffusers", *(other for other, known in LAYOUTS.items() if network in known)]
        raise ConfigError(
            f"--format: the names that {kind} has for {network} are not known here; {' and '.join(others)} work"
        )
    return LAYOUTS[kind][network]


def pairs_of(weights: Mapping[str, Tensor], prefix: str, alpha_of: Callable[[str], float]) -> dict[str, LoraFactors]:
    """The LoRA of every layer of a file as diffusers writes it.

    Args:
        prefix: prefix of its keys, with the dot.
        alpha_of: alpha of the layer of this name.

    Raises:
        ConfigError: there is more to it than two matrices for layers of the denoiser.
    """
    pairs = {}
    for key in weights:
        name, separator, rest = key.removeprefix(prefix).partition(".lora_")
        if not separator or rest not in ("A.weight", "B.weight") or not key.startswith(prefix):
            raise ConfigError(f"'{key}': only a plain LoRA of the denoiser can be converted; --format diffusers works")
        down, up = (weights[f"{prefix}{name}.lora_{factor}.weight"] for factor in "AB")
        pairs[name] = LoraFactors(down, up, alpha_of(name))
    return pairs


def converted(pairs: Mapping[str, LoraFactors], layout: Layout, width: Callable[[str], int]) -> dict[str, Tensor]:
    """The tensors of a file in another program's layout.

    Args:
        pairs: by diffusers' name of the layer.
        width: number of outputs of the layer of this name.

    Raises:
        ConfigError: a layer has no name there.
    """
    pairs = pairs if layout.names is None else _renamed(pairs, layout.names, width)
    tensors: dict[str, Tensor] = {}
    for name, pair in pairs.items():
        if layout.underscores:
            key = layout.prefix + name.replace(".", "_")
            tensors |= {f"{key}.lora_down.weight": pair.down, f"{key}.lora_up.weight": pair.up}
            tensors[f"{key}.alpha"] = torch.tensor(pair.alpha)
        else:
            key = layout.prefix + name
            tensors |= {f"{key}.lora_A.weight": pair.down, f"{key}.lora_B.weight": pair.whole}
    return {key: value.contiguous() for key, value in tensors.items()}


def _renamed(pairs: Mapping[str, LoraFactors], names: Names, width: Callable[[str], int]) -> dict[str, LoraFactors]:
    theirs = {our: name for name, ours in names.items() for our in ours}
    new = {}
    for layer in pairs:
        number = next(iter(re.findall(r"\.(\d+)\.", layer)), "")
        name = theirs.get(layer.replace(f".{number}.", ".{}.", 1))
        if name is None:
            raise ConfigError(f"the layer '{layer}' has no name in this format; --format diffusers works")
        new[name.format(number)] = [our.format(number) for our in names[name]]
    return {name: _one([pairs.get(our) for our in ours], list(map(width, ours))) for name, ours in new.items()}


def _one(parts: Sequence[LoraFactors | None], widths: Sequence[int]) -> LoraFactors:
    """The LoRA of a layer that is several; a part without one has zeros, and all have the same share of the rank."""
    first = next(pair for pair in parts if pair is not None)
    if len(parts) == 1:
        return first
    rank = max(len(pair.down) for pair in parts if pair is not None)
    down = first.down.new_zeros(len(parts), rank, first.down.shape[1])
    up = first.up.new_zeros(sum(widths), len(parts), rank)
    ends = torch.tensor(widths).cumsum(0).tolist()
    for slot, (pair, end, outputs) in enumerate(zip(parts, ends, widths, strict=True)):
        if pair is not None:
            pair_rank = len(pair.down)
            down[slot, :pair_rank] = pair.down
            up[end - outputs : end, slot, :pair_rank] = pair.whole
    return LoraFactors(down.flatten(0, 1), up.flatten(1), float(len(parts) * rank))
