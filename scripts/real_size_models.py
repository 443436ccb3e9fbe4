"""SD3.5-medium and FLUX.1-dev with random weights: the configurations are those that diffusers publishes with them."""

from dataclasses import dataclass
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from torch import Tensor

from flowalign.policies.families import family_of

VAE = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "latent_channels": 16,
    "norm_num_groups": 32,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
TINY_VAE = {"block_out_channels": (8,) * 4, "layers_per_block": 1, "norm_num_groups": 4}


@dataclass(frozen=True)
class RealModel:
    """What it takes to build one, and how it is trained on one GPU."""

    name: str
    pipeline: Any
    network: Any
    transformer: dict[str, Any]
    tiny: dict[str, Any]
    """in the place of some values of `transformer`, for a CPU"""
    vae: dict[str, Any]
    scheduler: dict[str, Any]
    tokens: int
    """of a prompt"""
    kl_weight: float
    """as published; 0 does without the reference's forward pass"""
    micro_batch: int
    checkpointing: bool
    published_weights: str
    """dtype in which the published way keeps the frozen weights"""

    def build(
        self, tiny: bool, device: torch.device, dtype: str, vae_dtype: str
    ) -> tuple[Any, Any, FlowMatchEulerDiscreteScheduler]:
        """Transformer and VAE of random weights on the device, and the scheduler."""
        with device:
            transformer = self.network(**self.transformer | (self.tiny if tiny else {})).to(getattr(torch, dtype))
            vae = AutoencoderKL(**VAE | self.vae | (TINY_VAE if tiny else {})).to(getattr(torch, vae_dtype))
        return transformer, vae, FlowMatchEulerDiscreteScheduler(**self.scheduler)

    def embeddings(self, transformer: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """[tokens, width] and [pooled width] in the place of a prompt's embeddings."""
        config = transformer.config
        width, pooled = config.joint_attention_dim, config.pooled_projection_dim
        return torch.randn(self.tokens, width, dtype=dtype), torch.randn(pooled, dtype=dtype)

    @property
    def lora_targets(self) -> list[str]:
        """The joint attention: Flow-GRPO's on SD3.5, and flowalign's default on both."""
        return list(family_of(self.pipeline.__name__).lora_targets)

    @property
    def absent(self) -> dict[str, None]:
        """The pipeline's text encoders and tokenizers."""
        kinds = [f"{kind}{suffix}" for kind in ("text_encoder", "tokenizer") for suffix in ("", "_2", "_3")]
        return {name: None for name in kinds if name in self.pipeline.__init__.__annotations__}


def noise_levels(scheduler: FlowMatchEulerDiscreteScheduler, steps: int, tokens: int, device: torch.device) -> Tensor:
    """[T + 1] sigmas as the pipelines set them; FLUX's are shifted by the number of image tokens."""
    if scheduler.config.use_dynamic_shifting:
        base = torch.linspace(1, 1 / steps, steps).tolist()
        scheduler.set_timesteps(sigmas=base, mu=calculate_shift(tokens), device=device)
    else:
        scheduler.set_timesteps(steps, device=device)
    return scheduler.sigmas.to(device)


MODELS = {
    "sd3": RealModel(
        name="SD3.5-medium",
        pipeline=StableDiffusion3Pipeline,
        network=SD3Transformer2DModel,
        transformer={
            "sample_size": 128,
            "patch_size": 2,
            "in_channels": 16,
            "out_channels": 16,
            "num_layers": 24,
            "num_attention_heads": 24,
            "attention_head_dim": 64,
            "joint_attention_dim": 4096,
            "caption_projection_dim": 1536,
            "pooled_projection_dim": 2048,
            "pos_embed_max_size": 384,
            "dual_attention_layers": tuple(range(13)),
            "qk_norm": "rms_norm",
        },
        tiny={
            "sample_size": 16,
            "num_layers": 2,
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "joint_attention_dim": 32,
            "caption_projection_dim": 16,
            "pooled_projection_dim": 16,
            "pos_embed_max_size": 16,
            "dual_attention_layers": (0,),
        },
        vae={"scaling_factor": 1.5305, "shift_factor": 0.0609},
        scheduler={"shift": 3.0},
        tokens=77 + 128,  # CLIP's, then T5's at the length that the published scripts set
        kl_weight=0.04,
        micro_batch=8,
        checkpointing=False,
        published_weights="float32",
    ),
    "flux": RealModel(
        name="FLUX.1-dev",
        pipeline=FluxPipeline,
        network=FluxTransformer2DModel,
        transformer={
            "patch_size": 1,
            "in_channels": 64,
            "num_layers": 19,
            "num_single_layers": 38,
            "num_attention_heads": 24,
            "attention_head_dim": 128,
            "joint_attention_dim": 4096,
            "pooled_projection_dim": 768,
            "guidance_embeds": True,
            "axes_dims_rope": (16, 56, 56),
        },
        tiny={
            "num_layers": 1,
            "num_single_layers": 1,
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "joint_attention_dim": 32,
            "pooled_projection_dim": 16,
            "axes_dims_rope": (4, 4, 8),
        },
        vae={"scaling_factor": 0.3611, "shift_factor": 0.1159},
        scheduler={"use_dynamic_shifting": True, "shift": 3.0},
        tokens=128,
        kl_weight=0.0,
        micro_batch=4,
        checkpointing=True,
        published_weights="bfloat16",
    ),
}
