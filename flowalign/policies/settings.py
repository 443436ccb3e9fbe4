"""What can be set of models and of how they are sampled."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from flowalign.settings import Section


class Lora(Section):
    path: str | None = None
    """An adapter to start from, which is the reference too: a file, a folder or a hub name, as diffusers or peft reads
    it; rank, alpha, targets and init are then its own."""
    rank: int = Field(32, ge=1)
    alpha: float = Field(64, gt=0)
    """Default: twice the rank."""
    targets: list[str] | Literal["all-linear"] | None = None
    """Module names, or all linear layers but the output's; default the model family's."""
    init: bool | str = True
    """Value of peft's `init_lora_weights`."""

    @model_validator(mode="after")
    def _scale_with_rank(self) -> Self:
        if "alpha" not in self.model_fields_set:
            self.alpha = 2.0 * self.rank
        return self


class TextLora(Section):
    """An adapter of the text encoders, trained through the embeddings (TexForce, arXiv 2311.15657)."""

    rank: int = Field(16, ge=1)
    alpha: float = Field(32, gt=0)
    """Default: twice the rank."""
    targets: list[str] = ["q_proj", "k_proj", "v_proj", "out_proj"]
    init: bool | str = True
    """Value of peft's `init_lora_weights`."""
    encoders: list[str] = Field(["text_encoder"], min_length=1)
    """The pipeline's names of the trained text encoders."""
    denoiser: bool = True
    """Whether the denoiser has a LoRA that is trained too; false leaves the denoiser as it is."""

    @model_validator(mode="after")
    def _scale_with_rank(self) -> Self:
        if "alpha" not in self.model_fields_set:
            self.alpha = 2.0 * self.rank
        return self


class Network(Section):
    """Settings of all models."""

    kind: Literal["pictures", "text"]
    path: str
    """Folder, hub name (owner/name@commit works) or shipped model; for pictures also one file (.safetensors)."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Number format of the frozen weights and the forward pass; trained weights stay float32."""
    autocast: Literal["bfloat16", "float16"] | None = None
    """Lower precision of the forward pass over frozen weights in float32, twice the memory; null: that of `dtype`."""
    lora: Lora | None = Lora()
    """LoRA that is trained; null trains every weight."""
    gradient_checkpointing: bool = False
    """Whether the backward pass computes activations again: a third more time, a fraction of the memory."""
    tf32: bool = True
    """Whether NVIDIA GPUs round the factors of float32 products to 10 bits, in rewards too: several times faster."""

    @model_validator(mode="after")
    def _autocasts_float32(self) -> Self:
        if self.autocast is not None and self.dtype != "float32":
            raise ValueError(f"model.autocast: weights in {self.dtype} are computed in it; dtype: float32 works")
        return self

    @property
    def compute_dtype(self) -> str:
        """The precision of the forward pass."""
        return self.autocast or self.dtype


class ContextParallel(Section):
    """Processes that each have a part of every sample's tokens, ulysses * ring of them: for long videos."""

    ulysses: int = Field(1, ge=1)
    """Processes that exchange attention heads; each computes some of the heads."""
    ring: int = Field(1, ge=1)
    """Processes that pass on keys and values; on GPUs, with `model.attention: _native_cudnn` or another that can."""

    @property
    def degree(self) -> int:
        """Processes that a sample is divided over."""
        return self.ulysses * self.ring


