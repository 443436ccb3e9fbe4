"""Overlap keeps the order and the numbers, and hides the time."""

import time
from pathlib import Path

import pytest
import torch

from flowalign.actors.overlap import overlapped
from flowalign.algorithms.trajectory.base import Experience, TrajectoryAlgorithm
from flowalign.config import Sampling, load, recipe
from flowalign.data import Prompts, draw_batch
from flowalign.errors import ConfigError
from flowalign.registry import ALGORITHMS, resolve
from flowalign.training import Trainer
from flowalign.training.evaluation import evaluate
from rewards import FunctionReward, Scores, Spec, groups


def test_same_numbers_in_the_same_order():
    def rollouts():
        for i in range(5):
            torch.manual_seed(i)
            yield i, torch.randn(100)

    apart = [(i, noise, noise.sum()) for i, noise in rollouts()]
    together = [(i, noise, value) for (i, noise), value in overlapped(rollouts(), lambda rollout: rollout[1].sum())]
    assert len(together) == 5
    for (i, noise, value), (j, other, same) in zip(apart, together):
        assert i == j and torch.equal(noise, other) and torch.equal(value, same)


def test_scoring_is_hidden_behind_sampling():
    count, seconds = 8, 0.2

    def rollouts():
        for i in range(count):
            time.sleep(seconds)
            yield i

    def score(rollout):
        time.sleep(seconds)  # a reward that takes as long as the rollout, elsewhere
        return rollout

    begin = time.perf_counter()
    assert [value for _, value in overlapped(rollouts(), score)] == list(range(count))
    hidden = 1 - (time.perf_counter() - begin - count * seconds) / (count * seconds)
    assert hidden >= 0.8  # 7/8 in theory


def test_errors_of_either_side_come_through():
    asked = []

    def failing(rollout):
        asked.append(rollout)
        time.sleep(0.05)
        raise RuntimeError("no score")

    with pytest.raises(RuntimeError, match="no score"):
        overlapped(iter(range(8)), failing)
    assert asked == [0]  # a server that stays away is waited for once

    def sampled():
        for i in range(8):
            time.sleep(0.1)
            asked.append(f"sampled {i}")
            yield i

    asked.clear()
    with pytest.raises(RuntimeError, match="no score"):
        overlapped(sampled(), failing)
    assert "sampled 7" not in asked

    def broken():
        yield 1
        raise RuntimeError("no rollout")

    with pytest.raises(RuntimeError, match="no rollout"):
        overlapped(broken(), lambda rollout: rollout)


def test_nothing_to_do():
    assert list(overlapped([], lambda rollout: rollout)) == []


def collected(folder: Path, name: str, overlap: int, *overrides: str) -> tuple[Experience, Trainer]:
    """The experience of the first iteration, four groups of four or as the recipe's tree has it."""
    small = ["training.prompts_per_iteration=4", "rollout.batch_size=8", "evaluation.prompts=null"]
    if name != "branch_grpo":
        small.append("training.group_size=4")
    config = load(recipe(f"tiny_sd3/{name}"), [*small, f"rollout.overlap={overlap}", f"output={folder}", *overrides])
    run = Trainer(config, progress=False)
    torch.manual_seed(0)
    rollout = run.config.rollout
    batch = draw_batch(run.prompts, 0, 4, run.config.training.group_size, 0, rollout.share_start_noise)
    return run.algorithm.collect(run.actor, batch), run


@pytest.mark.parametrize(
    "name", [name for name in ALGORITHMS if issubclass(resolve("algorithms", name), TrajectoryAlgorithm)]
)
def test_every_algorithm_collects_the_same_in_parts(name: str, tmp_path: Path):
    whole, alone = collected(tmp_path, name, 1)
    parts, split = collected(tmp_path, name, 2)
    assert parts.batch == whole.batch and split.actor.reward_calls == alone.actor.reward_calls
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
    config = load(
        recipe("tiny_sd3/dense_grpo"),
        [
            *("training.prompts_per_iteration=2", "training.group_size=4", "evaluation.prompts=null"),
            *(f"data.prompts={tmp_path / 'prompts.txt'}", "data.where={}", f"output={tmp_path}"),
        ],
    )
    run = Trainer(config, reward=Seen(), progress=False)
    batch = draw_batch(run.prompts, 0, 2, 4, 0, config.rollout.share_start_noise)
    assert len(set(batch.prompts)) == 1
    run.algorithm.collect(run.actor, batch)
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
