"""Requests and answers of sglang's `POST /rollout/generate` (sglang 0.5.23): JSON there, msgpack back.

An answer is data from a stranger: sizes and formats are checked before anything is made of it, and nothing runs.
"""

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

STATES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Number formats of tensors that are read, by their names in safetensors."""
HEADER = 4096
"""Bytes of the header of a tensor in safetensors, at most."""
SLACK = 2**20
"""Bytes of an answer besides its tensors, at most."""


@dataclass(frozen=True, kw_only=True)
class SampleRequest:
    """A request, and what its answer must hold."""

    content: bytes
    """JSON."""
    prompt: str
    seed: int
    steps: int
    shape: tuple[int, ...]
    """Shape of a state in the pipeline's loop, without the batch."""
    sigmas: Tensor
    """[T + 1] noise levels of the pipeline's schedule."""
    noisy: tuple[int, ...]
    """Numbers of the stochastic steps."""
    debug: bool
    """Whether it asks for the velocities too."""
    picture: int
    """Numbers of a finished picture or video."""

    @property
    def most(self) -> int:
        """Bytes of the answer, at most: float32 states, four tensors of debugging, and the picture twice."""
        state, tensors = 4, self.steps + 1 + (4 * self.steps if self.debug else 0)
        for side in self.shape:
            state *= side
        return tensors * state + 8 * self.picture + SLACK


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A sample of an answer, float32 on the CPU."""

    states: Tensor
    """[T + 1, ...] in the pipeline's loop."""
    log_prob: Tensor
    """[T]"""
    velocity: Tensor | None
    """[T, ...]; None where it was not asked for."""
    seconds: float
    """Seconds that the server needed; 0 where it does not say."""
    rounded: bool
    """Whether all states but the first are numbers of 16 bits."""


def unpack(body: bytes) -> Any:
    """The value of a msgpack message; nothing but plain values, lists, dictionaries with texts as keys, and bytes."""
    import msgpack

    try:
        return msgpack.unpackb(body, raw=False, strict_map_key=True, ext_hook=_no_extension, timestamp=0)
    except (msgpack.exceptions.UnpackException, msgpack.exceptions.ExtraData, UnicodeDecodeError, RecursionError) as e:
        raise ValueError(f"no msgpack ({type(e).__name__})") from e


def _no_extension(code: int, data: bytes) -> Any:
    raise ValueError(f"a msgpack extension {code}")


def read(body: bytes, asked: SampleRequest) -> Drawn:
    """The one sample that was asked for.

    Raises:
        ValueError: it is another one, or its tensors are not as they must be; says which.
    """
    answers = unpack(body)
    if not isinstance(answers, list) or len(answers) != 1 or not isinstance(answers[0], dict):
        number = len(answers) if isinstance(answers, list) else type(answers).__name__
        raise ValueError(f"one sample was asked for, and {number} came")
    answer = answers[0]
    for name, wanted in (("prompt", asked.prompt), ("seed", asked.seed)):
        if answer.get(name) != wanted:
            raise ValueError(f"its {name} is {str(answer.get(name))[:60]!r}, not {str(wanted)[:60]!r}")
    trajectory, steps = _section(answer, "dit_trajectory"), asked.steps
    sigmas = tensor(trajectory, "sigmas", (steps + 1,))
    if float((sigmas - asked.sigmas).abs().max()) > 1e-5:
        from flowalign.rollouts.verify import unlike

        raise ValueError(f"sigmas: {unlike(sigmas, asked.sigmas)}")
    states, kind = _tensor(trajectory, "latents", (steps + 1, *asked.shape))
    log_prob = tensor(answer, "rollout_log_probs", (steps,))
    velocity = None
    if asked.debug:
        debug = _section(answer, "rollout_debug_tensors")
        velocity = tensor(debug, "rollout_model_outputs", (steps, *asked.shape))
    for name, value in (("latents", states), ("rollout_log_probs", log_prob), ("rollout_model_outputs", velocity)):
        if value is not None and not value.isfinite().all():
            raise ValueError(f"{name} has values that are infinite or NaN")
    with_noise = tuple(log_prob.nonzero()[:, 0].tolist())
    if with_noise != asked.noisy:
        raise ValueError(
            f"steps {list(with_noise)} have a log-probability, and {list(asked.noisy)} were to be stochastic: the "
            "engine ignores rollout_sde_type or rollout_sde_step_indices"
        )
    seconds = answer.get("inference_time_s")
    # states are sent in float32 although the loop rounds them to the network's format
    rounded = kind != torch.float32 or any(
        torch.equal(states[1:].to(half).float(), states[1:]) for half in (torch.bfloat16, torch.float16)
    )
    return Drawn(
        states=states,
        log_prob=log_prob,
        velocity=velocity,
        seconds=float(seconds) if isinstance(seconds, int | float) else 0.0,
        rounded=rounded,
    )


def _section(values: Any, name: str) -> Any:
    section = values.get(name)
    if not isinstance(section, dict):
        raise ValueError(f"it has no {name}: the engine ignores that it was asked for")
    return section


def tensor(values: object, name: str, shape: Sequence[int]) -> Tensor:
    """A float32 tensor of this shape among the values of an answer.

    Raises:
        ValueError: it is missing, or of another shape or number format.
    """
    return _tensor(values, name, tuple(shape))[0]


def _tensor(values: Any, name: str, shape: tuple[int, ...]) -> tuple[Tensor, torch.dtype]:
    entry = values.get(name)
    data = entry.get("data") if isinstance(entry, dict) and entry.get("__tensor__") is True else None
    if not isinstance(data, bytes):
        raise ValueError(f"{name} is no tensor; versions of sglang before 0.5.23 are not read")
    kind, found, numbers = _safetensors(data, name)
    if found != shape:
        raise ValueError(f"{name} is {list(found)}, not {list(shape)}")
    return torch.frombuffer(bytearray(numbers), dtype=kind).view(shape).float(), kind


def _safetensors(data: bytes, name: str) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    """Format, shape and numbers of the tensor 't', whose sizes must fit each other."""
    try:
        (length,) = struct.unpack("<Q", data[:8])
        if length > HEADER:
            raise ValueError("a long header")
        entry = json.loads(data[8 : 8 + length])["t"]
        kind, shape = STATES[entry["dtype"]], tuple(entry["shape"])
        sides = all(isinstance(side, int) and 0 < side < 2**20 for side in shape)
    except (struct.error, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{name} is no tensor of {', '.join(STATES)} in safetensors ({type(error).__name__})"
        ) from None
    numbers = data[8 + length :]
    size = kind.itemsize
    for side in shape if sides else ():
        size *= side
    if not sides or len(numbers) != size or entry.get("data_offsets") != [0, size]:
        raise ValueError(f"{name} is {list(shape)} and has {len(numbers)} bytes")
    return kind, shape, numbers
