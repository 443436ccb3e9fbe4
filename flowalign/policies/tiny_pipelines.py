"""Tiny random pipelines of the real classes, a few thousand weights each, made without any download.

All tokenizers are the CLIP tokenizer of the shipped pipeline: what matters here is that prompts differ, in content
and in length.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import diffusers
import torch
from diffusers import (
    AutoencoderKL,
    DiffusionPipeline,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    PNDMScheduler,
)
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder
from PIL.Image import Image
from torch import nn
from transformers import (
    CLIPImageProcessor,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
    Gemma2Config,
    Gemma2Model,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GlmConfig,
    GlmModel,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    PixtralVisionConfig,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLTextModel,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)

from flowalign.data import ASSETS, Source


@dataclass
class Tiny:
    """How to make a pipeline and call it."""

    make: Callable[[], DiffusionPipeline]
    call: dict[str, Any]
    """arguments of the pipeline's call"""
    encode: dict[str, Any] = field(default_factory=dict)
    """arguments of its prompt encoding; they are also arguments of its call"""
    negative: bool = False
    """the pipeline's call guides only when told a negative prompt, or told none by `Family.arguments`"""
    unused: tuple[str, ...] = ()
    """parts of names of weights that the network cannot use"""
    images: int = 0
    """pictures that a sample is made from"""
    given: Callable[[list[Image], Image | None], dict[str, Any]] = lambda images, mask: {"image": images[0]}
    """how the pipeline's call takes them, and a mask"""
    masked: bool = False
    ratio: float = 1e-5
    """how far a replayed step's may be from 1"""
    alone: bool = False
    """the pipeline's call makes one sample at a time"""
    sources: list[Source] | None = None
    """the picture files of each prompt of a test"""


def tokenizer(template: str | None = None) -> CLIPTokenizer:
    made = CLIPTokenizer.from_pretrained(ASSETS / "tiny_sd3" / "tokenizer")
    made.chat_template = template
    return made


WORDS = len(CLIPTokenizer.from_pretrained(ASSETS / "tiny_sd3" / "tokenizer"))
CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
CHAT_OF_PARTS = "{% for m in messages %}{% for c in m['content'] %}{{ c['text'] }}{% endfor %}{% endfor %}"
FLUX_SHIFT = {"use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15}
UNSHARED = {"num_attention_heads": 2, "attention_head_dim": 16}


def clip(projection: bool = False, width: int = 32) -> nn.Module:
    config = CLIPTextConfig(
        hidden_size=width,
        projection_dim=32,
        intermediate_size=37,
        num_attention_heads=4,
        num_hidden_layers=3,
        vocab_size=WORDS,
        max_position_embeddings=77,
        bos_token_id=WORDS - 2,
        eos_token_id=WORDS - 1,
        pad_token_id=WORDS - 1,
    )
    return (CLIPTextModelWithProjection if projection else CLIPTextModel)(config)


def t5(width: int = 32) -> T5EncoderModel:
    return T5EncoderModel(
        T5Config(vocab_size=WORDS, d_model=width, d_kv=8, d_ff=37, num_layers=2, num_heads=4, decoder_start_token_id=0)
    )


def qwen3(kind: type, layers: int = 3) -> nn.Module:
    return kind(
        Qwen3Config(
            vocab_size=WORDS,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=layers,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=8,
        )
    )


VISION = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")


def qwen_vl(kind: type) -> nn.Module:
    """Qwen 2.5 VL, which most text encoders of 2025 are; its words end with those of `VISION`."""
    text = {
        "vocab_size": WORDS + len(VISION),
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rope_parameters": {"mrope_section": [1, 1, 2], "rope_type": "default", "rope_theta": 1e6},
        "bos_token_id": WORDS - 2,
        "eos_token_id": WORDS - 1,
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 16,
        "fullatt_block_indexes": [0],
    }
    names = ("vision_start_token_id", "image_token_id", "vision_end_token_id", "video_token_id")
    tokens = {name: WORDS + i for i, name in enumerate(names)}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **tokens)
    return kind(config.text_config if kind is Qwen2_5_VLTextModel else config)


def processor(words: CLIPTokenizer) -> Qwen2VLProcessor:
    """Pictures of 2 x 2 tokens."""
    pixels = {"min_pixels": 56 * 56, "max_pixels": 56 * 56}
    return Qwen2VLProcessor(Qwen2VLImageProcessor(**pixels), words, Qwen2VLVideoProcessor())


