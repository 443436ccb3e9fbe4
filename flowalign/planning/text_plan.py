"""Plan of a run that trains a language model: costs of sampling, scoring and learning its texts.

Two things are measured and multiplied, as for pictures. A small iteration with a tiny model tells how often a text goes
through the network. The model of the real size, on a device without hardware, tells what a pass costs.
"""

import contextlib
import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from flowalign.algorithms.policy_gradient import PolicyGradient
from flowalign.config import TextConfig
from flowalign.config.engines import HERE
from flowalign.errors import ConfigError
from flowalign.planning.dry_run import at_hand, small_config, small_language_model
from flowalign.planning.fake_device import DEVICE, FakeDevice
from flowalign.planning.published_pipelines import network, published_text
from flowalign.planning.random_models import byte_tokenizer, default_dtype, random_language_model
from flowalign.planning.resources import (
    FRACTIONS,
    GIB,
    GPU,
    GPUS,
    Meter,
    NetworkCosts,
    PassCost,
    RunPlan,
    Way,
    autocast,
    fewest,
    kept_weights,
    run_totals,
    setter,
    size_of,
    without_warnings,
)
from flowalign.policies.base import best_device, torch_dtype
from flowalign.policies.language.decoding import Decoding
from flowalign.policies.language.head import RECOMPUTED
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.policies.language.rollout import TextRollout
from flowalign.policies.language.token_sampler import SeededSampler
from flowalign.training import Trainer
from flowalign.training.building import make_trainable

PROMPT_TOKENS = 128
"""Tokens of a prompt in its template: an assumption, since the real models' tokenizers are not there."""
LAUNCHING = 1 / 25.5 / 32
"""Seconds a layer that the host takes to launch a decoding step: 25.5 tokens a second by the 32 layers of Llama 7B,
which waited for the host (https://pytorch.org/blog/accelerating-generative-ai-2)."""
TRIPS = 3
"""How often a decoding step moves the cache: it is read, written with a token more, and read by attention."""


@dataclass(kw_only=True)
class TextPasses:
    """Number of times that a text of an iteration goes through the network, on average."""

    drawn: float = 0
    """Texts sampled; a baseline adds one for each group."""
    scored: float = 0
    """Forward passes without a backward pass: of the start weights, and of a replay for the old log-probabilities."""
    learned: float = 0
    """Forward passes with a backward pass."""


@dataclass(kw_only=True)
class TextCosts(NetworkCosts):
    """Costs of a text in the real network. Operations are FLOP, memory is bytes.

    A pair has the bytes of a batch of one text, and of each further text.
    """

    layers: int
    prompt: float
    """FLOP of a prompt before the first token."""
    decoded: tuple[float, float]
    """FLOP of a text's first and last token; between the two they grow linearly."""
    forward: float
    learned: float
    """FLOP of a forward and backward pass, with the recomputation by gradient checkpointing where it is on."""
    read: int
    """Bytes of the weights that a decoding step reads."""
    cache: int
    """Keys and values of a whole text with its prompt."""
    trajectory: int
    prompting: tuple[int, int]
    """Activations and cache of prompts before their first token."""
    decoding: tuple[int, int]
    """Activations of a decoding step."""
    activations: tuple[int, int]
    """Activations kept for the backward pass."""
    checkpointed: tuple[int, int]
    """The same with gradient checkpointing."""