class Model(Network):
    kind: Literal["pictures"] = "pictures"
    config: str | None = None
    """Pipeline (folder or hub name) that describes a single file and has its missing parts; default: a guess."""
    attention: str | None = None
    """Attention backend of diffusers: native (default), xformers, flash, ..."""
    encode: dict[str, Any] = {}
    """Arguments of the pipeline's prompt encoding, e.g. max_sequence_length."""
    embeddings: str | None = None
    """Folder of prompts' embeddings, shared by runs; where all are there, no text encoder is loaded."""
    text_lora: TextLora | None = None
    """LoRA of the text encoders, trained too, or alone; for methods that learn from the steps of a rollout."""
    base_bits: Literal[4, 8, "fp8"] | None = None
    """Bits of frozen weights under a LoRA: 4 or 8 by bitsandbytes (GPUs only), fp8 (e4m3) by torchao; extras."""
    offload_vae: bool = False
    """Whether the VAE stays in the CPU's memory and visits the device to decode, as text encoders do to encode."""
    offload_text: bool = False
    """Whether the text encoders stay off the device: the CPU encodes, each prompt once, and slower."""
    tile_vae: bool = False
    """Whether large pictures are decoded tile by tile; neighbours blend, which changes pixels a little."""
    slice_vae: bool = False
    """Whether one picture is decoded at a time."""
    compile: bool = False
    """Whether torch compiles the denoiser's repeated blocks: minutes once, then faster steps."""
    context_parallel: ContextParallel = ContextParallel()


class Draws(Section):
    """Pictures of a model that writes and draws (Emu3)."""

    height: int = Field(8, ge=1)
    """Rows of a picture, in tokens."""
    width: int = Field(8, ge=1)
    """Columns of a picture, in tokens."""
    thinking: int = Field(0, ge=0)
    """Most tokens of the plan in words before a picture; 0 draws at once."""
    instruction: str = ""
    """Text after a prompt that asks for a plan."""
    guidance: float = Field(1.0, ge=1)
    """Scale of classifier-free guidance of a picture's tokens; 1 is none, and half the time."""


class MaskedDiffusion(Section):
    """Texts of a masked language model (ModernBERT, BERT), opened from masks in steps."""

    steps: int = Field(8, ge=1)
    """Steps from masks to a text."""
    order: Literal["rates", "confidence"] = "rates"
    """Order in which positions open: each by itself, at the rates of the discrete flow; or as many a step, those
    first whose tokens are the most probable (LLaDA's low-confidence remasking)."""


class TextModel(Network):
    kind: Literal["text"]
    path: str
    """Folder, hub name (owner/name@commit works) of a causal language model, or the shipped 'tiny_lm'; with `diffusion`
    of a masked one, or 'tiny_masked_lm'."""
    padding: Literal["left", "right", "packed"] = "left"
    """Side of the padding when log-probabilities are computed, or packed: short texts share a row (transformers tells
    them apart by their positions); sampling always pads on the left."""
    chat: bool = False
    """Whether prompts are a user's turn, put into the tokenizer's chat template."""
    system: str | None = None
    """Text of the system's turn before it."""
    chat_template: str | None = None
    """File of a chat template in Jinja, in the place of the tokenizer's; it is saved with the model."""
    chat_template_kwargs: dict[str, Any] = {}
    """Further arguments of the chat template, such as {enable_thinking: false}."""
    images: bool = False
    """Whether it is an image-text-to-text model: a prompt is a turn with the pictures under 'image' in its metadata."""
    draws: Draws | None = None
    """Pictures of an Emu3, which are scored in the place of texts: picture tokens are actions like words."""
    diffusion: MaskedDiffusion | None = None
    """Texts by masked diffusion: max_new_tokens positions are opened from masks, and each opening is an action."""


