"""Named copies of the trained weights, each following the policy at a pace of its own."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from flowalign.policies.settings import Snapshot


class Snapshots:
    """Copies of what is trained: adapters, or whole networks; in shards where the weights are.

    Args:
        parameters: the policy's parameters on this process.
        settings: settings of each copy, by its name.
        refresh: called whenever the parameters were replaced.
        host: keep the copies in the host's memory; they are moved on the parameters' device, a tensor at a time.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        settings: Mapping[str, Snapshot],
        refresh: Callable[[], None] | None = None,
        host: bool = False,
    ) -> None:
        self.settings, self.refresh, self.host = settings, refresh, host
        self._parameters = [parameter.data for parameter in parameters.values()]
        self.weights: dict[str, list[Tensor]] = {name: self._copied() for name in settings}
        """Weights of each snapshot, in the order of the parameters."""

    @contextlib.contextmanager
    def use(self, name: str) -> Iterator[None]:
        """Within it the policy has the weights of this snapshot; for calls without gradients."""
        current = self._copied()
        self._put(self.weights[name])
        try:
            yield
        finally:
            self._put(current)

    @contextlib.contextmanager
    def trained(self, name: str) -> Iterator[None]:
        """Within it the policy's parameters hold this snapshot, which keeps what becomes of them.

        The policy's own weights are the snapshot 'policy' meanwhile.
        """
        self.weights["policy"] = current = self._copied()
        self._put(self.weights[name])
        try:
            yield
        finally:
            self.weights[name] = self._copied()
            del self.weights["policy"]
            self._put(current)

    @torch.no_grad()
    def follow(self, event: Literal["iteration", "update"], count: int, updates: int) -> None:
        """snapshot = decay * snapshot + (1 - decay) * what it follows, of those that move at this event.

        Args:
            count: how many of these events there have been, this one included.
            updates: how many the policy has had so far, on which decays depend; at an update, those before it.
        """
        for name, settings in self.settings.items():
            if settings.every == event and count % settings.interval == 0:
                decay = settings.decay_at(updates)
                followed = self._parameters if settings.of == "policy" else self.weights[settings.of]
                for copy, other, parameter in zip(self.weights[name], followed, self._parameters, strict=True):
                    if decay == 0:
                        # lerp by 1 is not an exact copy
                        copy.copy_(other)
                    else:
                        copy.copy_(copy.to(parameter.device).lerp_(other.to(parameter.device), 1 - decay))

    @torch.no_grad()
    def reset(self, name: str) -> None:
        """Make a snapshot the current weights."""
        for copy, parameter in zip(self.weights[name], self._parameters, strict=True):
            copy.copy_(parameter)

    def _copied(self) -> list[Tensor]:
        return [p.to("cpu", copy=True) if self.host else p.clone() for p in self._parameters]

    def _put(self, weights: list[Tensor]) -> None:
        for parameter, value in zip(self._parameters, weights, strict=True):
            parameter.copy_(value)
        if self.refresh is not None:
            self.refresh()
