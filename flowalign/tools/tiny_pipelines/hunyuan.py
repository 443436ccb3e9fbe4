"""HunyuanImage and HunyuanVideo."""

from typing import Any

import diffusers
from diffusers import DiffusionPipeline
from transformers import (
    LlamaConfig,
    LlamaModel,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLTextModel,
    SiglipImageProcessor,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from flowalign.tools.tiny_pipelines.parts import (
    CHAT,
    LAST_TEXT,
    SMALL,
    UNSHARED,
    WORDS,
    Tiny,
    clip,
    flow,
    qwen_vl,
    t5,
    tokenizer,
)


def hunyuan_text(kind: type) -> dict[str, Any]:
    letters = t5(16)
    return {
        "text_encoder": qwen_vl(kind),
        # where nothing would be left of an empty prompt, its mean over no tokens would not be a number
        "tokenizer": tokenizer(CHAT + "end"),
        "text_encoder_2": letters,
        "tokenizer_2": tokenizer(),
        "guider": diffusers.ClassifierFreeGuidance(),
    }


def hunyuan_image(embedded: bool = False) -> DiffusionPipeline:
    transformer = diffusers.HunyuanImageTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=2,
        num_single_layers=1,
        num_refiner_layers=1,
        guidance_embeds=embedded,
        text_embed_dim=16,
        text_embed_2_dim=16,
        rope_axes_dim=(8, 8),
        **UNSHARED,
    )
    pipe = diffusers.HunyuanImagePipeline(
        transformer=transformer,
        scheduler=flow(shift=3.0),
        vae=diffusers.AutoencoderKLHunyuanImage(
            in_channels=3,
            out_channels=3,
            latent_channels=4,
            # of 32 channels at least
            block_out_channels=(32, 32),
            layers_per_block=1,
            spatial_compression_ratio=2,
            sample_size=16,
            scaling_factor=0.75,
        ),
        **hunyuan_text(Qwen2_5_VLForConditionalGeneration),
    )
    pipe.prompt_template_encode, pipe.prompt_template_encode_start_idx = "{}", 0
    pipe.tokenizer_max_length, pipe.tokenizer_2_max_length = 20, 4
    return pipe


def hunyuan_video() -> DiffusionPipeline:
    transformer = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_layers=2,
        num_single_layers=1,
        num_refiner_layers=1,
        patch_size=1,
        text_embed_dim=16,
        pooled_projection_dim=32,
        rope_axes_dim=(4, 6, 6),
        **UNSHARED,
    )
    text = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    return diffusers.HunyuanVideoPipeline(
        transformer=transformer,
        scheduler=flow(shift=7.0),
        vae=diffusers.AutoencoderKLHunyuanVideo(
            latent_channels=4, block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=2
        ),
        text_encoder=LlamaModel(text),
        tokenizer=tokenizer(),
        text_encoder_2=clip(),
        tokenizer_2=tokenizer(),
    )


def siglip() -> dict[str, Any]:
    """Pictures of 2 x 2 tokens."""
    eye = SiglipVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
    )
    reader = SiglipImageProcessor(size={"height": 16, "width": 16})
    return {"image_encoder": SiglipVisionModel(eye), "feature_extractor": reader}


def hunyuan_video15(kind: type = diffusers.HunyuanVideo15Pipeline) -> DiffusionPipeline:
    eyes = {} if kind is diffusers.HunyuanVideo15Pipeline else siglip()
    transformer = diffusers.HunyuanVideo15Transformer3DModel(
        in_channels=9,
        out_channels=4,
        num_layers=2,
        num_refiner_layers=1,
        text_embed_dim=16,
        text_embed_2_dim=16,
        image_embed_dim=16,
        rope_axes_dim=(4, 6, 6),
        target_size=16,
        task_type="i2v" if eyes else "t2v",
        **UNSHARED,
    )
    pipe = kind(
        **eyes,
        transformer=transformer,
        scheduler=flow(shift=5.0),
        vae=diffusers.AutoencoderKLHunyuanVideo15(
            latent_channels=4,
            block_out_channels=(16, 16, 16),
            layers_per_block=1,
            spatial_compression_ratio=4,
            temporal_compression_ratio=2,
        ),
        **hunyuan_text(Qwen2_5_VLTextModel),
    )
    pipe.system_message, pipe.prompt_template_encode_start_idx = "", 0
    pipe.tokenizer_max_length, pipe.tokenizer_2_max_length, pipe.vision_num_semantic_tokens = 20, 4, 2
    return pipe


PIPELINES: dict[str, Tiny] = {
    "hunyuan_image": Tiny(hunyuan_image, SMALL),
    "hunyuan_image_distilled": Tiny(lambda: hunyuan_image(embedded=True), SMALL),
    "hunyuan_video": Tiny(
        hunyuan_video,
        {"height": 16, "width": 32, "num_frames": 5},
        {"max_sequence_length": 20, "prompt_template": {"template": "{}", "crop_start": 0}},
    ),
    "hunyuan_video15": Tiny(hunyuan_video15, {"height": 8, "width": 16, "num_frames": 5}, alone=True, unused=LAST_TEXT),
    "hunyuan_video15_i2v": Tiny(
        lambda: hunyuan_video15(diffusers.HunyuanVideo15ImageToVideoPipeline),
        {"height": 8, "width": 32, "num_frames": 5},
        images=1,
        unused=LAST_TEXT,
    ),
}
