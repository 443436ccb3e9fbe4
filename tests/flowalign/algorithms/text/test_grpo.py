"""GRPO on tokens: a fresh tiny language model through the trainer, and TRL's own step."""

import importlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from flowalign.algorithms.policy_gradient import ActionExperience
from flowalign.algorithms.text.base import LanguageSettings
from flowalign.algorithms.text.grpo import GRPO
from flowalign.config import load, recipe
from flowalign.config.language import TextConfig
from flowalign.core.aggregation import action_weights
from flowalign.core.divergences import sampled_kl
from flowalign.core.losses import ppo
from flowalign.core.record import Actions
from flowalign.data.batches import Batch, draw_batch
from flowalign.errors import ConfigError
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.rollouts.draw import Draw
from flowalign.rollouts.language import LanguageSampler, baseline
from flowalign.rollouts.processes import Processes
from flowalign.rollouts.sampler import Sampled
from flowalign.rollouts.scoring import Scorer
from flowalign.training import Trainer
from rewards import as_reward
from tests.flowalign.small_run import small_run

ORIGINALS = Path(__file__).parents[2] / "core" / "originals"
# those without ratios are in test_lines.py
STEMS = {path.stem for path in recipe("tiny_lm/grpo").parent.glob("*.yaml") if "text_" not in path.stem}
# of serial all members of a group begin alike, so that the reward below tells none apart; see test_prompted.py;
# of doge half a group learns, and here these are alike, see test_modes.py; vas has no ratio, see test_vas.py;
# dflow_grpo trains a masked language model, see test_dflow_grpo.py; oorl has texts beside its prompts, see test_oorl.py
RECIPES = sorted(STEMS - {"gkd", "token_dpo", "serial", "doge", "vas", "dflow_grpo", "oorl"})


def first_is_even(texts: list[str], prompts: list[str]) -> list[float]:
    return [float(text[:1] in {"0", "2", "4", "6", "8"}) for text in texts]


def nothing(texts: list[str], prompts: list[str]) -> list[float]:
    return [0.0] * len(texts)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an untaught tiny language model and a list of sums."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[4] / "scripts")
        script = importlib.import_module("build_tiny_lm")
    folder = tmp_path_factory.mktemp("world")
    torch.manual_seed(0)
    tokens = script.tokenizer()
    script.untaught(tokens).save_pretrained(folder / "lm")
    tokens.save_pretrained(folder / "lm")
    lines = [json.dumps({"prompt": p, "answer": a, "category": c}) for p, a, c in script.sums()["train"][:40]]
    (folder / "sums.jsonl").write_text("\n".join(lines))
    return folder


def trainer(
    world: Path, folder: Path, *overrides: str, name: str = "grpo", reward: Any = first_is_even, **more: Any
) -> Trainer:
    own = [
        f"model.path={world / 'lm'}",
        f"data.prompts={world / 'sums.jsonl'}",
        "training.micro_batch_size=16",
    ]
    return small_run(f"tiny_lm/{name}", folder, *own, *overrides, reward=reward, **more)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_starts_at_ratio_one_and_moves_the_weights(name: str, world: Path, tmp_path: Path) -> None:
    run = trainer(world, tmp_path, name=name)
    before = {key: value.detach().clone() for key, value in run.learner.parameters.items()}
    run.train()
    (metrics,) = run.metrics.read()
    assert metrics["policy/ratio"] == pytest.approx(1, abs=1e-5)
    assert metrics["policy/gradient_norm"] > 0
    assert any(not torch.equal(before[key], value) for key, value in run.learner.parameters.items())


def test_training_raises_the_reward(world: Path, tmp_path: Path) -> None:
    run = trainer(world, tmp_path, "training.iterations=25", "training.optimizer.learning_rate=1e-3")
    run.train()
    rewards = [record["reward/mean"] for record in run.metrics.read()]
    assert rewards[-1] > rewards[0] + 0.3


def test_groups_that_are_all_wrong_change_nothing_unless_the_advantage_says_so(world: Path, tmp_path: Path) -> None:
    for advantage, moves in (("grpo", False), ("ngrpo", True)):
        run = trainer(world, tmp_path / advantage, f"algorithm.advantage={{name: {advantage}}}", reward=nothing)
        before = [p.detach().clone() for p in run.learner.parameters.values()]
        run.train()
        assert run.metrics.read()[0]["reward/zero_spread"] == 1
        same = all(torch.equal(a, b) for a, b in zip(before, run.learner.parameters.values(), strict=True))
        assert same != moves


