"""Several processes for one sample, each with a part of its tokens: Ulysses (arXiv 2309.14509) and ring attention
(arXiv 2310.01889).

diffusers divides the tokens where a network's `_cp_plan` says, exchanges them within attention and joins the output,
and its exchanges have a backward pass. Every process then has the gradient of its own tokens. Parameters' are added up
by whoever averages them over processes, the network input's here.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import ModelMixin
from diffusers.hooks.context_parallel import apply_context_parallel, remove_context_parallel
from diffusers.models import attention_dispatch
from diffusers.models._modeling_parallel import ContextParallelConfig, ContextParallelInput, ParallelConfig
from diffusers.models.attention_dispatch import TemplatedRingAttention
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from flowalign.errors import ConfigError
from flowalign.policies.diffusion.families import family_of
from flowalign.policies.diffusion.storage import load_config
from flowalign.policies.settings import Model
from rewards.hub import hub

WHERE = "model.context_parallel"
RINGS = ("_native_cudnn", "_native_flash", "flash", "flash_hub", "_flash_3_hub")
"""Attention backends with the normaliser by which a ring joins its parts, and with a backward pass."""
BACKENDS = ("native", *RINGS, "flash_varlen_hub", "_flash_3_varlen_hub")
"""Attention backends that exchange attention heads, and have a backward pass."""
MENDED = "0.42"
"""The diffusers whose ring attention `Ring` mends."""


def check_context_parallel(path: str | Path, model: Model) -> None:
    """Refuse what a pipeline cannot divide, before its weights are read.

    Args:
        path: a folder or a hub name.

    Raises:
        ConfigError: names the setting, and what works.
    """
    if model.context_parallel.degree == 1:
        return
    saved = load_config(path)
    denoiser = family_of(saved["_class_name"]).denoiser
    network: type[ModelMixin] = getattr(diffusers, saved[denoiser][1])
    check_network(saved["_class_name"], network, network.load_config(**hub(path), subfolder=denoiser), model)


def check_network(pipeline_class: str, network: ModelMixin, described: Mapping[str, Any], model: Model) -> None:
    """See `check_context_parallel`; for a class of networks with its configuration."""
    settings, attention = model.context_parallel, model.attention
    if network._cp_plan is None or not family_of(pipeline_class).divides_tokens:
        raise ConfigError(
            f"{WHERE}: the {network.__name__} of {pipeline_class} cannot have its tokens divided; "
            "{ulysses: 1, ring: 1} works, with shards (configs/accelerate/fsdp2.yaml) to save memory"
        )
    attention = attention or "native"
    for name, degree, able in (("ulysses", settings.ulysses, BACKENDS), ("ring", settings.ring, RINGS)):
        if degree > 1 and attention not in able:
            raise ConfigError(f"{WHERE}.{name}: not with model.attention: {attention}; {', '.join(able)} work")
    if settings.ring > 1 and not diffusers.__version__.startswith(f"{MENDED}."):
        raise ConfigError(
            f"{WHERE}.ring: its mend is for diffusers {MENDED}, and {diffusers.__version__} is installed; "
            f"ulysses works, or pip install 'diffusers~={MENDED}.0'"
        )
    heads = described["num_attention_heads"]
    if heads % settings.ulysses:
        raise ConfigError(
            f"{WHERE}.ulysses: {heads} attention heads cannot be divided over {settings.ulysses} processes"
        )


class TokenParts:
    """Networks whose tokens are divided over the processes of a group.

    Args:
        networks: networks of one pipeline.
        mesh: with the dimensions 'ring' and 'ulysses', whose processes make this together.
    """

    def __init__(self, networks: Sequence[Any], mesh: DeviceMesh) -> None:
        self.networks = networks
        self.group = mesh["ring", "ulysses"]._flatten().get_group()
        self.count = torch.distributed.get_world_size(self.group)
        if mesh["ring"].size() > 1:
            attention_dispatch.TemplatedRingAttention = Ring
        mesh_config = ContextParallelConfig(mesh["ring"].size(), mesh["ulysses"].size(), mesh=mesh)
        self.config = ParallelConfig(context_parallel_config=mesh_config)
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.config.setup(rank, world, torch.device(mesh.device_type), mesh=mesh)
        for network in networks:
            network.register_forward_pre_hook(self._add_up_gradient, with_kwargs=True)
            for name, plan in network._cp_plan.items():
                if isinstance(plan, dict) and "*" not in name:
                    network.get_submodule(name).register_forward_pre_hook(self._checks(plan), with_kwargs=True)
        self._switch(True)

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """Within it a process can use the networks without the others."""
        self._switch(False)
        try:
            yield
        finally:
            self._switch(True)

    def _switch(self, on: bool) -> None:
        # as diffusers' enable_parallelism does, which wants a GPU, and has no inverse
        for network in self.networks:
            for module in network.modules():
                if hasattr(getattr(module, "processor", None), "_parallel_config"):
                    module.processor._parallel_config = self.config if on else None
            if on:
                apply_context_parallel(network, self.config.context_parallel_config, network._cp_plan)
            else:
                remove_context_parallel(network, network._cp_plan)
        self._on = on

    def _add_up_gradient(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        _, (name, latents), *_ = _arguments(module, args, kwargs).items()
        if not self._on or not latents.requires_grad:
            return None
        latents = AddedUp.apply(latents, self.group)
        return ((latents, *args[1:]), kwargs) if args else (args, kwargs | {name: latents})

    def _checks(self, plan: Mapping[Any, Any]) -> Callable[..., None]:
        """A hook that refuses lengths that cannot be divided, with a line in the place of an assertion."""

        def check(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = _arguments(module, args, kwargs)
            for name, split in plan.items() if self._on else ():
                value = given.get(name)
                if not isinstance(split, ContextParallelInput) or not isinstance(value, Tensor):
                    continue
                length = value.shape[split.split_dim] if value.dim() == split.expected_dims else 0
                if length % self.count:
                    raise ConfigError(
                        f"{WHERE}: the {length} tokens of {name} cannot be divided over {self.count} processes; "
                        "what changes their number: rollout.height, width, num_frames, model.encode"
                    )

        return check


def _arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a call by name, `self` first; another function may stand in for the module's own forward."""
    return dict(inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments)


