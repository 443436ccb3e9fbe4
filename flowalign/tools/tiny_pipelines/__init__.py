"""Tiny random pipelines of the real classes, a few thousand weights each, made without any download.

All tokenizers are the CLIP tokenizer of the shipped pipeline: what matters here is that prompts differ, in content
and in length.
"""

import torch
from diffusers import DiffusionPipeline
from torch import nn

from flowalign.tools.tiny_pipelines import flux, hunyuan, images, kandinsky5, ltx, qwen_image, stable_diffusion, wan
from flowalign.tools.tiny_pipelines.parts import Tiny

PIPELINES: dict[str, Tiny] = {
    **stable_diffusion.PIPELINES,
    **flux.PIPELINES,
    **qwen_image.PIPELINES,
    **images.PIPELINES,
    **hunyuan.PIPELINES,
    **kandinsky5.PIPELINES,
    **wan.PIPELINES,
    **ltx.PIPELINES,
}


def build(name: str) -> DiffusionPipeline:
    """The same pipeline each time."""
    torch.manual_seed(0)
    pipe = PIPELINES[name].make()
    networks = [pipe.components[name] for name in ("unet", "transformer", "transformer_2") if name in pipe.components]
    with torch.no_grad():
        for parameter in (
            parameter for network in networks if network is not None for parameter in network.parameters()
        ):
            # some start at zero and some uninitialised
            if parameter.dim() < 2 or not parameter.any() or not parameter.isfinite().all():
                parameter.normal_(1.0 if parameter.dim() == 1 and bool((parameter == 1).all()) else 0.0, 0.1)
    for component in pipe.components.values():
        if isinstance(component, nn.Module):
            component.eval()
    pipe.set_progress_bar_config(disable=True)
    return pipe


__all__ = ["PIPELINES", "Tiny", "build"]
