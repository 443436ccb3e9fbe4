"""Flow-GRPO: group-relative policy optimisation of flow models by an SDE rollout (arXiv 2505.05470).

Rollout: the ODE is turned into an SDE with the same marginals (kernel `flow_sde`), each denoising step a Gaussian
action. Credit: one reward a finished picture, normalised within the prompt's group, shared by all its steps.
Loss: PPO's clip on every step plus the closed-form KL to the start weights. These are the family's plain answers.

The authors' KL divides by 2 g^2, g the diffusion without sqrt(-dt), and so is -dt times the KL of the two Gaussians,
which is the default here: with `divergence: kl_dt` a published `kl_weight` is meant as published.
"""

from flowalign.algorithms.trajectory.base import TrajectoryAlgorithm


class FlowGRPO(TrajectoryAlgorithm):
    """Flow-GRPO: one reward a trajectory, clipped policy gradient on every SDE step (arXiv 2505.05470)."""

    name = "flow_grpo"
    combines = TrajectoryAlgorithm.combines | {"chunks"}
