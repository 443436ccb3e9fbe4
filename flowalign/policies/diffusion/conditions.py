"""The arguments a pipeline called its denoiser with, kept so that any step of any sample can be called again."""

import contextlib
import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils._pytree import tree_leaves, tree_map_only

from flowalign.policies.diffusion.experts import Experts
from samplers.stored import Allocate, Stored

Call = dict[str, Any]

GUIDE = "guide"
"""Argument that is true in calls of the pipeline's network for the side of guidance without a prompt."""

EXTRA_INPUT = "extra_input"
"""Argument for the part of the network's input that is not the latents: image latents and masks."""


class Conditions:
    """The arguments of every denoiser call of one rollout, without the latents.

    Pipelines call the denoiser once a step, or once a branch of guidance; guidance by concatenation stacks
    `copies` of the batch in one call. Arguments that stay the same over the steps are kept once. A tensor or list
    with as many rows as the call has samples is taken to have one a sample, in dictionaries too.

    Args:
        calls: [T][C] the arguments of call c of step k.
        copies: how many copies of the batch each of the C calls carries.
        batch: B, the number of samples.
        shared: names of tensor arguments that have no batch axis (positions, say).
    """

    def __init__(
        self,
        calls: list[list[Call]],
        copies: list[int],
        batch: int,
        shared: Collection[str],
    ) -> None:
        self.calls, self.copies, self.batch, self.shared = calls, copies, batch, shared

    @property
    def branches(self) -> int:
        """Network evaluations of one sample at one step: 2 with guidance, where it takes a branch of its own."""
        return sum(self.copies)

    def _per_sample(self, name: str, value: Any, copies: int) -> bool:
        sized = isinstance(value, list) or (isinstance(value, Tensor | Stored) and value.dim() > 0)
        return sized and len(value) == copies * self.batch and name not in self.shared

    def gather(self, samples: Tensor, steps: Tensor, apart: bool = False) -> list[Call]:
        """The C calls for the N pairs (samples[n], steps[n]), each with copies * N rows.

        Args:
            apart: a call of N rows for each copy of the batch.
        """
        gathered = []
        for c, copies in enumerate(self.copies):
            branches = [samples + i * self.batch for i in range(copies)]
            for rows in branches if apart else [torch.cat(branches)]:
                at = steps.repeat(1 if apart else copies)
                names = self.calls[0][c]
                gathered.append({n: self._at(n, [step[c][n] for step in self.calls], copies, rows, at) for n in names})
        return gathered

    def _at(self, name: str, values: list[Any], copies: int, rows: Tensor, steps: Tensor) -> Any:
        """One argument for these rows at these steps.

        Args:
            values: value of each step.
        """
        first = values[0]
        same = all(value is first for value in values)
        if isinstance(first, dict):
            return {key: self._at(key, [v[key] for v in values], copies, rows, steps) for key in first}
        if isinstance(first, Tensor) and first.dim() == 0 and not same:
            return torch.stack(values)[steps.to(first.device)]
        if not self._per_sample(name, first, copies):
            return first
        if isinstance(first, Tensor | Stored):
            return first[rows] if same else torch.stack(values)[steps, rows]
        if same and not isinstance(first[0], Tensor) and all(other == first[0] for other in first):
            # which rows are wanted is known on the device, and the host would wait for it
            return first[:1] * len(rows)
        return [values[k][row] for k, row in zip(steps.tolist(), rows.tolist(), strict=True)]

    def stored(self, allocate: Allocate) -> "Conditions":
        """The same with what the steps share, embeddings above all, on the host."""
        steps = Counter(leaf for call in self.calls for leaf in {id(leaf) for leaf in tree_leaves(call)})

        def moved(values: list[Any], copies: int) -> Any:
            [value] = values
            large = isinstance(value, Tensor) and value.dim() > 1 and steps[id(value)] == len(self.calls)
            return Stored.of(value, allocate) if large else value

        return Conditions(_mapped([self], moved), self.copies, self.batch, self.shared)

    def reads(self, samples: Tensor) -> Iterator[tuple[Stored, tuple[Tensor, ...]]]:
        """What `gather` reads for these samples [N], on the host: each stored argument, and its rows."""
        for call, copies in zip(self.calls[0], self.copies, strict=True):
            for leaf in tree_leaves(call):
                if isinstance(leaf, Stored):
                    yield leaf, (torch.cat([samples + i * self.batch for i in range(copies)]),)

    def conditional(self, unconditional: int) -> "Conditions":
        """Without the branch of guidance that has this number, where there are two."""
        if self.branches == 1:
            return self
        branch = 1 - unconditional
        if len(self.copies) == 2:
            return Conditions([[calls[branch]] for calls in self.calls], [1], self.batch, self.shared)
        rows = slice(branch * self.batch, (branch + 1) * self.batch)
        return Conditions(_mapped([self], lambda values, _: values[0][rows]), [1], self.batch, self.shared)

    def of_steps(self, steps: Sequence[int]) -> "Conditions":
        """The conditions of a rollout of these steps alone."""
        return Conditions([self.calls[k] for k in steps], self.copies, self.batch, self.shared)

    def expert(self, steps: Tensor) -> Tensor:
        """[N] number of the network that the pipeline asked at these steps [N], where it has several."""
        return torch.stack([calls[0]["expert"] for calls in self.calls])[steps.cpu()]

    def __getitem__(self, samples: Tensor) -> "Conditions":
        """The conditions of some samples, [N] indices."""

        def pick(values: list[Any], copies: int) -> Any:
            [value] = values
            if isinstance(value, Stored):
                return value.take(torch.cat([samples + i * self.batch for i in range(copies)]))
            if isinstance(value, Tensor):
                return value.unflatten(0, (copies, -1))[:, samples].flatten(0, 1)
            return [value[i * self.batch + row] for i in range(copies) for row in samples.tolist()]

        return Conditions(_mapped([self], pick), self.copies, len(samples), self.shared)

    @staticmethod
    def cat(parts: Sequence["Conditions"]) -> "Conditions":
        """The conditions of several rollouts of the same schedule as one; token axes grow to the longest."""
        first = parts[0]
        if len(parts) == 1:
            return first

        def join(values: list[Any], copies: int) -> Any:
            if isinstance(values[0], Stored):
                longest = max(v.shape[1] for v in values)
                whole = [(v.padded(longest), len(v) // copies) for v in values]
                return Stored.cat([v.piece(i * n, (i + 1) * n) for i in range(copies) for v, n in whole])
            if isinstance(values[0], Tensor):
                return torch.cat([v.unflatten(0, (copies, -1)) for v in _padded(values)], 1).flatten(0, 1)
            each = [len(value) // copies for value in values]
            return [row for i in range(copies) for v, n in zip(values, each, strict=True) for row in v[i * n :][:n]]

        batch = sum(p.batch for p in parts)
        return Conditions(_mapped(parts, join), first.copies, batch, first.shared)


class Ragged:
    """The conditions of rollouts whose texts cannot be padded to one length: each has network calls of its own.

    Args:
        parts: one for each call of the pipeline.
        owner: [B] the part of each sample.
        row: [B] its place there.
    """

    def __init__(self, parts: list[Conditions], owner: Tensor, row: Tensor) -> None:
        self.parts, self.owner, self.row = parts, owner, row

    @property
    def branches(self) -> int:
        """Network evaluations of one sample at one step."""
        return self.parts[0].branches

    def stored(self, allocate: Allocate) -> "Ragged":
        """The same with what the steps share on the host."""
        return Ragged([conditions.stored(allocate) for conditions in self.parts], self.owner, self.row)

    def reads(self, samples: Tensor) -> Iterator[tuple[Stored, tuple[Tensor, ...]]]:
        """Nothing: which samples have calls of their own is known when they are asked for."""
        return iter(())

    def conditional(self, unconditional: int) -> "Ragged":
        """Without the branch of guidance that has this number, where there are two."""
        return Ragged([conditions.conditional(unconditional) for conditions in self.parts], self.owner, self.row)

    def __getitem__(self, samples: Tensor) -> "Ragged":
        """The conditions of some samples, [N] indices."""
        return Ragged(self.parts, self.owner[samples], self.row[samples])

    @staticmethod
    def cat(parts: Sequence["Ragged"]) -> "Ragged":
        """The conditions of several rollouts of the same schedule as one."""
        starts = [sum(len(p.parts) for p in parts[:i]) for i in range(len(parts))]
        owner = torch.cat([each.owner + start for each, start in zip(parts, starts, strict=True)])
        return Ragged([calls for p in parts for calls in p.parts], owner, torch.cat([each.row for each in parts]))

    def split(self, samples: Tensor) -> Iterator[tuple[Conditions, Tensor, Tensor]]:
        """Each part among [N] samples: itself, the samples' rows [M] in it, and their places [M] among the N."""
        owners = self.owner[samples].tolist()
        for number in sorted(set(owners)):
            members = torch.tensor([row for row, owner in enumerate(owners) if owner == number])
            rows = members.to(samples.device, non_blocking=True)
            yield self.parts[number], self.row[samples[rows]], rows


def _mapped(parts: Sequence[Conditions], function: Callable[[list[Any], int], Any]) -> list[list[Call]]:
    """The calls of several records, per-sample arguments joined by a function of their values and the copies."""
    results: dict[tuple[int, ...], Any] = {}

    def of(name: str, values: list[Any], copies: int) -> Any:
        if isinstance(values[0], dict):
            return {key: of(key, [v[key] for v in values], copies) for key in values[0]}
        if not parts[0]._per_sample(name, values[0], copies):
            return values[0]
        # what the steps share stays shared
        key = tuple(map(id, values))
        if key not in results:
            results[key] = function(values, copies)
        return results[key]

    return [
        [
            {name: of(name, [p.calls[k][c][name] for p in parts], copies) for name in call}
            for c, (call, copies) in enumerate(zip(step, parts[0].copies, strict=True))
        ]
        for k, step in enumerate(parts[0].calls)
    ]


def _padded(values: Sequence[Tensor]) -> list[Tensor]:
    """Tensors [.., L, ..] of different lengths on their second axis, padded with zeros to the longest."""
    if values[0].dim() < 2:
        return list(values)
    longest = max(v.shape[1] for v in values)
    return [pad(v, [0, 0] * (v.dim() - 2) + [0, longest - v.shape[1]]) for v in values]


@contextlib.contextmanager
def standing_in(networks: Sequence[nn.Module], make: Callable[[Any], Any]) -> Iterator[None]:
    """Within it calls of the networks go to what `make` makes of each one's own `forward`."""
    # on the instances, where it hides the class's own
    forwards = [vars(network).get("forward") for network in networks]
    for network in networks:
        vars(network)["forward"] = make(network.forward)
    try:
        yield
    finally:
        for network, forward in zip(networks, forwards, strict=True):
            del vars(network)["forward"]
            if forward is not None:
                vars(network)["forward"] = forward


class CallRecorder:
    """Context manager that writes down every call of a denoiser while a pipeline runs.

    Args:
        dry: answer with zeros in place of the network.
        guide: a network of its own for the side of guidance without a prompt, whose calls are written down too.
    """

    def __init__(self, denoiser: nn.Module, dry: bool = False, guide: nn.Module | None = None) -> None:
        self.denoiser, self.dry, self.guide = denoiser, dry, guide
        self.experts = list(denoiser.members.values()) if isinstance(denoiser, Experts) else [denoiser]
        self.networks = self.experts if guide is None else [*self.experts, guide]
        self.signature = inspect.signature(self.networks[0].forward)
        self.input_name = next(iter(self.signature.parameters))
        self.calls: list[Call] = []
        self.rows: list[int] = []
        self.first_input: Any = None
        """Input of the network in its first call."""

    def __enter__(self) -> "CallRecorder":
        self.handles = [n.register_forward_pre_hook(self._record, with_kwargs=True) for n in self.networks]
        self.standing_in = standing_in(self.networks, lambda own: self._zeros) if self.dry else contextlib.nullcontext()
        self.standing_in.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self.handles:
            handle.remove()
        self.standing_in.__exit__(None, None, None)

    def _zeros(self, *args: object, **kwargs: object) -> Any:
        call = self.signature.bind(*args, **kwargs).arguments
        inputs = [call[name] for name in (self.input_name, "audio_hidden_states") if name in call]
        zeros = [tree_map_only(Tensor, torch.zeros_like, value) for value in inputs]
        config: Any = self.networks[0].config
        if config.get("out_channels") == 2 * config.get("in_channels", 0):
            # of noise and its variance (DiT)
            zeros[0] = torch.cat([zeros[0]] * 2, 1)
        return tuple(zeros) if call.get("return_dict") is False else Transformer2DModelOutput(*zeros)

    def _record(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = dict(self.signature.bind(*args, **kwargs).arguments)
        network_input = call.pop(self.input_name)
        if self.first_input is None:
            self.first_input = network_input
        if len(self.experts) > 1:
            # a number of each step's own
            call["expert"] = torch.tensor(self.experts.index(module))
        if module is self.guide:
            call[GUIDE] = True
        self.rows.append(len(network_input))
        self.calls.append(call)

    def conditions(
        self,
        batch: int,
        steps: int,
        shared: Collection[str],
        kept: Callable[[str, Tensor], Tensor],
        extra: object = None,
        noted: Mapping[str, Any] | None = None,
    ) -> Conditions:
        """The calls of a finished rollout, sorted by step.

        Args:
            shared: as of `Conditions`.
            kept: function of a tensor argument's name and value: what of it is kept.
            extra: the part of the network's input that is not the latents, the same in every call.
            noted: what else every call is to have, as of `Family.noted`.
        """
        for call in self.calls:
            call.update(noted or {})
            if extra is not None:
                call[EXTRA_INPUT] = extra
        # what the steps share stays shared
        distinct = {(name, id(value)): value for call in self.calls for name, value in call.items()}
        of_calls = {key: kept(key[0], v) if isinstance(v, Tensor) else v for key, v in distinct.items()}
        self.calls = [{name: of_calls[name, id(value)] for name, value in call.items()} for call in self.calls]
        per_step = len(self.calls) // steps
        calls = [self.calls[k * per_step : (k + 1) * per_step] for k in range(steps)]
        return Conditions(calls, [rows // batch for rows in self.rows[:per_step]], batch, shared)
