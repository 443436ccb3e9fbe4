"""Kandinsky 5."""

from typing import Any

import diffusers
from diffusers import DiffusionPipeline
from transformers import Qwen2_5_VLForConditionalGeneration

from flowalign.tools.tiny_pipelines.parts import (
    CHAT_OF_PARTS,
    VISION,
    Tiny,
    clip,
    flow,
    processor,
    qwen_vl,
    tokenizer,
    vae,
)


def kandinsky5_parts(**settings: Any) -> dict[str, Any]:
    transformer = diffusers.Kandinsky5Transformer3DModel(
        in_visual_dim=4,
        in_text_dim=16,
        in_text_dim2=32,
        time_dim=16,
        out_visual_dim=4,
        model_dim=16,
        ff_dim=16,
        num_text_blocks=1,
        num_visual_blocks=2,
        axes_dims=(2, 2, 4),
        **settings,
    )
    words = tokenizer(CHAT_OF_PARTS)
    words.add_tokens(list(VISION), special_tokens=True)
    return {
        "transformer": transformer,
        "scheduler": flow(shift=5.0),
        "text_encoder": qwen_vl(Qwen2_5_VLForConditionalGeneration),
        "tokenizer": processor(words),
        "text_encoder_2": clip(),
        "tokenizer_2": tokenizer(),
    }


def kandinsky5_image(kind: type = diffusers.Kandinsky5T2IPipeline) -> DiffusionPipeline:
    edits = kind is diffusers.Kandinsky5I2IPipeline
    # of scale 8, which the pipeline takes for granted
    pipe = kind(**kandinsky5_parts(visual_cond=edits), vae=vae(4, levels=4))
    pipe.prompt_template = "".join(VISION[:3]) + "{}" if edits else "{}"
    pipe.prompt_template_encode_start_idx, pipe.resolutions = 0, [(64, 32)]
    return pipe


def kandinsky5_video(kind: type = diffusers.Kandinsky5T2VPipeline) -> DiffusionPipeline:
    autoencoder = diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=2,
        mid_block_add_attention=False,
    )
    pipe = kind(**kandinsky5_parts(visual_cond=True), vae=autoencoder)
    pipe.prompt_template, pipe.prompt_template_encode_start_idx = "{}", 0
    return pipe


ROUNDED = 1e-4
"""ratios, where diffusers rounds rotated queries and keys to bfloat16 in any network"""

PIPELINES: dict[str, Tiny] = {
    "kandinsky5_image": Tiny(
        kandinsky5_image,
        {"height": 32, "width": 64},
        {"max_sequence_length": 20},
        alone=True,
        ratio=ROUNDED,
        negative=True,
    ),
    "kandinsky5_edit": Tiny(
        lambda: kandinsky5_image(diffusers.Kandinsky5I2IPipeline),
        {"height": 32, "width": 64},
        {"max_sequence_length": 40},
        images=1,
        ratio=ROUNDED,
        negative=True,
    ),
    "kandinsky5_video": Tiny(
        kandinsky5_video,
        {"height": 16, "width": 32, "num_frames": 5},
        {"max_sequence_length": 20},
        alone=True,
        ratio=ROUNDED,
        negative=True,
    ),
    "kandinsky5_i2v": Tiny(
        lambda: kandinsky5_video(diffusers.Kandinsky5I2VPipeline),
        {"height": 16, "width": 32, "num_frames": 21},
        {"max_sequence_length": 20},
        images=1,
        ratio=ROUNDED,
        negative=True,
    ),
}
