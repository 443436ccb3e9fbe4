"""DiffusionNFT's loss (arXiv 2509.16117), for methods of one modality and of several: a mixture of the policy's and the
old velocity is matched to a sample as far as it is good, and another as far as it is not."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from flowalign.algorithms.base import AlgorithmSettings
from flowalign.algorithms.matching.advantage import AdvantageMatching, AdvantageSettings
from flowalign.algorithms.matching.base import Points
from flowalign.core.matching import adaptive_square, optimality
from flowalign.policies.diffusion import Noised
from flowalign.policies.settings import Snapshot


class NegativeAwareSettings(AdvantageSettings):
    beta: float = Field(1.0, gt=0)
    """Share of the policy in the mixtures; published: 1, 0.1 for OCR and several rewards."""
    adaptive: bool = True
    """Errors are of clean samples, each over the mean size of its own; false: of velocities, as in the paper."""
    advantage_max: float = Field(5.0, gt=0)
    """The advantage that counts as entirely good; advantages are clipped there."""
    mode: Literal["all", "positive_only", "negative_only", "one_only", "binary"] = "all"
    """Advantages that count: all, those above 0 or below it (others are 0), those above 0 as 1, or their signs."""
    kl_weight: float = Field(1e-4, ge=0)
    """Weight of the mean squared difference from the start weights' velocity."""
    old: Snapshot = Snapshot(decay="0-0-0.001-0.5")
    """Snapshot that samples; published too: 0 and, for OCR, '75-0-0.0075-0.999'."""


class NegativeAware(AdvantageMatching):
    """Base of the methods with DiffusionNFT's loss."""

    Settings: ClassVar[type[AlgorithmSettings]] = NegativeAwareSettings
    settings: NegativeAwareSettings
    compares = frozenset({"old"})

    @property
    def snapshots(self) -> Mapping[str, Snapshot]:
        return {"old": self.settings.old}

    @property
    def sampling_weights(self) -> str:
        return "old"

    def loss(self, points: Points) -> tuple[Tensor, dict[str, Tensor]]:
        settings, noised = self.settings, points.noised
        assert points.old is not None
        good = self.goodness(points.advantage)
        positive = points.old + settings.beta * (points.velocity - points.old)
        negative = points.old - settings.beta * (points.velocity - points.old)
        loss = good * self.error(noised, positive) + (1 - good) * self.error(noised, negative)
        return settings.advantage_max / settings.beta * loss, {"nft/goodness": good}

    def goodness(self, advantage: Tensor) -> Tensor:
        """[N] r in [0, 1]: the optimality probability."""
        largest, mode = self.settings.advantage_max, self.settings.mode
        if mode == "positive_only":
            advantage = advantage.clamp(min=0)
        elif mode == "negative_only":
            advantage = advantage.clamp(max=0)
        elif mode == "one_only":
            advantage = (advantage > 0).float()
        elif mode == "binary":
            advantage = advantage.sign()
        return optimality(advantage, largest)

    def error(self, noised: Noised, velocity: Tensor) -> Tensor:
        """[N] errors of the clean samples that velocities point to, or of the velocities."""
        return adaptive_square(noised.clean(velocity) - noised.x0) if self.settings.adaptive else noised.error(velocity)
