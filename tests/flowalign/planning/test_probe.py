"""A probe of small runs, and its verdicts on measurements whose answer is known."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flowalign.app.cli.main import main
from flowalign.config import load, recipe
from flowalign.errors import ConfigError
from flowalign.evaluation.approach import approach
from flowalign.evaluation.reward_noise import reward_noise
from flowalign.evaluation.scores import Evaluated
from flowalign.evaluation.statistics import Interval
from flowalign.planning.first_batch import spread_of
from flowalign.planning.probe import own_fit, probe
from flowalign.planning.probed import Probe, Trial, fit_advice
from flowalign.planning.trials import distance_moved
from rewards import as_reward
from tests.flowalign.small_run import SMALL

MOVED = Interval(0.2, 0.15, 0.25)
GAIN = Interval(0.1, 0.05, 0.2)
TRIAL = Trial(rate=1e-3, iterations=10, before=0.5, gain=GAIN, moved=MOVED, seconds=36.0, clipped=0.0)
NOTHING = replace(TRIAL, gain=Interval(0.0, -0.05, 0.05))
STILL = replace(NOTHING, moved=Interval(1e-7, 1e-7, 2e-7))
HARM = replace(TRIAL, gain=Interval(-0.1, -0.2, -0.05))
APART, ALIKE = spread_of([[0.0, 1.0]] * 40), spread_of([[1.0, 1.0]] * 40)


def found(**changes: Any) -> Probe:
    values: dict[str, Any] = {"iterations": 100, "groups": 8, "size": 2, "start": APART, "first_step": None}
    values |= {"gradient": None, "reward_noise": {}, "by_step": {}, "noisy_steps": [], "trial": TRIAL}
    return Probe(**values | {"stress": TRIAL, "canary": TRIAL} | changes)


def test_the_verdict_is_the_trials_and_its_cause_the_first_batchs() -> None:
    assert found().verdict == "it learns" and found(trial=HARM).verdict == "it does harm"
    assert found(trial=replace(TRIAL, failure="not finite")).verdict == "it does harm"
    dead = found(trial=STILL, start=ALIKE)
    assert dead.verdict == "it is dead" and len(dead.dead()) == 3
    assert dead.advice()[0].startswith("rewards: this one is the same")
    assert found(trial=STILL, start=ALIKE, canary=STILL).advice()[0].startswith("noise:")
    assert found(trial=NOTHING, start=ALIKE).verdict == "it is dead"
    assert found(trial=STILL).advice() == ["training.optimizer.learning_rate: at least 0.1 (now 0.001)"]
    assert found(trial=HARM).advice() == ["training.optimizer.learning_rate: 0.00025 or less (now 0.001)"]
    assert "no margin" in found(stress=HARM).advice()[0]
    steps = {0: spread_of([[0.0, 4.0]] * 9), 1: APART}
    assert "start: 0" in found(by_step=steps, noisy_steps=[1]).advice()[0]
    assert not found(by_step=steps, noisy_steps=[0, 1]).advice()


def test_when_a_target_is_reached_on_curves_whose_form_is_known() -> None:
    """0.4 (1 - exp(-t / 10)) has gained 0.3 after 10 ln 4 iterations and never 0.5; a line goes on."""
    prompts = [f"{i}" for i in range(9)]

    def gain(t: float) -> list[float]:
        return [0.4 * (1 - math.exp(-t / 10))] * 9

    curve = replace(TRIAL, pace=approach(gain(6), gain(12), prompts, 12))
    assert found(trial=curve).iterations_to(0.8) == Interval(*[pytest.approx(10 * math.log(4))] * 3)
    assert found(trial=curve).iterations_to(1.0) is None and found(trial=curve).iterations_to(0.4) == Interval(0, 0, 0)
    line = replace(TRIAL, pace=approach([0.05] * 9, [0.1] * 9, prompts, 10))
    assert found(trial=line).iterations_to(0.7) == Interval(*[pytest.approx(20)] * 3)
    assert found(trial=replace(line, gain=NOTHING.gain)).iterations_to(0.7) is None
    # some draws flatten below the target: no bound above
    mixed = replace(TRIAL, pace=approach([0.05] * 9, [0.1] * 5 + [0.05] * 4, prompts, 10))
    reached = found(trial=mixed).iterations_to(0.7)
    assert reached is not None and reached.low is not None and 19 < reached.low < math.inf and reached.high == math.inf


def pictures(values: list[float]) -> list[Image.Image]:
    return [Image.fromarray(np.full((8, 8, 3), value, dtype=np.uint8)) for value in values]


def judged(samples: list[Any], values: list[float]) -> Evaluated:
    prompts, count = ["a", "a", "b", "b"], range(4)
    metadata: list[dict[str, Any]] = [{} for _ in count]
    rest: dict[str, Any] = {"seeds": [*count], "parts": {}, "rows": [*count]}
    return Evaluated(prompts=prompts, metadata=metadata, value=values, samples=samples, **rest)


def test_noise_of_a_reward_is_told_from_its_spread() -> None:
    """Half the second reading's variance of an error of deviation 0.4 beside a spread of 1: 0.4 / sqrt(2)."""
    rng = np.random.default_rng(0)
    steady = as_reward(lambda samples, prompts: [float(np.mean(np.asarray(one))) for one in samples])
    result = judged(pictures([0, 200, 10, 100]), [0.0, 200.0, 10.0, 100.0])
    noise, crop = reward_noise(steady, result), "crop without 4% at the left and top"
    assert noise["same picture twice"].mean == 0 and noise[crop].mean == pytest.approx(0)
    moody = as_reward(lambda samples, prompts: [v + 56 * float(rng.normal()) for v in (0, 200, 10, 100)])
    assert reward_noise(moody, result)["same picture twice"].mean == pytest.approx(0.4, abs=0.3)


