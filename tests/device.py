"""An accelerator in Python, with values: what only a GPU would notice is noticed on any machine.

Its tensors hold their values on the host, where every operation is computed; around them stand the rules of a GPU.
Mixing the host's tensors with the device's raises, as does a generator of the host's; transfers, and waits for values,
are written down with their places. Unlike on `flowalign.planning.fake_device` the numbers are real.

`python -m tests.device [FOLDER/NAME ...]` runs a whole iteration of recipes on it, on tiny models: text encoders,
replay check, gradients, export. With `torchrun --nproc-per-node 2 -m tests.device` processes with a device each
exchange gradients by gloo. What a GPU of any maker does (`samplers.devices.is_gpu`) is done on it too; branches for
'cuda' ask CUDA's library for a name, a counter or a setting. It cannot have that name: without a driver, a backward
pass of tensors on 'cuda' ends in torch's "hasPrimaryContext expects a valid device index".
"""

import contextlib
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self
from unittest import mock

import torch
from accelerate import Accelerator
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from PIL import Image
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from flowalign.config import BaseConfig, Config, load, recipe
from flowalign.planning import dry_run
from flowalign.planning.dry_run import Report
from flowalign.planning.fake_device import ANSWERED_BY_VALUES, FLOAT32, INDEXING, LOWER, OWN, leaves, mapped
from flowalign.planning.random_models import tiny_name
from flowalign.planning.tiny_pipelines import PIPELINES

NAME = "board"


class Backend(_DummyBackendModule):
    """What torch asks of `torch.board`."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


_setup_privateuseone_for_python_backend(NAME, Backend())
_EVERY, _ATEN = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
_EVERY.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)


def _register_autocast(operation: Any, lower: bool) -> None:
    """Let torch.autocast compute an operation in its own precision, or in float32, as on CUDA."""

    def cast(value: Tensor) -> Tensor:
        dtype = torch.get_autocast_dtype(NAME) if lower else torch.float32
        fits = isinstance(value, There) and value.is_floating_point() and value.dtype != torch.float64
        return value.to(dtype) if fits else value

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            args, kwargs = mapped(cast, (args, kwargs))
            return operation(*args, **kwargs)

    _ATEN.impl(operation, kernel, "AutocastPrivateUse1")


for _names, _lower in ((LOWER, True), (FLOAT32, False)):
    for _name in _names - {"__matmul__", "__rmatmul__", "__pow__", "__rpow__", "norm"}:
        for _overload in getattr(torch.ops.aten, _name).overloads():
            if "out" not in _overload and "dimname" not in _overload.lower():
                _register_autocast(getattr(getattr(torch.ops.aten, _name), _overload), _lower)

DEVICE = torch.device(NAME, 0)
aten = torch.ops.aten
TORCH_TENSOR = torch.tensor
COPIES = frozenset({aten._to_copy, aten.copy_, aten.set_})
"""Operations that take tensors of both devices."""
PINNED = "pinned"
"""Attribute of a host's storage that a driver would have pinned."""


