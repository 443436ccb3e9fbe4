"""Online Diffusion-DPO: the best and the worst own sample of each group are a pair (arXiv 2311.12908, 2501.13918).

Both are noised by the same noise to the same levels. Groups without a best and a worst are left out. Samples are the
policy's; `rollout.weights: reference` draws them from the start weights, or from a snapshot.

Ours: `pairs: all` learns from all pairs of a group, and `weighting` measures errors as AWM does.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from flowalign.algorithms.matching.advantage import ComparingMatching, ComparingSettings
from flowalign.algorithms.matching.base import Points
from flowalign.algorithms.matching.likelihood import Weighting, weighted_error
from flowalign.algorithms.matching.pairs import won
from flowalign.config import Named
from flowalign.core.groups import group_advantage
from flowalign.core.record import Record
from flowalign.core.step_losses import preference_loss
from flowalign.data.batches import Batch


class OnlineDPOSettings(ComparingSettings):
    levels: Named = Named(name="logit_normal", count=4)
    """Name in `flowalign list levels`, with its settings."""
    levels_of: Literal["group", "batch"] = "group"
    """Unit that has noise levels of its own."""
    noise_of: Literal["group"] = "group"
    beta: float = Field(100.0, gt=0)
    """Factor of the squared error's mean over elements; published: 100 in Flow-GRPO's code."""
    pairs: Literal["best_and_worst", "all"] = "best_and_worst"
    """Pairs of a group: its best with its worst sample, or every two whose rewards differ."""
    weighting: Weighting = "uniform"
    """Function of the error e at noise level t, as AWM's: e, t e, t^2 e, t sqrt(e), or 4 t e^(1/4) (ghuber)."""


class OnlineDPO(ComparingMatching):
    """Diffusion-DPO on the best and the worst own sample of each group (arXiv 2311.12908, 2501.13918)."""

    name = "online_dpo"
    Settings = OnlineDPOSettings
    settings: OnlineDPOSettings
    compares = frozenset({"reference"})
    whole_groups = True

    def chosen(self, reward: Tensor, batch: Batch) -> Tensor | None:
        if self.settings.pairs == "all":
            return None
        of_groups = reward.view(len(set(batch.group)), -1)
        best_and_worst = torch.stack([of_groups.argmax(1), of_groups.argmin(1)], 1)
        first = torch.arange(len(of_groups), device=reward.device)[:, None] * of_groups.shape[1]
        return first + best_and_worst

    def kept(self, record: Record) -> Tensor:
        return self.credit(record) != 0

    def credit(self, record: Record) -> Tensor:
        return group_advantage(record.reward, record.group, scale="none")

    def loss(self, points: Points) -> tuple[Tensor, dict[str, Tensor]]:
        sigma, weighting = points.noised.sigma, self.settings.weighting
        before = weighted_error(points.error_reference, sigma, weighting)
        now = weighted_error(points.error, sigma, weighting)
        gain, reward = points.of_item(before - now), points.of_item(points.reward)
        first, second = torch.triu_indices(points.size, points.size, 1, device=gain.device)
        order = (reward[:, first] - reward[:, second]).sign()
        logit = self.settings.beta / 2 * order * (gain[:, first] - gain[:, second])
        # two samples of one reward have a logit of 0 without a gradient, and count as a tie
        return preference_loss(logit).mean(1), {
            "preference/accuracy": won(logit).mean(1),
            "preference/logit": logit.mean(1),
        }
