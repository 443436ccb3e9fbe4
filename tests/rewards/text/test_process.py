"""Rewards of parts against closed forms and their promises."""

import math

import pytest
import torch
from torch.distributions import Categorical, kl_divergence

from rewards.text import process

MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]]).bool()


def test_implicit_rewards_add_up_to_the_whole_texts_log_ratio() -> None:
    log_prob, reference = -torch.rand(3, 4), -torch.rand(3, 4)
    made = process.implicit_reward(log_prob, reference, 0.1)
    torch.testing.assert_close(made.sum(1), 0.1 * (log_prob.sum(1) - reference.sum(1)))


def test_clipped_rewards_never_pay_for_more_steps() -> None:
    reward = torch.rand(5, 7)
    made = process.clip_bound(reward, 0.4)
    assert (made <= 0).all() and torch.equal(made == 0, reward >= 0.4)
    assert (made.cumsum(1).diff(dim=1) <= 0).all()


def test_delta_rewards_add_up_to_the_first_step() -> None:
    reward = torch.rand(3, 4)
    made = process.delta_bound(reward, MASK)
    torch.testing.assert_close(made.sum(1), reward[:, 0])
    assert made[1, 1] == reward[1, 1] and not made[~MASK].any()


def test_thoughts_are_trusted_as_far_as_they_tell_right_from_wrong() -> None:
    thought = torch.tensor([0.2, 0.4, 0.9, 0.9, 0.1, 0.5, 0.5])
    right = torch.tensor([True, True, False, True, False, True, True])
    group = torch.tensor([0, 0, 0, 1, 1, 2, 2])
    made = process.trust_weight(thought, right, group, done=0.0)
    assert made.tolist() == pytest.approx([math.exp(0.3 - 0.9)] * 3 + [1, 1, 0, 0])
    late = process.trust_weight(thought, right, group, done=0.5, decay=0.25)
    torch.testing.assert_close(late, made * math.exp(-2))


def test_the_gate_keeps_step_rewards_of_good_rows() -> None:
    steps = torch.rand(3, 4)
    made = process.gated(steps, torch.tensor([0.5, 0.49, 1.0]), 0.5)
    assert torch.equal(made, steps * torch.tensor([[1.0], [0.0], [1.0]]))


def test_information_gains_telescope() -> None:
    likelihood = torch.rand(3, 5)
    torch.testing.assert_close(process.information_gain(likelihood).sum(1), likelihood[:, -1] - likelihood[:, 0])


def test_self_certainty_is_the_divergence_from_uniform() -> None:
    log_probs = torch.randn(3, 4, 9).log_softmax(-1)
    each = kl_divergence(Categorical(torch.full((9,), 1 / 9)), Categorical(logits=log_probs))
    expected = torch.stack([row[mask].mean() for row, mask in zip(each, MASK, strict=True)])
    torch.testing.assert_close(process.self_certainty(log_probs, MASK), expected)
    uniform = torch.full((3, 4, 9), -math.log(9))
    torch.testing.assert_close(process.self_certainty(uniform, MASK), torch.zeros(3), atol=1e-6, rtol=0)


def test_likelihood_rewards_are_mean_probabilities() -> None:
    answer, without = torch.rand(3, 4).log(), torch.rand(3, 4).log()
    made = process.likelihood_reward(answer, MASK)
    helped = process.likelihood_reward(answer, MASK, without)
    for row in range(3):
        mean = answer[row][MASK[row]].exp().mean().item()
        assert made[row].item() == pytest.approx(mean, rel=1e-5)
        expected = min(max(mean - without[row][MASK[row]].exp().mean().item(), 0), 1)
        assert helped[row].item() == pytest.approx(expected, abs=1e-6)


def test_self_aligned_rewards_compare_perplexities() -> None:
    conditioned, alone = -torch.rand(3, 4), -2 * torch.rand(3, 4) - 1
    made = process.self_aligned(conditioned, alone, MASK)
    for row in range(3):
        with_question = math.exp(-conditioned[row][MASK[row]].mean().item())
        without = math.exp(-alone[row][MASK[row]].mean().item())
        assert made[row].item() == pytest.approx((without - with_question) / without, abs=1e-5)
    assert process.self_aligned(alone * 9, conditioned, MASK).tolist() == [-1] * 3


def test_neighbouring_steps_of_one_verdict_are_one_thought() -> None:
    """By hand: from a thought that leads to the answer the rewards add up to the outcome, from another to 0.7 - 0.2."""
    made = process.thoughts([True, True, False, False, True, False, True], 0.7, 0.2)
    assert made == [(1, 0.2), (3, -0.2), (4, 0.2), (5, -0.2), (6, 0.7)]
    to_the_end = [sum(reward for _, reward in made[i:]) for i in range(5)]
    assert to_the_end == pytest.approx([0.7, 0.5, 0.7, 0.5, 0.7])
    assert process.thoughts([True], -1.0, -1.0) == [(0, -1.0)]
