"""mPLUG-Owl2 (arXiv 2311.04257) on transformers' CLIP and Llama, as Q-Align and DeQA-Score train it.

A picture's patches are drawn together into a few states, which stand among the words; keys, values and norms of the
language model are others for what was seen than for what was read.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rewards.vision import without_prefix

_SIZES = """
hidden_size intermediate_size num_hidden_layers num_attention_heads image_size patch_size layer_norm_eps
""".split()
READ, SEEN = ".multiway.0.", ".multiway.1."
"""Parts of the checkpoint's names of layers that exist twice: for text and for pictures."""
_VISION_NAMES = {
    "embeddings.cls_token": "embeddings.class_embedding",
    "embeddings.patch_embed.weight": "embeddings.patch_embedding.weight",
    "embeddings.position_embedding": "embeddings.position_embedding.weight",
    "embeddings.pre_layernorm": "pre_layrnorm",
    "self_attn.dense": "self_attn.out_proj",
    "input_layernorm": "layer_norm1",
    "post_attention_layernorm": "layer_norm2",
}


class Owl(nn.Module):
    """The networks of mPLUG-Owl2.

    Args:
        config, tensors: of a published checkpoint.
    """

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        from transformers import CLIPVisionConfig, CLIPVisionModel, LlamaConfig, LlamaForCausalLM

        super().__init__()
        tower, drawn = config["visual_config"]["visual_model"], config["visual_config"]["visual_abstractor"]
        self.vision = CLIPVisionModel(CLIPVisionConfig(hidden_act="quick_gelu", **{key: tower[key] for key in _SIZES}))
        self.vision.load_state_dict(
            _vision_tensors(without_prefix(tensors, "model.vision_model."), tower["num_attention_heads"])
        )
        self.abstractor = Abstractor(drawn, config["hidden_size"])
        text_layer = without_prefix(tensors, "model.visual_abstractor.")
        self.abstractor.load_state_dict({name.removeprefix("encoder."): tensor for name, tensor in text_layer.items()})
        others = ("model.vision_model.", "model.visual_abstractor.")
        # buffers of older versions are computed today
        text = {n: t for n, t in tensors.items() if not n.startswith(others) and not n.endswith("rotary_emb.inv_freq")}
        read = {name.replace(READ, "."): tensor for name, tensor in text.items() if SEEN not in name}
        plain = {key: value for key, value in config.items() if key not in ("visual_config", "model_type")}
        self.text, report = LlamaForCausalLM.from_pretrained(
            None, config=LlamaConfig(**plain), state_dict=read, dtype=dtype, output_loading_info=True
        )
        if wrong := [*report["missing_keys"], *report["unexpected_keys"], *report["mismatched_keys"]]:
            raise ValueError(f"these are not an mPLUG-Owl2's weights: {len(wrong)} tensors differ, e.g. {wrong[0]}")
        self.is_seen = Places()
        for number, layer in enumerate(self.text.model.layers):
            for module in ("input_layernorm", "post_attention_layernorm", "self_attn.k_proj", "self_attn.v_proj"):
                text_layer = layer.get_submodule(module)
                seen = copy.deepcopy(text_layer)
                seen.load_state_dict(without_prefix(text, f"model.layers.{number}.{module}{SEEN}"))
                layer.set_submodule(module, Multiway(text_layer, seen, self.is_seen))

    def forward(self, pixels: Tensor, before: Tensor, after: Tensor) -> Tensor:
        """[B, vocabulary] logits of the next token.

        Args:
            pixels: [B, 3, H, W] preprocessed.
            before, after: [L] tokens before and after the picture.
        """
        patches = self.vision.post_layernorm(self.vision(pixels).last_hidden_state)
        pictures = self.abstractor(patches)
        embed = self.text.get_input_embeddings()
        inputs = [embed(before).expand(len(pixels), -1, -1), pictures, embed(after).expand(len(pixels), -1, -1)]
        self.is_seen.mask = torch.cat([torch.full((p.shape[1],), p is pictures, device=pixels.device) for p in inputs])
        logits: Tensor = self.text(inputs_embeds=torch.cat(inputs, dim=1), logits_to_keep=1, use_cache=False).logits
        return logits[:, -1]


class Places:
    """Picture tokens of the current sequence."""

    mask: Tensor
    """[L]"""


class Multiway(nn.Module):
    """A layer for what was read, and one of the same shape for what was seen."""

    def __init__(self, read: nn.Module, seen: nn.Module, is_seen: Places) -> None:
        super().__init__()
        self.read, self.seen, self.is_seen = read, seen, is_seen

    def forward(self, states: Tensor) -> Tensor:
        """[B, L, ...] -> [B, L, ...]"""
        return torch.where(self.is_seen.mask[:, None], self.seen(states), self.read(states))


