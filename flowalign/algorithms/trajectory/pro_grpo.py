"""Pro-GRPO: a large group that is pruned on its way to the members whose rewards vary most (arXiv 2512.15347).

Rollout: a prompt starts with `training.group_size` trajectories. Before each step that `prune` names, the picture that
the ODE predicts at each state in one step is scored, and a share of the group goes on: the members whose predicted
rewards have the largest variance (`core.credit.most_varied`). The others end there. Credit, loss and KL are
Flow-GRPO's, over the members that are left, whose mean and deviation are the group's. Published (SD3.5 medium, 10
steps): 48 members, of which 24 go on at step 5 and 12 at step 7; a lighter one 24, 16, 12; on SD 1.4 with 50 steps 48,
32 at step 30 and 8 at step 40.

The predicted pictures cost a decoding and a reward each, and no call of the network, since the velocity is the next
step's. Departure: no authors' code is published; the rule is that of the paper's equations.
"""

from functools import partial
from itertools import pairwise
from typing import Annotated

from pydantic import Field

from flowalign.algorithms.trajectory import base as trajectory
from flowalign.algorithms.trajectory.base import TrajectoryAlgorithm, learned_steps
from flowalign.config import Config
from flowalign.core.credit import most_varied
from flowalign.data.batches import Batch
from flowalign.errors import ConfigError
from flowalign.policies.diffusion import Rollout
from flowalign.rollouts.pictures import DiffusionSampler


class ProGRPOSettings(trajectory.PolicySettings):
    prune: dict[int, Annotated[float, Field(gt=0, lt=1)]] = {5: 0.5, 7: 0.25}
    """Share of the group that goes on, by the number of the step before which the rest ends, counted from 0."""


class ProGRPO(TrajectoryAlgorithm):
    """Pro-GRPO: large groups, pruned while they are sampled to the members that differ most (arXiv 2512.15347)."""

    name = "pro_grpo"
    Settings = ProGRPOSettings
    settings: ProGRPOSettings
    # the reward decides on the way what is sampled
    combines = TrajectoryAlgorithm.combines - {"overlap", "refill", "replay", "workers"}

    def check(self, config: Config) -> None:
        super().check(config)
        steps, members = sorted(self.settings.prune), config.training.group_size
        sizes = [members, *self.sizes(members).values()]
        if not steps or steps[0] < 1 or steps[-1] >= config.rollout.steps:
            raise ConfigError(f"algorithm.prune: names steps from 1 to {config.rollout.steps - 1}, such as {{2: 0.5}}")
        if sizes[-1] < 2 or any(large <= small for large, small in pairwise(sizes)):
            raise ConfigError(
                f"algorithm.prune: the members of a group would go {' to '.join(map(str, sizes))}; fewer and fewer "
                "work, down to 2"
            )
        if config.rollout.order == 2 or config.rollout.cache is not None:
            raise ConfigError("rollout: pro_grpo walks step by step; order: 1 and cache: null work")

    def items(self, config: Config) -> int:
        return min(self.sizes(config.training.group_size).values()) * len(learned_steps(config))

    def sizes(self, members: int) -> dict[int, int]:
        """Members of a group of so many that go on, by step, in order."""
        return {step: round(share * members) for step, share in sorted(self.settings.prune.items())}

    def rollout(self, sampler: DiffusionSampler, batch: Batch) -> tuple[Rollout, Batch]:
        sizes = self.sizes(len(batch) // len(set(batch.group)))
        return sampler.pruned(batch, {step: partial(most_varied, k=size) for step, size in sizes.items()})
