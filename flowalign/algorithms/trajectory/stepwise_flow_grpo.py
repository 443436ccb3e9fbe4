"""Stepwise-Flow-GRPO: each step earns what it gained, and all steps are normalised together (arXiv 2603.28718).

Credit: a state's reward r is that of the picture that a few ODE steps make of it (5 in the paper, which found 2 to 8
alike). A step's gain is the next state's reward less its own state's, and advantages are (gain - mean) / std over all
steps of all trajectories of a prompt (`process` with gamma 0), so that steps that change the reward more weigh more.
Rollout, loss and KL are Flow-GRPO's. DenseGRPO has the same gains, with exact completions, and normalises each step by
itself.

Departures: no authors' code is published. Their sampler, x = (1 - s') x0 + sqrt(s'^2 - std^2) noise + std e with std =
eta s' sqrt(1 - s), is left out as one that stands apart from the credit (section 5.5); `cps` replaces predicted by
fresh noise in the same way, by another amount.
"""

from torch import Tensor

from flowalign.algorithms.trajectory import base as trajectory
from flowalign.algorithms.trajectory.base import TrajectoryAlgorithm, WithStateValues
from flowalign.config import Named
from flowalign.core.credit import dense_rewards
from flowalign.rollouts.dense import Estimator, StateValues
from flowalign.rollouts.pictures import SampledPictures
from flowalign.rollouts.processes import Processes


class StepwiseFlowGRPOSettings(trajectory.PolicySettings):
    advantage: Named = Named(name="process", gamma=0.0, unbiased=False)
    estimator: Estimator = Estimator(kind="n_step", steps=5)


class StepwiseFlowGRPO(WithStateValues, TrajectoryAlgorithm):
    """Stepwise-Flow-GRPO: gains of a few ODE steps, normalised over all steps of a prompt (arXiv 2603.28718)."""

    name = "stepwise_flow_grpo"
    Settings = StepwiseFlowGRPOSettings
    settings: StepwiseFlowGRPOSettings
    fields = frozenset()
    dense = True

    def __init__(self, settings: StepwiseFlowGRPOSettings) -> None:
        super().__init__(settings)
        self.values = StateValues(settings.estimator)

    def step_reward(self, sampled: SampledPictures, processes: Processes) -> Tensor:
        return dense_rewards(self.values(sampled, processes))
