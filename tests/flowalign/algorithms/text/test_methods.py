"""Teachers, demonstrations, entropy and off-policy correction on tokens: literal losses, through the real trainer."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from flowalign import registry
from flowalign.algorithms.text.prefix_rft import PrefixRFT
from flowalign.algorithms.text.visurf import aligned
from flowalign.config import load, recipe
from flowalign.config.sections import Weighted
from flowalign.data import ASSETS
from flowalign.data.batches import draw_batch
from flowalign.errors import ConfigError
from flowalign.policies.language.decoding import Decoding
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.policies.language.teacher_forcing import scored
from flowalign.rollouts.draw import Draw
from flowalign.training import Trainer
from tests.flowalign.small_run import small_run

OWN_REWARDS = ["p2s", "igpo", "rlpr", "self_certainty", "tournament"]


def trainer(folder: Path, name: str, *overrides: str, **more: Any) -> Trainer:
    return small_run(f"tiny_lm/{name}", folder, "training.micro_batch_size=16", *overrides, **more)


def collected(run: Trainer, done: float = 0.0, iteration: int = 0) -> Any:
    batch = draw_batch(run.prompts, iteration, 4, 8, 0, False)
    run.algorithm.progress(done)
    return run.collect(Draw(run.sampler, run.scorer, batch))


def loss_of(run: Trainer, experience: Any, size: int = 7) -> Tensor:
    """As the trainer adds it up, in micro-batches."""
    items = experience.items
    return torch.cat([run.algorithm.losses(run.policy, experience, part)[0] for part in items.split(size)]).sum() / len(
        items
    )


def changed(run: Trainer) -> None:
    """Weights other than those that sampled, so that ratios are not 1."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in run.learner.parameters.values():
            parameter.add_(0.01 * torch.randn_like(parameter))


