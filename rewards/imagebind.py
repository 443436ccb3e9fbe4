"""ImageBind (arXiv 2305.05665): one space of embeddings for sounds and texts, among others."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rewards.base import Metadata, Scores, Sound, Spec
from rewards.vision import load_weights, pick_device, without_prefix

RATE, SECONDS, CLIPS = 16000, 2, 3
"""Sounds that the model knows: samples a second, seconds of a clip, clips spread over a sound."""
BANDS, FRAMES = 128, 204
MEAN, DEVIATION = -4.268, 9.138  # of their spectrograms
STRIDE = 10  # of the patches of a spectrogram
HEADS = {"audio": 12, "text": 16}
_EPS = 1e-6


class Block(nn.Module):
    """A layer of a transformer; names as in the checkpoint."""

    def __init__(self, width: int, heads: int, with_bias: bool) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(width, heads, add_bias_kv=with_bias, batch_first=True)
        self.norm_1, self.norm_2 = nn.LayerNorm(width, _EPS), nn.LayerNorm(width, _EPS)
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(width, 4 * width), "fc2": nn.Linear(4 * width, width)})

    def forward(self, states: Tensor, mask: Tensor | None) -> Tensor:
        """[B, L, D] -> [B, L, D]"""
        normal = self.norm_1(states)
        states = states + self.attn(normal, normal, normal, attn_mask=mask, need_weights=False)[0]
        updated: Tensor = states + self.mlp["fc2"](F.gelu(self.mlp["fc1"](self.norm_2(states))))
        return updated


class Tower(nn.Module):
    """The part of ImageBind for one kind of sample; sizes are read from the tensors.

    Args:
        tensors: tensors of the published checkpoint.
        kind: audio or text.
        heads: heads of its attention.
    """

    def __init__(self, tensors: Mapping[str, Tensor], kind: Literal["audio", "text"], heads: int) -> None:
        super().__init__()
        trunk = without_prefix(tensors, f"modality_trunks.{kind}.blocks.")
        width = len(trunk["0.norm_1.weight"])
        depth = 1 + max(int(name.partition(".")[0]) for name in trunk)
        self.blocks = nn.ModuleList(Block(width, heads, with_bias=kind == "audio") for _ in range(depth))
        self.blocks.load_state_dict(trunk)
        first = without_prefix(tensors, f"modality_preprocessors.{kind}.")
        if kind == "audio":
            stem = first["rgbt_stem.proj.weight"]
            self.patches = nn.Conv2d(1, width, stem.shape[-1], STRIDE, bias=False)
            self.patches.load_state_dict({"weight": stem})
            self.patch_norm = nn.LayerNorm(width)
            self.patch_norm.load_state_dict(without_prefix(first, "rgbt_stem.norm_layer."))
            self.register_buffer("begin", first["cls_token"])
            self.register_buffer("places", first["pos_embedding_helper.pos_embed"])
        else:
            self.words = nn.Embedding.from_pretrained(first["token_embedding.weight"])
            self.register_buffer("places", first["pos_embed"])
        norm, out = ("proj.0.", "proj.1.weight") if kind == "text" else ("0.", "2.weight")
        last = without_prefix(tensors, f"modality_heads.{kind}.")
        self.norm = nn.LayerNorm(width, _EPS)
        self.norm.load_state_dict(without_prefix(last, norm))
        self.register_buffer("out", last[out])

    begin: Tensor
    places: Tensor
    out: Tensor

    def sounds(self, spectrograms: Tensor) -> Tensor:
        """[B, D] unit vectors of [B, 1, bands, frames]."""
        patches = self.patch_norm(self.patches(spectrograms).flatten(2).transpose(1, 2))
        states = torch.cat([self.begin.expand(len(patches), -1, -1), patches], dim=1) + self.places
        for block in self.blocks:
            states = block(states, None)
        return F.normalize(self.norm(states[:, 0]) @ self.out.T, dim=-1)

    def texts(self, tokens: Tensor) -> Tensor:
        """[B, D] unit vectors of [B, L] tokens, of which the end has the highest number."""
        length = tokens.shape[1]
        states = self.words(tokens) + self.places[:, :length]
        mask = torch.full((length, length), float("-inf"), device=tokens.device).triu(1)
        for block in self.blocks:
            states = block(states, mask)
        ends = states[torch.arange(len(tokens)), tokens.argmax(dim=-1)]
        return F.normalize(self.norm(ends) @ self.out.T, dim=-1)


def clips(sound: Sound) -> list[np.ndarray]:
    """Waveforms of clips spread evenly from the first to the last two seconds of a sound."""
    wave = sound.at(RATE)
    latest = max(len(wave) / RATE - SECONDS, 0) / (CLIPS - 1)
    return [wave[int(latest * i * RATE) : int((latest * i + SECONDS) * RATE)] for i in range(CLIPS)]


@cache
def load_imagebind(weights: str, device: str) -> tuple[Tower, Tower]:
    """Load the towers of sounds and texts; rewards that name the same weights share them."""
    tensors = load_weights(weights)
    audio, text = (Tower(tensors, kind, HEADS[kind]) for kind in ("audio", "text"))
    for tower in (audio, text):
        tower.to(pick_device(device)).eval().requires_grad_(False)
    return audio, text


class ImageBind:
    """ImageBind: cosine of a sound and its prompt, in [-1, 1], the mean over three clips (arXiv 2305.05665).

    Of `rewards.Sound` as samples, as `clap`.

    Args:
        weights: imagebind_huge.pth of github.com/facebookresearch/ImageBind; not for commerce.
        batch_size, device: of the model.
    """

    name = "imagebind"
    spec = Spec(frozenset({"sound", "prompt"}))

    def __init__(self, weights: str, batch_size: int = 16, device: str = "auto") -> None:
        from transformers import ASTFeatureExtractor

        if batch_size < 1:
            raise ValueError(f"batch_size {batch_size} must be at least 1")
        self.audio, self.text = load_imagebind(weights, device)
        self.batch_size, self.device = batch_size, pick_device(device)
        # Kaldi's filter bank
        self.listen: Any = ASTFeatureExtractor(num_mel_bins=BANDS, max_length=FRAMES, do_normalize=False)

    @torch.no_grad()
    def __call__(self, samples: Sequence[Sound], prompts: Sequence[str], metadata: Metadata) -> Scores:
        import open_clip

        values = []
        for i in range(0, len(samples), self.batch_size):
            rows = slice(i, i + self.batch_size)
            heard = torch.stack([self.spectrograms(sample) for sample in samples[rows]]).to(self.device)
            sounds = self.audio.sounds(heard.flatten(0, 1)).unflatten(0, (-1, CLIPS)).mean(dim=1)
            texts = self.text.texts(open_clip.tokenize(list(prompts[rows])).to(self.device))
            values.append((sounds * texts).sum(dim=-1).cpu())
        return Scores(torch.cat(values))

    def spectrograms(self, sound: Sound) -> Tensor:
        """[clips, 1, bands, frames] normalised log spectrograms."""
        waves = [wave - wave.mean() for wave in clips(sound)]
        spectrogram = self.listen(waves, sampling_rate=RATE, return_tensors="pt").input_values
        return (spectrogram.transpose(1, 2)[:, None] - MEAN) / DEVIATION
