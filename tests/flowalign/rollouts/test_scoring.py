"""Overlap keeps the order and the numbers, and hides the time."""

import itertools
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flowalign.algorithms.policy_gradient import ActionExperience
from flowalign.config import Sampling, load, recipe
from flowalign.data import Prompts
from flowalign.data.batches import Batch, draw_batch
from flowalign.errors import ConfigError
from flowalign.evaluation.scores import evaluate
from flowalign.registry import resolve
from flowalign.rollouts.draw import Draw
from flowalign.rollouts.sampler import Sampler
from flowalign.training import Trainer
from flowalign.training.assembly import overlaps
from flowalign.training.scoring import Scoring
from rewards import FunctionReward, Scores, Spec, groups, spec_of
from rewards.base import Metadata
from rewards.judges import JudgeReward
from rewards.shapes.reward import ShapesReward
from tests.flowalign.small_run import COLLECTING, small_run


class Parts(Draw):
    """Eight parts of one sample each, without a run."""

    parts = 8

    def __init__(self) -> None:
        # which only leaves rollouts where they are
        self.sampler = Sampler(None, None)  # type: ignore[arg-type]
        self._parts = []
        rows = list(range(8))
        self.batch = Batch(
            prompts=["a red circle"] * 8,
            metadata=[{}] * 8,
            group=rows,
            seeds=rows,
            noise_seeds=rows,
            iteration=0,
            picks=rows,
        )

    def walk(self, sample: Callable[[int], Any], score: Callable[[Any], Scores]) -> list[float]:
        with Scoring(threaded=True) as scoring:
            for batch in itertools.chain.from_iterable(self):
                rollout = sample(batch.group[0])
                self.put(rollout, batch, scoring.submit(score, rollout))
            values = [float(scored.result().value) for _, _, scored in self._parts]
        self.seconds = scoring.seconds
        return values


def test_scoring_is_hidden_behind_sampling():
    """A part is scored while the next one is sampled: each waits here for the other, and the clock decides nothing."""
    begun, scored = [threading.Event() for _ in range(8)], [threading.Event() for _ in range(8)]
    took: list[float] = []

    def sample(number: int) -> int:
        begun[number].set()
        assert number == 0 or scored[number - 1].wait(timeout=60)
        return number

    def score(number: int) -> Scores:
        begin = time.perf_counter()
        assert number == 7 or begun[number + 1].wait(timeout=60)
        if number < 7:
            time.sleep(0.1)
        took.append(time.perf_counter() - begin)
        scored[number].set()
        return Scores(torch.tensor([float(number)]))

    draw, begin = Parts(), time.perf_counter()
    assert draw.walk(sample, score) == list(range(8))
    elapsed, seconds = time.perf_counter() - begin, draw.seconds
    # only the last part is waited for, which takes no time
    assert seconds["seconds/reward_hidden"] >= 0.8 * sum(took[:7]) > 0.5
    assert seconds["seconds/reward_hidden"] + seconds["seconds/reward"] >= sum(took)
    assert 0.7 <= seconds["seconds/rollout"] <= elapsed - seconds["seconds/reward"]


def test_errors_of_either_side_come_through():
    asked, sampled = [], []

    def failing(number: int) -> Scores:
        asked.append(number)
        time.sleep(0.05)
        raise RuntimeError("no score")

    def slow(number: int) -> int:
        time.sleep(0.1)
        sampled.append(number)
        return number

    with pytest.raises(RuntimeError, match="no score"):
        Parts().walk(lambda number: number, failing)
    assert asked == [0]  # a server that stays away is waited for once
    with pytest.raises(RuntimeError, match="no score"):
        Parts().walk(slow, failing)
    assert 7 not in sampled

    def broken(number: int) -> int:
        raise RuntimeError("no rollout")

    with pytest.raises(RuntimeError, match="no rollout"):
        Parts().walk(broken, failing)


def collected(
    folder: Path, name: str, overlap: int, *overrides: str, groups: int = 4
) -> tuple[ActionExperience, Trainer]:
    """The experience of the first iteration, groups of four or as the recipe's tree has it."""
    own = ["rollout.batch_size=8", f"rollout.overlap={overlap}"]
    if name != "branch_grpo":
        own.append("training.group_size=4")
    run = small_run(f"tiny_sd3/{name}", folder, *own, *overrides)
    torch.manual_seed(0)
    rollout = run.config.rollout
    batch = draw_batch(run.prompts, 0, groups, run.config.training.group_size, 0, rollout.share_start_noise)
    return run.collect(Draw(run.sampler, run.scorer, batch)), run