def vae(channels: int, levels: int = 1, **settings: Any) -> AutoencoderKL:
    width = 8
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        block_out_channels=(width,) * levels,
        layers_per_block=1,
        latent_channels=channels,
        norm_num_groups=2,
        sample_size=32,
        **settings,
    )


def flow(**settings: Any) -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(**settings)


def sd35() -> DiffusionPipeline:
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=8,
        patch_size=1,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_projection_dim=32,
        joint_attention_dim=32,
        pooled_projection_dim=64,
        out_channels=4,
        qk_norm="rms_norm",
        dual_attention_layers=(0,),
    )
    return diffusers.StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=flow(shift=3.0),
        vae=vae(4, shift_factor=0.0609, scaling_factor=1.5305),
        text_encoder=clip(True),
        tokenizer=tokenizer(),
        text_encoder_2=clip(True),
        tokenizer_2=tokenizer(),
        text_encoder_3=t5(),
        tokenizer_3=tokenizer(),
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


def z_image() -> DiffusionPipeline:
    transformer = diffusers.ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=16,
        axes_dims=[8, 4, 4],
        axes_lens=[256, 32, 32],
    )
    return diffusers.ZImagePipeline(
        transformer=transformer,
        scheduler=flow(shift=3.0),
        vae=vae(4, shift_factor=0.1159, scaling_factor=0.3611),
        text_encoder=qwen3(Qwen3Model),
        tokenizer=tokenizer(CHAT),
    )


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


def hunyuan_text(kind: type) -> dict[str, Any]:
    letters = t5(16)
    return {
        "text_encoder": qwen_vl(kind),
        "tokenizer": tokenizer(CHAT),
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


def hunyuan_video15() -> DiffusionPipeline:
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
        task_type="t2v",
        **UNSHARED,
    )
    pipe = diffusers.HunyuanVideo15Pipeline(
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


def kandinsky5_image() -> DiffusionPipeline:
    # of scale 8, which the pipeline takes for granted
    pipe = diffusers.Kandinsky5T2IPipeline(**kandinsky5_parts(), vae=vae(4, levels=4))
    pipe.prompt_template, pipe.prompt_template_encode_start_idx, pipe.resolutions = "{}", 0, [(64, 32)]
    return pipe


def kandinsky5_video() -> DiffusionPipeline:
    autoencoder = diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=2,
        mid_block_add_attention=False,
    )
    pipe = diffusers.Kandinsky5T2VPipeline(**kandinsky5_parts(visual_cond=True), vae=autoencoder)
    pipe.prompt_template, pipe.prompt_template_encode_start_idx = "{}", 0
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


def cogview4() -> DiffusionPipeline:
    transformer = diffusers.CogView4Transformer2DModel(
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=4,
        num_attention_heads=4,
        text_embed_dim=32,
        time_embed_dim=8,
        condition_dim=4,
        rope_axes_dim=(256, 256),
    )
    words = tokenizer()
    words.padding_side = "left"
    text = GlmConfig(
        hidden_size=32,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=8,
        vocab_size=WORDS,
        pad_token_id=WORDS - 1,
    )
    return diffusers.CogView4Pipeline(
        transformer=transformer,
        scheduler=flow(base_shift=0.25, max_shift=0.75, use_dynamic_shifting=True, time_shift_type="linear"),
        vae=vae(4, levels=4),
        text_encoder=GlmModel(text),
        tokenizer=words,
    )


def gemma2() -> Gemma2Model:
    return Gemma2Model(
        Gemma2Config(
            vocab_size=WORDS,
            head_dim=4,
            hidden_size=8,
            intermediate_size=8,
            num_attention_heads=2,
            num_hidden_layers=2,
            num_key_value_heads=2,
            sliding_window=2,
        )
    )


def lumina2() -> DiffusionPipeline:
    transformer = diffusers.Lumina2Transformer2DModel(
        sample_size=4,
        patch_size=2,
        in_channels=4,
        hidden_size=8,
        num_layers=2,
        num_attention_heads=1,
        num_kv_heads=1,
        multiple_of=16,
        ffn_dim_multiplier=None,
        norm_eps=1e-5,
        scaling_factor=1.0,
        axes_dim_rope=[4, 2, 2],
        axes_lens=[128, 128, 128],
        cap_feat_dim=8,
    )
    return diffusers.Lumina2Pipeline(
        transformer=transformer,
        scheduler=flow(shift=3.0),
        # of scale 8, which the pipeline takes for granted
        vae=vae(4, levels=4, shift_factor=0.0609, scaling_factor=1.5035),
        text_encoder=gemma2(),
        tokenizer=tokenizer(),
    )


