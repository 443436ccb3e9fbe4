"""FLUX and Chroma, which comes from it."""

from typing import Any

import diffusers
from diffusers import DiffusionPipeline
from transformers import (
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    PixtralVisionConfig,
    Qwen3ForCausalLM,
)

from flowalign.tools.tiny_pipelines.parts import (
    CHAT,
    CHAT_OF_PARTS,
    FLUX_SHIFT,
    SMALL,
    UNSHARED,
    WORDS,
    Tiny,
    clip,
    flow,
    qwen3,
    t5,
    tokenizer,
    vae,
)


def flux(kind: type = diffusers.FluxPipeline, **channels: int) -> DiffusionPipeline:
    transformer = diffusers.FluxTransformer2DModel(
        **({"in_channels": 8} | channels),
        num_layers=2,
        num_single_layers=1,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        guidance_embeds=True,
        axes_dims_rope=(4, 4, 8),
        **UNSHARED,
    )
    return kind(
        transformer=transformer,
        scheduler=flow(**FLUX_SHIFT),
        vae=vae(2, shift_factor=0.0609, scaling_factor=1.5035),
        text_encoder=clip(),
        tokenizer=tokenizer(),
        text_encoder_2=t5(),
        tokenizer_2=tokenizer(),
    )


def flux2_parts(guidance: bool, levels: int) -> dict[str, Any]:
    transformer = diffusers.Flux2Transformer2DModel(
        in_channels=8,
        num_layers=1,
        num_single_layers=1,
        joint_attention_dim=32,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=guidance,
        **UNSHARED,
    )
    autoencoder = diffusers.AutoencoderKLFlux2(
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        block_out_channels=(8,) * levels,
        layers_per_block=1,
        latent_channels=2,
        norm_num_groups=2,
    )
    autoencoder.bn.running_mean.normal_()
    autoencoder.bn.running_var.uniform_(0.5, 2)
    return {"transformer": transformer, "scheduler": flow(**FLUX_SHIFT), "vae": autoencoder}


def flux2(levels: int = 1) -> DiffusionPipeline:
    text = MistralConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
    )
    vision = PixtralVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=32, patch_size=16
    )
    pipe = diffusers.Flux2Pipeline(
        text_encoder=Mistral3ForConditionalGeneration(Mistral3Config(text_config=text, vision_config=vision)),
        tokenizer=tokenizer(CHAT_OF_PARTS),
        **flux2_parts(True, levels),
    )
    # in bytes it would fill the whole prompt
    pipe.system_message = ""
    return pipe


def flux2_klein(levels: int = 1) -> DiffusionPipeline:
    return diffusers.Flux2KleinPipeline(
        text_encoder=qwen3(Qwen3ForCausalLM), tokenizer=tokenizer(CHAT), **flux2_parts(False, levels)
    )


def chroma() -> DiffusionPipeline:
    transformer = diffusers.ChromaTransformer2DModel(
        in_channels=8,
        num_layers=2,
        num_single_layers=1,
        joint_attention_dim=32,
        axes_dims_rope=(4, 4, 8),
        approximator_num_channels=8,
        approximator_hidden_dim=16,
        approximator_layers=1,
        **UNSHARED,
    )
    return diffusers.ChromaPipeline(
        transformer=transformer,
        scheduler=flow(**FLUX_SHIFT),
        vae=vae(2, shift_factor=0.0609, scaling_factor=1.5035),
        text_encoder=t5(),
        tokenizer=tokenizer(),
    )


PIPELINES: dict[str, Tiny] = {
    "flux": Tiny(flux, SMALL, {"max_sequence_length": 20}),
    "flux_kontext": Tiny(
        lambda: flux(diffusers.FluxKontextPipeline),
        SMALL,
        {"max_sequence_length": 20},
        images=1,
        given=lambda images, mask: {"image": images[0], "max_area": 8 * 16, "_auto_resize": False},
    ),
    "flux_fill": Tiny(
        lambda: flux(diffusers.FluxFillPipeline, in_channels=20, out_channels=8),
        SMALL,
        {"max_sequence_length": 20},
        images=1,
        masked=True,
        given=lambda images, mask: {"image": images, "mask_image": mask},
    ),
    "flux_control": Tiny(
        lambda: flux(diffusers.FluxControlPipeline, in_channels=16, out_channels=8),
        SMALL,
        {"max_sequence_length": 20},
        images=1,
        given=lambda images, mask: {"control_image": images[0]},
    ),
    "flux2_reference": Tiny(
        lambda: flux2(levels=4),
        {"height": 64, "width": 96},
        {"max_sequence_length": 20, "text_encoder_out_layers": (1, 2)},
        images=2,
        given=lambda images, mask: {"image": images},
    ),
    "flux2_klein_reference": Tiny(
        lambda: flux2_klein(levels=4),
        {"height": 64, "width": 96},
        {"max_sequence_length": 20, "text_encoder_out_layers": (1, 2)},
        images=1,
    ),
    "flux2": Tiny(flux2, SMALL, {"max_sequence_length": 20, "text_encoder_out_layers": (1, 2)}),
    "flux2_klein": Tiny(flux2_klein, SMALL, {"max_sequence_length": 20, "text_encoder_out_layers": (1, 2)}),
    "chroma": Tiny(chroma, SMALL, {"max_sequence_length": 20}),
}
