"""Rollouts as files: what a run writes is what it sampled, and a file from a stranger is data."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from flowalign.app.loading import load_for_sampling
from flowalign.config import load, recipe
from flowalign.errors import ConfigError
from flowalign.rollouts import contract, saved
from flowalign.rollouts.contract import METADATA, identity, read
from samplers.noise import fingerprints
from tests.flowalign.small_run import small_run

FILE = "iteration-00000{}-rank0.safetensors"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three iterations, of which the two newest are kept, and what the trainer had sampled in each."""
    folder = tmp_path_factory.mktemp("written")
    trainer = small_run(
        "tiny_sd3/flow_grpo",
        folder,
        "training.iterations=3",
        "training.checkpoint_every=1",
        "training.keep_checkpoints=3",
        "rollout.save_every=1",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saved, "KEPT", 2)
        patch.setattr(
            trainer.rollouts,
            "save",
            lambda sampled, save=trainer.rollouts.save: (
                torch.save(_plain(sampled), folder / "sampled.pt"),
                save(sampled),
            ),
        )
        trainer.train()
    return folder / "run"


def _plain(sampled: Any) -> dict[str, Any]:
    return {**sampled.rollout.trajectory.tensors(), "prompts": sampled.batch.prompts}


def test_a_run_writes_what_it_sampled_and_keeps_the_newest(run: Path) -> None:
    assert sorted(path.name for path in (run / "rollouts").iterdir()) == [FILE.format(1), FILE.format(2)]
    file = read(run / "rollouts" / FILE.format(2))
    sampled = torch.load(run.parent / "sampled.pt", weights_only=True)
    for name, value in file.tensors().items():
        assert torch.equal(value, sampled[name]), name
    about = file.about
    assert about.prompts == sampled["prompts"] and about.iteration == 2 and about.kernel == "flow_sde"
    assert about.share_start_noise and len(set(about.noise_seeds)) == len(about.prompts) == 32
    config = load(run / "config.yaml")
    assert about.guidance == [config.rollout.guidance] and about.levels == config.rollout.sigmas


def test_the_weights_of_a_rollout_are_those_of_the_checkpoint_of_its_iteration(run: Path) -> None:
    weights = [read(run / "rollouts" / FILE.format(i)).about.weights for i in (1, 2)]
    assert weights[0].lora and weights[0] != weights[1]
    for i, expected in enumerate(weights, 1):
        policy, _ = load_for_sampling(str(run), run / f"checkpoints/checkpoint-00000{i}", "float32")
        assert identity(policy) == expected


def test_an_adapter_that_changes_nothing_has_no_hash(tiny_policy: Callable[..., Any]) -> None:
    policy = tiny_policy()
    assert identity(policy) == contract.Weights()
    whole = identity(policy, whole=True)
    policy.add_lora(rank=2, alpha=2)
    assert identity(policy) == contract.Weights()
    trained = tiny_policy()
    trained.train_all()
    assert identity(trained) == whole


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"kernel": "os.system"}, "choose from"),
        ({"format": 2}, "format"),
        ({"prompts": ["a\0"] * 32}, "NUL"),
        ({"seeds": [-1] * 32}, "seeds are from 0"),
        ({"groups": [0]}, "1 groups"),
        ({"size": {"height": 10**9}}, "16,384"),
        ({"trust": True}, "unknown key"),
        (None, "no JSON"),
    ],
)
def test_what_a_file_says_is_checked(change: dict[str, Any] | None, complaint: str, run: Path, tmp_path: Path) -> None:
    tensors, about = _content(run / "rollouts" / FILE.format(2))
    text = "[" * 100_000 if change is None else json.dumps(about | change)
    save_file(tensors, tmp_path / "file", {METADATA: text})
    with pytest.raises(ConfigError, match=complaint):
        read(tmp_path / "file")


def _content(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    with safe_open(path, "pt") as file:
        names = file.keys()
        return {name: file.get_tensor(name) for name in names}, json.loads(file.metadata()[METADATA])


def test_other_files_are_refused_in_one_line(run: Path, tmp_path: Path) -> None:
    good = run / "rollouts" / FILE.format(2)
    tensors, about = _content(good)
    pickled, link, cut, huge, other = (tmp_path / name for name in ("pickle", "link", "cut", "huge", "other"))
    torch.save(tensors, pickled)
    link.symlink_to(good)
    cut.write_bytes(good.read_bytes()[:-100])
    huge.write_bytes((2**40).to_bytes(8, "little") + b"{}")
    save_file({"latents": tensors["latents"].int()} | {"code": tensors["eta"]}, other, {METADATA: json.dumps(about)})
    os.mkfifo(tmp_path / "pipe")
    for path in (pickled, link, cut, huge, other, tmp_path / "pipe", tmp_path / "missing"):
        with pytest.raises((ConfigError, FileNotFoundError)) as refused:
            read(path)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "setting", "why"),
    [
        ("tiny_sd3/g2rpo", "rollout.rlg_from=0", "g2rpo"),
        ("tiny_sd3/reinflow", "rollout.rlg_from=0", "reinflow"),
        ("tiny_sd3/nft", "rollout.order=2", "order"),
        ("tiny_sd3/flow_grpo", "data.replay={groups: 4, age: 2}", "replay"),
        ("tiny_sd3/flow_grpo", "rollout.kernel=tests.flowalign.rollouts.test_contract.own_kernel", "own_kernel"),
    ],
)
def test_runs_that_a_file_cannot_describe_are_refused(name: str, setting: str, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"save_every.*{why}.*: 0 works"):
        load(recipe(name), ["rollout.save_every=1", setting]).check(1)


def own_kernel(x: Any, v: Any, sigma: Any, sigma_next: Any, eta: Any) -> Any:
    return x + v * (sigma_next - sigma), eta * sigma_next


def test_fingerprints_are_a_sum_of_products_in_64_bits() -> None:
    rows = torch.randn(3, 2, 5)
    bits = rows.flatten(1).numpy().view(np.int32).tolist()
    expected = []
    for row in bits:
        total = 0
        for place, value in enumerate(row, 1):
            key = _signed(place * 0x5851F42D4C957F2D)
            total += value * (_signed((key ^ (key >> 31)) * 0x14057B7EF767814F) | 1)
        expected.append(_signed(total))
    assert fingerprints(rows).tolist() == expected
    again = fingerprints(rows[[0, 1, 0]])
    assert again[0] == again[2] != again[1]


def _signed(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63
