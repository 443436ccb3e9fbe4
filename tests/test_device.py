"""Runs on an accelerator with values: nothing mixes devices, and the numbers are those of the CPU.

Torch has one accelerator a process, for good; so all of it happens in forks.
"""

import os
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import Tensor

from flowalign.config import load, recipe
from flowalign.planning.tiny_pipelines import PIPELINES, build
from flowalign.policies.diffusion import DiffusersPolicy
from flowalign.training import Trainer
from flowalign.training.learner import Learner
from samplers import generators, normal
from tests.flowalign.training.processes import run_together

SMALL = ["training.iterations=1", "training.prompts_per_iteration=2", "training.group_size=4"]
SMALL += ["training.updates_per_iteration=1", "training.previews=0", "evaluation.prompts=null"]
SMALL += ["training.micro_batch_size=4", "rollout.steps=4", "rollout.sigmas=null"]
# of a network with two blocks: what the device watches takes its time an operation
SMALL += ["rollout.height=8", "rollout.width=8"]
BETWEEN_MICRO_BATCHES = {
    "flowalign/algorithms/matching/base.py:noised": "which samples' seeds draw the noise of a micro-batch",
    "flowalign/algorithms/direct/base.py:score": "which samples' prompts the reward is asked about",
    "samplers/rows.py:distinct_rows": "how many states of a micro-batch are different, where groups share their start",
    "rewards/vision.py:score_pixels": "a reward on the host fetches its pixels",
    "flowalign/training/optimization.py:backward": "and sends their gradient back",
    "rewards/base.py:column": "values that are not finite are refused before their gradient is taken",
}
"""Places where an update may wait."""


