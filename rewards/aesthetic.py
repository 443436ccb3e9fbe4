"""Aesthetic predictors: a small head on a picture embedding.

LAION's v2 on CLIP (github.com/christophschuhmann/improved-aesthetic-predictor) and v2.5 on SigLIP
(github.com/discus0434/aesthetic-predictor-v2-5).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Unpack

from torch import Tensor, nn

from rewards.base import Metadata, Scores, Spec
from rewards.clip import DualEncoderReward, EncoderSettings
from rewards.vision import Dtype, load_weights, without_prefix


class LinearHead(nn.Module):
    """The head of the aesthetic predictors and of ImageReward: five linear layers with nothing between them.

    Args:
        width: width of the embedding.
        numbers: numbers of the layers in the published weights, where dropout stands between.
    """

    def __init__(self, width: int, numbers: Sequence[str] = ("0", "2", "4", "6", "7")) -> None:
        super().__init__()
        sizes = (width, 1024, 128, 64, 16, 1)
        self.layers = nn.ModuleDict(
            {number: nn.Linear(*pair) for number, pair in zip(numbers, zip(sizes, sizes[1:]), strict=True)}
        )

    def forward(self, features: Tensor) -> Tensor:
        """[B, width] -> [B]"""
        for layer in self.layers.values():
            features = layer(features)
        return features[:, 0]


class Aesthetic(DualEncoderReward):
    """LAION aesthetic v2: what people rated pictures, about 1 to 10; it does not see the prompt.

    Args:
        head: weights of the published head (sac+logos+ava1-l14-linearMSE).
        encoder: the CLIP ViT-L/14 below it, as of `DualEncoderReward`.
    """

    name = "aesthetic"
    spec = Spec(frozenset({"image"}), differentiable=True)

    def __init__(
        self, head: str = "trl-lib/ddpo-aesthetic-predictor/aesthetic-model.pth", **encoder: Unpack[EncoderSettings]
    ) -> None:
        super().__init__(**encoder)
        self.preprocess = replace(self.preprocess, round_centre=True)
        tensors = load_weights(head)
        self.head = LinearHead(tensors["layers.0.weight"].shape[1])
        self.head.load_state_dict(tensors)
        self.head.to(self.device).eval().requires_grad_(False)

    def model_scores(self, pixels: Tensor, prompts: Sequence[str], metadata: Metadata) -> Scores:
        return Scores(self.head(self.encoder.images(pixels)))


class AestheticV25(DualEncoderReward):
    """Aesthetic predictor v2.5: about 1 to 10, on SigLIP, which sees 384 pixels; it does not see the prompt.

    Args:
        head: weights of the published head, models/aesthetic_predictor_v2_5.pth in the authors' repository.
        model: the SigLIP below it, as of `DualEncoderReward`.
        batch_size, device, dtype: of the model; the head is float32 always.
    """

    name = "aesthetic_v25"
    spec = Spec(frozenset({"image"}), differentiable=True)

    def __init__(
        self,
        head: str,
        model: str = "google/siglip-so400m-patch14-384",
        batch_size: int = 32,
        device: str = "auto",
        dtype: Dtype = "float32",
    ) -> None:
        super().__init__(model, "transformers", None, None, batch_size, device, dtype)
        tensors = without_prefix(load_weights(head), "scoring_head.")
        self.head = LinearHead(tensors["0.weight"].shape[1], ("0", "2", "4", "6", "8"))
        self.head.layers.load_state_dict(tensors)
        self.head.to(self.device).eval().requires_grad_(False)

    def model_scores(self, pixels: Tensor, prompts: Sequence[str], metadata: Metadata) -> Scores:
        return Scores(self.head(self.encoder.images(pixels)))
