"""PISCES (arXiv 2602.01624): how well a picture or video agrees with its prompt, by optimal transport of embeddings.

Two rewards without people's votes. *Semantic*: a plan moves a share of the prompt's tokens to the picture's patches (in
a video, all frames' patches), and leaves the rest alone; its value is the mean cosine of what it matches. *Quality*:
prompts' embeddings lie apart from pictures', and a transport map brings them there; its value is the
cosine of a picture and the mapped prompt.

After the abstract, for want of code. Ours: the map is the closed one between Gaussians, where theirs is a network; the
share, and the entropy of the plan.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from PIL.Image import Image
from torch import Tensor
from torch.nn import functional as F

from rewards.base import Metadata, Scores, Spec
from rewards.clip import picture_settings
from rewards.hub import hub
from rewards.pictures import read_picture
from rewards.shapes.clip import TINY_CLIP
from rewards.vision import Dtype, ModelReward, pick_device

FAR = 1e3
"""Cost between what has no partner on either side, so that it is not paired."""


class PISCES(ModelReward):
    """PISCES: optimal transport between the embeddings of prompt and picture; in [-1, 1] (arXiv 2602.01624).

    Parts: semantic, quality.

    Args:
        model: a CLIP of transformers, folder or hub name, or 'tiny_clip', which comes with flowalign.
        real: JSON lines of real pictures ('target', a file) and their prompts, at least two, that the map of prompts
            is fitted to; null leaves the quality out.
        quality_weight: weight of the quality, the rest of 1 being the semantic's.
        share: share of the prompt's tokens that the plan matches.
        entropy: entropy of the plan, in units of the cost 1 - cosine.
        frames: number of frames of a video, evenly from the first to the last; null: samples are pictures.
        batch_size, device, dtype: of the model.
    """

    name = "pisces"

    def __init__(
        self,
        model: str = "openai/clip-vit-large-patch14",
        real: str | None = None,
        quality_weight: float = 0.5,
        share: float = 0.5,
        entropy: float = 0.05,
        frames: int | None = None,
        batch_size: int = 32,
        device: str = "auto",
        dtype: Dtype = "float32",
    ) -> None:
        from transformers import AutoImageProcessor, AutoTokenizer, CLIPModel

        super().__init__(batch_size)
        model = str(TINY_CLIP) if model == "tiny_clip" else model
        if not (0 < share <= 1 and 0 <= quality_weight <= 1 and entropy > 0):
            raise ValueError("pisces: share in (0, 1], quality_weight in [0, 1] and entropy above 0 work")
        self.device, self.dtype = pick_device(device), getattr(torch, dtype)
        self.network = (
            CLIPModel.from_pretrained(**hub(model), dtype=self.dtype).to(self.device).eval().requires_grad_(False)
        )
        self.tokenizer = AutoTokenizer.from_pretrained(**hub(model))
        self.preprocess = picture_settings(AutoImageProcessor.from_pretrained(**hub(model)))
        self.share, self.entropy, self.frames = share, entropy, frames
        self.quality_weight = 0.0 if real is None else quality_weight
        self.map = None if real is None else self._fitted(Path(real))
        self.spec = Spec(frozenset({"frames" if frames else "image", "prompt"}), differentiable=True)

    def __call__(
        self, samples: Sequence[Image] | Sequence[Sequence[Image]], prompts: Sequence[str], metadata: Metadata
    ) -> Scores:
        if self.frames is None:
            return super().__call__(cast(Sequence[Image], samples), prompts, metadata)
        videos = [[video[i] for i in self._chosen(len(video))] for video in cast(Sequence[Sequence[Image]], samples)]
        with torch.no_grad():
            scores = [self._video(self.preprocess.images(v), prompt) for v, prompt in zip(videos, prompts, strict=True)]
        return Scores.cat(scores)

    def score_pixels(self, pixels: Tensor, prompts: Sequence[str], metadata: Metadata) -> Scores:
        if self.frames is None:
            return super().score_pixels(pixels, prompts, metadata)
        chosen = pixels[:, :, self._chosen(pixels.shape[2])].transpose(1, 2).to(self.device, torch.float32)
        scores = [self._video(self.preprocess.pixels(v), prompt) for v, prompt in zip(chosen, prompts, strict=True)]
        return Scores.cat(scores)

    def _chosen(self, count: int) -> list[int]:
        assert self.frames is not None
        chosen: list[int] = torch.linspace(0, count - 1, self.frames).round().int().tolist()
        return chosen

    def _video(self, frames: Tensor, prompt: str) -> Scores:
        """Scores of one video's preprocessed frames [F, 3, H, W]."""
        whole, patches = self._pictures(frames.to(self.device, self.dtype))
        scores = self._scores(F.normalize(whole.mean(0, keepdim=True), dim=-1), patches.flatten(0, 1)[None], [prompt])
        return Scores(scores.value.float(), {name: values.detach().float() for name, values in scores.parts.items()})

    def model_scores(self, pixels: Tensor, prompts: Sequence[str], metadata: Metadata) -> Scores:
        return self._scores(*self._pictures(pixels), prompts)

    def _scores(self, whole: Tensor, patches: Tensor, prompts: Sequence[str]) -> Scores:
        """Scores from unit vectors of pictures [B, D] and of their patches [B, P, D]."""
        texts, tokens, mask = self._texts(prompts)
        cosine = tokens @ patches.transpose(1, 2)
        with torch.no_grad():
            weight = mask / mask.sum(1, keepdim=True)
            plan = partial_plan(1 - cosine, weight, self.share, self.entropy)
        semantic = (plan * cosine).sum((1, 2)) / self.share
        if self.map is None:
            return Scores(semantic, {"semantic": semantic})
        (text_mean, picture_mean, matrix), weight_q = self.map, self.quality_weight
        goal = F.normalize(picture_mean + (texts - text_mean) @ matrix, dim=-1)
        quality = (whole * goal).sum(1)
        value = weight_q * quality + (1 - weight_q) * semantic
        return Scores(value, {"semantic": semantic, "quality": quality})

    def _pictures(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Unit vectors [B, D] of preprocessed pictures and [B, P, D] of their patches, in the space of both towers."""
        tower = self.network.vision_model
        hidden = tower(pixels).last_hidden_state
        projected = self.network.visual_projection(tower.post_layernorm(hidden)).float()
        return F.normalize(projected[:, 0], dim=-1), F.normalize(projected[:, 1:], dim=-1)

    @torch.no_grad()
    def _texts(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor, Tensor]:
        """Unit vectors [B, D] of prompts and [B, L, D] of their tokens, and [B, L] 1 where a token is a word's."""
        inputs = self.tokenizer(list(prompts), padding=True, truncation=True, return_tensors="pt").to(self.device)
        ids = inputs["input_ids"]
        hidden = self.network.text_model(**inputs)
        tokens = self.network.text_projection(hidden.last_hidden_state).float()
        whole = self.network.text_projection(hidden.pooler_output).float()
        special = torch.isin(ids, torch.tensor(self.tokenizer.all_special_ids, device=self.device))
        return (
            F.normalize(whole, dim=-1),
            F.normalize(tokens, dim=-1),
            (~special & (inputs["attention_mask"] > 0)).float(),
        )

    @torch.no_grad()
    def _fitted(self, file: Path) -> tuple[Tensor, Tensor, Tensor]:
        """The map of prompts to real pictures: means of both, and the matrix between."""
        records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line]
        pictures = [self.preprocess.images([read_picture(file.parent / record["target"])]) for record in records]
        texts = self._texts([record["prompt"] for record in records])[0]
        whole = torch.cat([self._pictures(p.to(self.device, self.dtype))[0] for p in pictures])
        return texts.mean(0), whole.mean(0), gaussian_map(texts, whole)


