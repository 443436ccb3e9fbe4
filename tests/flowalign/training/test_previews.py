"""What the trainer saves of a few prompts is what the algorithm did with them."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from flowalign.app.gallery import build
from flowalign.app.gallery.runs import read_run
from flowalign.core.groups import group_advantage
from flowalign.data.batches import draw_batch
from flowalign.rollouts.draw import Draw
from flowalign.training import Trainer
from flowalign.training.previews import preview
from rewards import Scores, Spec
from tests.flowalign.app.gallery.test_build import page_data
from tests.flowalign.small_run import COLLECTING, small_run


def trainer(name: str, folder: Path, *overrides: str) -> Trainer:
    members = 8 if name == "branch_grpo" else 4
    own = f"training.group_size={members}", "training.previews=2"
    return small_run(f"tiny_sd3/{name}", folder, *own, *overrides)


def previewed(run: Trainer) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Films and groups as the gallery reads them."""
    run.folder.mkdir(parents=True)
    preview(run.sampler, run.scorer, run.algorithm, run.prompts, run.folder, 0)
    read = read_run(run.folder, "run")
    (moment,) = read.previews
    assert read.notes == ["no pictures yet"]
    return moment.films, moment.groups


@pytest.mark.parametrize("name", COLLECTING)
def test_every_algorithm_shows_films_and_groups(name: str, tmp_path: Path) -> None:
    run = trainer(name, tmp_path)
    before = run.spent.counts(), run.algorithm.state()
    films, groups = previewed(run)
    # looking is not training: nothing is counted or learned
    assert (run.spent.counts(), run.algorithm.state()) == before and run.sampler.metrics == {}
    assert run.algorithm.state() == ({}, {})
    assert len(films) == len(groups) == 2
    for film, group in zip(films, groups, strict=True):
        assert film["prompt"] == group["prompt"]
        assert all(path.is_file() for path in film["pictures"]) and len(film["pictures"]) == 6
        # a step is stochastic exactly where something is learned from it
        assert [a is not None for a in film["advantages"]] == [bool(s) for s in film["stochastic"]]
        assert film["dense"] == pytest.approx([b - a for a, b in zip(film["rewards"], film["rewards"][1:])], abs=1e-6)
        assert len(group["members"]) == run.config.training.group_size
        assert all(member["advantage"] is not None and member["picture"].is_file() for member in group["members"])


def test_the_verdicts_of_a_pairwise_algorithm_are_shown(tmp_path: Path) -> None:
    _, groups = previewed(trainer("pref_grpo", tmp_path))
    for group in groups:
        wins = group["wins"]
        for i, member in enumerate(group["members"]):
            others = [wins[i][j] for j in range(4) if j != i]
            assert wins[i][i] is None and all(a + wins[j][i] == 1 for j, a in enumerate(wins[i]) if j != i)
            assert member["reward"] == pytest.approx(sum(others) / 3, abs=1e-6)
            assert 0 <= member["parts"]["score"] <= 1
    rewards = torch.tensor([m["reward"] for group in groups for m in group["members"]])
    advantages = [m["advantage"] for group in groups for m in group["members"]]
    expected = group_advantage(rewards, torch.tensor([0] * 4 + [1] * 4))
    assert advantages == pytest.approx(expected.tolist(), abs=1e-4)


def test_a_tournament_shows_the_pairs_that_met(tmp_path: Path) -> None:
    settings = "algorithm={name: pref_grpo, judge: {name: shapes}, schedule: one}"
    _, groups = previewed(trainer("pref_grpo", tmp_path, settings))
    met = [[value is not None for value in row] for row in groups[0]["wins"]]
    assert sum(map(sum, met)) == 2 * 3


def test_the_advantages_of_steps_are_those_the_update_would_use(tmp_path: Path) -> None:
    run = trainer("dense_grpo", tmp_path)
    films, _ = previewed(run)
    batch = draw_batch(run.prompts.spread(2), 0, 2, 4, 0, run.config.rollout.share_start_noise)
    experience = run.collect(Draw(run.sampler, run.scorer, batch))
    for film, row in zip(films, (0, 4), strict=True):
        earned = experience.advantage[row].where(experience.rollout.trajectory.mask[row], torch.nan).tolist()
        shown = [math.nan if a is None else a for a in film["advantages"]]
        assert shown == pytest.approx(earned, abs=1e-5, nan_ok=True)


