"""Names to objects: rewards inside rewards are checked when the configuration is read, and built with it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image

from flowalign import registry
from flowalign.app.cli.reward_file import Serving
from flowalign.config import Evaluation, RolloutSampling, Weighted, load, parse, recipe
from flowalign.config.rewards import build_reward
from flowalign.errors import ConfigError
from rewards import Reward, Scores, score
from rewards.compose import Gate, ScheduledSum, WeightedSum
from rewards.pairwise import WinRate
from rewards.rules import ImageStatistic
from rewards.shapes.reward import ShapesReward

RECIPE = recipe("tiny_sd3/flow_grpo")


class Panelled:
    """A user's own reward with rewards by name, and one that may be absent."""

    name = "panelled"

    def __init__(self, others: Mapping[str, Reward], base: Reward | None = None) -> None:
        self.others, self.base = others, base

    def __call__(self, samples: Any, prompts: Any, metadata: Any) -> Scores:
        return Scores(
            torch.stack([score(r, samples, prompts, metadata).value for r in self.others.values()]).sum(dim=0)
        )


def constant(images: Any, prompts: Any) -> list[float]:
    return [0.25] * len(images)


def built(text: str) -> Any:
    config = load(RECIPE, [f"rewards={' '.join(text.split())}"])
    config.check(processes=1)
    return build_reward(config.rewards)


def test_a_gate_of_two_rewards() -> None:
    reward = built(
        """[{name: gate, passes: {name: shapes, strict_weight: 1.0}, threshold: 0.9, otherwise: -1.0,
             then: {name: image_statistic, statistic: brightness}}]"""
    )
    assert isinstance(reward, Gate) and reward.threshold == 0.9
    then, passes = reward.rewards
    assert isinstance(passes, ShapesReward) and passes.strict_weight == 1.0
    assert isinstance(then, ImageStatistic) and then.statistic == "brightness"
    blank = Image.new("RGB", (64, 64))
    scores = score(reward, [blank], ["a red circle"], [{}])
    assert scores.value.tolist() == [-1.0] and {"shapes", "brightness", "shapes/strict"} <= set(scores.parts)


def test_compositions_nest_to_any_depth() -> None:
    reward = built(
        """[{name: scheduled,
             rewards: [{name: win_rate, reward: {name: shapes}},
                       {name: rescaled, low: 0, high: 2, reward: {name: product, rewards: [{name: shapes}]}}],
             schedules: [[[0, 1], [1, 0]], [[0, 0], [1, 1]]], weight: 2.0}]"""
    )
    assert isinstance(reward, WeightedSum) and reward.weights == [2.0]
    (scheduled,) = reward.rewards
    assert isinstance(scheduled, ScheduledSum) and isinstance(scheduled.rewards[0], WinRate)
    assert scheduled.name == "scheduled(win_rate(shapes),rescaled(product(shapes)))"


