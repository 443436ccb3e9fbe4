"""What tiny pipelines are put together from."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from diffusers import AutoencoderKL, DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from PIL.Image import Image
from torch import nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    Qwen2_5_VLConfig,
    Qwen2_5_VLTextModel,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3Config,
    T5Config,
    T5EncoderModel,
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


SMALL = {"height": 8, "width": 16}
# the last block's text stream leads nowhere
LAST_TEXT = ("transformer_blocks.1.attn.add_q_proj", "transformer_blocks.1.attn.to_add_out")
