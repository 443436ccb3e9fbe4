"""The core's advantages and losses, chosen by name for denoising steps."""

from pathlib import Path
from typing import Any

import pytest
import torch

from flowalign import registry
from flowalign.config import load, recipe
from flowalign.errors import ConfigError
from flowalign.training import Trainer
from tests.flowalign.small_run import small_run

STEPS = ("{name: ppo, clip_range: 0.01}", "{name: cispo}", "{name: reinforce}")


def trainer(folder: Path, algorithm: str) -> Trainer:
    fewer = "training.prompts_per_iteration=2", "training.group_size=4"
    return small_run("tiny_sd3/flow_grpo", folder, f"algorithm={algorithm}", *fewer)


def gradient(folder: Path, algorithm: str) -> torch.Tensor:
    """Of the first update, on the weights that sampled."""
    run = trainer(folder, algorithm)
    run.learner.optimizer.step = lambda: found.append([p.grad.clone() for p in run.learner.parameters.values()])
    found: list[Any] = []
    run.train()
    return torch.cat([g.flatten() for g in found[0]])


def test_chosen_parts_give_what_the_family_gives(tmp_path: Path) -> None:
    plain = gradient(tmp_path / "plain", "{name: flow_grpo, loss: {clip_range: 0.01}}")
    for i, loss in enumerate(STEPS):
        chosen = f"{{name: flow_grpo, advantage: {{name: grpo}}, loss: {loss}}}"
        torch.testing.assert_close(gradient(tmp_path / str(i), chosen), plain, atol=1e-6, rtol=1e-4)
    other = gradient(tmp_path / "other", "{name: flow_grpo, loss: {clip_range: 0.01}, advantage: {name: rloo}}")
    assert (other - plain).abs().max() > 1e-3 * plain.abs().max()


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ("{name: flow_grpo, loss: {name: gspo}}", "looks at a whole row at once, and FlowGRPO shows it one action"),
        ("{name: flow_grpo, loss: {name: 'flowalign.core.losses:pacs'}}", "looks at a whole group at once"),
        ("{name: flow_grpo, advantage: {name: remax}}", "needs baseline, which FlowGRPO does not record"),
        ("{name: flow_grpo, advantage: {name: 'flowalign.core.advantages:gigpo'}}", "needs state"),
        ("{name: dense_grpo, advantage: {name: pass_k}}", "takes one reward a row, and DenseGRPO has one for every"),
        (
            "{name: hicogen, advantage: {name: gdpo}}",
            "needs rewards, which HiCoGen does not",
        ),
        ("{name: flow_grpo, advantage: {name: rlo}}", "did you mean 'rloo'"),
        ("{name: flow_grpo, advantage: {name: pass_k, kk: 2}}", "'pass_k' has no setting 'kk'; did you mean 'k'"),
        ("{name: flow_grpo, advantage: {name: pass_k, k: 0}}", "algorithm.advantage.k: Input should be greater"),
    ],
)
def test_parts_that_cannot_be_chosen_say_why(algorithm: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(recipe("tiny_sd3/flow_grpo"), [f"algorithm={algorithm}"]).check(1)


def test_every_part_says_what_it_is_and_where_it_is_from() -> None:
    for table in ("advantages", "losses"):
        for name in registry.names(table):
            assert len(registry.summary(table, name)) > 20
