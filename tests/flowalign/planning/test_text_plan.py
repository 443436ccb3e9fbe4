"""The plan of a language model's run against what is measured on a CPU, and its figures and errors."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from flowalign.app.cli.main import main
from flowalign.config import load, recipe
from flowalign.errors import ConfigError
from flowalign.planning import text_plan
from flowalign.planning.plan import plan
from flowalign.planning.resources import GIB, GPUS, RunPlan
from flowalign.planning.text_plan import TextPasses, advise, count, memory_of, sampling, step_seconds
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.training import Trainer

SMALL = ["evaluation.prompts=null", "training.iterations=1", "training.prompts_per_iteration=2", "name=run"]
SMALL += ["training.group_size=8", "training.updates_per_iteration=1", "rollout.max_new_tokens=12"]
# a KL from the start weights, so that no text is left out
SMALL += ["algorithm.kl_weight=0.1", "model.gradient_checkpointing=true"]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(recipe("tiny_lm/grpo"), [*SMALL, f"output={tmp_path_factory.mktemp('runs')}"])


@pytest.fixture(scope="module")
def trainer(config: Any) -> Trainer:
    made = Trainer(config, progress=False)
    made.algorithm.verify = lambda *_: None
    made.learner.mismatch = lambda *_: {}
    return made


@pytest.fixture(scope="module")
def made(config: Any, trainer: Trainer) -> RunPlan:
    """With prompts of the length that the recipe's have."""
    lengths = {len(trainer.policy.begin(text)) for text in config.build_algorithm().read(config.data).texts}
    with mock.patch.object(text_plan, "PROMPT_TOKENS", max(lengths)):
        return plan(config)


def test_operations_are_those_of_a_real_iteration(
    made: RunPlan, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # no text ends before the largest length, as planned
    monkeypatch.setattr(LanguagePolicy, "ends", property(lambda _: [-1]))
    seen: dict[str, Any] = {}
    learn = trainer.learner.learn

    def learned(experience: Any, *args: Any) -> Any:
        seen.update(experience=experience, before=counter.get_total_flops())
        return learn(experience, *args)

    monkeypatch.setattr(trainer.learner, "learn", learned)
    with FlopCounterMode(display=False) as counter:
        trainer.iterate()
    assert seen["experience"].rollout.mask.all()
    assert seen["before"] == pytest.approx(made.flops["prompts"] + made.flops["decoding"], rel=0.1)
    planned = made.flops["scoring"] + made.flops["update"]
    assert counter.get_total_flops() - seen["before"] == pytest.approx(planned, rel=0.1)


def test_memory_of_the_update_and_of_the_cache_is_what_torch_holds(
    config: Any, made: RunPlan, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LanguagePolicy, "ends", property(lambda _: [-1]))
    policy, costs = trainer.policy, made.costs
    text = max(config.build_algorithm().read(config.data).texts, key=len)
    rollout = policy.sample([text] * 64, range(64), max_new_tokens=12)
    sizes = []
    for rows in (torch.arange(32), torch.arange(64)):
        for _ in range(2):
            # the second time gradients are there already
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
                policy.log_probs(rollout, rows)[0].sum().backward()
        events = sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns())
        held = torch.tensor([event.nbytes() for event in events if event.name() == "[memory]"])
        sizes.append(held.cumsum(0).max().item())
    assert (sizes[1] - sizes[0]) / 32 == pytest.approx(costs.checkpointed[1], rel=0.1)
    ids = torch.zeros(1, rollout.prompt_ids.shape[1] + 12, dtype=torch.long)
    cache = policy.network(input_ids=ids, use_cache=True).past_key_values
    assert costs.cache == sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert costs.weights == pytest.approx(sum(p.numel() * 4 for p in policy.network.parameters()), rel=1e-3)
    update = made.memory["update"]
    assert update["moments"] == 2 * update["gradients"] == 2 * update["weights"]
    assert update["reference"] == pytest.approx(update["weights"], rel=1e-3)
    kept = costs.checkpointed[0] + (config.training.micro_batch_size - 1) * costs.checkpointed[1]
    assert update["activations"] * GIB == pytest.approx(kept)
    assert made.peak == max(sum(parts.values()) for parts in made.memory.values())


