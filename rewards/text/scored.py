"""Rewards by reward models of texts with a head of numbers, as `flowalign train-reward` makes them and the hub has
them."""

from collections.abc import Sequence

import torch
from PIL.Image import Image
from torch import Tensor

from rewards.base import Metadata, RewardError, Scores, Spec, source_images
from rewards.text.reward_model import Precision, RewardModel


class TextScore:
    """The number of a reward model of texts: a sequence-classification folder, or one of the hub.

    `flowalign train-reward VOTES --model MODEL` trains one. One of an image-text-to-text model sees the pictures of
    prompts (`image` of the metadata; several are frames), as IXC-2.5-Reward does (arXiv 2501.12368).

    Args:
        model: folder or hub name.
        weights: weights of the model's numbers where it has several, as of models trained on attributes.
        reference: key of the metadata with the reference text that POLAR's kind of model compares with.
        batch_size: texts a network call.
    """

    name = "text_score"

    def __init__(
        self,
        model: str,
        weights: Sequence[float] | None = None,
        reference: str | None = None,
        batch_size: int = 32,
        device: str = "auto",
        dtype: Precision = "float32",
    ) -> None:
        self.model = RewardModel.load(model, dtype, device)
        self.model.network.requires_grad_(False)
        outputs = self.model.numbers
        if (1 if weights is None else len(weights)) != outputs:
            raise ValueError(f"text_score: '{model}' gives {outputs} numbers a text; weights: one for each")
        self.weights, self.reference, self.batch_size = (
            torch.tensor(weights or [1.0], dtype=torch.float32),
            reference,
            batch_size,
        )
        reads = reference is not None or self.model.sees_pictures
        self.spec = Spec(frozenset({"text", "prompt"} | ({"metadata"} if reads else set())))

    @torch.no_grad()
    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        references = (
            [""] * len(samples) if self.reference is None else self._references(self.reference, prompts, metadata)
        )
        rows = [slice(start, start + self.batch_size) for start in range(0, len(samples), self.batch_size)]
        pictures = shown(metadata) if self.model.sees_pictures else [[] for _ in samples]
        numbers = torch.cat(
            [self.model.outputs(samples[r], prompts[r], references[r], pictures[r]).cpu() for r in rows]
        )
        parts = {f"output_{i}": numbers[:, i] for i in range(numbers.shape[1])} if numbers.shape[1] > 1 else {}
        return Scores(numbers @ self.weights, parts)

    def _references(self, key: str, prompts: Sequence[str], metadata: Metadata) -> list[str]:
        for prompt, record in zip(prompts, metadata, strict=True):
            if key not in record:
                raise RewardError(f"reward 'text_score': the prompt {prompt!r} has no '{key}' to compare with")
        return [str(record[key]) for record in metadata]


def shown(metadata: Metadata) -> list[list[Image]]:
    """The pictures under 'image' of each prompt; none where there are none."""
    return [source_images([record])[0] if "image" in record else [] for record in metadata]


def preferred(first: Tensor, second: Tensor) -> Tensor:
    """[N] log-odds that `first` is preferred, of embeddings [N, 2 K] (GPM, arXiv 2410.02197): v_1^T R v_2.

    R turns each pair of coordinates by a right angle, so that the log-odds change their sign with the order, and
    preferences may go in a circle.
    """
    a, b = first.unflatten(-1, (-1, 2)), second.unflatten(-1, (-1, 2))
    return (a[..., 1] * b[..., 0] - a[..., 0] * b[..., 1]).sum(-1)


class TextPreference:
    """A comparison by embeddings of both texts, which may prefer in circles (GPM, arXiv 2410.02197).

    `flowalign train-reward VOTES --model MODEL --loss general` trains one. `win_rate` makes a reward of it.

    Args:
        model: folder or hub name of a sequence-classification model with an even number of outputs.
        batch_size: texts a network call.
    """

    name = "text_preference"

    def __init__(self, model: str, batch_size: int = 32, device: str = "auto", dtype: Precision = "float32") -> None:
        self.model = RewardModel.load(model, dtype, device)
        if self.model.numbers % 2:
            raise ValueError(
                f"text_preference: '{model}' gives an odd number of outputs; text_score takes models of one"
            )
        self.batch_size = batch_size
        needs = {"text", "prompt"} | ({"metadata"} if self.model.sees_pictures else set())
        self.spec = Spec(frozenset(needs), "pairwise")

    @torch.no_grad()
    def compare(
        self, first: Sequence[str], second: Sequence[str], prompts: Sequence[str], metadata: Metadata
    ) -> Scores:
        """The probability that `first` is better."""
        rows = [slice(start, start + self.batch_size) for start in range(0, len(first), self.batch_size)]
        pictures = shown(metadata) if self.model.sees_pictures else [[] for _ in first]
        odds = [
            preferred(*(self.model.outputs(side[r], prompts[r], None, pictures[r]) for side in (first, second)))
            for r in rows
        ]
        return Scores(torch.cat(odds).sigmoid().cpu())
