"""Divergences between whole distributions of a student and a teacher, one value a token."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

LOWEST = -100.0
"""Log-probability of what has none: its exponential is 0 in float32."""


def jensen_shannon(student: Tensor, teacher: Tensor, beta: float = 0.5) -> Tensor:
    """GKD's generalised Jensen-Shannon divergence (arXiv 2306.13649, eq. 1): log-probabilities [M, V] twice -> [M].

    beta KL(teacher || m) + (1 - beta) KL(student || m) with the mixture m = beta teacher + (1 - beta) student. As in
    TRL beta 0 is the forward KL, from the teacher, and 1 the reverse one.
    """
    # a token that a rule leaves out has no chance, and differences of infinities are no numbers
    student, teacher = student.clamp(min=LOWEST), teacher.clamp(min=LOWEST)
    if beta == 0:
        return kl(teacher, student)
    if beta == 1:
        return kl(student, teacher)
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)


def kl(one: Tensor, other: Tensor) -> Tensor:
    """KL(one || other) of finite log-probabilities: [M, V] twice -> [M]."""
    return (one.exp() * (one - other)).sum(-1)


def total_variation(student: Tensor, teacher: Tensor) -> Tensor:
    """Total variation distance, the share of a draft model's tokens that its target rejects: [M, V] twice -> [M]."""
    return (student.exp() - teacher.exp()).abs().sum(-1) / 2


def total_variation_advantage(student: Tensor, teacher: Tensor) -> Tensor:
    """TVD++ (arXiv 2403.00858): the distance's gradient with a policy gradient's baseline: [M, V] twice -> [M].

    That gradient is of -E_student[r log student], r = 1 where the teacher finds a token more probable. Here r is
    brought to mean 0 and standard deviation 1, by the student's chances over all tokens given. After the abstract: over
    what the paper normalises was not at hand.
    """
    chance = student.detach().exp()
    reward = (teacher > student.detach()).float()
    mean = (chance * reward).sum(-1).mean()
    std = (chance * (reward - mean) ** 2).sum(-1).mean().sqrt()
    return -(student.exp() * (reward - mean) / std.clamp(min=1e-4)).sum(-1)


DIVERGENCES: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "jsd": jensen_shannon,
    "tvd": lambda student, teacher, beta: total_variation(student, teacher),
    "tvd++": lambda student, teacher, beta: total_variation_advantage(student, teacher),
}
