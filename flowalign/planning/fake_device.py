"""A device without hardware: its tensors have shapes and no values, so that work of any size is tried on any machine.

Tensors of the CPU stay real. A read of the device's values by the host is noted with its line, and answered with ones.
Mixing the two raises, as on a GPU.
"""

import contextlib
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar, cast
from unittest import mock

import torch
from diffusers import DiffusionPipeline
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

Tree = TypeVar("Tree")
DEVICE = torch.device("meta")
"""Device of the tensors: torch computes shapes on it, and walks backward without a driver, unlike on 'cuda'."""
TORCH_TENSOR = torch.tensor
TORCH_AUTOCAST = torch.autocast
TORCH_ATTENTION = torch.nn.functional.scaled_dot_product_attention
aten = torch.ops.aten
ANSWERED_BY_VALUES = frozenset(
    {
        aten._local_scalar_dense,
        aten.equal,
        aten.nonzero,
        aten.masked_select,
        aten._unique2,
        aten.unique_dim,
        aten.unique_consecutive,
        aten.repeat_interleave,
        aten.bincount,
    }
)
"""Operations whose result, or its shape, the host waits for."""
INDEXING = frozenset({aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_})
KNOWN, LARGEST_KNOWN = "known_values", 2**16
"""Attribute of a storage for the values in it that follow from the host's, and the most elements that one has."""
SHAPED = frozenset({aten.new_zeros, aten.new_ones, aten.new_full, aten.zeros_like, aten.ones_like, aten.full_like})
"""Operations that take a tensor for its shape."""
OWN = ("samplers", "rewards", "flowalign", "diffusers", "transformers", "peft")
"""Packages of the lines that waits are reported at."""
OPERATIONS = {
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[aten._scaled_dot_product_flash_attention],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        aten._scaled_dot_product_flash_attention_backward
    ],
} | flop_registry
"""How operations are counted; torch 2.11 knows the attention of GPUs alone."""


LOWER = frozenset(
    "linear matmul __matmul__ __rmatmul__ bmm baddbmm addmm addbmm einsum prelu mm mv conv1d conv2d".split()
)
LOWER |= frozenset("conv3d conv_transpose1d conv_transpose2d conv_transpose3d scaled_dot_product_attention".split())
"""Functions that autocast computes in the lower precision on CUDA; those below in float32 (torch's autocast_mode.h)."""
FLOAT32 = frozenset("exp log log2 log1p pow __pow__ __rpow__ reciprocal rsqrt softplus layer_norm rms_norm".split())
FLOAT32 |= frozenset("group_norm cosine_similarity mse_loss l1_loss smooth_l1_loss huber_loss kl_div cdist".split())
FLOAT32 |= frozenset("logsumexp prod softmax log_softmax cumprod cumsum norm sum".split())


@dataclass(frozen=True)
class Wait:
    """The host waited for the device."""

    operation: str
    place: str
    """Innermost line of ours or of a model's library: package/file.py:function."""
    line: int


