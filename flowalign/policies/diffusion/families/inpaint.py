"""Networks that fill a part of a picture: the mask and the rest of the picture stand beside their channels."""

from collections.abc import Sequence
from typing import Any

from diffusers import DiffusionPipeline
from PIL.Image import Image

from flowalign.policies.diffusion.families.base import Family, refuse
from flowalign.policies.diffusion.families.sd3 import SD3
from flowalign.policies.diffusion.families.stable_diffusion import SDXL, StableDiffusion


class Inpaint(Family):
    """Pipelines of these classes whose network sees the mask."""

    images = (1, 1)
    one_each = True
    takes_mask = True

    def check(self, pipeline: DiffusionPipeline) -> None:
        network = getattr(pipeline, self.denoiser)
        if self.channels(network) == network.config.in_channels:
            why = "its network sees no mask, and a step that the picture is pasted over has no density"
            raise refuse(pipeline, why)

    def sources(self, images: Sequence[Image], mask: Image | None, count: int, call: dict[str, Any]) -> dict[str, Any]:
        # from pure noise
        return super().sources(images, mask, count, call) | {"strength": 1.0}


class StableDiffusionInpaint(Inpaint, StableDiffusion):
    """Stable Diffusion 1.5 and 2 that fill a part of a picture."""

    name = "stable_diffusion_inpaint"
    pipelines = ("StableDiffusionInpaintPipeline",)


class SDXLInpaint(Inpaint, SDXL):
    """Stable Diffusion XL that fills a part of a picture."""

    name = "sdxl_inpaint"
    pipelines = ("StableDiffusionXLInpaintPipeline",)


class SD3Inpaint(Inpaint, SD3):
    """Stable Diffusion 3 that fills a part of a picture; decoded with the VAE's shift, which diffusers 0.42 forgets."""

    name = "sd3_inpaint"
    pipelines = ("StableDiffusion3InpaintPipeline",)
