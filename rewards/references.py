"""Rewards set against reference scores: what samples of the start model earn for the same prompt.

`flowalign reference-scores` samples them and writes them into the prompts' metadata.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from rewards.base import Metadata, Reward, RewardError, Spec
from rewards.compose import Composition, one_each

KEY = "reference_score"
"""Key of the metadata: a number, a list of numbers, or either for each reward under its name."""


class Referenced(Composition):
    """Base of compositions that compare each reward's value with its reference scores.

    Args:
        rewards: rewards with reference scores.
        reference: the score of samples whose metadata has none.
        key: key of the metadata.
    """

    def __init__(self, rewards: Sequence[Reward], title: str, reference: float | None, key: str) -> None:
        super().__init__(rewards, title)
        self.reference, self.key = reference, key

    @property
    def spec(self) -> Spec:
        inner = super().spec
        return replace(inner, needs=inner.needs | {"metadata"})

    def references(self, reward: Reward, prompts: Sequence[str], metadata: Metadata, like: Tensor) -> list[Tensor]:
        """The reference scores of each sample's prompt."""
        references = []
        for prompt, record in zip(prompts, metadata, strict=True):
            reference = record.get(self.key, self.reference)
            if isinstance(reference, Mapping):
                reference = reference.get(reward.name, self.reference)
            if reference is None:
                raise RewardError(
                    f"{self.name}: the prompt {prompt!r} has no '{self.key}' of '{reward.name}' in its metadata; "
                    "`flowalign reference-scores` samples them, or set `reference`"
                )
            references.append(torch.tensor(reference, dtype=like.dtype, device=like.device).reshape(-1))
        return references


class BoundedCentred(Referenced):
    """PAR (arXiv 2502.18770): sigmoid(reward - reference score), averaged over the references of the prompt.

    It rises steeply around what the start model reached and is flat far above, where rewards are hacked.

    Args:
        reward: to be bounded.
        reference: the reference score of samples whose metadata has none.
        scale: the gap is divided by it.
        key: key of the metadata: a number, a list of numbers, or either under the reward's name.
    """

    def __init__(self, reward: Reward, reference: float | None = None, scale: float = 1.0, key: str = KEY) -> None:
        super().__init__([reward], "par", reference, key)
        self.scale = scale

    def combine(self, values: Tensor, prompts: Sequence[str], metadata: Metadata) -> Tensor:
        references = self.references(self.rewards[0], prompts, metadata, values)
        gaps = [(value - goal) / self.scale for value, goal in zip(values[0], references, strict=True)]
        return torch.stack([gap.sigmoid().mean() for gap in gaps])


class CalibratedReward(Referenced):
    """InfAlign's calibrated reward (arXiv 2412.19792): the share of reference samples that the sample beats.

    Its quantile among the start model's scores for the prompt, a tie being half a win: in [0, 1] and uniform for the
    start model, whatever the reward's scale. With `exponent` t it is sign(t) exp(t quantile): where the best of several
    samples will be taken (t > 0) what counts is to reach the top, where the worst counts (t < 0) to leave the bottom.
    The paper's abstract says as much: calibrate, then transform for best-of-n and for jailbreaking. The formula is from
    memory, its text was not at hand.

    Args:
        reward: to be calibrated; its gradient does not survive.
        reference: the reference score of samples whose metadata has none.
        exponent: t; 0 leaves the quantile as it is.
        key: as of `BoundedCentred`.
    """

    def __init__(self, reward: Reward, reference: float | None = None, exponent: float = 0.0, key: str = KEY) -> None:
        super().__init__([reward], "calibrated", reference, key)
        self.exponent = exponent

    @property
    def spec(self) -> Spec:
        return replace(super().spec, differentiable=False)

    def combine(self, values: Tensor, prompts: Sequence[str], metadata: Metadata) -> Tensor:
        references = self.references(self.rewards[0], prompts, metadata, values)
        wins = [(1 + (value - goal).sign()).mean() / 2 for value, goal in zip(values[0], references, strict=True)]
        quantile = torch.stack(wins)
        t = self.exponent
        return quantile if t == 0 else (t * quantile).exp().copysign(torch.tensor(t).to(quantile))


class LogSigmoidSum(Referenced):
    """A logical AND: sum of w log sigmoid(reward - reference), for rewards of Bradley and Terry (arXiv 2402.00742).

    Each term is the log-probability that the sample is better than the reference in that respect, so the sum is the
    one that it is better in all: what is bad in one costs more than being very good in the others brings.

    Args:
        rewards: log-odds, as of rewards that were trained on comparisons; others are divided by `scales`.
        weights: one each; default 1.
        scales: divisor of each reward's gap to its reference; default 1.
        reference: the reference score of samples whose metadata has none.
        quantile: quantile of a prompt's reference scores that is the reference. Public code of this reward takes
            the 0.85 too, of a normal distribution with their mean and deviation; the paper's text was not at hand.
        key: as of `BoundedCentred`.
    """

    def __init__(
        self,
        rewards: Sequence[Reward],
        weights: Sequence[float] | None = None,
        scales: Sequence[float] | None = None,
        reference: float | None = None,
        quantile: float = 0.85,
        key: str = KEY,
    ) -> None:
        super().__init__(rewards, "log_sigmoid", reference, key)
        if not 0 <= quantile <= 1:
            raise ValueError(f"log_sigmoid: quantile {quantile} is not in [0, 1]")
        self.weights = one_each(weights, self.rewards)
        self.scales = one_each(scales, self.rewards)
        self.quantile = quantile

    def combine(self, values: Tensor, prompts: Sequence[str], metadata: Metadata) -> Tensor:
        total = torch.zeros_like(values[0])
        for reward, value, weight, scale in zip(self.rewards, values, self.weights, self.scales, strict=True):
            references = self.references(reward, prompts, metadata, value)
            goal = torch.stack([scores.quantile(self.quantile) for scores in references])
            total = total + weight * F.logsigmoid((value - goal) / scale)
        return total
