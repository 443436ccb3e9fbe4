"""What a reward is: a batch of samples in, one value a sample and named parts out."""

import asyncio
import contextlib
import inspect
import logging
import math
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, cast, get_args, runtime_checkable

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor

from rewards.pictures import read_picture
from samplers.rows import Rows

logger = logging.getLogger(__name__)

SLOW = 60.0
"""Seconds after which a reward that has not answered is named on the screen, and again whenever they have doubled."""
NEEDS = frozenset({"image", "text", "prompt", "metadata", "reference", "frames", "latents", "sound"})
Kind = Literal["pointwise", "pairwise", "group", "set"]
Metadata = Sequence[Mapping[str, Any]]
"""Facts about each sample besides its prompt."""
Steps = list[tuple[int, float]]
"""(how many characters of the text it ends after, reward) of each step, in order; a text's last step may say END"""
END = 2**31
"""End of a text, however long."""


@dataclass
class Scores(Rows):
    """Scores of B samples."""

    value: Tensor
    """[B] float32: the reward."""
    parts: dict[str, Tensor] = field(default_factory=dict)
    """Named [B] float32 values for the metrics and the gallery."""
    steps: list[Steps] | None = None
    """Rewards of each text's steps, where a reward knows them; they add up to `value`."""
    weight: Tensor | None = None
    """[B] trust in each value, in [0, 1]: advantages are multiplied by it; None: all alike."""
    replies: list[dict[str, str]] | None = None
    """A judge's text about each sample, by question, to look at."""
    missing: Tensor | None = None
    """[B] bool: samples that the reward says nothing about; their values are 0, and they teach nothing alone."""


@dataclass(frozen=True)
class Spec:
    """Properties of a reward, in its attribute `spec`; a reward without one has these defaults."""

    needs: frozenset[str] = frozenset({"image", "prompt"})
    """Some of "image", "text", "prompt", "metadata", "reference" (a picture or its file in metadata["reference"]),
    "frames", "latents" and "sound". They say what `samples` may hold: pictures ("image"), videos as sequences of
    pictures ("frames"), a language model's texts ("text"), pictures and texts (both), what a VAE would decode
    (`Latents`), or a sound (`Sound`). A reward with several needs gets a `Sample` with all of them."""
    kind: Kind = "pointwise"
    """pointwise: each value depends on its own sample only. group: on the samples of its group (see `groups`), which
    come whole. set: on all samples of the call. pairwise: there is a `compare` instead of a call; `WinRate` makes a
    group reward of it."""
    differentiable: bool = False
    """Whether it has `score_pixels`, so that gradients flow from its value to the pixels."""
    deterministic: bool = True
    """Whether the same samples always get the same values, so that they may be cached."""
    scheduled: bool = False
    """Whether the value changes over training: it has an `advance` that must be told how far training is."""
    off_device: bool = False
    """Whether a server or the CPU computes it, without global random numbers: samples can be drawn meanwhile."""

    def __post_init__(self) -> None:
        needs: Any = self.needs
        if isinstance(needs, str) or not isinstance(needs, set | frozenset | list | tuple):
            raise ValueError(f"a Spec's needs are a set of {', '.join(sorted(NEEDS))}; got {self.needs!r}")
        object.__setattr__(self, "needs", frozenset(self.needs))
        if unknown := self.needs - NEEDS:
            raise ValueError(f"a Spec's needs are of {', '.join(sorted(NEEDS))}; got {sorted(unknown)}")
        if self.kind not in get_args(Kind):
            raise ValueError(f"a Spec's kind is one of {', '.join(get_args(Kind))}; got {self.kind!r}")


PLAIN = Spec()
"""Properties of a reward that says none."""


@dataclass(frozen=True)
class Latents:
    """A finished sample as its model has it, before any VAE; or a batch of them."""

    values: Tensor
    """[C, H, W], or [C, F, H, W] of a video, as the denoiser knows them; of a batch [B, ...]"""
    vae: tuple[Any, ...]
    """Class, scale and shift of the VAE that decodes the latents; another VAE cannot read them."""


