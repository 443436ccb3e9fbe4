"""Flow-GRPO's update against its authors' loop, and settings that follow it."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file

from flowalign.config import load, recipe
from flowalign.data.batches import Batch
from flowalign.errors import ConfigError
from flowalign.rollouts.draw import Draw
from flowalign.training import Trainer
from tests.flowalign.small_run import small_run

ORIGINALS = Path(__file__).parents[2] / "core" / "originals"


@pytest.fixture(scope="module")
def shared() -> ModuleType:
    """originals/update.py"""
    spec = importlib.util.spec_from_file_location("update", ORIGINALS / "update.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_whole_update_has_the_published_loops_gradient(shared: ModuleType, tmp_path: Path) -> None:
    """Of SD3 with guidance, LoRA, clip and KL, to 1e-5; originals/README.md says how theirs was recorded."""
    stored = load_file(ORIGINALS / "update.safetensors")
    targets = [f"attn.{name}" for name in shared.TARGETS]
    run: Trainer = small_run(
        "tiny_sd3/flow_grpo",
        tmp_path,
        f"model.lora={{rank: {shared.RANK}, alpha: {2 * shared.RANK}, targets: {targets}}}",
        f"algorithm={{name: flow_grpo, loss: {{clip_range: {shared.CLIP}}}, advantage: {{scale: batch}}}}",
        "algorithm.divergence=kl_dt",
        f"algorithm.kl_weight={shared.BETA}",
        "algorithm.drop_zero_advantage=true",
        f"rollout.steps={len(shared.SIGMAS)}",
        f"rollout.sigmas={shared.SIGMAS}",
        f"rollout.guidance={shared.GUIDANCE}",
        "rollout.guidance_gradient=conditional",
        f"rollout.eta={shared.NOISE}",
        f"training.group_size={shared.MEMBERS}",
        # no clip of the norm, and parts of unequal size
        "training.optimizer.max_grad_norm=1e9",
        "training.micro_batch_size=7",
        reward=lambda pictures, prompts: shared.REWARDS,
        whole=True,
    )
    count = len(shared.REWARDS)
    prompts = [prompt for prompt in shared.PROMPTS for _ in range(shared.MEMBERS)]
    group = [row // shared.MEMBERS for row in range(count)]
    batch = Batch(
        prompts=prompts,
        metadata=[{}] * count,
        group=group,
        seeds=list(range(count)),
        noise_seeds=list(range(count)),
        iteration=0,
        picks=group,
    )
    rollout = run.sampler.rollout(batch)
    # the trajectories of their pipeline
    rollout.trajectory.latents[:, : len(shared.SIGMAS)] = stored["states"]
    rollout.trajectory.log_prob[:, :-1] = stored["log_prob"]
    run.sampler.rollout = lambda batch: rollout
    experience = run.collect(Draw(run.sampler, run.scorer, batch))
    torch.testing.assert_close(experience.advantage[:, :-1], stored["advantage"], atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        for name, parameter in run.learner.parameters.items():
            parameter.copy_(stored[f"weight.{name}"])
    gradients: dict[str, torch.Tensor] = {}
    run.learner.optimizer.step = lambda: gradients.update({k: p.grad for k, p in run.learner.parameters.items()})
    measured = run.learner.update(experience, experience.items)
    expected = {name: stored[f"gradient.{name}"] for name in gradients}
    whole, theirs = (torch.cat([part[name].flatten() for name in gradients]) for part in (gradients, expected))
    assert (whole - theirs).norm() < 1e-5 * theirs.norm()
    # a processor with other instructions than theirs rounds single entries further off
    for name, gradient in gradients.items():
        assert (gradient - expected[name]).abs().max() <= 5e-5 * expected[name].abs().max(), name
    assert len(gradients) == sum(name.startswith("gradient.") for name in stored)
    assert measured["policy/kl"].item() == pytest.approx(stored["kl"].item(), rel=1e-5)
    assert measured["policy/loss"].item() == pytest.approx(stored["loss"].item(), abs=1e-5)
    assert 0 < measured["policy/clip_fraction"].item() <= stored["clip_fraction"].item() < 1


def test_groups_of_a_prompt_that_is_drawn_twice_can_be_pooled(tmp_path: Path) -> None:
    """As flow_grpo's statistics, which are kept by the prompt."""
    rewards = torch.tensor([0.0, 1.0, 0.5, 0.5, 1.0, 3.0])
    few = "training.group_size=2", "rollout.share_start_noise=false"
    run: Trainer = small_run(
        "tiny_sd3/flow_grpo", tmp_path, "algorithm.pool_prompts=true", *few, reward=lambda *_: rewards.tolist()
    )
    # groups 0 and 2 are of prompt 7, and group 1 was sampled in an earlier iteration
    batch = Batch(
        prompts=["a"] * 6,
        metadata=[{}] * 6,
        group=[0, 0, 1, 1, 2, 2],
        seeds=list(range(6)),
        noise_seeds=list(range(6)),
        iteration=0,
        picks=[7, 7, -1, -1, 7, 7],
    )
    experience = run.collect(Draw(run.sampler, run.scorer, batch))
    pooled = rewards[[0, 1, 4, 5]]
    expected = torch.zeros(6)
    expected[[0, 1, 4, 5]] = (pooled - pooled.mean()) / (pooled.std(correction=0) + 1e-4)
    torch.testing.assert_close(experience.advantage[:, 0], expected)
    assert experience.metrics["reward/zero_spread"] == pytest.approx(1 / 3)


def test_branches_of_a_prompt_are_not_pooled() -> None:
    branches = "rollout.plan={name: single, start: 1, stop: 3}"
    with pytest.raises(ConfigError, match="algorithm.pool_prompts: the groups that g2rpo makes of a prompt left"):
        load(recipe("tiny_sd3/g2rpo"), ["algorithm.pool_prompts=true", branches]).check(1)
