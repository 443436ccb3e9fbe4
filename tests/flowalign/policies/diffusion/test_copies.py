"""Every family's network in copies on two processes: the gradients of both are the mean of each one's own."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from flowalign import registry
from flowalign.config import load, recipe
from flowalign.planning.tiny_pipelines import PIPELINES, build
from flowalign.policies.diffusion import DiffusersPolicy, Rollout
from flowalign.policies.diffusion.families import family_of
from flowalign.training.distributed.sharding import distribute
from tests.flowalign.policies.diffusion.test_conformance import (
    STEPS,
    draw_pictures,
    from_pictures,
    of_small_areas,
    roll,
    scramble,
)
from tests.flowalign.training.processes import run_together


@pytest.mark.slow
def test_two_processes_average_the_gradients_of_every_family(tmp_path: Path) -> None:
    families = {type(family_of(tiny.pipeline)) for tiny in PIPELINES.values()}
    assert families == {registry.resolve("models", name) for name in registry.names("models")}
    run_together(2, compare, draw_pictures(tmp_path), tmp_path / "compared.txt")
    assert (tmp_path / "compared.txt").read_text().split() == sorted(PIPELINES)


def compare(rank: int, pictures: list[str], compared: Path) -> None:
    of_small_areas(pytest.MonkeyPatch())
    # what one process fails at, the other shall not wait half an hour for
    accelerator = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=60))])
    config = load(recipe("tiny_sd3/flow_grpo"))
    for name in sorted(PIPELINES):
        tiny = from_pictures(PIPELINES[name], pictures)
        family = family_of(tiny.pipeline)
        # all weights too where some parts get no gradient
        ways = ["lora"] if family.lora_targets else []
        ways += ["all weights"] if not ways or family.dead_ends else []
        for how in ways:
            policy = DiffusersPolicy(build(name), encode_options=tiny.encode)
            if how == "all weights":
                policy.train_all()
            else:
                policy.add_lora(2, 4)
                scramble(policy)
            rollout = roll(policy, tiny)
            alone = gradients(policy, rollout, rank)
            # all in one message
            total = parameters_to_vector(alone.values())
            torch.distributed.all_reduce(total)
            vector_to_parameters(total / 2, alone.values())
            distribute(policy, config, accelerator)
            # that a gradient did not come, a wrapper says at the next forward
            for _ in range(2):
                together = gradients(policy, rollout, rank)
            for part, gradient in together.items():
                torch.testing.assert_close(gradient, alone[part], atol=1e-5, rtol=1e-3, msg=f"{name}, {how}: {part}")
        if rank == 0:
            with compared.open("a") as file:
                file.write(f"{name}\n")


def gradients(policy: DiffusersPolicy, rollout: Rollout, rank: int) -> dict[str, Tensor]:
    """Of what is trained, by two samples of a process."""
    trained = policy.trainable()
    for parameter in trained.values():
        parameter.grad = None
    samples, steps = torch.tensor([2 * rank, 2 * rank + 1]), torch.tensor([0, STEPS - 1])
    policy.velocity(rollout, samples, steps).float().square().mean().backward()
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in trained.items()
    }
