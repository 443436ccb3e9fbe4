"""Rewards made of a dual encoder: a picture tower, a text tower, and the angle between their embeddings.

CLIP score (arXiv 2104.08718), PickScore (2305.01569), HPSv2 and v2.1 (2306.09341), VLM-RM's goal and baseline
(2310.12921), CLIP-I and CLIP-T as in DreamBench (2208.12242), and RPO's lambda-harmonic mean of them (2407.12164).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

import torch
from PIL.Image import Image, Resampling
from torch import Tensor
from torch.nn import functional as F

from rewards.base import Metadata, Scores, Spec, reference_images
from rewards.hub import hub
from rewards.vision import Dtype, ModelReward, Preprocess, load_weights, pick_device

if TYPE_CHECKING:
    from transformers import ProcessorMixin

Backend = Literal["transformers", "open_clip"]
PICK_SCORE = "yuvalkirstain/PickScore_v1"
PICK_SCORE_PROCESSOR = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
"""Repository whose tokenizer and picture settings PickScore has; its own is without."""


@dataclass(frozen=True, kw_only=True)
class DualEncoder:
    """A frozen picture tower and text tower of one embedding space."""

    images: Callable[[Tensor], Tensor]
    """[B, 3, H, W] preprocessed -> [B, D] unit vectors"""
    tokenize: Callable[[Sequence[str]], Mapping[str, Tensor]]
    tokens: Callable[..., Tensor]
    """Tokens of B texts -> [B, D] unit vectors."""
    preprocess: Preprocess
    scale: float
    device: torch.device
    dtype: torch.dtype

    def pictures(self, images: Sequence[Image], batch_size: int) -> Tensor:
        """[B, D] unit vectors on the CPU, without gradients."""
        vectors = []
        for start in range(0, len(images), batch_size):
            pixels = self.preprocess.images(images[start : start + batch_size])
            with torch.no_grad():
                vectors.append(self.images(pixels.to(self.device, self.dtype)).cpu())
        return torch.cat(vectors)

    def texts(self, texts: Sequence[str]) -> Tensor:
        """[B, D] unit vectors; a text that comes more than once is encoded once."""
        distinct = list(dict.fromkeys(texts))
        tokens = {name: values.to(self.device, non_blocking=True) for name, values in self.tokenize(distinct).items()}
        with torch.no_grad():
            vectors = self.tokens(**tokens)
        return vectors[torch.tensor([distinct.index(text) for text in texts]).to(self.device, non_blocking=True)]


@cache
def load_dual_encoder(
    model: str,
    backend: Backend = "transformers",
    weights: str | None = None,
    processor: str | None = None,
    device: str = "auto",
    dtype: Dtype = "float32",
) -> DualEncoder:
    """Load a dual encoder; rewards that name the same one share it.

    Args:
        model: for transformers a folder or hub name of a CLIP or SigLIP model; for open_clip the name of one of its
            architectures, or 'hf-hub:...', or 'local-dir:...'.
        weights: open_clip only: its tag of pretrained weights, or a file of them ('owner/repository/file' on the hub).
        processor: transformers only: where the tokenizer and picture settings are, if not with the model.
    """
    load = _load_transformers if backend == "transformers" else _load_open_clip
    return load(model, weights if backend == "open_clip" else processor, pick_device(device), getattr(torch, dtype))


def _load_transformers(model: str, processor: str | None, device: torch.device, dtype: torch.dtype) -> DualEncoder:
    from transformers import AutoImageProcessor, AutoModel, AutoTokenizer

    network = AutoModel.from_pretrained(**hub(model), dtype=dtype).to(device).eval().requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(**hub(processor or model))
    picture = AutoImageProcessor.from_pretrained(**hub(processor or model))
    text = network.config.text_config
    length = text.max_position_embeddings
    # SigLIP has learned on padded texts; CLIP ignores what follows a text's end
    padding = "max_length" if network.config.model_type.startswith("siglip") else True

    def tokenize(texts: Sequence[str]) -> Mapping[str, Tensor]:
        return tokenizer(list(texts), padding=padding, truncation=True, max_length=length, return_tensors="pt")

    return DualEncoder(
        images=lambda pixels: F.normalize(network.get_image_features(pixels).pooler_output.float(), dim=-1),
        tokenize=tokenize,
        tokens=lambda **tokens: F.normalize(network.get_text_features(**tokens).pooler_output.float(), dim=-1),
        preprocess=picture_settings(picture),
        scale=float(network.logit_scale.exp()),
        device=device,
        dtype=dtype,
    )


def picture_settings(processor: "ProcessorMixin") -> Preprocess:
    """Picture settings of a transformers image processor."""
    crop = bool(getattr(processor, "do_center_crop", False))
    size = dict(processor.crop_size if crop else processor.size)
    return Preprocess(
        size=(size["height"], size["width"]),
        fit="crop" if crop else "squash",
        shorter=dict(processor.size)["shortest_edge"] if crop else None,
        mean=tuple(processor.image_mean),
        std=tuple(processor.image_std),
        resample=Resampling(processor.resample),
        round_centre=False,
    )


def _load_open_clip(model: str, weights: str | None, device: torch.device, dtype: torch.dtype) -> DualEncoder:
    import open_clip

    is_file = weights is not None and ("/" in weights or Path(weights).is_file())
    network = open_clip.create_model(model, pretrained=None if is_file else weights)
    if is_file:
        network.load_state_dict(load_weights(str(weights)))
    network = network.to(device, dtype).eval().requires_grad_(False)
    tokenizer = open_clip.get_tokenizer(model)
    picture = network.visual.preprocess_cfg
    size = picture["size"]
    fits: dict[str, Literal["crop", "pad", "squash"]] = {"shortest": "crop", "longest": "pad", "squash": "squash"}
    return DualEncoder(
        images=lambda pixels: F.normalize(network.encode_image(pixels).float(), dim=-1),
        tokenize=lambda texts: {"text": tokenizer(list(texts))},
        tokens=lambda text: F.normalize(network.encode_text(text).float(), dim=-1),
        preprocess=Preprocess(
            size=(size, size) if isinstance(size, int) else tuple(size),
            fit=fits[picture["resize_mode"]],
            mean=tuple(picture["mean"]),
            std=tuple(picture["std"]),
            resample=Resampling[picture["interpolation"].upper()],
        ),
        scale=float(network.logit_scale.exp()),
        device=device,
        dtype=dtype,
    )


class EncoderSettings(TypedDict, total=False):
    """Arguments of `DualEncoderReward`, for rewards with further settings."""

    model: str
    backend: Backend
    weights: str | None
    processor: str | None
    batch_size: int
    device: str
    dtype: Dtype


class DualEncoderReward(ModelReward):
    """Base of rewards of a dual encoder.

    Args:
        model, backend, weights, processor, device, dtype: as of `load_dual_encoder`.
        batch_size: pictures a call.
    """

    def __init__(
        self,
        model: str = "openai/clip-vit-large-patch14",
        backend: Backend = "transformers",
        weights: str | None = None,
        processor: str | None = None,
        batch_size: int = 32,
        device: str = "auto",
        dtype: Dtype = "float32",
    ) -> None:
        super().__init__(batch_size)
        self.encoder = load_dual_encoder(model, backend, weights, processor, device, dtype)
        self.preprocess, self.device, self.dtype = self.encoder.preprocess, self.encoder.device, self.encoder.dtype

    def match(self, pixels: Tensor, prompts: Sequence[str]) -> Tensor:
        """[B] cosines of pictures and their prompts."""
        return (self.encoder.images(pixels) * self.encoder.texts(prompts)).sum(dim=-1)


class CLIPScore(DualEncoderReward):
    """CLIP score: cosine of picture and prompt times the checkpoint's logit scale, about 15 to 35 (arXiv 2104.08718).

    The paper's own value is 2.5 times the cosine, cut at 0.
    """

    name = "clip_score"

    def model_scores(self, pixels: Tensor, prompts: Sequence[str], metadata: Metadata) -> Scores:
        return Scores(self.encoder.scale * self.match(pixels, prompts))


class PickScore(CLIPScore):
    """PickScore: a CLIP-H trained on people's choices; cosine times its logit scale, about 17 to 25 (2305.01569)."""

    name = "pick_score"

    def __init__(
        self,
        model: str = PICK_SCORE,
        processor: str | None = PICK_SCORE_PROCESSOR,
        batch_size: int = 32,
        device: str = "auto",
        dtype: Dtype = "float32",
    ) -> None:
        super().__init__(model, "transformers", None, processor, batch_size, device, dtype)


