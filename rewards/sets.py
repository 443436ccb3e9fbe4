"""Rewards of a whole set of pictures: how near it is to exemplars, how diverse it is.

A picture's value is the set's score, plus what the score would lose without it, less the mean of those losses: the mean
over the set is the set's score, and differences are contributions.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor

from rewards.base import Metadata, Scores, Spec
from rewards.clip import load_dual_encoder
from rewards.pictures import read_picture
from rewards.rules import thumbnail

PICTURES = {".png", ".jpg", ".jpeg", ".webp"}


class SetScore:
    """Base of the rewards of sets.

    Args:
        model: a CLIP of transformers, whose embeddings of the pictures are looked at; default none: thumbnails.
    """

    name: str
    spec = Spec(frozenset({"image"}), kind="set")

    def __init__(self, model: str | None = None, batch_size: int = 32, device: str = "auto") -> None:
        self.encoder = load_dual_encoder(model, device=device) if model else None
        self.batch_size = batch_size

    def features(self, samples: Sequence[Image]) -> Tensor:
        """[B, D] embeddings, unit vectors, or thumbnails."""
        if self.encoder is not None:
            return self.encoder.pictures(samples, self.batch_size)
        return torch.stack([torch.from_numpy(thumbnail(image)).flatten() for image in samples]).float()

    def of_set(self, features: Tensor) -> float:
        """The score of a set, of its [N, D]."""
        raise NotImplementedError

    def __call__(self, samples: Sequence[Image], prompts: Sequence[str], metadata: Metadata) -> Scores:
        features = self.features(samples)
        whole, others = self.of_set(features), ~torch.eye(len(samples), dtype=torch.bool)
        gain = torch.zeros(len(samples))
        if len(samples) > 2:
            gain = torch.tensor([whole - self.of_set(features[rest]) for rest in others])
        return Scores(whole + gain - gain.mean(), {"set": torch.full_like(gain, whole)})


class FrechetDistance(SetScore):
    """Minus the Frechet distance of the pictures from exemplars, both as Gaussians (arXiv 1706.08500).

    Args:
        exemplars: a folder of at least two pictures.
    """

    name = "frechet_distance"

    def __init__(self, exemplars: str, **settings: Any) -> None:
        super().__init__(**settings)
        files = sorted(file for file in Path(exemplars).glob("*") if file.suffix.lower() in PICTURES)
        if len(files) < 2:
            raise ValueError(f"exemplars: {exemplars} has {len(files)} pictures; a distance from them takes two")
        self.exemplars = self.features([read_picture(file) for file in files])

    def of_set(self, features: Tensor) -> float:
        return -frechet_distance(features, self.exemplars)


class Vendi(SetScore):
    """Vendi score: how many different pictures the set is worth, from 1 to their number (arXiv 2210.02410)."""

    name = "vendi"

    def of_set(self, features: Tensor) -> float:
        return vendi_score(features)


def frechet_distance(first: Tensor, second: Tensor) -> float:
    """|m - m'|^2 + tr(C + C' - 2 (C C')^(1/2)), of the means and covariances of [N, D] and [M, D]."""
    first, second = first.double(), second.double()
    # C = A^T A, so that the trace of the root is the nuclear norm of A A'^T, [N, M] however large D is
    roots = [(features - features.mean(0)) / max(1, len(features) - 1) ** 0.5 for features in (first, second)]
    spread = sum(root.square().sum() for root in roots) - 2 * torch.linalg.matrix_norm(roots[0] @ roots[1].T, "nuc")
    return float((first.mean(0) - second.mean(0)).square().sum() + spread)


def vendi_score(features: Tensor) -> float:
    """exp of the entropy of the eigenvalues of the cosines of [N, D], over N."""
    unit = torch.nn.functional.normalize(features.double(), dim=1)
    share = torch.linalg.eigvalsh(unit @ unit.T / len(unit)).clamp(min=0)
    return float(torch.special.entr(share).sum().exp())
