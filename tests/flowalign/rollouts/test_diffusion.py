"""The sampler of pictures refuses what its pipeline cannot do."""

import re

import pytest
import torch

from flowalign.data import ASSETS
from flowalign.errors import ConfigError
from flowalign.planning.tiny_pipelines import PIPELINES, build
from flowalign.policies.diffusion import DiffusersPolicy
from flowalign.training import Trainer


@pytest.mark.parametrize(("name", "refused"), [("flux", True), ("qwen_image", False)])
def test_a_gradient_of_one_branch_takes_guidance_by_two(name: str, refused: bool, tmp_path) -> None:
    config = {
        "model": {"path": str(ASSETS / "tiny_sd3"), "lora": {"rank": 2}},
        "data": {"prompts": "shapes_train"},
        "rewards": [{"name": "shapes"}],
        "algorithm": {"name": "flow_grpo"},
        "rollout": {"guidance": 3.0, "guidance_gradient": "conditional"},
        "training": {"iterations": 1, "prompts_per_iteration": 1, "group_size": 2},
        "output": str(tmp_path),
    }
    policy = DiffusersPolicy(build(name), encode_options=PIPELINES[name].encode)
    if refused:
        with pytest.raises(ConfigError, match=re.escape("rollout.guidance_gradient: the guidance of FluxPipeline is")):
            Trainer(config, policy=policy, progress=False)
    else:
        trainer = Trainer(config, policy=policy, progress=False)
        assert trainer.policy.guidance_gradient == "conditional"


@pytest.mark.parametrize("kernel", ["flow_sde", "cps_published"])
def test_each_group_has_steps_of_its_own_where_the_plan_draws_for_groups(kernel: str, tmp_path) -> None:
    """A group samples what it would sample alone under its plan, and a run learns from all of them."""
    config = {
        "model": {"path": "tiny_sd3", "lora": {"rank": 2}, "encode": {"max_sequence_length": 0}},
        "data": {"prompts": "shapes_train"},
        "rewards": [{"name": "shapes"}],
        "algorithm": {"name": "flow_grpo"},
        "rollout": {
            "steps": 6,
            "kernel": kernel,
            "plan": {"name": "window", "size": 2, "order": "random", "of": "group"},
        },
        "training": {"iterations": 1, "prompts_per_iteration": 6, "group_size": 2, "updates_per_iteration": 1},
        "output": str(tmp_path),
    }
    trainer = Trainer(config, progress=False)
    batch = trainer.groups.draw(0).batch
    rollout = trainer.sampler.rollout(batch)
    first = rollout.mask.int().argmax(dim=1)
    assert (rollout.mask.sum(dim=1) == 2).all() and len(set(first.tolist())) > 1
    assert first[::2].tolist() == first[1::2].tolist()
    for group in (0, 3):
        alone = trainer.sampler.rollout(batch[[2 * group, 2 * group + 1]])
        rows = slice(2 * group, 2 * group + 2)
        torch.testing.assert_close(alone.trajectory.final, rollout.trajectory.final[rows], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(alone.trajectory.log_prob, rollout.trajectory.log_prob[rows], rtol=1e-4, atol=1e-4)
    trainer.train()
    assert trainer.iteration == 1
