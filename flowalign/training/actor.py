"""What an algorithm acts through: the policy, the reward, the rollout settings and the other processes."""

from collections.abc import Sequence

import torch
from accelerate import Accelerator
from PIL.Image import Image
from torch import Tensor

from flowalign import registry
from flowalign.config import Config
from flowalign.data import Batch
from flowalign.policies import DiffusersPolicy, Rollout
from rewards import Reward, Scores, score


class Actor:
    """Samples and scores one process's part of a batch."""

    def __init__(self, config: Config, policy: DiffusersPolicy, reward: Reward, accelerator: Accelerator) -> None:
        self.config, self.policy, self.reward, self.accelerator = config, policy, reward, accelerator
        self.kernel = registry.resolve("kernels", config.rollout.kernel)
        self.plan = config.build_plan()
        self.device = accelerator.device

    def rollout(self, batch: Batch) -> Rollout:
        """One stochastic trajectory for every sample of the batch."""
        settings = self.config.rollout
        eta = self.plan.etas(settings.steps, settings.eta, batch.iteration, self.config.training.seed)
        return self.policy.sample(
            batch.prompts,
            batch.seeds,
            noise_seeds=batch.noise_seeds,
            kernel=self.kernel,
            eta=eta,
            **settings.arguments(),
        )

    def decode(self, rollout: Rollout) -> list[Image]:
        """The finished pictures of a rollout."""
        return self.policy.decode(rollout.trajectory.final, self.config.rollout.batch_size)

    def score(self, images: Sequence[Image], batch: Batch) -> Scores:
        """Checked scores of one picture a sample."""
        return score(self.reward, images, batch.prompts, batch.metadata)

    def gather(self, values: Tensor) -> Tensor:
        """Rows of all processes, in the order of one process."""
        return self.accelerator.gather(values.contiguous())

    def mine(self, values: Tensor, rows: int) -> Tensor:
        """This process's rows of gathered values."""
        start = self.accelerator.process_index * rows
        return values[start : start + rows]

    def largest(self, count: int) -> int:
        """The largest of a number over the processes."""
        return int(self.gather(torch.tensor([count], device=self.device)).max())
