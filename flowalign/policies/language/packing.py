"""Texts of different lengths in rows of one length, one after another, in the place of padding.

A network is told by positions that begin again where a text ends, without an attention mask: transformers then lets no
text attend to another (its masks are block-diagonal; flash attention computes the blocks alone).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(kw_only=True)
class PackedRows:
    """N texts in R rows of the longest one's length L."""

    input_ids: Tensor
    """[R, L]"""
    position_ids: Tensor
    """[R, L] a token's number in its text; what fills the end of a row is a text of its own"""
    row: Tensor
    """[N] each text's row"""
    first: Tensor
    """[N] the place of its first token"""


def packed(ids: Tensor, mask: Tensor) -> PackedRows:
    """Texts, longest first, each into the fullest row that still has room for it (best fit decreasing).

    Args:
        ids: [N, W] with padding anywhere.
        mask: [N, W] bool: what is no padding.
    """
    lengths: list[int] = mask.sum(1).tolist()
    longest, left = max(lengths), list[int]()
    rows, firsts = [0] * len(lengths), [0] * len(lengths)
    for text in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fitting = [(room, row) for row, room in enumerate(left) if room >= lengths[text]]
        room, number = min(fitting, default=(longest, len(left)))
        if number == len(left):
            left.append(longest)
        rows[text], firsts[text] = number, longest - room
        left[number] -= lengths[text]
    row, first = torch.tensor(rows, device=ids.device), torch.tensor(firsts, device=ids.device)
    nth = mask.cumsum(1) - 1
    texts, columns = mask.nonzero(as_tuple=True)
    places = row[texts], first[texts] + nth[texts, columns]
    input_ids = ids.new_zeros(len(left), longest).index_put(places, ids[texts, columns])
    filling = torch.arange(longest, device=ids.device) - longest + torch.tensor(left, device=ids.device)[:, None]
    positions = filling.clamp(min=0).index_put(places, nth[texts, columns])
    return PackedRows(input_ids=input_ids, position_ids=positions, row=row, first=first)


@torch.no_grad()
def tells_texts_apart(network: Any) -> bool:
    """Whether a text's outputs are those that it has alone, also behind another."""
    device = network.device
    ids, positions = torch.arange(6, device=device)[None], torch.tensor([[0, 1, 2, 0, 1, 2]], device=device)
    both = network(input_ids=ids, position_ids=positions, use_cache=False).logits[:, 3:]
    alone = network(input_ids=ids[:, 3:], position_ids=positions[:, 3:], use_cache=False).logits
    return torch.allclose(both.float(), alone.float(), atol=1e-2 if network.dtype != torch.float32 else 1e-4)
