"""What turns a model into trajectories of actions with log-probabilities."""

from flowalign.policies.diffusers import DiffusersPolicy, Rollout
from flowalign.policies.noised import Noised

__all__ = ["DiffusersPolicy", "Noised", "Rollout"]