class FakeDevice(TorchDispatchMode):
    """Context in which `DEVICE` is an accelerator; its tensors have no values, and memory on it is counted."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[Wait] = []
        self.live = 0
        """Bytes of the tensors on the device."""
        self.peak = 0
        """Bytes at most so far; set it to `live` to measure a part of the work."""
        self.operations = 0
        """Floating-point operations, as torch's FlopCounterMode counts them, whose hooks would keep tensors alive."""
        self._known: set[int] = set()

    def __enter__(self) -> Self:
        # torch remembers which functions make tensors from its first use on, and must not remember the one below
        torch.utils._device._device_constructors()
        # torch.tensor(..., device=...) else makes the values there without asking the mode
        self._lifted = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        super().__enter__()
        self._patches: list[Any] = [
            # diffusers takes the device 'meta' for weights that were not loaded
            mock.patch.object(DiffusionPipeline, "device", DEVICE),
            mock.patch.object(torch, "tensor", tensor),
            mock.patch.object(torch, "autocast", torch_autocast),
            mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", scaled_dot_product_attention),
        ]
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *exception: object) -> None:
        for patch in self._patches:
            patch.stop()
        super().__exit__(*exception)
        torch._C._set_only_lift_cpu_tensors(self._lifted)

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        kwargs = dict(kwargs or {})
        given = leaves((args, kwargs))
        fake = any(map(_is_there, given))
        to = kwargs.get("device")
        on_device = to is not None and torch.device(to).type == DEVICE.type
        if not fake and not on_device:
            return func(*args, **kwargs)
        if func.overloadpacket in INDEXING and not _is_there(args[0]):
            raise RuntimeError(f"{func}: indices on the device, and the indexed tensor on the host")
        waits = self._waits(func, args, kwargs, fake, on_device)
        if waits:
            self._note(func)
        if fake and (waits or (to is not None and not on_device)) and self._needs_values(func, args, to):
            args, kwargs = mapped(_on_host, (args, kwargs))
            result = func(*args, **kwargs)
            return mapped(_placed, result) if to is None else result
        if func.overloadpacket is aten.copy_:
            result = func(*args) if _is_there(args[0]) else func(args[0], _on_host(args[1]))
        elif fake and any(map(_is_array_of_the_host, given)):
            raise RuntimeError(f"{func}: tensors on the device and on the host")
        else:
            result = func(*args, **kwargs)
        self._count(result)
        if operations := OPERATIONS.get(func.overloadpacket):
            self.operations += operations(*args, **kwargs, out_val=result)
        self._remember(func, args, kwargs, result)
        return result

    def _waits(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], fake: bool, on_device: bool
    ) -> bool:
        packet = func.overloadpacket
        if packet in ANSWERED_BY_VALUES:
            return True
        if packet in INDEXING:
            indices = [index for index in args[1] if index is not None]
            return any(index.dtype in (torch.bool, torch.uint8) or index.device != DEVICE for index in indices)
        moved = args[0].device if packet in (aten._to_copy, aten.copy_) and isinstance(args[0], Tensor) else None
        if packet is aten._to_copy and kwargs.get("device") is not None:
            return bool((moved == DEVICE) != on_device and not kwargs.get("non_blocking"))
        if packet is aten.copy_:
            blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
            return bool(moved != args[1].device and blocking)
        return False

    def _needs_values(self, func: OpOverload, args: tuple[Any, ...], to: object) -> bool:
        return to is not None or func.overloadpacket in ANSWERED_BY_VALUES or func.overloadpacket in INDEXING

    def _note(self, func: OpOverload) -> None:
        frame: Any = sys._getframe(2)
        while frame is not None:
            path = Path(frame.f_code.co_filename).parts
            package = next((name for name in OWN if name in path), None)
            if package is not None and path[-1] != Path(__file__).name:
                location = "/".join(path[len(path) - 1 - path[::-1].index(package) :])
                self.waits.append(Wait(str(func), f"{location}:{frame.f_code.co_name}", frame.f_lineno))
                return
            frame = frame.f_back
        self.waits.append(Wait(str(func), "elsewhere", 0))

    def _remember(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: object) -> None:
        """Keep the values of small integers, such as masks and lengths, where they can be computed on the host."""
        results = [leaf for leaf in leaves(result) if _is_there(leaf)]
        if not results:
            return
        known = all(map(_worth_knowing, results)) and (
            func.overloadpacket in SHAPED
            or all(not _is_there(leaf) or _known(leaf) is not None for leaf in leaves((args, kwargs)))
        )
        if not known:
            for fake in results:
                # a storage that was written over with unknown values is unknown too
                vars(fake.untyped_storage()).pop(KNOWN, None)
            return
        args, kwargs = mapped(_on_host, (args, kwargs))
        on_host = kwargs | ({"device": "cpu"} if "device" in kwargs else {})
        for fake, value in zip(leaves(result), leaves(func(*args, **on_host)), strict=True):
            if _is_there(fake):
                _know(fake, value)

    def _count(self, result: object) -> None:
        for value in leaves(result):
            if not _is_there(value):
                continue
            storage = value.untyped_storage()
            if storage._cdata in self._known:
                continue
            self._known.add(storage._cdata)
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def leaves(tree: object) -> list[Any]:
    """What an operation takes or gives, without its tuples, lists and dicts.

    torch.utils._pytree knows trees of any kind, and takes most of the time of an operation on small tensors.
    """
    if isinstance(tree, (tuple, list)):
        return [leaf for part in tree for leaf in leaves(part)]
    if isinstance(tree, dict):
        return leaves(list(tree.values()))
    return [tree]


