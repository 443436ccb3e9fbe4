"""Rewards of sounds: CLAP's likeness of a sound and its prompt (arXiv 2211.06687)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from rewards.base import Metadata, RewardError, Scores, Spec
from rewards.vision import pick_device


@dataclass(frozen=True)
class Sound:
    """A sound as a sample."""

    waveform: np.ndarray
    """[T], or [C, T] of several channels, in [-1, 1]"""
    rate: int
    """samples a second"""

    def at(self, rate: int) -> np.ndarray:
        """[T] one channel, their mean, at another rate."""
        from scipy.signal import resample_poly

        mono = self.waveform if self.waveform.ndim == 1 else self.waveform.mean(axis=0)
        common = math.gcd(rate, self.rate)
        made: np.ndarray = resample_poly(mono, rate // common, self.rate // common).astype(np.float32)
        return made


@cache
def load_clap(model: str, device: str) -> tuple[Any, Any]:
    """Load network and processor; rewards that name the same ones share them."""
    from transformers import ClapModel, ClapProcessor

    network = ClapModel.from_pretrained(model).to(pick_device(device)).eval().requires_grad_(False)
    return network, ClapProcessor.from_pretrained(model)


class CLAP:
    """CLAP: cosine of a sound and its prompt, in [-1, 1] (arXiv 2211.06687); of `rewards.sound.Sound` as samples.

    No family that is trained here hands sounds to its rewards; in Python, and served, it scores them.

    Args:
        model: folder or hub name of a CLAP of transformers. One with fusion hears more than ten seconds, others the
            first ten.
        batch_size, device: of the model.
    """

    name = "clap"
    spec = Spec(frozenset({"prompt"}))

    def __init__(self, model: str = "laion/clap-htsat-unfused", batch_size: int = 16, device: str = "auto") -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size {batch_size} must be at least 1")
        self.network, self.processor = load_clap(model, device)
        self.batch_size = batch_size

    @torch.no_grad()
    def __call__(self, samples: Sequence[Any], prompts: Sequence[str], metadata: Metadata) -> Scores:
        for sample, prompt in zip(samples, prompts, strict=True):
            if not isinstance(sample, Sound):
                raise RewardError(
                    f"clap: it scores sounds (rewards.sound.Sound), not a {type(sample).__name__}; prompt {prompt!r}"
                )
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
            sound, text = (F.normalize(own.pooler_output, dim=-1) for own in pair)
            values.append((sound * text).sum(dim=-1).cpu())
        return Scores(torch.cat(values))