def grpo_loss(run: Trainer, rollout: Any, reward: Tensor, weight: Tensor | None = None) -> float:
    """PPO's clip on group-normalised rewards, the mean over all tokens: one token at a time."""
    with torch.no_grad():
        log_prob, _ = run.policy.log_probs(rollout, torch.arange(len(rollout)))
    losses, count = 0.0, int(rollout.mask.sum())
    for row in range(len(rollout)):
        own = reward[row // 8 * 8 : row // 8 * 8 + 8]
        advantage = (reward[row] - own.mean()) / (own.std() + 1e-4)
        for t in range(int(rollout.mask[row].sum())):
            ratio = math.exp(log_prob[row, t] - rollout.log_prob[row, t])
            loss = -min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
            losses += float(loss) * (1.0 if weight is None else float(weight[row, t]))
    return losses / count


def token_mean(run: Trainer, rollout: Any, value: Any, rows: list[int]) -> float:
    """Mean of value(log-probability) over all tokens of these rows."""
    with torch.no_grad():
        log_prob, _ = run.policy.log_probs(rollout, torch.arange(len(rollout)))
    values = [value(float(log_prob[row, t])) for row in rows for t in range(int(rollout.mask[row].sum()))]
    return sum(values) / len(values)


@pytest.mark.parametrize("name", OWN_REWARDS)
def test_recipes_of_rewards_train_with_their_own_reward(name: str, tmp_path: Path) -> None:
    run = trainer(tmp_path, name)
    before = {key: value.detach().clone() for key, value in run.learner.parameters.items()}
    run.train()
    (metrics,) = run.metrics.read()
    assert metrics["policy/gradient_norm"] > 0 and metrics["policy/ratio"] == pytest.approx(1, abs=1e-5)
    assert any(not torch.equal(before[key], value) for key, value in run.learner.parameters.items())


@pytest.fixture(scope="module")
def other_lm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model a little off."""
    made = LanguagePolicy.from_pretrained(ASSETS / "tiny_lm")
    torch.manual_seed(2)
    for parameter in made.network.parameters():
        parameter.data.add_(0.02 * torch.randn_like(parameter))
    folder = tmp_path_factory.mktemp("other")
    made.save(folder)
    return folder


@pytest.mark.parametrize(
    "reward",
    [
        {"name": "self_aligned"},
        {"name": "implicit_prm"},
        {"name": "delta_bound", "reward": {"name": "implicit_prm"}},
        {
            "name": "gated",
            "outcome": {"name": "exact_match"},
            "reward": {"name": "path_faithfulness", "key": "answer", "separator": "(?<=.)"},
        },
        {
            "name": "trust_weighted",
            "outcome": {"name": "exact_match"},
            "thought": {"name": "text_judge", "template": "text_rubric", "judge": {"model": str(ASSETS / "tiny_vlm")}},
        },
        {
            "name": "thought_prm",
            "outcome": {"name": "exact_match"},
            "judge": {"model": str(ASSETS / "tiny_vlm")},
            "separator": "(?<=.)",
        },
    ],
    ids=lambda reward: reward["name"],
)
def test_every_other_reward_trains_a_step(reward: dict[str, Any], other_lm: Path, tmp_path: Path) -> None:
    models = {"model": str(ASSETS / "tiny_lm"), "reference": str(other_lm)}
    inner = reward.get("reward", reward)
    if inner["name"] == "implicit_prm":
        reward = {**reward, "reward": {**inner, **models}} if "reward" in reward else {**reward, **models}
    advantage = "process_returns" if reward["name"] in ("delta_bound", "thought_prm") else "process"
    chosen = (f"rewards={json.dumps([reward])}", f"algorithm.advantage={{name: {advantage}}}")
    run = trainer(tmp_path, "grpo", *chosen)
    run.train()
    (metrics,) = run.metrics.read()
    assert metrics["policy/gradient_norm"] > 0 and metrics["policy/ratio"] == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("weighting", ["none", "chord"])
def test_chord_is_a_mean_of_grpo_and_imitation(weighting: str, tmp_path: Path) -> None:
    run = trainer(tmp_path, "chord", f"algorithm.weighting={weighting}")
    experience = collected(run, iteration=10)
    changed(run)
    batch = experience.batch
    sampled = run.sampler.rollout(batch)[torch.arange(32)]
    sampled.completion_ids, sampled.mask = experience.rollout.completion_ids[:32], experience.rollout.mask[:32]
    sampled.log_prob = experience.rollout.log_prob[:32]
    prompts, answers = batch.prompts[::8], [record["answer"] for record in batch.metadata[::8]]
    shown = scored(run.policy, prompts, answers)

    def imitated(value: float) -> float:
        return -value * (math.exp(value) * (1 - math.exp(value)) if weighting == "chord" else 1)

    # warmed up for half of 20 iterations to a peak of 0.5
    expected = 0.75 * grpo_loss(run, sampled, experience.scores.value)
    expected += 0.25 * token_mean(run, shown, imitated, [0, 1, 2, 3])
    assert loss_of(run, experience).item() == pytest.approx(expected, abs=1e-5)
    assert experience.metrics["imitation/coefficient"] == pytest.approx(0.25)


def test_relift_imitates_where_no_text_is_right(tmp_path: Path) -> None:
    run = trainer(tmp_path, "relift", "algorithm.coefficient=0.5")
    experience = collected(run)
    value = experience.scores.value.view(4, 8)
    hard = (value.amax(1) == 0).nonzero()[:, 0].tolist()
    assert 0 < len(hard) < 4, "the shipped model fails some of these prompts and not all"
    batch = experience.batch
    shown = scored(run.policy, batch.prompts[::8], [record["answer"] for record in batch.metadata[::8]])
    own = experience.rollout[torch.arange(32)]
    expected = grpo_loss(run, own, value.flatten()) + 0.5 * token_mean(run, shown, lambda x: -x, hard)
    assert loss_of(run, experience).item() == pytest.approx(expected, abs=1e-5)
    # the other demonstrations cost no pass
    useful = experience.useful(experience.items)[8::9].tolist()
    assert useful == [group in hard for group in range(4)]


@pytest.mark.parametrize(("target", "temperature"), [(9.0, 1.2), (0.0, 0.8)])
def test_aepo_imitates_right_texts_of_another_temperature(target: float, temperature: float, tmp_path: Path) -> None:
    run = trainer(tmp_path, "aepo", f"algorithm.entropy={target}")
    experience = collected(run)
    batch = experience.batch
    rows = list(range(0, 32, 8))
    further = run.policy.sample(
        [batch.prompts[row] for row in rows],
        [batch.seeds[row] for row in rows],
        max_new_tokens=5,
        temperature=temperature,
        batch_size=512,
    )
    texts = run.policy.decode(further)
    group = experience.scores.value.view(4, 8)
    right = [i for i, row in enumerate(rows) if texts[i] == batch.metadata[row]["answer"] and not group[i].all()]
    further.decoding = Decoding()
    expected = grpo_loss(run, experience.rollout[torch.arange(32)], experience.scores.value)
    if right:
        # half of it while the entropy is above the target
        expected += (0.25 if target else 0.125) * token_mean(run, further, lambda x: -x, right)
    assert loss_of(run, experience).item() == pytest.approx(expected, abs=1e-5)
    assert experience.metrics["text/regulating_temperature"] == temperature


def test_visurf_puts_the_demonstration_among_the_group(tmp_path: Path) -> None:
    run = trainer(tmp_path, "visurf")
    experience = collected(run)
    texts = run.policy.decode(experience.rollout)
    answers = [record["answer"] for record in experience.batch.metadata]
    assert texts[7::8] == answers[7::8]
    plain = run.sampler.rollout(experience.batch)
    assert [t for i, t in enumerate(texts) if i % 8 != 7] == [
        t for i, t in enumerate(run.policy.decode(plain)) if i % 8 != 7
    ]
    reward = experience.scores.value.clone()
    for start in range(0, 32, 8):
        others = reward[start : start + 7]
        if others.max() == 1:
            reward[start + 7] = others.mean()
    assert experience.reward.tolist() == pytest.approx(reward.tolist())
    assert loss_of(run, experience).item() == pytest.approx(grpo_loss(run, experience.rollout, reward), abs=1e-5)


def test_visurf_keeps_rewards_of_thoughts_from_demonstrations(tmp_path: Path) -> None:
    rewards = "rewards=[{name: exact_match}, {name: text_format, weight: 0.5, pattern: '.+'}]"
    run = trainer(tmp_path, "visurf", rewards, "algorithm.unpaid=[text_format]", "algorithm.align=true")
    experience = collected(run)
    reward = experience.scores.value.clone()
    reward[7::8] -= 0.5
    for start in range(0, 32, 8):
        others = reward[start : start + 7]
        if others.max() >= reward[start + 7]:
            reward[start + 7] = others.mean()
    assert experience.reward.tolist() == pytest.approx(reward.tolist())
    assert aligned('{"box":[1,2],"name":"é"}') == '{"box": [1, 2], "name": "é"}' and aligned("[1,2") == "[1,2"


def test_prefix_rft_continues_demonstrations_and_learns_their_uncertain_tokens(tmp_path: Path) -> None:
    run = trainer(tmp_path, "prefix_rft", "algorithm.start=1.0", "algorithm.uncertain=0.4")
    assert isinstance(run.algorithm, PrefixRFT)
    experience = collected(run)
    texts = run.policy.decode(experience.rollout)
    weight = torch.ones_like(experience.loss_weight)
    for row, record in enumerate(experience.batch.metadata):
        if row % 8 != 7:
            continue
        # the last token is the policy's own
        count = len(record["answer"]) - 1
        assert texts[row].startswith(record["answer"][:count])
        entropy = experience.rollout.entropy[row, :count]
        weight[row, :count] = 0
        weight[row, entropy.topk(math.ceil(0.4 * count)).indices] = 1
    value = experience.scores.value
    expected = grpo_loss(run, experience.rollout, value, weight)
    assert loss_of(run, experience).item() == pytest.approx(expected, abs=1e-5)
    late = collected(run, done=1.0)
    assert not any(run.algorithm.prefixes(run.sampler, late.batch))


@pytest.mark.parametrize("guided", [False, True])
def test_kdrl_adds_the_divergence_from_the_teacher(guided: bool, tmp_path: Path) -> None:
    settings = ("algorithm.distillation=0.5", "algorithm.final_distillation=0.1", f"algorithm.reward_guided={guided}")
    run = trainer(tmp_path, "kdrl", *settings)
    experience = collected(run, done=0.5)
    changed(run)
    rows = torch.arange(32)
    log_prob, _ = run.policy.log_probs(experience.rollout, rows)
    # the teacher has the weights that sampled
    teacher, mask = experience.rollout.log_prob, experience.rollout.mask
    k2 = 0.5 * (teacher - log_prob) ** 2
    if guided:
        k2 = k2 * (experience.scores.value < 0.5)[:, None]
    expected = grpo_loss(run, experience.rollout, experience.scores.value) + 0.3 * k2[mask].mean().item()
    assert k2[mask].mean() > 0
    assert loss_of(run, experience).item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("extrapolation", [1.0, 1.5])
def test_g_opd_rewards_tokens_that_the_teacher_finds_more_probable(
    extrapolation: float, other_lm: Path, tmp_path: Path
) -> None:
    teacher = LanguagePolicy.from_pretrained(other_lm)
    settings = (f"algorithm.extrapolation={extrapolation}", "algorithm.reward_weight=0.5", "model.lora={rank: 4}")
    run = trainer(tmp_path, "g_opd", f"algorithm.teacher={other_lm}", *settings)
    changed(run)
    experience = collected(run)
    assert run.algorithm.uses_reference == (extrapolation != 1)
    rollout = experience.rollout
    with run.policy.reference(), torch.no_grad():
        start, _ = run.policy.log_probs(rollout, torch.arange(32))
        taught, _ = teacher.log_probs(rollout, torch.arange(32))
    distilled = extrapolation * (taught - start) - (rollout.log_prob - start)
    reward = experience.scores.value.view(4, 8)
    outcome = ((reward - reward.mean(1, True)) / (reward.std(1, keepdim=True) + 1e-4)).view(32, 1)
    expected = (distilled + 0.5 * outcome).where(rollout.mask, 0)
    torch.testing.assert_close(experience.advantage, expected, atol=1e-5, rtol=0)
    assert distilled.abs().max() > 0.1


def test_g_opd_extrapolates_away_from_the_reference_it_is_given(other_lm: Path, tmp_path: Path) -> None:
    """The teacher as its own reference has nothing to add beyond what the policy lost of it."""
    settings = (f"algorithm.teacher={other_lm}", f"algorithm.reference={other_lm}", "algorithm.reward_weight=0")
    run = trainer(tmp_path, "g_opd", *settings, "algorithm.extrapolation=3")
    assert not run.algorithm.uses_reference
    experience = collected(run)
    with torch.no_grad():
        taught, _ = LanguagePolicy.from_pretrained(other_lm).log_probs(experience.rollout, torch.arange(32))
    expected = (taught - experience.rollout.log_prob).where(experience.rollout.mask, 0)
    torch.testing.assert_close(experience.advantage, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "reward",
    [
        "{name: clip_bound, reward: {name: path_faithfulness, key: answer}}",
        "{name: gated, outcome: {name: exact_match}, reward: {name: delta_bound, reward: {name: path_faithfulness}}}",
    ],
)
def test_a_bound_on_the_sum_is_not_undone_by_centring_each_step(reward: str) -> None:
    def config(advantage: str) -> Any:
        return load(recipe("tiny_lm/grpo"), [f"rewards=[{reward}]", f"algorithm.advantage={advantage}"])

    for name in ("process", "'flowalign.core.advantages:process'"):
        with pytest.raises(ConfigError, match=r"the bound in rewards\.0 no longer holds; process_returns works"):
            config(f"{{name: {name}}}").check(processes=1)
    config("{name: process_returns}").check(processes=1)


@pytest.mark.parametrize(("level", "rule"), [("token", "truncate"), ("sequence", "mask")])
def test_off_policy_weights_are_forward_over_sampling(level: str, rule: str, tmp_path: Path) -> None:
    settings = f"algorithm.off_policy={{level: {level}, rule: {rule}, largest: 1.05}}"
    run = trainer(tmp_path, "off_policy", settings)
    sample = run.sampler.rollout

    def distorted(batch: Any) -> Any:
        """What an engine of other numerics would report."""
        rollout = sample(batch)
        torch.manual_seed(0)
        rollout.log_prob = (rollout.log_prob + 0.1 * torch.randn_like(rollout.log_prob)).where(rollout.mask, 0)
        return rollout

    run.sampler.rollout = distorted
    batch = draw_batch(run.prompts, 0, 4, 8, 0, False)
    reported = distorted(batch).log_prob
    experience = run.collect(Draw(run.sampler, run.scorer, batch))
    true, mask = experience.rollout.log_prob, experience.rollout.mask
    weight = torch.zeros_like(true)
    for row in range(32):
        ratios = [math.exp(true[row, t] - reported[row, t]) for t in range(int(mask[row].sum()))]
        if level == "sequence":
            ratios = [math.prod(ratios)] * len(ratios)
        for t, ratio in enumerate(ratios):
            weight[row, t] = min(ratio, 1.05) if rule == "truncate" else ratio * (ratio <= 1.05)
    expected = grpo_loss(run, experience.rollout, experience.scores.value, weight)
    assert loss_of(run, experience).item() == pytest.approx(expected, abs=1e-5)
    assert 0 < experience.metrics["policy/off_policy_weight"] < 1.05


def test_gigpo_compares_tokens_that_come_after_the_same(tmp_path: Path) -> None:
    run = trainer(tmp_path, "gigpo")
    experience = collected(run)
    texts = [ids[mask].tolist() for ids, mask in zip(experience.rollout.completion_ids, experience.rollout.mask)]
    reward = experience.scores.value
    for row in range(32):
        first = row // 8 * 8
        own = reward[first : first + 8]
        episode = (reward[row] - own.mean()) / (own.std() + 1e-6)
        for t in range(len(texts[row])):
            same = [r for r in range(first, first + 8) if texts[r][:t] == texts[row][:t] and len(texts[r]) > t]
            returns = torch.tensor([reward[r] * 0.95 ** (len(texts[r]) - 1 - t) for r in same])
            mine = reward[row] * 0.95 ** (len(texts[row]) - 1 - t)
            spread = returns.std() if len(same) > 1 else 0.0
            step = (mine - returns.mean()) / (spread + 1e-6)
            assert experience.advantage[row, t].item() == pytest.approx(float(episode + step), abs=1e-3)


def test_a_teacher_of_other_tokens_and_a_prompt_without_demonstration_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no 'solution' with the prompt"):
        trainer(tmp_path / "a", "chord", "algorithm.demonstration=solution")
    run = trainer(tmp_path / "b", "kdrl", "algorithm.teacher=nowhere")
    with pytest.raises(ConfigError, match="no language model at 'nowhere'"):
        collected(run)


def test_what_the_documentation_configures_is_right() -> None:
    text = (Path(__file__).parents[4] / "docs" / "text.md").read_text()
    blocks = [yaml.safe_load(block.partition("```")[0]) for block in text.split("```yaml\n")[1:]]
    rewards = [Weighted(**entry) for block in blocks for entry in block.get("rewards", [])]
    for entry in rewards:
        registry.check("rewards", entry.name, entry.settings, "docs/text.md")
    assert len(rewards) >= 4


@pytest.mark.parametrize("name", ["chord", "visurf", "aepo"])
def test_several_updates_share_the_texts_out(name: str, tmp_path: Path) -> None:
    # where a text is imitated it is the eighth of a group of seven
    size = 8 if name == "visurf" else 7
    updates = ("training.updates_per_iteration=2", "training.iterations=2", f"training.group_size={size}")
    run = trainer(tmp_path, name, *updates)
    run.train()
    assert all(math.isfinite(line["policy/loss"]) for line in run.metrics.read())
