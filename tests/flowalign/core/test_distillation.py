"""Divergences of whole distributions against their definitions."""

import torch

from flowalign.core.distillation import jensen_shannon, total_variation, total_variation_advantage


def distributions() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return (2 * torch.randn(5, 7)).log_softmax(-1), (2 * torch.randn(5, 7)).log_softmax(-1)


def test_tokens_without_a_chance_add_nothing() -> None:
    student, teacher = distributions()
    student[0, 2] = teacher[0, 2] = -torch.inf
    student, teacher = student.log_softmax(-1).requires_grad_(), teacher.log_softmax(-1)
    made = jensen_shannon(student, teacher, 0.3)
    p, q = student.detach().exp(), teacher.exp()
    m = 0.3 * q + 0.7 * p
    expected = 0.3 * (q * (q / m).log()).nansum(-1) + 0.7 * (p * (p / m).log()).nansum(-1)
    torch.testing.assert_close(made, expected)
    made.sum().backward()
    assert student.grad is not None and not student.grad.isnan().any()


def test_the_distances_gradient_is_a_policy_gradient_whose_scale_and_mean_change_nothing_else() -> None:
    logits = torch.randn(5, 7, requires_grad=True)
    _, teacher = distributions()
    student = logits.log_softmax(-1)
    (plain,) = torch.autograd.grad(total_variation(student, teacher).sum(), logits, retain_graph=True)
    (other,) = torch.autograd.grad(total_variation_advantage(student, teacher).sum(), logits)
    # of chances, the sum of whose gradients is 0, a baseline takes nothing away
    chance, better = student.detach().exp(), (teacher > student).float()
    mean = (chance * better).sum(-1).mean()
    std = (chance * (better - mean) ** 2).sum(-1).mean().sqrt()
    torch.testing.assert_close(other * std, plain)
