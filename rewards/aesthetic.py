"""LAION's aesthetic predictor v2: a small head on CLIP's picture embedding (github.com/christophschuhmann/
improved-aesthetic-predictor)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Unpack

from torch import Tensor, nn

from rewards.base import Metadata, Scores, Spec
from rewards.clip import DualEncoderReward, EncoderSettings
from rewards.vision import load_weights


class LinearHead(nn.Module):
    """The head of the aesthetic predictor and of ImageReward: five linear layers with nothing between them.

    Layers are numbered as in the published weights, where dropout stands between.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = (width, 1024, 128, 64, 16, 1)
        numbers = ("0", "2", "4", "6", "7")
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
