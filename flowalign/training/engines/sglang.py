"""sglang's diffusion engine: pictures, edits and videos from servers, with log-probabilities (docs/engines.md).

Written against the wheel of sglang 0.5.23; the real engine was never run here. What it draws is replayed by the policy
before it is learned from, and its log-probabilities are replaced by those of the replay.
"""

import hashlib
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from flowalign import registry
from flowalign.algorithms.base import Algorithm
from flowalign.algorithms.policy_gradient import PolicyGradient
from flowalign.config.diffusion import Config
from flowalign.config.engines import ServerSettings
from flowalign.data import shipped
from flowalign.data.batches import Batch
from flowalign.errors import ConfigError, FlowalignError
from flowalign.policies.base import TRAINED
from flowalign.policies.diffusion import DiffusersPolicy, Rollout
from flowalign.policies.diffusion.checks import replay_tolerance
from flowalign.policies.diffusion.storage import described_by, load_config
from flowalign.rollouts.checks import LOG_PROB
from flowalign.rollouts.contract import describe, undescribed
from flowalign.rollouts.engine import Generated, SamplingWeights
from flowalign.rollouts.pictures import DiffusionSampler
from flowalign.rollouts.processes import Processes
from flowalign.rollouts.verify import START, UNEXPLAINED, verify
from flowalign.runs.files import write_folder
from flowalign.settings import Section
from flowalign.training.distributed.sharding import copied, whole
from flowalign.training.engines.rollout_api import Drawn, SampleRequest, read
from flowalign.training.engines.servers import ServerLost, Servers, in_turn
from samplers import Trajectory, step_std

KERNELS = {"flow_sde": ("sde", False), "cps": ("cps", False), "cps_published": ("cps", True), "ode": ("ode", True)}
"""Our kernels, each with sglang's type of step and whether it leaves out the constants of log-probabilities."""
PIPELINES = """
StableDiffusion3Pipeline FluxPipeline Flux2Pipeline Flux2KleinPipeline QwenImagePipeline QwenImageEditPipeline
QwenImageEditPlusPipeline ZImagePipeline LongCatImagePipeline LongCatImageEditPipeline ErnieImagePipeline WanPipeline
WanImageToVideoPipeline HunyuanVideoPipeline
""".split()
"""Classes of diffusers that sglang has pipelines of its own for, with hooks for rollouts and a flow scheduler."""
TOKENS = {
    "StableDiffusion3Pipeline": 256,
    "FluxPipeline": 512,
    "Flux2Pipeline": 512,
    "Flux2KleinPipeline": 512,
    "WanPipeline": 512,
    "WanImageToVideoPipeline": 512,
}
"""Tokens to which sglang pads prompts, where the network sees the padding."""
NICKNAME = "flowalign"
REPLAYED = 4
"""Samples of each part that are replayed, whose velocities are sent too."""
ALPHA = "model.lora.alpha: sglang takes whole numbers; 16 works"


