"""GRPO-Guard's ratio and a share of the steps, which any method of the family may take."""

from pathlib import Path

import torch

from flowalign.actors.draw import Draw
from tests.flowalign.small_run import small_run


def test_the_guarded_loss_is_the_one_that_its_authors_write_out(tmp_path: Path) -> None:
    """As in Pref-GRPO's train_flux.py, 751-784 of 3e787f6: the loss over dt, the KL beside it."""
    own = ["algorithm.ratio=guard", "algorithm.step_fraction=0.5", "algorithm.loss.clip_range=1e-6"]
    run = small_run("tiny_sd3/flow_grpo", tmp_path, *own, "training.prompts_per_iteration=2", "algorithm.kl_weight=0.1")
    algorithm, policy = run.algorithm, run.policy
    batch = run.groups.draw(0).batch
    experience = algorithm.collect(run.actor, Draw(run.actor, batch))
    trajectory, taught = experience.rollout.trajectory, experience.advantage.ne(0)
    steps = int(trajectory.mask[0].sum())
    groups_with_spread = taught.any(1)
    assert groups_with_spread.any() and set(taught[groups_with_spread].sum(1).tolist()) == {steps // 2}
    # the mean over all steps is the one over those that are learned from
    algorithm.settings = algorithm.settings.model_copy(update={"step_fraction": 1.0})
    whole = algorithm.collect(run.actor, Draw(run.actor, batch)).advantage
    torch.testing.assert_close(experience.advantage.sum(1), whole.sum(1))
    with torch.no_grad():
        for parameter in run.learner.parameters.values():
            parameter.add_(0.02 * torch.randn_like(parameter))
    items = experience.items
    loss, metrics = algorithm.losses(policy, experience, items)
    made = algorithm.actions(policy, experience, items)
    dt, std = -made.dt, made.transition.std.flatten()
    bias = (made.transition.mean - made.mean_old).square().flatten(1).mean(1) / (2 * std**2)
    ratio = ((made.log_prob - made.old_log_prob + bias) * std).exp()
    plain, clipped = -made.advantage * ratio, -made.advantage * ratio.clamp(1 - 1e-6, 1 + 1e-6)
    expected = torch.maximum(plain, clipped) / dt + 0.1 * metrics["policy/kl"]
    assert (ratio - 1).abs().max() > 1e-6
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
