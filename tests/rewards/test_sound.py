"""CLAP on a small model of random weights, against transformers' own loss of the two embeddings."""

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import ClapConfig, ClapFeatureExtractor, ClapModel, ClapProcessor, RobertaTokenizerFast

from rewards import RewardError, score
from rewards.sound import CLAP, Sound

LETTERS = [chr(c) for c in range(33, 127)] + ["\u0120"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clap")
    torch.manual_seed(0)
    text = {"vocab_size": 120, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text |= {"intermediate_size": 32, "max_position_embeddings": 64, "projection_hidden_act": "relu"}
    audio = {"spec_size": 64, "num_mel_bins": 32, "patch_embeds_hidden_size": 16, "hidden_size": 32, "depths": [1, 1]}
    audio |= {"num_attention_heads": [2, 2], "window_size": 4, "num_classes": 4, "enable_fusion": False}
    ClapModel(ClapConfig(text_config=text, audio_config=audio, projection_dim=16)).save_pretrained(folder)
    extractor = ClapFeatureExtractor(feature_size=32, sampling_rate=48000, max_length_s=1, truncation="rand_trunc")
    words = {word: number for number, word in enumerate(["<s>", "<pad>", "</s>", "<unk>", *LETTERS])}
    ClapProcessor(extractor, RobertaTokenizerFast(vocab=words, merges=[])).save_pretrained(folder)
    return str(folder)


def tone(hertz, rate, seconds=0.5):
    return np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate).astype(np.float32)


def test_a_sound_is_scored_as_transformers_scores_it_at_any_rate(folder):
    reward = CLAP(folder, batch_size=2, device="cpu")
    sounds = [Sound(tone(440, 48000), 48000), Sound(tone(3000, 48000), 48000), Sound(tone(440, 24000), 24000)]
    prompts = ["a hum", "a whistle", "a hum"]
    values = score(reward, sounds, prompts, [{}] * 3).value
    for sound, prompt, value in zip(sounds[:2], prompts, values.tolist()):
        heard = reward.processor.feature_extractor(sound.waveform, sampling_rate=48000, return_tensors="pt")
        made = reward.network(**heard, **reward.processor.tokenizer([prompt], return_tensors="pt"))
        logit = made.logits_per_audio.item() / reward.network.logit_scale_a.exp().item()
        assert value == pytest.approx(logit, abs=1e-5)
    assert values[2].item() == pytest.approx(values[0].item(), abs=0.05)
    stereo = Sound(np.stack([tone(440, 48000)] * 2), 48000)
    assert score(reward, [stereo], prompts[:1], [{}]).value.item() == pytest.approx(values[0].item(), abs=1e-5)
    with pytest.raises(RewardError, match="clap: it scores sounds .*, not a Image"):
        score(reward, [Image.new("RGB", (2, 2))], ["x"], [{}])
