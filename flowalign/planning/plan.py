"""`flowalign plan CONFIG`: memory, operations, time and cost of a run, without weights, a GPU or a network.

Two things are measured and multiplied. A tiny pipeline of the same class runs one small iteration of the recipe and
counts how often a sample goes through the network, forward and backward. The network of the real size, on a device
without hardware (`FakeDevice`), gives the operations and memory of one pass.
"""

import contextlib
import json
import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import PIL.Image
import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from flowalign import registry
from flowalign.algorithms.trajectory.writers import OWN
from flowalign.config import Config, Named, TextConfig
from flowalign.config.sections import BaseConfig
from flowalign.data import PromptList, Source
from flowalign.errors import ConfigError, nearest
from flowalign.planning.fake_device import DEVICE, FakeDevice
from flowalign.planning.passes import Passes, count
from flowalign.planning.published_pipelines import REWARDS, build, network, published
from flowalign.planning.random_models import tiny_name
from flowalign.planning.resources import (
    FRACTIONS,
    GIB,
    GPUS,
    Meter,
    NetworkCosts,
    RunPlan,
    Way,
    autocast,
    fewest,
    kept_weights,
    run_totals,
    setter,
    size_of,
)
from flowalign.planning.text_plan import plan_text
from flowalign.planning.tiny_pipelines import PIPELINES
from flowalign.policies.base import torch_dtype
from flowalign.policies.diffusion import DiffusersPolicy, Rollout
from flowalign.policies.diffusion.context_parallel import TokenParts, check_network
from flowalign.policies.diffusion.families import CONDITIONING, Family, family_of
from flowalign.policies.diffusion.sources import opened
from flowalign.policies.settings import ContextParallel, Model
from flowalign.training.building import make_trainable

SHARED = "model.context_parallel"
PROMPT = "a photo of three red circles on a wooden table"


@dataclass(kw_only=True)
class Costs(NetworkCosts):
    """Costs of one pass through the real networks. Operations are FLOP, memory is bytes."""

    text_encoders: int
    vae: int
    conditioning: int
    """Bytes of the image encoder, the connectors of text and network, and a frozen network of guidance."""
    rewards: int
    trajectory: int
    """Bytes of a recorded trajectory with its prompt's embeddings."""
    forward: float
    backward: float
    """FLOP of a backward pass, with the recomputation by gradient checkpointing where it is on."""
    encode: float
    """FLOP of a prompt, with its pictures where the text encoder sees them."""
    sources: tuple[float, float]
    """FLOP of a call's pictures, which the VAE and the image encoder see: of one sample, and of each more."""
    decode: float
    score: dict[str, float]
    """FLOP of a picture, by the rewards whose networks are known, by their dtype."""
    sampling: int
    """Activations of a forward pass of one sample, all its branches."""
    activations: int
    """Activations kept for the backward pass of one (sample, step) pair."""
    checkpointed: int
    """The same with gradient checkpointing."""
    decoding: int
    """Activations of decoding a picture."""
    encoding: int
    preparing: tuple[int, int]
    """Activations before the first step of a call, as `sources`."""
    shared: int = 1
    """GPUs that a sample was divided over when this was measured."""
    divides: tuple[int, ...] = ()
    """Numbers of GPUs that Ulysses can divide a sample's tokens over, as far as attention heads go."""
    differentiating: int = 0
    """Activations of VAE and rewards for the reward's gradient of a sample."""


def plan(config: BaseConfig, gpu: str = "h100", gpus: int = 1, price: float | None = None) -> RunPlan:
    """Plan a run of a recipe on this number of GPUs.

    Args:
        gpu: one of `GPUS`.
        price: price of an hour of one GPU, in any currency.

    Raises:
        ConfigError: names what is wrong: the GPU, their number, the model.
    """
    if gpu not in GPUS:
        raise ConfigError(f"--gpu: there is no '{gpu}'; {nearest(gpu, GPUS)}")
    groups, rows = config.training.prompts_per_iteration, config.rows(gpus)
    if rows > groups:
        most = groups * gpus // rows
        raise ConfigError(
            f"--gpus: {gpus} are more than the {groups} groups of an iteration, which stay whole, take; at most {most} "
            f"work, or training.prompts_per_iteration={rows}"
        )
    if isinstance(config, TextConfig):
        return plan_text(config, gpu, gpus, price)
    assert isinstance(config, Config)
    published(config.model.path)
    with _with_pictures(config) as config:
        config.check(gpus)
        passes = count(config)
        costs, notes = measure(config, passes.differentiated)
        if config.algorithm.name == "self_forcing":
            steps = config.rollout.steps
            notes = [
                *notes,
                f"self_forcing: an iteration draws how many of {steps} steps it takes; one is counted",
            ]
        return _plan(config, costs, passes, gpu, gpus, price, notes)


