"""Named copies of the trained weights."""

import json
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import nn

from flowalign.config import load, recipe
from flowalign.errors import ConfigError
from flowalign.policies.settings import Snapshot
from flowalign.policies.snapshots import Snapshots
from tests.flowalign.small_run import small_run


def test_a_decay_is_a_number_or_a_schedule() -> None:
    assert Snapshot(decay=0.3).decay_at(1000) == 0.3
    # DiffusionNFT's presets: min(0.001 n, 0.5), and 0 until 75, then min(0.0075 (n - 75), 0.999)
    first, second = Snapshot(decay="0-0-0.001-0.5"), Snapshot(decay="75-0-.0075-.999")
    assert [first.decay_at(n) for n in (0, 100, 500, 900)] == pytest.approx([0, 0.1, 0.5, 0.5])
    assert [second.decay_at(n) for n in (0, 74, 75, 175, 400)] == pytest.approx([0, 0, 0, 0.75, 0.999])
    assert Snapshot(decay="0-0.25-0.005-0.999").decay_at(10) == pytest.approx(0.3)
    assert Snapshot(decay="0-0-1e-3-0.5").decay_at(100) == pytest.approx(0.1)
    for wrong in ("fast", "0-0-0.1", 1.5, -0.1, "0-0-0.1-2"):
        with pytest.raises(ValidationError, match="start-value-slope-end"):
            Snapshot(decay=wrong)


def test_decay_0_copies_and_1_stays_and_between_it_is_the_mean() -> None:
    weights = {"a": nn.Parameter(torch.ones(2)), "b": nn.Parameter(torch.zeros(3))}
    settings = {"copy": Snapshot(decay=0), "frozen": Snapshot(decay=1), "slow": Snapshot(decay=0.75, every="update")}
    snapshots = Snapshots(weights, settings)
    with torch.no_grad():
        weights["a"].fill_(0.1)
    snapshots.follow("iteration", 1, 1)
    assert torch.equal(snapshots.weights["copy"][0], torch.full((2,), 0.1))
    assert torch.equal(snapshots.weights["frozen"][0], torch.ones(2))
    assert torch.equal(snapshots.weights["slow"][0], torch.ones(2))
    snapshots.follow("update", 1, 1)
    torch.testing.assert_close(snapshots.weights["slow"][0], torch.full((2,), 0.75 + 0.25 * 0.1))
    with snapshots.use("frozen"):
        assert torch.equal(weights["a"], torch.ones(2))
    assert torch.equal(weights["a"], torch.full((2,), 0.1))


def test_a_decay_of_updates_is_of_those_before_it(tmp_path: Path) -> None:
    """As in DGPO's code: min(0.3, 0.001 * global_step), which counts an iteration's steps when they are over."""
    old = "algorithm.old={decay: 0-0-0.25-0.6, every: update}"
    few = ["training.iterations=2", "training.group_size=2", old]
    run = small_run("tiny_sd3/dgpo", tmp_path, *few)
    seen: list[float] = []
    decay_at = Snapshot.decay_at
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Snapshot, "decay_at", lambda self, n: (seen.append(decay_at(self, n)), seen[-1])[1])
        run.train()
    assert seen == [0.0, 0.25]


def test_a_snapshot_with_an_interval_stays_in_between() -> None:
    weights = {"a": nn.Parameter(torch.zeros(2))}
    snapshots = Snapshots(weights, {"reset": Snapshot(decay=0, interval=3)})
    seen = []
    for iteration in range(1, 8):
        with torch.no_grad():
            weights["a"].fill_(iteration)
        snapshots.follow("iteration", iteration, iteration)
        seen.append(snapshots.weights["reset"][0][0].item())
    assert seen == [0, 0, 3, 3, 3, 6, 6]


