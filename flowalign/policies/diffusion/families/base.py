"""What a model family is, and what is usual for one."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler, ModelMixin, SchedulerMixin
from PIL.Image import Image
from torch import Tensor

from flowalign.data import Source
from flowalign.errors import ConfigError, FlowalignError
from rewards import Sound

JOINT_ATTENTION: tuple[str, ...] = (
    "attn.to_q",
    "attn.to_k",
    "attn.to_v",
    "attn.to_out.0",
    "attn.add_q_proj",
    "attn.add_k_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
)
"""Joint attention of image and text streams, as Flow-GRPO trains it."""

Encoded = dict[str, Sequence[Tensor]]
"""Embeddings by their name as an argument of the pipeline's call, a row for each prompt."""

ATTENTION: tuple[str, ...] = ("to_q", "to_k", "to_v", "to_out.0")


NetworkInput = Tensor | list[Tensor]
"""Input of a denoiser: one tensor, or one for each sample."""


class Family:
    """Facts that a pipeline's own call does not tell. Subclass it for a new family, with a `name`.

    Outside the pipeline's loop latents are [B, C, H, W] ([B, C, F, H, W] for videos), x = (1 - sigma) * x0 + sigma *
    noise, and the velocity is noise - x0; `pack`, `unpack`, `scale` and `flow_velocity` go between the two.
    """

    pipelines: ClassVar[tuple[str, ...]]
    guidance: ClassVar[str] = "two copies of the batch in one call"
    """Kind of guidance, for people."""
    rescales: ClassVar[bool] = False
    """Guidance is not linear in what the network predicts: the guided velocity is brought to another norm."""
    unconditional: ClassVar[int] = 0
    """Number of the guidance branch with the empty prompt, in the order of calls and copies."""
    denoiser: ClassVar[str] = "transformer"
    guide: ClassVar[str] = ""
    """Network of the pipeline for the side of guidance without a prompt, which is not trained; empty: none."""
    language_model: ClassVar[str] = ""
    """Language model of the pipeline that draws a picture's tokens before the first step; empty: none."""
    lora_targets: ClassVar[tuple[str, ...]]
    """Names of the modules that get a LoRA by default; none: diffusers' class of the network takes no adapters."""
    dead_ends: ClassVar[tuple[str, ...]] = ()
    """Beginnings of names of parts without an effect, and so without a gradient; -1 stands for the last block."""
    shared: ClassVar[tuple[str, ...]] = ()
    """Tensor arguments of the denoiser without a batch axis."""
    package: ClassVar[str] = ""
    """Package that diffusers' class needs to load published weights; empty: none."""
    images: ClassVar[tuple[int, int]] = (0, 0)
    """Fewest and most pictures that a sample is made from."""
    takes_mask: ClassVar[bool] = False
    """The picture is filled where a mask is white."""
    one_each: ClassVar[bool] = False
    """Whether the call draws from the VAE's posterior by each sample's seed, and so takes a picture for each sample."""
    encodes_images: ClassVar[bool] = False
    """Whether a prompt is encoded together with its pictures."""
    extra_axis: ClassVar[int] = 1
    """Axis of the network's input on which the latents are followed by the encoded pictures."""
    unpadded: ClassVar[bool] = False
    """Whether a text's length changes the sample, without a mask to help: prompts of other lengths are called apart."""
    text_inputs: ClassVar[Mapping[str, str]] = {}
    """The denoiser's arguments and their embeddings; without them text encoders cannot be trained."""
    middle: ClassVar[str] = ""
    """Block, or list of blocks, in whose middle features of samples are read (the last output); empty: nowhere."""
    divides_tokens: ClassVar[bool] = False
    """The output of diffusers for tokens divided over processes was tested to equal the whole."""
    parts: int = 1
    """Processes that each sample's tokens are divided over; padded texts are made to fit."""
    samples_sound: ClassVar[bool] = False
    """The network denoises a sound along with the pictures."""
    makes_sound: ClassVar[bool] = False
    """Samples are sounds, and nothing else: what `decode` gives is [B, C, T] in [-1, 1], and `pictures` sounds."""
    renamed: ClassVar[Mapping[str, str]] = {}
    """Arguments of a rollout's call that the pipeline's call has by other names."""
    tolerance: ClassVar[float] = 1e-4
    """Largest difference of a float32 replay from its rollout, over the largest velocity."""
    example: ClassVar[str] = ""
    """A prompt, where not every text is one."""
    largest_batch: ClassVar[int | None] = None
    """Most samples of one call of the pipeline; None: any number."""
    causal: ClassVar[bool] = False
    """Videos can be made in chunks of frames, each given those before it; its pipeline steps frame by frame, so that a
    rollout takes the denoiser's calls from it and makes the steps itself."""

    def check(self, pipeline: DiffusionPipeline) -> None:
        """Refuse a pipeline of the right class that this family cannot drive.

        Raises:
            ConfigError: says why.
        """

    def networks(self, pipeline: DiffusionPipeline) -> dict[str, Any]:
        """Trained networks by their names in the pipeline."""
        return {self.denoiser: getattr(pipeline, self.denoiser)}

    def untrained(self, network: ModelMixin) -> tuple[str, ...]:
        """Beginnings of the names of weights that the network cannot use."""
        if not self.dead_ends:
            return ()
        last = str(len(network.transformer_blocks) - 1)
        return tuple(name.replace("-1", last) for name in self.dead_ends)

    def pixels(self, pipeline: DiffusionPipeline) -> int:
        """Height and width, in pixels, of a position of the latents."""
        factors = ("vae_scale_factor", "vae_scale_factor_spatial", "vae_spatial_scale_factor")
        names = (*factors, "vae_spatial_compression_ratio")
        return next(int(getattr(pipeline, name)) for name in names if hasattr(pipeline, name))

    def multiple(self, pipeline: DiffusionPipeline) -> int:
        """Pixels that height and width are made of."""
        patch = getattr(pipeline, self.denoiser).config.get("patch_size") or 1
        return self.pixels(pipeline) * (patch if isinstance(patch, int) else patch[-1])

    def positions(self, denoiser: ModelMixin) -> int | None:
        """Positions along a side that the denoiser tells apart; None for any number."""
        return None

    def check_size(self, pipeline: DiffusionPipeline, call: dict[str, Any]) -> None:
        """Refuse sizes that the pipeline would round or fail at.

        Raises:
            ConfigError: names the nearest sizes that work.
        """
        names = ("vae_scale_factor_temporal", "vae_temporal_compression_ratio", "vae_temporal_scale_factor")
        frames = next((getattr(pipeline, name) for name in names if hasattr(pipeline, name)), 1)
        multiple = self.multiple(pipeline)
        sides = {"height": (multiple, 0), "width": (multiple, 0), "num_frames": (frames, 1)}
        for name, (step, more) in sides.items():
            size = call.get(name, more)
            if (size - more) % step:
                below = (size - more) // step * step + more
                works = f"{below} or {below + step}" if below > more else str(below + step)
                raise ConfigError(f"{type(pipeline).__name__} cannot make {name} {size}; {works} would work")
        positions = self.positions(getattr(pipeline, self.denoiser))
        largest = None if positions is None else positions * multiple
        for name in ("height", "width"):
            if largest is not None and call.get(name, 0) > largest:
                raise ConfigError(
                    f"{type(pipeline).__name__} cannot make {name} {call[name]}: its network tells {positions} "
                    f"positions apart; {largest} is the most"
                )

    def sources_of(
        self,
        pipeline: DiffusionPipeline,
        metadata: Sequence[Mapping[str, Any]],
        prompts: Sequence[str],
        call: Mapping[str, Any],
    ) -> list[Source | None]:
        """The pictures that each sample is made from, as its prompt's metadata names them, or None.

        Raises:
            ConfigError: a number of pictures or a mask that this pipeline does not take, or no size to bring them to.
        """
        fewest, most = self.images
        sources = [Source.of(record) for record in metadata] if most else []
        sources = sources or [None] * len(prompts)
        name = type(pipeline).__name__
        counts = [0 if source is None else len(source.images) for source in sources]
        for source, count, prompt in zip(sources, counts, prompts, strict=True):
            if not fewest <= count <= most:
                takes = "one picture" if most == 1 else f"{fewest} to {most} pictures"
                raise ConfigError(
                    f"{name} takes {takes} a sample: 'image' in the line of the prompt {prompt!r}, or --image"
                )
            if source is not None and self.takes_mask != (source.mask is not None):
                wants = "needs a" if self.takes_mask else "takes no"
                raise ConfigError(f"{name} {wants} 'mask' in the line of the prompt {prompt!r}, or --mask")
            if count != counts[0]:
                raise ConfigError(
                    f"the prompt {prompt!r} has {count} pictures and another {counts[0]}; give all as many"
                )
        if counts and counts[0] and not {"height", "width"} <= call.keys():
            raise ConfigError(f"{name} makes samples from pictures; set the height and width to bring them to")
        return sources

    def batches(
        self, sources: Sequence[Source | None], texts: Sequence[tuple[str, str]], batch_size: int
    ) -> Iterator[slice]:
        """Neighbours for one call of the pipeline: of equal pictures, and of equal texts where these are not padded."""
        alike = list(zip(sources, texts, strict=True)) if self.unpadded else sources
        longest = min(batch_size, self.largest_batch or batch_size)
        start = 0
        for i in range(1, len(alike) + 1):
            if i == len(alike) or i - start == longest or alike[i] != alike[start]:
                yield slice(start, i)
                start = i

    def encode(self, pipeline: DiffusionPipeline, prompts: Sequence[str], **options: Any) -> Encoded:
        """Prompt embeddings.

        Args:
            options: settings of the prompt encoding; where `encodes_images`, `image` is the list of pictures.
        """
        raise NotImplementedError

    def encode_negative(self, pipeline: DiffusionPipeline, prompts: Sequence[str], **options: Any) -> Encoded:
        """Embeddings of what guidance leads away from; an empty text stands for none."""
        return self.encode(pipeline, prompts, **options)

    def stack(self, rows: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        """The encoded prompts of a batch, one `encode` row each, as arguments of the pipeline's call."""
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def token_limits(self, pipeline: DiffusionPipeline, **options: Any) -> dict[str, int]:
        """Largest number of tokens of each tokenizer of the pipeline."""
        names = [n for n in pipeline.components if n.startswith("tokenizer") and getattr(pipeline, n) is not None]
        return {name: getattr(pipeline, name).model_max_length for name in names}

    def negative(self, guidance: float) -> bool:
        """Whether guidance of this scale needs the embeddings of a negative prompt."""
        return guidance > 1

    def arguments(self, guidance: float) -> dict[str, Any]:
        """The scale w of negative + w * (positive - negative), 1 for no guidance, as the pipeline's call takes it."""
        return {"guidance_scale": guidance}

    def arguments_by_step(self, scales: Sequence[float]) -> dict[str, Any]:
        """The scale of each step, as the pipeline's call takes them; empty where it takes one for all."""
        return {}

    def velocity(self, outputs: Sequence[Any], copies: Sequence[int], guidance: float) -> Tensor:
        """Velocity for the pipeline's scheduler, from the denoiser's outputs; here by concatenation.

        The arithmetic is the pipeline's own, in the network's dtype, so that replay equals rollout.
        """
        if copies[0] == 1:
            return outputs[0]
        unconditional, conditional = outputs[0].chunk(2)
        return unconditional + guidance * (conditional - unconditional)

    def call(self, pipeline: DiffusionPipeline, **arguments: Any) -> Any:
        """Output of the pipeline's call, whose samples nobody looks at."""
        return pipeline(**arguments)

    def noted(self, pipeline: DiffusionPipeline) -> dict[str, Any]:
        """What the pipeline's last call set on its denoiser, to be part of the recorded calls."""
        return {}

    @contextmanager
    def ready(self, denoiser: ModelMixin, call: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Context with the arguments of a recorded call, in which the denoiser is set as they say: the inverse of
        `noted`."""
        yield call

    def handed(self, output: Tensor, sample: Tensor, sigma: Tensor) -> Tensor:
        """The network's guided prediction, from what the pipeline hands to its scheduler.

        Args:
            sample: state of the pipeline's loop, which it hands over too.
            sigma: noise level of that state.
        """
        return output

    def sources(self, images: Sequence[Image], mask: Image | None, count: int, call: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call that makes `count` samples from the same pictures, which have its size."""
        pictures = {"image": images[0]} if mask is None else {"image": images[0], "mask_image": mask}
        return call | ({name: [picture] * count for name, picture in pictures.items()} if self.one_each else pictures)

    def extra_input(self, first_input: Any, loop_shape: Sequence[int]) -> Tensor | None:
        """The part of the network's input that is not the latents, a row a sample; None where there is none.

        Args:
            first_input: the network's input in the first call of a rollout.
            loop_shape: shape of the latents in the pipeline's loop.
        """
        axis = self.extra_axis
        if not isinstance(first_input, Tensor) or first_input.shape[axis] == loop_shape[axis]:
            return None
        return first_input.narrow(axis, loop_shape[axis], first_input.shape[axis] - loop_shape[axis])

    def first_frames(self, extra: Tensor | None) -> Tensor | None:
        """[B, C, F, H, W] the first frames of the latents, where they are not sampled."""
        return None

    def channels(self, denoiser: ModelMixin) -> int:
        """C of the latents."""
        config = denoiser.config
        return int(config.get("out_channels") or config.in_channels)

    def width(self, denoiser: ModelMixin) -> int:
        """D of the features in its middle."""
        return int(denoiser.config.num_attention_heads * denoiser.config.attention_head_dim)

    def size(self, pipeline: DiffusionPipeline, call: dict[str, Any]) -> tuple[int, ...]:
        """H, W, or F, H, W, of the latents that the pipeline's call with these arguments makes.

        Only families whose latents are packed in the loop need it.
        """
        return ()

    def unpack(self, latents: Tensor, size: Sequence[int]) -> Tensor:
        """Latents of the pipeline's loop to [B, C, H, W]; `size` as the method of that name returns it."""
        return latents

    def pack(self, latents: Tensor) -> Tensor:
        """The inverse of `unpack`."""
        return latents

    def network_input(self, latents: Tensor, extra: Any) -> NetworkInput:
        """The denoiser's input: packed latents, and what `extra_input` gave."""
        return latents if extra is None else torch.cat([latents, extra], self.extra_axis)

    def kept(self, name: str, value: Tensor, loop_shape: Sequence[int]) -> Tensor:
        """What of an argument of the denoiser's call is kept for a replay; one with a row a sample keeps its rows.

        Args:
            loop_shape: shape of the latents in the pipeline's loop.
        """
        return value

    def ask(self, network: Callable[..., Sequence[Any]], states: NetworkInput, call: dict[str, Any]) -> Sequence[Any]:
        """All outputs of a network for its input, with what was `kept` of a call."""
        return network(states, **call)

    def predicted(self, output: Tensor, count: int) -> Tensor:
        """Part of the network's output on its second axis for the latents, which are `count` long there."""
        return output[:, :count]

    def scheduler(self, own: SchedulerMixin) -> SchedulerMixin:
        """The scheduler whose schedule a rollout walks."""
        if isinstance(own, FlowMatchEulerDiscreteScheduler) or own.config.get("use_flow_sigmas"):
            return own
        raise FlowalignError(
            f"the pipeline's scheduler is {type(own).__name__}; stochastic rollouts need one with flow sigmas, "
            "e.g. FlowMatchEulerDiscreteScheduler"
        )

    def sigmas(self, scheduler: SchedulerMixin) -> Tensor:
        """[T + 1] noise levels of a scheduler whose timesteps are set, ending in 0."""
        return scheduler.sigmas

    def put_levels(self, scheduler: SchedulerMixin, levels: Tensor) -> None:
        """Noise levels [K], falling, before its shift, for a scheduler whose own method does not take them."""
        shift = scheduler.config.get("flow_shift") or 1.0
        sigmas = shift * levels / (1 + (shift - 1) * levels)
        scheduler.timesteps = sigmas.to(scheduler.timesteps.device) * scheduler.config.num_train_timesteps
        scheduler.sigmas = torch.cat([sigmas, torch.zeros(1)])

    def scale(self, sigma: Tensor) -> Tensor:
        """Factor of latents at noise level sigma for the model."""
        return torch.ones_like(sigma)

    def loop_scale(self, sigma: Tensor) -> Tensor:
        """Factor of latents at noise level sigma in the pipeline's loop."""
        return self.scale(sigma)

    def flow_velocity(self, output: Tensor, x: Tensor, sigma: Tensor, scheduler: SchedulerMixin) -> Tensor:
        """The velocity at x that a guided prediction of the model stands for."""
        return output

    def error_weight(self, sigma: Tensor, scheduler: SchedulerMixin) -> Tensor:
        """Factor from a squared error of the velocity at noise level sigma to one of the model's own prediction."""
        return torch.ones_like(sigma)

    def own_step(
        self, velocity: Tensor, x: Tensor, sigma: Tensor, sigma_next: Tensor, steps: int, scheduler: SchedulerMixin
    ) -> Tensor:
        """The velocity whose Euler step from sigma to sigma_next is the scheduler's own, one of `steps`.

        It is another one only where a scheduler's steps do not end where the next ones begin.
        """
        return velocity

    def latents(self, pipeline: DiffusionPipeline, pixels: Tensor) -> Tensor:
        """Pictures [B, 3, H, W] in [-1, 1] to latents, the mean of the VAE's posterior: the inverse of `decode`."""
        vae = pipeline.vae
        latents = vae.encode(pixels.to(vae.dtype)).latent_dist.mode()
        return (latents - (vae.config.get("shift_factor") or 0.0)) * vae.config.scaling_factor

    def decode(self, pipeline: DiffusionPipeline, latents: Tensor) -> Tensor:
        """Latents to pictures [B, 3, H, W] in [-1, 1]."""
        vae = pipeline.vae
        latents = latents / vae.config.scaling_factor + (vae.config.get("shift_factor") or 0.0)
        return vae.decode(latents.to(vae.dtype), return_dict=False)[0]

    def sounds(self, pipeline: DiffusionPipeline, latents: Tensor) -> list[Sound]:
        """Latents of sounds, as the pipeline returns them, to sounds."""
        raise NotImplementedError

    def sound_tokens(self, pipeline: DiffusionPipeline, latents: Tensor) -> Tensor:
        """[B, tokens, C] latents of sounds, as the pipeline returns them, as the denoiser has them."""
        raise NotImplementedError

    def pictures(self, pipeline: DiffusionPipeline, pixels: Tensor) -> list[Any]:
        """Decoded pixels as PIL images; a video is a list of them."""
        return pipeline.image_processor.postprocess(pixels, output_type="pil")


class MaskedEncoding(Family):
    """Embeddings with masks, by pipelines that put words before a prompt, though not before the negative one."""

    def encode(self, pipeline: DiffusionPipeline, prompts: Sequence[str], **options: Any) -> Encoded:
        embeds, mask, *_ = pipeline.encode_prompt(list(prompts), do_classifier_free_guidance=False, **options)
        return {"prompt_embeds": embeds, "prompt_attention_mask": mask}

    def encode_negative(self, pipeline: DiffusionPipeline, prompts: Sequence[str], **options: Any) -> Encoded:
        negative = list(prompts)
        _, _, embeds, mask = pipeline.encode_prompt(negative, negative_prompt=negative, **options)
        return {"prompt_embeds": embeds, "prompt_attention_mask": mask}


def option(options: dict[str, Any], default: int) -> int:
    """The length that prompts are cut to."""
    return int(options.get("max_sequence_length", default))


def refuse(pipeline: DiffusionPipeline, why: str) -> ConfigError:
    return ConfigError(f"this {type(pipeline).__name__} cannot be trained: {why}")
