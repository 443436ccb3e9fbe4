"""CLAP on a small model of random weights, against transformers' own loss of the two embeddings."""

import numpy as np
import pytest
from PIL import Image

from rewards import RewardError, Sound, score
from rewards.sound import CLAP
from tests.rewards import published


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return published.clap(tmp_path_factory.mktemp("clap"))


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
    with pytest.raises(RewardError, match="clap.* scores sound, but got a Image"):
        score(reward, [Image.new("RGB", (2, 2))], ["x"], [{}])
