"""Online matching methods on the shipped tiny Stable Diffusion 3."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flowalign.config import load, recipe
from flowalign.data.batches import Batch, draw_batch
from flowalign.errors import ConfigError
from flowalign.rollouts.draw import Draw
from flowalign.training import Trainer
from rewards.base import as_reward
from tests.flowalign.small_run import small_run

LEVELS = 2
SMALL = ["training.group_size=4", f"algorithm.levels={{name: schedule, count: {LEVELS}}}"]


def trainer(name: str, folder: Path, *overrides: str) -> Trainer:
    return small_run(f"tiny_sd3/{name}", folder, *SMALL, f"name={name}", *overrides)


def collected(run: Trainer, reward: Any = None, share: bool = False) -> Any:
    """The experience of 4 prompts x 4 samples of the start weights, and the draw it is of."""
    if reward is not None:
        run.scorer.reward = reward
    return run.collect(Draw(run.sampler, run.scorer, draw_batch(run.prompts, 0, 4, 4, 0, share)))


@pytest.mark.parametrize(("name", "compared"), [("nft", 2), ("awm", 2), ("dgpo", 2), ("crd", 2), ("rwr", 1)])
def test_an_iteration_asks_each_network_once_of_every_sample_at_every_level(
    name: str, compared: int, tmp_path: Path
) -> None:
    """The policy, and `compared` others: what stands still in an iteration is computed once."""
    run = trainer(name, tmp_path, "algorithm.kl_weight=0.1")
    run.train()
    (line,) = run.metrics.read()
    sampled = 16 * run.config.rollout.steps
    # a reference under guidance has two branches
    branches = 1 if getattr(run.algorithm.settings, "reference_guidance", None) is None else 2
    assert line["forwards"] == sampled + 16 * LEVELS * (1 + (compared - 1) + branches)
    assert line["matching/kl"] == 0 or branches == 2
    assert line["policy/gradient_norm"] > 0


def test_online_dpo_learns_from_the_best_and_the_worst_at_the_same_noise(tmp_path: Path) -> None:
    run = small_run("tiny_sd3/online_dpo", tmp_path, "training.group_size=4", "algorithm.levels={count: 2}")
    brightness = torch.tensor([0.1, 0.9, 0.5, 0.0] + [0.3] * 4 + [0.8, 0.2, 0.8, 0.1] + [0.0, 0.0, 0.0, 1.0])
    from rewards import as_reward

    experience = collected(run, as_reward(lambda samples, prompts: brightness.tolist()))
    assert experience.chosen.tolist() == [[1, 3], [4, 4], [8, 11], [15, 12]]
    noised = experience.noised(experience.items)
    assert noised.samples.view(-1, 2)[::2].tolist() == experience.chosen.tolist()
    best, worst = noised.noise.unflatten(0, (-1, 2)).unbind(1)
    assert torch.equal(best, worst) and torch.equal(*noised.sigma.view(-1, 2).unbind(1))
    # the group of equal rewards is left out
    assert experience.counted(experience.items).tolist() == [True] * 2 + [False] * 2 + [True] * 4
    assert len(run.learner._with_gradient(experience, experience.items)) == 6
    loss, _ = run.algorithm.losses(run.policy, experience, experience.items)
    assert loss[2:4].tolist() == [0, 0]
    torch.testing.assert_close(loss[:2], torch.full((2,), 2.0).log(), atol=1e-5, rtol=0)


def test_dgpos_groups_share_their_noise_and_all_share_their_levels(tmp_path: Path) -> None:
    run = trainer("dgpo", tmp_path)
    experience = collected(run)
    assert experience.items.shape == (4 * LEVELS, 2)
    assert (experience.level_index == experience.level_index[0]).all()
    noise = experience.noised(experience.items).noise.unflatten(0, (4 * LEVELS, 4))
    assert (noise == noise[:, :1]).all()
    # of every group and every level its own
    assert len(noise[:, 0].flatten(1).unique(dim=0)) == 4 * LEVELS


FROM_ONE_STATE = ["algorithm.own_states=true", "algorithm.stochastic=true", "rollout.share_start_noise=true"]
FROM_ONE_STATE += ["rollout.order=1", "rollout.plan={name: window, start: 1, size: 1}"]
FROM_ONE_STATE += ["algorithm.levels={name: schedule, count: 1, first: 1, end: 2}"]


@pytest.mark.parametrize("name", ["nft", "awm", "crd", "dgpo", "online_dpo"])
def test_own_states_are_those_that_samples_went_through(name: str, tmp_path: Path) -> None:
    experience = collected(trainer(name, tmp_path, "algorithm.own_states=true"))
    trajectory = experience.rollout.trajectory
    noised = experience.noised(experience.items)
    assert len(noised.level_index.unique()) > 1
    states, ends = trajectory.latents[noised.samples, noised.level_index], trajectory.final[noised.samples]
    torch.testing.assert_close(noised.x, states)
    # the straight line from the state to the sample
    torch.testing.assert_close(noised.velocity, (states - ends) / noised.sigma.view(-1, 1, 1, 1), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "members", "settings"),
    [("nft", 4, []), ("awm", 4, []), ("online_dpo", 2, []), ("online_dpo", 4, ["algorithm.pairs=all"])],
)
def test_a_state_that_members_share_is_asked_about_once(
    name: str, members: int, settings: list[str], tmp_path: Path
) -> None:
    """With the losses and gradients of asking for each."""
    run = trainer(name, tmp_path, *FROM_ONE_STATE, "algorithm.kl_weight=0.1", *settings)
    rewards = torch.rand(16, generator=torch.Generator().manual_seed(1)).tolist()
    experience = collected(run, as_reward(lambda *_: rewards), share=True)
    # a LoRA begins with zeros, where nothing but its second factor has a gradient
    for parameter in run.policy.trainable().values():
        torch.nn.init.normal_(parameter, std=0.02, generator=torch.Generator().manual_seed(2))

    def asked() -> tuple[torch.Tensor, torch.Tensor, int]:
        before = run.policy.forwards
        losses, _ = run.algorithm.losses(run.policy, experience, experience.items)
        losses.sum().backward()
        gradients = [parameter.grad for parameter in run.policy.trainable().values() if parameter.grad is not None]
        gradient = torch.cat([gradient.flatten() for gradient in gradients])
        run.learner.optimizer.zero_grad()
        return losses.detach(), gradient, run.policy.forwards - before

    losses, gradient, forwards = asked()
    networks = 1 + len(run.algorithm.compares | {"reference"})
    assert forwards == 4 * networks
    experience.state = None
    each, of_each, more = asked()
    assert more == members * forwards
    torch.testing.assert_close(losses, each, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(gradient, of_each, atol=1e-5 * float(of_each.abs().max()), rtol=1e-3)


def test_what_members_that_left_one_state_say_of_its_velocity_has_a_sum_of_0(tmp_path: Path) -> None:
    """With the plain error the gradient does not depend on how far the velocity is from the mean of their samples."""
    run = trainer("awm", tmp_path, *FROM_ONE_STATE, "algorithm.weighting=uniform", "algorithm.old_weight=0")
    rewards = torch.rand(16, generator=torch.Generator().manual_seed(1)).tolist()
    experience = collected(run, as_reward(lambda *_: rewards), share=True)
    at = run.algorithm.points(run.policy, experience, experience.items)
    x = at.noised.x.unflatten(0, (4, 4))
    torch.testing.assert_close(x, x[:, :1].expand_as(x), atol=1e-4, rtol=0)

    def pull(off: float) -> torch.Tensor:
        velocity = (at.velocity.detach() + off).requires_grad_()
        run.algorithm.loss(replace(at, velocity=velocity))[0].sum().backward()
        assert velocity.grad is not None
        return velocity.grad.unflatten(0, (4, 4)).sum(1)

    near, far = pull(0.0), pull(3.0)
    assert near.abs().max() > 1e-4
    torch.testing.assert_close(far, near, atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize(
    ("name", "settings", "why"),
    [
        ("tiny_sd3/nft", "algorithm.levels={name: uniform}", "states at the steps of its schedule alone"),
        ("tiny_sd3/nft", "algorithm.noise_of=group", "noise_of: own states need no drawn noise"),
        ("tiny_sd3/nft", "rollout.search={name: best_of_n}", "finds samples without their states"),
        ("ltx2/omni_nft", "algorithm.guidance=1", "no states of the sound are kept"),
    ],
)
def test_own_states_need_states(name: str, settings: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load(recipe(name), ["algorithm.own_states=true", settings]).check(processes=1)


def test_a_reference_under_guidance_needs_a_reference() -> None:
    config = load(recipe("tiny_sd3/nft"), ["algorithm.kl_weight=0", "algorithm.reference_guidance=3"])
    with pytest.raises(ConfigError, match="reference_guidance: the loss has no reference"):
        config.check(processes=1)


def test_the_reference_may_be_a_snapshot_that_is_made_anew(tmp_path: Path) -> None:
    own = ["training.iterations=2", "training.prompts_per_iteration=2", "training.group_size=6"]
    own += ["algorithm.kl_weight=0.1", "algorithm.reference=anchor", "training.optimizer.schedule=constant"]
    run = small_run("tiny_sd3/nft", tmp_path, *own, "training.snapshots={anchor: {decay: 0}}")
    run.train()
    first, second = run.metrics.read()
    assert first["policy/gradient_norm"] > 0
    # the policy has moved, and the reference with it
    assert first["matching/kl"] == second["matching/kl"] == 0


@pytest.mark.parametrize("name", ["nft", "awm", "dgpo", "crd"])
def test_groups_of_a_prompt_that_is_drawn_twice_can_be_pooled(name: str, tmp_path: Path) -> None:
    """As in the authors' statistics, which are kept by the prompt (flow_grpo/stat_tracking.py of DiffusionNFT)."""
    rewards = torch.tensor([0.0, 1.0, 0.5, 0.5, 1.0, 3.0])
    own = ["training.group_size=2", "algorithm.pool_prompts=true", "algorithm.advantage={name: grpo}"]
    run = trainer(name, tmp_path, *own)
    run.scorer.reward = as_reward(lambda *_: rewards.tolist())
    batch = Batch(
        prompts=["a", "a", "b", "b", "a", "a"],
        metadata=[{}] * 6,
        group=[0, 0, 1, 1, 2, 2],
        seeds=list(range(6)),
        noise_seeds=list(range(6)),
        iteration=0,
        picks=[7, 7, -1, -1, 7, 7],
    )
    experience: Any = run.collect(Draw(run.sampler, run.scorer, batch))
    pooled = rewards[[0, 1, 4, 5]]
    expected = torch.zeros(6)
    expected[[0, 1, 4, 5]] = (pooled - pooled.mean()) / (pooled.std(correction=0) + 1e-4)
    torch.testing.assert_close(experience.advantage, expected)
    # a group is still one item of the methods that compare its members
    losses, _ = run.algorithm.losses(run.policy, experience, experience.items)
    assert losses.isfinite().all()
