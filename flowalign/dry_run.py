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
from diffusers import DiffusionPipeline
from PIL.Image import Image
from torch import nn

from flowalign.config import Config, Evaluation
from flowalign.data import shipped
from flowalign.errors import ConfigError
from flowalign.policies import DiffusersPolicy
from flowalign.policies.tiny_pipelines import PIPELINES, Tiny, build
from flowalign.sections import Named, Weighted
from flowalign.training import Trainer
from rewards import Scores

FAMILIES = {
    "stabilityai/stable-diffusion-3": "sd35",
    "black-forest-labs/flux.1": "flux",
    "black-forest-labs/flux.1-kontext": "flux_kontext",
    "black-forest-labs/flux.1-fill": "flux_fill",
    "black-forest-labs/flux.2": "flux2",
    "black-forest-labs/flux.2-klein": "flux2_klein",
    "qwen/qwen-image": "qwen_image",
    "qwen/qwen-image-edit": "qwen_image_edit",
    "qwen/qwen-image-edit-2": "qwen_image_edit_plus",
    "tongyi-mai/z-image": "z_image",
    "lodestones/chroma": "chroma",
    "alpha-vllm/lumina-image-2": "lumina2",
    "efficient-large-model/sana": "sana",
    "lightricks/ltx-video": "ltx",
    "lightricks/ltx-2": "ltx2",
    "wan-ai/wan2": "wan",
    "wan-ai/wan2.1-i2v": "wan_i2v",
    "wan-ai/wan2.2-ti2v-5b": "wan22_5b",
    "hunyuanvideo-community/hunyuanvideo-1.5": "hunyuan_video15",
    "hunyuanvideo-community/hunyuanimage": "hunyuan_image",
    "thudm/cogview4": "cogview4",
    "zai-org/cogview4": "cogview4",
    "stabilityai/stable-diffusion-2": "sd2_v",
    "stabilityai/stable-diffusion-xl": "sdxl",
    "stable-diffusion-v1-5/": "sd15",
}
"""beginnings of hub names, in lower case, and the tiny pipeline of the same class; the longest that fits counts"""


@dataclass
class Report:
    """What a dry run did."""

    pipeline: str
    parameters: int
    """of the denoiser, without a LoRA"""
    trained: int
    samples: int
    steps: int
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
            f"{self.pipeline}: {self.parameters / 1e6:.4g}M random weights, {self.trained / 1e6:.4g}M trained",
            f"one iteration of {self.samples} samples of {self.steps} steps: {spent}",
            f"peak memory {self.peak_memory / 2**30:.2f} GiB {where}",
        ]


