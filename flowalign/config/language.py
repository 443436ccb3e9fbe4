"""The configuration of a run that trains a language model: `model.kind` is 'text'."""

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from flowalign import registry
from flowalign.config.engines import HERE
from flowalign.config.method import Method
from flowalign.config.sections import BaseConfig, Heldout, Named, Rollouts
from flowalign.data import Prompts
from flowalign.data.messages import MESSAGES
from flowalign.errors import ConfigError
from flowalign.policies.settings import TextModel, TextSampling


class TextRollouts(TextSampling, Rollouts):
    engine_memory: float = Field(0.3, gt=0, lt=1)
    """Share of the GPU's memory for vLLM."""


class Turns(Named):
    """Environment that the model takes turns with, in rollouts and evaluations; further keys are its settings."""

    turns: int = Field(8, ge=1)
    """Number of turns after which an episode is over."""


class TextEvaluation(TextSampling, Heldout):
    save_samples: int = Field(64, ge=0)


class TextConfig(BaseConfig):
    """Configuration of a run that trains a language model."""

    model: TextModel
    environment: Turns | None = None
    """Environment (`flowalign list environments`); a dotted path names your own."""
    rollout: TextRollouts = TextRollouts()
    evaluation: TextEvaluation = TextEvaluation()

    @model_validator(mode="after")
    def _evaluate_as_sampled(self) -> Self:
        """Fill settings that evaluation leaves out from the rollout."""
        self.evaluation = self.evaluation.following(self.rollout)
        return self

    @property
    def most_tokens(self) -> int:
        """Most tokens of a sample, over all its turns."""
        turns = 1 if self.environment is None else self.environment.turns
        return self.rollout.max_new_tokens * turns

    def check_prompts(self, prompts: Prompts) -> None:
        if any(MESSAGES in record for record in prompts.metadata) and (not self.model.chat or self.model.images):
            works = "texts work with model.images" if self.model.images else "model.chat=true takes them"
            raise ConfigError(f"data.prompts: a prompt is a list of messages; {works}")

    def check_sampling(self, groups: int, algorithm: Method) -> None:
        if self.rollout.temperature == 0:
            raise ConfigError("rollout.temperature: at 0 the members of a group are alike; 1.0 works")
        if self.model.images and self.model.padding != "left":
            raise ConfigError("model.padding: prompts with pictures are padded on the left; model.padding=left works")
        if self.model.images and self.data.replay is not None:
            raise ConfigError("data.replay: groups are kept without the pictures their prompts show; null works")
        if self.environment is not None:
            registry.check("environments", self.environment.name, self.environment.settings, "environment")
            if self.model.images:
                raise ConfigError("environment: turns are taken with texts alone; model.images=false works")
            if self.rollout.engine.name != HERE:
                raise ConfigError("environment: turns are sampled by transformers; rollout.engine=trainside works")
        for name, sampling in (("rollout", self.rollout), ("evaluation", self.evaluation)):
            if sampling.continuous_batching and self.model.images:
                raise ConfigError(f"{name}.continuous_batching: works without pictures; false works")
        if self.rollout.continuous_batching and self.rollout.engine.name != HERE:
            raise ConfigError("rollout.continuous_batching: works by transformers, not by servers; false works")
        if self.rollout.engine.inside:
            if self.model.images:
                raise ConfigError("rollout.engine: vllm is given texts alone; transformers works with model.images")
            from flowalign.policies.language.vllm import require_vllm

            require_vllm()
        model = self.model
        self._check_draws()
        self._check_diffusion()
        for name in ("system", "chat_template", "chat_template_kwargs"):
            if getattr(model, name) and not (model.chat or model.images):
                raise ConfigError(f"model.{name}: only a chat has one; model.chat=true works")
        if model.chat_template is not None and not Path(model.chat_template).is_file():
            raise ConfigError(f"model.chat_template: no file at '{model.chat_template}'")

    def _check_draws(self) -> None:
        """Refuse what a model that writes and draws cannot do."""
        model = self.model
        if model.draws is None:
            return
        cannot = {
            "model.images": (model.images, "it is shown no pictures; false"),
            "model.chat": (model.chat, "its prompts are no chat; false"),
            "model.padding": (model.padding != "left", "prompts are padded on the left; left"),
            "environment": (self.environment is not None, "it takes no turns; null"),
            "rollout.engine": (self.rollout.engine.name != HERE, "transformers alone draws with guidance; trainside"),
            "rollout.repetition_penalty": (self.rollout.repetition_penalty != 1, "pictures repeat tokens; 1.0"),
        }
        for name, (given, why) in cannot.items():
            if given:
                raise ConfigError(f"{name}: with model.draws {why} works")

    def _check_diffusion(self) -> None:
        """Refuse what a model that opens masks cannot do."""
        model = self.model
        if model.diffusion is None:
            return
        cannot = {
            "model.images": (model.images, "it is shown no pictures; false"),
            "model.draws": (model.draws is not None, "it draws no pictures; null"),
            "model.padding": (model.padding != "left", "prompts are padded on the left; left"),
            "environment": (self.environment is not None, "it takes no turns; null"),
            "rollout.engine": (self.rollout.engine.name != HERE, "no server opens masks; trainside"),
            "rollout.repetition_penalty": (self.rollout.repetition_penalty != 1, "no token comes before; 1.0"),
            "rollout.continuous_batching": (self.rollout.continuous_batching, "all texts take as many steps; false"),
        }
        for name, (given, why) in cannot.items():
            if given:
                raise ConfigError(f"{name}: with model.diffusion {why} works")