class HPSv2(DualEncoderReward):
    """HPSv2 and v2.1: a CLIP-H trained on people's rankings; the bare cosine, about 0.2 to 0.35 (2306.09341).

    Pictures are fitted with black bars, not cropped, as in the authors' code.

    Args:
        version: version of the published weights.
        model: open_clip architecture.
        weights: instead of the published ones.
    """

    name = "hpsv2"

    def __init__(
        self,
        version: Literal["v2.0", "v2.1"] = "v2.1",
        model: str = "ViT-H-14",
        weights: str | None = None,
        batch_size: int = 32,
        device: str = "auto",
        dtype: Dtype = "float32",
    ) -> None:
        weights = self.published({"version": version, "weights": weights})
        super().__init__(model, "open_clip", weights, None, batch_size, device, dtype)
        self.preprocess = replace(self.preprocess, fit="pad")

    @staticmethod
    def published(settings: Mapping[str, Any]) -> str:
        """The weights that settings ask for."""
        file = {"v2.0": "HPS_v2_compressed.pt", "v2.1": "HPS_v2.1_compressed.pt"}[settings["version"]]
        return settings["weights"] or f"xswu/HPSv2/{file}"

    def model_scores(self, pixels: Tensor, prompts: Sequence[str], metadata: Metadata) -> Scores:
        return Scores(self.match(pixels, prompts))