def sana() -> DiffusionPipeline:
    transformer = diffusers.SanaTransformer2DModel(
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=4,
        num_cross_attention_heads=2,
        cross_attention_head_dim=4,
        cross_attention_dim=8,
        caption_channels=8,
        sample_size=16,
    )
    autoencoder = diffusers.AutoencoderDC(
        latent_channels=4,
        attention_head_dim=2,
        encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        downsample_block_type="conv",
        upsample_block_type="interpolate",
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
        scaling_factor=0.41407,
    )
    return diffusers.SanaPipeline(
        transformer=transformer,
        # of first order it is Euler's rule
        scheduler=DPMSolverMultistepScheduler(
            solver_order=1, prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        vae=autoencoder,
        text_encoder=gemma2(),
        tokenizer=tokenizer(),
    )


def ltx() -> DiffusionPipeline:
    transformer = diffusers.LTXVideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=4,
        attention_head_dim=8,
        cross_attention_dim=32,
        num_layers=2,
        caption_channels=32,
    )
    four, five = (8, 8, 8, 8), (1, 1, 1, 1, 1)
    scaling = (True, True, False, False)
    autoencoder = diffusers.AutoencoderKLLTXVideo(
        latent_channels=8,
        block_out_channels=four,
        decoder_block_out_channels=four,
        layers_per_block=five,
        decoder_layers_per_block=five,
        spatio_temporal_scaling=scaling,
        decoder_spatio_temporal_scaling=scaling,
        decoder_inject_noise=(False,) * 5,
        upsample_residual=(False,) * 4,
        upsample_factor=(1,) * 4,
        timestep_conditioning=False,
        patch_size=1,
        patch_size_t=1,
    )
    autoencoder.latents_mean.normal_()
    autoencoder.latents_std.uniform_(0.5, 2)
    return diffusers.LTXPipeline(
        transformer=transformer,
        scheduler=flow(**FLUX_SHIFT),
        vae=autoencoder,
        text_encoder=t5(),
        tokenizer=tokenizer(),
    )


def ltx2() -> DiffusionPipeline:
    width = 32
    text = {
        "vocab_size": WORDS,
        "hidden_size": width,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    transformer = diffusers.LTX2VideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        audio_in_channels=4,
        audio_out_channels=4,
        audio_num_attention_heads=2,
        audio_attention_head_dim=4,
        audio_cross_attention_dim=8,
        num_layers=2,
        caption_channels=width,
        rope_double_precision=False,
        rope_type="split",
    )
    heads = {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 1, "num_learnable_registers": None}
    connectors = LTX2TextConnectors(
        caption_channels=width,
        text_proj_in_factor=3,
        connector_rope_base_seq_len=32,
        rope_double_precision=False,
        rope_type="split",
        **{f"{kind}_connector_{name}": value for kind in ("video", "audio") for name, value in heads.items()},
    )
    autoencoder = diffusers.AutoencoderKLLTX2Video(
        latent_channels=4,
        block_out_channels=(8,),
        decoder_block_out_channels=(8,),
        layers_per_block=(1,),
        decoder_layers_per_block=(1, 1),
        spatio_temporal_scaling=(True,),
        decoder_spatio_temporal_scaling=(True,),
        decoder_inject_noise=(False, False),
        down_block_types=("LTX2VideoDownBlock3D",),
        downsample_type=("spatial",),
        upsample_type=("spatiotemporal",),
        upsample_residual=(False,),
        upsample_factor=(1,),
        decoder_causal=False,
    )
    sound = diffusers.AutoencoderKLLTX2Audio(
        base_channels=4, ch_mult=(1,), num_res_blocks=1, resolution=32, latent_channels=2, mel_bins=8
    )
    return diffusers.LTX2Pipeline(
        transformer=transformer,
        scheduler=flow(**FLUX_SHIFT),
        vae=autoencoder,
        audio_vae=sound,
        text_encoder=Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=vision)),
        tokenizer=tokenizer(),
        connectors=connectors,
        vocoder=LTX2Vocoder(
            in_channels=16,
            hidden_channels=32,
            upsample_kernel_sizes=[4, 4],
            upsample_factors=[2, 2],
            resnet_kernel_sizes=[3],
            resnet_dilations=[[1, 3, 5]],
        ),
    )


