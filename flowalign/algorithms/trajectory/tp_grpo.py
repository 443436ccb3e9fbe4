"""TP-GRPO: turning points get their long-term effect (arXiv 2602.06422).

Credit: states are completed and scored as in DenseGRPO, R_0 .. R_T. Where the local gain turns to agree with the
trajectory's overall change, the step is a turning point and is paid its aggregated effect R_T - R_{k-1} instead of
d_k (variant 'aggregate', the paper's abstract); 'total' and 'released' are the variants of the released
configurations and launch scripts. Advantages are normalised within the group for each step on its own.

Departure: R_0 completes the trajectory's own start noise; the released code draws another one for it.
"""

from torch import Tensor

from flowalign.algorithms.trajectory import base as trajectory
from flowalign.algorithms.trajectory.base import TrajectoryAlgorithm
from flowalign.core.credit import TurningPointVariant, turning_point_rewards
from flowalign.data.batches import Batch
from flowalign.policies.diffusion import Rollout
from flowalign.rollouts.dense import Estimator
from flowalign.rollouts.diffusion import DiffusionActor
from rewards import Scores


class TPGRPOSettings(trajectory.PolicySettings):
    variant: TurningPointVariant = "aggregate"
    estimator: Estimator = Estimator()


class TPGRPO(TrajectoryAlgorithm):
    """TP-GRPO: dense rewards in which turning points get their aggregated effect (arXiv 2602.06422)."""

    name = "tp_grpo"
    Settings = TPGRPOSettings
    settings: TPGRPOSettings
    fields = frozenset()
    dense = True

    def step_reward(self, actor: DiffusionActor, rollout: Rollout, batch: Batch, scores: Scores) -> Tensor:
        values = actor.values(rollout, batch, scores.value, self.settings.estimator)
        # of all processes, whose turning points 'released' balances together
        values, mask = actor.gather(values.to(actor.device)), actor.gather(rollout.trajectory.mask)
        return actor.own(turning_point_rewards(values, self.settings.variant, mask), len(batch))