@pytest.mark.parametrize("lora", ["null", "{rank: 4, alpha: 8}"])
def test_a_resumed_run_is_the_uninterrupted_one(lora: str, world: Path, tmp_path: Path) -> None:
    settings = (
        f"model.lora={lora}",
        "training.iterations=4",
        "training.checkpoint_every=2",
        "algorithm.kl_weight=0.01",
    )
    whole = trainer(world, tmp_path / "whole", *settings)
    whole.train()
    half = trainer(world, tmp_path / "half", *settings)
    while half.iteration < 2:
        half.iterate()
        half.iteration += 1
    half.save()
    again = trainer(world, tmp_path / "half", *settings, resume=True)
    assert again.iteration == 2
    again.train()
    for name, value in whole.learner.parameters.items():
        assert torch.equal(value, again.learner.parameters[name]), name


@pytest.mark.parametrize("aggregation", ["token", "sequence", "sum", "constant"])
def test_micro_batches_add_up_to_the_aggregated_loss(aggregation: Any, world: Path, tmp_path: Path) -> None:
    run = trainer(world, tmp_path, f"algorithm.aggregation={aggregation}")
    batch = draw_batch(run.prompts, 0, 4, 8, 0, False)
    experience = run.collect(Draw(run.sampler, run.scorer, batch))
    parts = [run.algorithm.losses(run.policy, experience, items)[0] for items in experience.items.split(5)]
    rollout = experience.rollout
    log_prob, _ = run.policy.log_probs(rollout, torch.arange(32))
    tokens = Actions(
        log_prob=log_prob,
        old_log_prob=rollout.log_prob,
        advantage=experience.advantage,
        mask=rollout.mask,
        group=experience.group,
        reward=experience.reward,
    )
    weights = action_weights(rollout.mask, aggregation, length=5)
    expected = (ppo(tokens)[0].where(rollout.mask, 0) * weights).sum()
    torch.testing.assert_close(torch.cat(parts).sum() / 32, expected)


def test_texts_that_were_cut_can_be_left_out(world: Path, tmp_path: Path) -> None:
    run = trainer(world, tmp_path, "algorithm.mask_truncated=true", "rollout.max_new_tokens=2")
    experience = run.collect(Draw(run.sampler, run.scorer, draw_batch(run.prompts, 0, 4, 8, 0, False)))
    ended = experience.rollout.ended
    assert not ended.all()
    assert not experience.loss_weight[~ended].any()
    assert experience.metrics["text/cut"] == pytest.approx(1 - ended.float().mean().item())


