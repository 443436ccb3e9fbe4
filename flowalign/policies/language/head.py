"""Scores of drawn tokens without the logits of them all: the output head on a few tokens at a time."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from flowalign.policies.language.decoding import Decoding, entropy_of

LOGITS = 2**25
"""Logits computed at a time: 128 MiB in float32."""
RECOMPUTED: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
"""Arguments of torch's checkpoint; nothing here draws random numbers."""
Head = Callable[[Tensor], Tensor]
"""[N, H] -> [N, V]"""
Measure = Callable[[Tensor], Tensor]
"""Log-probabilities [N, V] -> [N] a number for each distribution."""


def token_scores(
    hidden: Tensor,
    head: Head,
    vocabulary: int,
    tokens: Tensor,
    decoding: Decoding,
    before: Tensor | None = None,
    undrawn: Sequence[int] = (),
    measure: Measure = entropy_of,
    with_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """[N] float32 log-probabilities of tokens, and a measure of the distributions that they were drawn from.

    Where there are more than `LOGITS` of them, a backward pass computes logits again instead of keeping them.

    Args:
        hidden: [N, H] what the head gets where each token was drawn.
        vocabulary: V.
        tokens: [N].
        before, undrawn: as of `Decoding.log_probs`.
        measure: of distributions; `with_gradient`: gradients flow through it too.
    """

    def scores(hidden: Tensor, tokens: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
        log_probs = decoding.log_probs(head(hidden), before, tokens, undrawn)
        measured = measure(log_probs if with_gradient else log_probs.detach())
        return log_probs.gather(-1, tokens[:, None])[:, 0], measured

    size = max(1, LOGITS // vocabulary)
    if len(tokens) <= size:
        return scores(hidden, tokens, before)
    chunks = []
    for i in range(0, len(tokens), size):
        some = slice(i, i + size)
        earlier = None if before is None else before[some]
        chunks.append(checkpoint(scores, hidden[some], tokens[some], earlier, **RECOMPUTED))
    log_prob, measured = zip(*chunks, strict=True)
    return torch.cat(log_prob), torch.cat(measured)


@contextlib.contextmanager
def instead_of_logits(head: torch.nn.Module, made: Callable[[Tensor, Head], Tensor]) -> Iterator[None]:
    """Within it the output head gives `made(hidden, head)`, so that the network, wrapped or not, makes no logits.

    Args:
        made: function of the head's input [B, L, H] and the head, to the network's output in the place of logits.
    """
    forward = vars(head).get("forward")
    plain: Head = head.forward
    head.forward = lambda hidden: made(hidden, plain)
    try:
        yield
    finally:
        if forward is None:
            del head.forward
        else:
            head.forward = forward


@torch.no_grad()
def gives_logits(network: PreTrainedModel) -> bool:
    """Whether the network's logits are what its output head gives, neither scaled nor capped after."""
    outputs: list[Tensor] = []
    hook = network.get_output_embeddings().register_forward_hook(lambda head, given, logits: outputs.append(logits))
    # several: the output of a padding token may be 0, which no cap changes
    ids = torch.arange(min(8, network.config.get_text_config().vocab_size), device=network.device)[None]
    try:
        logits = network(input_ids=ids, use_cache=False).logits
    finally:
        hook.remove()
    return len(outputs) == 1 and torch.equal(outputs[0].float(), logits.float())
