"""Wan."""

from typing import Any

import diffusers
from diffusers import DiffusionPipeline
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
    UMT5Config,
    UMT5EncoderModel,
)

from flowalign.tools.tiny_pipelines.parts import WORDS, Tiny, flow, tokenizer


def wan(expand_timesteps: bool = False) -> DiffusionPipeline:
    return diffusers.WanPipeline(**wan_parts(), expand_timesteps=expand_timesteps)


def wan22_14b() -> DiffusionPipeline:
    parts = wan_parts()
    return diffusers.WanPipeline(**parts, transformer_2=wan_parts()["transformer"], boundary_ratio=0.8)


def wan22_14b_i2v() -> DiffusionPipeline:
    second = wan_parts(channels=36)["transformer"]
    return diffusers.WanImageToVideoPipeline(**wan_parts(channels=36), transformer_2=second, boundary_ratio=0.8)


def wan_i2v(expand_timesteps: bool = False) -> DiffusionPipeline:
    if expand_timesteps:
        return diffusers.WanImageToVideoPipeline(**wan_parts(), expand_timesteps=True)
    eye = CLIPVisionConfig(
        hidden_size=32,
        projection_dim=32,
        intermediate_size=37,
        num_attention_heads=2,
        num_hidden_layers=2,
        image_size=16,
        patch_size=8,
    )
    return diffusers.WanImageToVideoPipeline(
        **wan_parts(channels=36, image_dim=32),
        image_encoder=CLIPVisionModelWithProjection(eye),
        image_processor=CLIPImageProcessor(crop_size={"height": 16, "width": 16}, size={"shortest_edge": 16}),
    )


def wan_parts(channels: int = 16, **settings: Any) -> dict[str, Any]:
    transformer = diffusers.WanTransformer3DModel(
        **settings,
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=channels,
        out_channels=16,
        text_dim=32,
        freq_dim=256,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=32,
    )
    text = UMT5Config(vocab_size=WORDS, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4, num_decoder_layers=1)
    return {
        "tokenizer": tokenizer(),
        "text_encoder": UMT5EncoderModel(text),
        "vae": diffusers.AutoencoderKLWan(
            base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
        ),
        "scheduler": flow(shift=3.0),
        "transformer": transformer,
    }


PIPELINES: dict[str, Tiny] = {
    "wan": Tiny(wan, {"height": 16, "width": 32, "num_frames": 5}, {"max_sequence_length": 20}),
    "wan22_5b": Tiny(
        lambda: wan(expand_timesteps=True),
        {"height": 16, "width": 32, "num_frames": 5},
        {"max_sequence_length": 20},
    ),
    "wan22_14b": Tiny(wan22_14b, {"height": 16, "width": 32, "num_frames": 5}, {"max_sequence_length": 20}),
    "wan_i2v": Tiny(wan_i2v, {"height": 16, "width": 32, "num_frames": 5}, {"max_sequence_length": 20}, images=1),
    "wan22_14b_i2v": Tiny(
        wan22_14b_i2v, {"height": 16, "width": 32, "num_frames": 5}, {"max_sequence_length": 20}, images=1
    ),
    "wan22_5b_i2v": Tiny(
        lambda: wan_i2v(expand_timesteps=True),
        {"height": 16, "width": 32, "num_frames": 5},
        {"max_sequence_length": 20},
        images=1,
    ),
}