def test_a_move_is_measured_in_distances_of_two_samples() -> None:
    before, after = (judged(pictures(values), [0.0] * 4) for values in ([0, 100, 0, 100], [10, 110, 10, 110]))
    assert distance_moved(before, before) == Interval(0.0, 0.0, 0.0)
    # both prompts moved by as much, so that any draw of them has the same ratio
    assert vars(distance_moved(before, after)) == pytest.approx({"mean": 0.1, "low": 0.1, "high": 0.1})
    one, two = (judged(texts, [0.0] * 4) for texts in (["1", "2", "3", "3"], ["1", "2", "3", "4"]))
    # prompt a is 1 apart and stays, b is 0 apart and moves by one half: two a's have 0, one of each 1/2
    assert distance_moved(one, two) == Interval(0.5, 0.0, 0.5)
    assert distance_moved(replace(one, prompts=["a", "b", "c", "d"]), two).mean == 0.25


def test_a_recipe_is_probed_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("flat.py").write_text("def flat(samples, prompts):\n    return [1.0] * len(samples)\n")
    changes = [
        *SMALL,
        "rewards=[{name: 'flat:flat'}]",
        "training.group_size=2",
        "rollout.steps=2",
        "rollout.sigmas=null",
    ]
    options = ["--iterations", "1", "--prompts", "2", "--samples", "2", "--target", "1.5", "--json", "probe.json"]
    with pytest.raises(SystemExit) as left:
        main(["probe", str(recipe("tiny_sd3/flow_grpo")), *changes, *options])
    assert not left.value.code
    printed, record = capsys.readouterr().out, json.loads(Path("probe.json").read_text())
    assert record["start"]["dead"]["mean"] == 1 and record["verdict"] == "it is dead"
    assert "verdict: it is dead; the samples of a prompt all have one reward; the gradient is 0" in printed
    assert "to 1.5: cannot tell" in printed
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {"flat.py", "probe.json"}


def test_texts_are_probed() -> None:
    result = probe(load(recipe("tiny_lm/grpo"), SMALL), iterations=1, prompts=4, samples=2)
    assert result.gradient is not None and result.start is not None and result.start.size == 8
    assert result.canary is not None and set(result.reward_noise) == {"same text twice"}
    json.dumps(result.record())


def test_a_matching_method_is_first_fitted_to_the_models_own_samples() -> None:
    changes = [*SMALL, "training.group_size=2", "rollout.steps=2", "rollout.sigmas=null"]
    small = load(recipe("tiny_sd3/raft"), [*changes, "training.optimizer.learning_rate=1e-9"])
    result = probe(small, iterations=1, prompts=2, samples=2)
    assert result.own_fit is not None and result.own_fit.moved.mean < 1e-3 and not result.trial.learned
    moved = replace(result, own_fit=replace(result.own_fit, moved=Interval(0.3, 0.2, 0.4))).advice()
    assert any("the model moves by 0.300 [0.200, 0.400] distances" in line for line in moved)
    assert result.aimless is not None and result.aimless.moved.mean < 1e-3


def test_samples_that_share_their_start_noise_are_fitted_with_their_noise_on_the_way() -> None:
    small = load(recipe("tiny_sd3/demo"), [*SMALL, "training.group_size=2", "training.optimizer.learning_rate=1e-9"])
    fit, _ = own_fit(small, iterations=1, prompts=2, samples=2)
    assert fit.moved.mean < 1e-3


def test_updates_without_a_direction_move_less_than_a_fit() -> None:
    """Of two iterations the second takes back what the first one did."""
    changes = [*SMALL, "training.group_size=2", "rollout.steps=2", "rollout.sigmas=null"]
    small = load(recipe("tiny_sd3/raft"), [*changes, "training.optimizer.learning_rate=1e-3"])
    fit, aimless = own_fit(small, iterations=4, prompts=2, samples=2)
    assert 0 < aimless.moved.mean < fit.moved.mean
    with pytest.raises(ConfigError, match="flow_grpo does not match its own samples"):
        own_fit(load(recipe("tiny_sd3/flow_grpo"), SMALL))


def test_the_warning_of_a_fit_says_what_it_cannot_tell() -> None:
    few, far, unsure = Interval(0.05, 0.04, 0.06), Interval(0.3, 0.2, 0.4), Interval(0.12, 0.08, 0.16)
    aimless, unclear = replace(TRIAL, moved=few), Interval(0.0, -0.05, 0.05)
    assert fit_advice(replace(TRIAL, moved=few), aimless) == []
    (surely,) = fit_advice(replace(TRIAL, moved=far), aimless)
    assert "0.050 [0.040, 0.060] by updates without a direction" in surely
    assert "costs reward" not in surely and "more than 0.1" not in surely and "as far" not in surely
    assert "whether the model is distilled it cannot tell" in surely
    (perhaps,) = fit_advice(replace(TRIAL, moved=unsure, gain=unclear), replace(aimless, moved=unsure))
    assert "more than 0.1 it cannot tell" in perhaps and "the rate alone may move it as far" in perhaps
    assert "whether that costs reward it cannot tell" in perhaps
