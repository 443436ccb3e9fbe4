"""Matching on one picture or video for each prompt."""

from flowalign.algorithms.matching import base
from flowalign.algorithms.matching.files import FileMatching, SampledFiles, latents
from flowalign.rollouts.processes import Processes


class TargetMatching(FileMatching):
    """Base of the methods that learn from pictures."""

    headline = "matching/error"

    def lessons(self, sampled: SampledFiles, processes: Processes) -> base.MatchingExperience:
        sampler, batch = sampled.sampler, sampled.batch
        return self.learned(sampler, batch, [latents(sampler, batch, "target")])
