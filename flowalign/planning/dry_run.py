"""`flowalign train CONFIG --dry-run`: one rollout and one update of a recipe on random weights, timed."""

import contextlib
import inspect
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor

from flowalign.algorithms.direct.against_reference import AgainstReference
from flowalign.algorithms.trajectory.writers import OWN
from flowalign.config import BaseConfig, Config, EngineSettings, Named, TextConfig, Weighted
from flowalign.config.loader import world_size
from flowalign.data import PromptList
from flowalign.errors import ConfigError
from flowalign.planning.downloads import missing
from flowalign.planning.random_models import (
    is_shipped,
    random_language_model,
    random_pipeline,
    tiny_language_model,
    tiny_name,
)
from flowalign.planning.tiny_pipelines import PIPELINES, build
from flowalign.policies.base import Policy, best_device
from flowalign.policies.diffusion import DiffusersPolicy
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.training import Trainer
from flowalign.training.building import language_policy
from rewards import Scores, Sound, Spec

TINY_TOKENS = 16
"""Tokens that a tiny language model is asked for, at most."""
WRITER = "tiny_rewriter"
"""Shipped language model in the place of one that writes prompts."""
MEMBERS = 8
"""Samples of a group by a tiny model, at most."""
STAND_IN = "flowalign.planning.dry_run:StandIn"
PROMPTS = {"pictures": "objects_train", "text": "sums_train"}
"""Shipped prompts, which replace a hub's data set that is not on this machine."""


@dataclass(kw_only=True)
class Report:
    """Measurements of a dry run."""

    model: str
    """Class of the pipeline or the network."""
    parameters: int
    """Number of the trained parameters, without a LoRA."""
    trained: int
    samples: int
    length: str
    """Length of a sample: denoising steps or tokens."""
    seconds: dict[str, float]
    """Seconds of rollout, update, and all: everything from the built trainer to the exported weights."""
    peak_memory: int
    """Bytes at most: allocated on the GPU, on the CPU resident memory of the whole process."""
    device: str
    missing: list[str]
    """Downloads that the recipe needs from the hub and this machine has not."""
    projected: float | None = None
    """Seconds of the recipe's iterations without its rewards and evaluations, of its own model only."""

    def lines(self) -> list[str]:
        """Lines of text for the terminal."""
        seconds = ", ".join(f"{name} {value:.2f} s" for name, value in self.seconds.items())
        where = "of the process" if self.device in ("cpu", "mps") else f"on {self.device}"
        return [
            f"{self.model}: {self.parameters / 1e6:.4g}M random weights, {self.trained / 1e6:.4g}M trained",
            f"one iteration of {self.samples} samples of {self.length}: {seconds}",
            f"peak memory {self.peak_memory / 2**30:.2f} GiB {where}",
            "the recipe's time: --full projects it from its own model"
            if self.projected is None
            else f"the recipe's iterations here: {self.projected / 3600:.3g} hours, without rewards and evaluations",
            *(f"not on this machine: {name}; flowalign fetch gets it" for name in self.missing),
        ]