class GoalBaseline(DualEncoderReward):
    """VLM-RM (arXiv 2310.12921): how far a picture has come from a baseline text to its prompt; at most 1.

    1 - |s - g|^2 / 2 for unit vectors s and g of picture and prompt, after `alpha` of what is not along the line from
    the baseline to the goal was projected out of s - g; at alpha 0 it is the plain cosine.

    Args:
        baseline: content of a picture that does not yet show the prompt; metadata["baseline"] overrides it.
        alpha: in [0, 1].
        encoder: as of `DualEncoderReward`.
    """

    name = "goal_baseline"
    spec = Spec(frozenset({"image", "prompt", "metadata"}), differentiable=True)

    def __init__(self, baseline: str = "a picture", alpha: float = 0.5, **encoder: Unpack[EncoderSettings]) -> None:
        if not 0 <= alpha <= 1:
            raise ValueError(f"goal_baseline: alpha {alpha} is not in [0, 1]")
        super().__init__(**encoder)
        self.baseline, self.alpha = baseline, alpha

    def model_scores(self, pixels: Tensor, prompts: Sequence[str], metadata: Metadata) -> Scores:
        goal = self.encoder.texts(prompts)
        start = self.encoder.texts([str(record.get("baseline", self.baseline)) for record in metadata])
        direction = F.normalize(goal - start, dim=-1)
        gap = self.encoder.images(pixels) - goal
        along = (gap * direction).sum(dim=-1, keepdim=True) * direction
        mixed = self.alpha * along + (1 - self.alpha) * gap
        return Scores(1 - mixed.square().sum(dim=-1) / 2)


class CLIPImage(DualEncoderReward):
    """CLIP-I: cosine of a picture and its reference picture, as in DreamBench; in [-1, 1] (arXiv 2208.12242)."""

    name = "clip_i"
    spec = Spec(frozenset({"image", "reference"}), differentiable=True)

    def likeness(self, pixels: Tensor, metadata: Metadata) -> Tensor:
        """[B] cosines of pictures and their references."""
        references = self.preprocess.images(reference_images(metadata)).to(self.device, self.dtype)
        with torch.no_grad():
            goal = self.encoder.images(references)
        return (self.encoder.images(pixels) * goal).sum(dim=-1)

    def model_scores(self, pixels: Tensor, prompts: Sequence[str], metadata: Metadata) -> Scores:
        return Scores(self.likeness(pixels, metadata))


class LambdaHarmonic(CLIPImage):
    """RPO's lambda-harmonic mean of identity (CLIP-I) and prompt (CLIP-T) likeness, in [0, 1] (arXiv 2407.12164).

    1 / (weight / CLIP-I + (1 - weight) / CLIP-T): low where either is low. Cosines below 0.001 count as 0.001.

    Args:
        identity_weight: lambda, in [0, 1].
        encoder: as of `DualEncoderReward`.
    """

    name = "lambda_harmonic"
    spec = Spec(frozenset({"image", "prompt", "reference"}), differentiable=True)

    def __init__(self, identity_weight: float = 0.3, **encoder: Unpack[EncoderSettings]) -> None:
        if not 0 <= identity_weight <= 1:
            raise ValueError(f"lambda_harmonic: identity_weight {identity_weight} is not in [0, 1]")
        super().__init__(**encoder)
        self.identity_weight = identity_weight

    def model_scores(self, pixels: Tensor, prompts: Sequence[str], metadata: Metadata) -> Scores:
        identity, prompt = self.likeness(pixels, metadata), self.match(pixels, prompts)
        weight = self.identity_weight
        value = 1 / (weight / identity.clamp(min=1e-3) + (1 - weight) / prompt.clamp(min=1e-3))
        return Scores(value, {"identity": identity, "prompt": prompt})
