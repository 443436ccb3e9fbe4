"""The watch on reward hacking: an honest run, a hacked one, noise, and the panel's numbers."""

import numpy as np
import pytest
import torch
from PIL import Image

from flowalign.config import Watch
from flowalign.evaluation.watch import Panel, diagnose, record, signs
from rewards import FunctionReward, score
from rewards.rules import STATISTICS, image_statistics


def history(trained, panel, error=0.01):
    """Records of evaluations with these means; the panel is {name: means}."""
    return [
        {"iteration": 10 * i, "reward": {"mean": value, "error": error}}
        | {f"panel/{name}": {"mean": means[i], "error": error} for name, means in panel.items()}
        for i, value in enumerate(trained)
    ]


RISING = [0.2, 0.4, 0.6, 0.8, 0.9]


def test_an_honest_run_is_good():
    records = history(RISING, {"a": [1.0, 1.2, 1.4, 1.5, 1.6], "b": [0.5, 0.5, 0.51, 0.5, 0.5]})
    verdicts = [diagnose(records[: i + 1], Watch()) for i in range(5)]
    assert {verdict.status for verdict in verdicts} == {"good"}
    assert [verdict.last_good for verdict in verdicts] == [0, 10, 20, 30, 40]


def test_a_hacked_run_is_suspect_then_hacked():
    records = history(RISING, {"a": [1.0, 1.2, 1.3, 1.0, 0.7], "b": [0.5] * 5})
    verdicts = [diagnose(records[: i + 1], Watch()) for i in range(5)]
    assert [verdict.status for verdict in verdicts] == ["good", "good", "good", "suspect", "hacked"]
    assert verdicts[-1].last_good == 20
    assert verdicts[-1].message == (
        "the reward rises while a falls, in the last 2 evaluations; the last good one was at iteration 20"
    )
    assert diagnose(records, Watch(patience=3)).status == "suspect"


def test_a_run_whose_reward_stopped_rising_is_stalled_and_returns_to_its_best():
    records, rule = history([0.2, 0.4, 0.39, 0.41, 0.4, 0.41], {}), Watch(early_stop=2)
    verdicts = [diagnose(records[: i + 1], rule) for i in range(6)]
    assert [verdict.status for verdict in verdicts] == ["good"] * 5 + ["stalled"]
    assert [verdict.last_good for verdict in verdicts] == [0, 10, 10, 30, 30, 30]
    kept = [diagnose(records[: i + 1], Watch(keep_best=True)) for i in range(6)]
    assert [(verdict.status, verdict.last_good) for verdict in kept] == [
        ("good", verdict.last_good) for verdict in verdicts
    ]


def test_the_best_evaluation_may_be_one_of_the_panels():
    records = history(RISING, {"critical_entropy": [0.3, 0.5, 0.8, 0.6, 0.5]})
    rule = Watch(keep_best=True, best_by="panel/critical_entropy", share=1.0, deviations=100)
    assert [diagnose(records[: i + 1], rule).last_good for i in range(5)] == [0, 10, 20, 20, 20]
    assert diagnose(records, Watch(keep_best=True, deviations=100)).last_good == 40


def test_panel_and_trained_reward_falling_together_is_not_hacking():
    assert diagnose(history(RISING[::-1], {"a": [1.0, 0.9, 0.8, 0.7, 0.6]}), Watch()).status == "good"


def test_a_minority_of_the_panel_does_not_count():
    panel = {name: [1.0] * 5 for name in "abc"} | {"d": [1.0, 0.9, 0.8, 0.7, 0.6]}
    assert diagnose(history(RISING, panel), Watch()).status == "good"
    assert diagnose(history(RISING, panel), Watch(share=0.25)).status == "hacked"


def test_the_reward_trained_on_counts_where_another_is_evaluated_and_the_other_way_round():
    """What compares within groups has the same mean always; what is evaluated in its place may fall with the panel."""
    panel = {"a": [1.0, 1.2, 1.3, 1.0, 0.7]}
    flat, falling = [0.0] * 5, [0.9, 0.8, 0.7, 0.6, 0.5]
    for evaluated, trained, status in ((RISING, flat, "hacked"), (falling, RISING, "hacked"), (flat, falling, "good")):
        records = history(evaluated, panel)
        for entry, mean in zip(records, trained):
            entry["trained"] = {"mean": mean, "error": 0.01}
        assert diagnose(records, Watch()).status == status


def test_a_run_that_recovers_is_good_again():
    assert diagnose(history(RISING, {"a": [1.0, 1.1, 0.7, 0.7, 1.2]}), Watch()).status == "good"


def test_without_a_panel_nothing_is_said():
    assert diagnose(history(RISING, {}), Watch()).status == "good"


def test_noise_raises_few_alarms():
    """Panel rewards that stay as they are, measured with noise: well below one run in ten is called hacked."""
    rng = np.random.default_rng(0)
    hacked = 0
    for _ in range(200):
        parts = [{f"panel/{n}": rng.normal(0, 1, 64) for n in "abc"} for _ in range(8)]
        records = [record(i, rng.normal(i, 1, 64).tolist(), p) for i, p in enumerate(parts)]
        hacked += any(diagnose(records[: i + 1], Watch()).status == "hacked" for i in range(8))
    assert hacked <= 6


