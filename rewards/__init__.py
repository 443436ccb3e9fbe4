"""Sample to score. Depends on samplers and torch; knows nothing of training."""

from rewards.base import FunctionReward, Reward, RewardError, Scores, WeightedSum, as_reward, score

__all__ = ["FunctionReward", "Reward", "RewardError", "Scores", "WeightedSum", "as_reward", "score"]