def plan_text(config: TextConfig, gpu: str, gpus: int, price: float | None) -> RunPlan:
    """Plan a run that trains a language model; see `plan.plan`."""
    if config.model.images:
        raise ConfigError("model.images: what pictures in prompts take is not counted; plan is of texts alone")
    if config.model.draws is not None:
        raise ConfigError("model.draws: what pictures take is not counted; plan is of texts alone")
    if config.model.diffusion is not None:
        raise ConfigError("model.diffusion: what masked diffusion takes is not counted; plan is of causal models")
    if config.environment is not None:
        raise ConfigError("environment: how long its answers are is not known; plan is of texts without turns")
    if config.rollout.engine.name != HERE:
        raise ConfigError(
            "rollout.engine: what another engine takes is not counted; plan with rollout.engine=transformers"
        )
    if "teacher" in config.algorithm.settings:
        raise ConfigError("algorithm.teacher: what a second model takes is not counted; plan is of methods without")
    passes, costs = count(config, gpus), measure(config)
    card, batch = GPUS[gpu], _batch(config, gpus)
    flops = operations(config, costs, passes)
    rate = gpus * card.rate(config.model.compute_dtype, config.model.tf32)
    phases = {}
    for share in FRACTIONS:
        phases[f"{share:.0%}"] = {phase: work / rate / share for phase, work in flops.items()}
        calls = math.ceil(passes.drawn * _samples(config) / gpus / batch)
        steps = calls * config.rollout.max_new_tokens
        phases[f"{share:.0%}"]["decoding"] = steps * step_seconds(config, costs, card, batch, share)
    memory = memory_of(config, costs, gpus)
    left = {
        phase: (card.usable - sum(v for name, v in sizes.items() if name not in ("activations", "cache"))) * GIB
        for phase, sizes in memory.items()
    }
    first, further = costs.checkpointed if config.model.gradient_checkpointing else costs.activations
    return RunPlan(
        model=config.model.path,
        gpu=gpu,
        gpus=gpus,
        costs=costs,
        passes=passes,
        memory=memory,
        flops=flops,
        usable=card.usable,
        largest_micro_batch=max(0, math.floor(1 + (left["update"] - first) / further)),
        largest_rollout_batch=max(0, math.floor(1 + (left["rollout"] - sampling(costs, 1)) / _each_more(costs))),
        advice=advise(config, costs, gpus, card.usable),
        notes=_notes(config),
        **run_totals(config, phases, gpus, price),
    )


def operations(config: TextConfig, costs: TextCosts, passes: TextPasses) -> dict[str, float]:
    """FLOP of an iteration on all GPUs, by phase."""
    texts, tokens = _samples(config), config.rollout.max_new_tokens
    return {
        "prompts": texts * passes.drawn * costs.prompt,
        "decoding": texts * passes.drawn * tokens * sum(costs.decoded) / 2,
        "scoring": texts * passes.scored * costs.forward,
        "update": texts * passes.learned * costs.learned,
    }


def step_seconds(config: TextConfig, costs: TextCosts, card: GPU, batch: int, share: float) -> float:
    """Mean seconds of a decoding step: those of its arithmetic, its memory or the host, whichever takes longest.

    Args:
        share: share of the peak of arithmetic and of memory bandwidth that is reached.
    """
    tokens = config.rollout.max_new_tokens
    arithmetic = batch * sum(costs.decoded) / 2 / card.rate(config.model.compute_dtype, config.model.tf32)
    cached = costs.cache * (PROMPT_TOKENS + tokens / 2) / (PROMPT_TOKENS + tokens)
    moved = (costs.read + TRIPS * batch * cached) / (1e12 * card.bandwidth)
    return max(arithmetic / share, moved / share, costs.layers * LAUNCHING)


def sampling(costs: TextCosts, batch: int) -> float:
    """Largest number of bytes of cache and activations while `batch` texts are sampled together."""
    return max(_of(costs.prompting, batch), batch * costs.cache + _of(costs.decoding, batch))


