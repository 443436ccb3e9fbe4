"""A rollout as a file: what a trajectory must hold, whoever sampled it (docs/rollouts.md).

One safetensors file: tensors by the names below, and under 'rollout' in its metadata the JSON of `About`. Reading it
runs nothing, follows no link, and opens no other file.
"""

import hashlib
import json
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field, field_validator
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from flowalign.data.batches import Batch
from flowalign.data.files import unusable
from flowalign.errors import ConfigError, FlowalignError
from flowalign.policies.base import TRAINED
from flowalign.policies.diffusion import DiffusersPolicy, Rollout
from flowalign.policies.diffusion.scales import largest
from flowalign.policies.settings import Sampling
from flowalign.runs.files import sync_folder
from flowalign.runs.foreign import ForeignError, opened
from flowalign.settings import Section, parse
from samplers import KERNELS
from samplers.kernels import Kernel, gaussian_log_prob, traits_of

METADATA = "rollout"
LARGEST_FILE = 2**36
"""Bytes of a file, at most: 64 GiB."""
LARGEST_HEADER = 2**24
"""Bytes of a file's names, shapes and JSON, at most."""
MOST_SAMPLES, MOST_STEPS = 2**16, 10_000
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Number formats that are read; the contract's is float32."""


class Weights(Section):
    """The weights that sampled, by hashes of their values in bfloat16."""

    lora: str | None = None
    """Hash of the trained adapter; null: there is none, or it changes nothing yet."""
    network: str | None = None
    """Hash of all weights of the network where these are trained; null: they are as the model was loaded."""


class About(Section):
    """All that a rollout must say besides its tensors; lists have an entry a sample."""

    format: Literal[1] = 1
    """Number of the format; a change that older versions would misread gets the next number."""
    model: str
    """Class of the pipeline."""
    kernel: str
    """One of `samplers.KERNELS`, which makes a Gaussian of velocity, sigmas and eta."""
    log_prob: Literal["gaussian", "squared_error"]
    """Meaning of a log-probability, a mean over elements: the Gaussian's, or -(next - mean)^2 (`cps_published`)."""
    prompts: list[str]
    negative_prompts: list[str]
    seeds: list[int]
    """Seeds of the start noise, `torch.Generator("cpu").manual_seed(seed)`."""
    noise_seeds: list[int]
    """Seeds of the step noise, drawn from one such generator at each stochastic step in turn."""
    generator: Literal["cpu", "cuda"] = "cpu"
    """Device whose generator drew the noise; cuda: an engine's, which seeds make again on such a device alone."""
    groups: list[int]
    """Numbers of the groups; the samples of a group share a prompt."""
    share_start_noise: bool
    """Whether the samples of a group start from one noise on purpose."""
    guidance: list[float] = Field(min_length=1, max_length=2)
    """Classifier-free scale of each network, or one for all; 1 is without."""
    levels: list[float] | None
    """Noise levels given to the pipeline, before its own shift; null: its scheduler's own."""
    size: dict[str, int]
    """Height, width and num_frames of the samples, as far as they were asked for."""
    iteration: int = Field(ge=0)
    process: int = Field(0, ge=0)
    processes: int = Field(1, ge=1)
    weights: Weights

    @field_validator("kernel")
    @classmethod
    def _known(cls, kernel: str) -> str:
        if kernel not in KERNELS:
            raise ValueError(f"choose from {', '.join(KERNELS)}")
        return kernel

    @field_validator("prompts", "negative_prompts")
    @classmethod
    def _usable(cls, texts: list[str]) -> list[str]:
        problems = [problem for problem in map(unusable, texts) if problem is not None]
        if problems:
            raise ValueError(f"one {problems[0]}")
        return texts

    @field_validator("seeds", "noise_seeds")
    @classmethod
    def _seeds(cls, seeds: list[int]) -> list[int]:
        if any(not 0 <= seed < 2**63 for seed in seeds):
            raise ValueError("seeds are from 0 to 2^63 - 1")
        return seeds

    @field_validator("size")
    @classmethod
    def _small(cls, size: dict[str, int]) -> dict[str, int]:
        if not size.keys() <= {"height", "width", "num_frames"} or any(not 0 < n <= 16_384 for n in size.values()):
            raise ValueError("height, width and num_frames are from 1 to 16,384")
        return size