class There(Tensor):
    """A tensor on the device; `host` has its values."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> "There":
        settings: Any = {"strides": host.stride(), "storage_offset": host.storage_offset()}
        made: There = Tensor._make_wrapper_subclass(cls, host.shape, dtype=host.dtype, device=DEVICE, **settings)
        made.host = host
        return made

    def __repr__(self, **_: Any) -> str:
        return f"There({self.host!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            copied = There(self.host.clone())
            memo[id(self)] = nn.Parameter(copied, self.requires_grad) if isinstance(self, nn.Parameter) else copied
        return memo[id(self)]

    @property
    def data(self) -> Tensor:
        return There(self.host)

    @data.setter
    def data(self, value: "There") -> None:
        Tensor.data.__set__(self, value)
        self.host = value.host

    def tolist(self) -> Any:
        # torch has it for no subclass
        return self.cpu().tolist()

    def untyped_storage(self) -> Any:
        return self.host.untyped_storage()

    def storage(self) -> Any:
        return self.host.storage()

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError(f"can't convert {NAME} device type tensor to numpy. Use Tensor.cpu() first")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        # outside of `Device` nothing is written down, and the rules hold
        return _computed(func, args, kwargs or {})


class Device(TorchDispatchMode):
    """Within it tensors can be made on `DEVICE`, and what it is asked for is counted."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        """Places where the host waited for values."""
        self.bytes = Counter[str]()
        """What went to the device and from it, and how much of the first from pinned memory."""

    def __enter__(self) -> Self:
        # torch.tensor(..., device=...) else asks a driver
        self._lifted = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        # a thread that torch starts for a device of Python dies in a backward pass within a backward pass
        self._threads = torch.autograd.set_multithreading_enabled(False)
        super().__enter__()
        self._tensor = mock.patch.object(torch, "tensor", tensor)
        self._tensor.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._tensor.stop()
        super().__exit__(*exception)
        torch.autograd.set_multithreading_enabled(self._threads.prev)
        torch._C._set_only_lift_cpu_tensors(self._lifted)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = leaves((args, kwargs))
        to = kwargs.get("device")
        if not any(isinstance(leaf, There) for leaf in given) and (to is None or torch.device(to).type != NAME):
            return _on_host(func, args, kwargs)
        self._note(func, args, kwargs)
        return _computed(func, args, kwargs)

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        packet, source = func.overloadpacket, next((a for a in args if isinstance(a, Tensor)), None)
        if packet is aten._to_copy and kwargs.get("device") is not None and source is not None:
            goes = torch.device(kwargs["device"]).type == NAME
            if goes == isinstance(source, There):
                return
            self.bytes["to the device" if goes else "to the host"] += source.numel() * source.element_size()
            if goes and hasattr(source.untyped_storage(), PINNED):
                self.bytes["from pinned memory"] += source.numel() * source.element_size()
            if kwargs.get("non_blocking"):
                return
        elif packet is aten.copy_:
            if isinstance(args[0], There) == isinstance(args[1], There):
                return
            self.bytes["to the device" if isinstance(args[0], There) else "to the host"] += args[1].nbytes
            if args[2] if len(args) > 2 else kwargs.get("non_blocking"):
                return
        elif packet in INDEXING:
            if all(isinstance(i, There) and i.dtype not in (torch.bool, torch.uint8) for i in args[1] if i is not None):
                return
        elif packet not in ANSWERED_BY_VALUES:
            return
        self.waits[_place()] += 1


def tensor(data: Any, **settings: Any) -> Tensor:
    """Like `torch.tensor`, which cannot read the device's tensors in a list."""
    made: Tensor = TORCH_TENSOR(mapped(lambda one: one.cpu(), data), **settings)
    return made


