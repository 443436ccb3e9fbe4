"""Rewards of sounds: CLAP's likeness of a sound and its prompt (arXiv 2211.06687)."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch.nn import functional as F

from rewards.base import Metadata, Scores, Sound, Spec
from rewards.hub import hub
from rewards.vision import pick_device


@cache
def load_clap(model: str, device: str) -> tuple[Any, Any]:
    """Load network and processor; rewards that name the same ones share them."""
    from transformers import ClapModel, ClapProcessor

    network = ClapModel.from_pretrained(**hub(model)).to(pick_device(device)).eval().requires_grad_(False)
    return network, ClapProcessor.from_pretrained(**hub(model))


class CLAP:
    """CLAP: cosine of a sound and its prompt, in [-1, 1] (arXiv 2211.06687); of `rewards.Sound` as samples.

    In training it scores what Stable Audio 3 makes, and the sound that LTX-2 makes along with a video.

    Args:
        model: folder or hub name of a CLAP of transformers. One with fusion hears more than ten seconds, others the
            first ten.
        batch_size, device: of the model.
    """

    name = "clap"
    spec = Spec(frozenset({"sound", "prompt"}))

    def __init__(self, model: str = "laion/clap-htsat-unfused", batch_size: int = 16, device: str = "auto") -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size {batch_size} must be at least 1")
        self.network, self.processor = load_clap(model, device)
        self.batch_size = batch_size

    @torch.no_grad()
    def __call__(self, samples: Sequence[Sound], prompts: Sequence[str], metadata: Metadata) -> Scores:
        extractor, device = self.processor.feature_extractor, self.network.device
        values = []
        for i in range(0, len(samples), self.batch_size):
            rows = slice(i, i + self.batch_size)
            waves = [sample.at(extractor.sampling_rate)[: extractor.nb_max_samples] for sample in samples[rows]]
            if self.network.config.audio_config.enable_fusion:
                waves = [sample.at(extractor.sampling_rate) for sample in samples[rows]]
            heard = extractor(waves, sampling_rate=extractor.sampling_rate, return_tensors="pt").to(device)
            read = self.processor.tokenizer(list(prompts[rows]), padding=True, return_tensors="pt").to(device)
            pair = (self.network.get_audio_features(**heard), self.network.get_text_features(**read))
            sound, text = (F.normalize(output.pooler_output, dim=-1) for output in pair)
            values.append((sound * text).sum(dim=-1).cpu())
        return Scores(torch.cat(values))
