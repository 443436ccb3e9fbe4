"""Qwen-Image."""

import diffusers
from diffusers import DiffusionPipeline
from transformers import (
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from flowalign.tools.tiny_pipelines.parts import (
    CHAT_OF_PARTS,
    FLUX_SHIFT,
    LAST_TEXT,
    SMALL,
    UNSHARED,
    VISION,
    WORDS,
    Tiny,
    flow,
    processor,
    qwen_vl,
    tokenizer,
)


def qwen_image(kind: type = diffusers.QwenImagePipeline) -> DiffusionPipeline:
    transformer = diffusers.QwenImageTransformer2DModel(
        in_channels=16, out_channels=4, num_layers=2, joint_attention_dim=16, axes_dims_rope=(8, 4, 4), **UNSHARED
    )
    words = tokenizer(CHAT_OF_PARTS)
    words.add_tokens(list(VISION), special_tokens=True)
    pipe = kind(
        **({} if kind is diffusers.QwenImagePipeline else {"processor": processor(words)}),
        transformer=transformer,
        scheduler=flow(**FLUX_SHIFT),
        vae=diffusers.AutoencoderKLQwenImage(
            base_dim=24,
            z_dim=4,
            dim_mult=[1, 2],
            num_res_blocks=1,
            temperal_downsample=[False],
            latents_mean=[0.1, 0.2, 0.3, 0.4],
            latents_std=[0.5, 1.0, 1.5, 2.0],
        ),
        text_encoder=qwen_vl(Qwen2_5_VLForConditionalGeneration),
        tokenizer=words,
    )
    # hundreds of tokens in bytes
    template = "".join(VISION[:3]) + "{}" if kind is diffusers.QwenImageEditPipeline else "{}"
    pipe.prompt_template_encode, pipe.prompt_template_encode_start_idx = template, 0
    return pipe


def qwen_image21() -> DiffusionPipeline:
    transformer = diffusers.QwenImage21Transformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=2,
        context_in_dim=16,
        axes_dims_rope=(4, 6, 6),
        **UNSHARED,
    )
    words = tokenizer(CHAT_OF_PARTS)
    words.add_tokens(list(VISION), special_tokens=True)
    text = {
        "vocab_size": WORDS + len(VISION),
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rope_parameters": {"mrope_section": [2, 1, 1], "rope_type": "default", "rope_theta": 1e6},
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 16,
        "deepstack_visual_indexes": [0],
        "num_position_embeddings": 16,
    }
    reader = Qwen3VLProcessor(Qwen2VLImageProcessor(), words, Qwen3VLVideoProcessor(), chat_template=CHAT_OF_PARTS)
    pipe = diffusers.QwenImage21Pipeline(
        transformer=transformer,
        scheduler=flow(**FLUX_SHIFT),
        vae=diffusers.AutoencoderKLQwenImage21(
            base_dim=8,
            decoder_base_dim=8,
            z_dim=4,
            dim_mult=[1, 1, 1, 1, 1],
            num_res_blocks=1,
            latents_mean=[0.1, 0.2, 0.3, 0.4],
            latents_std=[0.5, 1.0, 1.5, 2.0],
        ),
        text_encoder=Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision)),
        processor=reader,
    )
    # hundreds of tokens in bytes
    pipe.prompt_template_t2i, pipe._drop_idx = "{}", 0
    # not the token that ours begins every text with
    pipe._img_token_id = WORDS + 1
    return pipe


PIPELINES: dict[str, Tiny] = {
    "qwen_image": Tiny(qwen_image, SMALL, negative=True, unused=LAST_TEXT),
    "qwen_image_edit": Tiny(
        lambda: qwen_image(diffusers.QwenImageEditPipeline), SMALL, images=1, negative=True, unused=LAST_TEXT
    ),
    "qwen_image_edit_plus": Tiny(
        lambda: qwen_image(diffusers.QwenImageEditPlusPipeline),
        SMALL,
        images=2,
        given=lambda images, mask: {"image": images},
        negative=True,
        unused=LAST_TEXT,
    ),
    "qwen_image21": Tiny(qwen_image21, {"height": 32, "width": 64}, alone=True, negative=True),
}
