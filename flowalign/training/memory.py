"""Limits of a device: its precisions, optimizers that save memory, and settings to lower when its memory runs out."""

import logging
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from flowalign.config.sections import BaseConfig, Optimizer
from flowalign.errors import ConfigError
from samplers.devices import is_gpu

logger = logging.getLogger(__name__)

T = TypeVar("T")


def check_precision(dtype: str, device: torch.device) -> None:
    """Refuse a dtype that the device only emulates.

    Raises:
        ConfigError: names the device, and the dtypes that work.
    """
    if dtype == "bfloat16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ConfigError(
            f"model.dtype: {torch.cuda.get_device_name(device)} has no bfloat16 arithmetic; float16 or float32 works"
        )


class HostAdamW(torch.optim.AdamW):
    """AdamW with its moments in the host's memory; those of each parameter are moved to the device for its step.

    All arithmetic stays on the device, so the weights are AdamW's bit for bit. A step moves 16 bytes per parameter.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Do a step of every parameter that has a gradient."""
        groups = self.param_groups
        for group in groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                self._move(parameter, parameter.device)
                self.param_groups = [group | {"params": [parameter]}]
                super().step()
                self._move(parameter, torch.device("cpu"))
        self.param_groups = groups

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the moments of another AdamW, or of this class."""
        super().load_state_dict(state_dict)
        for parameter in self.state:
            self._move(parameter, torch.device("cpu"))

    def _move(self, parameter: Tensor, device: torch.device) -> None:
        for name, value in self.state[parameter].items():
            # the count of steps, a scalar, is not moved
            if value.dim() and value.device != device:
                # the GPU copies to and from pinned memory faster
                pinned = device.type == "cpu" and is_gpu(value.device)
                moved = torch.empty_like(value, device=device, pin_memory=pinned)
                self.state[parameter][name] = moved.copy_(value)


def make_optimizer(
    groups: Iterable[list[nn.Parameter]], settings: Optimizer, device: torch.device
) -> torch.optim.Optimizer:
    """Make AdamW for groups of parameters, fused on a GPU; with `settings.bits` 8, quantised moments (bitsandbytes).

    Raises:
        ConfigError: bitsandbytes is not installed.
    """
    parameters = [{"params": group} for group in groups]
    lr, decay = settings.learning_rate, settings.weight_decay
    common: dict[str, Any] = {"lr": lr, "betas": settings.betas, "weight_decay": decay}
    if settings.bits == 32 and settings.offload:
        return HostAdamW(parameters, fused=is_gpu(device), **common)
    if settings.bits == 32:
        return torch.optim.AdamW(parameters, fused=is_gpu(device), **common)
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise ConfigError(
            "training.optimizer.bits: 8 needs bitsandbytes: pip install 'flowalign[bitsandbytes]'"
        ) from error
    return AdamW8bit(parameters, **common)


def while_it_fits(
    config: BaseConfig, section: str, key: str, work: Callable[[], T], by_itself: Callable[[], bool]
) -> T:
    """Do the work; while the device's memory runs out, halve the batch size at `section.key` and begin again.

    Args:
        by_itself: called when memory ran out; True if no other process waits in the middle of this work. If it is
            False, the error is raised.
    """
    settings = getattr(config, section)
    while True:
        try:
            return work()
        except torch.OutOfMemoryError:
            size = getattr(settings, key, 1)
            if size == 1 or not by_itself():
                raise
            setattr(settings, key, size // 2)
            logger.warning("out of memory with %s.%s %d; going on with %d", section, key, size, size // 2)
        # outside of the except block, where the exception still holds the failed attempt's tensors
        torch.accelerator.empty_cache()


def out_of_memory(config: BaseConfig, processes: int) -> str:
    """Message with the settings to lower, in order: first those that only cost time, last those that change the run."""
    model, training, rollout = config.model, config.training, config.rollout
    shared = processes // config.rows(processes)
    copies = training.ema_decay is not None or training.snapshots or config.build_algorithm().snapshots
    ways = {
        "training.micro_batch_size: 1": training.micro_batch_size > 1,
        "rollout.batch_size: 1": getattr(rollout, "batch_size", 1) > 1,
        "model.gradient_checkpointing: true": not model.gradient_checkpointing,
        "model.offload_vae: true": not getattr(model, "offload_vae", True),
        "training.optimizer.offload: true": not training.optimizer.offload,
        "training.offload_copies: true": copies and not training.offload_copies,
        "model.offload_text: true": not getattr(model, "offload_text", True),
        "model.tile_vae: true": not getattr(model, "tile_vae", True),
        "shards over more GPUs (configs/accelerate/fsdp2.yaml)": True,
        "model.context_parallel: {ulysses: 2} (Wan, FLUX, Qwen-Image; docs/scale.md)": processes > 1 and shared == 1,
        "training.optimizer.bits: 8": training.optimizer.bits == 32 and model.lora is None,
        "model.lora: {rank: 32} in the place of all weights": model.lora is None,
        "model.base_bits: 4": model.lora is not None and getattr(model, "base_bits", 4) != 4,
        "smaller pictures (rollout.height, rollout.width)": config.model.kind == "pictures",
    }
    settings = "; ".join(way for way, open_ in ways.items() if open_)
    together = "" if processes == 1 else " (several processes: batches of updates, and of shards, are not halved)"
    return f"the device's memory ran out{together}; lower, in this order: {settings}"