@contextlib.contextmanager
def _with_pictures(config: Config) -> Iterator[Config]:
    """Context in which a recipe that edits pictures has black ones, since its own need not be there yet.

    And a recipe of classes has one that tiny models know.
    """
    with tempfile.TemporaryDirectory() as folder:
        family = family_of(PIPELINES[tiny_name(config.model.path)].pipeline)
        pictures = _pictures(family, folder)
        if not pictures and not family.example:
            yield config
            return
        file = Path(folder) / "prompts.jsonl"
        file.write_text(json.dumps({"prompt": family.example or PROMPT, **pictures}), encoding="utf-8")
        plain = {name: field.get_default(call_default_factory=True) for name, field in PromptList.model_fields.items()}
        plain |= {"prompts": str(file)}
        # the recipe's selection reads metadata that this prompt does not have
        data = config.data.model_copy(update={**plain, "selection": Named(name="shuffled"), "difficulty": None})
        yield config.model_copy(update={"data": data, "evaluation": config.evaluation.model_copy(update=plain)})


def _pictures(family: Family, folder: str) -> dict[str, Any]:
    """A prompt's metadata with the fewest pictures that a family makes a sample from; {} where it needs none."""
    name = str(Path(folder) / "picture.png")
    PIL.Image.new("RGB", (64, 64)).save(name)
    images = {"image": [name] * family.images[0]} if family.images[0] else {}
    return images | ({"mask": name} if family.takes_mask else {})


class PlannedPolicy(DiffusersPolicy):
    """A policy on the fake device, where autocast is entered from outside."""

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def checkpoint_gradients(self) -> None:
        for denoiser in self.networks.values():
            denoiser.enable_gradient_checkpointing(self._checkpointed)

    def _checkpointed(self, module: nn.Module, *args: object) -> object:
        # the recomputation does not see the modes around the backward pass
        again = partial(autocast, self.compute_dtype)
        return checkpoint(module, *args, use_reentrant=False, context_fn=lambda: (contextlib.nullcontext(), again()))


