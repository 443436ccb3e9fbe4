"""LoRA files for other programs: their names, and that diffusers reads the same LoRA back from them."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxPipeline
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file
from torch import Tensor

from flowalign.errors import ConfigError
from flowalign.planning.tiny_pipelines import PIPELINES, build
from flowalign.policies.diffusion import DiffusersPolicy
from flowalign.policies.diffusion.lora_formats import LAYOUTS, converted, layout_of, pairs_of
from flowalign.policies.diffusion.storage import lora_file

ORIGINALS = Path(__file__).parent / "originals"
ALPHA, RANK = 3.0, 2
DOUBLE = r"transformer_blocks\.\d+\.attn\.(to_q|to_k|to_v|add_q_proj|add_k_proj|add_v_proj|to_out\.0|to_add_out)"
"""the attention of Flux's double blocks"""


def with_lora(name: str, targets: str | list[str] | None = None) -> DiffusersPolicy:
    """A tiny pipeline with a LoRA of random weights."""
    policy = DiffusersPolicy(build(name), "cpu", encode_options=PIPELINES[name].encode)
    policy.add_lora(RANK, ALPHA, targets)
    for parameter in policy.trainable().values():
        parameter.data.normal_(0, 0.3)
    return policy


def exported(policy: DiffusersPolicy, kind: str, folder: Path) -> dict[str, Tensor]:
    policy.save(folder)
    saved = load_file(folder / lora_file(policy.family.denoiser))
    pairs = pairs_of(saved, f"{policy.family.denoiser}.", lambda layer: ALPHA)
    layout = layout_of(kind, type(policy.network).__name__)
    return converted(pairs, layout, lambda layer: policy.network.get_submodule(layer).out_features)


def deltas(network: Any, adapter: str) -> dict[str, Tensor]:
    """What the adapter adds to each weight; nothing where that is 0."""
    layers = {name: module for name, module in network.named_modules() if isinstance(module, BaseTunerLayer)}
    own = {name: layer.get_delta_weight(adapter) for name, layer in layers.items() if adapter in layer.lora_A}
    return {name: delta for name, delta in own.items() if delta.any()}


