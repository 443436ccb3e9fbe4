"""Higher-order solvers of the probability-flow ODE: diffusers' own, on any schedule."""

from torch import Tensor


class DPMSolver:
    """Second-order DPM-Solver++ (arXiv 2211.01095) down one schedule of a flow model, by diffusers' scheduler.

    The first step, for want of a history, and the last one, into sigma 0, are of first order.

    Args:
        sigmas: [T + 1] decreasing, below 1 after the first and ending in 0.
    """

    def __init__(self, sigmas: Tensor) -> None:
        # only here: it takes as long to import as torch
        from diffusers import DPMSolverMultistepScheduler

        self.scheduler = DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)
        self.scheduler.set_timesteps(len(sigmas) - 1)
        # the schedule is the rollout's, not the one that set_timesteps makes; begin index 0 spares the look-up by time
        self.scheduler.sigmas = sigmas.cpu()
        self.scheduler.set_begin_index(0)

    def step(self, x: Tensor, velocity: Tensor) -> Tensor:
        """The states [N, ...] at the next sigma, float32; call once for each sigma in turn."""
        time = self.scheduler.timesteps[self.scheduler.step_index or 0]
        return self.scheduler.step(velocity.float(), time, x.float(), return_dict=False)[0]