def measure(config: Config, differentiated: float = 0) -> tuple[Costs, list[str]]:
    """Costs of the real networks on one GPU, and notes on what is not counted.

    Args:
        differentiated: pictures of a sample that a reward's gradient goes through.
    """
    tiny = published(config.model.path)
    dtype = torch_dtype(config.model.dtype)
    shared = config.model.context_parallel
    with (
        tempfile.TemporaryDirectory() as folder,
        _first_of_many(shared) as mesh,
        FakeDevice() as device,
        torch.random.fork_rng(devices=[]),
    ):
        pipeline = build(config.model.path, dtype)
        modules = {name: module for name, module in pipeline.components.items() if isinstance(module, nn.Module)}
        parameters = {name: sum(p.numel() for p in module.parameters()) for name, module in modules.items()}
        policy = _policy(config, pipeline, mesh)
        meter = Meter(device, torch_dtype(config.model.compute_dtype))
        settings = (tiny.call if tiny else {}) | config.rollout.arguments() | {"batch_size": 2}
        pictures = _pictures(policy.family, folder)
        source = Source.of(pictures) if policy.family.encodes_images else None
        size = None if source is None else (settings["width"], settings["height"])
        encoded = meter(lambda: _encode(policy, config, source, size))
        start = partial(_start, policy, config, settings, pictures)
        prepared = [meter(lambda: start(1), grad=False)]
        before, started = device.live, []
        prepared.append(meter(lambda: started.append(start(2)), grad=False))
        [rollout] = started
        trajectory = (device.live - before) // 2
        forward = meter(lambda: policy.velocity(rollout, *_pairs(1)), grad=False)
        for parameter in policy.trainable().values():
            parameter.grad = torch.zeros_like(parameter)
        plain_passes = [meter(partial(_replay, policy, rollout, *_pairs(count))) for count in (1, 2)]
        policy.checkpoint_gradients()
        checkpointed_passes = [meter(partial(_replay, policy, rollout, *_pairs(count))) for count in (1, 2)]
        decode = meter(lambda: policy.family.decode(pipeline, rollout.whole(rollout.trajectory.final)[:1]), grad=False)
        branches = rollout.conditions.branches
        update_passes = checkpointed_passes if config.model.gradient_checkpointing else plain_passes
        scorers, notes = _rewards(config)
        score = _score_flops(scorers, device)
        final = rollout.whole(rollout.trajectory.final)
        # outside autocast, as in training
        gradient = partial(_differentiate, policy, scorers)
        counts = (1, 2) if differentiated else ()
        gradient_peaks = [Meter(device, torch.float32)(partial(gradient, final[:n])).peak for n in counts]
    beside = (*CONDITIONING, policy.family.guide)
    costs = Costs(
        parameters=parameters,
        trained=sum(p.numel() for p in policy.trainable().values()),
        weights=sum(size_of(module) for module in policy.networks.values()),
        text_encoders=sum(size_of(module) for name, module in modules.items() if name.startswith("text_encoder")),
        vae=size_of(modules["vae"]) if "vae" in modules else 0,
        conditioning=sum(size_of(modules[name]) for name in beside if name in modules),
        rewards=sum(size_of(scorer.model) for scorer in scorers),
        trajectory=trajectory,
        forward=forward.flops / branches,
        backward=(update_passes[0].flops - forward.flops) / branches,
        encode=encoded.flops,
        sources=(prepared[0].flops, prepared[1].flops - prepared[0].flops),
        decode=decode.flops,
        score=score,
        sampling=forward.peak,
        activations=plain_passes[1].peak - plain_passes[0].peak,
        checkpointed=checkpointed_passes[1].peak - checkpointed_passes[0].peak,
        decoding=decode.peak,
        encoding=encoded.peak,
        preparing=(prepared[0].peak, prepared[1].peak - prepared[0].peak),
        shared=shared.degree,
        divides=_divisors(policy, config.model),
        differentiating=round(differentiated * (gradient_peaks[1] - gradient_peaks[0])) if gradient_peaks else 0,
    )
    return costs, notes


def _policy(config: Config, pipeline: DiffusionPipeline, mesh: DeviceMesh | None) -> PlannedPolicy:
    """The pipeline's policy with the recipe's trainable weights; with a mesh this process has a part of each sample."""
    tiny, model = published(config.model.path), config.model
    policy = PlannedPolicy(pipeline, DEVICE, (tiny.encode if tiny else {}) | model.encode, None)
    make_trainable(policy, model.model_copy(update={"gradient_checkpointing": False, "compile": False}), False)
    if mesh is not None:
        network = next(iter(policy.networks.values()))
        check_network(type(pipeline).__name__, type(network), network.config, model)
        TokenParts(policy.every_network, mesh)
        policy.family.parts = model.context_parallel.degree
    return policy


def _divisors(policy: PlannedPolicy, model: Model) -> tuple[int, ...]:
    """Numbers of GPUs that Ulysses can divide a sample's tokens over."""
    network, numbers = next(iter(policy.networks.values())), []
    for ulysses in (2, 4, 8):
        divided = model.model_copy(update={"context_parallel": ContextParallel(ulysses=ulysses)})
        with contextlib.suppress(ConfigError):
            check_network(type(policy.pipeline).__name__, type(network), network.config, divided)
            numbers.append(ulysses)
    return tuple(numbers)


@contextlib.contextmanager
def _first_of_many(shared: ContextParallel) -> Iterator[DeviceMesh | None]:
    """Context in which this process is the first of several that share a sample; messages to the others are lost."""
    if shared.degree == 1:
        yield None
        return
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=shared.degree)
    try:
        yield init_device_mesh("cpu", (shared.ring, shared.ulysses), mesh_dim_names=("ring", "ulysses"))
    finally:
        torch.distributed.destroy_process_group()