class Snapshot(Section):
    """A copy of the trained weights: snapshot = decay * snapshot + (1 - decay) * policy."""

    decay: float | str = 0.0
    """Share of itself that a move leaves: 0 copies the policy, 1 stays; or 'start-value-slope-end': value + slope *
    (updates - start) from the update `start` on, at most end, and before it value."""
    every: Literal["iteration", "update"] = "iteration"
    """Event at which the snapshot moves."""
    interval: int = Field(1, ge=1)
    """Iterations, or updates, from one move to the next."""
    of: str = "policy"
    """Weights that are copied: the policy's, or another of the algorithm's sets of weights."""

    @field_validator("decay")
    @classmethod
    def _known(cls, decay: float | str) -> float | str:
        given = _numbers(decay)
        if given is None or not all(0 <= share <= 1 for share in (given if len(given) == 1 else (given[1], given[3]))):
            raise ValueError(
                "a share from 0 (a copy) to 1 (frozen), or 'start-value-slope-end' such as '75-0-0.0075-0.999'"
            )
        return decay

    def decay_at(self, updates: int) -> float:
        """The decay after so many updates of the policy."""
        given = _numbers(self.decay)
        assert given is not None, "checked when it was read"
        if len(given) == 1:
            return given[0]
        start, value, slope, end = given
        return value if updates < start else min(value + slope * (updates - start), end)


class Role(Section):
    """Another set of weights of the policy's network, trained before the policy in each of its updates."""

    learning_rate: float | None = Field(None, gt=0)
    """Learning rate of these weights; default the policy's. Its schedule is the policy's."""
    betas: tuple[float, float] | None = None
    """Betas of Adam for these weights; default the policy's."""
    updates: int = Field(1, ge=1)
    """Updates for one update of the policy."""
    alone: int = Field(0, ge=0)
    """Updates of the policy at the start of training that are left out, so that it is ready when the policy moves."""


def _numbers(decay: float | str) -> list[float] | None:
    """One number, or the four of 'start-value-slope-end'; None for anything else."""
    texts = re.split(r"(?<!e)-", decay) if isinstance(decay, str) else [decay]
    try:
        numbers = [float(text) for text in texts]
    except ValueError:
        return None
    return numbers if len(numbers) in (1, 4) and all(map(math.isfinite, numbers)) else None


class SamplingSettings(Section):
    """Settings of all sampling."""

    batch_size: int = Field(16, ge=1)
    """Samples in a network call, each process."""

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of a policy's `sample`."""
        raise NotImplementedError

    def shown(self) -> str:
        """Settings in a line for people."""
        unsaid = {"order": 1, "batch_size": self.batch_size}
        given = {name: v for name, v in self.arguments().items() if v not in (None, "") and unsaid.get(name) != v}
        return "sampled with " + ", ".join(f"{name} {value}" for name, value in given.items())

    def following(self, other: "SamplingSettings") -> Self:
        """A copy that has the settings of another where its own were left open: how it samples, not `batch_size`
        nor whose `weights`."""
        known = type(self).model_fields.keys() & type(other).model_fields.keys()
        left_open = known - self.model_fields_set - {"batch_size", "weights"}
        return self.model_copy(update={name: getattr(other, name) for name in left_open})

    def asked(self, changes: Mapping[str, Any]) -> Self:
        """A copy with what a user asks for in the place of these settings."""
        return self.model_copy(update=dict(changes))


