"""Shared parts of plans for pictures and for texts: GPUs, measurements on the fake device, advice."""

import contextlib
import gc
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import nn

from flowalign.config.sections import BaseConfig
from flowalign.planning.fake_device import Autocast, FakeDevice
from flowalign.policies.base import torch_dtype

GIB = 2**30
RESERVED = 2.0
"""GiB of a GPU that the driver's context, libraries and fragments of the allocator take: an assumption."""
FRACTIONS = (0.15, 0.25)
"""Shares of a GPU's peak for which times are given; published runs reached such shares (docs/plan.md)."""
C = TypeVar("C", bound=BaseConfig)


@dataclass(frozen=True)
class GPU:
    """A GPU by its maker's data sheet."""

    memory: float
    """Memory in GB, of 10^9 bytes."""
    half: float
    """TFLOP/s of dense matrix products in bfloat16 and float16, with float32 sums."""
    single: float
    """TFLOP/s in float32, without TF32."""
    bandwidth: float
    """TB/s between the memory and the processors."""

    @property
    def usable(self) -> float:
        """GiB that are left to a run."""
        return self.memory * 1e9 / GIB - RESERVED

    def rate(self, dtype: str, tf32: bool) -> float:
        """FLOP/s of matrix products in a dtype; all these cards make half as many in TF32 as in 16 bits."""
        single = self.half / 2 if tf32 else self.single
        return 1e12 * (single if dtype == "float32" else self.half)


GPUS = {
    "b200": GPU(180, 2250, 75, 8.0),
    "h200": GPU(141, 989, 67, 4.8),
    "h100": GPU(80, 989, 67, 3.35),
    "h100-pcie": GPU(80, 756, 51, 2.0),
    "a100": GPU(80, 312, 19.5, 2.04),
    "a100-40gb": GPU(40, 312, 19.5, 1.56),
    "l40s": GPU(48, 362, 91.6, 0.864),
    "a6000": GPU(48, 155, 38.7, 0.768),
    "l4": GPU(24, 121, 30.3, 0.3),
    "rtx5090": GPU(32, 209, 104.8, 1.79),
    "rtx4090": GPU(24, 165, 82.6, 1.01),
    "rtx3090": GPU(24, 71, 35.6, 0.936),
}


@dataclass(kw_only=True)
class NetworkCosts:
    """Costs of a model of its real size that do not depend on the kind of sample."""

    parameters: dict[str, int]
    """Parameters of each component."""
    trained: int
    weights: int
    """Bytes of the network that is trained as it is loaded, LoRA included."""


@dataclass(kw_only=True)
class RunPlan:
    """Memory, operations, time and cost of a run, for people and as JSON."""

    model: str
    gpu: str
    gpus: int
    costs: NetworkCosts
    passes: Any
    """How often a sample goes through the networks: `Passes` or `TextPasses`."""
    memory: dict[str, dict[str, float]]
    """GiB on each GPU, by phase and component."""
    flops: dict[str, float]
    """FLOP of an iteration on all GPUs, by phase."""
    seconds: dict[str, float]
    """Seconds of an iteration, at a fraction of the peak."""
    phases: dict[str, dict[str, float]]
    """The same by phase."""
    pictures_per_hour: dict[str, float]
    gpu_hours: dict[str, float]
    """GPU-hours of the whole run without evaluations."""
    usable: float
    """Usable GiB of a GPU."""
    largest_micro_batch: int
    largest_rollout_batch: int
    advice: list[str]
    notes: list[str] = field(default_factory=list)
    price: dict[str, float] = field(default_factory=dict)
    """Price of the whole run, where an hour's was given."""

    @property
    def peak(self) -> float:
        """GiB on a GPU."""
        return max(sum(components.values()) for components in self.memory.values())

    def json(self) -> dict[str, Any]:
        """Everything, for programs."""
        return asdict(self) | {"peak": self.peak}


def run_totals(
    config: BaseConfig, phases: dict[str, dict[str, float]], gpus: int, price: float | None
) -> dict[str, Any]:
    """The fields of a `RunPlan` that follow from the seconds of an iteration's phases, at each share of the peak."""
    training = config.training
    samples = training.prompts_per_iteration * training.group_size
    seconds = {share: sum(times.values()) for share, times in phases.items()}
    hours = {share: value * training.iterations * gpus / 3600 for share, value in seconds.items()}
    return {
        "phases": phases,
        "seconds": seconds,
        "pictures_per_hour": {share: 3600 * samples / value for share, value in seconds.items()},
        "gpu_hours": hours,
        "price": {} if price is None else {share: value * price for share, value in hours.items()},
    }


