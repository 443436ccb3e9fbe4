"""Training with an environment, through the real trainer: GiGPO's groups of states and IGPO's credit, written out."""

import math
import shutil
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from flowalign.config import load, recipe
from flowalign.data import ASSETS
from flowalign.data.batches import draw_batch
from flowalign.errors import ConfigError, FlowalignError
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.rollouts.draw import Draw
from flowalign.runs.metrics import MetricsFile
from flowalign.training import Trainer
from tests.flowalign.small_run import SMALL, small_run


class Broken:
    """Fails in the second iteration."""

    played = 0

    def reset(self, prompt: str, metadata: Any) -> str:
        Broken.played += 1
        return prompt

    def step(self, completion: str) -> tuple[str, float, bool]:
        if Broken.played > 32:
            raise ConnectionError("nobody there")
        return "+", float(Broken.played % 2), True


def trainer(folder: Path, name: str, *overrides: str, **more: Any) -> Trainer:
    return small_run(f"tiny_lm/{name}", folder, "training.micro_batch_size=16", *overrides, **more)


def collected(run: Trainer) -> Any:
    return run.collect(Draw(run.sampler, run.scorer, draw_batch(run.prompts, 0, 4, 8, 0, False)))


def turns_of(experience: Any) -> list[list[tuple[float, str]]]:
    return [[(taken.reward, taken.state) for taken in own] for own in experience.rollout.episodes]


def advantages(experience: Any) -> list[list[float]]:
    """Of every turn, the one that all its tokens have."""
    rollout, rows = experience.rollout, []
    assert not experience.advantage[~rollout.mask].any() and not experience.loss_weight[~rollout.mask].any()
    for row, own in enumerate(rollout.episodes):
        earned = []
        for number in range(len(own)):
            tokens = experience.advantage[row][rollout.mask[row] & (rollout.turn[row] == number)]
            assert (tokens == tokens[0]).all()
            earned.append(float(tokens[0]))
        rows.append(earned)
    return rows


def test_gigpo_compares_the_turns_that_members_took_in_one_state(tmp_path: Path) -> None:
    experience = collected(trainer(tmp_path, "turns_gigpo"))
    turns, made = turns_of(experience), advantages(experience)
    met = 0
    for first in range(0, 32, 8):
        group = range(first, first + 8)
        total = {row: sum(reward for reward, _ in turns[row]) for row in group}
        returns: dict[tuple[int, int], float] = {}
        for row in group:
            for k in range(len(turns[row])):
                returns[row, k] = sum(0.95 ** (j - k) * reward for j, (reward, _) in enumerate(turns[row]) if j >= k)
        for row in group:
            spread = statistics.stdev(total.values()) + 1e-6
            episode = (total[row] - statistics.mean(total.values())) / spread
            for k, (_, state) in enumerate(turns[row]):
                pool = [value for (other, j), value in returns.items() if turns[other][j][1] == state]
                met += k > 0 and len(pool) > 1
                step = (returns[row, k] - statistics.mean(pool)) / (
                    statistics.stdev(pool) + 1e-6 if len(pool) > 1 else 1.0
                )
                assert made[row][k] == pytest.approx(episode + step, abs=2e-3)
    assert met > 10, "members meet in states after the first"


def test_igpo_gives_every_turn_the_gains_from_it_on(tmp_path: Path) -> None:
    run = trainer(tmp_path, "turns_igpo", "algorithm.advantage={name: process, gamma: 0.9}")
    experience = collected(run)
    made = advantages(experience)
    steps = [[value for _, value in own] for own in experience.scores.steps]
    assert [len(own) for own in steps] == [len(own) for own in made]
    for first in range(0, 32, 8):
        everything = [value for row in range(first, first + 8) for value in steps[row]]
        mean, spread = statistics.mean(everything), statistics.stdev(everything) + 1e-4
        for row in range(first, first + 8):
            normal = [(value - mean) / spread for value in steps[row]]
            for k in range(len(normal)):
                expected = sum(0.9 ** (j - k) * normal[j] for j in range(k, len(normal)))
                assert made[row][k] == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("name", ["turns_gigpo", "turns_igpo"])