def test_a_fall_beyond_the_noise_is_seen():
    """Panel rewards that fall by half a deviation on 64 pictures are."""
    rng = np.random.default_rng(0)
    seen = 0
    for _ in range(50):
        drops = [0, 0, 0.5, 1.0, 1.0]
        parts = [{f"panel/{n}": rng.normal(-drop, 1, 64) for n in "abc"} for drop in drops]
        records = [record(i, rng.normal(i, 1, 64).tolist(), p) for i, p in enumerate(parts)]
        seen += diagnose(records, Watch()).status == "hacked"
    assert seen >= 48


def test_record_has_mean_and_standard_error():
    entry = record(3, [1.0, 2.0, 3.0], {"panel/a": [1.0, 1.0, 4.0], "statistics/x": [0.0] * 3})
    assert entry == {
        "iteration": 3,
        "reward": {"mean": 2.0, "error": pytest.approx(1 / np.sqrt(3))},
        "panel/a": {"mean": 2.0, "error": pytest.approx(1.0)},
    }


def moments(**shifts):
    """Records of 80 pictures before and after training, whose statistics moved by so many standard deviations."""
    rng = np.random.default_rng(0)
    usual = {"grid": (0.1, 0.3), "saturation": (0.3, 0.1), "sharpness": (0.2, 0.04), "layout_distance": (0.2, 0.04)}
    usual["colour_entropy"] = (1.1, 0.3)
    records = []
    for moment in (0, 1):
        noise = {name: rng.normal(size=80) for name in usual}
        parts = {
            f"statistics/{name}": (mean + deviation * (noise[name] + moment * shifts.get(name, 0))).tolist()
            for name, (mean, deviation) in usual.items()
        }
        records.append(record(moment, [float(moment)] * 80, parts))
    return records


def test_statistics_that_leave_the_bases_are_signs_and_make_a_run_suspect():
    verdict = diagnose(moments(grid=3, layout_distance=-2), Watch(action="stop", patience=1))
    assert verdict.status == "suspect"
    assert verdict.message.startswith("the pictures have changed as those of a gamed reward do: grid 0.1")
    assert [sign.split(" 0")[0] for sign in signs(moments(sharpness=-2, saturation=2))] == ["saturation", "sharpness"]
    # fewer colours are a sign as more are
    assert [sign.split(" 1")[0] for sign in signs(moments(colour_entropy=-1.2))] == ["colour entropy"]
    assert [sign.split(" 1")[0] for sign in signs(moments(colour_entropy=0.95))] == ["colour entropy"]


def test_small_changes_and_those_for_the_better_are_no_signs():
    assert signs(moments()) == signs(moments(saturation=0.5, sharpness=0.5, colour_entropy=0.6)) == []
    assert signs(moments(grid=-3, layout_distance=3)) == []
    # records of a version without statistics
    assert signs(history([0.1, 0.2], {})) == []


def test_pictures_of_other_prompts_have_distances(tmp_path):
    images, none = pictures(0), FunctionReward(lambda images, prompts: [0.0] * 4, "none")
    images[3] = images[0].copy()
    layout = score(Panel(none, []), images, ["x", "x", "y", "z"], [{}] * 4).parts["statistics/layout_distance"]
    assert layout[0] == layout[3] == 0 and layout[1] > 0.02 and layout[2] > 0.02
    assert "statistics/layout_distance" not in score(Panel(none, []), images, ["x"] * 4, [{}] * 4).parts


def pictures(seed):
    rng = np.random.default_rng(seed)
    return [Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)) for _ in range(4)]


def test_panel_adds_parts_and_leaves_the_reward(tmp_path):
    trained = FunctionReward(lambda images, prompts: [1.0, 2.0, 3.0, 4.0], "trained")
    other = FunctionReward(lambda images, prompts: [-1.0] * 4, "other")
    images, prompts = pictures(0), ["x", "x", "x", "y"]
    images[1] = images[0].copy()
    panel = Panel(trained, [other], folder=tmp_path)
    scores = score(panel, images, prompts, [{}] * 4)
    assert panel.name == "trained" and scores.value.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert scores.parts["panel/other"].tolist() == [-1.0] * 4
    assert scores.parts["statistics/near_duplicate"].tolist() == [1, 1, 0, 0]
    assert scores.parts["statistics/from_base"].tolist() == [0.0] * 4
    for name in STATISTICS:
        expected = [image_statistics(image)[name] for image in images]
        torch.testing.assert_close(scores.parts[f"statistics/{name}"], torch.tensor(expected))


def test_distance_to_the_base_pictures_outlives_a_resume(tmp_path):
    trained = FunctionReward(lambda images, prompts: [0.0] * 4, "trained")
    score(Panel(trained, [], folder=tmp_path), pictures(0), ["x"] * 4, [{}] * 4)
    moved = [*pictures(0)[:2], *pictures(1)[2:]]
    distance = score(Panel(trained, [], folder=tmp_path), moved, ["x"] * 4, [{}] * 4).parts["statistics/from_base"]
    assert distance[:2].tolist() == [0.0, 0.0] and (distance[2:] > 0.05).all()
