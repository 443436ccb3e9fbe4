"""What teachers and demonstrations add, against literal versions."""

import math

import pytest
import torch

from flowalign.core import imitation


def test_distillation_as_reward_and_as_loss() -> None:
    log_prob, teacher, reference = -torch.rand(3, 4), -torch.rand(3, 4), -torch.rand(3, 4)
    plain = imitation.distillation_advantage(log_prob, teacher)
    torch.testing.assert_close(plain, teacher - log_prob)
    torch.testing.assert_close(imitation.distillation_advantage(log_prob, teacher, reference), plain)
    beyond = imitation.distillation_advantage(log_prob, teacher, reference, 1.25)
    torch.testing.assert_close(beyond, plain + 0.25 * (teacher - reference))
    guided = imitation.distillation_loss(log_prob, teacher, torch.tensor([1.0, 0.0, 0.5]))
    assert not guided[0].any()
    torch.testing.assert_close(guided[1:], (log_prob - teacher)[1:] ** 2 / 2)


def test_imitation_is_strongest_where_the_policy_is_undecided() -> None:
    log_prob = torch.tensor([0.99, 0.5, 0.01]).log().requires_grad_()
    imitation.imitation_loss(log_prob, "chord").sum().backward()
    torch.testing.assert_close(log_prob.grad, -torch.tensor([0.99 * 0.01, 0.25, 0.01 * 0.99]))
    assert torch.equal(imitation.imitation_loss(log_prob), -log_prob)


def test_schedules_of_demonstrations() -> None:
    shares = [imitation.imitation_share(step, 2, 4, 0.8, 0.2) for step in range(8)]
    assert shares == pytest.approx([0, 0.4, 0.8, 0.8 - 0.6 * (1 - math.cos(math.pi / 4)) / 2, 0.5, 0.2878679, 0.2, 0.2])
    assert [imitation.prefix_share(d) for d in (0, 0.5, 1)] == pytest.approx([0.95, 0.5, 0.05])
    assert imitation.annealed(0.25, 4.0, 0.0) == 3.0


def test_the_prefix_learns_where_it_is_uncertain() -> None:
    entropy = torch.tensor([[0.1, 0.9, 0.5, 0.2, 9.0], [1.0, 2.0, 3.0, 4.0, 5.0]])
    prefix = torch.tensor([[1, 1, 1, 1, 0], [0, 0, 0, 0, 0]]).bool()
    assert imitation.uncertain_prefix(entropy, prefix, 0.5).tolist() == [[False, True, True, False, False], [False] * 5]


def test_which_prompts_need_a_demonstration_and_when_it_stops_to_matter() -> None:
    reward, group = torch.tensor([0.0, 0, 1, 0, 0, 0.5]), torch.tensor([3, 3, 1, 1, 2, 2])
    assert imitation.needs_demonstration(reward, group).tolist() == [True, True, False, False, False, False]
    shown = torch.tensor([False, True, False, True, False, True])
    reward = torch.tensor([0.0, 1, 1, 1, 0.4, 0.5])
    assert imitation.demonstrated_reward(reward, shown, group).tolist() == [0, 1, 1, 1, pytest.approx(0.4), 0.5]
