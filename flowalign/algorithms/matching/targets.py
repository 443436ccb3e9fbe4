"""Matching on one picture or video for each prompt."""

from flowalign.algorithms.matching import base
from flowalign.algorithms.matching.files import FileMatching, latents
from flowalign.data.batches import Batch
from flowalign.rollouts.diffusion import DiffusionActor


class TargetMatching(FileMatching):
    """Base of the methods that learn from pictures."""

    headline = "matching/error"

    def lessons(self, actor: DiffusionActor, batch: Batch) -> base.Experience:
        return self.learned(actor.sampler, batch, [latents(actor.sampler, batch, "target")])