def memory_of(config: TextConfig, costs: TextCosts, gpus: int, shards: int = 1) -> dict[str, dict[str, float]]:
    """GiB on each GPU, by phase and component; see `plan.memory_of`."""
    frozen: float = 0 if config.model.lora is None else costs.weights - 4 * costs.trained
    always = kept_weights(config, costs, frozen, shards)
    always["trajectories"] = _samples(config) / gpus * costs.trajectory
    batch = _batch(config, gpus)
    learned = costs.checkpointed if config.model.gradient_checkpointing else costs.activations
    phases = {
        # each process gathers the shards while it samples
        "rollout": always
        | {"weights": frozen + 4 * costs.trained, "cache": batch * costs.cache}
        | {"activations": sampling(costs, batch) - batch * costs.cache},
        "update": always | {"activations": _of(learned, config.training.micro_batch_size)},
    }
    return {phase: {name: size / GIB for name, size in sizes.items() if size} for phase, sizes in phases.items()}


def advise(config: TextConfig, costs: TextCosts, gpus: int, usable: float) -> list[str]:
    """Settings that make the run fit; see `fewest`."""

    def peak(changed: TextConfig, in_shards: bool) -> float:
        shards = gpus if in_shards else 1
        return max(sum(sizes.values()) for sizes in memory_of(changed, costs, gpus, shards).values())

    return fewest(config, lambda: _ways(config, gpus), peak, usable, "more or larger GPUs, shorter texts")


def _ways(config: TextConfig, gpus: int) -> Iterator[Way]:
    """Settings that take less memory, the cheapest first."""
    yield "training.offload_copies: true", setter("training", "offload_copies", True)
    yield "training.micro_batch_size: 1", setter("training", "micro_batch_size", 1)
    batch = _batch(config, gpus)
    while batch := batch // 2:
        yield f"rollout.batch_size: {batch}", setter("rollout", "batch_size", batch)
    yield "model.gradient_checkpointing: true", setter("model", "gradient_checkpointing", True)
    yield "training.optimizer.offload: true", setter("training.optimizer", "offload", True)
    yield "training.optimizer.bits: 8", setter("training.optimizer", "bits", 8)
    if gpus > 1:
        yield f"shards over the {gpus} GPUs (configs/accelerate/fsdp2.yaml)", lambda _: None


def _notes(config: TextConfig) -> list[str]:
    tokens, rewards = config.rollout.max_new_tokens, ", ".join(reward.name for reward in config.rewards)
    notes = [
        f"every text counts as rollout.max_new_tokens={tokens} tokens after a prompt of {PROMPT_TOKENS}; with the mean "
        "length there the times are those of the mean",
        f"what rewards take is not counted: {rewards}",
    ]
    if config.data.dynamic_sampling is not None:
        notes.append("groups that data.dynamic_sampling draws anew are not counted")
    return notes


def _samples(config: TextConfig) -> int:
    return config.training.prompts_per_iteration * config.training.group_size


def _batch(config: TextConfig, gpus: int) -> int:
    """Number of texts that a process samples together."""
    return min(config.rollout.batch_size, math.ceil(_samples(config) / gpus))


def _of(pair: tuple[int, int], batch: int) -> int:
    first, further = pair
    return first + (batch - 1) * further


def _each_more(costs: TextCosts) -> float:
    """Bytes of each further text in a batch that is sampled."""
    return max(costs.prompting[1], costs.cache + costs.decoding[1])


