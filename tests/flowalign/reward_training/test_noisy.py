"""A reward trained on what noisy states promise, and the search that prunes by it."""

import json
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

import flowalign as fa
from flowalign.app.cli.rewards import train_reward
from flowalign.errors import ConfigError
from flowalign.reward_training.noisy import agreement
from flowalign.search.noisy import NoisyReward
from rewards.clip import PickScore
from rewards.shapes.clip import TinyCLIP

app = typer.Typer()
app.command()(train_reward)


def test_agreement_is_of_the_pairs_of_one_prompt() -> None:
    finished = torch.tensor([1.0, 2.0, 3.0, 5.0, 5.0, 4.0])
    promised = torch.tensor([0.0, 9.0, 4.0, 7.0, 6.0, 6.0])
    # of the first prompt two of three; of the second, whose first two are alike, one and a tie
    assert agreement(promised, finished, 3) == pytest.approx((2 + 1.5) / 5)


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("noisy") / "reward"
    (out.parent / "prompts.txt").write_text(
        "".join(f"{n} {c} circles\n" for n in ("two", "three") for c in ("red", "blue"))
    )
    given = ["--noisy", "tiny_sd3", "--model", "tiny_clip", "--steps", "3", "--per-prompt", "6", "--out", str(out)]
    done = CliRunner().invoke(
        app, [str(out.parent / "prompts.txt"), *given, "--learning-rate", "1e-4", "--epochs", "2", "--batch-size", "9"]
    )
    assert done.exit_code == 0, done.output
    assert "of a prompt's pairs in the order of the finished ones" in done.output
    return out


def test_each_level_has_weights_of_its_own_that_go_on_from_less_noise(noisy: Path) -> None:
    report = json.loads((noisy / "noisy.json").read_text())
    sigmas = [level["sigma"] for level in report["levels"]]
    assert sigmas == sorted(sigmas) and len(sigmas) == 3 and sigmas[-1] == 1
    assert all(0 <= level[when] <= 1 for level in report["levels"] for when in ("before", "after"))
    weights = [PickScore(str(noisy / level["folder"]), None) for level in report["levels"]]
    start = TinyCLIP()
    prompts, samples = ["two red circles"], fa.load("tiny_sd3").sample("two red circles", [3], steps=3).images
    scores = [reward(samples, prompts, [{}]).value.item() for reward in (start, *weights)]
    assert len(set(scores)) == 4 and report["prompts"] == 3
    own = NoisyReward(noisy)
    assert own.at(0.9)(samples, prompts, [{}]).value.item() == scores[3]
    assert own.at(0.0)(samples, prompts, [{}]).value.item() == scores[1]


def test_pruning_asks_the_noisy_reward_and_finished_samples_the_one_searched_for(noisy: Path) -> None:
    policy, given = fa.load("tiny_sd3"), {"budget": "samples=9", "steps": 3, "progress": False}
    settings = {"at": [0.4], "keep": 0.5, "starts": 4}
    [plain] = policy.search(["two red circles"], "ttsnap", "tiny_clip", settings=settings, **given)
    [pruned] = policy.search(
        ["two red circles"], "ttsnap", "tiny_clip", settings=settings | {"noisy": str(noisy)}, **given
    )
    assert [node.step for node in pruned.nodes] == [node.step for node in plain.nodes] == [1] * 4 + [3] * 2
    rollout = policy.sample("two red circles", range(4), n=4, steps=3)
    states = rollout.trajectory
    promised = policy.decode_latents(states.latents[:, 1] - states.sigmas[1] * states.velocity[:, 1])
    expected = NoisyReward(noisy).at(float(states.sigmas[1]))(promised, ["two red circles"] * 4, [{}] * 4).value
    torch.testing.assert_close(torch.tensor([node.score for node in pruned.nodes[:4]]), expected, atol=1e-3, rtol=0)
    ends = {node.parent: node.score for node in pruned.nodes[4:]}
    judged = TinyCLIP()(rollout.images, ["two red circles"] * 4, [{}] * 4).value
    assert set(ends) == set(expected.topk(2).indices.tolist())
    assert all(score == pytest.approx(judged[row].item(), abs=0.2) for row, score in ends.items())


def test_what_is_no_noisy_reward_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no reward of noisy states; flowalign train-reward PROMPTS --noisy MODEL"):
        fa.load("tiny_sd3").search(
            ["two red circles"], "ttsnap", "tiny_clip", settings={"noisy": str(tmp_path)}, steps=2, progress=False
        )
    with pytest.raises(ConfigError, match="leave one of them out"):
        CliRunner().invoke(
            app,
            ["shapes_train", "--noisy", "tiny_sd3", "--template", "reward_dance_pair", "--out", str(tmp_path / "new")],
            catch_exceptions=False,
        )
