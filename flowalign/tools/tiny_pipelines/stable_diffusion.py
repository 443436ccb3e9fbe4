"""Stable Diffusion 1.5, 2, XL and 3.5."""

from typing import Any

import diffusers
from diffusers import DiffusionPipeline, PNDMScheduler
from PIL.Image import Image

from flowalign.tools.tiny_pipelines.parts import LAST_TEXT, SMALL, Tiny, clip, flow, t5, tokenizer, vae


def sd35(kind: type = diffusers.StableDiffusion3Pipeline, channels: int = 4, seen: int = 0) -> DiffusionPipeline:
    """Its network sees that many channels of the picture and the mask beside the latents'."""
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=8,
        patch_size=1,
        in_channels=channels + seen,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_projection_dim=32,
        joint_attention_dim=32,
        pooled_projection_dim=64,
        out_channels=channels,
        qk_norm="rms_norm",
        dual_attention_layers=(0,),
    )
    return kind(
        transformer=transformer,
        scheduler=flow(shift=3.0),
        # the pipeline that fills decodes without the shift
        vae=vae(channels, shift_factor=0.0 if seen else 0.0609, scaling_factor=1.5305),
        text_encoder=clip(True),
        tokenizer=tokenizer(),
        text_encoder_2=clip(True),
        tokenizer_2=tokenizer(),
        text_encoder_3=t5(),
        tokenizer_3=tokenizer(),
    )


def unet(kind: type, **settings: Any) -> diffusers.UNet2DConditionModel:
    """One that fills sees four channels of the picture and the mask too."""
    return diffusers.UNet2DConditionModel(
        block_out_channels=(8, 16),
        layers_per_block=1,
        sample_size=8,
        in_channels=9 if "Inpaint" in kind.__name__ else 4,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=2,
        **settings,
    )


def ddpm(prediction: str) -> PNDMScheduler:
    return PNDMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        skip_prk_steps=True,
        steps_offset=1,
        prediction_type=prediction,
    )


def sd15(prediction: str = "epsilon", kind: type = diffusers.StableDiffusionPipeline) -> DiffusionPipeline:
    return kind(
        vae=vae(4, levels=2),
        text_encoder=clip(),
        tokenizer=tokenizer(),
        unet=unet(kind, cross_attention_dim=32, attention_head_dim=2),
        scheduler=ddpm(prediction),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def sdxl(prediction: str = "epsilon", kind: type = diffusers.StableDiffusionXLPipeline) -> DiffusionPipeline:
    return kind(
        vae=vae(4, levels=2),
        text_encoder=clip(),
        tokenizer=tokenizer(),
        text_encoder_2=clip(True),
        tokenizer_2=tokenizer(),
        unet=unet(
            kind,
            cross_attention_dim=64,
            attention_head_dim=(2, 4),
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            transformer_layers_per_block=(1, 2),
            projection_class_embeddings_input_dim=80,
        ),
        scheduler=ddpm(prediction),
    )


def fills(images: list[Image], mask: Image | None) -> dict[str, Any]:
    return {"image": images[0], "mask_image": mask, "strength": 1.0}


PIPELINES: dict[str, Tiny] = {
    "sd35": Tiny(sd35, {"height": 8, "width": 8}, {"max_sequence_length": 20}, unused=LAST_TEXT),
    "sd3_inpaint": Tiny(
        lambda: sd35(diffusers.StableDiffusion3InpaintPipeline, channels=16, seen=17),
        {"height": 8, "width": 8},
        {"max_sequence_length": 20},
        unused=LAST_TEXT,
        images=1,
        masked=True,
        given=fills,
    ),
    "sd15": Tiny(sd15, SMALL),
    "sd15_inpaint": Tiny(
        lambda: sd15(kind=diffusers.StableDiffusionInpaintPipeline), SMALL, images=1, masked=True, given=fills
    ),
    "sd2_v": Tiny(lambda: sd15("v_prediction"), SMALL),
    "sdxl": Tiny(sdxl, SMALL),
    "sdxl_inpaint": Tiny(
        lambda: sdxl(kind=diffusers.StableDiffusionXLInpaintPipeline), SMALL, images=1, masked=True, given=fills
    ),
    "sdxl_v": Tiny(lambda: sdxl("v_prediction"), SMALL),
}
