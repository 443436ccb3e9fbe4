"""scripts/adapt_to_pictures.py: REINFORCE for one picture, and weights that come back."""

import importlib.util
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from flowalign.config import load, recipe
from flowalign.data import Prompts
from flowalign.policies.base import best_device
from flowalign.training.building import build_policy
from rewards import score
from rewards.shapes import draw, train_requests
from rewards.shapes.clip import TINY_CLIP
from rewards.text.embedding import PictureMatch

SCRIPT = Path(__file__).parents[2] / "scripts" / "adapt_to_pictures.py"
SPEC = importlib.util.spec_from_file_location("adapt_to_pictures", SCRIPT)
assert SPEC is not None and SPEC.loader is not None
script = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(script)

ASK = "Describe this picture."


def test_a_picture_is_adapted_to_and_forgotten(tmp_path: Path) -> None:
    settings = [
        f"rewards=[{{name: picture_match, model: {TINY_CLIP}, device: cpu}}]",
        "data.prompts=sums_train",
        "rollout.max_new_tokens=8",
        "evaluation={prompts: null, max_new_tokens: 8, temperature: 0}",
    ]
    config = load(recipe("tiny_vlm/judge"), settings)
    policy, reward = build_policy(config, best_device()), PictureMatch(str(TINY_CLIP), device="cpu")
    policy.train_all()
    record = {"image": Image.fromarray(draw(train_requests()[3], np.random.default_rng(0)))}
    sampling = config.rollout.arguments()
    start = {name: weights.clone() for name, weights in policy.network.state_dict().items()}

    # one step against the gradient by hand
    rollout = policy.sample([ASK] * 4, [5, 6, 7, 8], metadata=[record] * 4, **sampling)
    value = score(reward, policy.decode(rollout), [ASK] * 4, [record] * 4).value
    total = torch.zeros(())
    for i in range(4):
        log_prob = policy.log_probs(rollout, torch.tensor([i]))[0][0][rollout.mask[i]]
        total = total - (value[i] - sum(value.tolist()) / 4) * log_prob.sum() / 4
    expected = torch.autograd.grad(total, list(policy.trainable().values()), allow_unused=True)
    with script.restored(policy):
        means = script.adapt(policy, reward, ASK, record, sampling, steps=1, samples=4, seed=5)
        assert means == [value.mean().item()]
        for parameter, gradient in zip(policy.trainable().values(), expected, strict=True):
            if gradient is not None:
                torch.testing.assert_close(parameter.grad, gradient, atol=1e-5, rtol=1e-3)
        assert any(not torch.equal(weights, start[name]) for name, weights in policy.network.state_dict().items())
    assert all(torch.equal(weights, start[name]) for name, weights in policy.network.state_dict().items())

    (line,) = script.adapted(config, Prompts([ASK], [record]), steps=1, samples=2)
    assert {"before", "after", "reward_before", "reward_after"} <= line.keys()
