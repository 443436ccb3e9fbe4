"""Policies over diffusers pipelines."""

from flowalign.policies.diffusion.forward_process import NoisedSamples
from flowalign.policies.diffusion.policy import DiffusersPolicy
from flowalign.policies.diffusion.rollout import Rollout

__all__ = ["DiffusersPolicy", "NoisedSamples", "Rollout"]
