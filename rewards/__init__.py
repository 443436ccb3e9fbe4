"""Sample to score. Depends on samplers and torch; knows nothing of training."""

from rewards.base import (
    END,
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
    bind,
    groups,
    reference_images,
    score,
    source_images,
    spec_of,
)
from rewards.compose import WeightedSum

__all__ = [
    "END",
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
    "bind",
    "groups",
    "reference_images",
    "score",
    "source_images",
    "spec_of",
]