def _on_host(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operation without tensors of the device; it has no driver that pins memory, so that this is written down."""
    packet = func.overloadpacket
    if packet is aten.is_pinned:
        return hasattr(args[0].untyped_storage(), PINNED)
    if packet is aten._pin_memory:
        made = args[0].clone()
    else:
        made = func(*args, **kwargs | ({"pin_memory": False} if kwargs.get("pin_memory") else {}))
    if packet is aten._pin_memory or kwargs.get("pin_memory"):
        setattr(made.untyped_storage(), PINNED, True)
    return made


def _computed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operation with tensors of the device."""
    packet, given = func.overloadpacket, leaves((args, kwargs))
    if packet in INDEXING and not isinstance(args[0], There):
        raise RuntimeError(f"{func}: indices should be either on cpu or on the same device as the indexed tensor (cpu)")
    if packet not in COPIES and packet not in INDEXING:
        for leaf in given:
            if isinstance(leaf, Tensor) and not isinstance(leaf, There) and leaf.dim():
                raise RuntimeError(f"{func}: Expected all tensors to be on the same device, found {NAME} and cpu")
    for leaf in given:
        if isinstance(leaf, torch.Generator) and leaf.device.type == "cpu":
            raise RuntimeError(f"{func}: Expected a '{NAME}' device type for generator but found 'cpu'")
    if packet in (aten.is_pinned, aten._pin_memory):
        raise RuntimeError(f"{func}: only tensors of the host can be pinned")
    to = kwargs.get("device")
    there = packet is not aten._local_scalar_dense and (to is None or torch.device(to).type == NAME)
    inside = mapped(_host, (args, kwargs))
    own = {by: value for by, value in inside[1].items() if by not in ("device", "non_blocking", "pin_memory")}
    if to is not None:
        own["device"] = "cpu"
    if packet is aten.copy_:
        inside[0][0].copy_(inside[0][1])
        return args[0]
    made = func(*inside[0], **own)
    if packet is aten._to_copy and to is not None and made is inside[0][0]:
        made = made.clone()
    if not there:
        return made
    # operations in place give the tensor that they were given
    known = {id(leaf.host): leaf for leaf in given if isinstance(leaf, There)}
    return mapped(lambda one: known[id(one)] if id(one) in known else There(one), made)


def _host(value: Tensor) -> Tensor:
    return value.host if isinstance(value, There) else value


def _place() -> str:
    """The innermost line of ours, or of a library of models."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        parts = Path(frame.f_code.co_filename).parts
        package = next((name for name in OWN if name in parts), None)
        # whose `mapped` moves the tensors of a list
        if package is not None and parts[-1] != "fake_device.py":
            return "/".join(parts[len(parts) - 1 - parts[::-1].index(package) :]) + f":{frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"


@contextlib.contextmanager
def files_of(config: BaseConfig) -> Iterator[None]:
    """Context in a folder that has the files of prompts, votes, questions and pictures which a recipe names."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for name, colour in (("red.png", (200, 0, 0)), ("black.png", (0, 0, 0)), ("mask.png", (255, 255, 255))):
            Image.new("RGB", (64, 64), colour).save(name)
        tiny = PIPELINES[tiny_name(config.model.path)] if isinstance(config, Config) else None
        line: dict[str, Any] = {"prompt": "two red circles", "tag": "counting", "answer": "first"}
        line |= {"chosen": "red.png", "rejected": "black.png", "target": "red.png"}
        if tiny is None or tiny.images:
            line["image"] = ["red.png", "black.png"][: tiny.images if tiny else 2]
        if tiny is not None and tiny.masked:
            line["mask"] = "mask.png"
        lines = [json.dumps(line)] * 100
        for one in (config.data, *config.data.also, config.evaluation, *config.evaluation.also):
            if str(one.prompts).endswith(".jsonl"):
                Path(str(one.prompts)).write_text("\n".join(lines) + "\n")
        yield


def on_device(name: str) -> tuple[Report | None, Device]:
    """One iteration of a recipe with a tiny model on the device, as `flowalign train --dry-run` does it.

    Of several processes the first has a report.
    """
    of_area = pipeline_qwenimage_edit.calculate_dimensions
    patches = (
        mock.patch.object(dry_run, "best_device", lambda: DEVICE),
        mock.patch.object(Accelerator, "device", DEVICE),
        # Qwen-Image's edits bring every picture to a million pixels, whatever the network's size
        mock.patch.object(pipeline_qwenimage_edit, "calculate_dimensions", lambda _, ratio: of_area(32 * 32, ratio)),
        mock.patch.object(pipeline_qwenimage_edit_plus, "VAE_IMAGE_SIZE", 32 * 32),
    )
    config = load(recipe(name))
    with files_of(config), Device() as device, contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        return dry_run.dry_run(config), device


def main(names: list[str]) -> int:
    """Run recipes, tell how each went, and count those that failed."""
    failed = 0
    # accelerate knows gloo as the exchange between CPUs
    os.environ["ACCELERATE_USE_CPU"] = "true"
    for name in names:
        try:
            report, device = on_device(name)
            if report is None:
                continue
            told = f"ok {report.seconds['all']:.0f} s, {sum(device.waits.values())} waits, {dict(device.bytes)}"
        except Exception as error:
            failed, told = failed + 1, f"FAILED {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        print(f"{name}: {told}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