class Brightness:
    """The reward of a dry run, which needs no weights: the mean of all pixels, in [0, 1].

    Args:
        parts: names to give the same value under, for algorithms that look at a reward's parts.
    """

    name = "brightness"

    def __init__(self, parts: list[str] | None = None) -> None:
        self.parts = parts or []

    def __call__(
        self, images: Sequence[Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> Scores:
        value = torch.tensor([float(np.mean(np.asarray(image))) / 255 for image in images])
        return Scores(value, dict.fromkeys(self.parts, value))


def dry_run(config: Config, full: bool = False) -> Report:
    """Train for one small iteration on random weights.

    The recipe's algorithm, plan, steps, guidance, LoRA, precision and memory settings are kept; the reward is replaced,
    and one group a process is sampled. A tiny pipeline also replaces the pictures' sizes and takes at most 8 members.

    Args:
        full: the recipe's own model, from its configuration files, in the place of a tiny one of its class.

    Raises:
        ConfigError: what is wrong with the recipe, or which files are missing.
    """
    if config.medium != "pictures":
        raise ConfigError("--dry-run builds diffusers pipelines; a language model's recipe has model.kind: text")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        small = _small(config, folder)
        if full:
            pipeline = random_pipeline(config.model.path, getattr(torch, config.model.dtype), device)
        else:
            name = tiny_name(config.model.path)
            tiny, pipeline = PIPELINES[name], build(name)
            if config.model.dtype != "float32":
                pipeline.to(getattr(torch, config.model.dtype))
            small = _of_size(small, tiny)
            if small.rollout.plan.name != "tree":
                small.training.group_size = min(small.training.group_size, 8)
        policy = DiffusersPolicy(pipeline, device, small.model.encode, small.model.attention)
        policy.spare(small.model)
        parameters = sum(p.numel() for p in policy.denoiser.parameters())
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
        type(pipeline).__name__,
        parameters,
        sum(p.numel() for p in policy.trainable().values()),
        small.training.group_size * small.training.prompts_per_iteration,
        small.rollout.steps,
        seconds,
        _peak_memory(device),
        torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
    )


def tiny_name(path: str) -> str:
    """The tiny pipeline that stands for a model: a hub name, a folder, or one shipped with flowalign."""
    local = Path(shipped(path))
    if local.is_dir():
        own = DiffusionPipeline.load_config(str(local))["_class_name"]
        for name in PIPELINES:
            if type(build(name)).__name__ == own:
                return name
        raise ConfigError(f"model.path: no tiny pipeline is of the class {own}; --full builds one from '{path}' itself")
    fitting = [prefix for prefix in FAMILIES if path.lower().startswith(prefix) and FAMILIES[prefix] in PIPELINES]
    if not fitting:
        raise ConfigError(
            f"model.path: which family '{path}' is of cannot be told from its name; with its configuration files in "
            "the hub's cache or in a folder, --full builds it"
        )
    return FAMILIES[max(fitting, key=len)]


def random_pipeline(path: str, dtype: torch.dtype, device: torch.device) -> DiffusionPipeline:
    """A pipeline of random weights from its configuration files alone, in a folder or in the hub's cache."""
    import diffusers
    import transformers

    source = str(shipped(path))
    try:
        index = DiffusionPipeline.load_config(source, local_files_only=True)
        parts: dict[str, Any] = {}
        for name, entry in index.items():
            if name.startswith("_") or not isinstance(entry, list):
                continue
            library, kind = entry
            if library is None:
                parts[name] = None
                continue
            target = getattr(diffusers if library == "diffusers" else transformers, kind)
            if not issubclass(target, nn.Module):
                parts[name] = target.from_pretrained(source, subfolder=name, local_files_only=True)
                continue
            # the denoiser where it is trained, the others where they stay
            with torch.device(device if name in ("transformer", "unet") else "cpu"), _default(dtype):
                if library == "diffusers":
                    parts[name] = target.from_config(target.load_config(source, subfolder=name, local_files_only=True))
                else:
                    own = transformers.AutoConfig.from_pretrained(source, subfolder=name, local_files_only=True)
                    parts[name] = target(own)
    except OSError as error:
        raise ConfigError(
            f"model.path: no configuration files of '{path}' on this machine ({' '.join(str(error).split())}); "
            f"`hf download {path} --exclude '*.safetensors' '*.bin'` fetches them without the weights"
        ) from error
    return getattr(diffusers, index["_class_name"])(**parts)


class _default:
    """Context manager: new floating-point tensors have this dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.own = dtype, torch.get_default_dtype()

    def __enter__(self) -> None:
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *exception: object) -> None:
        torch.set_default_dtype(self.own)


def _small(config: Config, folder: str) -> Config:
    """One iteration of one group a process, with nothing to look at before or after."""
    from flowalign.launch import world_size

    small = config.model_copy(deep=True)
    small.output, small.name, small.trackers = folder, "dry-run", []
    stand_in = "flowalign.dry_run:Brightness"
    parts = list(config.algorithm.settings.get("levels", []))
    reward: dict[str, Any] = {"name": stand_in, "parts": parts}
    if small.rollout.num_frames is not None:
        reward = {"name": "per_frame", "reward": reward, "frames": 2}
    small.rewards = [Weighted.model_validate(reward)]
    small.evaluation = Evaluation()
    small.rollout.overlap = 1
    training = small.training
    training.iterations, training.prompts_per_iteration = 1, world_size()
    training.updates_per_iteration, training.previews = 1, 0
    training.budget = type(training.budget)()
    if "judge" in small.algorithm.settings:
        small.algorithm = Named.model_validate({**small.algorithm.model_dump(), "judge": {"name": stand_in}})
    return small


def _of_size(config: Config, tiny: Tiny) -> Config:
    """The sizes and the encoding of a tiny pipeline."""
    config.model.encode = tiny.encode
    for name, value in tiny.call.items():
        setattr(config.rollout, name, value)
    return config


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    # kilobytes on Linux, bytes on macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