@dataclass(kw_only=True)
class RolloutFile:
    """The tensors of a rollout file, on the CPU, and what it says of them."""

    about: About
    latents: Tensor
    """[B, T + 1, ...]: the start noise, then the state after each step, float32."""
    log_prob: Tensor
    """[B, T]: 0 at deterministic steps."""
    eta: Tensor
    """[B, T]: noise level of each step; above 0 exactly where a step is stochastic."""
    sigmas: Tensor
    """[T + 1]: noise levels of the states, falling from at most 1 to 0."""
    velocity: Tensor | None = None
    """[B, T, ...]: the guided velocity at each step, noise - picture; None: not kept."""
    nodes: Tensor | None = None
    """[B, T + 1] integers: equal numbers at a depth mark one state, on a path that samples share; None: none do."""

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def describe(rollout: Rollout, batch: Batch, sampling: Sampling, process: int = 0, processes: int = 1) -> RolloutFile:
    """A rollout of a policy as a file holds it.

    Args:
        sampling: settings that it was sampled with.

    Raises:
        FlowalignError: a file cannot describe it.
    """
    problem = undescribed(rollout)
    if problem is not None:
        raise FlowalignError(f"this rollout cannot be written to a file: {problem}; rollout.save_every: 0 works")
    trajectory = rollout.trajectory
    size = {"height": sampling.height, "width": sampling.width, "num_frames": sampling.num_frames}
    about = About(
        model=type(rollout.policy.pipeline).__name__,
        kernel=str(name_of(rollout.kernel)),
        log_prob=convention(rollout.kernel),
        prompts=rollout.prompts,
        negative_prompts=[record.get("negative_prompt", sampling.negative_prompt) for record in batch.metadata],
        seeds=list(batch.seeds),
        noise_seeds=list(batch.noise_seeds),
        generator=rollout.generator,
        groups=list(batch.group),
        share_start_noise=batch.shares_start_noise,
        guidance=[largest(scale) for scale in rollout.guidance],
        levels=sampling.sigmas,
        size={name: side for name, side in size.items() if side is not None},
        iteration=batch.iteration,
        process=process,
        processes=processes,
        weights=identity(rollout.policy),
    )
    tensors = {name: value.cpu() for name, value in trajectory.tensors().items()}
    # an engine sends those of stochastic steps of a few samples alone
    if tensors["velocity"].isnan().any():
        del tensors["velocity"]
    return RolloutFile(about=about, **tensors)


def undescribed(rollout: Rollout) -> str | None:
    """Name what a file has no place for; None: it can describe the rollout."""
    if name_of(rollout.kernel) is None:
        return "its kernel is none of flowalign's own"
    if any(source is not None for source in rollout.sources):
        return "its samples are made from pictures"
    if rollout.sound is not None or rollout.policy.family.makes_sound:
        return "its samples have a sound"
    if any(isinstance(scale, tuple) for scale in rollout.guidance):
        return "its guidance has a scale for each step"
    if rollout.cached or rollout.rlg != 1 or rollout.unmoved is not None:
        return "a feature cache, rlg or a moved start noise took part in it"
    return None


def name_of(kernel: object) -> str | None:
    """The name of one of flowalign's own kernels."""
    return next((name for name, own in KERNELS.items() if own is kernel), None)


def convention(kernel: Kernel) -> Literal["gaussian", "squared_error"]:
    """Meaning of a kernel's log-probabilities."""
    return "gaussian" if traits_of(kernel).log_prob is gaussian_log_prob else "squared_error"


