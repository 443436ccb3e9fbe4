"""TP-GRPO: turning points get their long-term effect (arXiv 2602.06422).

Credit: states are completed and scored as in DenseGRPO, R_0 .. R_T. Where the local gain turns to agree with the
trajectory's overall change, the step is a turning point and is paid its aggregated effect R_T - R_{k-1} instead of
d_k (variant 'aggregate', the paper's abstract); 'total' and 'released' are the variants of the released
configurations and launch scripts. Advantages are normalised within the group for each step on its own.

Departure: R_0 completes the trajectory's own start noise; the released code draws another one for it.
"""

from torch import Tensor

from flowalign.algorithms.trajectory import base as trajectory
from flowalign.algorithms.trajectory.base import TrajectoryAlgorithm, WithStateValues
from flowalign.core.credit import TurningPointVariant, turning_point_rewards
from flowalign.rollouts.dense import Estimator, StateValues
from flowalign.rollouts.pictures import SampledPictures
from flowalign.rollouts.processes import Processes


class TPGRPOSettings(trajectory.PolicySettings):
    variant: TurningPointVariant = "aggregate"
    estimator: Estimator = Estimator()


class TPGRPO(WithStateValues, TrajectoryAlgorithm):
    """TP-GRPO: dense rewards in which turning points get their aggregated effect (arXiv 2602.06422)."""

    name = "tp_grpo"
    Settings = TPGRPOSettings
    settings: TPGRPOSettings
    fields = frozenset()
    dense = True

    def __init__(self, settings: TPGRPOSettings) -> None:
        super().__init__(settings)
        self.values = StateValues(settings.estimator)

    def step_reward(self, sampled: SampledPictures, processes: Processes) -> Tensor:
        # of all processes, whose turning points 'released' balances together
        values = processes.gather(self.values(sampled, processes).to(processes.device))
        mask = processes.gather(sampled.rollout.trajectory.mask)
        return processes.own(turning_point_rewards(values, self.settings.variant, mask), len(sampled.batch))