class SGLangPictureSettings(ServerSettings):
    """Settings of sglang's servers."""

    concurrency: int = Field(4, ge=1)
    """Requests under way at each server."""
    generator_device: Literal["cpu", "cuda"] | None = None
    """Device whose generator draws a sample's noise; default cpu, with the noise of our seeds, where all steps are
    deterministic, else cuda, since sglang 0.5.23 draws the noise of steps on the GPU."""
    mismatch: float | None = Field(1.0, gt=0)
    share_gpu: bool = False
    """Whether servers share the GPUs of the processes that learn, and release their memory during updates."""

    def check(self, config: Any, algorithm: Any, processes: int) -> None:
        super().check(config, algorithm, processes)
        if find_spec("msgpack") is None:
            raise ConfigError("rollout.engine: msgpack is not installed; pip install 'flowalign[sglang]'")
        rollout, model = config.rollout, config.model
        refused = {
            f"rollout.kernel: sglang has no '{rollout.kernel}'; {', '.join(KERNELS)} work": (
                rollout.kernel not in KERNELS
            ),
            "rollout.sigmas: sglang walks the schedule of the model's scheduler; null works": rollout.sigmas
            is not None,
            "rollout.guidance: sglang has one scale for all steps; one number works": isinstance(
                rollout.guidance, list
            ),
            "rollout.order: sglang's steps are Euler's; 1 works": rollout.order != 1,
            "rollout.share_start_noise: sglang draws a sample's start and its steps from one generator; false works": (
                rollout.share_start_noise
            ),
            "rollout.cache: caches are the server's own; null works": rollout.cache is not None,
            "rollout.merge_lora: the server adds adapters as it does; false works": rollout.merge_lora,
            "rollout.weights: servers get what is trained, and the model that they loaded is no LoRA; leave it out": (
                rollout.weights == "reference"
            ),
            "algorithm.flash: sglang walks all steps; null works": getattr(algorithm.settings, "flash", None)
            is not None,
            "model.text_lora: servers encode with the model's own encoders; null works": model.text_lora is not None,
            ALPHA: model.lora is not None and model.lora.path is None and model.lora.alpha % 1 > 0,
        }
        why = [why for why, holds in refused.items() if holds]
        if why:
            raise ConfigError("; ".join(why))
        plan = config.build_plan(silent=True)
        if hasattr(plan, "update"):
            raise ConfigError(
                f"rollout.plan: '{rollout.plan.name}' gives steps levels of their own, and sglang has one for all; "
                "all and window work"
            )
        if not model.path.startswith(registry.GIVEN):
            described = None if model.config is None else str(shipped(model.config))
            saved = load_config(described_by(shipped(model.path), described))
            self.check_pipeline(saved["_class_name"], saved)

    def check_pipeline(self, name: str, settings: Mapping[str, Any]) -> None:
        """Refuse a pipeline that sglang has no rollouts for.

        Args:
            settings: those of its model_index.json.
        """
        if name not in PIPELINES:
            raise ConfigError(f"rollout.engine: sglang has no rollouts for {name}; for {', '.join(PIPELINES)} it has")
        if settings.get("boundary_ratio") is not None:
            raise ConfigError(
                f"rollout.engine: sglang gets the weights of one network, and this {name} has two, for high and for "
                "low noise; trainside and workers work"
            )


@dataclass(eq=False)
class Folder:
    """Weights in a folder that servers read."""

    weights: SamplingWeights
    path: Path


@dataclass(kw_only=True)
class Part:
    """A part of an iteration that servers are sampling."""

    engine: "SGLang"
    batch: Batch
    start: Rollout
    """The samples, all states at their start noise: what the network is called with, and the schedule."""
    eta: Tensor
    """[B, T]"""
    weights: Folder
    asked: list[SampleRequest]
    answers: list[Future[tuple[str, Drawn]]]

    def result(self) -> Generated:
        return self.engine.result(self)


class OpenPart:
    """The run's sampler, whose rollouts servers draw: what an algorithm gets from it is a `Part`."""

    def __init__(self, sampler: DiffusionSampler, ask: Any) -> None:
        self.sampler, self.ask = sampler, ask

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sampler, name)

    def rollout(self, batch: Batch, eta: Tensor | None = None) -> Part:
        part: Part = self.ask(batch, self.sampler.etas(batch) if eta is None else eta)
        return part