def mapped(change: Callable[[Tensor], object], tree: Tree) -> Tree:
    """The same with its tensors changed."""
    changed: Any = tree
    if isinstance(tree, Tensor):
        changed = change(tree)
    elif isinstance(tree, (tuple, list)):
        changed = type(tree)([mapped(change, part) for part in tree])
    elif isinstance(tree, dict):
        changed = {key: mapped(change, part) for key, part in tree.items()}
    return cast(Tree, changed)


def _is_there(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type == DEVICE.type


def _is_array_of_the_host(value: object) -> bool:
    # operations take single numbers of the host
    return isinstance(value, Tensor) and value.dim() > 0 and value.device.type != DEVICE.type


def _on_host(value: Tensor) -> Tensor:
    """A tensor of the host for one on the device: its values where they are known, else ones."""
    if not _is_there(value):
        return value
    known = _known(value)
    return torch.ones(value.shape, dtype=value.dtype) if known is None else known


def _known(value: Tensor) -> Tensor | None:
    """The values of a tensor on the device, where they could be computed on the host."""
    values: Tensor | None = vars(value.untyped_storage()).get(KNOWN, {}).get(_place(value))
    return values


def _know(there: Tensor, value: Tensor) -> None:
    vars(there.untyped_storage()).setdefault(KNOWN, {})[_place(there)] = value


def _worth_knowing(value: Tensor) -> bool:
    return not value.is_floating_point() and not value.is_complex() and value.numel() <= LARGEST_KNOWN


def _place(value: Tensor) -> tuple[Any, ...]:
    return value.storage_offset(), tuple(value.shape), tuple(value.stride()), value.dtype


def _placed(value: Tensor) -> Tensor:
    """Move a tensor of the host to the device; its values stay known there."""
    on_device = value.to(DEVICE, non_blocking=True)
    if _worth_knowing(value):
        _know(on_device, value)
    return on_device


def torch_autocast(device_type: str, *args: Any, **settings: Any) -> contextlib.AbstractContextManager[Any]:
    """torch.autocast, which does not know the device: networks that turn it off there for a line stay as they are."""
    return contextlib.nullcontext() if device_type == DEVICE.type else TORCH_AUTOCAST(device_type, *args, **settings)


def tensor(data: object, *, device: torch.device | str | None = None, **settings: Any) -> Tensor:
    """Like `torch.tensor`, but the new tensor's values stay known, which torch drops on a device of this name."""
    result: Tensor = TORCH_TENSOR(mapped(_on_host, data), **settings)
    return result.to(device, non_blocking=True) if device is not None else result


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Like torch's function, by a kernel that keeps for backward what GPUs' kernels keep; any head size and mask.

    On a device without kernels torch's function would compute and keep all attention scores.
    """
    if has_torch_function((query, key, value)):
        inputs = (query, key, value)
        options: tuple[Any, ...] = (attn_mask, dropout_p, is_causal, scale, enable_gqa)
        attended: Tensor = handle_torch_function(scaled_dot_product_attention, inputs, *inputs, *options)
        return attended
    if not _is_there(query):
        return TORCH_ATTENTION(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (x.repeat_interleave(groups, -3) for x in (key, value))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
    kernel = aten._scaled_dot_product_flash_attention_for_cpu
    attended = kernel(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return attended


class Autocast(TorchFunctionMode):
    """Autocast for `DEVICE` with CUDA's rules; torch has none for this device."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self._weights: dict[int, Tensor] = {}
        """Trained float32 weights as they were cast, once."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in LOWER:
            args, kwargs = mapped(self._lowered, (args, kwargs))
        elif name in FLOAT32:
            args, kwargs = mapped(self._raised, (args, kwargs))
        return func(*args, **kwargs)

    def _lowered(self, value: Tensor) -> Tensor:
        if not value.is_floating_point() or value.dtype in (self.dtype, torch.float64) or not _is_there(value):
            return value
        if not (value.is_leaf and value.requires_grad):
            return value.to(self.dtype)
        if id(value) not in self._weights:
            self._weights[id(value)] = value.to(self.dtype)
        return self._weights[id(value)]

    def _raised(self, value: Tensor) -> Tensor:
        return value.float() if value.dtype == self.dtype and _is_there(value) else value