def count(config: TextConfig, gpus: int = 1) -> TextPasses:
    """Count the passes of a text in one small iteration with a tiny model and shipped prompts.

    Raises:
        ConfigError: the recipe cannot run on so many GPUs.
    """
    training = config.training
    algorithm = config.build_algorithm()
    replays = training.old_log_prob == "replayed" or (
        training.old_log_prob is None and isinstance(algorithm, PolicyGradient) and algorithm.replays_old(config)
    )
    lists = {one.prompts for one in (config.data, *config.data.also, config.evaluation, *config.evaluation.also)}
    shipped = at_hand(config, {str(one) for one in lists})
    shipped.check(gpus)
    with tempfile.TemporaryDirectory() as folder, without_warnings():
        small = small_config(shipped, folder, full=False)
        assert isinstance(small, TextConfig)
        small.training.group_size, small.training.micro_batch_size = training.group_size, training.group_size
        small.model.dtype, small.model.autocast, small.model.gradient_checkpointing = "float32", None, False
        policy = small_language_model(small, False, best_device())
        small.training.old_log_prob = "replayed" if replays else None
        trainer = Trainer(small, policy, progress=False)
        drawn = forwards = learned = 0
        generate, at_tokens = policy.generate, policy.at_tokens

        def counted_generate(prompts: Any, *args: Any) -> TextRollout:
            nonlocal drawn
            drawn += len(prompts)
            return generate(prompts, *args)

        def counted_at_tokens(rollout: TextRollout, rows: Tensor, scores: Any) -> Tensor:
            nonlocal forwards
            forwards += len(rows)
            scored = at_tokens(rollout, rows, scores)
            if scored.requires_grad:
                scored.register_hook(lambda _: backward(len(rows)))
            return scored

        def backward(rows: int) -> None:
            nonlocal learned
            learned += rows

        for part, method, own in (
            (policy, "generate", counted_generate),
            (policy, "at_tokens", counted_at_tokens),
            (trainer.algorithm, "verify", lambda *_: None),
            # texts of no advantage count too
            (trainer.learner, "_with_gradient", lambda _, items: items),
            *([] if replays else [(trainer.learner, "mismatch", lambda *_: {})]),
        ):
            setattr(part, method, own)
        trainer.iterate()
    texts = small.training.group_size
    return TextPasses(drawn=drawn / texts, scored=(forwards - learned) / texts, learned=learned / texts)


class PlannedLanguagePolicy(LanguagePolicy):
    """A policy on the fake device, where autocast is entered from outside."""

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()


def measure(config: TextConfig) -> TextCosts:
    """Costs of the real network on one GPU."""
    compute = torch_dtype(config.model.compute_dtype)
    # the recomputation does not see the modes around the backward pass
    modes = {"context_fn": lambda: (contextlib.nullcontext(), autocast(compute))}
    with FakeDevice() as device, torch.random.fork_rng(devices=[]), mock.patch.dict(RECOMPUTED, modes):
        policy = _policy(config)
        network: PreTrainedModel = policy.network
        meter = Meter(device, compute)
        tokens = config.rollout.max_new_tokens
        caches: list[DynamicCache] = []
        prompting = [meter(partial(_prefill, network, n, caches), grad=False) for n in (1, 2)]
        first, *last = (
            meter(partial(_decode, policy, config, _grown(network, caches[n - 1], length)), grad=False)
            for n, length in ((1, PROMPT_TOKENS), (1, PROMPT_TOKENS + tokens - 1), (2, PROMPT_TOKENS + tokens - 1))
        )
        whole = _size(_grown(network, caches[0], PROMPT_TOKENS + tokens))
        caches.clear()
        rollouts = [_rollout(config, n) for n in (1, 2)]
        rows = [torch.arange(n).to(DEVICE) for n in (1, 2)]
        forward = meter(lambda: policy.log_probs(rollouts[0], rows[0]), grad=False)
        for parameter in policy.trainable().values():
            parameter.grad = torch.zeros_like(parameter)

        def learned() -> list[PassCost]:
            pairs = zip(rollouts, rows, strict=True)
            return [meter(partial(_learn, policy, rollout, some)) for rollout, some in pairs]

        plain_passes = learned()
        policy.checkpoint_gradients()
        checkpointed_passes = learned()
        linear = [m for m in network.modules() if isinstance(m, nn.Linear)]
        return TextCosts(
            parameters={"network": sum(p.numel() for p in network.parameters())},
            trained=sum(p.numel() for p in policy.trainable().values()),
            weights=size_of(network),
            layers=network.config.get_text_config().num_hidden_layers,
            prompt=prompting[0].flops,
            decoded=(first.flops, last[0].flops),
            forward=forward.flops,
            learned=(checkpointed_passes if config.model.gradient_checkpointing else plain_passes)[0].flops,
            read=sum(m.weight.numel() for m in linear) * compute.itemsize,
            cache=whole,
            trajectory=sum(value.nbytes for value in rollouts[0].tensors().values()),
            prompting=_pair(prompting),
            decoding=_pair(last),
            activations=_pair(plain_passes),
            checkpointed=_pair(checkpointed_passes),
        )


