"""torch's flash attention for CPUs under the operators of CUDA's, which diffusers' `_native_flash` asks by name.

It is the only backend of a ring that a CPU can run: the ring joins its parts by the softmax's normaliser, which
`scaled_dot_product_attention` keeps to itself.
"""

from typing import Any

import torch
from recording import brightness
from torch import Tensor

__all__ = ["brightness"]

ATTENTION = torch.library.Library("aten", "IMPL", "CPU")


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    out, normaliser = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, scale=scale
    )
    nothing = torch.empty(0, dtype=torch.int64)
    return out, normaliser, nothing, nothing, query.shape[2], key.shape[2], nothing, nothing, nothing


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    normaliser: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return operator(grad, query, key, value, out, normaliser, dropout_p, is_causal, scale=scale)


ATTENTION.impl("_scaled_dot_product_flash_attention", forward)
ATTENTION.impl("_scaled_dot_product_flash_attention_backward", backward)
