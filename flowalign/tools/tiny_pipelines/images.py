"""Z-Image, CogView4, Lumina-Image and Sana."""

import diffusers
from diffusers import DiffusionPipeline, DPMSolverMultistepScheduler
from transformers import Gemma2Config, Gemma2Model, GlmConfig, GlmModel, Qwen3Model

from flowalign.tools.tiny_pipelines.parts import CHAT, SMALL, WORDS, Tiny, flow, qwen3, tokenizer, vae


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


PIPELINES: dict[str, Tiny] = {
    "z_image": Tiny(z_image, SMALL, {"max_sequence_length": 20}),
    # its last step is from a thousandth of noise, by which the last bits of float32 are scored
    "cogview4": Tiny(cogview4, {"height": 32, "width": 64}, {"max_sequence_length": 32}, ratio=1e-4, alone=True),
    "lumina2": Tiny(lumina2, {"height": 16, "width": 32}, {"max_sequence_length": 96}),
    "sana": Tiny(sana, {"height": 32, "width": 64}, {"max_sequence_length": 20}, negative=True),
}
