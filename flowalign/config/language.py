"""The configuration of a run that trains a language model: `model.kind` is 'text'."""

from typing import Any, Literal

from pydantic import Field

from flowalign import registry
from flowalign.config.sections import BaseConfig, Heldout, Named, Network, Section
from flowalign.errors import ConfigError


class TextModel(Network):
    kind: Literal["text"]
    path: str
    """a folder, a hub name of a causal language model, or 'tiny_lm', which is shipped with flowalign"""
    padding: Literal["left", "right"] = "left"
    """side of the padding when log-probabilities are computed; sampling always pads on the left"""
    chat: bool = False
    """prompts are a user's turn, put into the tokenizer's chat template"""
    system: str | None = None
    """the system's turn before it"""
    images: bool = False
    """an image-text-to-text model: a prompt is a user's turn that shows the pictures under 'image' in its metadata"""


class TextSampling(Section):
    max_new_tokens: int = Field(256, ge=1)
    """where a text without an end is cut; with an environment, a turn"""
    temperature: float = Field(1.0, ge=0)
    """0 takes the most probable token"""
    batch_size: int = Field(64, ge=1)
    """texts a network call, each process"""

    def arguments(self) -> dict[str, Any]:
        """As keyword arguments of `LanguagePolicy.sample`."""
        return {key: getattr(self, key) for key in ("max_new_tokens", "temperature", "batch_size")}


class TextRollouts(TextSampling):
    engine: Literal["transformers", "vllm"] = "transformers"
    """what samples: the model's own generate, or vLLM (extra `vllm`; with algorithm.off_policy; never run here)"""
    engine_memory: float = Field(0.3, gt=0, lt=1)
    """share of the GPU's memory for vLLM"""


class Turns(Named):
    """What the model takes turns with, in rollouts and evaluations; further keys are the environment's own settings."""

    turns: int = Field(8, ge=1)
    """after which an episode is over"""


class TextEvaluation(TextSampling, Heldout):
    texts_per_prompt: int = Field(1, ge=1)
    save_texts: int = Field(64, ge=0)

    @property
    def per_prompt(self) -> int:
        return self.texts_per_prompt

    @property
    def saved(self) -> int:
        return self.save_texts


class TextConfig(BaseConfig):
    """Of a language model."""

    medium = "text"
    model: TextModel
    environment: Turns | None = None
    """`flowalign list environments`; a dotted path names your own"""
    rollout: TextRollouts = TextRollouts()
    evaluation: TextEvaluation = TextEvaluation()

    @property
    def longest(self) -> int:
        """Tokens that a sample may have, at most."""
        turns = 1 if self.environment is None else self.environment.turns
        return self.rollout.max_new_tokens * turns

    def check_sampling(self, groups: int, algorithm: Any) -> None:
        if self.rollout.temperature == 0:
            raise ConfigError("rollout.temperature: at 0 the members of a group are alike; 1.0 works")
        if self.model.images and self.model.padding == "right":
            raise ConfigError("model.padding: prompts with pictures are padded on the left; model.padding=left works")
        if self.model.images and self.data.replay is not None:
            raise ConfigError("data.replay: groups are kept without the pictures their prompts show; null works")
        if self.environment is not None:
            registry.check("environments", self.environment.name, self.environment.settings, "environment")
            if self.model.images:
                raise ConfigError("environment: turns are taken with texts alone; model.images=false works")
            if self.rollout.engine == "vllm":
                raise ConfigError("environment: turns are sampled by transformers; rollout.engine=transformers works")
        if self.rollout.engine == "vllm":
            if self.model.images:
                raise ConfigError("rollout.engine: vllm is given texts alone; transformers works with model.images")
            from flowalign.policies.language.vllm import require_vllm

            require_vllm()
        if self.model.system is not None and not (self.model.chat or self.model.images):
            raise ConfigError("model.system: only a chat has one; model.chat=true works")
