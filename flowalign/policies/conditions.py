"""The arguments a pipeline called its denoiser with, kept so that any step of any sample can be called again."""

import inspect
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Call = dict[str, Any]


class Conditions:
    """Every denoiser call of one rollout, without the latents.

    Pipelines call the denoiser once a step, or once a branch of guidance; guidance by concatenation stacks
    `copies` of the batch in one call. Tensors that stay the same over the steps are kept once.

    Args:
        calls: [T][C] the arguments of call c of step k.
        copies: how many copies of the batch each of the C calls carries.
        batch: B, the number of samples.
        shared: names of tensor arguments that have no batch axis (positions, say).
    """

    def __init__(self, calls: list[list[Call]], copies: list[int], batch: int, shared: Collection[str]) -> None:
        self.calls, self.copies, self.batch, self.shared = calls, copies, batch, shared

    def _per_sample(self, name: str, value: Any, copies: int) -> bool:
        return (
            isinstance(value, Tensor)
            and value.dim() > 0
            and len(value) == copies * self.batch
            and name not in self.shared
        )

    def gather(self, samples: Tensor, steps: Tensor) -> list[Call]:
        """The C calls for the N pairs (samples[n], steps[n]), each with copies * N rows."""
        gathered = []
        for c, copies in enumerate(self.copies):
            rows = torch.cat([samples + i * self.batch for i in range(copies)])
            at = steps.repeat(copies)
            call = {}
            for name, first in self.calls[0][c].items():
                if not self._per_sample(name, first, copies):
                    call[name] = first
                    continue
                values = [step[c][name] for step in self.calls]
                if all(value is first for value in values):
                    call[name] = first[rows]
                else:
                    call[name] = torch.stack(values)[at, rows]
            gathered.append(call)
        return gathered

    def __getitem__(self, samples: Tensor) -> "Conditions":
        """The conditions of some samples, [N] indices."""
        picked: dict[int, Tensor] = {}

        def pick(name: str, value: Any, copies: int) -> Any:
            if not self._per_sample(name, value, copies):
                return value
            if id(value) not in picked:
                picked[id(value)] = value.unflatten(0, (copies, -1))[:, samples].flatten(0, 1)
            return picked[id(value)]

        calls = [
            [{name: pick(name, value, n) for name, value in call.items()} for call, n in zip(step, self.copies)]
            for step in self.calls
        ]
        return Conditions(calls, self.copies, len(samples), self.shared)

    @staticmethod
    def cat(parts: Sequence["Conditions"]) -> "Conditions":
        """The conditions of several rollouts of the same schedule as one."""
        first = parts[0]
        if len(parts) == 1:
            return first
        joined: dict[tuple[int, ...], Tensor] = {}

        def join(name: str, values: list[Any], copies: int) -> Any:
            if not first._per_sample(name, values[0], copies):
                return values[0]
            key = tuple(map(id, values))
            if key not in joined:
                folded = [v.unflatten(0, (copies, -1)) for v in values]
                joined[key] = torch.cat(folded, 1).flatten(0, 1)
            return joined[key]

        calls = [
            [
                {name: join(name, [p.calls[k][c][name] for p in parts], copies) for name in first.calls[k][c]}
                for c, copies in enumerate(first.copies)
            ]
            for k in range(len(first.calls))
        ]
        return Conditions(calls, first.copies, sum(p.batch for p in parts), first.shared)


class CallRecorder:
    """Context manager that writes down every call of a denoiser while a pipeline runs.

    Args:
        dry: answer with zeros in place of the network.
    """

    def __init__(self, denoiser: nn.Module, dry: bool = False) -> None:
        self.denoiser, self.dry = denoiser, dry
        self.signature = inspect.signature(denoiser.forward)
        self.input_name = next(iter(self.signature.parameters))
        self.calls: list[Call] = []
        self.rows: list[int] = []

    def __enter__(self) -> "CallRecorder":
        self.handle = self.denoiser.register_forward_pre_hook(self._record, with_kwargs=True)
        if self.dry:
            # on the instance, where it hides the class's own
            self.denoiser.__dict__["forward"] = self._zeros
        return self

    def __exit__(self, *exception: object) -> None:
        self.handle.remove()
        if self.dry:
            del self.denoiser.__dict__["forward"]

    def _zeros(self, *args: Any, **kwargs: Any) -> tuple[Tensor]:
        return (torch.zeros_like(self.signature.bind(*args, **kwargs).arguments[self.input_name]),)

    def _record(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = dict(self.signature.bind(*args, **kwargs).arguments)
        self.rows.append(len(call.pop(self.input_name)))
        self.calls.append(call)

    def conditions(self, batch: int, steps: int, shared: Collection[str]) -> Conditions:
        """The calls of a finished rollout, sorted by step."""
        per_step = len(self.calls) // steps
        calls = [self.calls[k * per_step : (k + 1) * per_step] for k in range(steps)]
        return Conditions(calls, [rows // batch for rows in self.rows[:per_step]], batch, shared)
