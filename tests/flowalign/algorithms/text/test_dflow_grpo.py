"""dFlowGRPO: its loss beside the paper's, one step and one position at a time, and what it refuses."""

import math
from pathlib import Path

import pytest
import torch

from flowalign.errors import ConfigError
from flowalign.training import Trainer
from tests.flowalign.small_run import small_run

SMALL = ("training.micro_batch_size=16", "training.group_size=4", "rollout.max_new_tokens=5")


def last_is_even(texts: list[str], prompts: list[str]) -> list[float]:
    return [float(text[-1:] in {"0", "2", "4", "6", "8"}) for text in texts]


def small(folder: Path, *overrides: str) -> Trainer:
    return small_run("tiny_lm/dflow_grpo", folder, *SMALL, *overrides, reward=last_is_even)


@pytest.mark.parametrize("last_step", [True, False])
def test_the_loss_is_the_papers(tmp_path: Path, last_step: bool) -> None:
    """Transition probabilities with their rates, of every position and step."""
    clip = "algorithm.loss={clip_range: 0.01, clip_range_high: 0.02}"
    run = small(tmp_path, f"algorithm.last_step={last_step}", clip)
    experience = run.collect(run.groups.draw(0))
    rollout, policy = experience.rollout, run.policy
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in run.learner.parameters.values():
            parameter.add_(0.01 * torch.randn_like(parameter))
        new, _ = policy.log_probs(rollout, torch.arange(16))
    experience.advantage = torch.randn(16, 1).expand(16, 5).contiguous()
    steps, total, clipped = 5, 0.0, 0
    learning = range(steps if last_step else steps - 1)
    for row in range(16):
        advantage = experience.advantage[row, 0].item()
        for k in learning:
            log_ratio = 0.0
            stays = 0.0 if k == steps - 1 else math.exp(-1 / (steps - k))
            for position in range(5):
                opened = int(rollout.step[row, position])
                chance, old = new[row, position].exp().item(), rollout.log_prob[row, position].exp().item()
                if opened == k:
                    log_ratio += math.log((1 - stays) * chance / ((1 - stays) * old))
                elif opened > k:
                    log_ratio += math.log(stays / stays)
            ratio = math.exp(log_ratio / 5)
            near = min(max(ratio, 0.99), 1.02)
            clipped += near != ratio
            total += -min(ratio * advantage, near * advantage) / len(learning)
    losses, values = run.algorithm.losses(policy, experience, experience.items)
    # a step that opens nothing has the ratio 1 and no gradient: it is left out of the sum
    for row in range(16):
        empty = sum(k not in rollout.step[row].tolist() for k in learning)
        total += experience.advantage[row, 0].item() * empty / len(learning)
    assert losses.sum().item() == pytest.approx(total, abs=1e-4)
    assert 0 < clipped < 16 * len(learning) and values["policy/clip_fraction"].max() > 0


def test_a_run_has_ratios_of_one_and_moves(tmp_path: Path) -> None:
    run = small(tmp_path)
    run.train()
    [metrics] = run.metrics.read()
    assert metrics["policy/ratio"] == pytest.approx(1, abs=1e-5)
    assert metrics["text/tokens"] == 5 and metrics["policy/gradient_norm"] > 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.diffusion=null", "model.path=tiny_lm"], "model.diffusion={} works"),
        (["algorithm.aggregation=token"], "mean over steps"),
        (["model.diffusion.steps=1", "algorithm.last_step=false"], "last_step=true works"),
        (["model.padding=packed"], "model.padding: with model.diffusion"),
        (["rollout.continuous_batching=true"], "rollout.continuous_batching: with model.diffusion"),
        (["algorithm={name: grpo, advantage: {name: gigpo}}"], "masks open in any order; dflow_grpo works"),
        (["algorithm={name: kdrl, teacher: tiny_lm}"], "masks open in any order; dflow_grpo works"),
    ],
)
def test_what_does_not_go_with_masks_is_refused(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small(tmp_path, *overrides)
