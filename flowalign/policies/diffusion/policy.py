"""A policy over a diffusers pipeline: rollout is the pipeline's own call, replay is the denoiser alone."""

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

import torch
from accelerate import cpu_offload_with_hook
from diffusers import DiffusionPipeline, ModelMixin
from PIL.Image import Image
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flowalign import registry
from flowalign.data import Source
from flowalign.data.sizes import rows_by_size
from flowalign.errors import ConfigError
from flowalign.policies.base import TRAINED, Policy, torch_dtype
from flowalign.policies.diffusion.caching import caching
from flowalign.policies.diffusion.checks import check_replay
from flowalign.policies.diffusion.conditions import EXTRA_INPUT, GUIDE, CallRecorder, Conditions, Ragged, standing_in
from flowalign.policies.diffusion.embeddings import EmbeddingStore
from flowalign.policies.diffusion.experts import Experts, own_weights
from flowalign.policies.diffusion.families import CONDITIONING, Family, check_adapters, family_of, to_device
from flowalign.policies.diffusion.forward_process import CleanSamples, ForwardProcess, Noised
from flowalign.policies.diffusion.prompts import PromptEncoder
from flowalign.policies.diffusion.rlg import weighed_velocity, weighing
from flowalign.policies.diffusion.rollout import Rollout, ending
from flowalign.policies.diffusion.scales import Scale, guided_at, largest, scale_of
from flowalign.policies.diffusion.scheduler import StartScheduler, TransitionScheduler
from flowalign.policies.diffusion.sources import opened
from flowalign.policies.diffusion.storage import (
    check_options,
    described_by,
    load_lora,
    load_pipeline,
    load_single_file,
    load_text_encoders,
    save_lora,
    with_weights,
)
from flowalign.policies.diffusion.text_lora import add_text_lora, encode_again
from flowalign.policies.diffusion.writing import AnyWriter
from flowalign.policies.settings import Model, SamplingSettings, TextLora
from flowalign.runs.checkpoint import check_weights
from flowalign.runs.progress import report
from rewards import Latents, Sample, sides
from rewards.base import vae_of
from samplers import All, Recorder, Transition, derive_seed, ode
from samplers.completion import VelocityAt
from samplers.kernels import Kernel
from samplers.noise import generators
from samplers.rows import distinct_rows
from samplers.stored import Allocate

DECODED_ON_CPU = 16
"""Pictures that a CPU decodes at once: what the VAE computes of more leaves its cache, and 64 took 1.2 to 1.6 times as
long."""


