"""Two networks that share one trajectory: one knows high noise and one low (Wan 2.2 14B)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class Experts(nn.Module):
    """Networks of one architecture as one, which asks for each sample the network that the pipeline asked.

    Processes with whole copies may ask different ones at a time: in a process's last micro-batch a network that is not
    asked counts with what came before, or as zero (`find_unused_parameters`). In shards they would wait for parts
    of networks that others do not ask, so there each call asks all networks (`always`).

    Args:
        members: the networks by their names in the pipeline, in the order of `expert`.
    """

    def __init__(self, members: Mapping[str, Any]) -> None:
        super().__init__()
        self.members: Any = nn.ModuleDict(members)
        self.always = False
        """Call every network each time: on one row, for nothing, where no sample's turn has come."""
        self.used: set[int] = set()
        """Numbers of the networks that got gradients of samples since `drop_unused`."""

    @property
    def first(self) -> Any:
        """Network whose configuration all have."""
        return next(iter(self.members.values()))

    @property
    def config(self) -> Any:
        return self.first.config

    @property
    def dtype(self) -> torch.dtype:
        return self.first.dtype

    def forward(self, hidden_states: Tensor, expert: Tensor, **call: object) -> tuple[Tensor]:
        """[N, ...] predictions, each by the member with the number in `expert` [N] or []."""
        count = len(hidden_states)
        expert = expert.expand(count)
        order, outputs = [], []
        for number, member in enumerate(self.members.values()):
            rows = (expert == number).nonzero().squeeze(1).to(hidden_states.device)
            for_nothing = self.always and not len(rows)
            if len(rows) and torch.is_grad_enabled():
                self.used.add(number)
            if for_nothing:
                rows = torch.zeros(1, dtype=torch.long, device=hidden_states.device)
            if len(rows):
                arguments = {name: _rows(value, rows, count) for name, value in call.items()}
                predicted = member(hidden_states[rows], **arguments)[0]
                # none of its rows, but its place in the graph, so that its backward pass is walked by all
                outputs.append(predicted[:0] if for_nothing else predicted)
                order.append(rows[:0] if for_nothing else rows)
        return (torch.cat(outputs)[torch.cat(order).argsort()],)

    def add_adapter(self, config: object) -> None:
        for member in self.members.values():
            member.add_adapter(config)

    @property
    def peft_config(self) -> Any:
        return self.first.peft_config

    def set_adapter(self, name: str) -> None:
        for member in self.members.values():
            member.set_adapter(name)

    def enable_gradient_checkpointing(self) -> None:
        for member in self.members.values():
            member.enable_gradient_checkpointing()

    def set_attention_backend(self, backend: str) -> None:
        for member in self.members.values():
            member.set_attention_backend(backend)

    def drop_unused(self) -> None:
        """Remove the zero gradients of networks that no process asked for a sample, where each call asks all of them.

        Adam would else move their weights by decay and momentum, which whole copies leave alone. All processes call it.
        """
        if not self.always:
            return
        members = list(self.members.values())
        used = torch.tensor([float(number in self.used) for number in range(len(members))])
        self.used.clear()
        if torch.distributed.is_initialized():
            used = used.to(next(self.parameters()).device)
            torch.distributed.all_reduce(used)
        for member, times in zip(members, used.tolist(), strict=True):
            if not times:
                member.zero_grad()


def _rows(value: object, rows: Tensor, count: int) -> Any:
    """A call's argument for some of its samples, where it has one for each."""
    return value[rows] if isinstance(value, Tensor) and value.dim() > 0 and len(value) == count else value


def own_weights(weights: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """A member's weights by their names in it, from those of the whole; all where there is but one network."""
    start = f"members.{name}."
    selected = {key.removeprefix(start): value for key, value in weights.items() if key.startswith(start)}
    return selected or dict(weights)


def apart(network: nn.Module) -> list[Any]:
    """The networks that are called by themselves: a pipeline asks one of several, and not the whole they make."""
    return list(network.members.values()) if isinstance(network, Experts) else [network]
