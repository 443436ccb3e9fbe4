"""Which groups an iteration learns from: those without spread are drawn again, or replayed from earlier iterations."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from flowalign.config import load, recipe
from flowalign.data import Prompts
from flowalign.errors import ConfigError
from flowalign.runs.metrics import MetricsFile
from flowalign.training import Trainer
from tests.flowalign.small_run import SMALL, small_run
from tests.flowalign.training.processes import together

DYNAMIC = "data.dynamic_sampling={rounds: 4}"
REPLAY = "data.replay={groups: 6, age: 3}"


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Trainer]:
    """Trainers of the shipped language model, in which every third prompt is hopeless and every third is easy."""
    folder = tmp_path_factory.mktemp("texts")
    lines = [{"prompt": f"{i}+1=", "kind": ("hopeless", "easy", "open")[i % 3]} for i in range(30)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def make(output: Path, *overrides: str, resume: bool = False) -> Trainer:
        own = [
            f"data.prompts={folder / 'sums.jsonl'}",
            "training.iterations=4",
            "training.prompts_per_iteration=6",
            "training.group_size=4",
            "training.micro_batch_size=24",
            "training.optimizer.learning_rate=1e-4",
        ]
        return small_run("tiny_lm/grpo", output, *own, *overrides, reward=graded, resume=resume)

    return make


def graded(texts: list[str], prompts: list[str], metadata: list[dict[str, Any]]) -> list[float]:
    """0 for a hopeless prompt, 1 for an easy one, for others what the text's last digit says."""
    known = {"hopeless": 0.0, "easy": 1.0}
    return [known.get(m["kind"], float(text[-1:] in "02468")) for text, m in zip(texts, metadata, strict=True)]


def step(run: Trainer) -> Any:
    """One iteration, and the experience it learned from."""
    kept = []
    collect = run.collect
    run.collect = lambda *given: kept.append(collect(*given)) or kept[-1]  # type: ignore
    metrics = run.iterate()
    run.collect = collect  # type: ignore[method-assign]
    run.iteration += 1
    kept[0].metrics = metrics
    return kept[0]


def kinds(run: Trainer, experience: Any) -> list[str]:
    """Of each group, in its place."""
    return [record["kind"] for record in experience.batch.metadata[::4]]


def test_groups_without_spread_are_drawn_again_with_other_prompts(texts: Any, tmp_path: Path) -> None:
    plain, run = texts(tmp_path / "plain"), texts(tmp_path / "dynamic", DYNAMIC)
    before, after = step(plain), step(run)
    poor = [i for i, rewards in enumerate(before.scores.value.view(6, 4)) if rewards.std() == 0]
    assert poor and "open" in kinds(plain, before)
    for place in range(6):
        rows = slice(4 * place, 4 * place + 4)
        same = before.batch.prompts[rows] == after.batch.prompts[rows]
        # a group with spread stays in its place, sampled as ever
        assert same == (place not in poor)
        if same:
            assert torch.equal(before.scores.value[rows], after.scores.value[rows])
            assert run.policy.decode(after.rollout)[rows] == plain.policy.decode(before.rollout)[rows]
    metrics = after.metrics
    left = (after.scores.value.view(6, 4).std(1) == 0).sum().item()
    assert metrics["groups/poor"] == left < len(poor)
    assert 6 < metrics["groups/drawn"] <= 24 and metrics["reward_calls"] == 4 * metrics["groups/drawn"]
    # every prompt in turn: what was drawn again went on in the list
    assert run.groups.state()[1]["selection"] == {"drawn": metrics["groups/drawn"]}
    # rows, prompts and log-probabilities still belong together
    assert after.batch.group == [i for i in range(6) for _ in range(4)] and after.rollout.prompts == after.batch.prompts
    assert metrics["policy/ratio"] == pytest.approx(1, abs=1e-5)


def test_rewards_that_are_alike_have_no_spread_though_their_mean_is_rounded(texts: Any, tmp_path: Path) -> None:
    run = texts(tmp_path, "data.dynamic_sampling={rounds: 2}", "training.group_size=7", "training.micro_batch_size=42")
    draw = run.groups.draw(0)
    run.collect(draw)
    for sampled, _ in draw.current.values():
        sampled.scores.value.fill_(0.1)
    _, spread = draw._outcomes()
    assert not spread.any()


