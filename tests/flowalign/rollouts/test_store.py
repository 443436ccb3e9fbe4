"""Trajectories that wait outside of the device give the same numbers, and leave nothing behind."""

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from flowalign.config import load, recipe
from flowalign.errors import ConfigError, FlowalignError
from flowalign.rollouts.store import InFiles
from flowalign.training import Trainer
from flowalign.training.visits import visiting
from samplers.stored import Stored, in_memory
from tests.flowalign.small_run import SMALL, small_run

SHORT = ["training.previews=0", "training.group_size=4", "training.micro_batch_size=8", "rollout.batch_size=8"]


def test_an_index_gives_what_the_tensor_would_give():
    whole = torch.randn(7, 5, 3)
    stored = Stored.cat([Stored.of(piece, in_memory) for piece in whole.split(3)])
    rows, places = torch.tensor([6, 0, 3, 3]), torch.tensor([4, 1, 0, 0])
    for index in ((rows, places), (slice(None), -1), (rows, 0), (rows, slice(0, 2)), rows, [5, 1], slice(2, 6)):
        assert torch.equal(stored[index], whole[index])
    assert torch.equal(stored.take(rows)[:], whole[rows]) and torch.equal(stored.piece(2, 6)[:], whole[2:6])
    assert torch.equal(torch.add(stored, 1), whole + 1) and stored.nbytes == whole.nbytes
    copy = stored.clone()
    copy[rows[:2], places[:2]] = torch.ones(2, 3)
    copy[:, 2] = torch.zeros(7, 3)
    assert torch.equal(stored[:], whole) and copy[:][6, 4].eq(1).all() and copy[:, 2].eq(0).all()


def test_what_was_not_fetched_is_refused():
    whole = torch.randn(4, 5, 3)
    stored = Stored.of(whole, in_memory)
    rows, places = torch.tensor([1, 2]), torch.tensor([0, 4])
    with mock.patch("samplers.stored._pinned", in_memory), mock.patch.object(torch.Tensor, "pin_memory", lambda t: t):
        stored.fetch(rows, places)
    stored.hold()
    assert torch.equal(stored[rows, places], whole[rows, places])
    with pytest.raises(RuntimeError, match="its algorithm's `reads` does not name"):
        stored[rows, places - places]
    stored.hold()
    assert torch.equal(stored[rows, rows], whole[rows, rows])


def test_what_a_micro_batch_reads_travels_through_pinned_memory_while_the_one_before_is_learned_from():
    whole, pinned = torch.randn(6, 5, 3), []
    stored = Stored.of(whole, in_memory)
    algorithm: Any = SimpleNamespace(reads=lambda experience, items: [(stored, (items, items - items))])
    batches = torch.tensor([5, 0, 3, 1, 2, 4]).split(2)

    def allocate(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        pinned.append(shape[0])
        return in_memory(shape, dtype)

    with (
        mock.patch("flowalign.training.visits.is_gpu", return_value=True),
        mock.patch("samplers.stored._pinned", allocate),
        mock.patch.object(torch.Tensor, "pin_memory", lambda t: t),
    ):
        for number, items in enumerate(visiting(algorithm, None, batches)):
            # of this one, and of the next
            assert pinned == [2] * min(number + 2, 3)
            assert torch.equal(stored[items, items - items], whole[items, 0])
            coming = [] if stored._coming is None else (stored._coming.numbers // 5).tolist()
            assert coming == [sorted(each.tolist()) for each in [*batches[1:], torch.tensor([])]][number]


@pytest.mark.parametrize("name", ["flow_grpo", "dense_grpo", "nft", "draft"])
def test_a_run_ends_with_the_same_bits(name: str, tmp_path: Path):
    def trained(store: str) -> tuple[dict[str, torch.Tensor], Trainer]:
        more = [] if name == "draft" else SHORT
        run = small_run(f"tiny_sd3/{name}", tmp_path / store, "training.previews=0", *more, f"rollout.store={store}")
        run.iterate()
        return {key: value.detach() for key, value in run.policy.trainable().items()}, run

    wanted, _ = trained("device")
    # what is read from disk has the same indices as on the host
    for store in ("host", "disk") if name == "flow_grpo" else ("disk",):
        weights, run = trained(store)
        assert all(torch.equal(weights[key], value) for key, value in wanted.items())
        assert not list(run.folder.rglob("trajectories-*"))


def test_a_resumed_run_and_kept_groups_end_with_the_same_bits(tmp_path: Path):
    two = [*SMALL, *SHORT, "training.iterations=2", "training.checkpoint_every=1", "data.replay={}"]
    two.append("training.old_log_prob=replayed")

    def trainer(store: str, iterations: int = 2, resume: bool = False) -> Trainer:
        changes = [*two, f"output={tmp_path / store}", f"rollout.store={store}"]
        made = Trainer(load(recipe("tiny_sd3/flow_grpo"), changes), progress=False, resume=resume)
        while made.iteration < iterations:
            made.iterate()
            made.iteration += 1
        made.save()
        return made

    wanted = trainer("device").policy.trainable()
    trainer("disk", 1)
    resumed = trainer("disk", resume=True).policy.trainable()
    assert all(torch.equal(resumed[key], value) for key, value in wanted.items())


def test_only_what_is_small_stays_on_the_device(tmp_path: Path):
    run = small_run("tiny_sd3/nft", tmp_path, *SHORT, "rollout.store=host")
    with run.learner.sampling():
        rollout = run.sampler.rollout(run.groups.draw(0).batch)
    trajectory = rollout.trajectory
    assert isinstance(trajectory.latents, Stored) and isinstance(trajectory.velocity, Stored)
    waiting = trajectory.latents.nbytes + trajectory.velocity.nbytes
    left = sum(value.nbytes for value in (trajectory.log_prob, trajectory.eta, trajectory.sigmas))
    assert left < waiting / 100
    embeddings = [stored for stored, _ in rollout.conditions.reads(torch.arange(2))]
    assert embeddings and all(stored.device == run.policy.device for stored in embeddings)


def test_a_full_disk_is_one_line_and_a_method_without_trajectories_refuses(tmp_path: Path):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with (
        mock.patch("os.posix_fallocate", side_effect=full),
        pytest.raises(FlowalignError, match="No space left") as told,
    ):
        InFiles(tmp_path)([4, 5], torch.float32)
    assert "\n" not in str(told.value) and not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="rollout.store: 'sft' .* device works"):
        small_run("tiny_sd3/sft", tmp_path, "rollout.store=host")