@pytest.mark.parametrize("name", COLLECTING)
def test_every_algorithm_collects_the_same_in_parts(name: str, tmp_path: Path):
    whole, alone = collected(tmp_path, name, 1, groups=2)
    parts, split = collected(tmp_path, name, 2, groups=2)
    assert parts.batch == whole.batch and split.scorer.calls == alone.scorer.calls
    # network batches are put together differently where trunks are shared
    mine, theirs = parts.rollout.trajectory, whole.rollout.trajectory
    torch.testing.assert_close(mine.latents, theirs.latents, atol=1e-4, rtol=0)
    torch.testing.assert_close(parts.scores.value, whole.scores.value, atol=1e-5, rtol=0)
    torch.testing.assert_close(parts.advantage, whole.advantage, atol=1e-3, rtol=0)
    assert parts.metrics.keys() - whole.metrics.keys() == {"seconds/reward_hidden"}


def test_parts_that_fill_whole_network_batches_give_the_same_bits(tmp_path: Path):
    apart = "rollout.share_start_noise=false"
    whole, _ = collected(tmp_path, "flow_grpo", 1, apart)
    parts, _ = collected(tmp_path, "flow_grpo", 2, apart)
    for name in ("latents", "velocity", "log_prob"):
        assert torch.equal(getattr(parts.rollout.trajectory, name), getattr(whole.rollout.trajectory, name))
    assert torch.equal(parts.advantage, whole.advantage)


class Elsewhere:
    """The reward of shapes, as a server would compute it: the first part's scores come while the second is sampled."""

    name = "elsewhere"

    def __init__(self, wait: bool) -> None:
        self.inside, self.wait, self.sampling = ShapesReward(), wait, threading.Event()
        self.spec = replace(spec_of(self.inside), off_device=True)
        self.rows: list[int] = []

    def __call__(self, samples: Sequence[Any], prompts: Sequence[str], metadata: Metadata) -> Scores:
        self.rows.append(len(samples))
        if self.wait and len(self.rows) == 1:
            assert self.sampling.wait(20), "scored before the next part was sampled"
            time.sleep(0.05)
        return self.inside(samples, prompts, metadata)


def trained(folder: Path, overlap: str) -> tuple[Elsewhere, dict[str, torch.Tensor], dict[str, Any]]:
    """The reward, trained weights and metrics of a whole run of 4 groups of 4, in network batches of 8."""
    reward = Elsewhere(wait=overlap == "null")
    changes = [f"rollout.overlap={overlap}", "rollout.batch_size=8", "rollout.share_start_noise=false"]
    run = small_run("tiny_sd3/flow_grpo", folder, *changes, "training.group_size=4", reward=reward)
    begin, begun = run.sampler.rollout, []

    def rollout(batch: Batch) -> Any:
        begun.append(batch)
        if len(begun) == 2:
            reward.sampling.set()
        return begin(batch)

    run.sampler.rollout = rollout  # type: ignore[method-assign]
    run.train()
    return (
        reward,
        load_file(next((folder / "run" / "lora").glob("*.safetensors"))),
        json.loads((folder / "run" / "metrics.jsonl").read_text()),
    )


def test_rewards_that_leave_the_device_free_are_scored_while_samples_are_drawn(tmp_path: Path):
    once, alone, _ = trained(tmp_path / "alone", "1")
    twice, overlapped, metrics = trained(tmp_path / "overlapped", "null")
    assert once.rows == [16] and twice.rows == [8, 8]
    assert alone.keys() == overlapped.keys() and all(torch.equal(alone[name], overlapped[name]) for name in alone)
    assert metrics["seconds/reward_hidden"] > 0.03


def test_a_judge_that_cannot_be_read_about_a_group_has_the_same_scores_in_parts(tmp_path: Path):
    """The group gets the mean of all parts, although all verdicts of its own part are lost."""

    class Mumbling:
        asked = 0

        def reply(self, questions: Sequence[Any], temperature: float, max_tokens: int, seed: int) -> list[str]:
            self.asked += len(questions)
            said = [sum(question.text.encode()) % 4 + 2 for question in questions]
            return ["hm" if "circle" in q.text else f"Final Score: {n}" for q, n in zip(questions, said, strict=True)]

    judge = Mumbling()
    (tmp_path / "prompts.txt").write_text("a circle\na star\na heart\na cross\n")
    one = f"data.prompts={tmp_path / 'prompts.txt'}", "data.where={}", "training.group_size=2"
    run = small_run("tiny_sd3/nft", tmp_path, *one, reward=JudgeReward("unified_reward_point", judge, retries=0))

    def scores(overlap: int) -> Scores:
        run.config.rollout.overlap = overlap
        torch.manual_seed(0)
        batch = draw_batch(run.prompts, 0, 4, 2, 0, False)
        found: Scores = run.collect(Draw(run.sampler, run.scorer, batch)).scores
        return found

    once, parts = scores(1), scores(4)
    assert torch.equal(parts.value, once.value) and parts.parts["unparsed"].sum() == 2
    assert len(set(once.value.tolist())) > 1 and run.scorer.calls == 16 and judge.asked == 24


