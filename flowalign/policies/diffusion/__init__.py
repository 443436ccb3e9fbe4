"""Policies over diffusers pipelines."""

from flowalign.policies.diffusion.noised import Noised
from flowalign.policies.diffusion.policy import DiffusersPolicy
from flowalign.policies.diffusion.rollout import Rollout

__all__ = ["DiffusersPolicy", "Noised", "Rollout"]
