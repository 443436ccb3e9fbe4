"""What the originals and our rewards are both given: weights, pictures, prompts, a vocabulary and small sizes."""

import json
import zlib
from pathlib import Path

import numpy as np
from PIL import Image

PROMPTS = ["a red circle left of a blue square", "two cats", "two cats", "a house by the sea, at night"]
SIZES = [(40, 40), (61, 90), (91, 60), (300, 224)]  # height, width

HPS = {
    "embed_dim": 64,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 64, "head_width": 32, "patch_size": 8},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 64, "heads": 2, "layers": 2},
}
AESTHETIC = {
    "embed_dim": 64,
    "quick_gelu": True,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 64, "patch_size": 8},
    "text_cfg": {"context_length": 8, "vocab_size": 32, "width": 64, "heads": 1, "layers": 1},
}
PICK = {
    "model_type": "clip",
    "architectures": ["CLIPModel"],
    "projection_dim": 64,
    "text_config": {
        "model_type": "clip_text_model",
        "vocab_size": 514,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 77,
        "hidden_act": "gelu",
        "projection_dim": 64,
        "eos_token_id": 2,  # as published: transformers then takes the highest token as the end
    },
    "vision_config": {
        "model_type": "clip_vision_model",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
        "hidden_act": "gelu",
        "projection_dim": 64,
    },
}
PICTURES = {
    "feature_extractor_type": "CLIPFeatureExtractor",
    "image_processor_type": "CLIPImageProcessor",
    "do_resize": True,
    "size": {"shortest_edge": 32},
    "do_center_crop": True,
    "crop_size": {"height": 32, "width": 32},
    "do_normalize": True,
    "do_rescale": True,
    "do_convert_rgb": True,
    "resample": 3,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
BERT = {  # the authors' med_config.json with two small layers and our vocabulary
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_act": "gelu",
    "hidden_size": 768,
    "intermediate_size": 256,
    "num_attention_heads": 12,
    "num_hidden_layers": 2,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
    "vocab_size": 40,
    "pad_token_id": 0,
    "attention_probs_dropout_prob": 0.1,
    "hidden_dropout_prob": 0.1,
    "initializer_range": 0.02,
    "encoder_width": 128,
    "add_cross_attention": True,
}
QWEN = {
    "model_type": "qwen2_vl",
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "vocab_size": 280,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "vision_config": {
        "model_type": "qwen2_vl",
        "depth": 2,
        "embed_dim": 64,
        "hidden_size": 64,
        "mlp_ratio": 2,
        "num_heads": 2,
        "in_chans": 3,
        "in_channels": 3,
        "patch_size": 14,
        "spatial_patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}
QWEN25 = QWEN | {
    "model_type": "qwen2_5_vl",
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "vision_config": {
        "model_type": "qwen2_5_vl",
        "depth": 2,
        "hidden_size": 64,
        "out_hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "in_channels": 3,
        "patch_size": 14,
        "spatial_patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [1],
        "tokens_per_second": 2,
    },
}
QWEN3 = {
    "model_type": "qwen3_vl",
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "qwen3_vl_text",
        "vocab_size": 280,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3], "mrope_interleaved": True},
        "max_position_embeddings": 4096,
    },
    "vision_config": {
        "model_type": "qwen3_vl",
        "depth": 2,
        "hidden_size": 64,
        "out_hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "in_channels": 3,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": [0],
        "hidden_act": "gelu_pytorch_tanh",
    },
}
QWEN_SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
QWEN_PICTURES = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
QWEN3_PICTURES = QWEN_PICTURES | {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "min_pixels": 65536,
    "max_pixels": 16777216,
    "patch_size": 16,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
VIDEO = {  # what VideoReward's model_config.json says, with a smaller LoRA
    "data_config": {
        "max_frame_pixels": 200704,
        "fps": 2.0,
        "eval_dim": ["VQ", "MQ", "TA"],
        "prompt_template_type": "detailed_special",
        "sample_type": "uniform",
    },
    "peft_lora_config": {"lora_r": 4, "lora_alpha": 8},
    "inference_config": {
        "VQ_mean": 0.37,
        "VQ_std": 2.2,
        "MQ_mean": 0.12,
        "MQ_std": 1.4,
        "TA_mean": -0.28,
        "TA_std": 2.5,
    },
}
VIDEO_FPS = 8
QWEN_CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif c['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ c['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OWL = {
    "model_type": "mplug_owl2",
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "visual_config": {
        "visual_model": {
            "hidden_size": 48,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 56,
            "patch_size": 14,
            "layer_norm_eps": 1e-6,
        },
        "visual_abstractor": {
            "num_learnable_queries": 6,
            "hidden_size": 48,
            "encoder_hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "layer_norm_eps": 1e-6,
            "grid_size": 4,
        },
    },
}
OWL_PICTURES = PICTURES | {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}
T5 = {
    "model_type": "clip_t5",
    "vocab_size": 260,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 96,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "mm_projector_type": "mlp2x_gelu",
    "mm_hidden_size": 64,
    "mm_vision_select_layer": -2,
    "mm_vision_select_feature": "patch",
}
SIGLIP = {
    "model_type": "siglip",
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 42,
        "patch_size": 14,
    },
    "text_config": {
        "model_type": "siglip_text_model",
        "vocab_size": 260,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": 16,
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
}
SIGLIP_PICTURES = {
    "image_processor_type": "SiglipImageProcessor",
    "do_resize": True,
    "size": {"height": 42, "width": 42},
    "resample": 3,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
SD3 = {
    "sample_size": 8,
    "patch_size": 2,
    "in_channels": 4,
    "num_layers": 4,
    "attention_head_dim": 8,
    "num_attention_heads": 4,
    "joint_attention_dim": 32,
    "caption_projection_dim": 32,
    "pooled_projection_dim": 24,
    "out_channels": 4,
    "pos_embed_max_size": 8,
    "dual_attention_layers": [0, 1],
    "qk_norm": "rms_norm",
}
BIND = {  # heads of the attention are those of the published model
    "out_embed_dim": 16,
    "vision_embed_dim": 16,
    "vision_num_blocks": 1,
    "vision_num_heads": 2,
    "audio_embed_dim": 48,
    "audio_num_blocks": 2,
    "audio_num_heads": 12,
    "text_embed_dim": 32,
    "text_num_blocks": 2,
    "text_num_heads": 16,
    "depth_embed_dim": 16,
    "depth_num_blocks": 1,
    "thermal_embed_dim": 24,
    "thermal_num_blocks": 1,
    "imu_embed_dim": 16,
    "imu_num_blocks": 1,
}
DINA = {
    "num_transformer_layers": 3,
    "freeze_backbone": False,
    "use_lora": True,
    "use_text_features": True,
    "use_t_embed": True,
    "visual_head_idx": [1, 3],
    "text_head_idx": [2, 3],
    "lora_config": {"r": 4, "lora_alpha": 8, "init_lora_weights": "gaussian"},
    "reward_head": {
        "use_proj_in": False,
        "width": -1,
        "out_dim": 1,
        "num_queries": 2,
        "num_attn_heads": 4,
        "dropout": 0.0,
    },
}
VIT = {"img_size": 224, "patch_size": 32, "embed_dim": 128, "depth": 2, "num_heads": 2}
BERT_VOCABULARY = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "a",
    "red",
    "circle",
    "left",
    "of",
    "blue",
    "square",
    "two",
    "cat",
    "##s",
    "house",
    "by",
    "the",
    "sea",
    ",",
    "at",
    "night",
    "in",
    "sun",
]


def weights(shapes):
    """Random tensors that depend on their names only; {name: shape} -> {name: float32 array}."""
    tensors = {}
    for name, shape in shapes.items():
        normal = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
        if not shape:
            tensor = np.log(100.0)  # the logit scale
        elif len(shape) == 1:
            tensor = 1 + 0.1 * normal if name.endswith("weight") else 0.1 * normal
        else:
            tensor = normal / np.sqrt(np.prod(shape[1:]))
        tensors[name] = np.asarray(tensor, dtype=np.float32)
    return tensors


def pictures():
    """Waves of colour, one of each size."""
    images = []
    for number, (height, width) in enumerate(SIZES):
        y, x = np.mgrid[:height, :width][..., None] / 8.0
        phase = np.array([0.0, 1.0, 2.0]) + number
        waves = np.sin(x * (1 + phase / 5) + y + phase) * np.cos(y * (2 - phase / 7) - x / 3)
        images.append(Image.fromarray(np.round(127.5 * (1 + waves)).astype(np.uint8)))
    return images


def videos():
    """Two waves that travel, of 5 and of 24 frames."""
    made = []
    for number, (count, (height, width)) in enumerate(zip((5, 24), ((224, 300), (91, 60)))):
        y, x = np.mgrid[:height, :width][..., None] / 20.0
        phase = np.array([0.0, 1.0, 2.0]) + number
        waves = [np.sin(x + time / 3 + phase) * np.cos(y * (1 + number) - time / 7) for time in range(count)]
        made.append([Image.fromarray(np.round(127.5 * (1 + wave)).astype(np.uint8)) for wave in waves])
    return made


def latents():
    """What DiNa-LRM is given: noised latents at two levels, prompts' embeddings, and the two times."""
    shapes = {"latents": (2, 3, 4, 8, 8), "embeds": (3, 5, 32), "pooled": (3, 24)}
    drawn = {name: np.random.default_rng(zlib.crc32(name.encode())).standard_normal(s) for name, s in shapes.items()}
    return {name: own.astype(np.float32) for name, own in drawn.items()} | {"times": [400.0, 700.0]}


def spectrograms():
    """What ImageBind is given: three clips each of two sounds, and two texts as tokens."""
    heard = np.random.default_rng(7).standard_normal((2, 3, 1, 128, 204)).astype(np.float32)
    texts = np.zeros((2, 77), dtype=np.int64)
    texts[0, :4], texts[1, :6] = (49406, 320, 1929, 49407), (49406, 320, 2368, 539, 1746, 49407)
    return heard, texts


def byte_letters():
    """The letters that stand for the 256 bytes in byte-level BPE, the printable ones first."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(b) for b in printable] + [chr(256 + i) for i in range(256 - len(printable))]


def write_clip_folder(folder: Path):
    """Configuration, tokenizer (bytes, no merges) and picture settings of a small CLIP of transformers."""
    folder.mkdir(parents=True, exist_ok=True)
    letters = byte_letters()
    words = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    special = {"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}
    files = {
        "config.json": PICK,
        "preprocessor_config.json": PICTURES,
        "vocab.json": {word: number for number, word in enumerate(words)},
        "special_tokens_map.json": special | {"pad_token": "<|endoftext|>"},
        "tokenizer_config.json": {"tokenizer_class": "CLIPTokenizer", "model_max_length": 77}
        | special
        | {"pad_token": "<|endoftext|>"},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "merges.txt").write_text("#version: 0.2\n")


def write_byte_tokenizer(folder: Path, template: str):
    """A token a byte, and <pad>, </s> and <s>, which stand in a text as the template says."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    folder.mkdir(parents=True, exist_ok=True)
    special = ["<pad>", "</s>", "<s>"]
    made = Tokenizer(models.BPE({word: number for number, word in enumerate([*special, *byte_letters()])}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.add_special_tokens(special)
    made.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[(word, number) for number, word in enumerate(special)]
    )
    made.save(str(folder / "tokenizer.json"))
    names = {"pad_token": "<pad>", "eos_token": "</s>", "bos_token": "<s>", "model_max_length": 4096}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"} | names
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_json(folder: Path, **files):
    """Configurations, by the names of their files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def write_qwen_folder(folder: Path, config=QWEN, pictures=QWEN_PICTURES, processor="Qwen2VLProcessor"):
    """Configuration, tokenizer (bytes, no merges), chat template and picture settings of a small Qwen-VL."""
    folder.mkdir(parents=True, exist_ok=True)
    added = {
        str(256 + i): {"content": word, "special": True, "normalized": False, "lstrip": False, "rstrip": False}
        for i, word in enumerate(QWEN_SPECIAL)
    }
    numbers = {word: 256 + i for i, word in enumerate(QWEN_SPECIAL)}
    ids = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
    ids |= {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
    files = {
        "config.json": config | {key: numbers[word] for key, word in ids.items()},
        "preprocessor_config.json": pictures | {"processor_class": processor},
        "vocab.json": {word: number for number, word in enumerate(byte_letters())},
        "tokenizer_config.json": {
            "tokenizer_class": "Qwen2Tokenizer",
            "added_tokens_decoder": added,
            "pad_token": "<|endoftext|>",
            "eos_token": "<|im_end|>",
            "chat_template": QWEN_CHAT,
        },
        "chat_template.json": {"chat_template": QWEN_CHAT},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "merges.txt").write_text("#version: 0.2\n")
