"""The sampler of pictures refuses what its pipeline cannot do."""

import re

import pytest
import torch
from peft.tuners.tuners_utils import BaseTunerLayer

from flowalign.config import load
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


@pytest.mark.parametrize("shared", [True, False])
def test_samples_of_merged_weights_are_those_of_the_lora(shared: bool, tmp_path, monkeypatch) -> None:
    """The adapter is in the weights while trajectories are sampled, forked ones too; the weights stay to the bit."""
    config = {
        "model": {"path": "tiny_sd3", "lora": {"rank": 2, "init": "gaussian"}, "encode": {"max_sequence_length": 0}},
        "data": {"prompts": "shapes_train"},
        "rewards": [{"name": "shapes"}],
        "algorithm": {"name": "dense_grpo"},
        "rollout": {"steps": 3, "share_start_noise": shared, "merge_lora": True},
        "training": {"iterations": 1, "prompts_per_iteration": 2, "group_size": 2},
        "output": str(tmp_path),
    }
    trainer = Trainer(config, progress=False)
    policy, sampler, batch = trainer.policy, trainer.sampler, trainer.groups.draw(0).batch
    for name, parameter in policy.trainable().items():
        torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    before = {name: parameter.detach().clone() for name, parameter in policy.network.named_parameters()}
    asked: list[bool] = []
    layer = next(module for module in policy.network.modules() if isinstance(module, BaseTunerLayer))
    layer.register_forward_hook(lambda module, inputs, output: asked.append(module.merged))

    merged = sampler.rollout(batch)
    assert asked and all(asked) and not layer.merged
    everyone, first = torch.arange(4), torch.zeros(4, dtype=torch.long)
    finished = sampler.finish(merged, everyone, first, 1)
    asked.append(layer.merged)
    sampler.scorer = trainer.scorer
    sampler.pruned(batch, {})
    assert asked.count(False) == 1
    assert all(torch.equal(before[name], parameter) for name, parameter in policy.network.named_parameters())

    asked.clear()
    monkeypatch.setattr(trainer.config.rollout, "merge_lora", False)
    plain = sampler.rollout(batch)
    assert asked and not any(asked)
    close = dict(rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(merged.trajectory.final, plain.trajectory.final, **close)
    torch.testing.assert_close(sampler.finish(plain, everyone, first, 1), finished, **close)
    with policy.reference():
        start = sampler.rollout(batch)
        monkeypatch.setattr(trainer.config.rollout, "merge_lora", True)
        assert torch.equal(sampler.rollout(batch).trajectory.final, start.trajectory.final)
    assert (start.trajectory.final - plain.trajectory.final).abs().max() > 0.01


@pytest.mark.parametrize(
    ("recipe", "change", "says"),
    [
        ("demo", "model.lora=null", "it takes a LoRA"),
        ("demo", "model.base_bits=4", "on weights that are not quantised"),
        ("nft", "rollout.search={name: best_of_n, budget: samples=4}", "a search asks the network by itself"),
        ("hypernoise", "training.iterations=1", "the generator samples without the adapter"),
    ],
)
def test_merging_is_refused_where_it_would_do_nothing(recipe: str, change: str, says: str) -> None:
    with pytest.raises(ConfigError, match=f"rollout.merge_lora: .*{says}"):
        load(f"configs/tiny_sd3/{recipe}.yaml", ["rollout.merge_lora=true", change]).check(1)
