"""`import flowalign as fa`: load, reward, train, look, compare; and what a run made in Python records."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import flowalign as fa
from flowalign.config import TextConfig
from flowalign.config import load as load_config
from flowalign.config.rewards import build_reward
from flowalign.data import ASSETS
from flowalign.errors import ConfigError
from flowalign.policies.diffusion.storage import load_pipeline
from flowalign.training.building import build_policy
from rewards import score

ENCODE = {"encode_options": {"max_sequence_length": 0}}
TEXTS = ["one red circle", "two blue squares", "two red circles", "one green triangle"]


def redness(samples: Sequence[Any], prompts: Sequence[str]) -> list[float]:
    return [
        torch.tensor(list(sample.convert("RGB").resize((1, 1)).getdata()[0])).float()[0] / 255 for sample in samples
    ]


def small(**more: Any) -> dict[str, Any]:
    settings = {"training.prompts_per_iteration": 2, "training.group_size": 2, "training.previews": 0}
    return {"iterations": 1, "steps": 3, "progress": False, "settings": settings, **more}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Two runs: one by a name and a function of this file, and one by a function that has no name elsewhere."""
    folder = tmp_path_factory.mktemp("api")
    policy = fa.load("tiny_sd3", lora={"rank": 4}, **ENCODE)
    reward = fa.reward("jpeg_size") * 0.04 + redness
    first = fa.train(policy, reward, TEXTS, heldout=TEXTS[:2], panel=["shapes"], name="first", output=folder, **small())
    pipe = load_pipeline(ASSETS / "tiny_sd3", torch.float32)
    local: Callable[..., Any] = lambda samples, prompts: redness(samples, prompts)  # noqa: E731
    second = fa.train(fa.load(pipe, **ENCODE), local, TEXTS, name="second", output=folder, **small())
    return [first, second]


def test_what_people_need_is_there_and_typed() -> None:
    assert set(fa.__all__) <= {*dir(fa), *fa.PLACES, "gallery"}
    for name in fa.__all__:
        assert getattr(fa, name).__name__
    with pytest.raises(AttributeError, match="no attribute 'lod'"):
        fa.lod  # noqa: B018
    code = "import sys, flowalign; print([n for n in ('torch', 'pydantic') if n in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_a_sum_of_rewards_is_a_reward_and_can_be_written_down() -> None:
    made = 2 * (fa.reward("jpeg_size") + redness) + fa.reward("shapes", strict_weight=0.5) * 0.5
    assert repr(made) == f"2 * jpeg_size + 2 * {__name__}:redness + 0.5 * shapes"
    rollout = fa.load("tiny_sd3", **ENCODE).sample(TEXTS, steps=2)
    whole = score(made, rollout.images, rollout.prompts, [{}] * 4).value
    parts = [(2, "jpeg_size", {}), (0.5, "shapes", {"strict_weight": 0.5})]
    expected = 2 * torch.tensor(redness(rollout.images, TEXTS))
    for weight, name, settings in parts:
        expected += weight * score(fa.reward(name, **settings), rollout.images, rollout.prompts, [{}] * 4).value
    torch.testing.assert_close(whole, expected)
    again = build_reward(made.entries())
    torch.testing.assert_close(score(again, rollout.images, rollout.prompts, [{}] * 4).value, whole)
    with pytest.raises(ConfigError, match="pick_score"):
        fa.reward("pick_scor")


def test_a_run_records_what_it_was_given(runs: list[Any]) -> None:
    first, second = (yaml.safe_load((run.folder / "config.yaml").read_text()) for run in runs)
    assert first["model"]["path"] == "tiny_sd3" and first["model"]["lora"]["rank"] == 4
    assert first["model"]["lora"]["alpha"] == 8 and first["model"]["encode"] == {"max_sequence_length": 0}
    names = [(entry["name"], entry.get("weight", 1.0)) for entry in first["rewards"]]
    assert names == [("jpeg_size", 0.04), (f"{__name__}:redness", 1.0)]
    build_reward(load_config(runs[0].folder / "config.yaml").rewards)
    # a pipeline knows where it was loaded from
    assert second["model"]["path"] == "tiny_sd3"
    assert second["rewards"][0]["name"] == "python:<lambda>"
    with pytest.raises(
        ConfigError, match=r"rewards\.0: the reward '<lambda>' was handed over in Python .*reward=\.\.\."
    ):
        build_reward(load_config(runs[1].folder / "config.yaml").rewards)


def test_a_language_model_is_trained_and_looked_at(tmp_path: Path) -> None:
    policy = fa.load("tiny_lm", kind="text", lora={"rank": 4})
    settings = {"training.prompts_per_iteration": 2, "training.group_size": 4, "evaluation.limit": 2}
    run = fa.train(
        policy,
        fa.reward("exact_match"),
        "sums_train",
        heldout="sums_heldout",
        iterations=2,
        max_new_tokens=5,
        settings=settings,
        output=tmp_path,
        progress=False,
    )
    config = load_config(run.folder / "config.yaml")
    assert isinstance(config, TextConfig) and config.algorithm.name == "grpo" and config.rollout.max_new_tokens == 5
    assert "2 held-out prompts" in repr(run)
    shown = run.before_after()
    assert len(shown.prompts) == 2 and repr(shown).count("before: ") == 2
    again = fa.load(run.folder, kind="text")
    assert again.make(shown.prompts, [0, 1], config.evaluation) == shown.after
    with pytest.raises(ConfigError, match="kind='text'"):
        fa.load(run.folder)
    with pytest.raises(ConfigError, match="of kind 'text'"):
        fa.load("tiny_lm")