class SGLang:
    """Servers of sglang's diffusion engine, as they sample for a process that learns.

    Every process sends its own requests to all servers, beginning with one of its own; where weights are of different
    ages (`staleness`) or GPUs are shared, it has servers for itself.

    Args:
        folder: folder of the run, which servers must see by the same path.

    Raises:
        FlowalignError: a server does not answer, or serves another pipeline.
    """

    Settings: ClassVar[type[Section]] = SGLangPictureSettings

    def __init__(
        self,
        settings: SGLangPictureSettings,
        algorithm: Algorithm,
        sampler: DiffusionSampler,
        processes: Processes,
        folder: Path,
    ) -> None:
        self.settings, self.algorithm, self.sampler, self.processes = settings, algorithm, sampler, processes
        self.config: Config = sampler.config
        self.policy = sampler.policy
        settings.check_pipeline(type(self.policy.pipeline).__name__, self.policy.pipeline.config)
        if self.policy.lora and self._alpha % 1:
            raise ConfigError(ALPHA)
        self.folder = (folder / "engine").absolute()
        urls, row, rows = settings.url, processes.row, processes.rows
        urls = urls[row::rows] if settings.staleness or settings.share_gpu else in_turn(urls, row, rows)
        urls = list(dict.fromkeys(urls))
        self.servers = Servers(
            "rollout.engine", urls, settings.timeout, settings.retries, settings.patience, self._load
        )
        self.pool = ThreadPoolExecutor(len(urls) * settings.concurrency, thread_name_prefix="sglang")
        self.checksums: dict[str, Any] = {}
        """Answer of the servers for the weights of a folder, which all must give."""
        self.turn, self.open, self.asleep = 0, 0, False
        self.waited, self.samples, self.own_noise, self.rounded, self.replayed = 0.0, 0, 0, 0, list[float]()
        for url in urls:
            self._greet(url)

    def _greet(self, url: str) -> None:
        """Refuse an address without sglang's diffusion engine, or with another pipeline behind it."""
        self.servers.wait_until_warm(url)
        try:
            self.servers.call(url, "/health")
            answer = self.servers.call(url, "/v1/models")
        except ServerLost as error:
            raise ConfigError(f"rollout.engine.url: no server answers: {error}") from error
        cards = answer.get("data") if isinstance(answer, dict) else None
        card = cards[0] if isinstance(cards, list) and cards and isinstance(cards[0], dict) else {}
        own, theirs = type(self.policy.pipeline).__name__, card.get("pipeline_name")
        if theirs is None:
            raise ConfigError(f"rollout.engine.url: {url} is no diffusion engine of sglang: it names no pipeline")
        if theirs != own:
            raise ConfigError(
                f"rollout.engine.url: {url} serves a {str(theirs)[:60]} ('{str(card.get('id'))[:100]}'), and "
                f"model.path '{self.config.model.path}' is a {own}"
            )

    @property
    def _alpha(self) -> float:
        """The alpha of the LoRA."""
        return float(self.policy.network.peft_config[TRAINED].lora_alpha)

    # weights

    def publish(self, iteration: int, parameters: Mapping[str, Tensor], state: dict[str, Any]) -> Folder:
        return self.republish(SamplingWeights(iteration, copied(parameters), state))

    def republish(self, weights: SamplingWeights) -> Folder:
        """Write the weights into a folder of their own: sglang reads a LoRA again only where its path is another."""
        trained = {name: weights.tensors[name] for name in self.policy.trainable()}
        path = self.folder / f"weights-{weights.iteration:06d}-{_hash(trained)}"
        if not self.policy.lora:
            # with what is not trained, such as frozen layers
            trained = whole(dict(self.policy.network.state_dict()), keep=True) | trained
        if self.processes.accelerator.is_main_process:
            write_folder(path, partial(write_weights, self.policy, trained))
            for old in sorted(self.folder.glob("weights-*"))[: -2 - self.settings.staleness]:
                shutil.rmtree(old, ignore_errors=True)
        self.processes.accelerator.wait_for_everyone()
        return Folder(weights, path)

    def _load(self, url: str, folder: Folder) -> None:
        """Put weights on a server, and ask it whether they are there."""
        call = partial(self.servers.call, url)
        if self.policy.lora:
            lora = {"lora_nickname": NICKNAME, "lora_path": str(folder.path), "lora_alpha": int(self._alpha)}
            # not merged: the sum would be rounded to the network's format
            call("/v1/set_lora", lora | {"target": "all", "strength": 1.0, "merge_mode": "dynamic"})
            self._check_adapter(url, folder)
        else:
            modules = [self.policy.family.denoiser]
            call("/update_weights_from_disk", {"model_path": str(folder.path), "target_modules": modules})
        checksum = self._checksum(url)
        known = self.checksums.setdefault(folder.path.name, checksum)
        if known != checksum:
            raise FlowalignError(
                f"rollout.engine: {url} has other weights after {folder.path.name} than before, or than another "
                "server: all must serve one model in one format"
            )
        if any(other == checksum for name, other in self.checksums.items() if name[15:] != folder.path.name[15:]):
            raise FlowalignError(f"rollout.engine: {url} ignores new weights: its checksum is that of earlier ones")

    def _checksum(self, url: str) -> Any:
        checksum = self.servers.call(url, "/get_weights_checksum", {"module_names": [self.policy.family.denoiser]})
        if not isinstance(checksum, dict) or "not_found" in checksum.values() or "error" in checksum:
            raise FlowalignError(f"rollout.engine: {url} has no checksum of its weights: {str(checksum)[:100]}")
        return checksum

    def _check_there(self, url: str, folder: Folder) -> None:
        """Raise ServerLost where a server has other weights: it was started again, or another run changed them."""
        if self.policy.lora:
            self._check_adapter(url, folder)
        elif self._checksum(url) != self.checksums[folder.path.name]:
            raise ServerLost(f"{url} has other weights than {folder.path}")

    def _check_adapter(self, url: str, folder: Folder) -> None:
        answer = self.servers.call(url, "/v1/list_loras")
        active = answer.get("active") if isinstance(answer, dict) else None
        entries = active.get(self.policy.family.denoiser) if isinstance(active, dict) else None
        paths = [entry.get("path") for entry in entries or [] if isinstance(entry, dict)]
        if paths != [str(folder.path)]:
            raise ServerLost(f"{url} has the LoRA {str(paths)[:100]}, not {folder.path}")

    # samples

    def generate(self, parts: Sequence[Batch], published: Folder) -> list[Part]:
        """Begin to sample these parts; the policy is used here, and in `Part.result`, but in no other thread."""
        self._wake()
        asking: Any = OpenPart(self.sampler, partial(self._ask, published))
        begun = []
        for batch in parts:
            part, whole_batch = self.algorithm.rollout(asking, batch)
            assert isinstance(part, Part)
            begun.append(replace(part, batch=whole_batch))
        self.open += len(begun)
        return begun

    def _ask(self, weights: Folder, batch: Batch, eta: Tensor) -> Part:
        """Send the requests of a batch."""
        sampler, policy = self.sampler, self.policy
        arguments = sampler.arguments(batch)
        start = policy.sample(batch.prompts, batch.seeds, metadata=batch.metadata, dry=True, **arguments)
        sigmas = start.trajectory.sigmas.cpu()
        eta = eta.float().cpu().expand(len(batch), -1)
        # sglang's log-probability is NaN where a step of its kernel has no noise
        eta = eta.where(step_std(sampler.kernel, sigmas, eta) > 0, 0.0)
        levels = eta[eta > 0].unique()
        if len(levels) > 1:
            raise FlowalignError(
                f"rollout.plan: the noise levels of steps are {', '.join(f'{x:g}' for x in levels.tolist()[:4])}, and "
                "sglang has one for all; plan: {name: all} works"
            )
        level = float(levels[0]) if len(levels) else 0.0
        asked = [self._asked(batch, row, start, eta[row], level, arguments) for row in range(len(batch))]
        answers = [self._submit(weights, each) for each in asked]
        return Part(engine=self, batch=batch, start=start, eta=eta, weights=weights, asked=asked, answers=answers)

    def _asked(
        self, batch: Batch, row: int, start: Rollout, eta: Tensor, level: float, arguments: dict[str, Any]
    ) -> SampleRequest:
        """The request of one sample."""
        family, pipeline = self.policy.family, self.policy.pipeline
        first = start.trajectory.latents[row : row + 1, 0]
        shape = tuple(family.pack(first * family.scale(start.trajectory.sigmas[0])).shape[1:])
        height, width = (side * family.pixels(pipeline) for side in first.shape[-2:])
        frames = arguments.get("num_frames", 1)
        noisy = (eta > 0).nonzero()[:, 0].tolist()
        kind, no_constants = KERNELS[self.config.rollout.kernel] if noisy else KERNELS["ode"]
        # before the first update the trainer compares velocities of any sample with a replay
        debug = row < REPLAYED or batch.iteration == 0 or (bool(noisy) and not self._replays)
        source = start.sources[row]
        request = {
            "prompt": batch.prompts[row],
            "negative_prompt": batch.metadata[row].get("negative_prompt", arguments["negative_prompt"]),
            "seed": batch.seeds[row],
            "generator_device": self._generator(bool(noisy)),
            "width": width,
            "height": height,
            "num_inference_steps": len(eta),
            "num_outputs_per_prompt": 1,
            **family.arguments(arguments["guidance"]),
            "num_frames": arguments.get("num_frames"),
            "image_path": None if source is None else [str(Path(image).absolute()) for image in source.images],
            "rollout": True,
            "rollout_sde_type": kind,
            "rollout_noise_level": level,
            "rollout_log_prob_no_const": no_constants,
            "rollout_debug_mode": debug,
            "rollout_return_dit_trajectory": True,
            "rollout_sde_step_indices": noisy or None,
            "suppress_logs": True,
            "extra_sampling_params": {},
        }
        return SampleRequest(
            content=json.dumps(request).encode(),
            prompt=batch.prompts[row],
            seed=batch.seeds[row],
            steps=len(eta),
            shape=shape,
            sigmas=start.trajectory.sigmas.cpu(),
            noisy=tuple(noisy),
            debug=debug,
            picture=3 * height * width * frames,
        )

    def _generator(self, noisy: bool) -> str:
        """Device whose generator draws noise, by whether there are stochastic steps."""
        return self.settings.generator_device or ("cuda" if noisy else "cpu")

    @property
    def _replays(self) -> bool:
        """Whether the learner replays all stochastic steps, which makes their velocities again."""
        if not isinstance(self.algorithm, PolicyGradient):
            return False
        setting = self.config.training.old_log_prob
        by_default = setting is None and self.algorithm.replays_old(self.config)
        return setting == "replayed" or by_default or self.algorithm.settings.off_policy is not None

    def _submit(self, weights: Folder, asked: SampleRequest) -> "Future[tuple[str, Drawn]]":
        self.turn += 1
        first, content = self.turn, asked.content
        ask = partial(self.servers.ask, first, "/rollout/generate", content, weights, lambda body: read(body, asked))
        return self.pool.submit(ask, asked.most)

    def result(self, part: Part) -> Generated:
        """Wait for a part's samples; those of a server that lost its weights meanwhile are drawn again.

        Raises:
            FlowalignError: servers refuse, are gone, or drew something else than was asked for.
        """
        begin = time.perf_counter()
        drawn = self._drawn(part)
        self.waited += time.perf_counter() - begin
        self.open -= 1
        if self.settings.share_gpu and not self.open:
            self._sleep()
        rollout = self._rollout(part, drawn)
        branches = 1 + self.policy.family.negative(self.config.rollout.largest_guidance)
        self.policy.forwards += len(drawn) * part.eta.shape[1] * branches
        if not self.settings.staleness:
            self._check(rollout, part)
        return Generated(rollout, part.batch, self.algorithm.decode(self.sampler, rollout))

    def _drawn(self, part: Part) -> list[Drawn]:
        answers = list(part.answers)
        while True:
            found = [answer.result() for answer in answers]
            stale = set()
            # of servers that sample ahead the weights are later ones by now
            for url in () if self.settings.staleness else dict.fromkeys(url for url, _ in found):
                try:
                    self._check_there(url, part.weights)
                except ServerLost:
                    self.servers.forget(url)
                    stale.add(url)
            if not stale:
                return [sample for _, sample in found]
            for row, (url, _) in enumerate(found):
                if url in stale:
                    answers[row] = self._submit(part.weights, part.asked[row])

    def _rollout(self, part: Part, drawn: list[Drawn]) -> Rollout:
        """The trajectories of a part, on the policy's device."""
        family, start = self.policy.family, part.start.trajectory
        device, sigmas = start.latents.device, start.sigmas
        size = start.latents.shape[3:]
        scale = torch.stack([torch.as_tensor(family.scale(sigma)) for sigma in sigmas]).to(device)

        def unpacked(rows: Tensor) -> Tensor:
            flat = family.unpack(rows.to(device).flatten(0, 1), size)
            return flat.unflatten(0, rows.shape[:2])

        latents = unpacked(torch.stack([sample.states for sample in drawn]))
        latents = latents / scale.float().view(1, -1, *[1] * (latents.dim() - 2))
        span = (sigmas[1:] - sigmas[:-1]).view(1, -1, *[1] * (latents.dim() - 2))
        eta = part.eta.to(device)
        # of a deterministic step, by Euler's rule; of others it is not known unless it is sent
        velocity = (latents[:, 1:] - latents[:, :-1]) / span
        velocity[eta > 0] = torch.nan
        for row, sample in enumerate(drawn):
            if sample.velocity is not None:
                velocity[row] = unpacked(sample.velocity[None])[0]
        log_prob = torch.stack([sample.log_prob for sample in drawn]).to(device).where(eta > 0, 0.0)
        trajectory = Trajectory(latents=latents, velocity=velocity, log_prob=log_prob, eta=eta, sigmas=sigmas)
        own = (latents[:, 0] - start.latents[:, 0]).flatten(1).norm(dim=1) <= START * start.latents[:, 0].flatten(
            1
        ).norm(dim=1)
        self.samples += len(drawn)
        self.own_noise += int(own.sum())
        self.rounded += sum(sample.rounded for sample in drawn)
        kernel, unlearned = self.sampler.kernel, self.sampler.unlearned
        generator = self._generator(bool((eta > 0).any()))
        return replace(part.start, trajectory=trajectory, kernel=kernel, unlearned=unlearned, generator=generator)

    @torch.no_grad()
    def _check(self, rollout: Rollout, part: Part) -> None:
        """Replay a few samples, and end the run where the policy would not have drawn them."""
        rows = torch.arange(min(REPLAYED, len(rollout)), device=rollout.trajectory.latents.device)
        few, forwards = rollout.take(rows), self.policy.forwards
        trajectory, steps = few.trajectory, few.trajectory.velocity.shape[1]
        latents, velocity = trajectory.latents[:], trajectory.velocity[:]
        replayed = torch.stack(
            [self.policy.velocity(few, rows, torch.full_like(rows, step)).float() for step in range(steps)], 1
        )
        self.policy.forwards = forwards
        error = float((replayed - velocity).abs().max() / velocity.abs().max())
        self.replayed.append(error)
        sigmas = trajectory.sigmas.view(-1, *[1] * (latents.dim() - 2))
        euler = latents[:, :-1] + velocity * (sigmas[1:] - sigmas[:-1])
        moved = (euler - latents[:, 1:])[trajectory.eta == 0].abs()
        error = max(error, float(moved.max() / latents.abs().max()) if len(moved) else 0.0)
        samples, at = trajectory.mask.nonzero().unbind(1)
        again = trajectory.score(rollout.kernel, velocity[samples, at], samples, at)
        apart = (again.log_prob - trajectory.log_prob[samples, at]).abs()
        tolerance = replay_tolerance(self.policy)
        # rounded states have other log-probabilities, whose distance the metrics have
        wrong = bool((apart > LOG_PROB * (1 + again.log_prob.abs())).any()) and not self.rounded
        if error <= tolerance and not wrong:
            return
        said = f"what {' and '.join(self.settings.url)} sampled is not what the policy makes"
        if undescribed(few) is not None:
            raise FlowalignError(f"{said}: velocities are up to {error:.2g} from the replay{self._padding()}")
        file = describe(few, part.batch[rows.tolist()], self.config.rollout)
        findings = [f for f in verify(self.policy, file).findings if f.name not in ("seeds", "16 bits")]
        cause = str(findings[0]) if findings else f"velocity: up to {error:.2g} from the replay"
        if cause.endswith(UNEXPLAINED):
            cause += self._padding()
        raise FlowalignError(f"{said}: {cause} (flowalign verify-rollout says more of a file of rollout.save_every)")

    def _padding(self) -> str:
        """How sglang encodes prompts otherwise than the policy; empty where it is not known to."""
        name, length = type(self.policy.pipeline).__name__, self.config.model.encode.get("max_sequence_length")
        if length is None or TOKENS.get(name, length) == length:
            return ""
        return (
            f"; sglang pads prompts of a {name} to {TOKENS[name]} tokens, model.encode.max_sequence_length is {length}"
        )

    # memory

    def _wake(self) -> None:
        if self.asleep:
            torch.cuda.empty_cache()
            for server in self.servers.servers:
                self.servers.call(server.url, "/resume_memory_occupation", {})
        self.asleep = False

    def _sleep(self) -> None:
        for server in self.servers.servers:
            self.servers.call(server.url, "/release_memory_occupation", {})
        self.asleep = True

    def measured(self) -> dict[str, float]:
        samples = max(1, self.samples)
        metrics = self.servers.measured()
        metrics["engine/bytes"] /= samples
        metrics["engine/bytes_sent"] /= samples
        metrics |= {
            "engine/own_noise": self.own_noise / samples,
            "engine/16_bits": self.rounded / samples,
            "engine/velocity": max(self.replayed, default=0.0),
            "seconds/engine": self.waited,
        }
        self.waited, self.samples, self.own_noise, self.rounded, self.replayed = 0.0, 0, 0, 0, []
        return metrics

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)
        self.servers.close()


def write_weights(policy: DiffusersPolicy, weights: dict[str, Tensor], folder: Path) -> None:
    """Write a LoRA, or the network, as sglang reads it: it looks for a LoRA's layers by their names in the network.

    Args:
        weights: what is trained, or the whole network.
    """
    policy.save(folder, weights)
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as lora:
            metadata = lora.metadata()
        prefix = f"{policy.family.denoiser}."
        named = {name.removeprefix(prefix): value for name, value in load_file(file).items()}
        save_file(named, file, metadata)


def _hash(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:12]
