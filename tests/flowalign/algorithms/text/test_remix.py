"""ReMix: its schedule, its loss written out, its new base, and shares of earlier groups."""

from pathlib import Path

import pytest
import torch

from flowalign.algorithms.text.remix import convex_share
from flowalign.core.divergences import sampled_kl
from flowalign.core.losses import ppo
from flowalign.core.record import Actions
from tests.flowalign.small_run import small_run


def test_the_base_counts_less_in_steps_of_a_tenth() -> None:
    made = [convex_share(t, 50, 10, 0.5) for t in (0, 50, 51, 60, 61, 100, 101, 500)]
    assert made == pytest.approx([1, 1, 0.9, 0.9, 0.8, 0.5, 0.5, 0.5])


def test_old_groups_take_places_and_two_divergences_hold_the_policy(tmp_path: Path) -> None:
    run = small_run(
        "tiny_lm/grpo",
        tmp_path,
        "algorithm={name: remix, kl_weight: 0.5, hold: 0, every: 1, reincarnate: 2}",
        "data.replay={groups: 8, share: 0.5, until: 2}",
        "training.group_size=4",
        "training.micro_batch_size=16",
        "training.iterations=3",
    )
    policy = run.policy
    replayed = []
    for iteration in range(3):
        experience = run.collect(run.groups.draw(iteration))
        replayed.append(experience.metrics["groups/replayed"])
        rows, rollout = torch.arange(16), experience.rollout
        with torch.no_grad():
            now, _ = policy.log_probs(rollout, rows)
            with policy.snapshot("base"):
                base, _ = policy.log_probs(rollout, rows)
        actions = Actions(
            log_prob=now,
            old_log_prob=rollout.log_prob,
            advantage=experience.advantage,
            mask=rollout.mask,
            group=experience.group,
            reward=experience.reward,
        )
        share = max(1 - 0.1 * iteration, 0.5)
        held = share * sampled_kl(now, base, "k3") + (1 - share) * sampled_kl(now, rollout.log_prob, "k3")
        each = ppo(actions)[0] * experience.loss_weight + 0.5 * held * experience.divergence_weight
        made, _ = run.algorithm.losses(policy, experience, experience.items)
        torch.testing.assert_close(made.detach(), each.where(rollout.mask, 0).sum(1), atol=1e-4, rtol=1e-4)
        with torch.no_grad():
            for parameter in run.learner.parameters.values():
                parameter.add_(0.01 * torch.randn_like(parameter))
        moved = (base - now).abs().max()
        # at the iteration 2 the base became the policy of then
        assert (moved < 1e-4) == (iteration in (0, 2))
    assert replayed[0] == 0 and replayed[1] >= 1 and replayed[2] == 0