def _policy(config: TextConfig) -> PlannedLanguagePolicy:
    """Put the real network on the fake device, with its LoRA where it has one."""
    model, dtype = config.model, torch_dtype(config.model.dtype)
    part = published_text(model.path)
    if part is None:
        made, reader = random_language_model(model.path, LanguagePolicy, dtype, DEVICE)
    else:
        reader = byte_tokenizer()
        with default_dtype(dtype):
            made = network(part)
    policy = PlannedLanguagePolicy(made, reader, DEVICE, model.padding)
    make_trainable(policy, model.model_copy(update={"gradient_checkpointing": False}), False)
    return policy


def _pair(costs: list[PassCost]) -> tuple[int, int]:
    one, two = costs
    return one.peak, two.peak - one.peak


def _prefill(network: PreTrainedModel, rows: int, caches: list[DynamicCache]) -> None:
    """Compute the cache of `rows` prompts, and add it to `caches`."""
    ids = torch.zeros(rows, PROMPT_TOKENS, dtype=torch.long).to(DEVICE)
    mask = torch.ones_like(ids)
    caches.append(network(input_ids=ids, attention_mask=mask, use_cache=True, logits_to_keep=1).past_key_values)


def _grown(network: PreTrainedModel, cache: DynamicCache, length: int) -> DynamicCache:
    """A cache of the same shapes but another length."""
    made = DynamicCache(config=network.config)
    for index, layer in enumerate(cache.layers):
        rows, heads, _, width = layer.keys.shape
        keys, values = (each.new_zeros(rows, heads, length, width) for each in (layer.keys, layer.values))
        made.update(keys, values, index)
    return made


def _size(cache: DynamicCache) -> int:
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def _decode(policy: LanguagePolicy, config: TextConfig, cache: DynamicCache) -> None:
    """Draw the token of each text that comes after the cache."""
    rows, length = cache.layers[0].keys.shape[0], cache.layers[0].keys.shape[2]
    ids = torch.zeros(rows, length + 1, dtype=torch.long).to(DEVICE)
    network: PreTrainedModel = policy.network
    made = network(input_ids=ids[:, -1:], attention_mask=torch.ones_like(ids), past_key_values=cache, use_cache=True)
    mask = torch.ones_like(ids[:, :PROMPT_TOKENS], dtype=torch.bool)
    SeededSampler([0] * rows, 1, Decoding.of(config.rollout), mask, policy.undrawn)(ids, made.logits[:, -1])


def _rollout(config: TextConfig, rows: int) -> TextRollout:
    """Texts of the largest length."""
    tokens = config.rollout.max_new_tokens
    zeros = torch.zeros(rows, tokens).to(DEVICE)
    return TextRollout(
        prompts=["x"] * rows,
        prompt_ids=torch.zeros(rows, PROMPT_TOKENS, dtype=torch.long).to(DEVICE),
        prompt_mask=torch.ones(rows, PROMPT_TOKENS, dtype=torch.bool).to(DEVICE),
        completion_ids=torch.zeros(rows, tokens, dtype=torch.long).to(DEVICE),
        mask=torch.ones(rows, tokens, dtype=torch.bool).to(DEVICE),
        log_prob=zeros,
        entropy=zeros,
        ended=torch.ones(rows, dtype=torch.bool).to(DEVICE),
        decoding=Decoding.of(config.rollout),
        padding=0,
    )


def _learn(policy: LanguagePolicy, rollout: TextRollout, rows: Tensor) -> None:
    policy.log_probs(rollout, rows)[0].sum().backward()
