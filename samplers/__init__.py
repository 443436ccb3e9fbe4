"""Noise to sample, and how probable each step was. Depends on torch only."""

from samplers.kernels import (
    KERNELS,
    Kernel,
    Transition,
    check_eta,
    cps,
    cps_published,
    dance_sde,
    ddim,
    ddim_published,
    flow_sde,
    linear_sde,
    ode,
    step_sensitivity,
    step_spread,
    step_std,
    transition,
    v_from_epsilon,
)
from samplers.learned import LearnedNoise
from samplers.noise import derive_seed, generators, normal
from samplers.plans import PLANS, All, Calibrated, Decay, Plan, Random, Single, Tree, Window
from samplers.rollout import rollout, sample_ode
from samplers.rows import Rows
from samplers.trajectory import Recorder, Trajectory

__all__ = [
    "KERNELS",
    "PLANS",
    "All",
    "Calibrated",
    "Decay",
    "Kernel",
    "LearnedNoise",
    "Plan",
    "Random",
    "Recorder",
    "Rows",
    "Single",
    "Trajectory",
    "Transition",
    "Tree",
    "Window",
    "check_eta",
    "cps",
    "cps_published",
    "dance_sde",
    "ddim",
    "ddim_published",
    "derive_seed",
    "flow_sde",
    "generators",
    "linear_sde",
    "normal",
    "ode",
    "rollout",
    "sample_ode",
    "step_sensitivity",
    "step_spread",
    "step_std",
    "transition",
    "v_from_epsilon",
]
