"""Sample to score. Depends on samplers and torch; knows nothing of training."""

from rewards.base import (
    UNPARSED,
    DifferentiableReward,
    FunctionReward,
    PairwiseReward,
    Reward,
    RewardError,
    Scores,
    Spec,
    advance,
    as_reward,
    groups,
    reference_images,
    score,
    source_images,
    spec_of,
)
from rewards.compose import WeightedSum

__all__ = [
    "UNPARSED",
    "DifferentiableReward",
    "FunctionReward",
    "PairwiseReward",
    "Reward",
    "RewardError",
    "Scores",
    "Spec",
    "WeightedSum",
    "advance",
    "as_reward",
    "groups",
    "reference_images",
    "score",
    "source_images",
    "spec_of",
]