def identity(policy: DiffusersPolicy, whole: bool = False) -> Weights:
    """The weights that a policy has now; all processes of a sharded network call this together.

    Args:
        whole: hash all weights, be they trained or not.
    """
    parameters = dict(policy.network.named_parameters())
    if policy.lora:
        adapter = {name: _whole(value) for name, value in parameters.items() if f".{TRAINED}." in name}
        changes = any(bool(value.any()) for name, value in adapter.items() if "lora_A" not in name)
        return Weights(lora=_hash(adapter.items()) if changes else None)
    trained = any(parameter.requires_grad for parameter in parameters.values())
    return Weights(network=_hash(parameters.items()) if trained or whole else None)


def _whole(value: Tensor) -> Tensor:
    """A weight, gathered where processes have shards of it."""
    value = value.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value


def _hash(parameters: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 of named tensors in bfloat16, which they keep where a model is loaded in another format."""
    digest = hashlib.sha256()
    for name, value in sorted(parameters, key=lambda named: named[0]):
        value = _whole(value)
        digest.update(f"{name} {tuple(value.shape)}".encode())
        digest.update(value.to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def write(path: Path, file: RolloutFile) -> None:
    """Write a rollout; readers see the whole file or none.

    Raises:
        FlowalignError: it cannot be written.
    """
    partial = path.with_name(f".partial-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.unlink(missing_ok=True)
        tensors = {name: value.contiguous() for name, value in file.tensors().items()}
        save_file(tensors, partial, {METADATA: file.about.model_dump_json()})
        partial.chmod(0o644)
        os.replace(partial, path)
        sync_folder(path.parent)
    except (OSError, SafetensorError) as error:
        partial.unlink(missing_ok=True)
        raise FlowalignError(f"{path} cannot be written: {error}; rollout.save_every: 0 works") from error


def read(path: Path) -> RolloutFile:
    """Read a rollout that anybody may have written.

    Raises:
        ConfigError: it is no such file, or too large; what it says may still be wrong, which `checks` finds.
    """
    about = _about(path)
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} is no safetensors file: {str(error)[:200]}") from error
    problem = _unreadable(tensors, about)
    if problem is not None:
        raise ConfigError(f"{path} is no rollout: {problem} (docs/rollouts.md)")
    return RolloutFile(about=about, **tensors)


def _about(path: Path) -> About:
    """The JSON in a file's metadata, read without its tensors."""
    try:
        with opened(path, LARGEST_FILE) as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > LARGEST_HEADER:
                raise ForeignError(f"{path} is no rollout: a header of {length:,} bytes; at most {LARGEST_HEADER:,}")
            header = json.loads(file.read(length))
        values = json.loads(header["__metadata__"][METADATA])
    except (struct.error, ValueError, KeyError, TypeError, RecursionError) as error:
        if isinstance(error, ForeignError):
            raise
        raise ConfigError(f"{path} is no rollout: its metadata have no JSON '{METADATA}' (docs/rollouts.md)") from error
    about: About = parse(About, values, f"{path}: {METADATA}")
    return about


def _unreadable(tensors: Mapping[str, Tensor], about: About) -> str | None:
    """Name the tensor that nothing can be made of; None: all can be looked at."""
    known = {field.name for field in fields(RolloutFile)} - {"about"}
    needed = known - {"velocity", "nodes"}
    if not needed <= tensors.keys() <= known:
        return f"it holds {', '.join(sorted(tensors)) or 'nothing'}; wanted are {', '.join(sorted(needed))}"
    for name, value in tensors.items():
        if value.dtype not in ((torch.int64,) if name == "nodes" else DTYPES):
            return f"'{name}' is {value.dtype}"
    latents = tensors["latents"]
    if latents.dim() < 4 or latents.numel() == 0 or len(latents) > MOST_SAMPLES or latents.shape[1] > MOST_STEPS:
        return f"its latents are {list(latents.shape)}; [samples, steps + 1, channels, ...] is wanted"
    names = ("prompts", "negative_prompts", "seeds", "noise_seeds", "groups")
    lengths = {name: len(getattr(about, name)) for name in names}
    wrong = next((name for name, length in lengths.items() if length != len(about.prompts)), None)
    return f"it has {len(about.prompts)} prompts and {lengths[wrong]} {wrong}" if wrong else None
