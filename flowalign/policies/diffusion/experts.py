"""Two networks that share one trajectory: one knows high noise and one low (Wan 2.2 14B)."""

from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from torch import Tensor, nn

from flowalign.errors import ConfigError


class Experts(nn.Module):
    """Networks of one architecture as one, which asks for each sample the network that the pipeline asked.

    Processes with whole copies may ask different ones at a time (`allow_unasked`). In shards they may not: each would
    wait for parts of the networks that others do not ask.

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


def _rows(value: Any, rows: Tensor, count: int) -> Any:
    """A call's argument for some of its samples, where it has one for each."""
    return value[rows] if isinstance(value, Tensor) and value.dim() > 0 and len(value) == count else value


def allow_unasked(network: nn.Module, accelerator: Accelerator) -> None:
    """Let a process's last micro-batch ask some of the networks: the others count with what came before, or as zero."""
    if isinstance(network, Experts):
        accelerator.ddp_handler = DistributedDataParallelKwargs(find_unused_parameters=True)


def check_shards(network: nn.Module) -> None:
    """Refuse to put several networks in shards.

    Raises:
        ConfigError: says what works.
    """
    if isinstance(network, Experts):
        raise ConfigError(
            f"this pipeline has {len(network.members)} denoisers, which are trained in whole copies, not in shards: "
            "launch without FSDP or DeepSpeed"
        )