@torch.no_grad()
def _encode(policy: DiffusersPolicy, config: Config, source: Source | None, size: tuple[int, int] | None) -> None:
    """Put the embeddings of a prompt, and of the empty one where guidance asks for it, into the policy's cache.

    Args:
        source: pictures that the text encoder sees, resized to `size`.
    """
    family, encoder = policy.family, policy.encoder
    options = encoder.options | ({} if source is None else {"image": opened(source, size)[0]})
    encoders = {("x", False): family.encode}
    if family.negative(config.rollout.largest_guidance):
        encoders["", True] = family.encode_negative
    for (text, negative), encode in encoders.items():
        rows = encode(policy.pipeline, [(policy.family.example or PROMPT) if text else ""], device=DEVICE, **options)
        encoder.embeddings[text, source, size, negative] = {name: value[0] for name, value in rows.items()}


def _start(
    policy: DiffusersPolicy, config: Config, settings: dict[str, Any], pictures: dict[str, Any], count: int
) -> Rollout:
    """Prepare `count` samples at the recipe's size, without the network."""
    sampling = config.rollout
    settings = {key: value for key, value in settings.items() if key not in ("rlg", "order", "negative_prompt")}
    metadata = [pictures] * count if pictures else []
    return policy.sample(
        "x", n=count, eta=sampling.eta, kernel=sampling.kernel, metadata=metadata, dry=True, **settings
    )


def _pairs(count: int) -> tuple[Tensor, Tensor]:
    """Indices of `count` (sample, step) pairs."""
    zeros = torch.zeros(count, dtype=torch.long, device=DEVICE)
    return zeros, zeros


def _replay(policy: DiffusersPolicy, rollout: Rollout, samples: Tensor, steps: Tensor) -> None:
    policy.score(rollout, samples, steps).log_prob.sum().backward()


RULES = frozenset({"image_statistic", "jpeg_size", "moving_shapes", "ocr", "relations", "remote", "shapes", "spelling"})
"""Rewards that ask no network on the GPU."""


@dataclass
class RewardNetwork:
    """The network by which a reward scores each picture."""

    model: Any
    dtype: str
    frames: int
    """Frames of a sample that a reward sees."""

    def blank(self) -> Tensor:
        """A black picture of the network's size, [1, 3, H, W]."""
        return torch.zeros(1, 3, *[self.model.config.vision_config.image_size] * 2, device=DEVICE)

    def __call__(self, pixels: Tensor) -> Tensor:
        sized = nn.functional.interpolate(pixels, self.blank().shape[2:], mode="bilinear")
        features: Tensor = self.model.get_image_features(sized).pooler_output
        return features


def _rewards(config: Config) -> tuple[list[RewardNetwork], list[str]]:
    """The rewards' networks, and a note on each reward whose network is not known."""
    scorers, notes = [], []
    for name, settings in _named(config.rewards):
        if name in RULES:
            continue
        if name not in REWARDS:
            notes.append(f"the reward {name} is not counted: what network it asks is not known here")
            continue
        model: Any = network(REWARDS[name]).requires_grad_(False)
        scorers.append(RewardNetwork(model, settings.get("dtype", "float32"), settings.get("frames", 1)))
    return scorers, notes


def _score_flops(scorers: list[RewardNetwork], device: FakeDevice) -> dict[str, float]:
    """FLOP of scoring a sample by all networks, by their dtype."""
    score: dict[str, float] = {}
    for scorer in scorers:
        scored = Meter(device, torch.float32)(partial(scorer, scorer.blank()), grad=False)
        score[scorer.dtype] = score.get(scorer.dtype, 0) + scorer.frames * scored.flops
    return score


def _differentiate(policy: DiffusersPolicy, scorers: list[RewardNetwork], latents: Tensor) -> None:
    """Compute the gradient of rewards to finished latents [N, ...], through the VAE."""
    pixels = policy.decode_pixels(latents.detach().requires_grad_())
    # a video is scored by its first frame
    pictures = pixels if pixels.dim() == 4 else pixels[:, :, 0]
    scores = [scorer(pictures).sum() for scorer in scorers] or [pixels.sum()]
    torch.stack(scores).sum().backward()


