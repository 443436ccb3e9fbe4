"""Frozen networks that live on the host and visit the device."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from samplers.devices import is_gpu


@contextmanager
def visiting(networks: Sequence[nn.Module | None], device: torch.device) -> Iterator[None]:
    """The networks on a device meanwhile, from pinned memory; their host tensors wait, and nothing is copied back.

    Args:
        networks: None, and one that bitsandbytes quantised, which stays where it was loaded, are passed over.
    """
    moved = [network for network in networks if network is not None and not _stays(network)]
    hosts = [(module, name, value) for network in moved for module, name, value in _tensors(network)]
    there: dict[int, Any] = {}
    for module, name, host in hosts:
        if is_gpu(device) and not host.is_pinned():
            host.data = host.data.pin_memory()
        # the same weights under two names go once
        if id(host) not in there:
            copy = host.to(device, non_blocking=True)
            there[id(host)] = nn.Parameter(copy, requires_grad=False) if isinstance(host, nn.Parameter) else copy
        setattr(module, name, there[id(host)])
    try:
        yield
    finally:
        for module, name, host in hosts:
            setattr(module, name, host)


def _stays(network: nn.Module) -> bool:
    return getattr(network, "quantization_method", None) == "bitsandbytes"


def _tensors(network: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Every parameter and buffer with the module that has it, and its name there."""
    for module in network.modules():
        for name, value in [*module._parameters.items(), *module._buffers.items()]:
            if value is not None:
                yield module, name, value
