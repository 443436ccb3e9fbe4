"""Rewards of a text's parts (tokens, steps, turns), and how far they are to be trusted: pure functions on arrays."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def implicit_reward(log_prob: Tensor, reference: Tensor, beta: float = 0.05) -> Tensor:
    """Implicit process reward beta * (log pi - log pi_ref) of every token (arXiv 2412.01981; PRIME, 2502.01456).

    pi is a model trained on outcomes alone; a prefix's sum is its value, so that differences are process rewards.

    Args:
        log_prob, reference: [B, T] of the same tokens.
    """
    return beta * (log_prob - reference)


def clip_bound(reward: Tensor, threshold: float) -> Tensor:
    """min(r - threshold, 0) of every step: no sum of them gains by more steps (Clip, arXiv 2410.15115)."""
    return (reward - threshold).clamp(max=0)


def delta_bound(reward: Tensor, mask: Tensor) -> Tensor:
    """r_k - r_{k+1}, the last step its own r: a row's sum is its first reward whatever the steps (Delta, 2410.15115).

    Args:
        reward: [B, K] of a row's steps.
        mask: [B, K] bool, the steps a row has.
    """
    following = torch.zeros_like(reward)
    following[:, :-1] = reward[:, 1:].where(mask[:, 1:], 0)
    return (reward - following).where(mask, 0)


def trust_weight(thought: Tensor, right: Tensor, group: Tensor, done: float, decay: float = 1.0) -> Tensor:
    """Trust-GRPO's weight of a reward of the thought, one a row (arXiv 2505.17018, and the authors' code).

    exp(mean over a group's right rows - mean over its wrong ones) where right rows are thought worse of than wrong
    ones, else 1; times exp(-done / decay), so that the verdict alone is left at last. A group that is all right or all
    wrong gets 0, as in the code: its thoughts would be the only thing to tell its members apart.

    Args:
        thought: [B] rewards of the thought.
        right: [B] bool.
        group: [B] integers.
        done: share of training that is done; the paper counts steps over a constant.
    """
    weight = torch.zeros_like(thought)
    for number in group.unique().tolist():
        rows = group == number
        if (rows & right).any() and (rows & ~right).any():
            gap = thought[rows & right].mean() - thought[rows & ~right].mean()
            weight[rows] = gap.clamp(max=0).exp()
    return weight * math.exp(-done / decay)


def gated(step_reward: Tensor, outcome: Tensor, gate: float) -> Tensor:
    """Step rewards count only in rows whose outcome reaches the gate (G-RA, arXiv 2508.10548): [B, K].

    The paper has more than two levels of rewards, each gated by the next; its abstract is what was at hand.
    """
    return step_reward * (outcome >= gate)[:, None]


def information_gain(likelihood: Tensor) -> Tensor:
    """Gain of the policy's own probability of the right answer by each turn (IGPO, arXiv 2510.14967, eq. 3).

    Args:
        likelihood: [B, K + 1] the answer's probability before the first turn and after each, the geometric mean over
            its tokens, as in the authors' code.

    Returns:
        [B, K]; a row's sum is its last probability less its first.
    """
    return likelihood.diff(dim=1)


def self_certainty(log_probs: Tensor, mask: Tensor) -> Tensor:
    """Mean over tokens of KL(uniform || pi), a reward without answers (arXiv 2502.18581; INTUITOR, 2505.19590).

    Args:
        log_probs: [B, T, V] of the distributions that the tokens were drawn from.
        mask: [B, T] bool.

    Returns:
        [B], 0 for a row without tokens.
    """
    divergence = -log_probs.mean(-1) - math.log(log_probs.shape[-1])
    return divergence.where(mask, 0).sum(1) / mask.sum(1).clamp(min=1)


def likelihood_reward(answer: Tensor, mask: Tensor, without: Tensor | None = None) -> Tensor:
    """RLPR's reward: the mean probability of the right answer's tokens after the text (arXiv 2506.18254; its code too).

    Args:
        answer: [B, A] log-probabilities of the answer's tokens after the text.
        mask: [B, A] bool.
        without: [B, A] the same without the text; then the reward is by how much the text helps, in [0, 1].
    """

    def mean(values: Tensor) -> Tensor:
        return values.exp().where(mask, 0).sum(1) / mask.sum(1).clamp(min=1)

    return mean(answer) if without is None else (mean(answer) - mean(without)).clamp(0, 1)


def self_aligned(conditioned: Tensor, alone: Tensor, mask: Tensor) -> Tensor:
    """Self-aligned reward (ppl(a) - ppl(a | q)) / ppl(a), in [-1, 1] (SAR, arXiv 2509.05489, and the authors' code).

    Args:
        conditioned, alone: [B, T] log-probabilities of a text's tokens after its question, and without it.
        mask: [B, T] bool.

    Returns:
        [B], 0 for a row without tokens.
    """

    def perplexity(values: Tensor) -> Tensor:
        return (-values.where(mask, 0).sum(1) / mask.sum(1).clamp(min=1)).exp()

    return (1 - perplexity(conditioned) / perplexity(alone)).clamp(-1, 1)


def thoughts(kept: Sequence[bool], outcome: float, size: float) -> list[tuple[int, float]]:
    """Rewards of thoughts, which are steps in a row of one verdict (TP-GRPO, arXiv 2507.23317): (last step, reward).

    A thought gets `size` if it leads to the answer and -size if not, but the last one, with the answer, the outcome. So
    the rewards from a thought to the end add up to the outcome if it leads to the answer, else to outcome - size.

    Args:
        kept: whether each step leads to the answer; the last one does.
    """
    last = len(kept) - 1
    ends = [k for k in range(last) if kept[k] != kept[k + 1]]
    return [*((k, size if kept[k] else -size) for k in ends), (last, outcome)]
