"""What turns a model into trajectories of actions with log-probabilities."""

from flowalign.policies.diffusers import DiffusersPolicy
from flowalign.policies.noised import Noised
from flowalign.policies.rollout import Rollout

__all__ = ["DiffusersPolicy", "Noised", "Rollout"]
