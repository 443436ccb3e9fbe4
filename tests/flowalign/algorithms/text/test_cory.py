"""Groups of pairs: answers that know another answer."""

from pathlib import Path

import pytest
import torch

from flowalign.algorithms.text.cory import shared
from flowalign.core.groups import group_advantage
from flowalign.errors import ConfigError
from tests.flowalign.small_run import small_run

SMALL = ("training.group_size=4", "training.micro_batch_size=16", "rollout.max_new_tokens=4")


def test_observers_know_a_pioneers_answer_and_both_earn_the_sum(tmp_path: Path) -> None:
    template = "template: '{prompt}{pioneer}={prompt}'"
    run = small_run("tiny_lm/grpo", tmp_path, *SMALL, f"algorithm={{name: cory, {template}}}")
    experience = run.collect(run.groups.draw(0))
    rollout, batch, policy = experience.rollout, experience.batch, run.policy
    texts = policy.decode(rollout)
    prompts = [
        batch.prompts[row] if row % 4 < 2 else f"{batch.prompts[row]}{texts[row - 2]}={batch.prompts[row]}"
        for row in range(16)
    ]
    again = policy.sample(prompts, batch.noise_seeds, **run.config.rollout.arguments())
    assert policy.decode(again) == texts
    value = experience.scores.value.tolist()
    both = torch.tensor([value[row] + value[row + 2 if row % 4 < 2 else row - 2] for row in range(16)])
    assert experience.reward.tolist() == both.tolist()
    halves = torch.tensor([row // 2 for row in range(16)])
    expected = group_advantage(both, halves, unbiased=True)
    torch.testing.assert_close(experience.advantage[:, 0], expected, atol=1e-5, rtol=1e-5)


def test_pairs_are_told_apart_by_their_groups() -> None:
    second = torch.tensor([False, True, False, True])
    assert shared(torch.tensor([1.0, 2, 3, 4]), second, torch.tensor([1, 1, 0, 0])).tolist() == [3, 3, 7, 7]


def test_groups_that_cannot_be_split_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="multiples of 4 work"):
        small_run("tiny_lm/grpo", tmp_path, "training.group_size=6", "algorithm={name: cory}")