def test_rounds_end_where_no_prompt_teaches(texts: Any, tmp_path: Path) -> None:
    run = texts(tmp_path, "data.dynamic_sampling={rounds: 3}", "data.where={kind: [easy]}")
    experience = step(run)
    assert experience.metrics["groups/drawn"] == 18 and experience.metrics["groups/poor"] == 6
    assert experience.metrics["groups/reward"] == 1 and not experience.advantage.any()


def test_bounds_keep_groups_of_middling_success(texts: Any, tmp_path: Path) -> None:
    bounds = "data.dynamic_sampling={rounds: 9, low: 0.3, high: 0.7}"
    experience = step(texts(tmp_path, bounds, "data.where={kind: [open]}"))
    assert experience.metrics["groups/poor"] == 0
    assert experience.scores.value.view(6, 4).mean(1).tolist() == [0.5] * 6


def test_the_selection_is_told_of_all_that_was_drawn(texts: Any, tmp_path: Path) -> None:
    run = texts(tmp_path, DYNAMIC, "data.selection={name: mopps, members: 4, memory: 1.0}")
    told = []
    learn = run.selection.learn
    run.selection.learn = lambda picks, *rest: (
        told.extend(zip(picks, rest[1], rest[2], strict=True)),
        learn(picks, *rest),
    )
    experience = step(run)
    assert len(told) >= experience.metrics["groups/drawn"] - 6 and len({pick for pick, _, _ in told}) > 6
    for pick, success, gain in told:
        kind = run.prompts.metadata[pick]["kind"]
        assert (success, gain) == {"hopeless": (0, 0), "easy": (1, 0)}.get(kind, (success, gain))


def test_what_is_left_without_spread_gets_a_group_of_an_earlier_iteration(texts: Any, tmp_path: Path) -> None:
    run = texts(tmp_path, REPLAY)
    first = step(run)
    stored = {group.batch.prompts[0]: group for group in run.groups.replay.stored}
    assert stored and all(group.spread > 0 for group in stored.values())
    assert first.metrics["groups/replayed"] == 0
    second = step(run)
    count = int(second.metrics["groups/replayed"])
    replayed = [i for i in range(0, 24, 4) if second.batch.picks[i] == -1]
    assert len(replayed) == count == min(len(stored), count + int(second.metrics["groups/poor"])) > 0
    for i in replayed:
        old = stored[second.batch.prompts[i]]
        rows = slice(i, i + 4)
        assert torch.equal(second.scores.value[rows], old.scores.value)
        width = old.tensors["mask"].shape[1]
        # against the weights that sampled them, which are not those of now
        torch.testing.assert_close(second.rollout.log_prob[rows, :width], old.tensors["log_prob"])
        assert second.advantage[rows].any() and second.batch.group[rows] == [i // 4] * 4
    assert second.metrics["policy/ratio"] != pytest.approx(1, abs=1e-5)
    # they say nothing of the current weights
    fresh = [group for group in run.groups.replay.stored if group.batch.iteration == 1]
    assert len(fresh) == 6 - count - int(second.metrics["groups/poor"])


def test_stored_groups_are_few_and_young(texts: Any, tmp_path: Path) -> None:
    run = texts(tmp_path, REPLAY)
    for _ in range(4):
        step(run)
    assert len(run.groups.replay.stored) == 6
    assert run.groups.replay.take(9, 3, 0) and not run.groups.replay.take(9, 30, 0)


@pytest.mark.parametrize("settings", [[DYNAMIC], [REPLAY], [DYNAMIC.replace("4", "2"), REPLAY]], ids=str)
def test_a_resumed_run_is_the_uninterrupted_one(settings: list[str], texts: Any, tmp_path: Path) -> None:
    whole, half = texts(tmp_path / "whole", *settings), texts(tmp_path / "half", *settings)
    whole.train()
    for _ in range(2):
        step(half)
    half.save()
    again = texts(tmp_path / "half", *settings, resume=True)
    assert again.iteration == 2 and again.groups.state()[1] == half.groups.state()[1]
    again.train()
    for name, value in whole.learner.parameters.items():
        assert torch.equal(value, again.learner.parameters[name]), name
    if REPLAY in settings:
        assert sum(record["groups/replayed"] for record in whole.metrics.read()[2:]) > 0


@pytest.mark.slow
def test_two_processes_draw_replay_and_learn_as_one(tmp_path: Path) -> None:
    settings = [
        "data.dynamic_sampling={rounds: 2}",
        "data.replay={groups: 8, age: 4}",
        *SMALL,
        "training.iterations=4",
        "training.prompts_per_iteration=6",
        "training.group_size=3",
        "training.micro_batch_size=9",
    ]
    Trainer(load(recipe("tiny_lm/grpo"), [*settings, f"output={tmp_path / 'one'}"]), progress=False).train()
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "launch.yaml").write_text("{}")
    config = load(recipe("tiny_lm/grpo"), [*settings, f"output={tmp_path / 'two'}"])
    (tmp_path / "two" / "config.yaml").write_text(config.dump())
    together(2, tmp_path / "two")
    one, two = (tmp_path / name / "run" for name in ("one", "two"))
    mine, theirs = (MetricsFile(run / "metrics.jsonl").read() for run in (two, one))
    assert sum(record["groups/replayed"] for record in theirs) > 0
    for key in ("groups/drawn", "groups/replayed", "groups/poor", "groups/reward", "reward/mean"):
        assert [record[key] for record in mine] == pytest.approx([record[key] for record in theirs]), key
    stored = [load_file(run / "checkpoints" / "checkpoint-000004" / "replay.safetensors") for run in (two, one)]
    assert stored[0].keys() == stored[1].keys()
    for key, value in stored[0].items():
        torch.testing.assert_close(value, stored[1][key], atol=1e-4, rtol=0)
    assert json.loads((two / "checkpoints" / "checkpoint-000004" / "state.json").read_text())["groups"]["selection"]


