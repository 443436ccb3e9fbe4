"""Policies over diffusers pipelines."""

from flowalign.policies.diffusion.forward_process import CleanSamples, Noised
from flowalign.policies.diffusion.policy import DiffusersPolicy
from flowalign.policies.diffusion.rollout import Rollout

__all__ = ["CleanSamples", "DiffusersPolicy", "Noised", "Rollout"]
