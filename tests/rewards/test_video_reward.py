"""VideoReward against the authors' own code on the same weights, videos and prompts (originals/README.md)."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from rewards import RewardError, score, spec_of
from rewards.qwen import without_lora
from rewards.video_reward import RESPECTS, VideoReward
from tests.rewards.published import inputs, video_reward

RECORDED = json.loads((Path(__file__).parent / "originals" / "scores.json").read_text())
PROMPTS, NOTHING = inputs.PROMPTS[:2], [{}, {}]


def reward(folder, outputs, **settings):
    base = str(video_reward(folder, outputs))
    files = {"weights": str(folder / "model.pth"), "config": str(folder / "model_config.json"), "base": base}
    return VideoReward(video_fps=inputs.VIDEO_FPS, device="cpu", dtype="float32", **files, **settings)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """With one output for all respects, as published."""
    return reward(tmp_path_factory.mktemp("one"), 1, batch_size=2)


def test_gives_the_scores_of_the_original(one, tmp_path):
    for outputs, ours in ((1, one), (3, reward(tmp_path, 3, weigh=(0.0, 1.0, -2.0)))):
        scores = score(ours, inputs.videos(), PROMPTS, NOTHING)
        recorded = {name: torch.tensor(RECORDED[f"video_reward/{outputs}/{name}"]) for name in RESPECTS}
        for name, values in recorded.items():
            torch.testing.assert_close(scores.parts[name], values, atol=1e-4, rtol=0)
        total = sum(weight * values for weight, values in zip(ours.weigh, recorded.values()))
        torch.testing.assert_close(scores.value, total, atol=4e-4, rtol=0)


def test_a_gradient_reaches_every_frame_that_is_seen(one):
    assert spec_of(one).differentiable
    film = np.stack([np.asarray(frame) for frame in inputs.videos()[0]])
    pixels = (torch.from_numpy(film).permute(3, 0, 1, 2)[None].float() / 255).requires_grad_()
    value = one.score_pixels(pixels, PROMPTS[:1], [{}]).value
    torch.testing.assert_close(
        value.detach(), score(one, inputs.videos()[:1], PROMPTS[:1], [{}]).value, atol=0.02, rtol=0
    )
    (gradient,) = torch.autograd.grad(value.sum(), pixels)
    moved = [frame for frame in range(5) if gradient[0, :, frame].abs().sum() > 0]
    assert moved == one.chosen(5) == [0, 1, 3, 4]


def test_two_frames_a_second_but_four_where_there_are(one):
    counts = {count: one.chosen(count) for count in (2, 3, 20, 81, 4000)}
    assert counts[2] == [0, 1] and counts[3] == [0, 2]
    assert len(counts[20]) == 4 and len(counts[81]) == 20 and len(counts[4000]) == 768
    assert counts[81][0] == 0 and counts[81][-1] == 80
    with pytest.raises(RewardError, match="a video of one frame"):
        one.chosen(1)


def test_a_merged_lora_is_pefts():
    torch.manual_seed(0)
    model = get_peft_model(
        nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4)), LoraConfig(r=3, lora_alpha=12, target_modules=["0"])
    )
    nn.init.normal_(model.base_model.model[0].lora_B["default"].weight)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    merged = model.merge_and_unload().state_dict()
    ours = without_lora(tensors, 4.0)
    assert ours.keys() == merged.keys()
    for name, tensor in merged.items():
        torch.testing.assert_close(ours[name], tensor)