def test_parts_that_no_setting_names_are_whole_network_batches(tmp_path: Path):
    run = small_run("tiny_sd3/flow_grpo", tmp_path, "rollout.batch_size=8", reward=Elsewhere(wait=False))
    assert run.sampler.overlaps

    def lengths(groups: int, members: int, batch_size: int, shared: bool = False) -> list[int]:
        run.sampler.config.rollout.batch_size = batch_size
        draw = Draw(run.sampler, run.scorer, draw_batch(run.prompts, 0, groups, members, 0, shared))
        parts = [len(part) for part in itertools.chain.from_iterable(draw)]
        assert draw.parts == len(parts)
        return parts

    assert lengths(4, 4, 8) == [8, 8]
    # the second network batch begins within a group
    assert lengths(4, 6, 8) == [24]
    assert lengths(4, 4, 4) == lengths(4, 4, 2) == [4, 4, 4, 4]
    assert lengths(20, 4, 4) == [8, 12] * 4
    # the steps that a group shares are one sample each
    assert lengths(4, 4, 4, shared=True) == [16]


@pytest.mark.parametrize(
    ("change", "spec"),
    [
        ("rollout.overlap=1", Spec(off_device=True)),
        ("rollout.overlap=null", Spec(off_device=True, kind="set")),
        ("rollout.overlap=null", Spec()),
        ("algorithm.name=branch_grpo", Spec(off_device=True)),
    ],
)
def test_other_runs_are_sampled_in_one_part(change: str, spec: Spec):
    reward = Elsewhere(wait=False)
    reward.spec = spec
    config = load(recipe("tiny_sd3/flow_grpo"), [change])
    assert not overlaps(config, resolve("algorithms", config.algorithm.name), reward)


def test_rewards_of_groups_are_split_with_their_groups_and_those_of_the_whole_batch_refused(tmp_path: Path):
    reward = "rewards=[{name: normalized, rewards: [{name: shapes}, {name: group_diversity}]}]"
    whole, _ = collected(tmp_path, "flow_grpo", 1, reward)
    parts, _ = collected(tmp_path, "flow_grpo", 4, reward)
    torch.testing.assert_close(parts.scores.value, whole.scores.value, atol=1e-3, rtol=0)
    with pytest.raises(ConfigError, match="all pictures of an iteration at once"):
        collected(tmp_path, "flow_grpo", 2, reward.replace("rewards: [", "over: batch, rewards: ["))
    with pytest.raises(ConfigError, match="rollout.overlap: the 4 groups .* at most 4 works"):
        collected(tmp_path, "flow_grpo", 5)


def test_two_groups_of_one_prompt_stay_apart(tmp_path: Path):
    seen = []

    class Seen:
        name, spec = "seen", Spec(kind="group")

        def __call__(self, samples, prompts, metadata):
            seen.append(groups(prompts, metadata))
            return Scores(torch.zeros(len(samples)))

    (tmp_path / "prompts.txt").write_text("a red circle\n")
    one = f"data.prompts={tmp_path / 'prompts.txt'}", "data.where={}", "training.group_size=4"
    run = small_run("tiny_sd3/dense_grpo", tmp_path, *one, reward=Seen())
    batch = draw_batch(run.prompts, 0, 2, 4, 0, run.config.rollout.share_start_noise)
    assert len(set(batch.prompts)) == 1
    run.collect(Draw(run.sampler, run.scorer, batch))
    final, completed = seen
    assert final == [[0, 1, 2, 3], [4, 5, 6, 7]]
    # states of different steps are different groups; states that a group shares are scored once
    assert len(completed) > 2 and all(len(members) in (1, 4) for members in completed)


def test_an_evaluation_tells_its_prompts_apart(tiny_policy):
    seen = []
    prompts = Prompts(["a red circle", "a red circle"], [{}, {}])
    reward = FunctionReward(lambda images, texts, metadata: [seen.append(m["group"]) or 0.0 for m in metadata], "seen")
    evaluate(tiny_policy(), reward, prompts, Sampling(steps=1), per_prompt=2, seed=0)
    assert seen == [0, 0, 1, 1]