@pytest.mark.parametrize(
    ("name", "passes"),
    [
        # the start weights for the divergence, and a replay in bfloat16 that ratios refer to
        ("qwen/grpo", TextPasses(drawn=1, scored=2, learned=1)),
        # no divergence
        ("qwen/dapo", TextPasses(drawn=1, scored=1, learned=1)),
        # a greedy text more for each group of 4
        ("qwen/remax", TextPasses(drawn=1.25, scored=2, learned=1)),
        # in float32 sampling's own log-probabilities serve
        ("tiny_lm/grpo", TextPasses(drawn=1, scored=0, learned=1)),
    ],
)
def test_passes_of_a_text_are_what_its_method_says(name: str, passes: TextPasses) -> None:
    config: Any = load(recipe(name))
    assert count(config) == passes


def test_a_decoding_step_waits_for_the_slowest_of_three(config: Any, made: RunPlan) -> None:
    card, costs = GPUS["h100"], replace(made.costs, layers=0, cache=0, read=0, decoded=(2e12, 4e12))
    # an H100 makes 989 / 2 TFLOP/s in TF32
    assert step_seconds(config, costs, card, 8, 0.25) == pytest.approx(8 * 3e12 / (494.5e12 * 0.25))
    read = replace(costs, read=10**13)
    assert step_seconds(config, read, card, 8, 0.25) == pytest.approx(1e13 / (3.35e12 * 0.25))
    # of Llama-7B's 32 layers 25.5 tokens a second
    assert step_seconds(config, replace(costs, layers=32, decoded=(0, 0)), card, 8, 0.25) == pytest.approx(1 / 25.5)
    texts = config.training.prompts_per_iteration * config.training.group_size
    calls, tokens = -(-texts // config.rollout.batch_size), config.rollout.max_new_tokens
    step = step_seconds(config, made.costs, card, min(texts, config.rollout.batch_size), 0.15)
    assert made.phases["15%"]["decoding"] == pytest.approx(calls * tokens * step)
    assert made.seconds["25%"] == pytest.approx(sum(made.phases["25%"].values()))


def test_what_decides_is_advised(config: Any, made: RunPlan) -> None:
    own = config.model_copy(deep=True)
    cached = replace(made.costs, cache=2**30, decoding=(0, 0))
    assert sampling(cached, 16) == 16 * 2**30
    assert advise(own, cached, 1, 10.0) == ["rollout.batch_size: 8"]
    assert advise(own, cached, 1, 100.0) == []
    own.model.gradient_checkpointing = False
    learned = replace(made.costs, activations=(2**34, 2**34), checkpointed=(2**30, 2**20))
    assert advise(own, learned, 1, 10.0) == ["model.gradient_checkpointing: true"]
    large = replace(made.costs, trained=2**30, weights=2**32)
    (shards,) = advise(own, large, 4, 12.0)
    assert shards.startswith("shards over the 4 GPUs")
    # samples are drawn with all weights on each GPU
    memory = memory_of(own, large, 4, shards=4)
    assert memory["rollout"]["weights"] == 4 and memory["update"]["weights"] == 1
    assert advise(own, large, 1, 12.0)[-1].endswith("GiB too much; more or larger GPUs, shorter texts")


def test_what_is_not_counted_is_said_in_one_line(config: Any, made: RunPlan) -> None:
    with pytest.raises(ConfigError, match=r"^model.images: what pictures in prompts take is not counted"):
        plan(load(recipe("qwen_vl/judge")))
    with pytest.raises(ConfigError, match=r"^environment: how long its answers are"):
        plan(load(recipe("tiny_lm/turns_gigpo")))
    with pytest.raises(ConfigError, match=r"^algorithm.teacher: what a second model takes"):
        plan(load(recipe("tiny_lm/g_opd")))
    with pytest.raises(ConfigError, match="--gpus: 3 are more than the 2 groups of an iteration.*at most 2 work"):
        plan(config, gpus=3)
    unknown = config.model_copy(update={"model": config.model.model_copy(update={"path": "Qwen/Qwen2-7B-Instrukt"})})
    with pytest.raises(ConfigError, match="did you mean 'qwen/qwen2-7b-instruct'"):
        plan(unknown)
    length, rewards = made.notes
    assert "max_new_tokens=12 tokens after a prompt of" in length and rewards.endswith("exact_match")


def test_the_command_prints_it(
    made: RunPlan, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("flowalign.planning.plan.plan", lambda *_: made)
    with pytest.raises(SystemExit) as left:
        main(["plan", "tiny_lm/grpo"])
    said = capsys.readouterr().out
    assert left.value.code == 0 and "cache" in said and "decoding" in said and "it fits as it is" in said
