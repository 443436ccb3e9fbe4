"""Sample to score. Depends on samplers and torch; knows nothing of training."""

from rewards.base import (
    DifferentiableReward,
    FunctionReward,
    PairwiseReward,
    Reward,
    RewardError,
    Scores,
    Spec,
    as_reward,
    groups,
    reference_images,
    score,
    spec_of,
)
from rewards.compose import WeightedSum

__all__ = [
    "DifferentiableReward",
    "FunctionReward",
    "PairwiseReward",
    "Reward",
    "RewardError",
    "Scores",
    "Spec",
    "WeightedSum",
    "as_reward",
    "groups",
    "reference_images",
    "score",
    "spec_of",
]
