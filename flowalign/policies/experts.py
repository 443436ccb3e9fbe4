"""Two networks that share one trajectory: one knows high noise and one low (Wan 2.2 14B)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flowalign.errors import ConfigError


class Experts(nn.Module):
    """Networks of one architecture as one, which asks for each sample the network that the pipeline asked.

    In one process (`check_processes`): where gradients are averaged over processes, every one of them would have to
    ask every network.

    Args:
        members: the networks by their names in the pipeline, in the order of `expert`.
    """

    def __init__(self, members: Mapping[str, Any]) -> None:
        super().__init__()
        self.members: Any = nn.ModuleDict(members)
        self.first: Any = next(iter(members.values()))

    @property
    def config(self) -> Any:
        return self.first.config

    @property
    def dtype(self) -> torch.dtype:
        return self.first.dtype

    def forward(self, hidden_states: Tensor, expert: Tensor, **call: Any) -> tuple[Tensor]:
        """[N, ...] predictions, each by the member with the number in `expert` [N] or []."""
        count = len(hidden_states)
        expert = expert.expand(count)
        places, parts = [], []
        for number, member in enumerate(self.members.values()):
            rows = (expert == number).nonzero().squeeze(1).to(hidden_states.device)
            if len(rows):
                own = {name: _rows(value, rows, count) for name, value in call.items()}
                parts.append(member(hidden_states[rows], **own)[0])
                places.append(rows)
        return (torch.cat(parts)[torch.cat(places).argsort()],)

    def add_adapter(self, config: Any) -> None:
        for member in self.members.values():
            member.add_adapter(config)

    def disable_adapters(self) -> None:
        for member in self.members.values():
            member.disable_adapters()

    def enable_adapters(self) -> None:
        for member in self.members.values():
            member.enable_adapters()

    def enable_gradient_checkpointing(self) -> None:
        for member in self.members.values():
            member.enable_gradient_checkpointing()

    def set_attention_backend(self, backend: str) -> None:
        for member in self.members.values():
            member.set_attention_backend(backend)


def _rows(value: Any, rows: Tensor, count: int) -> Any:
    """A call's argument for some of its samples, where it has one for each."""
    return value[rows] if isinstance(value, Tensor) and value.dim() > 0 and len(value) == count else value


def check_processes(network: nn.Module, processes: int) -> None:
    """Refuse to train several networks as one on several processes."""
    if isinstance(network, Experts) and processes > 1:
        raise ConfigError(
            f"this pipeline has {len(network.members)} denoisers, which are trained in one process only, and there are "
            f"{processes}; --num_processes 1 works"
        )
