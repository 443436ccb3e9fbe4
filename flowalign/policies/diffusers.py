"""A policy over a diffusers pipeline: rollout is the pipeline's own call, replay is the denoiser alone."""

import importlib.util
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import cpu_offload_with_hook
from diffusers import DiffusionPipeline, PipelineQuantizationConfig
from diffusers.training_utils import _collate_lora_metadata
from peft import get_peft_model_state_dict
from PIL.Image import Image
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from flowalign.data import Source
from flowalign.errors import ConfigError, FlowalignError
from flowalign.policies.base import Policy
from flowalign.policies.conditions import BESIDE, CallRecorder, Conditions, Ragged
from flowalign.policies.experts import Experts
from flowalign.policies.families import Family, family_of, to_device
from flowalign.policies.noised import Noised
from flowalign.policies.scheduler import LevelScheduler, TransitionScheduler
from flowalign.policies.sources import check_sources, opened, runs
from samplers import Trajectory, Transition, ode
from samplers.completion import VelocityAt
from samplers.kernels import Kernel
from samplers.noise import generators, normal

logger = logging.getLogger(__name__)

Prompt = tuple[str, Source | None, tuple[int, int] | None]
"""a text, and the pictures that it is encoded with and their size"""

ENCODED_PROMPTS = 4096
"""distinct prompts whose embeddings are kept"""


def _cat(parts: Sequence[Any]) -> Any:
    """The conditions of several rollouts, all of one kind, as one."""
    return type(parts[0]).cat(parts)


def lora_file(network: str) -> str:
    """The name that diffusers looks for, with that of a second network added."""
    second = "_transformer_2" if network == "transformer_2" else ""
    return f"pytorch_lora_weights{second}.safetensors"


@dataclass
class Rollout:
    """B sampled trajectories and what is needed to score them again."""

    trajectory: Trajectory
    conditions: Conditions | Ragged
    prompts: list[str]
    guidance: float
    kernel: Kernel
    sources: list[Source | None]
    given: Tensor | None = None
    """[B, C, F, H, W] first frames that were not sampled, None where all were"""

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, rows: Tensor) -> "Rollout":
        """Some of the samples, [N] indices."""
        return self.branch(self.trajectory[rows], rows)

    def branch(self, trajectory: Trajectory, samples: Tensor) -> "Rollout":
        """A rollout of other trajectories under the conditions of these samples, [N] indices."""
        rows = samples.tolist()
        prompts, sources = [self.prompts[i] for i in rows], [self.sources[i] for i in rows]
        given = None if self.given is None else self.given[samples]
        return Rollout(trajectory, self.conditions[samples], prompts, self.guidance, self.kernel, sources, given)

    def whole(self, latents: Tensor, samples: Tensor | None = None) -> Tensor:
        """Latents [N, ...] of these samples, [N] indices and default all, with the frames that were not sampled."""
        if self.given is None:
            return latents
        given = self.given if samples is None else self.given[samples]
        return torch.cat([given.to(latents), latents], 2)

    @staticmethod
    def cat(parts: Sequence["Rollout"]) -> "Rollout":
        """Join rollouts made with the same settings."""
        return Rollout(
            Trajectory.cat([p.trajectory for p in parts]),
            _cat([p.conditions for p in parts]),
            [prompt for p in parts for prompt in p.prompts],
            parts[0].guidance,
            parts[0].kernel,
            [source for p in parts for source in p.sources],
            None if parts[0].given is None else torch.cat([p.given for p in parts if p.given is not None]),
        )


def quantisation(bits: int, denoiser: str, dtype: torch.dtype) -> PipelineQuantizationConfig:
    """How diffusers loads a denoiser in 4 (NF4) or 8 bits.

    Raises:
        ConfigError: without a GPU, or without bitsandbytes.
    """
    if not torch.cuda.is_available():
        raise ConfigError("model.base_bits: bitsandbytes needs a GPU, and torch finds none here; null works")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError("model.base_bits needs bitsandbytes: pip install 'flowalign[bitsandbytes]'")
    if bits == 8:
        own: dict[str, Any] = {"load_in_8bit": True}
    else:
        own = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": dtype}
    return PipelineQuantizationConfig(
        quant_backend=f"bitsandbytes_{bits}bit", quant_kwargs=own, components_to_quantize=[denoiser]
    )