def test_ratios_are_1_on_the_first_update_and_all_is_learned_from_sampled_tokens(name: str, tmp_path: Path) -> None:
    run = trainer(tmp_path, name)
    experience = collected(run)
    rows = torch.arange(32)
    loss, metrics = run.algorithm.losses(run.policy, experience, rows[:, None])
    torch.testing.assert_close(metrics["policy/ratio"], torch.ones(32), atol=1e-5, rtol=0)
    log_prob, _ = run.policy.log_probs(experience.rollout, rows)
    expected = -(experience.advantage * experience.loss_weight * log_prob.exp() / log_prob.exp().detach()).sum(1)
    torch.testing.assert_close(loss, expected, atol=1e-4, rtol=0)


def test_a_run_learns_is_looked_at_and_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    settings = [
        "evaluation.prompts=digits",
        "evaluation.samples_per_prompt=2",
        "training.previews=2",
        "training.updates_per_iteration=2",
        "training.checkpoint_every=1",
        "data.dynamic_sampling={rounds: 2}",
        "data.replay={groups: 4, age: 3}",
    ]
    whole = trainer(tmp_path, "turns_gigpo", *settings, "training.iterations=3")
    whole.train()
    weights = {key: value.detach().clone() for key, value in whole.learner.parameters.items()}
    shutil.rmtree(whole.checkpoints.all()[-1])
    again = trainer(tmp_path, "turns_gigpo", *settings, "training.iterations=3", resume=True)
    assert again.iteration == 2 and again.groups.replay is not None and again.groups.replay.stored[0].rest["episodes"]
    again.train()
    for key, value in again.learner.parameters.items():
        assert torch.equal(value, weights[key]), key
    lines = whole.metrics.read()
    assert all(math.isfinite(line["policy/loss"]) for line in lines)
    assert 0 < lines[0]["reward/mean"] < 1 and 1 < lines[0]["reward/turns"] <= 4
    evaluations = MetricsFile(whole.folder / "evaluations.jsonl").read()
    assert evaluations[0]["all/samples"] == 20
    groups = (whole.folder / "previews" / "iteration-000000" / "groups.jsonl").read_text().splitlines()
    assert len(groups) == 2 and "null" in groups[0], "what the environment said has no numbers"


def test_an_environment_that_fails_stops_the_run_with_one_line(tmp_path: Path) -> None:
    Broken.played = 0
    environment = f"environment={{name: '{__name__}:Broken', turns: 2}}"
    run = trainer(tmp_path, "turns_gigpo", environment, "training.iterations=2", "training.checkpoint_every=1")
    with pytest.raises(
        FlowalignError, match=r"environment 'Broken' failed: ConnectionError: nobody there \(.*test_turns"
    ):
        run.train()
    assert run.iteration == 1 and len(run.checkpoints.all()) == 1


@pytest.mark.parametrize(
    ("recipe_name", "override", "message"),
    [
        ("chord", "environment={name: higher_lower}", "'chord' learns from demonstrations"),
        ("prefix_rft", "environment={name: higher_lower}", "'prefix_rft' learns from demonstrations"),
        ("turns_gigpo", "environment={name: higher_lowr}", "did you mean 'higher_lower'"),
        ("turns_gigpo", "environment={name: higher_lower, higer: x}", "did you mean 'higher'"),
        (
            "turns_gigpo",
            "environment={name: higher_lower, turns: 0}",
            "environment.turns: .* greater than or equal to 1",
        ),
        ("turns_gigpo", "model={kind: text, path: tiny_vlm, images: true}", "turns are taken with texts alone"),
    ],
)
def test_what_does_not_go_together_is_refused(recipe_name: str, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(recipe(f"tiny_lm/{recipe_name}"), [*SMALL, override]).check(1)


def test_vllm_takes_no_turns() -> None:
    overrides = ["rollout.engine=vllm", "algorithm.off_policy={level: token}"]
    with pytest.raises(ConfigError, match="turns are sampled by transformers"):
        load(recipe("tiny_lm/turns_gigpo"), [*SMALL, *overrides]).check(1)


def test_a_policy_that_takes_no_turns_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="an AgentPolicy does"):
        trainer(tmp_path, "turns_gigpo", policy=LanguagePolicy.from_pretrained(ASSETS / "tiny_lm"))


@pytest.mark.parametrize("name", ["aepo", "kdrl", "remax", "empg", "dr_grpo"])
def test_methods_for_texts_take_turns_too(name: str, tmp_path: Path) -> None:
    settings = ["environment={name: higher_lower, turns: 3}", "rewards=[{name: environment}]", "data.prompts=digits"]
    run = trainer(tmp_path, name, *settings, "rollout.max_new_tokens=2")
    run.train()
    (line,) = run.metrics.read()
    assert math.isfinite(line["policy/loss"]) and line["reward/turns"] > 1
