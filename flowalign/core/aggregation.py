"""How the losses of all actions become one number: weights [B, T], so that the loss is their weighted sum."""

from typing import Literal

from torch import Tensor

Aggregation = Literal["token", "sequence", "sum", "constant"]


def action_weights(mask: Tensor, aggregation: Aggregation, length: int | None = None) -> Tensor:
    """Weights whose sum with the losses of B rows is the aggregated loss.

    Args:
        mask: [B, T] bool, the actions that count.
        aggregation: 'token', the mean over all actions of all rows (DAPO, arXiv 2503.14476); 'sequence', the mean
            over rows of their means over actions (GRPO, 2402.03300); 'sum', the mean over rows of their sums;
            'constant', that divided by `length` for all (Dr. GRPO, 2503.20783).
        length: the largest number of actions a row may have, for 'constant'; default T.

    Returns:
        [B, T] float32. A row without actions weighs nothing, but counts as a row.
    """
    rows = len(mask)
    weights = mask.float()
    if aggregation == "token":
        return weights / weights.sum().clamp(min=1)
    if aggregation == "sequence":
        return weights / weights.sum(1, keepdim=True).clamp(min=1) / rows
    if aggregation == "sum":
        return weights / rows
    return weights / (rows * (length or mask.shape[1]))