class Abstractor(nn.Module):
    """Draws patches together: learnt queries look at them and at each other, layer by layer.

    Args:
        sizes: sizes of the checkpoint's configuration.
        width: width of the language model.
    """

    def __init__(self, sizes: Mapping[str, Any], width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes["num_hidden_layers"]))
        self.visual_fc = nn.Linear(sizes["hidden_size"], width)
        self.query_embeds = nn.Parameter(torch.empty(1, sizes["num_learnable_queries"], sizes["hidden_size"]))
        self.vit_eos = nn.Parameter(torch.empty(1, 1, width))

    def forward(self, patches: Tensor) -> Tensor:
        """[B, queries + 1, width] from [B, patches, width of the patches]; the last marks the picture's end."""
        states = self.query_embeds.expand(len(patches), -1, -1)
        for layer in self.layers:
            states = layer(states, patches)
        return torch.cat([self.visual_fc(states), self.vit_eos.expand(len(patches), -1, -1)], dim=1)


class Layer(nn.Module):
    """One layer of the abstractor; names as in the checkpoint."""

    def __init__(self, sizes: Mapping[str, Any]) -> None:
        super().__init__()
        self.crossattention = nn.ModuleDict(
            {
                "norm1": nn.LayerNorm(sizes["hidden_size"]),
                "normk": nn.LayerNorm(sizes["encoder_hidden_size"]),
                "attention": Attention(sizes),
                "output": Output(sizes),
            }
        )

    def forward(self, states: Tensor, patches: Tensor) -> Tensor:
        """[B, queries, width] -> [B, queries, width]"""
        cross = self.crossattention
        states = cross["norm1"](states)
        updated: Tensor = cross["output"](states, cross["attention"](states, cross["normk"](patches)))
        return updated


class Attention(nn.Module):
    """Queries look at themselves and at patches, each at its place."""

    q_pos_embed: Tensor
    k_pos_embed: Tensor

    def __init__(self, sizes: Mapping[str, Any]) -> None:
        super().__init__()
        width, seen = sizes["hidden_size"], sizes["encoder_hidden_size"]
        self.heads = sizes["num_attention_heads"]
        self.query, self.key, self.value = nn.Linear(width, width), nn.Linear(seen, width), nn.Linear(seen, width)
        self.register_buffer("q_pos_embed", torch.empty(sizes["num_learnable_queries"], width))
        self.register_buffer("k_pos_embed", torch.empty((sizes.get("grid_size") or 32) ** 2 + 1, width))

    def forward(self, states: Tensor, patches: Tensor) -> Tensor:
        """[B, queries, width] what was drawn."""
        context = torch.cat([states, patches], dim=1)
        query = self.query(states + self.q_pos_embed)
        mixed = (query, self.key(context + torch.cat([self.q_pos_embed, self.k_pos_embed])), self.value(context))
        heads = (states.unflatten(-1, (self.heads, -1)).transpose(1, 2) for states in mixed)
        return F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)


class Output(nn.Module):
    """Add the attention's output, then apply a gated network."""

    def __init__(self, sizes: Mapping[str, Any]) -> None:
        super().__init__()
        width = sizes["hidden_size"]
        self.out_proj, self.norm2, self.mlp = nn.Linear(width, width), nn.LayerNorm(width), GatedMLP(sizes)

    def forward(self, states: Tensor, drawn: Tensor) -> Tensor:
        """[B, queries, width] -> [B, queries, width]"""
        states = states + self.out_proj(drawn)
        updated: Tensor = states + self.mlp(self.norm2(states))
        return updated


class GatedMLP(nn.Module):
    """A gated feed-forward network with a norm inside."""

    def __init__(self, sizes: Mapping[str, Any]) -> None:
        super().__init__()
        width, inner = sizes["hidden_size"], sizes["intermediate_size"]
        self.w1, self.w2, self.w3 = nn.Linear(width, inner), nn.Linear(inner, width), nn.Linear(width, inner)
        self.ffn_ln = nn.LayerNorm(inner, sizes["layer_norm_eps"])

    def forward(self, states: Tensor) -> Tensor:
        """[..., width] -> [..., width]"""
        updated: Tensor = self.w2(self.ffn_ln(F.silu(self.w1(states)) * self.w3(states)))
        return updated


def _vision_tensors(tensors: Mapping[str, Tensor], heads: int) -> dict[str, Tensor]:
    """transformers' CLIP's tensors of the authors' picture tower, whose query, key and value stand together by head."""
    renamed = {}
    for name, tensor in tensors.items():
        for old, new in _VISION_NAMES.items():
            name = name.replace(old, new)
        if ".query_key_value." in name:
            split = tensor.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(1, 2)
            for letter, weight in zip("qkv", split, strict=True):
                renamed[name.replace("query_key_value", f"{letter}_proj")] = weight
        elif name.endswith("embeddings.class_embedding"):
            renamed[name] = tensor.flatten()
        else:
            renamed[name] = tensor[0] if name.endswith("position_embedding.weight") else tensor
    return renamed
