"""RewardDance (arXiv 2509.08826) by ReFL: how probably a judge prefers a late step's picture to the start's own.

The reward is the probability of "yes" that a local vision-language model gives to the question whether the sample is
better than a reference picture, differentiable in the sample's pixels. The reference is the start weights' finished
picture of the same prompt, from other noise.

After the abstract, for want of code: which picture the reference is, is ours.
"""

from contextlib import AbstractContextManager

from flowalign.algorithms.direct.against_reference import AgainstReference
from flowalign.rollouts.pictures import DiffusionSampler


class RewardDanceReFL(AgainstReference):
    """RewardDance: P(yes) of a judge that compares with the start weights' picture, by ReFL (arXiv 2509.08826)."""

    name = "reward_dance_refl"
    template = "reward_dance_reference"

    @property
    def uses_reference(self) -> bool:
        return True

    def referring(self, sampler: DiffusionSampler) -> AbstractContextManager[None]:
        return sampler.policy.reference()
