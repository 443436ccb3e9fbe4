"""The actor of pictures refuses what its pipeline cannot do."""

import re

import pytest

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