def brightness(images: list[Any], prompts: list[str]) -> list[float]:
    """The mean brightness, where the prompt has an odd number of letters; otherwise all are alike."""
    return [sum(i.convert("L").tobytes()) / 2e5 * (len(p) % 2) for i, p in zip(images, prompts, strict=True)]


def pictures(folder: Path, name: str, *overrides: str, resume: bool = False) -> Trainer:
    own = [
        "training.iterations=4",
        "training.group_size=4",
        "training.micro_batch_size=16",
        "rollout.steps=3",
        "rollout.sigmas=null",
    ]
    return small_run(f"tiny_sd3/{name}", folder, *own, *overrides, reward=brightness, resume=resume)


PICTURES_REPLAY = "data.replay={groups: 6, age: 3}"


@pytest.mark.parametrize("name", ["flow_grpo", "branch_grpo", "tempflow_grpo"])
def test_groups_of_pictures_stand_in_for_later_ones(name: str, tmp_path: Path) -> None:
    plan = {
        "branch_grpo": ["rollout.plan={name: tree, splits: [0, 1]}"],
        "tempflow_grpo": ["rollout.plan={name: single, start: 0}"],
    }
    still = ["training.optimizer.learning_rate=1e-30", *plan.get(name, [])]
    run = pictures(tmp_path, name, PICTURES_REPLAY, *still)
    step(run)
    assert run.groups.replay is not None
    stored = {group.batch.prompts[0]: group for group in run.groups.replay.stored}
    second = step(run)
    block = 4 * run.groups.branches
    replayed = [i for i in range(0, len(second.batch), block) if second.batch.picks[i] == -1]
    assert len(replayed) == second.metrics["groups/replayed"] > 0
    for i in replayed:
        rows, old = slice(i, i + block), stored[second.batch.prompts[i]]
        assert torch.equal(second.rollout.trajectory.latents[rows], old.tensors["latents"])
        assert torch.equal(second.scores.value[rows], old.scores.value)
        first = second.batch.group[i]
        assert second.batch.group[rows] == [first + m // 4 for m in range(block)] and first % run.groups.branches == 0
        assert second.advantage[rows].any()
    # what the denoiser is called with is as it was: under the weights of then the old log-probabilities come again
    items = second.items
    items = items[torch.isin(items[:, 0] // block * block, torch.tensor(replayed))]
    ratio = run.algorithm.losses(run.policy, second, items)[1]["policy/ratio"]
    torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-4, rtol=0)


def test_a_resumed_run_replays_the_pictures_of_the_uninterrupted_one(tmp_path: Path) -> None:
    whole, half = (pictures(tmp_path / name, "flow_grpo", PICTURES_REPLAY) for name in ("whole", "half"))
    whole.train()
    for _ in range(2):
        step(half)
    half.save()
    again = pictures(tmp_path / "half", "flow_grpo", PICTURES_REPLAY, resume=True)
    again.train()
    for name, value in whole.learner.parameters.items():
        assert torch.equal(value, again.learner.parameters[name]), name
    assert sum(record["groups/replayed"] for record in whole.metrics.read()[2:]) > 0


def test_what_is_each_samples_own_is_not_replayed(tmp_path: Path) -> None:
    run = pictures(tmp_path, "flow_grpo", PICTURES_REPLAY)
    rollout = run.sampler.rollout(run.groups.draw(0).batch)
    conditions = rollout.conditions
    for call in (call for calls in conditions.calls for call in calls):
        call["encoder_hidden_states"] = call["encoder_hidden_states"] + torch.arange(16.0)[:, None, None]
    with pytest.raises(ConfigError, match="more of each sample's own"):
        rollout[torch.arange(4)].packed()


@pytest.mark.parametrize("name", ["tempflow_grpo", "g2rpo"])
def test_a_prompt_whose_branches_are_all_alike_is_drawn_again(name: str, tmp_path: Path) -> None:
    dynamic = "data.dynamic_sampling={rounds: 3, spread: 0.001}"
    run = pictures(tmp_path, name, dynamic, "rollout.plan={name: single, start: 0}")
    experience = step(run)
    # two steps may be left by the plan, so that every prompt has two groups
    assert run.groups.branches == 2 and len(experience.batch) == 4 * 2 * 4
    assert experience.batch.group == [i // 4 for i in range(32)]
    spread = experience.scores.value.view(4, 2, 4).std(2, correction=0).amax(1)
    assert experience.metrics["groups/drawn"] > 4
    assert experience.metrics["groups/poor"] == (spread <= 0.001).sum() < 4
    assert experience.rollout.prompts == experience.batch.prompts
    assert experience.metrics["policy/ratio"] == pytest.approx(1, abs=1e-4)


def test_pictures_are_drawn_again_too(tmp_path: Path) -> None:
    run = pictures(tmp_path, "flow_grpo", "data.dynamic_sampling={rounds: 3, spread: 0.01}")
    experience = step(run)
    spread = experience.scores.value.view(4, 4).std(1, correction=0)
    assert experience.metrics["groups/drawn"] > 4
    assert experience.metrics["groups/poor"] == (spread <= 0.01).sum() < 4
    assert experience.rollout.prompts == experience.batch.prompts
    assert experience.metrics["policy/ratio"] == pytest.approx(1, abs=1e-4)


def test_difficulty_keeps_prompts_by_their_measured_success(tmp_path: Path) -> None:
    path = tmp_path / "rated.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p{i}", "success_rate": i / 10}) + "\n" for i in range(11)))
    overrides = [f"data.prompts={path}", "data.difficulty={low: 0.25, high: 0.7}"]
    data = load(recipe("tiny_lm/grpo"), overrides).data
    assert data.kept(Prompts.read(str(path))).texts == [f"p{i}" for i in range(3, 8)]


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("tiny_lm/grpo", ["data.difficulty={low: 0.2}"], "has no number under 'success_rate'"),
        (
            "tiny_sd3/mix_grpo",
            ["algorithm.flash=0.4", "rollout.sigmas=[1.0]", "data.replay={groups: 8}"],
            "algorithm.flash: null works",
        ),
        ("tiny_lm/prefix_rft", ["data.replay={groups: 8}"], "depends on the iteration that sampled it"),
        ("tiny_lm/grpo", ["data.dynamic_sampling={round: 4}"], "did you mean 'rounds'"),
    ],
)
def test_what_cannot_work_is_said_before_a_model_loads(name: str, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(recipe(name), overrides).check(1)


def test_pairs_that_people_chose_between_are_in_no_group(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    line = {"prompt": "a red circle", "chosen": "a.png", "rejected": "a.png"}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(line) + "\n")
    own = [f"data.prompts={tmp_path / 'pairs.jsonl'}", "algorithm.min_pairs=1"]
    config = load(recipe("tiny_sd3/dpo"), [*own, DYNAMIC])
    with pytest.raises(ConfigError, match="'dpo' has no groups of samples whose rewards could be alike"):
        config.check(1)
