"""What differs between training on pictures and on text: which policy, which actor, and what is kept to look at."""

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from flowalign.algorithms.base import Algorithm
from flowalign.data import ASSETS, Prompts
from flowalign.policies import DiffusersPolicy
from flowalign.policies.language import LanguagePolicy
from flowalign.training.actor import Actor
from flowalign.training.evaluation import Evaluated
from flowalign.training.metrics import MetricsFile
from flowalign.training.previews import preview
from flowalign.training.text_actor import TextActor
from rewards import Reward


class Pictures:
    """A diffusers pipeline."""

    packages = ("diffusers", "transformers", "peft")

    @staticmethod
    def policy(config: Any, device: torch.device | str) -> DiffusersPolicy:
        """Load the model of a configuration, without anything trainable yet."""
        model = config.model
        return DiffusersPolicy.from_pretrained(shipped(model.path), model.dtype, device, model.encode, model.attention)

    @staticmethod
    def actor(config: Any, policy: Any, reward: Reward, accelerator: Accelerator) -> Actor:
        return Actor(config, policy, reward, accelerator)

    @staticmethod
    def keep(result: Evaluated, folder: Path, config: Any, stride: int) -> None:
        """The main process's first pictures as PNG, with a list of prompts, seeds and scores.

        Args:
            stride: the main process evaluated every n-th picture.
        """
        count = min(config.evaluation.save_pictures, len(result.samples))
        folder.mkdir(parents=True, exist_ok=True)
        lines = MetricsFile(folder / "samples.jsonl")
        lines.path.unlink(missing_ok=True)
        for row in _spread(len(result.samples), count):
            name = f"{row * stride:05d}.png"
            result.samples[row].save(folder / name)
            lines.append({"picture": name, **result.row(row * stride)})

    @staticmethod
    def look(actor: Any, algorithm: Algorithm, config: Any, prompts: Prompts, folder: Path, iteration: int) -> None:
        """Save the film strips and groups of a few prompts for the gallery."""
        preview(actor, algorithm, config, prompts, folder, iteration)


class Texts:
    """A transformers language model."""

    packages = ("transformers", "peft")

    @staticmethod
    def policy(config: Any, device: torch.device | str) -> LanguagePolicy:
        """Load the model of a configuration, without anything trainable yet."""
        model = config.model
        return LanguagePolicy.from_pretrained(
            shipped(model.path), model.dtype, device, padding=model.padding, chat=model.chat, system=model.system
        )

    @staticmethod
    def actor(config: Any, policy: Any, reward: Reward, accelerator: Accelerator) -> TextActor:
        return TextActor(config, policy, reward, accelerator)

    @staticmethod
    def keep(result: Evaluated, folder: Path, config: Any, stride: int) -> None:
        """The main process's texts, spread over the evaluation, with their prompts, seeds and scores."""
        folder.mkdir(parents=True, exist_ok=True)
        lines = MetricsFile(folder / "samples.jsonl")
        lines.path.unlink(missing_ok=True)
        for row in _spread(len(result.samples), min(config.evaluation.save_texts, len(result.samples))):
            lines.append({"text": result.samples[row], **result.row(row * stride)})

    @staticmethod
    def look(actor: Any, algorithm: Algorithm, config: Any, prompts: Prompts, folder: Path, iteration: int) -> None:
        """Nothing more: `keep` has saved the texts."""


MEDIA: dict[str, type[Pictures] | type[Texts]] = {"pictures": Pictures, "text": Texts}


def shipped(path: str) -> Path | str:
    """Where a model is: in flowalign's assets if it has that name, else as given."""
    return ASSETS / path if (ASSETS / path).is_dir() else path


def _spread(total: int, count: int) -> list[int]:
    return torch.linspace(0, total - 1, count).round().int().tolist() if count else []
