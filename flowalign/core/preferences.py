"""Losses of pairs of texts of which one was preferred, one value a pair; a configuration chooses them by name.

A text's gain is its log-ratio to the reference, and beta times it its implicit reward (DPO, arXiv 2305.18290).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from flowalign.core.losses import Positive

Flipped = Annotated[float, Field(ge=0, lt=0.5)]
"""Share of the labels that are the wrong way round."""


@dataclass(kw_only=True)
class Pairs:
    """Log-probabilities of N pairs of texts, each the sum over the text's tokens."""

    chosen: Tensor
    """[N] of the preferred texts, under the policy."""
    rejected: Tensor
    """[N] of the other texts, under the policy."""
    reference_chosen: Tensor
    """[N] of the preferred texts, under the reference; 0 for losses without one."""
    reference_rejected: Tensor
    """[N] of the other texts, under the reference; 0 for losses without one."""
    chosen_tokens: Tensor
    """[N] numbers of tokens of the preferred texts."""
    rejected_tokens: Tensor
    """[N] numbers of tokens of the other texts."""
    gap: Tensor | None = None
    """[N] how much higher the rewards of the preferred texts are; None of preferences from a file."""

    @property
    def chosen_gain(self) -> Tensor:
        """[N] log-ratios of the preferred texts to the reference."""
        return self.chosen - self.reference_chosen

    @property
    def rejected_gain(self) -> Tensor:
        """[N] log-ratios of the other texts to the reference."""
        return self.rejected - self.reference_rejected

    @property
    def margin(self) -> Tensor:
        """[N] how much more the preferred texts gained."""
        return self.chosen_gain - self.rejected_gain

    @property
    def margin_per_token(self) -> Tensor:
        """[N] the same with each text's gain over its number of tokens."""
        return self.chosen_gain / self.chosen_tokens - self.rejected_gain / self.rejected_tokens


def logistic(logit: Tensor, flipped: float = 0.0) -> Tensor:
    """[N] cross-entropy of logits that the preferred text wins, where a share of the labels is wrong."""
    return -(1 - flipped) * F.logsigmoid(logit) - flipped * F.logsigmoid(-logit)


def sigmoid(pairs: Pairs, *, beta: Positive = 0.1, label_smoothing: Flipped = 0.0) -> Tensor:
    """DPO (arXiv 2305.18290, eq. 7); with label_smoothing the conservative one."""
    return logistic(beta * pairs.margin, label_smoothing)


def sigmoid_norm(pairs: Pairs, *, beta: Positive = 0.1) -> Tensor:
    """DPO with each gain over the text's number of tokens (Tulu 3, arXiv 2411.15124, eq. 6)."""
    return logistic(beta * pairs.margin_per_token)


def robust(pairs: Pairs, *, beta: Positive = 0.1, label_smoothing: Flipped = 0.1) -> Tensor:
    """Robust DPO (arXiv 2403.00409): on average DPO's loss of the true labels, of which a share was flipped."""
    logit = beta * pairs.margin
    right, wrong = -F.logsigmoid(logit), -F.logsigmoid(-logit)
    return ((1 - label_smoothing) * right - label_smoothing * wrong) / (1 - 2 * label_smoothing)


def hinge(pairs: Pairs, *, beta: Positive = 0.1) -> Tensor:
    """SLiC's hinge on DPO's margin (RSO, arXiv 2309.06657)."""
    return (1 - beta * pairs.margin).relu()


def ipo(pairs: Pairs, *, beta: Positive = 0.1) -> Tensor:
    """IPO (arXiv 2310.12036, eq. 17): (margin - 1 / (2 beta))^2, the gains over tokens, as its authors and TRL do."""
    return (pairs.margin_per_token - 1 / (2 * beta)) ** 2


def exo_pair(pairs: Pairs, *, beta: Positive = 0.1, label_smoothing: Annotated[Flipped, Field(gt=0)] = 1e-3) -> Tensor:
    """EXO (arXiv 2402.00856, eq. 16): the reverse KL from the policy's choice to the label's, which is smoothed."""
    logit = beta * pairs.margin
    label = torch.tensor([1 - label_smoothing, label_smoothing], device=logit.device).log()
    chosen = logit.sigmoid() * (F.logsigmoid(logit) - label[0])
    return chosen + (-logit).sigmoid() * (F.logsigmoid(-logit) - label[1])