def vae_of(vae: Any) -> tuple[Any, ...]:
    """Class, scale and shift of a diffusers VAE, which tell its latents from another's."""
    config = vae.config
    return type(vae).__name__, config.get("scaling_factor"), config.get("shift_factor")


@dataclass(frozen=True)
class Sound:
    """A sound as a sample."""

    waveform: np.ndarray
    """[T], or [C, T] of several channels, in [-1, 1]"""
    rate: int
    """Samples per second."""

    def at(self, rate: int) -> np.ndarray:
        """[T] one channel, their mean, at another rate."""
        from scipy.signal import resample_poly

        mono = self.waveform if self.waveform.ndim == 1 else self.waveform.mean(axis=0)
        common = math.gcd(rate, self.rate)
        resampled: np.ndarray = resample_poly(mono, rate // common, self.rate // common).astype(np.float32)
        return resampled


@dataclass(frozen=True)
class Sample:
    """A sample from several sides, for rewards that need more of it than people see."""

    picture: Any = None
    """A picture, or a video as a sequence of them; None where no reward needs it."""
    latents: Latents | None = None
    sound: Sound | None = None


def seen(sample: object) -> Any:
    """A sample's visible part: its picture, video or text."""
    return sample.picture if isinstance(sample, Sample) else sample


def sides(needs: Collection[str]) -> list[str]:
    """Fields of a `Sample` that a reward with these needs gets."""
    latents_or_sound = [side for side in ("latents", "sound") if side in needs]
    return latents_or_sound + (["picture"] if not latents_or_sound or {"image", "frames"} & set(needs) else [])


class NamedReward(Protocol):
    """What rewards of all kinds have in common."""

    name: str


class Reward(Protocol):
    """A reward of pictures, videos or texts. `as_reward` makes one of any function (samples, prompts) -> floats."""

    name: str

    def __call__(self, samples: Sequence[Any], prompts: Sequence[str], metadata: Metadata) -> Scores: ...


@runtime_checkable
class DifferentiableReward(Protocol):
    """A reward that can also be asked for a value with a gradient."""

    name: str

    def score_pixels(self, pixels: Tensor, prompts: Sequence[str], metadata: Metadata) -> Scores:
        """Scores of pictures [B, 3, H, W] in [0, 1], on their device; `value` carries the gradient.

        A reward that needs "frames" gets videos [B, 3, F, H, W]; of a model of sounds it gets [B, C, T] in [-1, 1].
        """


@runtime_checkable
class LatentReward(Protocol):
    """A reward of latents with a gradient: no VAE between it and the denoiser."""

    name: str

    def score_latents(self, latents: Latents, prompts: Sequence[str], metadata: Metadata) -> Scores:
        """Scores of a batch of finished latents [B, ...]; `value` carries the gradient."""


@runtime_checkable
class SetReward(Protocol):
    """A reward of kind "set" that looks at vectors of the pictures, so that subsets of them cost no network call."""

    name: str

    def features(self, samples: Sequence[Any]) -> Tensor:
        """[B, D] of B pictures."""

    def of_set(self, features: Tensor) -> float:
        """The score of a set, of its [N, D]."""


@dataclass(frozen=True)
class Region:
    """A box of a picture and what it is worth."""

    box: list[float]
    """Left, top, right and bottom, in shares of the picture's sides."""
    reward: float
    """Reward in [-1, 1]."""


@runtime_checkable
class RegionReward(Protocol):
    """A reward that also says where in a picture it is earned."""

    name: str

    def regions(self, samples: Sequence[Any], prompts: Sequence[str], metadata: Metadata) -> list[list[Region]]:
        """Boxes of each of B pictures; where several overlap, the last counts."""


@runtime_checkable
class LearningReward(Protocol):
    """A reward that goes on learning during a run, from the samples of each iteration.

    It scores an iteration as it is, and learns afterwards. Of several processes the first learns from all samples, and
    the others take its state over; the state is in the run's checkpoints.
    """

    name: str

    def learn(self, samples: Sequence[Any], prompts: Sequence[str], metadata: Metadata) -> dict[str, float]:
        """Learn from the samples of an iteration, of all processes; return figures for the metrics."""

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What it has learned: tensors, and JSON."""

    def load_state(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """The inverse of `state`."""


def learning(reward: object) -> list[LearningReward]:
    """The rewards that learn, in a reward and the rewards that it is made of."""
    found = [reward] if isinstance(reward, LearningReward) else []
    inner = [*getattr(reward, "rewards", []), *(getattr(reward, name, None) for name in ("reward", "outcome"))]
    return found + [each for part in inner if part is not None for each in learning(part)]


class PairwiseReward(Protocol):
    """A reward that compares two samples of one prompt."""

    name: str

    def compare(
        self,
        first: Sequence[Any],
        second: Sequence[Any],
        prompts: Sequence[str],
        metadata: Metadata,
    ) -> Scores:
        """The probability that `first` is better, in [0, 1]; 0.5 is a tie.

        Parts are probabilities of the same kind, NaN where there is none; `unparsed` is 1 where a verdict could not be
        read, else 0.
        """


class RewardError(Exception):
    """A reward cannot be asked, or its answer not learned from; the message names the reward and the prompt."""


class UnreadReplies(RewardError):
    """Too few of a judge's replies can be read; they may be enough where more samples are scored together."""


class RewardFailed(RewardError):
    """A reward's own code failed; the message says where."""


class FunctionReward:
    """A plain function as a reward, also an `async def`, as TRL takes them.

    Args:
        function: (samples, prompts) -> one float a sample, or None where the reward does not apply: then a sum is of
            the other rewards. A third parameter, if it has one, gets the metadata.
        name: for metrics and messages; default the function's own.
    """

    def __init__(self, function: Callable[..., Sequence[float]], name: str | None = None) -> None:
        self.function = function
        self.name = name or str(getattr(function, "__name__", type(function).__name__))
        try:
            self.takes_metadata = len(inspect.signature(function).parameters) > 2
        except ValueError:  # of some functions written in C nothing is known
            self.takes_metadata = False
        needs = frozenset({"image", "text", "prompt"} | ({"metadata"} if self.takes_metadata else set()))
        self.spec = Spec(needs, off_device=self.asynchronous)

    def __call__(self, samples: Sequence[Any], prompts: Sequence[str], metadata: Metadata) -> Scores:
        values: Any = self.function(samples, prompts, *([metadata] if self.takes_metadata else []))
        if inspect.iscoroutine(values):
            # in a thread, since a notebook has a loop of its own under way
            with ThreadPoolExecutor(1) as pool:
                values = pool.submit(asyncio.run, values).result()
        if not isinstance(values, list | tuple):
            return Scores(column(self.name, "values", values, len(samples)))
        missing = torch.tensor([value is None for value in values])
        given = [0.0 if value is None else value for value in values]
        return Scores(column(self.name, "values", given, len(samples)), missing=missing)

    @property
    def asynchronous(self) -> bool:
        """Whether it waits without working, so that several may be asked at once."""
        return inspect.iscoroutinefunction(self.function)


UNPARSED = "unparsed"
"""Name of the part that is 1 where a judge's verdict could not be read."""


def as_reward(reward: Reward | Callable[..., Sequence[float]]) -> Reward:
    """A reward as it is, a plain function wrapped."""
    if isinstance(getattr(reward, "name", None), str):
        return cast(Reward, reward)
    return FunctionReward(cast(Callable[..., Sequence[float]], reward))


def spec_of(reward: NamedReward) -> Spec:
    """Properties of a reward.

    Raises:
        RewardError: its `spec` is no Spec.
    """
    spec = getattr(reward, "spec", PLAIN)
    if not isinstance(spec, Spec):
        raise RewardError(f"reward '{reward.name}': its `spec` must be a rewards.Spec (got {_short(spec)})")
    return spec


def advance(reward: object, progress: float) -> None:
    """Tell a reward how far training is, in [0, 1]; rewards without a schedule do not mind."""
    if hasattr(reward, "advance"):
        reward.advance(progress)


def bind(reward: object, model: Any) -> None:
    """Hand the language model in training to a reward that asks it; others do not mind.

    Args:
        model: a `rewards.text.model.CausalModel`.
    """
    if hasattr(reward, "bind"):
        reward.bind(model)


class Around:
    """Base of a reward around another, `reward`: what it is told, it passes on."""

    reward: Any

    def advance(self, progress: float) -> None:
        """Pass on how far training is, in [0, 1]."""
        advance(self.reward, progress)

    def bind(self, model: Any) -> None:
        """Pass on the language model in training."""
        bind(self.reward, model)


class AroundSeveral:
    """Base of a reward around several, `rewards`: what it is told, it passes on."""

    rewards: Sequence[Any]

    def advance(self, progress: float) -> None:
        """Tell the rewards inside how far training is, in [0, 1]."""
        for reward in self.rewards:
            advance(reward, progress)

    def bind(self, model: object) -> None:
        """Hand the language model in training to those inside that ask it."""
        for reward in self.rewards:
            bind(reward, model)


def one_line(error: BaseException) -> str:
    """An error of somebody's code in one line, with its place."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {' '.join(str(error).split())} ({where.filename}, line {where.lineno})"


def score(reward: Reward, samples: Sequence[Any], prompts: Sequence[str], metadata: Metadata) -> Scores:
    """Call a reward and check its answer; what it does to its copies of samples, prompts and metadata stays its own.

    Returns:
        its scores as float32 on the CPU, without a gradient.

    Raises:
        RewardError: a sample lacks what the reward needs, an answer of a wrong type or number, NaN or infinity; names
            the reward and the prompt. `RewardFailed` where the reward's own code failed.
    """
    samples = handed(reward, samples, prompts)
    _check_needs(reward, samples, prompts, metadata)
    with asking(reward, prompts):
        scores = reward(*_copies(samples, metadata, prompts))
    scores = checked(reward.name, scores, len(samples), prompts[0] if prompts else "")
    for value, prompt in zip(scores.value.tolist(), prompts, strict=True):
        if not math.isfinite(value):
            raise RewardError(f"reward '{reward.name}' returned {value} for the prompt {prompt!r}")
    return scores


def compare(
    reward: PairwiseReward, first: Sequence[Any], second: Sequence[Any], prompts: Sequence[str], metadata: Metadata
) -> Scores:
    """Ask a reward about pairs and check its answer, as `score` does.

    Raises:
        RewardError: as `score`, and values outside [0, 1].
    """
    first, second = (handed(reward, side, prompts) for side in (first, second))
    with asking(reward, prompts):
        both, copied, records = _copies([*first, *second], metadata, prompts)
        scores = reward.compare(both[: len(first)], both[len(first) :], copied, records)
    scores = checked(reward.name, scores, len(first), prompts[0])
    for value, prompt in zip(scores.value.tolist(), prompts, strict=True):
        if not 0 <= value <= 1:
            raise RewardError(
                f"reward '{reward.name}' returned {value} for the prompt {prompt!r}; a comparison is worth 0 to 1"
            )
    return scores


def handed(reward: NamedReward, samples: Sequence[Any], prompts: Sequence[str]) -> Sequence[Any]:
    """The one field of each `Sample` that a reward needs; the whole where it needs several; other samples unchanged.

    Raises:
        RewardError: a sample lacks a side.
    """
    wanted = sides(spec_of(reward).needs)
    for sample, prompt in zip(samples, prompts, strict=True):
        for side in wanted:
            if isinstance(sample, Sample) and getattr(sample, side) is None:
                raise RewardError(
                    f"reward '{reward.name}' needs the {side} of a sample, of which the one for the prompt "
                    f"{prompt!r} has none"
                )
            if side != "picture" and not isinstance(sample, Sample | Latents | Sound):
                raise RewardError(
                    f"reward '{reward.name}' scores {side}, but got a {type(sample).__name__} for the prompt {prompt!r}"
                )
    if len(wanted) > 1:
        return samples
    return [getattr(sample, wanted[0]) if isinstance(sample, Sample) else sample for sample in samples]


@contextlib.contextmanager
def asking(reward: NamedReward, prompts: Sequence[str]) -> Iterator[None]:
    """Around a call of a reward: what fails is its own fault, and one that takes long is named in a warning.

    Raises:
        RewardFailed: its code failed, or left the program.
    """
    first = repr(prompts[0]) if prompts else "none"
    within, done = _scoring.__dict__.setdefault("rewards", []), threading.Event()
    within.append(reward)
    depth = len(within)

    def watch(seconds: float) -> None:
        waited = 0.0
        while not done.wait(seconds - waited):
            waited, seconds = seconds, 2 * seconds
            # of rewards within rewards the innermost is the one to blame
            if len(within) == depth:
                logger.warning("reward '%s' has not answered for %g s (first prompt: %s)", reward.name, waited, first)

    threading.Thread(target=watch, args=(SLOW,), name="watch", daemon=True).start()
    try:
        yield
    except RewardError:
        raise
    except (Exception, SystemExit) as error:
        raise RewardFailed(f"reward '{reward.name}' failed: {one_line(error)}; first prompt: {first}") from error
    finally:
        done.set()
        within.pop()


_scoring = threading.local()
"""`rewards`: the rewards that score in this thread, outermost first."""


def checked(name: str, scores: object, count: int, first: str) -> Scores:
    """A reward's answer about `count` samples as float32 on the CPU; NaN in a part says it does not apply.

    Raises:
        RewardError: what is wrong with it.
    """
    if not isinstance(scores, Scores):
        raise RewardError(f"reward '{name}' must return rewards.Scores (got {_short(scores)})")
    try:
        value = column(name, "values", scores.value, count)
        if not isinstance(scores.parts, Mapping):
            raise RewardError(f"reward '{name}': its parts must be a dict of [{count}] (got {_short(scores.parts)})")
        columns = {}
        for label, values in scores.parts.items():
            if not isinstance(label, str):
                raise RewardError(f"reward '{name}': the name of a part must be a text (got {_short(label)})")
            columns[label] = column(name, f"values of the part '{label}'", values, count)
            if columns[label].isinf().any():
                raise RewardError(f"reward '{name}': its part '{label}' is infinite")
        weight = None if scores.weight is None else column(name, "weights", scores.weight, count)
    except RewardError as error:
        raise RewardError(f"{error} (first prompt: {first!r})") from error
    if weight is not None and not ((weight >= 0) & (weight <= 1)).all():
        raise RewardError(f"reward '{name}': its weights must be in [0, 1] (got {weight.tolist()[:8]})")
    if scores.steps is not None and not _are_steps(scores.steps, count):
        raise RewardError(
            f"reward '{name}': its steps must be a list of (end, reward) for each of {count} samples "
            f"(got {_short(scores.steps)})"
        )
    return Scores(value, columns, scores.steps, weight, scores.replies, scores.missing)


def column(name: str, what: str, values: object, count: int) -> Tensor:
    """Numbers of a reward as float32 [count] on the CPU, without a gradient.

    Raises:
        RewardError: no numbers, or not one a sample.
    """
    try:
        tensor = torch.as_tensor(values)
        if tensor.is_complex():
            raise TypeError
        tensor = tensor.detach().to("cpu", torch.float32)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RewardError(f"reward '{name}' returned no numbers as {what}: {_short(values)}") from error
    if tensor.ndim == 1 and len(tensor) != count:
        raise RewardError(f"reward '{name}' returned {len(tensor)} {what} for {count} samples")
    if tensor.shape != (count,):
        raise RewardError(
            f"reward '{name}' returned {what} of shape {list(tensor.shape)} for {count} samples; it must be [{count}]"
        )
    return tensor


def _are_steps(steps: Any, count: int) -> bool:
    try:
        return len(steps) == count and all(
            math.isfinite(value) and int(end) == end for row in steps for end, value in row
        )
    except (TypeError, ValueError):
        return False


def _copies(samples: Sequence[Any], metadata: Metadata, prompts: Sequence[str]) -> tuple[list[Any], list[str], Any]:
    """Samples, prompts and metadata of a reward's own; the same picture stays one picture."""
    copies: dict[int, Image] = {}
    records = [{key: _own(value, copies) for key, value in record.items()} for record in metadata]
    return [_own(sample, copies) for sample in samples], list(prompts), records


def _own(value: object, made: dict[int, Image]) -> Any:
    """A value whose pictures are copies; `made` has those made so far by the id of the first."""
    if isinstance(value, Image):
        if id(value) not in made:
            made[id(value)] = value.copy()
        return made[id(value)]
    return [_own(item, made) for item in value] if isinstance(value, list | tuple) else value


def _short(value: object) -> str:
    """A value in a few words of one line."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:80]}..."


def _check_needs(reward: Reward, samples: Sequence[Any], prompts: Sequence[str], metadata: Metadata) -> None:
    spec = spec_of(reward)
    if spec.kind == "pairwise":
        raise RewardError(f"reward '{reward.name}' compares pairs; wrap it in 'win_rate' to get one value a sample")
    for sample, prompt, record in zip(samples, prompts, metadata, strict=True):
        if isinstance(sample, str) != ("text" in spec.needs) and not {"text", "image"} <= spec.needs:
            needed, got = ("texts", "picture") if "text" in spec.needs else ("pictures", "text")
            raise RewardError(f"reward '{reward.name}' scores {needed}, but got a {got} for the prompt {prompt!r}")
        if isinstance(sample, Sound) and not ("sound" in spec.needs or {"text", "image"} <= spec.needs):
            raise RewardError(f"reward '{reward.name}' scores pictures, but got a sound for the prompt {prompt!r}")
        if isinstance(sample, str | Sound | Sample):
            # the rewards that a whole sample is for check each its own side
            continue
        if "frames" in spec.needs and isinstance(sample, Image):
            raise RewardError(f"reward '{reward.name}' needs frames, but got a picture for the prompt {prompt!r}")
        if "frames" not in spec.needs and "image" in spec.needs and not isinstance(sample, Image):
            raise RewardError(
                f"reward '{reward.name}' scores pictures, but got a {type(sample).__name__} for the prompt {prompt!r}; "
                "'per_frame' applies it to the frames of a video"
            )
        if "reference" in spec.needs and "reference" not in record:
            raise RewardError(
                f"reward '{reward.name}' needs a reference picture; the metadata of the prompt {prompt!r} has no "
                "'reference' (a picture or its file)"
            )


def groups(prompts: Sequence[str], metadata: Metadata) -> list[list[int]]:
    """The samples of each group, in order of appearance.

    The members of a group share their prompt; where one prompt makes several groups, metadata["group"] tells them
    apart.
    """
    members: dict[Any, list[int]] = {}
    for i, (prompt, record) in enumerate(zip(prompts, metadata, strict=True)):
        members.setdefault((prompt, record.get("group")), []).append(i)
    return list(members.values())


def source_images(metadata: Metadata) -> list[list[Image]]:
    """The pictures each sample was made from, as they are in their files: metadata["image"], one or several."""
    given = [record["image"] if isinstance(record["image"], list | tuple) else [record["image"]] for record in metadata]
    return [[source if isinstance(source, Image) else read_picture(source) for source in row] for row in given]


def reference_images(metadata: Metadata) -> list[Image]:
    """The reference picture of each sample: metadata["reference"], a picture or its file."""
    references = [record["reference"] for record in metadata]
    return [r if isinstance(r, Image) else read_picture(r) for r in references]
