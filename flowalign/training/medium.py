"""What differs between training on pictures and on text: which policy, which actor, and what is kept to look at."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from flowalign import registry
from flowalign.actors.diffusion import DiffusionActor
from flowalign.actors.language import LanguageActor
from flowalign.algorithms.base import Algorithm
from flowalign.data import Prompts, shipped
from flowalign.policies import DiffusersPolicy
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.policies.language.turns import AgentPolicy
from flowalign.policies.language.vision_language import VisionLanguagePolicy
from flowalign.policies.rendering import renderer
from flowalign.runs.files import write_atomically
from flowalign.runs.samples import save_samples
from flowalign.training.memory import check_precision
from flowalign.training.previews import preview, preview_texts
from flowalign.training.rewrites import keep_rewrites, preview_rewrites
from rewards import Reward

Listed = list[tuple[Any, dict[str, Any]]]
"""samples, each with its prompt, seed, metadata and scores"""


class Pictures:
    """A diffusers pipeline."""

    packages = ("diffusers", "transformers", "peft")

    @staticmethod
    def policy(config: Any, device: torch.device | str) -> DiffusersPolicy:
        """Load the model of a configuration, without anything trainable yet."""
        model = config.model
        check_precision(model.dtype, torch.device(device))
        policy = DiffusersPolicy.from_pretrained(
            shipped(model.path), model.dtype, device, model.encode, model.attention, model.base_bits
        )
        policy.spare(model)
        return policy

    @staticmethod
    def actor(config: Any, policy: Any, reward: Reward, accelerator: Accelerator) -> DiffusionActor:
        return DiffusionActor(config, policy, reward, accelerator)

    @staticmethod
    def keep(samples: Listed, folder: Path, iteration: int, reward: Reward) -> None:
        """Pictures as PNG, with a list of their prompts, seeds and scores."""
        save_samples(folder, iteration, samples)

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
        check_precision(config.model.dtype, torch.device(device))
        kind, settings = Texts.kind(config)
        return kind.from_pretrained(shipped(config.model.path), config.model.dtype, device, **settings)

    @staticmethod
    def kind(config: Any) -> tuple[type[LanguagePolicy], dict[str, Any]]:
        """The class of policy that a configuration asks for, and its settings."""
        model, taken = config.model, config.environment
        if model.images:
            return VisionLanguagePolicy, {"system": model.system}
        settings = {"padding": model.padding, "chat": model.chat, "system": model.system}
        if taken is None:
            return LanguagePolicy, settings
        environment = registry.resolve("environments", taken.name, "environment")
        made = partial(environment, **registry.check("environments", taken.name, taken.settings, "environment"))
        return AgentPolicy, settings | {"environment": made, "turns": taken.turns}

    @staticmethod
    def actor(config: Any, policy: Any, reward: Reward, accelerator: Accelerator) -> LanguageActor:
        return LanguageActor(config, policy, reward, accelerator)

    @staticmethod
    def keep(samples: Listed, folder: Path, iteration: int, reward: Reward) -> None:
        """Texts with their prompts, seeds and scores, as JSON lines; rewritten prompts with their pictures."""
        drawn = renderer(reward)
        if drawn is not None:
            keep_rewrites(drawn, samples, folder, iteration)
            return
        place = folder / "samples" / f"iteration-{iteration:06d}"
        place.mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps({"text": text, **record}) + "\n" for text, record in samples)
        write_atomically(place / "samples.jsonl", lines)

    @staticmethod
    def look(actor: Any, algorithm: Algorithm, config: Any, prompts: Prompts, folder: Path, iteration: int) -> None:
        """Save the groups of a few prompts for the gallery: token by token, or the pictures made of rewritten ones."""
        drawn = renderer(actor.reward)
        if drawn is None:
            preview_texts(actor, algorithm, config, prompts, folder, iteration)
        else:
            preview_rewrites(drawn, actor, algorithm, config, prompts, folder, iteration)


MEDIA: dict[str, type[Pictures] | type[Texts]] = {"pictures": Pictures, "text": Texts}