class DiffusersPolicy(Policy):
    """A diffusers pipeline whose denoiser is trained. `forwards` counts each branch of guidance.

    Args:
        pipeline: the pipeline, loaded.
        device: where the denoiser samples and trains; text encoders visit it to encode and leave.
        encode_options: arguments for the pipeline's prompt encoding, e.g. max_sequence_length.
        attention: a diffusers attention backend ('native', 'xformers', 'flash', ...), None to leave it.
    """

    def __init__(
        self,
        pipeline: DiffusionPipeline,
        device: torch.device | str = "cpu",
        encode_options: dict[str, Any] | None = None,
        attention: str | None = None,
    ) -> None:
        self.pipeline = pipeline
        self.family: Family = family_of(type(pipeline).__name__)
        self.networks = self.family.networks(pipeline)
        """what is trained, by its name in the pipeline"""
        several = len(self.networks) > 1
        super().__init__(Experts(self.networks) if several else self.networks[self.family.denoiser], device)
        self.encode_options = encode_options or {}
        self._embeddings: OrderedDict[Prompt, dict[str, Tensor]] = OrderedDict()
        self._vae_visit: Any = None
        """accelerate's hook that takes the VAE off the device, where it only visits"""
        self.family.check(pipeline)
        pipeline.set_progress_bar_config(disable=True)
        for module in pipeline.components.values():
            if isinstance(module, nn.Module):
                module.requires_grad_(False).eval()
        to_device(self.denoiser, self.device)
        for name in ("vae", "image_encoder"):
            to_device(getattr(pipeline, name, None), self.device)
        if attention is not None:
            self._set_attention(attention)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        dtype: torch.dtype | str = torch.float32,
        device: torch.device | str = "cpu",
        encode_options: dict[str, Any] | None = None,
        attention: str | None = None,
        base_bits: int | None = None,
    ) -> "DiffusersPolicy":
        """Load a pipeline from a folder or a hub name. Components saved as absent (SD3 without T5) stay absent.

        Args:
            base_bits: 4 or 8 loads the denoiser quantised by bitsandbytes, which needs a GPU; None as it is.
        """
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        try:
            saved = DiffusionPipeline.load_config(str(path))
        except OSError as error:
            raise ConfigError(f"no pipeline at '{path}': {' '.join(str(error).split())}") from error
        absent = {name: None for name, entry in saved.items() if entry == [None, None]}
        denoiser = family_of(saved["_class_name"]).denoiser
        quantised = {} if base_bits is None else {"quantization_config": quantisation(base_bits, denoiser, dtype)}
        pipeline = DiffusionPipeline.from_pretrained(str(path), dtype=dtype, **absent, **quantised)
        return cls(pipeline, device, encode_options, attention)

    def _set_attention(self, backend: str) -> None:
        try:
            self.denoiser.set_attention_backend(backend)
        except (ValueError, ImportError, RuntimeError) as error:
            raise ConfigError(f"attention backend '{backend}' cannot be used here: {error}") from error

    def spare(self, model: Any) -> None:
        """Take less of the device's memory for the VAE, as a model section says: offload_vae, tile_vae, slice_vae."""
        vae = getattr(self.pipeline, "vae", None)
        for wanted, method in ((model.tile_vae, "enable_tiling"), (model.slice_vae, "enable_slicing")):
            if wanted and not hasattr(vae, method):
                raise ConfigError(f"model: {type(vae).__name__} cannot {method.removeprefix('enable_')}; leave it off")
            if wanted:
                getattr(vae, method)()
        if model.offload_vae:
            _, self._vae_visit = cpu_offload_with_hook(vae, self.device)

    @property
    def denoiser(self) -> Any:
        """The network that is trained."""
        return self.network

    @property
    def latent_channels(self) -> int:
        """C of the latents."""
        return self.family.channels(self.denoiser)

    # What is trained

    @property
    def lora_targets(self) -> list[str]:
        return list(self.family.lora_targets)

    def add_lora(self, rank: int, alpha: float, targets: Sequence[str] | None = None, init: Any = True) -> None:
        super().add_lora(rank, alpha, targets, init)
        self._freeze()

    def train_all(self) -> None:
        super().train_all()
        self._freeze()

    def _freeze(self) -> None:
        for name, parameter in self.denoiser.named_parameters():
            if any(part in name for part in self.family.frozen):
                parameter.requires_grad_(False)

    def checkpoint_gradients(self) -> None:
        self.denoiser.enable_gradient_checkpointing()

    def save(self, folder: str | Path, weights: dict[str, Tensor] | None = None) -> None:
        """Write what plain diffusers loads: a LoRA file for `load_lora_weights`, or the whole denoiser.

        Where the pipeline's class has no `load_lora_weights`, the file is for its transformer's `load_lora_adapter`.
        A second transformer has a file of its own, for `load_into_transformer_2=True`.
        """
        for name, network in self.networks.items():
            whole = network if weights is None else self._with_weights(network, weights)
            if not self.lora:
                whole.save_pretrained(Path(folder) / name)
            elif hasattr(self.pipeline, "save_lora_weights"):
                type(self.pipeline).save_lora_weights(
                    str(folder),
                    weight_name=lora_file(name),
                    **{f"{self.family.denoiser}_lora_layers": get_peft_model_state_dict(whole)},
                    **_collate_lora_metadata({self.family.denoiser: whole}),
                )
            else:
                whole.save_lora_adapter(str(folder), weight_name=lora_file(name))

    def _with_weights(self, network: Any, weights: dict[str, Tensor]) -> Any:
        """A network like this one with these weights; with LoRA only the adapter has any."""
        with torch.device("meta"):
            whole = type(network).from_config(network.config)
            if self.lora:
                whole.add_adapter(network.peft_config["default"])
        whole.load_state_dict(weights, strict=not self.lora, assign=True)
        return whole

    def load(self, folder: str | Path) -> None:
        """Read what `save` wrote, for sampling."""
        for name, network in self.networks.items():
            whole = Path(folder) / name
            if whole.is_dir():
                loaded = type(network).from_pretrained(str(whole), dtype=self.dtype)
                network.load_state_dict(loaded.state_dict())
                continue
            self.lora = True
            if hasattr(self.pipeline, "load_lora_weights"):
                second = {"load_into_transformer_2": True} if name == "transformer_2" else {}
                self.pipeline.load_lora_weights(str(folder), weight_name=lora_file(name), **second)
            else:
                network.load_lora_adapter(str(folder), prefix=None, weight_name=lora_file(name))

    # Prompts

    @torch.no_grad()
    def encode(
        self,
        prompts: Sequence[str],
        sources: Sequence[Source | None] | None = None,
        size: tuple[int, int] | None = None,
    ) -> list[Prompt]:
        """Put the embeddings of the distinct prompts into the cache; the text encoders leave the device after.

        Each is encoded alone: in a batch it would depend, in its last bits, on those it came with, and a resumed run,
        whose cache is empty, would not repeat the uninterrupted one.

        Args:
            sources: the pictures of each prompt, default none.
            size: width and height to bring them to.

        Returns:
            the key of each in the cache: pictures count where the family encodes them with the prompt.
        """
        seen = sources if sources is not None and self.family.encodes_images else [None] * len(prompts)
        keys = [(text, source, size if source else None) for text, source in zip(prompts, seen, strict=True)]
        missing = [key for key in dict.fromkeys(keys) if key not in self._embeddings]
        for key in keys:
            if key in self._embeddings:
                self._embeddings.move_to_end(key)
        if not missing:
            return keys
        self._report_cut_prompts([text for text, _, _ in missing])
        encoders = [m for n, m in self.pipeline.components.items() if n.startswith("text_encoder")]
        for encoder in encoders:
            to_device(encoder, self.device)
        for key in missing:
            text, source, _ = key
            if source is None and self.family.encodes_images:
                name = type(self.pipeline).__name__
                raise ConfigError(f"{name} encodes prompts with their pictures, and {text!r} came without")
            pictures = {} if source is None else {"image": opened(source, size)[0]}
            options = self.encode_options | pictures
            encoded = self.family.encode(self.pipeline, [text], device=self.device, **options)
            self._embeddings[key] = {name: value[0].cpu() for name, value in encoded.items()}
        if self.device.type != "cpu":
            for encoder in encoders:
                to_device(encoder, "cpu")
        while len(self._embeddings) > max(ENCODED_PROMPTS, len(set(keys))):
            self._embeddings.popitem(last=False)
        return keys

    def _report_cut_prompts(self, prompts: Sequence[str]) -> None:
        for name, limit in self.family.token_limits(self.pipeline, **self.encode_options).items():
            tokens = getattr(self.pipeline, name)(list(prompts), truncation=False, verbose=False).input_ids
            cut = [(len(ids), prompt) for ids, prompt in zip(tokens, prompts, strict=True) if len(ids) > limit]
            if cut:
                length, prompt = cut[0]
                logger.warning(
                    "%d of %d prompts are longer than the %d tokens of the pipeline's %s, which does not see "
                    "their ends; the first has %d: %r",
                    *(len(cut), len(prompts), limit, name, length, prompt),
                )

    def prompt_vectors(self, prompts: Sequence[str], sources: Sequence[Source | None] | None = None) -> Tensor:
        """[B, D] one vector a prompt: the mean over its tokens of the text embedding."""
        keys = self.encode(prompts, sources)
        return torch.stack([next(iter(self._embeddings[key].values())).float().mean(0) for key in keys])

    def _embeds(
        self, prompts: Sequence[str], source: Source | None, guidance: float, call: dict[str, Any]
    ) -> dict[str, Any]:
        negative = self.family.negative(guidance)
        texts = [*prompts, ""] if negative else prompts
        size = None if source is None else (call["width"], call["height"])
        encoded = [self._embeddings[key] for key in self.encode(texts, [source] * len(texts), size)]
        embeds = self.family.stack(encoded[: len(prompts)])
        if negative:
            stacked = self.family.stack(encoded[-1:] * len(prompts))
            embeds |= {f"negative_{name}": value for name, value in stacked.items()}
        return tree_map_only(Tensor, lambda value: value.to(self.device), embeds)

    # Rollout and replay

    @torch.no_grad()
    def sample(
        self,
        prompts: Sequence[str],
        seeds: Sequence[int],
        *,
        steps: int,
        guidance: float = 1.0,
        sigmas: Sequence[float] | None = None,
        kernel: Kernel = ode,
        eta: Tensor | None = None,
        noise_seeds: Sequence[int] | None = None,
        batch_size: int = 64,
        order: Literal[1, 2] = 1,
        sources: Sequence[Source | None] | None = None,
        **call: Any,
    ) -> Rollout:
        """Sample one trajectory a prompt through the pipeline's own call.

        Args:
            prompts: B prompts; repeat one for a group.
            seeds: B seeds of the start noise: `torch.Generator().manual_seed(seed)` in plain diffusers.
            steps: number of denoising steps T.
            guidance: classifier-free guidance scale; 1 does without.
            sigmas: T noise levels before the pipeline's own shift; default the scheduler's.
            kernel, eta: the transition kernel, and [T] or [B, T] noise levels; eta None samples the ODE.
            noise_seeds: B seeds of the step noise, default `seeds`.
            batch_size: samples a network call; it does not change a picture.
            order: of the solver after the last stochastic step: 1 is Euler's rule, 2 DPM-Solver++.
            sources: the pictures that each of the B samples is made from, brought to the call's height and width.
            call: further arguments of the pipeline's call (height, width, ...).
        """
        if guidance < 1:
            raise ConfigError(f"guidance {guidance} is below 1; 1 samples without guidance")
        self.family.check_size(self.pipeline, call)
        noise_seeds = seeds if noise_seeds is None else noise_seeds
        call |= {"sigmas": list(sigmas)} if sigmas is not None else {}
        own = check_sources(self.pipeline, self.family, sources, prompts, call)
        parts = []
        alike = list(zip(own, prompts, strict=True)) if self.family.unpadded else own
        for rows in runs(alike, min(batch_size, self.family.largest_batch or batch_size)):
            part_eta = eta[rows] if eta is not None and eta.dim() == 2 else eta
            size = self.family.size(self.pipeline, call)
            scheduler = TransitionScheduler(
                self.pipeline.scheduler, self.family, size, kernel, part_eta, noise_seeds[rows], order
            )
            source = own[rows.start]
            parts.append(self._sample(prompts[rows], source, seeds[rows], steps, guidance, scheduler, call))
        return Rollout.cat(parts)

    def _sample(
        self,
        prompts: Sequence[str],
        source: Source | None,
        seeds: Sequence[int],
        steps: int,
        guidance: float,
        scheduler: TransitionScheduler,
        call: dict[str, Any],
    ) -> Rollout:
        with CallRecorder(self.denoiser) as recorded:
            self._call(prompts, source, seeds, steps, guidance, scheduler, call)
        self.forwards += sum(recorded.rows)
        beside = self.family.beside(recorded.entering, scheduler.carried)
        conditions = recorded.conditions(len(prompts), len(scheduler.levels) - 1, self.family.shared, beside)
        assert scheduler.recorder is not None
        trajectory = scheduler.recorder.trajectory()
        rows = torch.arange(len(prompts), device=trajectory.latents.device)
        return Rollout(
            trajectory,
            Ragged([conditions], torch.zeros_like(rows), rows) if self.family.unpadded else conditions,
            list(prompts),
            guidance,
            scheduler.kernel,
            [source] * len(prompts),
            None if beside is None else self.family.given(beside[: len(prompts)]),
        )

    def _call(
        self,
        prompts: Sequence[str],
        source: Source | None,
        seeds: Sequence[int],
        steps: int,
        guidance: float,
        scheduler: TransitionScheduler,
        call: dict[str, Any],
    ) -> None:
        """The pipeline's own call with another scheduler."""
        own = self.pipeline.scheduler
        embeds = self._embeds(prompts, source, guidance, call)
        if source is not None:
            pictures = opened(source, (call["width"], call["height"]))
            call = call | self.family.sources(*pictures, len(prompts), call)
        self.pipeline.scheduler = scheduler
        try:
            with self._autocast():
                self.pipeline(
                    **embeds,
                    **self.family.arguments(guidance),
                    num_inference_steps=steps,
                    generator=generators(seeds),
                    output_type="latent",
                    **call,
                )
        finally:
            self.pipeline.scheduler = own

    def velocity(self, rollout: Rollout, samples: Tensor, steps: Tensor, x: Tensor | None = None) -> Tensor:
        """Guided velocities of the present weights: [N, ...] for the pairs (samples[n], steps[n]).

        One network call serves pairs of different steps; gradients flow to what is trained.

        Args:
            x: [N, ...] states of these samples at these steps; default those stored.
        """
        x = rollout.trajectory.latents[samples, steps] if x is None else x
        sigma = rollout.trajectory.sigmas[steps]
        return self._velocity(x, sigma, rollout.conditions, samples, steps, rollout.guidance)

    def _velocity(
        self, x: Tensor, sigma: Tensor, conditions: Conditions | Ragged, samples: Tensor, steps: Tensor, guidance: float
    ) -> Tensor:
        if isinstance(conditions, Ragged):
            parts = [
                (self._velocity(x[places], sigma[places], part, rows, steps[places], guidance), places)
                for part, rows, places in conditions.split(samples)
            ]
            velocities, order = zip(*parts, strict=True)
            return torch.cat(velocities)[torch.cat(order).argsort()]
        sigma = sigma.view(-1, *[1] * (x.dim() - 1))
        latents = self.family.pack(x * self.family.scale(sigma)).to(self.dtype)
        copies = conditions.copies
        self.forwards += len(x) * sum(copies)
        network = self.model if torch.is_grad_enabled() else self._bare
        with self._autocast():
            outputs = []
            for n, call in zip(copies, conditions.gather(samples, steps), strict=True):
                beside = call.pop(BESIDE, None)
                output = network(self.family.network_input(torch.cat([latents] * n), beside), **call)[0]
                # what it says of the part beside the latents is not asked for
                count = latents.shape[1]
                outputs.append(self.family.predicted(output, count) if isinstance(output, Tensor) else output)
            guided = self.family.unpack(self.family.velocity(outputs, copies, guidance), x.shape[2:])
            return self.family.flow_velocity(guided, x, sigma, self.family.scheduler(self.pipeline.scheduler))

    def at(self, rollout: Rollout) -> VelocityAt:
        """The velocity at any state of a rollout's samples, as completions and trees ask for it."""
        return lambda x, samples, steps: self.velocity(rollout, samples, steps, x)

    def score(self, rollout: Rollout, samples: Tensor, steps: Tensor) -> Transition:
        """Stored transitions under the present weights."""
        return rollout.trajectory.score(rollout.kernel, self.velocity(rollout, samples, steps), samples, steps)

    @torch.no_grad()
    def verify(self, rollout: Rollout) -> float:
        """Compare replayed with recorded velocities on up to 8 pairs of the first and last steps.

        Returns:
            The largest difference relative to the largest velocity.

        Raises:
            FlowalignError: replay does not reproduce the rollout, so this pipeline cannot be trained this way.
        """
        count, last = min(len(rollout), 4), rollout.trajectory.velocity.shape[1] - 1
        samples = torch.arange(count, device=self.device).repeat(2)
        steps = torch.tensor([0] * count + [last] * count, device=self.device)
        recorded = rollout.trajectory.velocity[samples, steps]
        difference = (self.velocity(rollout, samples, steps).float() - recorded).abs().max()
        relative = float(difference / recorded.abs().max())
        tolerance = 1e-4 if self.dtype == torch.float32 else 5e-2
        if not relative <= tolerance:
            raise FlowalignError(
                f"replaying {type(self.pipeline).__name__} differs from its rollout by {relative:.2g} "
                f"(at most {tolerance:g} is numerical noise); its family needs its own velocity or encode"
            )
        return relative

    # The forward process

    @torch.no_grad()
    def noised(
        self,
        prompts: Sequence[str],
        levels: Tensor,
        images: Sequence[Image],
        seeds: Sequence[int],
        guidance: float = 1.0,
        batch_size: int = 64,
        **call: Any,
    ) -> Noised:
        """Pictures noised to levels, ready for `velocity_of`.

        The pipeline's own call says what its denoiser is called with at these levels, without the network being run.

        Args:
            prompts: B prompts.
            levels: [B] noise levels in (0, 1) before the pipeline's own shift, which then applies to them.
            images: B pictures, brought to the pipeline's size.
            seeds: B seeds of the noise.
            guidance: classifier-free guidance scale of the velocities; 1 does without.
            call: further arguments of the pipeline's call (height, width).
        """
        name = type(self.pipeline).__name__
        if self.family.images[0]:
            raise ConfigError(f"{name} makes samples from pictures, and learns from rollouts only")
        if self.family.unpadded:
            raise ConfigError(f"{name} takes texts of one length at a time, and learns from rollouts only")
        distinct, place = (-levels).unique(return_inverse=True)
        size = self.family.size(self.pipeline, call)
        scheduler = LevelScheduler(self.pipeline.scheduler, self.family, size, ode, None, seeds)
        with CallRecorder(self.denoiser, dry=True) as recorded:
            call = {"sigmas": (-distinct).tolist()} | call
            self._call(prompts, None, seeds, len(distinct), guidance, scheduler, call)
        conditions = recorded.conditions(len(prompts), len(distinct), self.family.shared)
        height, width = (self.pipeline.vae_scale_factor * side for side in scheduler.shape[-2:])
        pixels = self.pipeline.image_processor.preprocess(list(images), height=height, width=width)
        parts = [self.family.latents(self.pipeline, part.to(self.device)) for part in pixels.split(batch_size)]
        if self._vae_visit is not None:
            self._vae_visit.offload()
        x0 = torch.cat(parts).float()
        noise = normal(x0.shape[1:], generators(seeds), self.device)
        place = place.to(self.device)
        return Noised(x0, noise, scheduler.levels.to(self.device)[place], conditions, place, guidance)

    def velocity_of(self, noised: Noised, rows: Tensor) -> Tensor:
        """[N, ...] velocities of the present weights at these of the noised samples, [N] indices."""
        return self._velocity(
            noised.x[rows], noised.sigma[rows], noised.conditions, rows, noised.levels[rows], noised.guidance
        )

    @torch.no_grad()
    def decode(self, latents: Tensor, batch_size: int = 64) -> list[Image]:
        """Finished latents [B, ...] to pictures, as the pipeline would postprocess them."""
        images: list[Image] = []
        for part in latents.split(batch_size):
            pixels = self.family.decode(self.pipeline, part)
            images += self.family.pictures(self.pipeline, pixels.float())
        if self._vae_visit is not None:
            self._vae_visit.offload()
        return images

    def make(
        self, prompts: Sequence[str], seeds: Sequence[int], sampling: Any, metadata: Sequence[Mapping[str, Any]] = ()
    ) -> list[Image]:
        """A finished picture of every prompt, as an evaluation section of the configuration says."""
        sources = [Source.of(record) for record in metadata] or None
        rollout = self.sample(prompts, seeds, sources=sources, **sampling.arguments())
        return self.decode(rollout.whole(rollout.trajectory.final), sampling.batch_size)
