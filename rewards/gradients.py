"""The one place that asks a reward for a value with a gradient, and checks what comes."""

from collections.abc import Sequence

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from rewards.base import Latents, Metadata, NamedReward, RewardError, Scores, asking, checked, spec_of


def score_with_gradient(
    reward: NamedReward, made: Tensor | Latents, prompts: Sequence[str], metadata: Metadata
) -> Scores:
    """Ask for `score_pixels` of pixels, or `score_latents` of latents, and check the answer.

    Args:
        made: pictures [B, 3, H, W] or videos [B, 3, F, H, W] in [0, 1], sounds [B, C, T] in [-1, 1], or latents.

    Returns:
        the reward's own scores; where `made` carries a gradient, so does `value`.

    Raises:
        RewardError: it has no such method; the answer has a wrong type or number; a value is not finite; the value has
            no gradient to `made`.
    """
    name, latents = reward.name, isinstance(made, Latents)
    method, values = ("score_latents", made.values) if isinstance(made, Latents) else ("score_pixels", made)
    if not hasattr(reward, method):
        raise RewardError(f"reward '{name}' is not differentiable: it has no `{method}`")
    needs = spec_of(reward).needs
    if not latents and values.dim() == 5 and "image" in needs and "frames" not in needs:
        raise RewardError(
            f"reward '{name}' scores pictures, but got videos; 'per_frame' applies it to the frames of a video"
        )
    if not latents and values.dim() == 3 and not ("sound" in needs or {"text", "image"} <= needs):
        raise RewardError(f"reward '{name}' scores pictures, but got sounds; one that needs 'sound' works")
    with asking(reward, prompts):
        scores: Scores = getattr(reward, method)(made, prompts, metadata)
    value = checked(name, scores, len(prompts), prompts[0]).value
    if not value.isfinite().all():
        worst = int((~value.isfinite()).nonzero()[0])
        raise RewardError(f"reward '{name}' returned {value[worst].item()} for the prompt {prompts[worst]!r}")
    if values.requires_grad and not _reaches(scores.value, values):
        raise RewardError(
            f"reward '{name}': the value of its `{method}` has no gradient to the {'latents' if latents else 'pixels'} "
            f"(first prompt: {prompts[0]!r}), so that nothing would be learned; a value computed in torch, without "
            "detach(), item() or numpy, has one"
        )
    return scores


def _reaches(value: object, source: Tensor) -> bool:
    """Whether the graph of a value leads back to a tensor."""
    if not isinstance(value, Tensor) or value.grad_fn is None:
        return False
    wanted = get_gradient_edge(source).node
    seen: set[Node] = set()
    waiting: list[Node | None] = [value.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is wanted:
            return True
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [before for before, _ in node.next_functions]
    return False