class StandIn:
    """The reward of a dry run, which needs no weights, in [0, 1].

    A picture's reward is the mean of all its pixels, a sound's that of its samples, brought from [-1, 1]. A text's
    reward is the number of its different characters, divided by its length, earned in one step.

    Args:
        parts: names to give the same value under, for algorithms that look at a reward's parts.
        compares: say that it needs a reference picture, for algorithms that give one.
    """

    name = "stand_in"

    def __init__(self, parts: list[str] | None = None, compares: bool = False) -> None:
        self.parts, self.compares = parts or [], compares

    @property
    def spec(self) -> Spec:
        needs = {"image", "text"} | ({"reference"} if self.compares else set())
        return Spec(frozenset(needs), differentiable=True)

    def __call__(
        self, samples: Sequence[Image | Sound | str], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> Scores:
        value = torch.tensor([self.value(one) for one in samples])
        ends = [len(one) for one in samples if isinstance(one, str)]
        steps = [[each] for each in zip(ends, value.tolist(), strict=True)] if ends else None
        return Scores(value, dict.fromkeys(self.parts, value), steps)

    def value(self, sample: Image | Sound | str) -> float:
        """The reward of a sample."""
        if isinstance(sample, str):
            return len(set(sample)) / max(len(sample), 1)
        if isinstance(sample, Sound):
            return float(np.mean(sample.waveform)) / 2 + 0.5
        return float(np.mean(np.asarray(sample))) / 255

    def score_pixels(self, pixels: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Scores:
        """Score pictures [B, 3, H, W] or sounds [B, C, T]; see `DifferentiableReward.score_pixels`."""
        mean = pixels.flatten(1).mean(1)
        return Scores(mean / 2 + 0.5 if pixels.dim() == 3 else mean)


def dry_run(config: BaseConfig, full: bool = False) -> Report | None:
    """Train for one small iteration on random weights; where there are several processes, the main one reports.

    The recipe's algorithm, plan, steps, guidance, LoRA, precision and memory settings are kept; rewards and
    teachers are replaced, and so are prompts of the hub that are not on this machine; one group a process is
    sampled. A tiny model also replaces the pictures' sizes, cuts texts at 16 tokens, and takes at most 8 members.

    Args:
        full: build the recipe's own model, from its configuration files, instead of a tiny one of its kind.

    Raises:
        ConfigError: names what is wrong with the recipe, or which files are missing.
    """
    device, lacking = best_device(), missing(config)
    config = at_hand(config, {download.repository for download in lacking if download.part == "data set"})
    config.check(world_size())
    with tempfile.TemporaryDirectory() as folder:
        small = small_config(config, folder, full)
        policy: Policy
        if isinstance(small, TextConfig):
            policy = small_language_model(small, full, device)
            model, length = type(policy.network).__name__, f"at most {small.most_tokens} tokens"
        else:
            assert isinstance(small, Config)
            policy = small_policy(small, full, device)
            networks, anchor = small.algorithm.settings.get("teachers", []), small.algorithm.settings.get("anchor")
            if any(network.get("path") for network in [*networks, anchor or {}]):
                policy.pipeline.save_pretrained(f"{folder}/teacher")
                _replace(small, "teachers", _taught_by(f"{folder}/teacher", networks))
                if anchor:
                    _replace(small, "anchor", _taught_by(f"{folder}/teacher", [anchor])[0])
            model, length = type(policy.pipeline).__name__, f"{small.rollout.steps} steps"
        _replace(small, "judge", {"name": STAND_IN})
        if "teacher" in small.algorithm.settings:
            policy.save(Path(folder) / "teacher")
            _replace(small, "teacher", f"{folder}/teacher")
        parameters = sum(parameter.numel() for parameter in policy.network.parameters())
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        trainer = Trainer(small, policy, progress=False)
        begin = time.perf_counter()
        trainer.train()
        whole = time.perf_counter() - begin
        if not trainer.accelerator.is_main_process:
            return None
        metrics = trainer.metrics.read()[-1]
    return Report(
        model=model,
        parameters=parameters,
        trained=sum(parameter.numel() for parameter in trainer.learner.parameters.values()),
        samples=small.training.group_size * small.training.prompts_per_iteration,
        length=length,
        seconds={"rollout": metrics.get("seconds/rollout", 0.0), "update": metrics["seconds/update"], "all": whole},
        peak_memory=_peak_memory(device),
        device=torch.cuda.get_device_name() if device.type == "cuda" else device.type,
        missing=[f"{download.repository} for {download.needed_by}" for download in lacking],
        projected=_projected(config, small, metrics) if full else None,
    )


def _projected(config: BaseConfig, small: BaseConfig, metrics: Mapping[str, float]) -> float:
    """Seconds of all iterations: the small iteration's, scaled by the number of samples."""
    samples, small_samples = (
        each.training.prompts_per_iteration * each.training.group_size for each in (config, small)
    )
    seconds = metrics.get("seconds/rollout", 0.0) + metrics["seconds/update"]
    return seconds * samples / small_samples * config.training.iterations


def at_hand(config: BaseConfig, lacking: Collection[str]) -> BaseConfig:
    """The configuration with shipped prompts instead of data sets that this machine does not have.

    Methods that learn from files or demonstrations keep theirs, since shipped lists have none.
    """
    config = config.model_copy(deep=True)
    plain = {name: field.get_default(call_default_factory=True) for name, field in PromptList.model_fields.items()}
    plain |= {"prompts": PROMPTS[config.model.kind]}
    if any(one.prompts in lacking for one in (config.data, *config.data.also)):
        # the recipe's selection reads metadata that the shipped prompts do not have
        data = config.data.model_copy(update={**plain, "selection": Named(name="shuffled"), "difficulty": None})
        with contextlib.suppress(ConfigError):
            config.build_algorithm().read(data)
            config.data = data
    if any(one.prompts in lacking for one in (config.evaluation, *config.evaluation.also)):
        config.evaluation = config.evaluation.model_copy(update=plain)
    return config


def small_config(config: BaseConfig, folder: str, full: bool) -> BaseConfig:
    """Reduce a recipe to one iteration with one group per process, a stand-in reward and no evaluation."""
    small = config.model_copy(deep=True)
    small.output, small.name, small.trackers = folder, "dry-run", []
    small.evaluation = type(config.evaluation)()
    options = {
        "parts": list(config.algorithm.settings.get("levels", [])),
        "compares": isinstance(config.build_algorithm(), AgainstReference),
    }
    small.rewards = [Weighted.model_validate({"name": STAND_IN, **options})]
    training = small.training
    training.iterations, training.prompts_per_iteration = 1, world_size()
    training.updates_per_iteration, training.passes, training.previews = 1, 1, 0
    training.budget = type(training.budget)()
    tree = isinstance(config, Config) and config.rollout.plan.name == "tree"
    if not full and not tree:
        training.group_size = min(training.group_size, MEMBERS)
    # iterations that train only another role are skipped, so that the policy's own update is tried too
    for role, settings in small.algorithm.settings.items():
        if isinstance(settings, dict) and "alone" in settings:
            _replace(small, role, settings | {"alone": 0})
    writer = small.algorithm.settings.get("writer")
    if writer is not None and writer["path"] != OWN:
        _replace(small, "writer", writer | {"path": WRITER, "chat": False, "system": None, "max_new_tokens": 4})
    # settings that name single rewards of the recipe, which are not there
    _replace(small, "kl_gate", None)
    if "by" in small.algorithm.settings.get("advantage", {}):
        _replace(small, "advantage", {"name": "grpo"})
    return small


def _replace(config: BaseConfig, key: str, value: object) -> None:
    """Change one of the algorithm's settings, if the recipe sets it."""
    if key in config.algorithm.settings:
        config.algorithm = Named.model_validate(config.algorithm.model_dump() | {key: value})


def _taught_by(folder: str, teachers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Teachers with the pipeline in this folder instead of their own, where they have one."""
    replacement = {"path": folder, "lora": None}
    return [dict(teacher) | (replacement if teacher.get("path") else {}) for teacher in teachers]


def small_policy(small: Config, full: bool, device: torch.device) -> DiffusersPolicy:
    """Build the configuration's pipeline, or a tiny one; in that case its settings are changed to fit."""
    small.rollout.overlap = 1
    small.rollout.workers, small.rollout.engine = None, EngineSettings()
    dtype = getattr(torch, small.model.dtype)
    if full:
        pipeline = random_pipeline(small.model.path, dtype, device)
    else:
        name = tiny_name(small.model.path)
        tiny, pipeline = PIPELINES[name], build(name)
        if dtype != torch.float32:
            pipeline.to(dtype)
        small.model.encode = tiny.encode
        chunks = small.rollout.chunks
        for key, value in tiny.call.items():
            setattr(small.rollout, key, value)
        if "chunks" in tiny.call:
            # the recipe's, since a sample has as many passes; of two frames of latents each
            small.rollout.chunks = chunks
            small.rollout.num_frames = (2 * chunks - 1) * pipeline.vae_scale_factor_temporal + 1
    policy = DiffusersPolicy(pipeline, device, small.model.encode, small.model.attention)
    policy.save_memory(small.model)
    # a recipe may leave the number of frames to the pipeline
    frames = policy.family.renamed.get("num_frames", "num_frames")
    if frames in inspect.signature(policy.pipeline.__call__).parameters:
        (reward,) = small.rewards
        framed = {"name": "per_frame", "reward": {"name": reward.name, **reward.settings}, "frames": 2}
        small.rewards = [Weighted.model_validate(framed)]
        if "sound" in small.algorithm.settings:
            # a modality is taught by rewards that its settings name
            other = {"name": "rescaled", "reward": framed, "low": 0.0, "high": 1.0}
            small.rewards.append(Weighted.model_validate(other))
            _replace(small, "pictures", ["per_frame"])
            _replace(small, "sound", ["rescaled"])
    if policy.family.example and not full:
        # a tiny model does not know the words of classes
        file = Path(small.output) / "prompts.txt"
        file.write_text(policy.family.example + "\n", encoding="utf-8")
        small.data = type(small.data)(prompts=str(file))
    return policy


def small_language_model(small: TextConfig, full: bool, device: torch.device) -> LanguagePolicy:
    """Build the configuration's model, or a tiny one; in that case its settings are changed to fit."""
    kind, settings = language_policy(small)
    dtype = getattr(torch, small.model.dtype)
    if full or is_shipped(small.model.path):
        network, reader = random_language_model(small.model.path, kind, dtype, device)
    else:
        network, reader = tiny_language_model(kind, dtype, device)
        small.rollout.max_new_tokens = min(small.rollout.max_new_tokens, TINY_TOKENS)
    return kind(network, reader, device, **settings)


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    # kilobytes on Linux, bytes on macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
