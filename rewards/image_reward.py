"""ImageReward (arXiv 2304.05977): BLIP reads the prompt while looking at the picture, and a head scores what it read.

The published checkpoint's tensors go into transformers' BLIP.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cache

import torch
from torch import Tensor, nn

from rewards.aesthetic import LinearHead
from rewards.base import Metadata, Scores
from rewards.hub import hub
from rewards.vision import Dtype, ModelReward, Preprocess, load_weights, pick_device, without_prefix

MEAN, STD = 0.16717362830052426, 1.0333394966054072  # of the head's output over the authors' validation pictures
MAX_TOKENS = 35
HEAD_WIDTH = 64  # of every attention head of BLIP

_VISION_NAMES = (
    (r"^cls_token", "embeddings.class_embedding"),
    (r"^pos_embed", "embeddings.position_embedding"),
    (r"^patch_embed\.proj", "embeddings.patch_embedding"),
    (r"^blocks", "encoder.layers"),
    (r"attn\.qkv", "self_attn.qkv"),
    (r"attn\.proj", "self_attn.projection"),
    (r"\.norm([12])", r".layer_norm\1"),
    (r"^norm", "post_layernorm"),
)


class Blip(nn.Module):
    """The networks of ImageReward; their sizes are read from the checkpoint's tensors."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        from transformers import BlipTextConfig, BlipVisionConfig, BlipVisionModel
        from transformers.models.blip.modeling_blip_text import BlipTextModel

        super().__init__()
        vision = without_prefix(tensors, "blip.visual_encoder.")
        text = without_prefix(tensors, "blip.text_encoder.")
        width, _, patch, _ = vision["patch_embed.proj.weight"].shape
        self.size = round((vision["pos_embed"].shape[1] - 1) ** 0.5) * patch
        self.vision = BlipVisionModel(
            BlipVisionConfig(
                hidden_size=width,
                intermediate_size=vision["blocks.0.mlp.fc1.weight"].shape[0],
                num_hidden_layers=_layers(vision, "blocks"),
                num_attention_heads=width // HEAD_WIDTH,
                image_size=self.size,
                patch_size=patch,
                layer_norm_eps=1e-6,
            )
        )
        vocabulary, hidden = text["embeddings.word_embeddings.weight"].shape
        self.text = BlipTextModel(
            BlipTextConfig(
                vocab_size=vocabulary,
                hidden_size=hidden,
                encoder_hidden_size=width,
                intermediate_size=text["encoder.layer.0.intermediate.dense.weight"].shape[0],
                num_hidden_layers=_layers(text, "encoder.layer"),
                num_attention_heads=hidden // HEAD_WIDTH,
                max_position_embeddings=text["embeddings.position_embeddings.weight"].shape[0],
                bos_token_id=None,
                sep_token_id=None,
            ),
            add_pooling_layer=False,
        )
        self.head = LinearHead(hidden)
        self.vision.load_state_dict({_vision_name(name): tensor for name, tensor in vision.items()})
        self.text.load_state_dict({n: tensor for n, tensor in text.items() if n != "embeddings.position_ids"})
        self.head.load_state_dict(without_prefix(tensors, "mlp."))

    def forward(self, pixels: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
        """[B] scores of pictures [B, 3, H, W] and prompts [B, L]."""
        seen = self.vision(pixels).last_hidden_state
        read = self.text(tokens, attention_mask=mask, encoder_hidden_states=seen, is_decoder=False).last_hidden_state
        return (self.head(read[:, 0].float()) - MEAN) / STD


def _layers(tensors: Mapping[str, Tensor], prefix: str) -> int:
    return 1 + max(int(name.removeprefix(prefix + ".").split(".")[0]) for name in tensors if name.startswith(prefix))


def _vision_name(name: str) -> str:
    """transformers' name of a tensor of the authors' picture encoder."""
    for pattern, new in _VISION_NAMES:
        name = re.sub(pattern, new, name)
    return name


@cache
def load_image_reward(weights: str, device: str, dtype: Dtype) -> Blip:
    """Load the networks; rewards that name the same ones share them."""
    network = Blip(load_weights(weights)).to(pick_device(device), getattr(torch, dtype)).eval().requires_grad_(False)
    network.head.float()
    return network


class ImageReward(ModelReward):
    """ImageReward: what people would rate picture and prompt, about -2 to 2, normalised by the authors (2304.05977).

    Args:
        weights: the published checkpoint.
        tokenizer: folder or hub name of BERT's tokenizer.
        batch_size, device, dtype: of the model.
    """

    name = "image_reward"

    def __init__(
        self,
        weights: str = "zai-org/ImageReward/ImageReward.pt",
        tokenizer: str = "google-bert/bert-base-uncased",
        batch_size: int = 32,
        device: str = "auto",
        dtype: Dtype = "float32",
    ) -> None:
        from transformers import AutoTokenizer

        super().__init__(batch_size)
        self.network = load_image_reward(weights, device, dtype)
        self.tokenizer = AutoTokenizer.from_pretrained(**hub(tokenizer))
        self.preprocess = Preprocess((self.network.size, self.network.size))
        self.device, self.dtype = pick_device(device), getattr(torch, dtype)

    def model_scores(self, pixels: Tensor, prompts: Sequence[str], metadata: Metadata) -> Scores:
        text = self.tokenizer(
            list(prompts), padding="max_length", truncation=True, max_length=MAX_TOKENS, return_tensors="pt"
        ).to(self.device)
        return Scores(self.network(pixels, text["input_ids"], text["attention_mask"]))