class DiffusersPolicy(Policy[Rollout]):
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
        """Trained networks by their names in the pipeline."""
        several = len(self.networks) > 1
        super().__init__(Experts(self.networks) if several else self.networks[self.family.denoiser], device)
        self.denoiser: ModelMixin = self.network
        """Network that is trained."""
        self.guide: Any = getattr(pipeline, self.family.guide, None) if self.family.guide else None
        """Network of its own for the side of guidance without a prompt; None: the denoiser answers for both."""
        self.encoder = PromptEncoder(pipeline, self.family, self.device, encode_options or {})
        self.guidance_gradient: Literal["both", "conditional"] = "both"
        """Branches of guidance that gradients of a velocity flow through."""
        self.start_noise: Callable[[Rollout], Tensor] | None = None
        """Function that moves the start noise of all samples: a rollout that stayed there -> [B, ...]"""
        self.writer: AnyWriter | None = None
        """Language model that writes what is drawn."""
        self.frozen = False
        """The start weights sample, and training only moves the start noise."""
        self._vae_visit: Any = None
        """Hook of accelerate that takes the VAE off the device, where it only visits."""
        self.family.check(pipeline)
        pipeline.set_progress_bar_config(disable=True)
        for module in pipeline.components.values():
            if isinstance(module, nn.Module):
                module.requires_grad_(False).eval()
        to_device(self.denoiser, self.device)
        for name in ("vae", *CONDITIONING, self.family.guide):
            to_device(getattr(pipeline, name, None), self.device)
        if attention is not None:
            self._set_attention(attention)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        dtype: torch.dtype | str = torch.float32,
        device: torch.device | str = "cpu",
        base_bits: int | str | None = None,
        config: str | None = None,
        embeddings: str | Path | None = None,
        **settings: Any,
    ) -> Self:
        """Load a pipeline. Components saved as absent (SD3 without T5) stay absent.

        Args:
            path: a folder, a hub name, or a single file (.safetensors) of all weights or of the denoiser's.
            base_bits: 4 or 8 loads the denoiser quantised by bitsandbytes, which needs a GPU, 'fp8' by torchao; None as
                it is.
            config: for a single file: folder or hub name of a pipeline that describes its parts.
            embeddings: folder that keeps those of prompts for later starts; text encoders are then loaded for the first
                prompt that it lacks.
        """
        described, options = described_by(path, config), settings.get("encode_options") or {}
        check_options(described, options, settings.get("attention"))
        if described != path:
            policy = cls(load_single_file(path, described, torch_dtype(dtype)), device, **settings)
        else:
            pipeline = load_pipeline(path, torch_dtype(dtype), base_bits, text_encoders=embeddings is None)
            policy = cls(pipeline, device, **settings)
        if embeddings is not None:
            on = {"dtype": str(torch_dtype(dtype)), "device": policy.device.type, "encode": options}
            policy.encoder.store = EmbeddingStore(embeddings, path, on)
            if described == path:
                policy.encoder.absent = functools.partial(load_text_encoders, path, torch_dtype(dtype))
        return policy

    def _set_attention(self, backend: str) -> None:
        try:
            self.denoiser.set_attention_backend(backend)
        except (ValueError, ImportError, RuntimeError) as error:
            raise ConfigError(f"attention backend '{backend}' cannot be used here: {error}") from error

    def save_memory(self, model: Model) -> None:
        """Take less of the device's memory, as a model section says: offload_text, offload_vae, tile_vae, slice_vae."""
        if model.offload_text:
            self.encoder.place = torch.device("cpu")
        vae = getattr(self.pipeline, "vae", None)
        for wanted, method in ((model.tile_vae, "enable_tiling"), (model.slice_vae, "enable_slicing")):
            if wanted and not hasattr(vae, method):
                raise ConfigError(f"model: {type(vae).__name__} cannot {method.removeprefix('enable_')}; leave it off")
            if wanted:
                getattr(vae, method)()
        if model.offload_vae:
            _, self._vae_visit = cpu_offload_with_hook(vae, self.device)

    @property
    def every_network(self) -> list[Any]:
        """Networks of the pipeline, and their copies for the reference."""
        start: Any = self._reference
        copies = [] if start is None else list(start.members.values()) if isinstance(start, Experts) else [start]
        return [*self.networks.values(), *copies]

    @property
    def latent_channels(self) -> int:
        """C of the latents."""
        return self.family.channels(self.denoiser)

    @property
    def lora_targets(self) -> list[str]:
        return list(self.family.lora_targets)

    @property
    def untrained(self) -> tuple[str, ...]:
        return self.family.untrained(self.network)

    def add_lora(
        self, rank: int, alpha: float, targets: Sequence[str] | str | None = None, init: bool | str = True
    ) -> None:
        check_adapters(type(self.pipeline).__name__)
        super().add_lora(rank, alpha, targets, init)

    def add_text_lora(self, settings: TextLora) -> None:
        """See `text_lora.add_text_lora`."""
        add_text_lora(self, settings)

    def checkpoint_gradients(self) -> None:
        for network in filter(None, (self.denoiser, self.guide)):
            network.enable_gradient_checkpointing()

    def save(self, folder: str | Path, weights: dict[str, Tensor] | None = None) -> None:
        """Write what plain diffusers loads: a LoRA file for `load_lora_weights`, or the whole denoiser.

        A writer has a folder of its own. Where the pipeline's class has no `load_lora_weights`, the file is for its
        transformer's `load_lora_adapter`.
        A second transformer has a file of its own, for `load_into_transformer_2=True`.
        """
        for name, network in self.networks.items():
            whole = network if weights is None else with_weights(network, own_weights(weights, name), self.lora)
            if self.lora:
                save_lora(self.pipeline, self.family.denoiser, name, whole, folder, self.companions)
            else:
                whole.save_pretrained(Path(folder) / name)
        if self.writer is not None:
            self.writer.save(Path(folder) / self.writer.component)

    def load(self, folder: str | Path) -> None:
        check_weights(folder)
        # an adapter may be theirs
        self.encoder.load()
        for name, network in self.networks.items():
            whole = Path(folder) / name
            if whole.is_dir():
                loaded = type(network).from_pretrained(str(whole), dtype=self.dtype)
                network.load_state_dict(loaded.state_dict())
            else:
                if TRAINED in getattr(network, "peft_config", {}):
                    network.delete_adapters(TRAINED)
                for component, encoder in self.pipeline.components.items():
                    if component.startswith("text_encoder") and TRAINED in getattr(encoder, "peft_config", {}):
                        encoder.delete_adapter(TRAINED)
                try:
                    load_lora(self.pipeline, name, network, folder, TRAINED)
                except LookupError as error:
                    raise ConfigError(str(error)) from error
                self.lora = True
                # of text encoders without what was loaded
                self.encoder.embeddings.clear()
                if any(TRAINED in getattr(component, "peft_config", {}) for component in self.encoder.parts):
                    self.encoder.store = None

    def read_lora(self, path: str | Path, name: str) -> None:
        check_weights(path)
        self.encoder.load()
        for key, network in self.networks.items():
            load_lora(self.pipeline, key, network, path, name)
        for component, module in self.pipeline.components.items():
            if component not in self.networks and name in getattr(module, "peft_config", {}):
                raise ConfigError(
                    f"model.lora.path: '{path}' adapts {component} too, which is not trained here and would be missing "
                    "from what is saved; a LoRA of the denoiser alone works"
                )

    def expect(self, coming: Callable[[], Sequence[str]]) -> None:
        """Encode these prompts with the next ones that are asked for, in one visit of the text encoders."""
        self.encoder.coming = coming

    def prompt_vectors(self, prompts: Sequence[str], sources: Sequence[Source | None] | None = None) -> Tensor:
        """[B, D] one vector a prompt: the mean over its tokens of the text embedding."""
        return self.encoder.vectors(prompts, sources)

    @torch.no_grad()
    def sample(
        self,
        prompts: Sequence[str] | str,
        seeds: Sequence[int] | None = None,
        *,
        n: int = 1,
        steps: int,
        guidance: float | Sequence[float] = 1.0,
        guidance_2: float | None = None,
        negative_prompt: str = "",
        sigmas: Sequence[float] | None = None,
        kernel: Kernel | str = ode,
        eta: Tensor | float | None = None,
        noise_seeds: Sequence[int] | None = None,
        batch_size: int = 64,
        order: Literal[1, 2] = 1,
        metadata: Sequence[Mapping[str, Any]] = (),
        rlg: float | Mapping[str, float] = 1.0,
        rlg_from: int = 0,
        cache: Callable[[Any], Any] | None = None,
        dry: bool = False,
        allocate: Allocate | None = None,
        chunks: int = 1,
        until: int | None = None,
        **call: object,
    ) -> Rollout:
        """Sample trajectories through the pipeline's own call.

        Args:
            prompts: one or several; B in all with the repetitions.
            seeds: B seeds of the start noise, `torch.Generator().manual_seed(seed)` in plain diffusers; default from 0.
            n: trajectories a prompt.
            steps: number of denoising steps T.
            guidance: classifier-free guidance scale, 1 does without; or T of them, one a step. A pipeline whose call
                takes one alone is then asked for its denoiser's calls, and the steps are made here.
            guidance_2: that scale for the second network, where there are two; default `guidance`.
            negative_prompt: prompt that guidance leads away from.
            sigmas: T noise levels before the pipeline's own shift; default the scheduler's.
            kernel: the transition kernel, or its name.
            eta: [T] or [B, T] noise levels; a number is the level of all steps but the last; None samples the ODE.
            noise_seeds: B seeds of the step noise; by default they follow from `seeds`, and differ from them.
            order: order of the solver after the last stochastic step: 1 is Euler's rule, 2 DPM-Solver++.
            metadata: names the pictures that a sample is made from (`Source`), brought to the call's height and width,
                and a negative prompt of its own ('negative_prompt').
            rlg: weight w of what training changed, velocity = base + w * (tuned - base) (RLG, arXiv 2508.21016): 0 is
                the base (a writer's too), 1 the tuned model, more goes beyond it. Other weights run the network twice.
                Or of several LoRAs, by their paths, 'trained' the policy's own; each runs the network once more.
            rlg_from: the first step that rlg holds for, of each chunk.
            cache: makes a feature cache of diffusers, see `caching`; a replay differs from such a rollout.
            dry: do not run the network: every state is the start noise, and all else as in sampling.
            allocate: memory on the host that states and embeddings of each network batch move to, as of
                `samplers.stored`; None: they stay on the device.
            chunks: chunks of frames that a causal pipeline makes one after the other, each in `steps` steps that `eta`
                is of: T is `chunks * steps`.
            until: of a causal pipeline, the step of each chunk that goes straight to its prediction of x0 and is the
                last one (Self-Forcing, arXiv 2506.08009).
            call: further arguments of the pipeline's call (height, width, ...).
        """
        scale = scale_of(guidance, steps)
        self._check_guidance(guidance_2, call)
        causal, own_steps = self.family.causal, isinstance(scale, tuple) and not self.family.arguments_by_step(scale)
        if own_steps:
            self._check_own_steps(cache is not None)
        self._check_causal(chunks > 1 or until is not None, order, cache is not None)
        prompts = [text for text in ([prompts] if isinstance(prompts, str) else prompts) for _ in range(n)]
        seeds = range(len(prompts)) if seeds is None else seeds
        kernel = registry.resolve("kernels", kernel, "kernel") if isinstance(kernel, str) else kernel
        eta = All().etas(steps, eta, 0, 0) if isinstance(eta, int | float) else eta
        call |= {"chunks": chunks} if causal else {}
        self.family.check_size(self.pipeline, call)
        noise_seeds = [derive_seed(seed, 1) for seed in seeds] if noise_seeds is None else noise_seeds
        call |= {"sigmas": list(sigmas)} if sigmas is not None else {}
        sources = self.family.sources_of(self.pipeline, metadata, prompts, call)
        negative = [record.get("negative_prompt", negative_prompt) for record in metadata or [{}] * len(prompts)]
        written = None
        if self.writer is not None:
            if rlg == 0 and not self.writer.lora:
                raise ConfigError(
                    f"rlg 0 is the base, and the weights that its {self.writer.component} began with were not kept; "
                    "1 works, and so does a LoRA of it (algorithm.writer.lora)"
                )
            with self.writer.reference() if rlg == 0 else contextlib.nullcontext():
                written = self.writer.write(prompts, seeds, noise_seeds, call, batch_size)
        texts = list(zip(prompts if written is None else written.texts, negative, strict=True))
        scales = (scale,) if guidance_2 is None else (scale, guidance_2)
        rollouts: list[Rollout] = []
        walk = StartScheduler if dry else TransitionScheduler
        for rows in self.family.batches(sources, texts, batch_size):
            report(rows.start, len(texts))
            if written is not None:
                call |= {name: value[rows] for name, value in written.arguments.items()}
            part_eta = eta[rows] if eta is not None and eta.dim() == 2 else eta
            size = self.family.size(self.pipeline, call)
            own = self.pipeline.scheduler
            scheduler = walk(own, self.family, size, kernel, part_eta, noise_seeds[rows], order, chunks=chunks)
            cached = contextlib.nullcontext() if cache is None or dry else caching(self, cache, scheduler)
            walks = (causal or own_steps or (rlg != 1 and self.family.rescales)) and not dry
            mixed: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
            if rlg != 1 and not walks:
                mixed = weighing(self, rlg, lambda scheduler=scheduler: scheduler.taken >= rlg_from)  # type: ignore[misc]
            with cached, mixed:
                sample = functools.partial(self._sample, texts[rows], sources[rows.start], seeds[rows], steps, scales)
                stay = StartScheduler(own, self.family, size, kernel, None, seeds[rows], chunks=chunks)
                if walks:
                    start = replace(sample(stay, call, True), rlg=rlg, rlg_from=rlg_from)
                    rollout = self._walked(start, kernel, part_eta, noise_seeds[rows], order, until)
                elif self.start_noise is None or dry:
                    rollout = sample(scheduler, call, dry)
                else:
                    start = sample(stay, call, True)
                    moved = sample(scheduler, call | {"latents": self._moved(start)}, False)
                    rollout = replace(moved, unmoved=start.trajectory.latents[:, 0])
            rollouts.append(rollout if allocate is None else rollout.stored(allocate))
        report(len(texts), len(texts))
        whole = replace(Rollout.cat(rollouts), rlg=rlg, rlg_from=rlg_from, cached=cache is not None)
        return whole if written is None else replace(whole, prompts=list(prompts), written=written.record)

    @torch.no_grad()
    def _walked(
        self,
        start: Rollout,
        kernel: Kernel,
        eta: Tensor | None,
        seeds: Sequence[int],
        order: Literal[1, 2],
        until: int | None,
    ) -> Rollout:
        """The rollout from where another one stayed, by velocities that no single call of the network has."""
        if until is not None:
            start, eta = start.until(until), None if eta is None else ending(eta, until)
        x, sigmas = start.trajectory.latents[:, 0], start.trajectory.sigmas
        rows, steps = torch.arange(len(x), device=x.device), len(sigmas) - 1
        moved = x if self.start_noise is None else self.start_noise(start)
        eta, chunks = torch.zeros(steps) if eta is None else eta, start.trajectory.chunks
        recorder = Recorder(moved, sigmas, kernel, eta, seeds, order, chunks)
        with self.reference() if self.frozen else contextlib.nullcontext():
            for step in range(steps * chunks):
                recorder.step(self.velocity(start, rows, torch.full_like(rows, step), recorder.x))
        unmoved = None if self.start_noise is None else x
        return replace(start, trajectory=recorder.trajectory(), kernel=kernel, unmoved=unmoved)

    def _moved(self, start: Rollout) -> Tensor:
        """The latents of the pipeline's loop where `start_noise` moves the start noise to."""
        assert self.start_noise is not None
        first = start.trajectory.sigmas[0]
        latents = self.family.pack(self.start_noise(start) * self.family.loop_scale(first)).to(self.dtype)
        # a pipeline scales what it is given as it does what it draws
        latents = latents / getattr(self.pipeline.scheduler, "init_noise_sigma", 1.0)
        return latents

    def _check_causal(self, in_chunks: bool, order: int, cached: bool) -> None:
        """Refuse chunks where videos are made as a whole, and what does not go with them."""
        name = type(self.pipeline).__name__
        if in_chunks and not self.family.causal:
            raise ConfigError(f"chunks: {name} makes its samples as a whole; 1 works")
        if in_chunks and order == 2:
            raise ConfigError("order: chunks are made by Euler's rule; 1 works")
        if cached and self.family.causal:
            raise ConfigError(
                f"cache: the calls of {name} are not its pipeline's loop, which a cache needs; null works"
            )

    def _check_own_steps(self, cached: bool) -> None:
        """Refuse what only the pipeline's own loop makes, which has one scale of guidance."""
        name = type(self.pipeline).__name__
        if self.family.samples_sound:
            raise ConfigError(f"guidance: {name} makes a sound along with the pictures by one scale; one number works")
        if cached:
            raise ConfigError(
                f"cache: the call of {name} takes one scale of guidance, and a cache needs its loop; one number works"
            )

    def _check_guidance(self, guidance_2: float | None, call: dict[str, Any]) -> None:
        """Refuse what this pipeline has not, or a replay would not repeat."""
        name = type(self.pipeline).__name__
        if guidance_2 is not None and len(self.networks) == 1:
            raise ConfigError(f"guidance_2 is of a second denoiser, and this {name} has one; leave it out")
        if call.get("guidance_rescale"):
            raise ConfigError("guidance_rescale is not supported, since replay guides without it; leave it at 0")

    def _sample(
        self,
        texts: Sequence[tuple[str, str]],
        source: Source | None,
        seeds: Sequence[int],
        steps: int,
        guidance: tuple[Scale, ...],
        scheduler: TransitionScheduler,
        call: dict[str, Any],
        dry: bool,
    ) -> Rollout:
        prompts = [prompt for prompt, _ in texts]
        weights = self.reference() if self.frozen else contextlib.nullcontext()
        with weights, self.recorder(largest(guidance[0]), dry) as recorded:
            output = self._call(texts, source, seeds, steps, guidance, scheduler, call)
        self.forwards += 0 if dry else sum(recorded.rows)
        extra = self.family.extra_input(recorded.first_input, scheduler.loop_shape)
        family, count = self.family, (len(scheduler.levels) - 1) * scheduler.chunks
        kept = functools.partial(family.kept, loop_shape=scheduler.loop_shape)
        noted = family.noted(self.pipeline)
        conditions = recorded.conditions(len(prompts), count, family.shared, kept, extra, noted)
        if isinstance(guidance[0], tuple) and conditions.branches == 1:
            raise ConfigError(
                f"guidance: {type(self.pipeline).__name__} takes the scale as an input of its network, one for all "
                "steps; one number works"
            )
        assert scheduler.recorder is not None
        trajectory = scheduler.recorder.trajectory()
        rows = torch.arange(len(prompts), device=trajectory.latents.device)
        return Rollout(
            trajectory=trajectory,
            conditions=Ragged([conditions], torch.zeros_like(rows), rows) if self.family.unpadded else conditions,
            prompts=list(prompts),
            guidance=guidance,
            kernel=scheduler.kernel,
            sources=[source] * len(prompts),
            first_frames=None if extra is None else self.family.first_frames(extra[: len(prompts)]),
            sound=output.audio if self.family.samples_sound else None,
            policy=self,
        )

    def recorder(self, guidance: float, dry: bool) -> CallRecorder:
        """Context in which the calls of the networks that a pipeline asks at this guidance are written down."""
        return CallRecorder(self.denoiser, dry, self.guide if guidance > 1 else None)

    def _call(
        self,
        texts: Sequence[tuple[str, str]],
        source: Source | None,
        seeds: Sequence[int],
        steps: int,
        guidance: tuple[Scale, ...],
        scheduler: TransitionScheduler,
        call: dict[str, Any],
    ) -> Any:
        """Output of the pipeline's own call with another scheduler.

        Args:
            texts: prompts, each with its negative one.
            guidance: the scale of each network, or one for all.
        """
        scheduler_before = self.pipeline.scheduler
        size = None if source is None else (call["width"], call["height"])
        prompts, negative = zip(*texts, strict=True)
        embeds = self.encoder.arguments(prompts, negative, largest(guidance[0]), source, size)
        if source is not None:
            pictures = opened(source, size)
            call = self.family.sources(*pictures, len(texts), call)
        call = {self.family.renamed.get(name, name): value for name, value in call.items()}
        if len(guidance) == 2:
            call |= {"guidance_scale_2": guidance[1]}
        scale = guidance[0]
        by_step = self.family.arguments_by_step(scale) if isinstance(scale, tuple) else {}
        self.pipeline.scheduler = scheduler
        try:
            with self._autocast():
                return self.family.call(
                    self.pipeline,
                    **embeds,
                    **self.family.arguments(largest(scale)) | by_step,
                    num_inference_steps=steps,
                    # which some that make one sample do not take in a list
                    generator=generators(seeds)[0] if self.family.largest_batch == 1 else generators(seeds),
                    output_type="latent",
                    **call,
                )
        except ValueError as error:
            # pipelines say so what is wrong with their arguments
            said = " ".join(str(error).split())[:300]
            raise ConfigError(f"{type(self.pipeline).__name__} refused the call: {said}") from error
        finally:
            self.pipeline.scheduler = scheduler_before

    def velocity(self, rollout: Rollout, samples: Tensor, steps: Tensor, x: Tensor | None = None) -> Tensor:
        """Guided velocities of the current weights: [N, ...] for the pairs (samples[n], steps[n]).

        Where samples are made in chunks, those of each step's chunk. One network call serves pairs of different steps;
        gradients flow to what is trained. A stored state that several samples share is asked about once.

        Args:
            x: [N, ...] states of these samples at these steps; default those stored.
        """
        if x is None and rollout.trajectory.nodes is not None:
            samples, steps, inverse = rollout.trajectory.distinct(samples, steps)
            shared = self.velocity(rollout, samples, steps, rollout.trajectory.latents[samples, steps])
            # whose gradient is added up in order, unlike an index's
            return shared.index_select(0, inverse)
        x = rollout.trajectory.latents[samples, steps] if x is None else x
        if rollout.rlg_from and rollout.rlg != 1:
            begun = steps % (len(rollout.trajectory.sigmas) - 1) >= rollout.rlg_from
            ways = (replace(rollout, rlg=1.0, rlg_from=0), ~begun), (replace(rollout, rlg_from=0), begun)
            members = [mask.nonzero().squeeze(1) for _, mask in ways]
            apart = zip((way for way, _ in ways), members, strict=True)
            velocities = [self.velocity(way, samples[rows], steps[rows], x[rows]) for way, rows in apart if len(rows)]
            return torch.cat(velocities)[torch.cat(members).argsort()]
        at, to = rollout.trajectory.levels(steps)
        prompts = [rollout.prompts[i] for i in samples.tolist()] if self.encoder.trained else None

        def guided() -> Tensor:
            return self._velocity(x, at, rollout.conditions, samples, steps, rollout.guidance, prompts)

        velocity = guided() if rollout.rlg == 1 else weighed_velocity(self, rollout.rlg, guided)
        velocity, state = (rollout.trajectory.part(whole, steps) for whole in (velocity, x))
        at, to = (sigma.view(-1, *[1] * (x.dim() - 1)) for sigma in (at, to))
        scheduler = self.family.scheduler(self.pipeline.scheduler)
        return self.family.own_step(velocity, state, at, to, len(rollout.trajectory.sigmas) - 1, scheduler)

    def _velocity(
        self,
        x: Tensor,
        sigma: Tensor,
        conditions: Conditions | Ragged,
        samples: Tensor,
        steps: Tensor,
        guidance: tuple[Scale, ...],
        prompts: Sequence[str] | None = None,
    ) -> Tensor:
        if isinstance(conditions, Ragged):
            pieces = [
                (self._velocity(x[members], sigma[members], piece, rows, steps[members], guidance), members)
                for piece, rows, members in conditions.split(samples)
            ]
            velocities, order = zip(*pieces, strict=True)
            return torch.cat(velocities)[torch.cat(order).argsort()]
        sigma = sigma.view(-1, *[1] * (x.dim() - 1))
        latents = self.family.pack(x * self.family.scale(sigma)).to(self.dtype)
        copies = conditions.copies
        self.forwards += len(x) * sum(copies)
        if self.guidance_gradient == "conditional" and torch.is_grad_enabled() and sum(copies) > 1:
            outputs = self._branches(latents, conditions.gather(samples, steps, apart=True), len(copies))
        else:
            calls = conditions.gather(samples, steps)
            if prompts is not None:
                encode_again(self, calls, copies, prompts)
            outputs = [self._output(torch.cat([latents] * n), c) for n, c in zip(copies, calls, strict=True)]

        def guided_by(scale: float) -> Tensor:
            return self.family.unpack(self.family.velocity(outputs, copies, scale), x.shape[2:])

        with self._autocast():
            guided, *second = (guided_at(guided_by, scale, steps) for scale in guidance)
            if second:
                first = conditions.expert(steps).to(self.device) == 0
                guided = torch.where(first.view(sigma.shape), guided, *second)
            return self.family.flow_velocity(guided, x, sigma, self.family.scheduler(self.pipeline.scheduler))

    @contextlib.contextmanager
    def reference(self) -> Iterator[None]:
        with super().reference():
            if self._bare is self.network:
                yield
                return
            # the pipeline asks the networks it has: the copies answer for them
            network: Any = self._bare
            copies = iter(network.members.values() if isinstance(network, Experts) else [network])

            def answering(own: Callable[..., Any]) -> Callable[..., Any]:
                copy = next(copies)
                return functools.wraps(own)(lambda *args, **kwargs: copy(*args, **kwargs))

            with standing_in(list(self.networks.values()), answering):
                yield

    def _branches(self, latents: Tensor, branches: list[dict[str, Any]], calls: int) -> list[Any]:
        """Outputs of the denoiser in its calls of guidance, without a gradient of the unconditional branch."""
        outputs = []
        for number, branch in enumerate(branches):
            with torch.set_grad_enabled(number != self.family.unconditional):
                outputs.append(self._output(latents, branch))
        if calls == len(branches):
            return outputs
        tensors = isinstance(outputs[0], Tensor)
        return [torch.cat(outputs) if tensors else [row for rows in outputs for row in rows]]

    def _outputs(self, latents: Tensor, call: dict[str, Any]) -> Any:
        """All outputs of the denoiser for packed latents."""
        network = self.model if torch.is_grad_enabled() else self._bare
        network = self.guide if call.pop(GUIDE, False) else network
        extra = call.pop(EXTRA_INPUT, None)
        with self.family.ready(self._bare, call) as arguments, self._autocast():
            return self.family.ask(network, self.family.network_input(latents, extra), arguments)

    def _output(self, latents: Tensor, call: dict[str, Any]) -> Any:
        """Output of the denoiser for packed latents."""
        output = self._outputs(latents, call)[0]
        # without its prediction for the extra input
        return self.family.predicted(output, latents.shape[1]) if isinstance(output, Tensor) else output

    def at(self, rollout: Rollout) -> VelocityAt:
        """The velocity at any state of a rollout's samples, as completions and trees ask for it."""
        return lambda x, samples, steps: self.velocity(rollout, samples, steps, x)

    def score(self, rollout: Rollout, samples: Tensor, steps: Tensor) -> Transition:
        """Stored transitions under the current weights."""
        return rollout.trajectory.score(rollout.kernel, self.velocity(rollout, samples, steps), samples, steps)

    def verify(self, rollout: Rollout) -> float:
        """See `check_replay`."""
        return check_replay(self, rollout)

    def clean(self, prompts: Sequence[str], x0: Tensor, seeds: Sequence[int], **settings: Any) -> CleanSamples:
        """Clean latents, to be noised to levels: see `ForwardProcess.of`."""
        return ForwardProcess(self).of(prompts, x0, seeds, **settings)

    def encode(self, samples: Sequence[Any], batch_size: int = 64, **call: object) -> Tensor:
        """[B, ...] latents of pictures or videos: see `ForwardProcess.encoded`."""
        return ForwardProcess(self).encoded(samples, batch_size, **call)

    def velocity_of(self, clean: CleanSamples, noised: Noised, x: Tensor | None = None) -> Tensor:
        """[N, ...] guided velocities of the current weights at noised samples. A state that several are at is asked
        about once.

        Args:
            x: [N, ...] other states at their levels.
        """
        if x is None and noised.state is not None:
            first, inverse = distinct_rows(noised.state)
            return self.velocity_of(clean, noised.take(first, state=None)).index_select(0, inverse)
        x = noised.x if x is None else x
        return self._velocity(x, noised.sigma, clean.conditions, noised.samples, noised.level_index, clean.guidance)

    def velocities_of(self, clean: CleanSamples, noised: Noised, sound: Noised) -> tuple[Tensor, Tensor]:
        """[N, ...] velocities of noised pictures and of their noised sounds, which the network denoises together,
        without guidance."""
        assert isinstance(clean.conditions, Conditions) and clean.conditions.branches == 1
        [call] = clean.conditions.gather(noised.samples, noised.level_index)
        call["audio_hidden_states"] = sound.x.to(self.dtype)
        self.forwards += len(noised.samples)
        pictures, sounds = self._outputs(self.family.pack(noised.x).to(self.dtype), call)[:2]
        return self.family.unpack(pictures.float(), noised.x0.shape[2:]), sounds.float()

    def features_of(self, clean: CleanSamples, noised: Noised) -> Tensor:
        """[N, tokens, D] what the block in the denoiser's middle makes of noised samples, without guidance."""
        block, outputs = operator.attrgetter(self.family.middle)(self.denoiser), []
        block = block[len(block) // 2] if isinstance(block, nn.ModuleList) else block
        hook = block.register_forward_hook(lambda _, inputs, output: outputs.append(output))
        try:
            # at given states, so that each sample has a row though several share a state
            self.velocity_of(clean, noised, noised.x)
        finally:
            hook.remove()
        features = outputs[0][-1] if isinstance(outputs[0], tuple) else outputs[0]
        return features.flatten(2).transpose(1, 2) if features.dim() == 4 else features

    def decode_pixels(self, latents: Tensor) -> Tensor:
        """Finished latents [B, ...] to pictures [B, 3, H, W], or videos [B, 3, F, H, W], in [0, 1] with gradients.

        Sounds are [B, C, T] in [-1, 1]. What the VAE computes is not kept but computed again in the backward pass.
        """
        pixels = checkpoint(
            lambda x: self.family.decode(self.pipeline, x), latents, use_reentrant=False, preserve_rng_state=False
        )
        self.release_vae()
        return pixels.float().clamp(-1, 1) if self.family.makes_sound else (pixels.float() / 2 + 0.5).clamp(0, 1)

    def decode(self, rollout: Rollout, batch_size: int = 64) -> list[Image]:
        return self.decode_latents(rollout.whole(rollout.trajectory.final), batch_size)

    def make(
        self,
        prompts: Sequence[str],
        seeds: Sequence[int],
        sampling: SamplingSettings,
        metadata: Sequence[Mapping[str, Any]] = (),
        needs: frozenset[str] = frozenset(),
    ) -> list[Any]:
        """As `Policy.make`, size by size where the metadata of the prompts ask for several."""
        made: dict[int, Any] = {}
        for size, rows in rows_by_size(metadata or [{}] * len(prompts)).items():
            sized, records = sampling.model_copy(update=dict(size)), [metadata[i] for i in rows] if metadata else ()
            one = super().make([prompts[i] for i in rows], [seeds[i] for i in rows], sized, records, needs)
            made |= zip(rows, one, strict=True)
        return [made[i] for i in range(len(prompts))]

    def samples(self, rollout: Rollout, batch_size: int, needs: frozenset[str], shown: bool = True) -> list[Any]:
        return self.finished(rollout.whole(rollout.trajectory.final), batch_size, needs, shown, rollout.sound)

    def finished(
        self, latents: Tensor, batch_size: int, needs: frozenset[str], shown: bool = False, sound: Tensor | None = None
    ) -> list[Any]:
        """Finished latents [B, ...] as samples for rewards with these needs: pictures, or a `rewards.Sample` each.

        Args:
            shown: decode pictures even where no reward needs them.
            sound: [B, ...] latents of their sounds, where there are any.

        Raises:
            ConfigError: a reward needs the sound of samples that were made without.
        """
        wanted = sides(needs)
        if wanted == ["picture"] or (self.family.makes_sound and "latents" not in wanted):
            return self.decode_latents(latents, batch_size)
        samples = [Sample()] * len(latents)
        if shown or "picture" in wanted:
            samples = [Sample(picture) for picture in self.decode_latents(latents, batch_size)]
        if "latents" in wanted:
            whole = self.latents_of(latents.float())
            rows = zip(samples, whole.values, strict=True)
            samples = [replace(each, latents=replace(whole, values=row)) for each, row in rows]
        if "sound" in wanted:
            if sound is None:
                raise ConfigError(
                    "rewards: one scores sound, and only samples that the pipeline makes from start to end have one; a "
                    "method without branches or completions and rollout.share_start_noise: false work"
                )
            waves = [wave for chunk in sound.split(batch_size) for wave in self.family.sounds(self.pipeline, chunk)]
            samples = [replace(each, sound=wave) for each, wave in zip(samples, waves, strict=True)]
        return samples

    def latents_of(self, latents: Tensor) -> Latents:
        """Finished latents [B, ...] for rewards that look at them."""
        return Latents(latents, vae_of(self.pipeline.vae))

    @torch.no_grad()
    def decode_latents(self, latents: Tensor, batch_size: int = 64) -> list[Image]:
        """Finished latents [B, ...] to pictures, lists of them for videos, or sounds, as the pipeline would."""
        pictures: list[Image] = []
        if latents.device.type == "cpu":
            batch_size = min(batch_size, DECODED_ON_CPU)
        for chunk in latents.split(batch_size):
            pixels = self.family.decode(self.pipeline, chunk)
            pictures += self.family.pictures(self.pipeline, pixels.float())
        self.release_vae()
        return pictures

    def drop_unused(self) -> None:
        if isinstance(self.network, Experts):
            self.network.drop_unused()

    def release_vae(self) -> None:
        """Let the VAE leave the device, where it only visits."""
        if self._vae_visit is not None:
            self._vae_visit.offload()