def test_weights_that_nothing_defines_are_refused_before_a_model_loads() -> None:
    for override, message in [
        ("rollout.weights=odl", "rollout.weights: no snapshot is called 'odl'; did you mean 'old'"),
        ("evaluation.weights=ema", "evaluation.weights: there is no average of the weights; set training.ema_decay"),
        ("evaluation.weights=reference", "evaluation.weights: .* flowalign eval RUN --base evaluates it"),
        ("training.snapshots={policy: {decay: 1}}", "'policy' is a name of its own"),
        ("training.snapshots={a/b: {decay: 1}}", "'a/b' is no name of a file; letters, digits, _ and - work"),
        ("training.snapshots={.: {decay: 1}}", "'.' is no name of a file"),
        ("training.snapshots={..: {decay: 1}}", "'..' is no name of a file"),
        ("training.snapshots={a: {of: odl}}", "snapshots.a.of: no weights are called 'odl'; did you mean 'old'"),
        ("training.snapshots={a: {of: a}}", "snapshots.a.of: no weights are called 'a'; choose from old, policy"),
    ]:
        with pytest.raises(ConfigError, match=message):
            load(recipe("tiny_sd3/nft"), [override]).check(processes=1)


def test_rollouts_and_exports_are_of_the_weights_that_are_named(tmp_path: Path) -> None:
    """Flow-GRPO that samples from a frozen copy: the second iteration's rollouts are still the base's."""
    own = ["training.snapshots={still: {decay: 1}}", "rollout.weights=still", "evaluation.weights=still"]
    run = small_run("tiny_sd3/flow_grpo", tmp_path, *own, "training.iterations=2")
    before = [parameter.clone() for parameter in run.learner.parameters.values()]
    run.train()
    assert all(map(torch.equal, before, run.policy.snapshots.weights["still"]))
    assert not all(map(torch.equal, before, run.learner.parameters.values()))
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    # other weights sampled: that is no rounding
    assert all("policy/mismatch" not in line for line in lines)
    exported = load_file(run.folder / "lora" / "pytorch_lora_weights.safetensors")
    # LoRA starts at 0, and this snapshot stays there
    assert all(not value.any() for name, value in exported.items() if ".lora_B." in name)


def test_all_weights_are_trained_on_samples_of_the_start_weights(tmp_path: Path) -> None:
    own = ["model.lora=null", "rollout.weights=reference", "training.prompts_per_iteration=2"]
    run = small_run("tiny_sd3/nft", tmp_path, *own, "training.iterations=2")
    before = run.policy.sample("a red circle", steps=2).trajectory.final
    run.train()
    assert run.config.evaluation.weights is None and run.learner.sampling_weights == "reference"
    assert not torch.equal(run.policy.sample("a red circle", steps=2).trajectory.final, before)
    with run.learner.weights("reference"):
        assert torch.equal(run.policy.sample("a red circle", steps=2).trajectory.final, before)


def test_a_resumed_run_has_its_snapshots_bit_for_bit(tmp_path: Path) -> None:
    own = [
        "training.checkpoint_every=1",
        "algorithm.old={decay: 0.5}",
        "training.prompts_per_iteration=2",
        "training.group_size=4",
    ]
    own += ["training.optimizer.schedule=constant"]
    whole = small_run("tiny_sd3/nft", tmp_path, *own, "name=whole", "training.iterations=3")
    whole.train()
    half = small_run("tiny_sd3/nft", tmp_path, *own, "name=half", "training.iterations=3")
    half.config.training.iterations = 2
    half.train()
    resumed = small_run("tiny_sd3/nft", tmp_path, *own, "name=half", "training.iterations=3", resume=True)
    assert resumed.iteration == 2
    resumed.train()
    for kept, again in zip(whole.policy.snapshots.weights["old"], resumed.policy.snapshots.weights["old"], strict=True):
        assert torch.equal(kept, again)
    assert all(torch.equal(whole.learner.parameters[name], value) for name, value in resumed.learner.parameters.items())
    assert not all(map(torch.equal, whole.learner.parameters.values(), whole.policy.snapshots.weights["old"]))
