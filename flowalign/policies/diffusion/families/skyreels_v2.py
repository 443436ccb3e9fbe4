"""SkyReels-V2."""

from typing import Any

from diffusers import DiffusionPipeline

from flowalign.policies.diffusion.families.wan import Wan


class SkyReelsV2(Wan):
    """SkyReels-V2 text to video: Wan's layout, on its scheduler's levels by steps of first order."""

    name = "skyreels_v2"
    pipelines = ("SkyReelsV2Pipeline",)
    divides_tokens = False

    def networks(self, pipeline: DiffusionPipeline) -> dict[str, Any]:
        return {self.denoiser: pipeline.transformer}
