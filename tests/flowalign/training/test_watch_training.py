"""The watch on reward hacking in real runs: what it says, that it stops, and that a resumed run hears the same."""

import json
import logging
import math
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flowalign.app.gallery.runs import read_run
from flowalign.config import Watch, load, recipe
from flowalign.errors import ConfigError
from flowalign.evaluation.watch import diagnose
from flowalign.training import Trainer

HACKABLE = "[{name: image_statistic, statistic: saturation}]"
HONEST = "[{name: shapes}]"


def run(folder: Path, rewards: str, panel: str, *overrides: str, resume: bool = False) -> Trainer:
    """Up to 12 iterations on the shipped model, evaluated every 3."""
    config = load(
        recipe("tiny_sd3/flow_grpo_early"),
        [
            *("rollout.plan={name: window, start: 1, size: 2}", "training.updates_per_iteration=2"),
            *("training.iterations=12", "training.prompts_per_iteration=4", "training.optimizer.schedule=constant"),
            *("training.optimizer.learning_rate=3e-3", "training.checkpoint_every=0", "training.keep_checkpoints=1"),
            *("evaluation.every=3", "evaluation.limit=48", "evaluation.samples_per_prompt=1", "training.previews=0"),
            *(f"rewards={rewards}", f"evaluation.panel={panel}", f"output={folder}", "name=run"),
            *overrides,
        ],
    )
    trainer = Trainer(config, resume=resume, progress=False)
    trainer.train()
    return trainer


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / "evaluations.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_hackable_reward_stops_the_run_with_the_last_good_weights(tmp_path, caplog):
    """A run paid for saturation forgets the shapes: noticed at iteration 6, called hacked at 9 of 12."""
    stop = ("evaluation.watch.action=stop", "evaluation.limit=48")
    with caplog.at_level(logging.WARNING):
        trainer = run(tmp_path, HACKABLE, "[{name: shapes}, {name: tiny_clip}]", *stop)
    assert trainer.iteration == 9
    seen = lines(tmp_path)
    assert [line["verdict"] for line in seen] == ["good", "good", "suspect", "hacked"]
    assert (
        seen[3]["all/reward"] > 2 * seen[0]["all/reward"]
        and seen[3]["all/panel/shapes"] < 0.5 * seen[0]["all/panel/shapes"]
    )
    checkpoints = trainer.checkpoints.all()
    assert [path.name for path in checkpoints] == ["checkpoint-000003", "checkpoint-000009"]
    good, _ = trainer.checkpoints.load(checkpoints[0])
    result = load_file(tmp_path / "run" / "lora" / "pytorch_lora_weights.safetensors")
    exported = load_file(checkpoints[0] / "pytorch_lora_weights.safetensors")
    torch.testing.assert_close(result, exported, rtol=0, atol=0)
    for name, value in good["trainable"].items():
        assert torch.equal(trainer.learner.parameters[name].detach(), value)
    last = caplog.messages[-1]
    assert last.startswith("ended at iteration 9: the reward rises while shapes, tiny_clip fall")
    assert "checkpoint-000003" in last
    warnings = read_run(tmp_path / "run", "run").warnings
    assert [warning[0] for warning in warnings] == [6, 9]
    assert "shapes, tiny_clip fall" in " ".join(map(str, warnings[0]))

    # going on is refused by the same verdict, and granted by a milder rule
    again = run(tmp_path, HACKABLE, "[{name: shapes}, {name: tiny_clip}]", *stop, resume=True)
    assert again.iteration == 9 and lines(tmp_path) == seen
    on = run(tmp_path, HACKABLE, "[{name: shapes}, {name: tiny_clip}]", "training.iterations=10", resume=True)
    assert on.iteration == 10 and lines(tmp_path)[-1]["verdict"] == "hacked"


@pytest.mark.slow
def test_an_honest_reward_raises_no_alarm(tmp_path):
    run(tmp_path, HONEST, "[{name: tiny_clip}]", "training.iterations=6")
    assert [line["verdict"] for line in lines(tmp_path)] == ["good"] * 3
    assert read_run(tmp_path / "run", "run").warnings == []


def test_a_recorded_honest_run_that_learned_raises_no_alarm():
    """watch_honest.json: the lines of a run of Flow-GRPO; see `command` in it."""
    records = json.loads((Path(__file__).parent / "watch_honest.json").read_text())["records"]
    first, last = records[0]["reward"], records[-1]["reward"]
    assert last["mean"] - first["mean"] > 2 * math.hypot(first["error"], last["error"])
    for i in range(len(records)):
        assert diagnose(records[: i + 1], Watch()).status == "good"


