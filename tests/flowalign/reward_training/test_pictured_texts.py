"""Reward models of texts about pictures: scores by hand, and training with the pictures."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoProcessor

from flowalign.data import ASSETS, Preferences
from flowalign.reward_training.scorer import train_reward
from flowalign.reward_training.texts import TextScorer
from rewards import score
from rewards.shapes import draw, sample_requests, train_requests
from rewards.text.learned import LearnedScore
from rewards.text.reward_model import HEAD, RewardModel
from rewards.text.scored import TextScore
from rewards.text.verifiers import ExactMatch

TINY = str(ASSETS / "tiny_vlm")
ASK = "Describe this picture."


def pairs(folder: Path, count: int, seed: int) -> Preferences:
    """A picture's description is preferred to another picture's."""
    rng = np.random.default_rng(seed)
    requests = sample_requests(train_requests(), 2 * count, rng)
    records = []
    for i, (right, wrong) in enumerate(zip(requests[:count], requests[count:], strict=True)):
        file = folder / f"{seed}-{i}.png"
        Image.fromarray(draw(right, rng)).save(file)
        records.append({"image": str(file), "chosen": right.prompt, "rejected": wrong.prompt})
    return Preferences([f"{ASK} {i}" for i in range(count)], records)


def test_a_score_is_the_head_on_the_mean_of_all_states(tmp_path: Path) -> None:
    torch.manual_seed(0)
    RewardModel.load(TINY, device="cpu", outputs=1).save(tmp_path)
    reward = TextScore(str(tmp_path), device="cpu")
    pictures = [
        Image.fromarray(draw(request, np.random.default_rng(i))) for i, request in enumerate(train_requests()[:3])
    ]
    records = [{"image": pictures[0]}, {"image": pictures[1:]}, {}, {"image": pictures[1]}]
    texts = ["a red circle", "two squares", "nothing", "a red circle"]
    made = score(reward, texts, [ASK] * 4, records).value.tolist()
    network, processor = AutoModelForImageTextToText.from_pretrained(tmp_path), AutoProcessor.from_pretrained(tmp_path)
    head = load_file(tmp_path / HEAD)["weight"][0]
    for value, text, images in zip(made, texts, ([pictures[0]], pictures[1:], [], [pictures[1]]), strict=True):
        begun = "<|user|>" + "<image>" * len(images) + f"{ASK}<|end|><|assistant|>{text}<|end|>"
        inputs = processor(text=[begun], images=[images] if images else None, return_tensors="pt")
        with torch.no_grad():
            states = network.float()(**inputs, output_hidden_states=True).hidden_states[-1][0]
        assert value == pytest.approx((states @ head).mean().item(), abs=1e-5)
    assert made[0] != pytest.approx(made[3], abs=1e-4)
    with pytest.raises(ValueError, match="has no head that scores texts"):
        TextScore("tiny_vlm")
    with pytest.raises(ValueError, match="text_score works"):
        LearnedScore(ExactMatch(), str(tmp_path), device="cpu")


def test_the_loss_is_bradley_terrys_and_the_eyes_stay_as_they_are(tmp_path: Path) -> None:
    train, heldout = pairs(tmp_path, 8, 1), pairs(tmp_path, 3, 2)
    scorer = TextScorer(TINY, device="cpu")
    with torch.no_grad():
        numbers = [
            scorer.model.outputs([record[side]], [prompt], None, [[Image.open(record["image"]).convert("RGB")]]).item()
            for prompt, record in zip(heldout.texts[:3], heldout.metadata, strict=False)
            for side in ("chosen", "rejected")
        ]
        losses = scorer.losses(heldout, range(3)).tolist()
    expected = [math.log(1 + math.exp(b - a)) for a, b in zip(numbers[::2], numbers[1::2], strict=True)]
    assert losses == pytest.approx(expected, abs=1e-5)
    out = tmp_path / "reward"
    begun = scorer.losses(train, range(8)).mean().item()
    train_reward(scorer, train, heldout, out, epochs=3, learning_rate=3e-3, batch_size=8, progress=False)
    assert scorer.losses(train, range(8)).mean().item() < 0.95 * begun
    before = AutoModelForImageTextToText.from_pretrained(TINY, dtype=torch.float32).state_dict()
    after = AutoModelForImageTextToText.from_pretrained(out).state_dict()
    moved = {name for name, weights in after.items() if not torch.equal(weights, before[name])}
    assert moved - {"lm_head.weight"} and not any("vision" in name or "projector" in name for name in moved)
