"""Language models that write before a picture is drawn: one of words, or the pipeline's own of the picture's tokens."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from flowalign.algorithms import base
from flowalign.data import shipped
from flowalign.errors import ConfigError
from flowalign.policies.diffusion import DiffusersPolicy
from flowalign.policies.diffusion.picture_tokens import PictureWriter
from flowalign.policies.diffusion.writing import Written
from flowalign.policies.language.policy import LanguagePolicy
from samplers import derive_seed

OWN = "own"
"""Path that stands for the pipeline's own language model."""
WRITER = "writer"


class WriterSettings(base.AlgorithmSettings):
    path: str
    """Folder or hub name of a causal language model, or a shipped one; `own`: the pipeline's language model, which
    draws a picture's tokens. With `own` only `lora` can be set beside it."""
    shown: str = "{prompt} {text}"
    """Text for the generator's text encoders, with the prompt and the written text in their places."""
    max_new_tokens: int = Field(64, gt=0)
    temperature: float = Field(1.0, gt=0)
    chat: bool = False
    """Put the prompt into the model's chat template."""
    system: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the frozen weights below a LoRA; without one all weights are trained, in float32."""
    lora: int | None = Field(None, gt=0)
    """Rank of a LoRA; null trains all weights."""

    @field_validator("shown")
    @classmethod
    def _with_text(cls, shown: str) -> str:
        if "{text}" not in shown:
            raise ValueError("has no {text}, so that nothing of what was written would be drawn")
        return shown

    @model_validator(mode="after")
    def _nothing_beside_own(self) -> Self:
        idle = sorted(self.model_fields_set - {"path", "lora"})
        if self.path == OWN and idle:
            raise ValueError(f"the pipeline's own language model has its own {', '.join(idle)}; leave them out")
        return self


class WordWriter(LanguagePolicy):
    """A causal language model whose texts stand in what the pipeline's text encoders read."""

    component = WRITER
    settings: WriterSettings

    def write(
        self,
        prompts: Sequence[str],
        seeds: Sequence[int],
        noise_seeds: Sequence[int],
        call: Mapping[str, Any],
        batch_size: int,
    ) -> Written:
        """What is drawn for each prompt, by the seed of its step noise."""
        s, own = self.settings, [derive_seed(seed, 9) for seed in noise_seeds]
        record = self.sample(prompts, own, max_new_tokens=s.max_new_tokens, temperature=s.temperature)
        texts = self.decode(record)
        shown = [s.shown.replace("{prompt}", p).replace("{text}", t) for p, t in zip(prompts, texts, strict=True)]
        return Written(texts=[text.strip() for text in shown], record=record)


def build_writer(settings: WriterSettings, policy: DiffusersPolicy) -> WordWriter | PictureWriter:
    """The writer that settings name, ready to be trained.

    Raises:
        ConfigError: there is no such model.
    """
    if settings.path == OWN and isinstance(policy.writer, PictureWriter):
        # its network has its adapter
        return policy.writer
    writer: WordWriter | PictureWriter
    if settings.path == OWN:
        writer = PictureWriter(policy.pipeline, policy.family.language_model, policy.device)
    else:
        writer = WordWriter.from_pretrained(
            Path(shipped(settings.path)), settings.dtype, policy.device, chat=settings.chat, system=settings.system
        )
        writer.settings = settings
    if settings.lora is not None:
        writer.add_lora(settings.lora, settings.lora, "all-linear")
        return writer
    if settings.path == OWN:
        writer.autocast = policy.compute_dtype
    writer.train_all()
    return writer


def check_own(settings: WriterSettings, pipeline: str, component: str) -> None:
    """Refuse the own language model of a pipeline that has none.

    Args:
        pipeline: class of the pipeline.
        component: its language model; empty: it has none.
    """
    if settings.path == OWN and not component:
        raise ConfigError(
            f"algorithm.writer: {pipeline} has no language model that draws a picture's tokens, as GLM-Image has; with "
            "path: FOLDER a language model writes words"
        )