@pytest.mark.slow
def test_a_resumed_run_hears_the_same_verdicts_and_is_warned_of_each_kind_once(tmp_path, caplog):
    small = ("evaluation.limit=16", "evaluation.watch.deviations=1", "evaluation.every=2")
    panel = "[{name: shapes}]"
    small += ("evaluation.watch.patience=4", "training.iterations=8", "training.keep_checkpoints=2")
    with caplog.at_level(logging.WARNING):
        run(tmp_path / "whole", HACKABLE, panel, *small)
    whole = lines(tmp_path / "whole")
    verdicts = [line["verdict"] for line in whole]
    assert verdicts[-1] == verdicts[-2] == "suspect"
    warned = [new for old, new in pairwise(verdicts) if new != old and new != "good"]
    assert sum("reward hacking?" in message for message in caplog.messages) == len(warned)
    # as it was after six iterations
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    cut = tmp_path / "cut" / "run"
    shutil.rmtree(cut / "checkpoints" / "checkpoint-000008")
    for name, last in (("metrics", 6), ("evaluations", 4)):
        kept = (cut / f"{name}.jsonl").read_text().splitlines(keepends=True)[:last]
        (cut / f"{name}.jsonl").write_text("".join(kept))
    run(tmp_path / "cut", HACKABLE, panel, *small, resume=True)
    assert lines(tmp_path / "cut") == whole
    assert whole[-1]["verdict"] != "good"


def test_another_reward_may_be_evaluated_than_the_one_trained_on(tmp_path):
    trainer = run(
        tmp_path,
        HACKABLE,
        "[{name: tiny_clip}]",
        *("evaluation.rewards=[{name: shapes}]", "evaluation.limit=8", "evaluation.every=0", "training.iterations=1"),
        *("training.prompts_per_iteration=1", "training.group_size=2"),
    )
    for line in lines(tmp_path):
        assert line["watch"]["trained"]["mean"] == pytest.approx(line["all/trained"])
        assert line["all/trained"] != line["all/reward"] and "all/statistics/saturation" in line
        assert not any("statistics" in name for name in line if not name.startswith("all/"))
    # with a mean of the same pictures, the trained reward is the statistic
    assert lines(tmp_path)[0]["all/trained"] == pytest.approx(lines(tmp_path)[0]["all/statistics/saturation"])
    assert [path.name for path in trainer.checkpoints.all()] == ["checkpoint-000001"]


def all_alike(samples: list[Any], prompts: list[str]) -> list[float]:
    return [0.5] * len(samples)


@pytest.mark.parametrize(
    ("setting", "verdicts"), [("early_stop=1", ["good", "stalled"]), ("keep_best=true", ["good"] * 3)]
)
def test_a_run_that_does_not_get_better_ends_with_its_best_weights(tmp_path, setting, verdicts):
    trainer = run(
        tmp_path,
        HONEST,
        "[]",
        *(f"evaluation.rewards=[{{name: {__name__}.all_alike}}]", f"evaluation.watch.{setting}"),
        *("evaluation.every=1", "evaluation.limit=1", "training.prompts_per_iteration=1", "training.group_size=2"),
        *("training.iterations=2", "training.keep_checkpoints=1"),
    )
    assert [line["verdict"] for line in lines(tmp_path)] == verdicts and trainer.iteration == len(verdicts) - 1
    assert trainer.health.keeps_best
    assert [trainer.checkpoints.all()[i].name for i in (0, -1)] == [
        "checkpoint-000000",
        f"checkpoint-{trainer.iteration:06d}",
    ]
    adapter = load_file(tmp_path / "run" / "lora" / "pytorch_lora_weights.safetensors")
    assert all(not value.any() for name, value in adapter.items() if "lora_B" in name)


@pytest.mark.parametrize(
    ("overrides", "hint"),
    [
        (["evaluation.panel=[{name: shaps}]"], "evaluation.panel.0: no reward is called 'shaps'"),
        (["evaluation.panel=[{name: shapes}]", "evaluation.prompts=null"], "no samples to watch"),
        (["evaluation.watch.action=stop", "evaluation.every=3"], "takes an evaluation.panel"),
        (["evaluation.watch.action=stop", "evaluation.panel=[{name: shapes}]"], "evaluation.every"),
        (["evaluation.watch.early_stop=2"], "evaluation.every"),
        (["evaluation.watch.keep_best=true"], "evaluation.watch.keep_best: takes evaluations"),
        (["evaluation.watch.actoin=stop"], "did you mean 'action'"),
    ],
)
def test_what_cannot_be_watched_is_refused(overrides, hint):
    with pytest.raises(ConfigError, match=hint.replace(".", r"\.")):
        load(recipe("tiny_sd3/flow_grpo_early"), overrides).check(1)