def forked(work: Callable[[], None]) -> None:
    """Do work in a process of its own."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def the_rules_of_a_gpu_hold() -> None:
    from tests.device import DEVICE, NAME, Device, There

    with Device() as device:
        there, here = torch.arange(6.0, device=DEVICE).view(2, 3), torch.ones(3)
        assert isinstance(there, There) and there.device.type == NAME and there.t().stride() == (1, 3)
        with pytest.raises(RuntimeError, match="same device"):
            there + here
        with pytest.raises(RuntimeError, match="indices"):
            here[torch.zeros(1, dtype=torch.long, device=DEVICE)]
        with pytest.raises(RuntimeError, match="generator"):
            torch.randn(2, device=DEVICE, generator=torch.Generator())
        with pytest.raises(TypeError, match="numpy"):
            there.numpy()
        assert not device.waits and device.bytes["to the host"] == 0
        assert (there + 1).sum().item() == 21 and there[there > 3].tolist() == [4, 5]
        assert sum(device.waits.values()) == 3 and device.bytes["to the host"] == 8
        here.to(DEVICE, non_blocking=True)
        assert sum(device.waits.values()) == 3 and device.bytes["to the device"] == 12
        assert not here.is_pinned() and here.pin_memory().is_pinned() and device.bytes["from pinned memory"] == 0
        normal((3,), generators([1]), DEVICE)
        assert device.bytes["from pinned memory"] == 12 and device.bytes["to the device"] == 24


def autocast_computes_as_on_cuda() -> None:
    from tests.device import DEVICE, NAME, Device

    with Device(), torch.autocast(NAME, torch.bfloat16):
        x = torch.randn(4, 4).to(DEVICE)
        assert (x @ x).dtype == torch.bfloat16
        assert torch.nn.functional.linear(x, x).dtype == torch.bfloat16
        half = x.bfloat16()
        assert half.softmax(-1).dtype == torch.float32 and (half + half).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "work", [the_rules_of_a_gpu_hold, autocast_computes_as_on_cuda], ids=lambda work: work.__name__
)
def test_it_is_a_device(work: Callable[[], None]) -> None:
    forked(work)


def trained(device: torch.device, folder: Path, name: str, *overrides: str) -> dict[str, Tensor]:
    """How an iteration of a recipe changes the weights."""
    reward = "tiny_clip" if name == "draft" else "image_statistic, statistic: brightness"
    rewards = f"rewards=[{{name: {reward}}}]"
    config = load(recipe(f"tiny_sd3/{name}"), [*SMALL, rewards, f"output={folder}", "name=run", *overrides])
    policy = DiffusersPolicy(build("sd35"), device, PIPELINES["sd35"].encode)
    with mock.patch.object(Accelerator, "device", device):
        trainer = Trainer(config, policy, progress=False)
        start = {key: value.detach().cpu().clone() for key, value in trainer.learner.parameters.items()}
        trainer.train()
    return {key: value.detach().cpu() - start[key] for key, value in trainer.learner.parameters.items()}


def check_alike(there: dict[str, Tensor], here: dict[str, Tensor]) -> None:
    assert there.keys() == here.keys()
    # its attention is computed by another kernel, and Adam's first step has the sign of gradients near 0
    distance = sum((there[key] - value).square().sum() for key, value in here.items())
    assert distance < 1e-5 * sum(value.square().sum() for value in here.values())


@pytest.mark.parametrize("name", ["flow_grpo", "dense_grpo", "nft", "draft"])
def test_a_run_ends_with_the_weights_of_one_on_the_cpu_and_waits_where_it_may(name: str, tmp_path: Path) -> None:
    wanted = trained(torch.device("cpu"), tmp_path / "here", name)

    def compare() -> None:
        from tests.device import DEVICE, Device

        backward, waits, pinned = Learner.backward, Counter[str](), []

        def counted(learner: Any, *args: Any) -> Any:
            before, copied = Counter(device.waits), device.bytes["from pinned memory"]
            try:
                return backward(learner, *args)
            finally:
                waits.update(device.waits - before)
                pinned.append(device.bytes["from pinned memory"] - copied)

        with Device() as device, mock.patch.object(Learner, "backward", counted):
            weights = trained(DEVICE, tmp_path / "there", name)
            assert waits.keys() <= BETWEEN_MICRO_BATCHES.keys()
            assert device.bytes["to the device"] > 1e6
            if name == "flow_grpo":
                before = Counter(waits)
                stored = trained(DEVICE, tmp_path / "stored", name, "rollout.store=host")
                # states, velocities and embeddings come from pinned memory; the host waits once more an update
                assert pinned[-1] > pinned[0] + 8 * 4 * 3 * (4 * 8 * 8 * 4)
                assert waits - before == before + Counter({"flowalign/training/visits.py:visiting": 1})
                assert all(torch.equal(stored[key], value) for key, value in weights.items())
        check_alike(weights, wanted)

    forked(compare)


def train_in_group(rank: int, folder: Path, name: str) -> None:
    """Be one of the processes of a run, on the CPU or, in a folder of this name, on the device."""
    weights = trained_on_device(folder, name) if folder.name == "there" else trained(torch.device("cpu"), folder, name)
    save_file(weights, folder / f"{rank}.safetensors")


def trained_on_device(folder: Path, name: str) -> dict[str, Tensor]:
    from tests.device import DEVICE, Device

    with Device():
        return trained(DEVICE, folder, name)


@pytest.mark.slow
def test_two_processes_end_with_the_weights_of_two_on_the_cpu(tmp_path: Path) -> None:
    for where in ("here", "there"):
        (tmp_path / where).mkdir()
        run_together(2, train_in_group, tmp_path / where, "flow_grpo")
    here, there, other = (load_file(tmp_path / f"{one}.safetensors") for one in ("here/0", "there/0", "there/1"))
    check_alike(there, here)
    # what is copied stays the same on both: gradients were averaged
    assert all(torch.equal(there[key], value) for key, value in other.items())


@pytest.mark.slow
def test_a_recipe_with_further_networks_runs_on_it() -> None:
    def work() -> None:
        from tests.device import main

        assert main(["tiny_sd3/dmd2", "tiny_lm/grpo"]) == 0
        # whose prompts, pictures and votes are files that a user has
        assert main(["flux/flow_grpo_kontext", "sd15/kto", "qwen_vl/judge"]) == 0

    forked(work)