def _named(rewards: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names of rewards with their settings, also of rewards inside others, which take over `frames`."""
    for reward in rewards:
        entry = reward if isinstance(reward, dict) else {"name": reward.name, **reward.settings}
        inner = [value for key, value in entry.items() if key == "reward"] + list(entry.get("rewards") or [])
        if not inner:
            yield entry["name"], entry
        for nested in inner:
            nested = {"name": nested} if isinstance(nested, str) else nested
            outer = {key: value for key, value in entry.items() if key == "frames" and isinstance(value, int)}
            yield from _named([outer | nested])


def _plan(
    config: Config, costs: Costs, passes: Passes, gpu: str, gpus: int, price: float | None, notes: list[str]
) -> RunPlan:
    training, model = config.training, config.model
    samples, shared = training.prompts_per_iteration * training.group_size, model.context_parallel.degree
    # GPUs that share a sample divide its passes among them, and each encodes and decodes it
    flops = {
        "rollout": shared * samples * passes.rollout * costs.forward,
        "decoding": shared * samples * (passes.decoded + 3 * passes.differentiated) * costs.decode,
        # a gradient to the picture takes about as much as the score
        "rewards": samples * (passes.decoded + shared * 2 * passes.differentiated) * sum(costs.score.values()),
        "update": shared * samples * (passes.update * costs.forward + passes.backward * costs.backward),
        "prompts": 0 if model.offload_text else shared * training.prompts_per_iteration * costs.encode,
        "sources": shared * training.prompts_per_iteration * _of_group(config, costs.sources),
    }
    card = GPUS[gpu]
    at_peak = {phase: work / (gpus * card.rate(model.compute_dtype, model.tf32)) for phase, work in flops.items()}
    scored = sum(work / card.rate(dtype, model.tf32) for dtype, work in costs.score.items())
    at_peak["rewards"] = scored * flops["rewards"] / (gpus * (sum(costs.score.values()) or 1))
    phases = {f"{share:.0%}": {phase: value / share for phase, value in at_peak.items()} for share in FRACTIONS}
    if config.rollout.store != "device":
        waiting = samples // config.rows(gpus) * costs.trajectory / GIB
        place = "in the host's memory" if config.rollout.store == "host" else "in files"
        notes = [*notes, f"rollout.store: {waiting:.1f} GiB of trajectories of each process are {place}"]
    if "writer" in config.algorithm.settings:
        # the pipeline's own has its weights counted with the pipeline
        lacking = "training" if config.algorithm.settings["writer"]["path"] == OWN else "language model"
        notes = [*notes, f"algorithm.writer: the memory and the time of its {lacking} are not counted"]
    usable = card.usable
    memory = memory_of(config, costs, gpus)
    fixed = {phase: sum(v for name, v in sizes.items() if name != "activations") for phase, sizes in memory.items()}
    per_pair = max(costs.checkpointed if model.gradient_checkpointing else costs.activations, costs.differentiating)
    return RunPlan(
        model=model.path,
        gpu=gpu,
        gpus=gpus,
        costs=costs,
        passes=passes,
        memory=memory,
        flops=flops,
        usable=usable,
        largest_micro_batch=max(0, math.floor((usable - fixed["update"]) * GIB / per_pair)),
        largest_rollout_batch=_largest_rollout(costs, (usable - fixed["rollout"]) * GIB),
        advice=advise(config, costs, gpus, usable),
        notes=notes,
        **run_totals(config, phases, gpus, price),
    )


def _of_group(config: Config, sources: tuple[float, float]) -> float:
    """FLOP of encoding a prompt's pictures, in all calls that make its samples."""
    first, further = sources
    samples = config.training.group_size
    calls = math.ceil(samples / config.rollout.batch_size)
    return calls * first + (samples - calls) * further


def _largest_rollout(costs: Costs, free: float) -> int:
    """Largest number of samples in a call that fit into `free` bytes."""
    first, further = costs.preparing
    prepared = math.inf if not further else 1 + (free - first) / further
    return max(0, math.floor(min(free / costs.sampling, prepared))) if free > first else 0


def memory_of(config: Config, costs: Costs, gpus: int, shards: int = 1) -> dict[str, dict[str, float]]:
    """GiB on each GPU, by phase and component.

    Args:
        shards: GPUs that the denoiser's weights, trained and frozen, are divided over (FSDP).
    """
    training, model = config.training, config.model
    frozen: float = 0 if model.lora is None else costs.weights - 4 * costs.trained
    if model.base_bits is not None:
        bits = 8 if model.base_bits == "fp8" else model.base_bits
        frozen *= bits / (8 * torch_dtype(model.dtype).itemsize)
    always = kept_weights(config, costs, frozen, shards) | {
        "rewards": costs.rewards,
        "conditioning": costs.conditioning,
    }
    # with offload_text prompts are encoded elsewhere, and take nothing here
    texts = {} if model.offload_text else {"text encoders": costs.text_encoders, "activations": costs.encoding}
    vae = {} if model.offload_vae else {"VAE": costs.vae}
    samples = training.prompts_per_iteration * training.group_size // config.rows(gpus)
    # stored ones are of a micro-batch, and of the next one, which travels meanwhile
    there = samples if config.rollout.store == "device" else min(samples, 2 * training.micro_batch_size)
    recorded = {"trajectories": there * costs.trajectory}
    # on more GPUs than were measured, a sample takes about as much less on each
    share = costs.shared / model.context_parallel.degree
    per_pair = share * (costs.checkpointed if model.gradient_checkpointing else costs.activations)
    per_trained_pair = max(per_pair, share * costs.differentiating)
    updated = {"VAE": costs.vae} if costs.differentiating else vae
    batch = min(config.rollout.batch_size, samples)
    pictures = 1 if model.slice_vae else batch
    first, further = costs.preparing
    sampling = max(batch * share * costs.sampling, first + (batch - 1) * further)
    phases = {
        "encoding": always | vae | texts,
        "rollout": always | vae | recorded | {"activations": sampling},
        "decoding": always | {"VAE": costs.vae} | recorded | {"activations": pictures * costs.decoding},
        # the denoiser's steps come one after the other, and after VAE and rewards
        "update": always | updated | recorded | {"activations": training.micro_batch_size * per_trained_pair},
    }
    return {phase: {name: size / GIB for name, size in sizes.items() if size} for phase, sizes in phases.items()}


def advise(config: Config, costs: Costs, gpus: int, usable: float) -> list[str]:
    """Settings that make the run fit; see `fewest`."""

    def peak(changed: Config, in_shards: bool) -> float:
        shards = gpus if in_shards else 1
        return max(sum(sizes.values()) for sizes in memory_of(changed, costs, gpus, shards).values())

    last = "more or larger GPUs, smaller pictures"
    return fewest(config, lambda: _ways(config, costs, gpus), peak, usable, last)


def _ways(config: Config, costs: Costs, gpus: int) -> Iterator[Way]:
    """Settings that take less memory, the cheapest first."""
    yield "model.offload_vae: true", setter("model", "offload_vae", True)
    yield "model.offload_text: true", setter("model", "offload_text", True)
    yield "training.offload_copies: true", setter("training", "offload_copies", True)
    yield "model.slice_vae: true", setter("model", "slice_vae", True)
    yield "training.micro_batch_size: 1", setter("training", "micro_batch_size", 1)
    yield "rollout.batch_size: 1", setter("rollout", "batch_size", 1)
    if "store" in registry.resolve("algorithms", config.algorithm.name).combines:
        yield "rollout.store: host", setter("rollout", "store", "host")
    yield "model.gradient_checkpointing: true", setter("model", "gradient_checkpointing", True)
    yield "training.optimizer.offload: true", setter("training.optimizer", "offload", True)
    yield "training.optimizer.bits: 8", setter("training.optimizer", "bits", 8)
    if gpus > 1:
        yield f"shards over the {gpus} GPUs (configs/accelerate/fsdp2.yaml)", lambda _: None
    for n in (n for n in costs.divides if n > config.model.context_parallel.degree and gpus % n == 0):
        divided = ContextParallel(ulysses=n)
        yield f"{SHARED}: {{ulysses: {n}}}", setter("model", "context_parallel", divided)
    if config.model.lora is not None:
        yield "model.base_bits: 4", setter("model", "base_bits", 4)
    for prompts in _fewer_prompts(config, gpus):
        yield f"training.prompts_per_iteration: {prompts}", setter("training", "prompts_per_iteration", prompts)


def _fewer_prompts(config: Config, gpus: int) -> Iterator[int]:
    """Half as many groups, a quarter and so on, where the run could have so many."""
    prompts = config.training.prompts_per_iteration
    while prompts := prompts // 2:
        changed = config.model_copy(deep=True)
        changed.training.prompts_per_iteration = prompts
        with contextlib.suppress(ConfigError):
            changed.check(gpus)
            yield prompts
