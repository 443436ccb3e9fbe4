"""Small models of random weights in the files of published ones, for tests that load them."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import torch
from diffusers import SD3Transformer2DModel
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    ClapConfig,
    ClapFeatureExtractor,
    ClapModel,
    ClapProcessor,
    Qwen2VLForConditionalGeneration,
    RobertaTokenizerFast,
)

from flowalign.data.files import ASSETS
from rewards.latent import Head, Trunk

SPEC = importlib.util.spec_from_file_location("originals_inputs", Path(__file__).parent / "originals" / "inputs.py")
inputs = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(inputs)
LETTERS = [chr(c) for c in range(33, 127)] + ["\u0120"]
ADAPTED = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")


def drawn(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Weights of these shapes, as the recordings of originals have them."""
    return {name: torch.from_numpy(array) for name, array in inputs.weights(shapes).items()}


def lora(trunk: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes of the layers of a trunk that DiNa-LRM's LoRA adapts, by their names."""
    layers = [name for name, module in trunk.named_modules() if name.endswith(ADAPTED) and hasattr(module, "weight")]
    return {name: tuple(trunk.get_submodule(name).weight.shape) for name in layers}


def dina(folder: Path) -> dict[str, Any]:
    """Settings of a `dina` on the shipped small Stable Diffusion 3."""
    model = str(ASSETS / "tiny_sd3")
    transformer = SD3Transformer2DModel.from_pretrained(model, subfolder="transformer")
    trunk = Trunk(transformer, 2, [1, 2], [1, 2])
    shapes = {f"base_model.model.{layer}.lora_A.weight": (4, size[1]) for layer, size in lora(trunk).items()}
    shapes |= {f"base_model.model.{layer}.lora_B.weight": (size[0], 4) for layer, size in lora(trunk).items()}
    save_file(drawn(shapes), folder / "adapter_model.safetensors")
    head = Head(transformer.inner_dim, (2, 2), queries=2, heads=4)
    torch.save(drawn({name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}), folder / "rm_head.pt")
    settings = inputs.DINA | {"num_transformer_layers": 2, "visual_head_idx": [1, 2], "text_head_idx": [1, 2]}
    (folder / "config.json").write_text(json.dumps({"model": settings}))
    files = {"weights": "adapter_model.safetensors", "head": "rm_head.pt", "config": "config.json"}
    own = {"pipeline": model, "batch_size": 2, "device": "cpu", "dtype": "float32"}
    return own | {name: str(folder / file) for name, file in files.items()}


def clap(folder: Path) -> str:
    """The folder, with a CLAP of transformers in it."""
    torch.manual_seed(0)
    text = {"vocab_size": 120, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text |= {"intermediate_size": 32, "max_position_embeddings": 64, "projection_hidden_act": "relu"}
    audio = {"spec_size": 64, "num_mel_bins": 32, "patch_embeds_hidden_size": 16, "hidden_size": 32, "depths": [1, 1]}
    audio |= {"num_attention_heads": [2, 2], "window_size": 4, "num_classes": 4, "enable_fusion": False}
    ClapModel(ClapConfig(text_config=text, audio_config=audio, projection_dim=16)).save_pretrained(folder)
    extractor = ClapFeatureExtractor(feature_size=32, sampling_rate=48000, max_length_s=1, truncation="rand_trunc")
    words = {word: number for number, word in enumerate(["<s>", "<pad>", "</s>", "<unk>", *LETTERS])}
    ClapProcessor(extractor, RobertaTokenizerFast(vocab=words, merges=[])).save_pretrained(folder)
    return str(folder)


def video_reward(folder: Path, outputs: int = 1) -> Path:
    """The folder of the base below a VideoReward, which is in `folder` as it is published, a LoRA on its base.

    Args:
        outputs: of the head, one for all respects or three.
    """
    inputs.write_qwen_folder(folder / "qwen")
    (folder / "model_config.json").write_text(json.dumps(inputs.VIDEO))
    config = AutoConfig.from_pretrained(folder / "qwen")
    config.text_config.vocab_size = 256 + len(inputs.QWEN_SPECIAL) + 3
    shapes = {"rm_head.weight": (outputs, 64)}
    for name, tensor in Qwen2VLForConditionalGeneration(config).state_dict().items():
        shapes[name.replace("model.visual.", "visual.").replace("model.language_model.", "model.")] = tensor.shape
    saved = {}
    generator = torch.Generator().manual_seed(0)
    for name, tensor in drawn(shapes).items():
        if "_proj.weight" in name:
            up, down = (
                0.1 * torch.randn(*size, generator=generator) for size in ((len(tensor), 4), (4, tensor.shape[1]))
            )
            layer = f"base_model.model.{name.removesuffix('.weight')}"
            saved[f"{layer}.lora_A.default.weight"], saved[f"{layer}.lora_B.default.weight"] = down, up
            saved[f"{layer}.base_layer.weight"] = tensor - 2 * up @ down
        else:
            name = name.replace("_proj.bias", "_proj.base_layer.bias")
            saved[f"base_model.model.{name}"] = tensor
    torch.save(saved, folder / "model.pth")
    return folder / "qwen"
