"""What a teacher or a demonstration adds: pure functions on [B, T] arrays of log-probabilities."""

import math

import torch
from torch import Tensor

from flowalign.core.divergences import KLEstimate, sampled_kl


def distillation_advantage(
    log_prob: Tensor, teacher: Tensor, reference: Tensor | None = None, extrapolation: float = 1.0
) -> Tensor:
    """On-policy distillation as a reward of every action (G-OPD, arXiv 2602.12125, as in the authors' code).

    extrapolation * (log teacher - log ref) - (log pi - log ref): 1 is plain on-policy distillation, the negative k1 of
    KL(policy || teacher); above 1 goes beyond the teacher, away from the reference.

    Args:
        log_prob: [B, T] of the actions when they were drawn.
        teacher, reference: [B, T] of the same actions; a reference is needed unless extrapolation is 1.
    """
    if reference is None:
        return teacher - log_prob
    return extrapolation * (teacher - reference) - (log_prob - reference)


def distillation_loss(
    log_prob: Tensor, teacher: Tensor, reward: Tensor | None = None, estimate: KLEstimate = "k2"
) -> Tensor:
    """KDRL's divergence from the teacher, added to the policy loss with a coefficient (arXiv 2506.02208).

    k2 has the reverse KL's gradient on the policy's own samples, and was best there.

    Args:
        log_prob, teacher: [B, T].
        reward: [B]; given, right rows (above 1/2) are left to the reward alone (reward-guided distillation).
    """
    divergence = sampled_kl(log_prob, teacher, estimate)
    return divergence if reward is None else divergence * (reward <= 0.5)[:, None]


def annealed(done: float, start: float, end: float) -> float:
    """Value between start and end, in a straight line over training, done in [0, 1]."""
    return start + (end - start) * min(max(done, 0.0), 1.0)


def imitation_loss(log_prob: Tensor, weighting: str = "none") -> Tensor:
    """Negative log-likelihood of demonstrated actions, [B, T].

    'chord' weighs it by p (1 - p), so that neither what the policy knows nor what it would never say disturbs it
    (CHORD-phi, arXiv 2508.11408, as in the authors' code).
    """
    if weighting == "none":
        return -log_prob
    probability = log_prob.exp().detach()
    return -probability * (1 - probability) * log_prob


def imitation_share(step: int, warmup: int = 0, decay: int = 0, peak: float = 0.1, valley: float = 0.1) -> float:
    """CHORD's mu: warmed up to its peak, then cosine to its valley; the loss is (1 - mu) RL + mu SFT (2508.11408)."""
    if step < warmup:
        return peak * step / warmup
    if step >= warmup + decay:
        return valley
    return valley + (peak - valley) * 0.5 * (1 + math.cos(math.pi * (step - warmup) / decay))


def prefix_share(done: float, start: float = 0.95, end: float = 0.05) -> float:
    """Prefix-RFT (arXiv 2507.01679): what share of a demonstration is given, cosine from start to end over training."""
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * min(max(done, 0.0), 1.0)))


def uncertain_prefix(entropy: Tensor, prefix: Tensor, share: float = 0.2) -> Tensor:
    """Prefix-RFT (arXiv 2507.01679): of demonstrated actions each row's `share` of most entropy learns: [B, T] bool.

    Args:
        entropy: [B, T].
        prefix: [B, T] bool, the demonstrated actions.
    """
    keep = (share * prefix.sum(1)).ceil().long()
    order = entropy.masked_fill(~prefix, -torch.inf).argsort(dim=1, descending=True, stable=True)
    return prefix & (order.argsort(1) < keep[:, None])


def needs_demonstration(reward: Tensor, group: Tensor, threshold: float = 0.0) -> Tensor:
    """ReLIFT (arXiv 2506.07527): rows of groups whose best reward is not above the threshold: [B] bool.

    Their prompts are too hard to explore. The authors collect their demonstrations until there are enough for a step of
    fine-tuning in between.
    """
    _, index = group.unique(return_inverse=True)
    best = torch.full((int(index.max()) + 1,), -torch.inf, dtype=reward.dtype, device=reward.device)
    best = best.scatter_reduce(0, index, reward, "amax")
    return best[index] <= threshold


def demonstrated_reward(reward: Tensor, demonstration: Tensor, group: Tensor) -> Tensor:
    """Rewards of groups with a demonstration among their members (ViSurf, arXiv 2510.10606).

    The demonstration raises the group's mean until the policy is as good: where another member reaches its reward, it
    gets the mean of the others instead, hence no advantage. The paper names this smoothing; its exact rule was not at
    hand (nor its two other reward controls' rules, which are about forms and thoughts of demonstrations).

    Args:
        reward: [B].
        demonstration: [B] bool, one row a group at most.
        group: [B] integers.
    """
    smoothed = reward.clone()
    for row in demonstration.nonzero()[:, 0].tolist():
        others = (group == group[row]) & ~demonstration
        if others.any() and reward[others].max() >= reward[row]:
            smoothed[row] = reward[others].mean()
    return smoothed