def unet(**settings: Any) -> diffusers.UNet2DConditionModel:
    return diffusers.UNet2DConditionModel(
        block_out_channels=(8, 16),
        layers_per_block=1,
        sample_size=8,
        in_channels=4,
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


def sd15(prediction: str = "epsilon") -> DiffusionPipeline:
    return diffusers.StableDiffusionPipeline(
        vae=vae(4, levels=2),
        text_encoder=clip(),
        tokenizer=tokenizer(),
        unet=unet(cross_attention_dim=32, attention_head_dim=2),
        scheduler=ddpm(prediction),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def sdxl(prediction: str = "epsilon") -> DiffusionPipeline:
    return diffusers.StableDiffusionXLPipeline(
        vae=vae(4, levels=2),
        text_encoder=clip(),
        tokenizer=tokenizer(),
        text_encoder_2=clip(True),
        tokenizer_2=tokenizer(),
        unet=unet(
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


SMALL = {"height": 8, "width": 16}
# the last block's text stream leads nowhere
LAST_TEXT = ("transformer_blocks.1.attn.add_q_proj", "transformer_blocks.1.attn.to_add_out")

PIPELINES: dict[str, Tiny] = {
    "sd35": Tiny(sd35, SMALL | {"height": 8, "width": 8}, {"max_sequence_length": 20}, unused=LAST_TEXT),
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
    "z_image": Tiny(z_image, SMALL, {"max_sequence_length": 20}),
    "chroma": Tiny(chroma, SMALL, {"max_sequence_length": 20}),
    "lumina2": Tiny(lumina2, {"height": 16, "width": 32}, {"max_sequence_length": 96}),
    "sana": Tiny(sana, {"height": 32, "width": 64}, {"max_sequence_length": 20}, negative=True),
    "ltx": Tiny(ltx, {"height": 32, "width": 64, "num_frames": 9}, {"max_sequence_length": 20}),
    "wan": Tiny(wan, {"height": 16, "width": 32, "num_frames": 5}, {"max_sequence_length": 20}),
    "wan22_5b": Tiny(
        lambda: wan(expand_timesteps=True),
        {"height": 16, "width": 32, "num_frames": 5},
        {"max_sequence_length": 20},
    ),
    "hunyuan_image": Tiny(hunyuan_image, SMALL),
    "hunyuan_image_distilled": Tiny(lambda: hunyuan_image(embedded=True), SMALL),
    "hunyuan_video15": Tiny(hunyuan_video15, {"height": 8, "width": 16, "num_frames": 5}, alone=True, unused=LAST_TEXT),
    # schedules that end in steps of little noise, by which float32's last bits are scored
    "cogview4": Tiny(cogview4, {"height": 32, "width": 64}, {"max_sequence_length": 32}, ratio=1e-4, alone=True),
    "kandinsky5_image": Tiny(
        kandinsky5_image,
        {"height": 32, "width": 64},
        {"max_sequence_length": 20},
        ratio=1e-4,
        alone=True,
        negative=True,
    ),
    "kandinsky5_video": Tiny(
        kandinsky5_video,
        {"height": 16, "width": 32, "num_frames": 5},
        {"max_sequence_length": 20},
        alone=True,
        negative=True,
    ),
    "qwen_image21": Tiny(qwen_image21, {"height": 32, "width": 64}, alone=True, negative=True),
    "wan22_14b": Tiny(wan22_14b, {"height": 16, "width": 32, "num_frames": 5}, {"max_sequence_length": 20}),
    "ltx2": Tiny(ltx2, {"height": 32, "width": 64, "num_frames": 5}, {"max_sequence_length": 20}),
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
    "sd15": Tiny(sd15, SMALL),
    "sd2_v": Tiny(lambda: sd15("v_prediction"), SMALL),
    "sdxl": Tiny(sdxl, SMALL),
    "sdxl_v": Tiny(lambda: sdxl("v_prediction"), SMALL),
}


def build(name: str) -> DiffusionPipeline:
    """The same pipeline each time."""
    torch.manual_seed(0)
    pipe = PIPELINES[name].make()
    networks = [pipe.components[name] for name in ("unet", "transformer", "transformer_2") if name in pipe.components]
    with torch.no_grad():
        for parameter in (
            parameter for network in networks if network is not None for parameter in network.parameters()
        ):
            # some start at zero and some uninitialised
            if parameter.dim() < 2 or not parameter.any() or not parameter.isfinite().all():
                parameter.normal_(1.0 if parameter.dim() == 1 and bool((parameter == 1).all()) else 0.0, 0.1)
    for component in pipe.components.values():
        if isinstance(component, nn.Module):
            component.eval()
    pipe.set_progress_bar_config(disable=True)
    return pipe