def kept_weights(config: BaseConfig, costs: NetworkCosts, frozen: float, shards: int) -> dict[str, float]:
    """Bytes on each GPU in all phases: weights, gradients, moments and copies of the weights.

    Args:
        frozen: bytes of weights that are not trained.
        shards: GPUs that the weights, trained and frozen, are divided over (FSDP).
    """
    training, algorithm = config.training, config.build_algorithm()
    trained = 4 * costs.trained / shards
    copies = len(algorithm.snapshots) + len(training.snapshots) + (training.ema_decay is not None)
    second = config.model.lora is None and algorithm.uses_reference
    return {
        "weights": frozen / shards + trained,
        "reference": costs.weights * torch_dtype(config.model.dtype).itemsize / 4 / shards if second else 0,
        "gradients": trained,
        "moments": 0 if training.optimizer.offload else trained * 2 * training.optimizer.bits / 32,
        "snapshots": 0 if training.offload_copies else copies * trained,
    }


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Context without warnings about a tiny model's limits, such as its short tokenizer."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def autocast(dtype: torch.dtype) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if dtype == torch.float32 else Autocast(dtype)


@dataclass
class PassCost:
    flops: float
    peak: int
    """Bytes above those that were there before."""


class Meter:
    """Operations and memory of a piece of work on the fake device."""

    def __init__(self, device: FakeDevice, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype

    def __call__(self, work: Callable[[], object], grad: bool = True) -> PassCost:
        gc.collect()
        before = self.device.peak = self.device.live
        operations = self.device.operations
        with torch.set_grad_enabled(grad), autocast(self.dtype):
            work()
        return PassCost(self.device.operations - operations, self.device.peak - before)


def size_of(module: nn.Module) -> int:
    return sum(t.numel() * t.element_size() for t in [*module.parameters(), *module.buffers()])


Way = tuple[str, Callable[[Any], object]]
"""A setting as people write it, and the function that sets it."""


def setter(section: str, key: str, value: object) -> Callable[[BaseConfig], None]:
    """Function that sets a key of a configuration's section to a value."""
    return lambda config: setattr(attrgetter(section)(config), key, value)


def fewest(
    config: C, ways: Callable[[], Iterable[Way]], used: Callable[[C, bool], float], usable: float, last: str
) -> list[str]:
    """Settings that make a run fit, those that save most memory first; [] where it fits already.

    Settings that cost nothing are tried first, then those that cost time, and last those that change the run's numbers.
    A setting that turns out not to be needed is left out again.

    Args:
        ways: settings that take less memory, the cheapest first.
        used: function from a configuration, and whether its weights are in shards, to the GiB of its peak.
        last: advice where all settings together do not suffice.
    """

    def peak(chosen: list[Way]) -> float:
        changed = config.model_copy(deep=True)
        for _, switch in chosen:
            switch(changed)
        return used(changed, any(name.startswith("shards") for name, _ in chosen))

    def without(chosen: list[Way], way: Way) -> list[Way]:
        return [other for other in chosen if other is not way]

    def with_it(chosen: list[Way], way: Way) -> list[Way]:
        # a setting that is there already gets the new value
        setting = way[0].split(":")[0]
        return [*(other for other in chosen if other[0].split(":")[0] != setting), way]

    chosen: list[Way] = []
    fits = peak(chosen) <= usable
    possible = [] if fits else list(ways())
    # one at a time, the first that helps: after each, another phase may have the largest peak
    while not fits and (more := next((way for way in possible if peak(with_it(chosen, way)) < peak(chosen)), None)):
        chosen = with_it(chosen, more)
        fits = peak(chosen) <= usable
    # of two settings that save as much, the one that costs more is left out
    for way in sorted(reversed(chosen), key=lambda way: peak(without(chosen, way))):
        if fits and peak(without(chosen, way)) <= usable:
            chosen = without(chosen, way)
    names = [name for name, _ in sorted(chosen, key=lambda way: -peak(without(chosen, way)))]
    if fits:
        return names
    return [*names, f"and still {peak(chosen) - usable:.1f} GiB too much; {last}"]
