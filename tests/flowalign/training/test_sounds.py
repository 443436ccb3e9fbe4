"""Sounds without pictures, from training to the gallery, on a tiny Stable Audio 3."""

import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flowalign.app.cli.main import main
from flowalign.app.gallery import build as gallery
from flowalign.config import Config
from flowalign.errors import ConfigError
from flowalign.planning.tiny_pipelines import build
from flowalign.runs.sounds import drawn, save_sound, small
from flowalign.training import Trainer
from rewards import RewardError, Sound, score
from rewards.base import as_reward
from rewards.gradients import score_with_gradient
from rewards.shapes.mass import ShapesMass
from rewards.shapes.reward import ShapesReward
from tests.rewards import published

RATE = 1600


def loud(samples: list[Sound], prompts: list[str]) -> list[float]:
    return [float(np.abs(sound.waveform).mean()) for sound in samples]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sounds")
    build("stable_audio3").save_pretrained(folder / "model")
    (folder / "prompts.txt").write_text("rain on a roof\na dog barks\n")
    published.clap(folder)
    return folder


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    how = {"steps": 3, "duration": 0.1, "batch_size": 4}
    return {
        "model": {"path": str(folder / "model"), "lora": None},
        "data": {"prompts": str(folder / "prompts.txt")},
        "rewards": [{"name": "clap", "model": str(folder), "device": "cpu"}],
        "algorithm": {"name": "flow_grpo"},
        "rollout": {**how, "eta": 0.7},
        "evaluation": {**how, "prompts": str(folder / "prompts.txt"), "every": 1},
        "training": {"iterations": 1, "prompts_per_iteration": 2, "group_size": 2, "previews": 1},
        "output": str(folder),
        "name": "run",
    } | more


def test_a_run_learns_from_clap_and_its_sounds_are_heard(folder: Path) -> None:
    Trainer(settings(folder), progress=False).train()
    run = folder / "run"
    saved = sorted((run / "samples" / "iteration-000001").glob("*.wav"))
    assert len(saved) == 2 and list((run / "previews").glob("*/film-00-003.wav"))
    gallery([run], folder / "page")
    assert len(list((folder / "page" / "pictures").rglob("*.wav"))) > len(saved)
    assert ".wav" in (folder / "page" / "index.html").read_text()
    out = folder / "made"
    with pytest.raises(SystemExit, match="^0$"):
        main(["sample", str(folder / "model"), "rain", "--duration", "0.05", "--steps", "2", "--output", str(out)])
    [file] = out.glob("*.wav")
    with wave.open(str(file)) as written:
        # whole latents of 16 samples
        assert (written.getnchannels(), written.getframerate(), written.getnframes()) == (2, RATE, 80)


def test_a_function_hears_them_and_rewards_of_pictures_refuse(folder: Path) -> None:
    sound = Sound(np.full((2, 8), 0.5, dtype=np.float32), RATE)
    assert score(as_reward(loud), [sound], ["rain"], [{}]).value.tolist() == [0.5]
    with pytest.raises(RewardError, match="scores pictures, but got a sound for the prompt 'rain'"):
        score(ShapesReward(), [sound], ["rain"], [{}])
    with pytest.raises(RewardError, match="scores pictures, but got sounds"):
        score_with_gradient(ShapesMass(), torch.zeros(1, 2, 8, requires_grad=True), ["a red circle"], [{}])
    config = settings(folder, rollout={"steps": 2, "duration": 0.1, "workers": {"count": 1}}, name="other")
    with pytest.raises(ConfigError, match="rollout.workers: they send pictures.* StableAudio3Pipeline makes sounds"):
        Trainer(Config.model_validate(config), progress=False)


def test_a_file_has_the_waves_and_a_drawing_their_loudness(tmp_path: Path) -> None:
    left = (-1.0) ** np.arange(4000, dtype=np.float32) * np.linspace(0, 1, 4000, dtype=np.float32)
    sound = Sound(np.stack([left, 0 * left]), 4000)
    with wave.open(str(save_sound(sound, tmp_path / "a.b"))) as file:
        read = np.frombuffer(file.readframes(4000), "<i2").reshape(-1, 2) / 32767
    np.testing.assert_allclose(read.T, sound.waveform, atol=1e-4)
    ink = (np.asarray(drawn(sound).convert("L")) < 128).sum(0)
    # as loud as it is, from silence on
    np.testing.assert_allclose(ink, 1 + np.linspace(0, 94, 192), atol=3)
    assert small(sound).waveform.shape == (8000,) and small(sound).rate == 8000