def test_a_model_of_unknown_origin_is_refused_later(runs: list[Any]) -> None:
    config = load_config(runs[0].folder / "config.yaml", ["model.path='python:StableDiffusion3Pipeline'"])
    with pytest.raises(ConfigError, match=r"model.path: .*'StableDiffusion3Pipeline' was handed over in Python"):
        build_policy(config)


def test_a_run_is_looked_at(runs: list[Any], tmp_path: Path) -> None:
    run = runs[0]
    first, count, *scores = repr(run).splitlines()
    assert first == f"Run({str(run.folder)!r}, 1 iterations)" and "held-out prompts, before -> after" in count
    before, after = (record["all/reward"] for record in run.evaluations)
    assert any(line.split()[:2] == ["reward", f"{before:.3f}"] and f"-> {after:.3f}" in line for line in scores)
    assert len(run.metrics) == 1 and len(run.evaluations) == 2
    assert (run.lora / "pytorch_lora_weights.safetensors").is_file()
    assert len(run.curves().axes) == 1
    grid = run.before_after(TEXTS, n=2)
    assert "2 rows of 2" in repr(grid) and grid._repr_html_().count("<img") == 4
    grid.save(tmp_path / "grid.png")
    assert grid.image.width == 16 + 2 * (192 + 16)
    assert len(run.before_after(n=1).rows) == 2
    film = run.film("one red circle", reward=redness)
    assert [len(row) for row in film.rows] == [4] and film.captions[0][0].endswith("\none red circle")
    lines = [caption.split("\n") for caption in film.captions[0][1:]]
    assert [line[0] for line in lines] == ["Step 1", "Step 2", "Step 3"]
    assert [word.split()[0] for word in lines[0][1:]] == ["noise", "reward", "advantage", "ratio"]
    with run.policy.reference():
        before = run.policy.sample(TEXTS[:2], steps=3).images
    assert grid.rows[0][0].tobytes() == before[0].tobytes()


def test_runs_are_compared_by_one_reward_with_paired_differences(runs: list[Any]) -> None:
    table = fa.compare([runs[0].folder, runs[1]], TEXTS, reward=redness, n=2)
    assert list(table.index) == ["first", "second"]
    assert table.loc["first", "difference"] == 0 and table.loc["second", "error"] > 0
    torch.testing.assert_close(
        table.loc["second", "difference"],
        table.loc["second", "reward"] - table.loc["first", "reward"],
        atol=1e-6,
        rtol=0,
    )
    own = fa.load(runs[0].folder).sample(TEXTS, n=2, steps=3)
    expected = torch.tensor(redness(own.images, own.prompts)).mean().item()
    assert table.loc["first", "reward"] == pytest.approx(expected, abs=1e-6)


def test_a_rollout_shows_what_its_states_are_worth() -> None:
    policy = fa.load("tiny_sd3", **ENCODE)
    rollout = policy.sample("two red circles", n=2, steps=4, kernel="flow_sde", eta=0.7)
    assert repr(rollout) == "Rollout(2 samples of 4 steps, 3 of them stochastic)"
    assert rollout.log_prob.shape == (2, 4) and (rollout.log_prob[:, :3] != 0).all()
    dense = rollout.dense(redness)
    assert dense.values.shape == (2, 5) and dense.gains.shape == (2, 4)
    torch.testing.assert_close(dense.values[:, -1], torch.tensor(redness(rollout.images, rollout.prompts)))
    torch.testing.assert_close(dense.gains.sum(1), dense.values[:, -1] - dense.values[:, 0])
    assert len(dense.plot().axes[0].lines) == 2
    film = rollout.film(1)
    assert film.rows[0][-1].tobytes() == rollout.images[1].tobytes() and len(film.rows[0]) == 5
    # the start noise's completion is the ODE's picture, but for what the sizes of network batches round to
    ode = policy.sample("two red circles", [1], steps=4).images[0]
    assert np.abs(np.asarray(film.rows[0][0]).astype(int) - np.asarray(ode)).max() <= 1


def test_what_is_there_is_resumed_or_replaced_when_asked(runs: list[Any]) -> None:
    folder = runs[1].folder
    with pytest.raises(ConfigError, match="already holds a run"):
        fa.train("tiny_sd3", redness, TEXTS, name="second", output=folder.parent, **small())
    again = fa.train(
        "tiny_sd3", redness, TEXTS, name="second", output=folder.parent, exist="replace", **small(iterations=1)
    )
    assert len(again.metrics) == 1
    assert yaml.safe_load((folder / "config.yaml").read_text())["rewards"][0]["name"] == f"{__name__}:redness"
    more = fa.train(
        "tiny_sd3", redness, TEXTS, name="second", output=folder.parent, exist="resume", **small(iterations=2)
    )
    assert [record["iteration"] for record in more.metrics] == [0, 1]