def nca_pair(pairs: Pairs, *, beta: Positive = 0.1) -> Tensor:
    """NCA on pairs (arXiv 2402.05369): the preferred text's gain is held up, not its distance from the other alone."""
    chosen, rejected = beta * pairs.chosen_gain, beta * pairs.rejected_gain
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def bco_pair(pairs: Pairs, *, beta: Positive = 0.1) -> Tensor:
    """BCO on pairs (arXiv 2404.04656) without its shift: each gain is a classifier's logit."""
    return -F.logsigmoid(beta * pairs.chosen_gain) - F.logsigmoid(-beta * pairs.rejected_gain)


def sppo_hard(pairs: Pairs, *, beta: Positive = 0.1) -> Tensor:
    """SPPO with certain labels (arXiv 2405.00675, eq. 4.7): gains are regressed to +-1 / (2 beta)."""
    return (pairs.chosen_gain - 0.5 / beta) ** 2 + (pairs.rejected_gain + 0.5 / beta) ** 2


def aot(pairs: Pairs, *, beta: Positive = 0.1, label_smoothing: Flipped = 0.0) -> Tensor:
    """AOT on pairs (arXiv 2406.05882): sorted margins of the policy beat sorted margins of the reference.

    Sorted within a micro-batch, as in TRL within a device's batch.
    """
    margin = (pairs.chosen - pairs.rejected).sort().values
    reference = (pairs.reference_chosen - pairs.reference_rejected).sort().values
    return logistic(beta * (margin - reference), label_smoothing)


def aot_unpaired(pairs: Pairs, *, beta: Positive = 0.1, label_smoothing: Flipped = 0.0) -> Tensor:
    """AOT (arXiv 2406.05882): sorted gains of preferred texts beat sorted gains of the others; sorted as in `aot`."""
    margin = pairs.chosen_gain.sort().values - pairs.rejected_gain.sort().values
    return logistic(beta * margin, label_smoothing)


def apo_zero(pairs: Pairs, *, beta: Positive = 0.1) -> Tensor:
    """APO-zero (arXiv 2408.06266, eq. 7), where the preferred texts are better than the policy's own."""
    return 1 - (beta * pairs.chosen_gain).sigmoid() + (beta * pairs.rejected_gain).sigmoid()


def apo_down(pairs: Pairs, *, beta: Positive = 0.1) -> Tensor:
    """APO-down (arXiv 2408.06266, eq. 8), where the preferred texts are worse than the policy's own."""
    return (beta * pairs.chosen_gain).sigmoid() + 1 - (beta * pairs.margin).sigmoid()


def discopop(pairs: Pairs, *, beta: Positive = 0.1, temperature: Positive = 0.05) -> Tensor:
    """DiscoPOP (arXiv 2406.08414, eq. 5): a blend of the logistic and the exponential loss, found by a search."""
    logit = beta * pairs.margin
    share = (logit / temperature).sigmoid()
    return (1 - share) * logistic(logit) + share * (-logit).exp()


def cpo(pairs: Pairs, *, beta: Positive = 0.1, label_smoothing: Flipped = 0.0) -> Tensor:
    """CPO (arXiv 2401.08417, eq. 3): DPO without a reference; published with `sft_weight: 1`."""
    return logistic(beta * (pairs.chosen - pairs.rejected), label_smoothing)


def simpo(pairs: Pairs, *, beta: Positive = 2.0, margin: Annotated[float, Field(ge=0)] = 1.0) -> Tensor:
    """SimPO (arXiv 2405.14734, eq. 6): mean log-probabilities of tokens, a margin apart, without a reference."""
    per_token = pairs.chosen / pairs.chosen_tokens - pairs.rejected / pairs.rejected_tokens
    return logistic(beta * per_token - margin)