def test_users_own_compositions_and_functions_nest_too() -> None:
    dotted = f"{__name__}:Panelled"
    arguments = {"others": {"a": {"name": f"{__name__}:constant"}, "b": {"name": "shapes"}}, "base": None}
    with pytest.raises(ConfigError, match=r"x\.others\.b: 'shapes' has no setting 'wait'"):
        registry.check("rewards", dotted, {"others": {"b": {"name": "shapes", "wait": 1}}}, "x")
    reward = registry.build("rewards", dotted, arguments, "x")
    assert reward.others["a"] is constant and isinstance(reward.others["b"], ShapesReward) and reward.base is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "{name: gate, pases: {name: shapes}, then: {name: shapes}}",
            "rewards.0: 'gate' has no setting 'pases'; did you",
        ),
        ("{name: gate, passes: {name: shapes}}", "rewards.0: 'gate': missing a required argument: 'then'"),
        ("{name: gate, passes: shapes, then: {name: shapes}}", "rewards.0.passes: a reward is its name and settings"),
        ("{name: gate, passes: {nam: shapes}, then: {name: shapes}}", "rewards.0.passes: a reward is its name"),
        (
            "{name: gate, passes: {name: shaps}, then: {name: shapes}}",
            "rewards.0.passes: no reward is called 'shaps'; did",
        ),
        (
            "{name: gate, passes: {name: shapes, strict_wait: 1}, then: {name: shapes}}",
            "rewards.0.passes: 'shapes' has no setting 'strict_wait'; did you mean 'strict_weight'",
        ),
        (
            "{name: gate, passes: {name: shapes, strict_weight: much}, then: {name: shapes}}",
            "rewards.0.passes.strict_weight: Input should be a valid number",
        ),
        ("{name: product, rewards: {name: shapes}}", "rewards.0.rewards: give a list of rewards"),
        (
            "{name: product, rewards: [{name: shapes}, shapes]}",
            "rewards.0.rewards.1: a reward is its name and settings",
        ),
        ("{name: clip_score, modell: x}", "rewards.0: 'clip_score' has no setting 'modell'; did you mean 'model'"),
        ("{name: aesthetic, batch_size: few}", "rewards.0.batch_size: Input should be a valid integer"),
    ],
)
def test_what_is_wrong_inside_is_named_when_the_configuration_is_read(text: str, message: str) -> None:
    config = load(RECIPE, [f"rewards=[{text}]"])
    with pytest.raises(ConfigError) as caught:
        config.check(processes=1)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_a_reward_of_pairs_is_refused_where_one_value_a_sample_is_needed() -> None:
    pairs = "{name: vlm_pairwise, template: shapes_better, judge: {url: 'http://127.0.0.1:9/v1', model: x}}"
    built(f"[{{name: win_rate, reward: {pairs}}}]")
    for text in (pairs, f"{{name: product, rewards: [{pairs}]}}"):
        with pytest.raises(ConfigError, match="compares pairs; wrap it in 'win_rate'"):
            built(f"[{text}]")


def test_a_nested_reward_survives_the_configuration_that_a_run_keeps(tmp_path: Any) -> None:
    config = load(RECIPE, ["rewards=[{name: gate, passes: {name: shapes}, then: {name: shapes}}]"])
    (tmp_path / "config.yaml").write_text(config.dump())
    assert load(tmp_path / "config.yaml").rewards == config.rewards
    assert yaml.safe_load(config.dump())["rewards"][0]["passes"] == {"name": "shapes"}


@pytest.mark.parametrize("name", ["rewards", "judges", "reward-server"])
def test_what_the_documentation_configures_is_right(name: str) -> None:
    text = (RECIPE.parents[2] / "docs" / f"{name}.md").read_text()
    blocks = [yaml.safe_load(block.partition("```")[0]) for block in text.split("```yaml\n")[1:]]
    seen = 0
    for values in blocks:
        evaluation = parse(Evaluation, values.get("evaluation", {}))
        parse(RolloutSampling, values.get("rollout", {}))
        parse(Serving, values.get("server", {}))
        rewards = [parse(Weighted, entry) for entry in values.get("rewards", [])]
        for entry in [*rewards, *evaluation.panel]:
            if not entry.name.startswith("my_rewards"):
                registry.check("rewards", entry.name, entry.settings, name)
                seen += 1
    assert seen


def test_a_class_of_a_folder_is_known_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "flowalign" / "algorithms" / "mine"
    folder.mkdir(parents=True)
    monkeypatch.setattr(registry, "__file__", str(tmp_path / "flowalign" / "registry.py"))
    read = registry._in_folder.__wrapped__
    text = (
        'class Base:\n    """No name."""\n\n\nclass Mine(Base):\n    name = "mine"\n\n\ndef f():\n    name = "local"\n'
    )
    (folder / "mine.py").write_text(text)
    assert read("flowalign.algorithms") == {"mine": "flowalign.algorithms.mine.mine:Mine"}
    (folder / "other.py").write_text('class Other:\n    name = "mine"\n')
    with pytest.raises(ConfigError, match=r"two classes are called 'mine': .*mine:Mine and .*other:Other"):
        read("flowalign.algorithms")