def test_the_baseline_is_the_greedy_texts_reward(world: Path, tmp_path: Path) -> None:
    run = trainer(world, tmp_path, name="remax")
    batch = draw_batch(run.prompts, 0, 4, 8, 0, False)
    rollout = run.sampler.rollout(batch)
    made = baseline(Sampled(rollout=rollout, batch=batch, sampler=run.sampler, scorer=run.scorer))
    for row in range(0, 32, 8):
        greedy = run.policy.sample([batch.prompts[row]], [9], max_new_tokens=5, temperature=0)
        expected = first_is_even(run.policy.decode(greedy), [])[0]
        assert made[row : row + 8].tolist() == [expected] * 8


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.name=flow_grpo"], "trains models of pictures"),
        (
            ["algorithm={name: chord, loss: {name: pacs}}"],
            "a whole group at once, and CHORD shows it one row at a time",
        ),
        (["algorithm.loss={name: pacs}", "training.micro_batch_size=12"], "whole groups of 8"),
        (["rollout.temperature=0"], "members of a group are alike"),
        (["rollout.steps=3"], "unknown key 'steps'"),
        (["algorithm.loss={name: gpo}"], "did you mean"),
    ],
)
def test_what_cannot_work_is_said_before_a_model_loads(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(recipe("tiny_lm/grpo"), overrides).check(1)


def test_one_step_has_trls_loss_and_gradient() -> None:
    import sys

    sys.path.insert(0, str(ORIGINALS))
    import step

    sys.path.pop(0)
    stored = load_file(ORIGINALS / "step.safetensors")
    network = step.model()

    def load(which: str) -> None:
        weights = {k.removeprefix(which): v for k, v in stored.items() if k.startswith(which)}
        network.load_state_dict(weights, strict=False)
        network.tie_weights()

    load("start.")
    recorded = json.loads((ORIGINALS / "step.json").read_text())
    policy = LanguagePolicy(network, step.tokenizer())
    prompts = policy.tokenizer.batch_decode(recorded["prompt_ids"], skip_special_tokens=True)
    group = [step.PROMPTS.index(prompt) for prompt in prompts]
    rollout = policy.sample(prompts, list(range(8)), max_new_tokens=10, temperature=0.8)
    # the texts that TRL sampled in its step
    rollout.completion_ids = torch.tensor(recorded["completion_ids"])
    rollout.mask = torch.tensor(recorded["completion_mask"]).bool()
    rollout.ended = torch.ones(8, dtype=torch.bool)
    policy.keep_reference()
    policy.train_all()
    load("weight.")
    with torch.no_grad():
        rollout.log_prob, rollout.entropy = policy.log_probs(rollout, torch.arange(8))

    config = TextConfig(
        model={"kind": "text", "path": "given"},
        data={"prompts": "given"},
        rewards=[{"name": "exact_match"}],
        algorithm={"name": "grpo"},
        rollout={"max_new_tokens": 10, "temperature": 0.8},
        training={"iterations": 1, "prompts_per_iteration": 2, "group_size": 4},
    )
    reward = as_reward(lambda texts, prompts: [step.reward(text) for text in texts])
    sampler, scorer = LanguageSampler(config, policy), Scorer(reward, Processes(Accelerator(cpu=True)))
    sampler.rollout = lambda batch: rollout  # type: ignore[method-assign]
    batch = Batch(
        prompts=prompts,
        metadata=[{}] * 8,
        group=group,
        seeds=[0] * 8,
        noise_seeds=list(range(8)),
        iteration=0,
        picks=group,
    )
    algorithm = GRPO(
        LanguageSettings(
            loss={"name": "ppo", "clip_range": 0.2, "clip_range_high": 0.28}, kl_weight=step.BETA, kl_correction=True
        )
    )
    experience: ActionExperience = algorithm.at_once(sampler, scorer, batch)
    losses, metrics = algorithm.losses(policy, experience, experience.items)
    assert metrics["policy/kl"].mean() > 0.1
    loss = losses.sum() / 8
    loss.backward()
    assert loss.item() == pytest.approx(recorded["loss"], abs=1e-5)
    for name, parameter in network.named_parameters():
        expected = stored[f"gradient.{name}"]
        torch.testing.assert_close(parameter.grad, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("old", "clipped"), [("null", False), ("sampled", True)])
def test_in_low_precision_ratios_start_at_one(old: str, clipped: bool, world: Path, tmp_path: Path) -> None:
    """Those of a whole text, which GSPO clips at 3e-4: a model of real size is further off by rounding alone."""
    run = trainer(world, tmp_path, "model.dtype=bfloat16", f"training.old_log_prob={old}", name="gspo")
    sampled = run.sampler.rollout

    def rounded(batch: Batch) -> Any:
        rollout = sampled(batch)
        rollout.log_prob = (rollout.log_prob + 0.01 * torch.randn_like(rollout.log_prob)).where(rollout.mask, 0)
        return rollout

    run.sampler.rollout = rounded
    run.train()
    (metrics,) = run.metrics.read()
    assert (metrics["policy/clip_fraction"] > 0.1) == clipped
    assert (metrics["policy/ratio"] == 1) != clipped
    assert metrics["policy/mismatch"] > 3e-4


def test_divergences_count_whole_whatever_weighs_the_policys_loss(world: Path, tmp_path: Path) -> None:
    settings = "algorithm.entropy_share=0.3", "algorithm.kl_weight=0.5", "algorithm.off_policy={level: token}"
    run = trainer(world, tmp_path, *settings)
    sampled = run.sampler.rollout

    def by_another_engine(batch: Batch) -> Any:
        rollout = sampled(batch)
        rollout.log_prob = rollout.log_prob + 0.2
        return rollout

    run.sampler.rollout = by_another_engine
    experience = run.collect(Draw(run.sampler, run.scorer, draw_batch(run.prompts, 0, 4, 8, 0, False)))
    with torch.no_grad():
        for parameter in run.policy.trainable().values():
            parameter.add_(0.05 * torch.randn_like(parameter))
        losses = {}
        for weight in (0.5, 0.0):
            run.algorithm.settings.kl_weight = weight
            losses[weight], _ = run.algorithm.losses(run.policy, experience, experience.items)
        rollout, rows = experience.rollout, torch.arange(32)
        log_prob, _ = run.policy.log_probs(rollout, rows)
        with run.policy.reference():
            reference, _ = run.policy.log_probs(rollout, rows)
    # entropy_share and off_policy weigh the policy's loss
    share = (experience.loss_weight > 0).sum() / rollout.mask.sum()
    assert 0.2 < share < 0.4
    counts = experience.loss_weight > 0
    weight = experience.loss_weight[counts] / experience.divergence_weight[counts]
    torch.testing.assert_close(weight, torch.full_like(weight, math.exp(-0.2)), atol=1e-4, rtol=0)
    expected = 0.5 * sampled_kl(log_prob, reference)[rollout.mask].mean()
    assert expected > 1e-4
    torch.testing.assert_close((losses[0.5] - losses[0.0]).mean(), expected)


@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_the_kls_gradient_is_corrected_by_the_ratio_of_the_loss(name: str, world: Path, tmp_path: Path) -> None:
    """TRL's: the token's ratio, or the text's geometric mean with importance_sampling_level 'sequence'."""
    settings = "algorithm.kl_weight=0.5", "algorithm.kl_correction=true", "model.lora={rank: 4}"
    run = trainer(world, tmp_path, *settings, name=name)
    experience = run.collect(Draw(run.sampler, run.scorer, draw_batch(run.prompts, 0, 4, 8, 0, False)))
    rollout, rows = experience.rollout, torch.arange(32)
    with torch.no_grad():
        for parameter in run.policy.trainable().values():
            parameter.add_(0.05 * torch.randn_like(parameter))
        _, metrics = run.algorithm.losses(run.policy, experience, experience.items)
        log_prob, _ = run.policy.log_probs(rollout, rows)
        with run.policy.reference():
            reference, _ = run.policy.log_probs(rollout, rows)
    for row in range(32):
        count = int(rollout.mask[row].sum())
        log_ratio = [float(log_prob[row, t] - rollout.log_prob[row, t]) for t in range(count)]
        kl = 0.0
        for t, each in enumerate(log_ratio):
            gap = float(reference[row, t] - log_prob[row, t])
            ratio = math.exp(sum(log_ratio) / count if name == "gspo" else each)
            kl += (math.exp(gap) - gap - 1) * ratio / count
        assert metrics["policy/kl"][row].item() == pytest.approx(kl, abs=1e-6)


@pytest.mark.parametrize("name", ["sapo", "gmpo", "luspo", "vespo", "dppo", "clip_cov", "kl_cov"])
def test_every_newer_loss_trains_by_name(name: str, world: Path, tmp_path: Path) -> None:
    chosen = f"algorithm.loss={{name: {name}}}", "algorithm.sequence_mask=0.1", "algorithm.advantage={name: opo}"
    run = trainer(world, tmp_path, *chosen, "training.updates_per_iteration=2")
    run.train()
    (metrics,) = run.metrics.read()
    assert metrics["policy/gradient_norm"] > 0 and 0 <= metrics["policy/sequence_mask"] < 1


def test_an_iteration_of_cut_texts_alone_learns_nothing(world: Path, tmp_path: Path) -> None:
    cut = "algorithm.mask_truncated=true", "algorithm.entropy_share=0.2", "rollout.max_new_tokens=1"
    run = trainer(world, tmp_path, *cut)
    experience = run.collect(Draw(run.sampler, run.scorer, draw_batch(run.prompts, 0, 4, 8, 0, False)))
    kept = experience.rollout.ended
    assert not kept.all() and not experience.loss_weight[~kept].any()


@pytest.mark.parametrize("selection", ["mopps", "sec"])
def test_a_selection_learns_and_goes_on_where_it_was(selection: str, world: Path, tmp_path: Path) -> None:
    settings = (f"data.selection={{name: {selection}}}", "training.iterations=3", "training.checkpoint_every=3")
    run = trainer(world, tmp_path, *settings)
    run.train()
    state = run.selection.state_dict()
    assert state and state != type(run.selection)().state_dict()
    again = trainer(world, tmp_path, *settings, resume=True)
    assert again.selection.state_dict() == state


def test_two_passes_learn_from_every_text_twice(world: Path, tmp_path: Path) -> None:
    run = trainer(world, tmp_path, "training.passes=2", "training.updates_per_iteration=2")
    seen, update = [], run.learner.update

    def kept(experience: Any, items: torch.Tensor, **more: Any) -> Any:
        seen.append(items[:, 0].sort().values.tolist())
        return update(experience, items, **more)

    run.learner.update = kept  # type: ignore[method-assign]
    run.iterate()
    everything = list(range(len(seen[0]) * 2))
    assert sorted(seen[0] + seen[1]) == sorted(seen[2] + seen[3]) == everything
    assert seen[0] not in seen[2:], "each pass has another order"


def test_the_reference_follows_as_trls_does(world: Path, tmp_path: Path) -> None:
    """ref = 0.6 policy + 0.4 ref, every second update (TRL's sync_ref_model)."""
    follow = "training.snapshots={slow: {decay: 0.4, every: update, interval: 2}}"
    run = trainer(world, tmp_path, follow, "algorithm.kl_weight=0.1", "algorithm.kl_reference=slow")
    start, seen = run.policy.network.model.embed_tokens.weight.detach().clone(), []
    for _ in range(3):
        seen.append(run.iterate()["policy/kl"])
        run.iteration += 1
        moved = run.policy.network.model.embed_tokens.weight.detach().clone()
        if run.iteration == 2:
            expected = 0.6 * moved + 0.4 * start
    with run.policy.snapshot("slow"):
        torch.testing.assert_close(run.policy.network.model.embed_tokens.weight, expected)
    assert seen[0] == 0 < seen[1]
    assert not run.algorithm.uses_reference, "no copy of the start weights is kept"


def test_the_entropy_bonus_has_the_entropys_gradient(world: Path, tmp_path: Path) -> None:
    run = trainer(world, tmp_path, "algorithm.entropy_weight=0.5", reward=nothing)
    parameters = list(run.policy.trainable().values())
    draw = run.groups.draw(0)
    experience = run.collect(draw)
    rollout = experience.rollout
    loss = run.algorithm.losses(run.policy, experience, experience.items)[0].mean()
    found = torch.autograd.grad(loss, parameters)
    ids = torch.cat([rollout.prompt_ids, rollout.completion_ids], 1)
    mask = torch.cat([rollout.prompt_mask, rollout.mask], 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = run.policy.network(input_ids=ids, attention_mask=mask.long(), position_ids=positions).logits
    chance = logits[:, rollout.prompt_ids.shape[1] - 1 : -1].softmax(-1)
    entropy = -(chance * chance.log()).sum(-1)[rollout.mask].mean()
    for one, other in zip(found, torch.autograd.grad(-0.5 * entropy, parameters), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-3)


def test_a_critic_learns_the_texts_worth(world: Path, tmp_path: Path) -> None:
    settings = "training.optimizer.learning_rate=1e-3", "training.iterations=12", "training.passes=2"
    run = trainer(world, tmp_path, *settings, name="text_ppo", reward=lambda texts, prompts: [2.0] * len(texts))
    run.train()
    metrics = run.metrics.read()
    assert metrics[0]["critic/value"] == 0 and metrics[0]["critic/loss"] == pytest.approx(2.0, rel=0.2)
    assert metrics[-1]["critic/value"] > 0.3 and metrics[-1]["critic/loss"] < metrics[0]["critic/loss"]


def test_a_text_that_no_reward_applies_to_teaches_nothing(world: Path, tmp_path: Path) -> None:
    async def some(texts: list[str], prompts: list[str]) -> list[float | None]:
        return [None if number % 4 == 0 else float(number % 4) for number in range(len(texts))]

    run = trainer(world, tmp_path, reward=some)
    experience = run.collect(run.groups.draw(0))
    left_out = torch.arange(len(experience.batch)) % 4 == 0
    assert not experience.advantage[left_out].any() and experience.advantage[~left_out].any()
    assert not experience.advantage.isnan().any()
    assert experience.metrics["reward/mean"] == pytest.approx(2)
    assert run.iterate()["policy/gradient_norm"] > 0
