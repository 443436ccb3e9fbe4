"""`flowalign train CONFIG --dry-run`: one rollout and one update of a recipe on random weights, timed."""

import resource
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL.Image import Image

from flowalign.config import Config
from flowalign.config.language import TextConfig
from flowalign.config.loader import world_size
from flowalign.config.sections import BaseConfig, Named, Weighted
from flowalign.policies import DiffusersPolicy
from flowalign.policies.base import Policy
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.tools.random_models import (
    is_shipped,
    random_language_model,
    random_pipeline,
    tiny_language_model,
    tiny_name,
)
from flowalign.tools.tiny_pipelines import PIPELINES, build
from flowalign.training import Trainer
from flowalign.training.medium import Texts
from rewards import Scores, Spec

TINY_TOKENS = 16
"""the most that a tiny language model is asked for"""


@dataclass
class Report:
    """What a dry run did."""

    model: str
    """class of the pipeline or the network"""
    parameters: int
    """of what is trained, without a LoRA"""
    trained: int
    samples: int
    length: str
    """of a sample: denoising steps or tokens"""
    seconds: dict[str, float]
    """rollout, update, and all: everything from the built trainer to the exported weights"""
    peak_memory: int
    """bytes: allocated on the GPU, on the CPU resident memory of the whole process"""
    device: str

    def lines(self) -> list[str]:
        """For people."""
        spent = ", ".join(f"{name} {value:.2f} s" for name, value in self.seconds.items())
        where = "of the process" if self.device == "cpu" else f"on {self.device}"
        return [
            f"{self.model}: {self.parameters / 1e6:.4g}M random weights, {self.trained / 1e6:.4g}M trained",
            f"one iteration of {self.samples} samples of {self.length}: {spent}",
            f"peak memory {self.peak_memory / 2**30:.2f} GiB {where}",
        ]


class Brightness:
    """The reward of a dry run of pictures, which needs no weights: the mean of all pixels, in [0, 1].

    Args:
        parts: names to give the same value under, for algorithms that look at a reward's parts.
    """

    name = "brightness"

    def __init__(self, parts: list[str] | None = None) -> None:
        self.parts = parts or []

    def __call__(
        self, samples: Sequence[Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> Scores:
        value = torch.tensor([float(np.mean(np.asarray(image))) / 255 for image in samples])
        return Scores(value, dict.fromkeys(self.parts, value))


class Variety:
    """The reward of a dry run of texts: the share of characters that are not seen before, one step for the text."""

    name = "variety"
    spec = Spec(frozenset({"text"}))

    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Scores:
        shares = [len(set(text)) / max(len(text), 1) for text in samples]
        steps = [[(len(text), share)] for text, share in zip(samples, shares, strict=True)]
        return Scores(torch.tensor(shares), {}, steps)


def dry_run(config: Any, full: bool = False) -> Report:
    """Train for one small iteration on random weights.

    The recipe's algorithm, plan, steps, guidance, LoRA, precision and memory settings are kept; rewards are replaced,
    and one group a process is sampled. A tiny model also replaces the pictures' sizes, cuts texts at 16 tokens, and
    takes at most 8 members.

    Args:
        config: a `Config` or a `TextConfig`.
        full: the recipe's own model, from its configuration files, in the place of a tiny one of its kind.

    Raises:
        ConfigError: what is wrong with the recipe, or which files are missing.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        small = _small(config, folder)
        policy: Any
        if isinstance(small, TextConfig):
            small, policy = _texts(small, full, device, Path(folder))
            model, length = type(policy.network).__name__, f"at most {small.longest} tokens"
        else:
            small, policy = _pictures(small, full, device)
            model, length = type(policy.pipeline).__name__, f"{small.rollout.steps} steps"
        parameters = sum(p.numel() for p in policy.network.parameters())
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        trainer = Trainer(small, policy, progress=False)
        begin = time.perf_counter()
        trainer.train()
        seconds = {"all": time.perf_counter() - begin}
        metrics = trainer.metrics.read()[-1]
    seconds = {
        "rollout": metrics["seconds/rollout"],
        "update": metrics["seconds/update"],
    } | seconds
    return Report(
        model,
        parameters,
        sum(p.numel() for p in policy.trainable().values()),
        small.training.group_size * small.training.prompts_per_iteration,
        length,
        seconds,
        _peak_memory(device),
        torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
    )


def _small(config: Any, folder: str) -> Any:
    """One iteration of one group a process, with nothing to look at before or after."""
    small: BaseConfig = config.model_copy(deep=True)
    small.output, small.name, small.trackers = folder, "dry-run", []
    small.evaluation = type(config.evaluation)()
    training = small.training
    training.iterations, training.prompts_per_iteration = 1, world_size()
    training.updates_per_iteration, training.previews = 1, 0
    training.budget = type(training.budget)()
    return small


def _pictures(small: Config, full: bool, device: torch.device) -> tuple[Config, Policy]:
    """The configuration with another reward, and its pipeline, or a tiny one and what that can take."""
    stand_in = "flowalign.tools.dry_run:Brightness"
    reward: dict[str, Any] = {"name": stand_in, "parts": list(small.algorithm.settings.get("levels", []))}
    if small.rollout.num_frames is not None:
        reward = {"name": "per_frame", "reward": reward, "frames": 2}
    small.rewards = [Weighted.model_validate(reward)]
    small.rollout.overlap = 1
    if "judge" in small.algorithm.settings:
        small.algorithm = Named.model_validate({**small.algorithm.model_dump(), "judge": {"name": stand_in}})
    dtype = getattr(torch, small.model.dtype)
    if full:
        pipeline = random_pipeline(small.model.path, dtype, device)
    else:
        name = tiny_name(small.model.path)
        tiny, pipeline = PIPELINES[name], build(name)
        if dtype != torch.float32:
            pipeline.to(dtype)
        small.model.encode = tiny.encode
        for key, value in tiny.call.items():
            setattr(small.rollout, key, value)
        if small.rollout.plan.name != "tree":
            small.training.group_size = min(small.training.group_size, 8)
    policy = DiffusersPolicy(pipeline, device, small.model.encode, small.model.attention)
    policy.spare(small.model)
    return small, policy


def _texts(small: TextConfig, full: bool, device: torch.device, folder: Path) -> tuple[TextConfig, Policy]:
    """The configuration with another reward, and its model, or a tiny one and what that can take."""
    small.rewards = [Weighted.model_validate({"name": "flowalign.tools.dry_run:Variety"})]
    small.rollout.engine = "transformers"
    kind, settings = Texts.kind(small)
    dtype = getattr(torch, small.model.dtype)
    if full or is_shipped(small.model.path):
        network, reader = random_language_model(small.model.path, kind, dtype, device)
    else:
        network, reader = tiny_language_model(kind, dtype, device)
        small.rollout.max_new_tokens = min(small.rollout.max_new_tokens, TINY_TOKENS)
    if not full:
        small.training.group_size = min(small.training.group_size, 8)
    policy: LanguagePolicy = kind(network, reader, device, **settings)
    if "teacher" in small.algorithm.settings:
        policy.save(folder / "teacher")
        taught = {**small.algorithm.model_dump(), "teacher": str(folder / "teacher")}
        small.algorithm = Named.model_validate(taught)
    return small, policy


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    # kilobytes on Linux, bytes on macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