class Sampling(SamplingSettings):
    """Sampling from a pipeline."""

    steps: int = Field(10, ge=1, le=10_000)
    guidance: float | list[float] = 1.0
    """Scale of classifier-free guidance, 1 samples without; or a list of one for each step."""
    guidance_2: float | None = Field(None, ge=1)
    """Guidance of the second denoiser (Wan 2.2 14B, low noise); default `guidance`."""
    negative_prompt: str = ""
    """Prompt that guidance leads away from; a line of the prompt file may have its own 'negative_prompt'."""
    sigmas: list[float] | None = None
    """Noise levels before the pipeline's own shift; default its scheduler's."""
    order: Literal[1, 2] = 1
    """Order of the solver from the last stochastic step on: 1 is Euler's rule, 2 DPM-Solver++ (2M)."""
    height: int | None = Field(None, ge=8)
    width: int | None = Field(None, ge=8)
    num_frames: int | None = Field(None, ge=1)
    chunks: int = Field(1, ge=1)
    """Chunks of frames of latents that a causal pipeline makes one after the other, each in `steps` steps and given
    those before it; 1: a video is made as a whole."""
    duration: float | None = Field(None, gt=0)
    """Seconds of a sound."""
    rlg: float | dict[str, float] = 1.0
    """Weight of a LoRA's change: 0 is the base, 1 the trained model, 1.6 more of it at twice the time (RLG); or several
    LoRAs, each a folder, file or hub name with its weight, 'trained' the model's own."""

    rlg_from: int = Field(0, ge=0)
    """First step that is sampled with rlg."""

    @field_validator("guidance")
    @classmethod
    def _from_1(cls, guidance: float | list[float]) -> float | list[float]:
        scales = guidance if isinstance(guidance, list) else [guidance]
        if not scales or min(scales) < 1:
            raise ValueError("give a number from 1, which is none, or a list of one for each step")
        return guidance

    @property
    def largest_guidance(self) -> float:
        """Scale of guidance of all steps, or the largest of any."""
        return max(self.guidance) if isinstance(self.guidance, list) else self.guidance

    @property
    def networks(self) -> int:
        """Networks that a velocity is made of."""
        return len(self.rlg) + 1 if isinstance(self.rlg, dict) else 1 if self.rlg == 1 else 2

    def following(self, other: SamplingSettings) -> Self:
        copy = super().following(other)
        # noise levels go with a number of steps
        apart = "sigmas" not in self.model_fields_set and copy.steps != getattr(other, "steps", None)
        return copy.model_copy(update={"sigmas": None}) if apart else copy

    def asked(self, changes: Mapping[str, Any]) -> Self:
        copy = super().asked(changes)
        # the levels of another number of steps do not fit
        fits = copy.sigmas is None or len(copy.sigmas) == copy.steps
        return copy if fits else copy.model_copy(update={"sigmas": None})

    def arguments(self, kept: Sequence[int] | None = None) -> dict[str, Any]:
        """Keyword arguments of a policy's `sample`.

        Args:
            kept: only these steps of the schedule; needs `sigmas`.
        """
        sides = {name: getattr(self, name) for name in ("height", "width", "num_frames", "duration")}
        size = {name: side for name, side in sides.items() if side is not None}
        names = ("steps", "guidance", "guidance_2", "negative_prompt", "sigmas", "order")
        base = {name: getattr(self, name) for name in names}
        if kept is not None:
            assert self.sigmas is not None
            base |= {"steps": len(kept), "sigmas": [self.sigmas[k] for k in kept]}
            if isinstance(self.guidance, list):
                base["guidance"] = [self.guidance[k] for k in kept]
        rlg = {} if self.rlg == 1 else {"rlg": self.rlg, "rlg_from": self.rlg_from}
        chunks = {} if self.chunks == 1 else {"chunks": self.chunks}
        return base | {"batch_size": self.batch_size} | rlg | size | chunks


class TextSampling(SamplingSettings):
    """Sampling from a language model."""

    max_new_tokens: int = Field(256, ge=1)
    """Length at which a text without an end is cut; with an environment, a turn."""
    temperature: float = Field(1.0, ge=0)
    """Temperature of sampling; 0 takes the most probable token."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Draw from the most probable tokens up to this probability together; it counts in log-probabilities too."""
    top_k: int = Field(0, ge=0)
    """Draw from this many most probable tokens; 0: all."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Share of the largest probability that a token must have to be drawn."""
    repetition_penalty: float = Field(1.0, gt=0)
    """Divisor of the positive logits of tokens that came before, and factor of the negative ones."""
    batch_size: int = Field(64, ge=1)
    """Texts in a network call, each process."""
    continuous_batching: bool = False
    """Whether a text that ends gives its row of the batch to the next prompt, so that none waits for the longest."""

    def arguments(self) -> dict[str, Any]:
        given = {key: getattr(self, key) for key in TextSampling.model_fields}
        if not self.continuous_batching:
            # it changes no text, so that it stands on no card where it is not asked for
            del given["continuous_batching"]
        return given