def sampled(policy: DiffusersPolicy, name: str) -> Tensor:
    call = {"guidance": 1.0} | PIPELINES[name].call
    return policy.sample(["a red circle"], [0], steps=2, **call).trajectory.final


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("kohya", name) for name in ("sd15", "sdxl", "flux", "chroma")),
        *(("comfyui", name) for name in ("sd15", "sd35", "flux", "qwen_image", "z_image", "ltx", "wan")),
    ],
)
def test_diffusers_reads_the_same_lora_back(kind: str, name: str, tmp_path: Path) -> None:
    # of kohya's single blocks diffusers reads those of the published size alone
    policy = with_lora(name, DOUBLE if kind == "kohya" and name in ("flux", "chroma") else None)
    before, own = sampled(policy, name), deltas(policy.network, "default")
    tensors = exported(policy, kind, tmp_path)
    policy.network.delete_adapters("default")
    policy.pipeline.load_lora_weights(tensors, adapter_name="again")
    read = deltas(policy.network, "again")
    assert own and read.keys() == own.keys()
    for layer in own:
        torch.testing.assert_close(read[layer], own[layer], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(sampled(policy, name), before, atol=1e-6, rtol=1e-6)


def test_the_names_are_those_of_the_programs(tmp_path: Path) -> None:
    """Their own lists of layers, recorded: {} is a number."""
    known = json.loads((ORIGINALS / "lora_layers.json").read_text())
    for network in ("SD3Transformer2DModel", "FluxTransformer2DModel"):
        layout = LAYOUTS["kohya"][network]
        named = {layout.prefix + name.replace(".", "_") for name in layout.names}
        # whose parts are in another order in SD3's last block
        assert named == set(known["kohya"][network]) - {"lora_unet_joint_blocks_{}_context_block_adaLN_modulation_1"}
        assert {f"transformer.{part}" for parts in layout.names.values() for part in parts} <= set(
            known["comfyui"][network]
        )
    for kind, name in (("kohya", "sd15"), ("comfyui", "sd35"), ("comfyui", "flux"), ("comfyui", "z_image")):
        policy = with_lora(name)
        keys = {re.sub(r"\.(lora_\w+\.weight|alpha)$", "", key) for key in exported(policy, kind, tmp_path / name)}
        numbers = r"(?<=blocks_)\d+|(?<=attentions_)\d+" if kind == "kohya" else r"(?<=\.)\d+(?=\.)"
        found = {re.sub(numbers, "{}", key, count=0 if kind == "kohya" else 1) for key in keys}
        assert found and found <= set(known[kind][type(policy.network).__name__])


def test_a_flux_lora_is_what_kohyas_own_conversion_makes_of_it() -> None:
    recorded = load_file(ORIGINALS / "flux_lora.safetensors")
    ours, theirs = (
        {key.removeprefix(start): value for key, value in recorded.items() if key.startswith(start)}
        for start in ("diffusers/", "kohya/")
    )
    pairs = pairs_of(ours, "transformer.", lambda layer: 2.0)
    made = converted(pairs, LAYOUTS["kohya"]["FluxTransformer2DModel"], lambda layer: len(pairs[layer].up))
    assert made.keys() == theirs.keys()
    for key, value in made.items():
        torch.testing.assert_close(value, theirs[key].to(value.dtype), msg=key)


def test_diffusers_reads_the_single_blocks_of_flux_back() -> None:
    """At the published width of 3072, for which its reader is made."""
    parts = {"attn.to_q": 3072, "attn.to_k": 3072, "attn.to_v": 3072, "proj_mlp": 12288}
    weights = {}
    for part, width in parts.items():
        weights[f"transformer.single_transformer_blocks.7.{part}.lora_A.weight"] = torch.randn(RANK, 3072)
        weights[f"transformer.single_transformer_blocks.7.{part}.lora_B.weight"] = torch.randn(width, RANK)
    pairs = pairs_of(weights, "transformer.", lambda layer: 4.0)
    made = converted(pairs, LAYOUTS["kohya"]["FluxTransformer2DModel"], lambda layer: len(pairs[layer].up))
    read = FluxPipeline.lora_state_dict(made)
    assert read.keys() == weights.keys()
    for name, pair in pairs.items():
        down, up = (read[f"transformer.{name}.lora_{part}.weight"] for part in "AB")
        torch.testing.assert_close((up @ down)[:50], (pair.whole @ pair.down)[:50])


def test_parts_without_a_lora_and_smaller_ones_are_padded() -> None:
    weights = {}
    for part, rank in (("to_q", 1), ("to_v", 2)):
        weights[f"t.transformer_blocks.0.attn.{part}.lora_A.weight"] = torch.randn(rank, 3)
        weights[f"t.transformer_blocks.0.attn.{part}.lora_B.weight"] = torch.randn(4, rank)
    pairs = pairs_of(weights, "t.", lambda layer: {"q": 5.0, "v": 1.0}[layer[-1]])
    made = converted(pairs, LAYOUTS["kohya"]["SD3Transformer2DModel"], lambda layer: 4)
    down, up, alpha = (
        made[f"lora_unet_joint_blocks_0_x_block_attn_qkv.{k}"] for k in ("lora_down.weight", "lora_up.weight", "alpha")
    )
    whole = alpha / len(down) * up @ down
    q, v = (pair.up @ pair.down * pair.alpha / len(pair.down) for pair in pairs.values())
    torch.testing.assert_close(whole, torch.cat([q, torch.zeros(4, 3), v]))


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda: layout_of("kohya", "SanaTransformer2DModel"), "kohya has for SanaTransformer2DModel.*diffusers work"),
        (lambda: layout_of("kohya", "WanTransformer3DModel"), "diffusers and comfyui work"),
        (lambda: pairs_of({"t.a.lora_magnitude_vector": torch.ones(1)}, "t.", lambda layer: 1.0), "only a plain LoRA"),
        (
            lambda: converted(
                pairs_of({f"t.proj_out.lora_{p}.weight": torch.ones(1, 1) for p in "AB"}, "t.", lambda layer: 1.0),
                LAYOUTS["kohya"]["FluxTransformer2DModel"],
                lambda layer: 1,
            ),
            "'proj_out' has no name",
        ),
    ],
)
def test_what_has_no_name_is_refused(attempt: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        attempt()
