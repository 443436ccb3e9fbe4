"""A network in copies or in shards (FSDP2) on every process, and its whole tensors.

If the launch configuration says FSDP2 (`configs/accelerate/fsdp2.yaml`), torch's `fully_shard` is called directly:
accelerate's own preparation is for accelerators only, and so processes on a CPU take the same path. Checkpoints have
whole tensors, so a run resumes on any number of processes, sharded or not.
"""

import contextlib
import os
import warnings
from collections.abc import Iterator, Mapping
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
    """Divides networks into shards.

    Args:
        settings: accelerate's settings, of which `cpu_offload` and `reshard_after_forward` are used.
        device: device of this process.
    """

    def __init__(self, settings: FullyShardedDataParallelPlugin, device: torch.device) -> None:
        self.settings = settings
        self.mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))

    @classmethod
    def configured(cls, device: torch.device) -> "Sharding | None":
        """The sharding of the launch configuration; None if it is for whole copies."""
        if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
            return None
        settings = FullyShardedDataParallelPlugin()
        if settings.fsdp_version != 2:
            raise ConfigError(
                "of FSDP only version 2 is supported (fsdp_version: 2), as in configs/accelerate/fsdp2.yaml"
            )
        return cls(settings, device)

    def shard(self, network: nn.Module) -> None:
        """Keep one shard of every parameter on each process; they are gathered block by block while the network runs.

        Forwards of the processes then wait for each other: all must make the same number. Parameters are new objects.
        """
        options: dict[str, Any] = {"mesh": self.mesh, "offload_policy": self.settings.cpu_offload or OffloadPolicy()}
        for whole in apart(network):
            for block in repeated_blocks(whole):
                fully_shard(block, reshard_after_forward=self.settings.reshard_after_forward, **options)
            fully_shard(whole, reshard_after_forward=False, **options)
        if isinstance(network, Experts):
            network.always = True

    @contextlib.contextmanager
    def gathered(self, network: nn.Module) -> Iterator[None]:
        """Context in which each process has all weights and can use the network alone; all enter and leave together."""
        modules, wholes = sharded(network), apart(network)
        for module in modules:
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
        try:
            yield
        finally:
            for module in modules:
                module.reshard()
                again = module not in wholes and self.settings.reshard_after_forward
                module.set_reshard_after_forward(again, recurse=False)

    def reshard(self, network: nn.Module) -> None:
        """Free whole weights that are kept between forwards, since their shards have changed."""
        for module in sharded(network):
            module.reshard()


def sharded(network: nn.Module) -> list[FSDPModule]:
    """The modules of a network whose parameters are gathered together."""
    return [module for module in network.modules() if isinstance(module, FSDPModule)]


def check_settings(config: BaseConfig) -> None:
    """Refuse settings that do not work with shards.

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
    if getattr(config.rollout, "merge_lora", False):
        raise ConfigError("rollout.merge_lora: weights in shards are not copied; false works, or whole copies")
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
    """Copy or shard the policy's network over the processes, by the launch configuration.

    Returns:
        the sharding of the network; None if it is copied.

    Raises:
        ConfigError: the network or a setting does not go with shards, or with several processes.
    """
    sharding = Sharding.configured(accelerator.device)
    if sharding is None:
        # buffers are constants; sending them at each forward would make processes wait for those that make more calls
        accelerator.ddp_handler = DistributedDataParallelKwargs(
            broadcast_buffers=False, find_unused_parameters=isinstance(policy.network, Experts)
        )
        # torch has two other arguments in the place of this one, which accelerate does not know
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
        # DistributedDataParallel refuses a network without trained parameters
        policy.model = accelerator.prepare(policy.network) if policy.trainable() else policy.network
        return None
    check_settings(config)
    sharding.shard(policy.network)
    if policy._reference is not None:
        sharding.shard(policy._reference)
    return sharding


@contextlib.contextmanager
def unsynced(model: nn.Module) -> Iterator[None]:
    """Context in which backward passes of shards add to this process's gradients, without exchange with the others."""
    modules = sharded(model)
    for module in modules:
        module.set_requires_gradient_sync(False, recurse=False)
    try:
        yield
    finally:
        for module in modules:
            module.set_requires_gradient_sync(True, recurse=False)


def whole(tensors: dict[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """Gather sharded tensors to the CPU; all processes call this together.

    Args:
        keep: return the whole tensors; processes without it only send their shards.
    """
    gathered = {}
    for name, tensor in tensors.items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if keep:
            gathered[name] = full.detach().cpu()
    return gathered


def copied(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole copies on the CPU, which updates of the parameters leave alone; all processes call this together."""
    return {name: tensor.clone() for name, tensor in whole(dict(parameters), keep=True).items()}


def like(value: Any, parameter: Tensor) -> Any:
    """Divide a whole tensor into shards like this parameter; other values are returned as they are."""
    if not isinstance(parameter, DTensor) or value.shape != parameter.shape:
        return value
    return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)


def restore(parameters: dict[str, nn.Parameter], values: dict[str, Tensor]) -> None:
    """Copy stored values into parameters of the same names."""
    with torch.no_grad():
        for name, parameter in parameters.items():
            # copy_ would broadcast a smaller one
            if values[name].shape != parameter.shape:
                raise ValueError(
                    f"{name} has {tuple(parameter.shape)} weights and {tuple(values[name].shape)} are there"
                )
            parameter.copy_(like(values[name], parameter))
