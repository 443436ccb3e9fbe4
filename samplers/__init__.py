"""Noise to sample, and how probable each step was. Depends on torch only."""

from samplers.kernels import KERNELS, Transition, flow_sde, ode, transition
from samplers.noise import derive_seed, generators, normal
from samplers.plans import PLANS, All, Plan, Window
from samplers.rollout import rollout, sample_ode
from samplers.trajectory import Recorder, Trajectory

__all__ = [
    "KERNELS",
    "PLANS",
    "All",
    "Plan",
    "Recorder",
    "Trajectory",
    "Transition",
    "Window",
    "derive_seed",
    "flow_sde",
    "generators",
    "normal",
    "ode",
    "rollout",
    "sample_ode",
    "transition",
]
