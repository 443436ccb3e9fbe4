"""LTX-Video and LTX-2."""

import diffusers
from diffusers import DiffusionPipeline
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from flowalign.tools.tiny_pipelines.parts import FLUX_SHIFT, WORDS, Tiny, flow, t5, tokenizer


def ltx(kind: type = diffusers.LTXPipeline) -> DiffusionPipeline:
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
    return kind(
        transformer=transformer,
        scheduler=flow(**FLUX_SHIFT),
        vae=autoencoder,
        text_encoder=t5(),
        tokenizer=tokenizer(),
    )


def ltx2(kind: type = diffusers.LTX2Pipeline) -> DiffusionPipeline:
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
    return kind(
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


PIPELINES: dict[str, Tiny] = {
    "ltx": Tiny(ltx, {"height": 32, "width": 64, "num_frames": 9}, {"max_sequence_length": 20}),
    "ltx_i2v": Tiny(
        lambda: ltx(diffusers.LTXImageToVideoPipeline),
        {"height": 32, "width": 64, "num_frames": 9},
        {"max_sequence_length": 20},
        images=1,
    ),
    "ltx2": Tiny(ltx2, {"height": 32, "width": 64, "num_frames": 5}, {"max_sequence_length": 20}),
    "ltx2_i2v": Tiny(
        lambda: ltx2(diffusers.LTX2ImageToVideoPipeline),
        {"height": 32, "width": 64, "num_frames": 5},
        {"max_sequence_length": 20},
        images=1,
        given=lambda images, mask: {"image": images[0], "image_crf": 0},
    ),
}
