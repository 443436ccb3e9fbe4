"""Guidance by what training changed (RLG, arXiv 2508.21016)."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map

from flowalign.errors import ConfigError
from flowalign.policies.diffusion.conditions import standing_in


def weighed(base: Tensor, *tuned: tuple[float, Tensor]) -> Tensor:
    """The guided velocity: base + sum of w_i * (tuned_i - base).

    These are the velocities of the density base^(1 - sum of w_i) * product of tuned_i^w_i at each noise level.

    Args:
        tuned: each with its weight.
    """
    return base + sum(weight * (velocity - base) for weight, velocity in tuned)


Networks = list[Callable[[], contextlib.AbstractContextManager[None]]]
"""Contexts in which a policy has the weights of the base, and of each tuned model."""


def networks(policy: Any, weight: float | Mapping[str, float]) -> tuple[Networks, list[float]]:
    """The networks that are weighed together, and the weight of each tuned one.

    Raises:
        ConfigError: the base's weights, or a LoRA, are not there.
    """
    if isinstance(weight, Mapping):
        return [functools.partial(policy.adapter, path) for path in (None, *weight)], list(weight.values())
    if not policy.lora:
        raise ConfigError(f"rlg {weight:g} weighs what a LoRA adds to its base, and this model has none; give a LoRA")
    return [policy.reference, contextlib.nullcontext], [weight]


def weighed_velocity(policy: object, weight: float | Mapping[str, float], velocity: Callable[[], Tensor]) -> Tensor:
    """The velocities of several networks, each guided for itself, weighed together."""
    members, weights = networks(policy, weight)
    velocities = []
    for network in members:
        with network():
            velocities.append(velocity())
    return weighed(velocities[0], *zip(weights, velocities[1:], strict=True))


@contextlib.contextmanager
def weighing(
    policy: Any, weight: float | Mapping[str, float], holds: Callable[[], bool] = lambda: True
) -> Iterator[None]:
    """Within it the network predicts base + weight * (tuned - base), of which guidance then makes the velocity.

    That is the guided velocities, weighed, where guidance is linear in what the network predicts.

    Args:
        holds: asked in each call; without it the network predicts as it does.

    Raises:
        ConfigError: as `networks`.
    """
    members, weights = networks(policy, weight)

    def mixed(plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def forward(*args: object, **kwargs: object) -> object:
            calls.append(holds())
            if not calls[-1]:
                return plain(*args, **kwargs)
            outputs = []
            for network in members:
                with network():
                    outputs.append(plain(*args, **kwargs))
            return tree_map(lambda b, *t: weighed(b, *zip(weights, t, strict=True)), *outputs)

        return forward

    forwards, calls = policy.forwards, list[bool]()
    with standing_in(list(policy.networks.values()), mixed):
        yield
    # what was counted once
    counted = policy.forwards - forwards
    policy.forwards += len(weights) * counted * sum(calls) // max(1, len(calls))
