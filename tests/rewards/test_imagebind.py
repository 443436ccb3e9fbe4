"""ImageBind against the authors' own code on the same weights, spectrograms and tokens (originals/README.md)."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from rewards import Sound, score
from rewards.imagebind import HEADS, ImageBind, Tower, clips

ORIGINALS = Path(__file__).parent / "originals"
SPEC = importlib.util.spec_from_file_location("originals_inputs", ORIGINALS / "inputs.py")
inputs = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(inputs)
RECORDED = json.loads((ORIGINALS / "scores.json").read_text())


def tensors():
    """Those of the checkpoint that are read, by its names."""
    shapes, bind = {}, inputs.BIND
    for kind, first in (("audio", "rgbt_stem.norm_layer"), ("text", "")):
        width, out = bind[f"{kind}_embed_dim"], bind["out_embed_dim"]
        norms = [f"modality_heads.{kind}.{'proj.0' if kind == 'text' else '0'}"]
        norms += [f"modality_preprocessors.{kind}.{first}"] if first else []
        for n in range(bind[f"{kind}_num_blocks"]):
            block = f"modality_trunks.{kind}.blocks.{n}"
            norms += [f"{block}.norm_1", f"{block}.norm_2"]
            shapes |= {f"{block}.attn.in_proj_weight": (3 * width, width), f"{block}.attn.in_proj_bias": (3 * width,)}
            sizes = {"attn.out_proj": (width, width), "mlp.fc1": (4 * width, width), "mlp.fc2": (width, 4 * width)}
            for name, size in sizes.items():
                shapes |= {f"{block}.{name}.weight": size, f"{block}.{name}.bias": size[:1]}
            if kind == "audio":
                shapes |= {f"{block}.attn.bias_{letter}": (1, 1, width) for letter in "kv"}
        shapes |= {f"{name}.{end}": (width,) for name in norms for end in ("weight", "bias")}
        shapes |= {f"modality_heads.{kind}.{'proj.1' if kind == 'text' else '2'}.weight": (out, width)}
    audio, text = "modality_preprocessors.audio", "modality_preprocessors.text"
    wide, narrow = bind["audio_embed_dim"], bind["text_embed_dim"]
    shapes |= {f"{audio}.cls_token": (1, 1, wide), f"{audio}.rgbt_stem.proj.weight": (wide, 1, 16, 16)}
    shapes |= {f"{audio}.pos_embedding_helper.pos_embed": (1, 12 * 19 + 1, wide)}
    shapes |= {f"{text}.token_embedding.weight": (49408, narrow), f"{text}.pos_embed": (1, 77, narrow)}
    return {name: torch.from_numpy(array) for name, array in inputs.weights(shapes).items()}


def test_gives_the_scores_of_the_original():
    audio, text = (Tower(tensors(), kind, HEADS[kind]).eval() for kind in ("audio", "text"))
    heard, read = (torch.from_numpy(own) for own in inputs.spectrograms())
    with torch.no_grad():
        sounds = audio.sounds(heard.flatten(0, 1)).unflatten(0, (2, 3)).mean(dim=1)
        values = (sounds * text.texts(read)).sum(dim=-1)
    torch.testing.assert_close(values, torch.tensor(RECORDED["imagebind"]), atol=1e-4, rtol=0)


def test_three_clips_of_two_seconds_from_the_first_to_the_last(tmp_path):
    ramp = Sound(np.arange(16000 * 5, dtype=np.float32) / 80000, 16000)
    first, middle, last = clips(ramp)
    assert first[0] == pytest.approx(0, abs=1e-3) and last[-1] == pytest.approx(1, abs=1e-3)
    assert middle[0] == pytest.approx(0.3, abs=1e-3) and {len(first), len(middle), len(last)} == {32000}
    torch.save(tensors(), tmp_path / "imagebind_huge.pth")
    reward = ImageBind(str(tmp_path / "imagebind_huge.pth"), batch_size=2, device="cpu")
    short = Sound(np.sin(np.arange(9000) / 9).astype(np.float32), 16000)
    both = score(reward, [ramp, short, ramp], ["a dog", "rain", "a dog"], [{}] * 3).value
    assert reward.spectrograms(short).shape == (3, 1, 128, 204)
    assert both[0] == pytest.approx(both[2].item(), abs=1e-6) and -1 <= both.min() <= both.max() <= 1


def test_spectrograms_are_kaldis(tmp_path):
    # what waveform2melspec of ImageBind's data.py gives, with torchaudio 2.11.0's kaldi.fbank, of the same two seconds:
    # bands 1, 40 and 127 at frames 0, 100, 197 and 203, which is past the end
    kaldi = [
        [-0.92283, -0.76285, -0.90979, 0.46706],
        [0.23957, 0.11842, 0.12728, 0.46706],
        [0.72961, 0.60857, 0.67373, 0.46706],
    ]
    noise = np.random.default_rng(0).standard_normal(32000) * 0.05
    sound = Sound((np.sin(np.arange(32000) * 0.3) * 0.5 + noise).astype(np.float32), 16000)
    torch.save(tensors(), tmp_path / "imagebind_huge.pth")
    made = ImageBind(str(tmp_path / "imagebind_huge.pth"), device="cpu").spectrograms(sound)
    torch.testing.assert_close(made[0, 0][[1, 40, 127]][:, [0, 100, 197, 203]], torch.tensor(kaldi), atol=1e-4, rtol=0)
