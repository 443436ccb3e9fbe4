"""What turns a model into trajectories of actions with log-probabilities."""

from flowalign.policies.diffusers import DiffusersPolicy, Rollout

__all__ = ["DiffusersPolicy", "Rollout"]
