"""Runs on an accelerator with values: nothing mixes devices, and the numbers are those of the CPU.

Torch has one accelerator a process, for good; so all of it happens in forks.
"""

import os
import traceback
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

from flowalign.config import load, recipe
from flowalign.data import ASSETS
from flowalign.policies.diffusion import DiffusersPolicy
from flowalign.training import Trainer

SMALL = ["training.iterations=1", "training.prompts_per_iteration=2", "training.group_size=4"]
SMALL += ["training.updates_per_iteration=1", "training.previews=0", "evaluation.prompts=null"]


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
        with pytest.raises(RuntimeError, match="generator"):
            torch.randn(2, device=DEVICE, generator=torch.Generator())
        with pytest.raises(TypeError, match="numpy"):
            there.numpy()
        assert not device.waits and device.bytes["to the host"] == 0
        assert (there + 1).sum().item() == 21 and there[there > 3].tolist() == [4, 5]
        assert sum(device.waits.values()) == 3 and device.bytes["to the host"] == 8
        here.to(DEVICE, non_blocking=True)
        assert sum(device.waits.values()) == 3 and device.bytes["to the device"] == 12


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


def trained(device: torch.device, folder: Path, name: str) -> dict[str, Tensor]:
    """The weights after an iteration of a recipe."""
    config = load(recipe(name), [*SMALL, f"output={folder}", "name=run"])
    policy = DiffusersPolicy.from_pretrained(ASSETS / "tiny_sd3", device=device)
    with mock.patch.object(Accelerator, "device", device):
        trainer = Trainer(config, policy, progress=False)
        trainer.train()
    return {key: value.detach().cpu() for key, value in trainer.learner.parameters.items()}


@pytest.mark.parametrize("name", ["tiny_sd3/flow_grpo", "tiny_sd3/draft"])
def test_a_run_ends_with_the_weights_of_one_on_the_cpu(name: str, tmp_path: Path) -> None:
    wanted = trained(torch.device("cpu"), tmp_path / "here", name)

    def compare() -> None:
        from tests.device import DEVICE, Device

        with Device() as device:
            weights = trained(DEVICE, tmp_path / "there", name)
        assert device.bytes["to the device"] > 1e6 and weights.keys() == wanted.keys()
        # its attention is computed by another kernel, and Adam's first step has the sign of gradients near 0
        distance = sum((weights[key] - value).square().sum() for key, value in wanted.items())
        assert distance < 1e-6 * sum(value.square().sum() for value in wanted.values())

    forked(compare)


@pytest.mark.slow
def test_a_recipe_with_further_networks_runs_on_it() -> None:
    def work() -> None:
        from tests.device import main

        assert main(["tiny_sd3/dmd2", "tiny_lm/grpo"]) == 0
        # whose prompts, pictures and votes are files that a user has
        assert main(["flux/flow_grpo_kontext", "sd15/kto", "qwen_vl/judge"]) == 0

    forked(work)