def orpo(pairs: Pairs, *, beta: Positive = 0.1) -> Tensor:
    """ORPO's odds ratio (arXiv 2403.07691, eq. 7) of mean log-probabilities; published with `sft_weight: 1`."""

    def log_odds(log_prob: Tensor, tokens: Tensor) -> Tensor:
        mean = (log_prob / tokens).clamp(max=-1e-7)
        return mean - (-mean.expm1()).log()

    chosen = log_odds(pairs.chosen, pairs.chosen_tokens)
    return beta * logistic(chosen - log_odds(pairs.rejected, pairs.rejected_tokens))


def selm(pairs: Pairs, *, beta: Positive = 0.1, alpha: Annotated[float, Field(ge=0)] = 0.001) -> Tensor:
    """SELM (arXiv 2405.19332, as its authors' code): DPO plus alpha times the policy's own implicit reward, so that the
    policy leaves what it says already.

    Both texts of a pair must be the policy's own, as those of `online_text_dpo`: the reward is their mean.
    """
    own = beta * (pairs.chosen_gain + pairs.rejected_gain) / 2
    return logistic(beta * pairs.margin) + alpha * own


def dno(pairs: Pairs, *, beta: Positive = 0.1) -> Tensor:
    """Direct Nash optimisation (arXiv 2404.03715, alg. 1, eq. 8): cross-entropy of the margin with the chance that the
    rewards of both texts give, the reference being the iteration's first weights.

    The reward must be a text's win rate against the policy's own, `win_rate`, and both texts the policy's own, as those
    of `online_text_dpo`, of which `reference` names the snapshot.
    """
    assert pairs.gap is not None
    chance, logit = pairs.gap.sigmoid(), beta * pairs.margin
    return -chance * F.logsigmoid(logit) - (1 - chance) * F.logsigmoid(-logit)


def group_equivalence(
    gain: Tensor, equivalent: Tensor, group: Tensor, *, beta: float = 0.1, equivalence: float = 1.0
) -> Tensor:
    """[G] GEPO's losses of groups (arXiv 2505.12723): DPO between the mean gains of a group's equivalent texts and of
    its others, plus `equivalence` times the variance of the equivalent ones' gains.

    Args:
        gain: [N] log-ratios of the texts to the reference.
        equivalent: [N] bool; each group has texts of both kinds.
        group: [N] numbers of the groups, from 0 to G - 1.
    """
    member = torch.arange(int(group.max()) + 1, device=group.device)[:, None] == group

    def mean(values: Tensor, chosen: Tensor) -> Tensor:
        return (values * chosen).sum(1) / chosen.sum(1)

    better, worse = mean(gain, member & equivalent), mean(gain, member & ~equivalent)
    spread = mean((gain - better[:, None]) ** 2, member & equivalent)
    return logistic(beta * (better - worse)) + equivalence * spread


PREFERENCES: dict[str, Callable[..., Tensor]] = {
    "sigmoid": sigmoid,
    "sigmoid_norm": sigmoid_norm,
    "robust": robust,
    "hinge": hinge,
    "ipo": ipo,
    "exo_pair": exo_pair,
    "nca_pair": nca_pair,
    "bco_pair": bco_pair,
    "sppo_hard": sppo_hard,
    "aot": aot,
    "aot_unpaired": aot_unpaired,
    "apo_zero": apo_zero,
    "apo_down": apo_down,
    "discopop": discopop,
    "cpo": cpo,
    "simpo": simpo,
    "orpo": orpo,
    "selm": selm,
    "dno": dno,
}
WITHOUT_REFERENCE = frozenset({"cpo", "simpo", "orpo"})
WITH_REWARDS = frozenset({"dno"})
"""Losses that need the rewards of both texts."""


def label_loss(gain: Tensor, good: Tensor, divergence: Tensor, beta: float = 0.1) -> Tensor:
    """[N] KTO's loss of texts with a label (arXiv 2402.01306, eq. 7), from 0 to 1, 1/2 where gain and divergence agree.

    Args:
        gain: [N] log-ratios of the texts to the reference.
        good: [N] bool: the labels.
        divergence: estimate of the KL from the reference, which has no gradient and is not below 0.
    """
    sign = torch.where(good, 1.0, -1.0)
    return 1 - (sign * beta * (gain - divergence)).sigmoid()