GAINS = torch.eye(4)[[0, 1, 2, 0]].T
"""[4, 4] gain of each member of a group at each stochastic step, by hand; the last step adds no noise and no gain."""


class ByHand:
    """A reward of what a state ends in: the gains of the member until then."""

    name, spec = "by_hand", Spec()

    def __init__(self) -> None:
        self.members: dict[int, int] = {}

    def __call__(self, samples: Any, prompts: Any, metadata: Any = ()) -> Scores:
        values = []
        for record in metadata:
            _, _, step = str(record["group"]).partition("/")
            member = self.members.setdefault(record["seed"], len(self.members) % 4)
            values.append(GAINS[member, : int(step or 4)].sum())
        return Scores(value=torch.stack(values))


def test_credit_that_is_known_stands_on_the_page(tmp_path: Path) -> None:
    """Gains by hand: one member of four gains 1 at each stochastic step, so that they end with 2, 1, 1 and 0."""
    settings = ["rollout.share_start_noise=false", "rollout.plan={name: all}", "training.group_size=4"]
    settings += ["training.previews=1", "evaluation.prompts=shapes_heldout"]
    # the members of every group are numbered as their seeds come
    settings += ["evaluation.limit=1", "evaluation.samples_per_prompt=4", "training.prompts_per_iteration=1"]
    run = small_run("tiny_sd3/dense_grpo", tmp_path, *settings, reward=ByHand())
    run.train()
    data = page_data(build([run.folder], tmp_path / "out"))
    before, after = (moment["films"][0] for moment in data["previews"])
    for film in (before, after):
        assert film["rewards"] == [0, 1, 1, 1, 2, 2] and film["dense"] == [1, 0, 0, 1, 0]
        # of one gain of 1 among four: (1 - 1/4) / sqrt(3/16) where the member has it, else -1/4 over the same
        one = 3**0.5
        assert film["advantages"][:4] == pytest.approx([one, -one / 3, -one / 3, one], abs=1e-3)
        # of the sums: (2 - 1) / sqrt(1/2)
        assert film["sparse"] == pytest.approx(2**0.5, abs=1e-3)
        assert film["stochastic"] == [noise > 0 for noise in film["noise"]] == [True] * 4 + [False]
        assert film["advantages"][4] is None and film["ratios"][4] is None
    # no weight has moved before the first update
    assert before["ratios"][:4] == pytest.approx([1] * 4, abs=1e-6) and after["ratios"] != before["ratios"]
    lasts = [points[0][1] for name, points in data["runs"][0]["series"].items() if "persistence" in name]
    # of (1, 0, 0, 0), (1, 1, 0, 0), (1, 1, 1, 0) and twice (2, 1, 1, 0) with the last; at the start all have 0
    assert lasts == pytest.approx([(2 / 3) ** 0.5, 0.5**0.5, (2 / 3) ** 0.5, 1, 1], abs=1e-4)


def test_an_estimator_that_learns_does_not_learn_from_previews(tmp_path: Path) -> None:
    estimator = "algorithm={name: dense_grpo, loss: {clip_range: 0.01}, estimator: {kind: learned, warmup: 5}}"
    run = trainer("dense_grpo", tmp_path, estimator)
    films, _ = previewed(run)
    assert run.algorithm.state() == ({}, {}) and films[0]["rewards"]


@pytest.mark.parametrize(("previews", "gathered"), [(0, 0), (1, 1)])
def test_an_evaluation_gathers_whole_weights_for_previews_alone(
    tmp_path: Path, previews: int, gathered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_out = ["evaluation.prompts=shapes_heldout", "evaluation.limit=1", "evaluation.samples_per_prompt=1"]
    run = small_run("tiny_sd3/flow_grpo", tmp_path, *held_out, f"training.previews={previews}")
    alone, times = run.learner._gathered, []
    monkeypatch.setattr(run.learner, "_gathered", lambda: times.append(1) or alone())
    assert run.evaluator.run(0, 0.0) is not None
    assert len(times) == gathered
