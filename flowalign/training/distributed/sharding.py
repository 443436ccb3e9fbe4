"""A network in copies or in shards (FSDP2) on every process, and its whole tensors.

Where the launch configuration asks for FSDP2 (`configs/accelerate/fsdp2.yaml`), torch's `fully_shard` is used as it is:
accelerate's own preparation is for accelerators only, and this way the processes of a CPU take the same path.
Checkpoints hold whole tensors, so a run resumes on any number of processes, sharded or not.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from flowalign.config import BaseConfig
from flowalign.errors import ConfigError
from flowalign.policies.base import Policy, repeated_blocks
from flowalign.policies.diffusion.experts import Experts, apart


class Sharding:
    """How networks are divided into shards.

    Args:
        settings: accelerate's; `cpu_offload` and `reshard_after_forward` count.
        device: of this process.
    """

    def __init__(self, settings: FullyShardedDataParallelPlugin, device: torch.device) -> None:
        self.settings = settings
        self.mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))

    @classmethod
    def configured(cls, device: torch.device) -> "Sharding | None":
        """As the launch configuration says, None where it asks for whole copies."""
        if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
            return None
        settings = FullyShardedDataParallelPlugin()
        if settings.fsdp_version != 2:
            raise ConfigError(
                "of FSDP only version 2 is supported (fsdp_version: 2), as in configs/accelerate/fsdp2.yaml"
            )
        return cls(settings, device)

    def shard(self, network: nn.Module) -> None:
        """Leave each process its part of every parameter, gathered block by block while the network runs.

        Forwards then wait for each other: every process must make as many. Its parameters are new objects.
        """
        own: dict[str, Any] = {"mesh": self.mesh, "offload_policy": self.settings.cpu_offload or OffloadPolicy()}
        for whole in apart(network):
            for block in repeated_blocks(whole):
                fully_shard(block, reshard_after_forward=self.settings.reshard_after_forward, **own)
            fully_shard(whole, reshard_after_forward=False, **own)
        if isinstance(network, Experts):
            network.always = True

    @contextlib.contextmanager
    def gathered(self, network: nn.Module) -> Iterator[None]:
        """Within it every process has all weights and can use the network alone; all enter and leave together."""
        parts, wholes = sharded(network), apart(network)
        for part in parts:
            part.set_reshard_after_forward(False, recurse=False)
            part.unshard()
        try:
            yield
        finally:
            for part in parts:
                part.reshard()
                again = part not in wholes and self.settings.reshard_after_forward
                part.set_reshard_after_forward(again, recurse=False)

    def reshard(self, network: nn.Module) -> None:
        """Forget whole weights that are kept between forwards: the parts they came from have changed."""
        for part in sharded(network):
            part.reshard()


def sharded(network: nn.Module) -> list[FSDPModule]:
    """The modules of a network whose parameters are gathered together."""
    return [module for module in network.modules() if isinstance(module, FSDPModule)]


def check_settings(config: BaseConfig) -> None:
    """Refuse what does not go with shards.

    Raises:
        ConfigError: says which setting, and what works.
    """
    if getattr(config.model, "base_bits", None) is not None:
        raise ConfigError("model.base_bits: quantised weights are not put in shards; null works, or whole copies")
    if "shards" not in config.build_algorithm().combines:
        raise ConfigError(
            f"algorithm: {config.algorithm.name} asks its network with other weights for one gradient, and one in "
            "shards cannot do that; whole copies work (configs/accelerate/multi_gpu.yaml)"
        )
    if getattr(config.model, "text_lora", None) is not None:
        raise ConfigError("model.text_lora: text encoders are not put in shards; null works, or whole copies")
    if config.training.optimizer.bits == 8:
        raise ConfigError("training.optimizer.bits: moments in shards are not quantised; 32 works")
    if config.training.optimizer.offload:
        raise ConfigError(
            "training.optimizer.offload: moments in shards go to the host with these, by fsdp_offload_params: true "
            "in the launch configuration; false works"
        )
    if config.training.offload_copies:
        raise ConfigError("training.offload_copies: copies of shards are in shards, and stay; false works")
    # a language model has its weights gathered while it samples
    if config.model.kind == "pictures" and (config.data.dynamic_sampling or config.data.replay):
        raise ConfigError(
            "data.dynamic_sampling, data.replay: processes would sample different numbers of times, and a network in "
            "shards runs on all of them or on none; null works, or whole copies (configs/accelerate/multi_gpu.yaml)"
        )


def distribute(policy: Policy, config: BaseConfig, accelerator: Accelerator) -> Sharding | None:
    """Copies of the policy's network on every process, or shards of it: as the launch configuration says.

    Returns:
        how the network is divided, None where it is copied.

    Raises:
        ConfigError: the network or a setting does not go with shards, or with several processes.
    """
    sharding = Sharding.configured(accelerator.device)
    if sharding is None:
        # Buffers are constants; to send them at each forward would make processes wait whose prompts take fewer calls.
        accelerator.ddp_handler = DistributedDataParallelKwargs(
            broadcast_buffers=False, find_unused_parameters=isinstance(policy.network, Experts)
        )
        # a wrapper refuses a network of which nothing is trained
        policy.model = accelerator.prepare(policy.network) if policy.trainable() else policy.network
        return None
    check_settings(config)
    sharding.shard(policy.network)
    if policy._reference is not None:
        sharding.shard(policy._reference)
    return sharding


@contextlib.contextmanager
def unsynced(model: nn.Module) -> Iterator[None]:
    """Within it backward passes of shards add to this process's gradients without telling the others."""
    parts = sharded(model)
    for part in parts:
        part.set_requires_gradient_sync(False, recurse=False)
    try:
        yield
    finally:
        for part in parts:
            part.set_requires_gradient_sync(True, recurse=False)


def whole(tensors: dict[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """Tensors on the CPU, each with the parts of all processes, which call this together.

    Args:
        keep: return them; the other processes only give their parts.
    """
    kept = {}
    for name, tensor in tensors.items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if keep:
            kept[name] = full.detach().cpu()
    return kept


def like(value: Any, parameter: Tensor) -> Any:
    """A whole tensor divided into shards like this parameter; other things as they are."""
    if not isinstance(parameter, DTensor) or value.shape != parameter.shape:
        return value
    return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)


def restore(parameters: dict[str, nn.Parameter], values: dict[str, Tensor]) -> None:
    """Copy stored values into parameters of the same names."""
    with torch.no_grad():
        for name, parameter in parameters.items():
            # a copy would spread a smaller one
            if values[name].shape != parameter.shape:
                raise ValueError(
                    f"{name} has {tuple(parameter.shape)} weights and {tuple(values[name].shape)} are there"
                )
            parameter.copy_(like(values[name], parameter))