class Ring(TemplatedRingAttention):
    """diffusers' ring attention with another backward pass.

    Of diffusers 0.42's own, what was saved is read once a process, which torch refuses where activations are computed
    again (gradient checkpointing); and among more than two processes the gradients of keys and values are added up for
    the wrong ones.
    """

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *rest: Any) -> Any:
        settings, saved = ctx._parallel_config.context_parallel_config, ReadOnce(ctx)
        group, count = settings._ring_mesh.get_group(), settings.ring_degree
        dtype = torch.float32 if settings.convert_to_fp32 else gradient.dtype
        query, key, value, *_ = saved.saved_tensors
        pair = torch.stack([key, value])
        everyones = pair.new_empty(count, *pair.shape)
        torch.distributed.all_gather_into_tensor(everyones, pair[None], group=group)
        of_query, of_everyones = torch.zeros_like(query, dtype=dtype), torch.empty_like(everyones, dtype=dtype)
        for (key, value), of_pair in zip(everyones, of_everyones, strict=True):
            gradients = ctx.backward_op(
                saved, gradient, query=query, key=key, value=value, out=ctx.ring_out, lse=ctx.ring_lse
            )
            of_query += gradients[0]
            of_pair[0], of_pair[1] = gradients[1:3]
        of_own = torch.empty_like(pair, dtype=dtype)
        torch.distributed.reduce_scatter_tensor(of_own[None], of_everyones, group=group)
        # forward's nine further arguments have no gradients
        return of_query.to(gradient.dtype), *of_own.to(gradient.dtype), *[None] * 9


class ReadOnce:
    """State from a function's forward pass for its backward pass."""

    def __init__(self, ctx: Any) -> None:
        self.ctx = ctx
        self.saved_tensors = ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ctx, name)


class AddedUp(torch.autograd.Function):
    """The tensor itself; its gradient is the sum over a group of processes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous().clone()
        torch.distributed.all_reduce(gradient, group=ctx.group)
        return gradient, None
