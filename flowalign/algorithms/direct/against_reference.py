"""A late step's picture against another model's own picture of the same prompt, which a judge compares it with.

What RewardDance and OneReward share: ReFL's window, and a reward that is shown a reference picture, such as P(yes) of
a local vision-language model under the template reward_dance_reference.
"""

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, ClassVar

from flowalign.algorithms.base import Preview
from flowalign.algorithms.direct.late_step import LateStep
from flowalign.config import Config
from flowalign.data.batches import Batch
from flowalign.errors import ConfigError
from flowalign.policies.diffusion import Rollout
from flowalign.rollouts.pictures import DiffusionSampler
from flowalign.rollouts.scoring import Scorer
from rewards import Reward, seen, spec_of
from samplers import derive_seed


class AgainstReference(LateStep):
    """Base of the two; a subclass says whose pictures they are (`referring`) and what else the judge is told."""

    template: ClassVar[str]
    """The judge's shipped template, for messages."""

    def check_reward(self, reward: Reward, config: Config) -> None:
        super().check_reward(reward, config)
        if "reference" not in spec_of(reward).needs:
            raise ConfigError(
                f"rewards: '{reward.name}' looks at one picture, and {config.algorithm.name} learns by comparing two; "
                f"{{name: vlm_judge, template: {self.template}, judge: {{model: ...}}}} works"
            )

    def rollout(self, sampler: DiffusionSampler, batch: Batch) -> tuple[Rollout, Batch]:
        return super().rollout(sampler, self.compared(sampler, batch))

    def show(self, sampler: DiffusionSampler, scorer: Scorer, batch: Batch) -> Preview:
        return super().show(sampler, scorer, self.compared(sampler, batch))

    def compared(self, sampler: DiffusionSampler, batch: Batch) -> Batch:
        """The batch with a reference picture of each prompt in its metadata, from a start noise of its own."""
        other = [derive_seed(seed, 9) for seed in batch.seeds]
        with self.referring(sampler):
            rollout = sampler.rollout(replace(batch, seeds=other, noise_seeds=other))
            pictures = [seen(sample) for sample in sampler.decode(rollout)]
        told = [
            record | self.told(seed) | {"reference": picture}
            for record, seed, picture in zip(batch.metadata, other, pictures, strict=True)
        ]
        return replace(batch, metadata=told)

    def referring(self, sampler: DiffusionSampler) -> AbstractContextManager[None]:
        """Within it the policy has the weights that make the reference pictures."""
        raise NotImplementedError

    def told(self, seed: int) -> dict[str, Any]:
        """Further metadata of a sample for the judge."""
        return {}