def partial_plan(cost: Tensor, weight: Tensor, share: float, entropy: float, iterations: int = 100) -> Tensor:
    """[B, L, P] plan that moves a share of the mass of L tokens to P patches of equal mass at least cost plus entropy.

    The rest goes to a point beyond either side at no cost, so that the dearest is left alone. Sinkhorn's iterations.

    Args:
        cost: [B, L, P], at least 0.
        weight: [B, L] masses of the tokens, 1 in all.
    """
    batch, _, patches = cost.shape
    rest = cost.new_full((batch, 1), 1 - share)
    rows = torch.cat([weight, rest], 1).clamp(min=1e-30).log()
    columns = torch.cat([cost.new_full((batch, patches), 1 / patches), rest], 1).clamp(min=1e-30).log()
    kernel = -F.pad(cost, (0, 1, 0, 1)) / entropy
    kernel[:, -1, -1] = -FAR
    u, v = torch.zeros_like(rows), torch.zeros_like(columns)
    for _ in range(iterations):
        u = rows - (kernel + v[:, None]).logsumexp(2)
        v = columns - (kernel + u[:, :, None]).logsumexp(1)
    return (kernel + u[:, :, None] + v[:, None]).exp()[:, :-1, :-1]


def gaussian_map(source: Tensor, goal: Tensor, ridge: float = 1e-4) -> Tensor:
    """[D, D] symmetric M such that rows x of `source` [N, D], less their mean, become x M with `goal`'s covariance.

    The map of least squared distance between Gaussians, S^-1/2 (S^1/2 G S^1/2)^1/2 S^-1/2.
    """
    eye = ridge * torch.eye(source.shape[1], dtype=torch.float64, device=source.device)
    s, g = (torch.cov(rows.double().T) + eye for rows in (source, goal))
    root = _power(s, 0.5)
    inverse = _power(s, -0.5)
    return (inverse @ _power(root @ g @ root, 0.5) @ inverse).float()


def _power(matrix: Tensor, exponent: float) -> Tensor:
    """Power of a symmetric matrix without negative eigenvalues."""
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp(min=0) ** exponent) @ vectors.T
