"""Losses: closed forms, the authors' rules literally, and the gradients' directions."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flowalign.core import losses
from flowalign.core.aggregation import Aggregation, action_weights
from flowalign.core.losses import clip_fraction, clipped_policy_loss
from flowalign.core.record import Actions
from flowalign.core.step_losses import dppo_mask, guard_log_ratio, noise_weight
from samplers import flow_sde, step_std
from samplers.kernels import gaussian_log_prob


def aggregated(losses: Tensor, mask: Tensor, aggregation: Aggregation, length: int | None = None) -> Tensor:
    return (losses.where(mask, 0) * action_weights(mask, aggregation, length)).sum()


def test_the_clipped_loss_is_that_of_a_loop() -> None:
    log_prob, old, advantage = torch.randn(5, 4) * 0.3, torch.randn(5, 4) * 0.3, torch.randn(5, 4)
    low, high = 0.1, 0.25
    expected, cut = torch.zeros(5, 4), torch.zeros(5, 4)
    for b in range(5):
        for t in range(4):
            a = advantage[b, t].item()
            ratio = math.exp(log_prob[b, t].item() - old[b, t].item())
            expected[b, t] = -min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a)
            cut[b, t] = (a > 0 and ratio > 1 + high) or (a < 0 and ratio < 1 - low)
    torch.testing.assert_close(clipped_policy_loss(log_prob, old, advantage, low, high), expected)
    assert torch.equal(clip_fraction(log_prob, old, advantage, low, high), cut)
    assert 0 < cut.mean() < 1


def test_the_clip_fraction_counts_the_actions_without_gradient() -> None:
    log_prob = (torch.randn(200) * 0.3).requires_grad_()
    old, advantage = torch.zeros(200), torch.randn(200)
    clipped_policy_loss(log_prob, old, advantage, 0.1, 0.2).sum().backward()
    assert torch.equal(log_prob.grad == 0, clip_fraction(log_prob, old, advantage, 0.1, 0.2).bool())


def test_on_policy_the_loss_has_the_gradient_of_plain_policy_gradient() -> None:
    log_prob, advantage = torch.randn(6, requires_grad=True), torch.randn(6)
    clipped_policy_loss(log_prob, log_prob.detach(), advantage, 1e-4, 1e-4).sum().backward()
    torch.testing.assert_close(log_prob.grad, -advantage)


SHAPE = (4, 6, 6)


def test_dual_clip_by_the_rule_one_number_at_a_time() -> None:
    log_ratio, advantage = torch.randn(500) * 2, torch.randn(500)
    made = clipped_policy_loss(log_ratio, torch.zeros(500), advantage, 0.2, 0.3, dual=3.0)
    for lr, a, loss in zip(log_ratio.tolist(), advantage.tolist(), made.tolist()):
        r = math.exp(lr)
        surrogate = min(r * a, min(max(r, 0.8), 1.3) * a)
        expected = -max(surrogate, 3 * a) if a < 0 else -surrogate
        assert loss == pytest.approx(expected, rel=1e-5)


def test_dual_clip_takes_the_gradient_of_bad_actions_far_away() -> None:
    log_ratio = torch.log(torch.tensor([0.5, 1.0, 2.9, 3.1, 100.0])).requires_grad_()
    advantage = torch.full((5,), -1.0)
    inputs = (torch.zeros(5), advantage, 0.2, 0.2)
    clipped_policy_loss(log_ratio, *inputs, 3.0).sum().backward()
    assert (log_ratio.grad != 0).tolist() == [False, True, True, False, False]
    assert clip_fraction(log_ratio, *inputs, 3.0).tolist() == [1, 0, 0, 1, 1]
    plain = clipped_policy_loss(log_ratio, *inputs)
    assert torch.equal(clipped_policy_loss(log_ratio, *inputs, 1e9), plain)
    good = clipped_policy_loss(log_ratio, torch.zeros(5), -advantage, 0.2, 0.2, 3.0)
    assert torch.equal(good, clipped_policy_loss(log_ratio, torch.zeros(5), -advantage, 0.2, 0.2))


def gaussians(n: int = 6, apart: float = 0.02) -> dict[str, Tensor]:
    """N transitions of an old and a present policy that share std, and the samples the old one drew."""
    mean_old, std = torch.randn(n, *SHAPE), torch.linspace(0.05, 0.4, n).view(n, 1, 1, 1)
    noise = torch.randn(n, *SHAPE)
    mean = mean_old + apart * torch.randn(n, *SHAPE)
    next = mean_old + std * noise
    return {
        "mean": mean,
        "mean_old": mean_old,
        "std": std,
        "noise": noise,
        "next": next,
        "log_prob": gaussian_log_prob(next, mean, std),
        "old_log_prob": gaussian_log_prob(next, mean_old, std),
    }


def guard(g: dict[str, Tensor]) -> Tensor:
    return guard_log_ratio(*(g[k] for k in ("log_prob", "old_log_prob", "mean", "mean_old", "std")))


def test_the_guarded_log_ratio_is_its_closed_form() -> None:
    """mean(noise * (mean - mean_old)): nothing of the step's std is left."""
    g = gaussians()
    expected = (g["noise"] * (g["mean"] - g["mean_old"])).flatten(1).mean(1)
    torch.testing.assert_close(guard(g), expected, atol=1e-6, rtol=1e-4)


def test_the_guarded_log_ratio_has_mean_zero_and_one_spread_at_all_steps() -> None:
    plain, guarded = [], []
    for _ in range(300):
        g = gaussians(apart=0.1)
        plain.append(g["log_prob"] - g["old_log_prob"])
        guarded.append(guard(g))
    plain, guarded = torch.stack(plain), torch.stack(guarded)
    assert (plain.mean(0)[0] < -1) and plain.std(0)[0] > 5 * plain.std(0)[-1]
    assert guarded.mean(0).abs().max() < 3 * guarded.std() / math.sqrt(300) + 1e-3
    assert guarded.std(0).max() < 1.3 * guarded.std(0).min()


def test_the_guarded_ratio_is_one_before_any_update_and_its_gradient_follows_the_advantage() -> None:
    g = gaussians(apart=0.0)
    mean = g["mean_old"].clone().requires_grad_()
    g |= {"mean": mean, "log_prob": gaussian_log_prob(g["next"], mean, g["std"])}
    log_ratio = guard(g)
    torch.testing.assert_close(log_ratio, torch.zeros(6), atol=1e-7, rtol=0)
    advantage = torch.tensor([1.0, -1.0] * 3)
    clipped_policy_loss(log_ratio, torch.zeros(6), advantage, 1e-5, 1e-5).sum().backward()
    # descent moves the mean to the sample where A > 0, away from it where A < 0
    towards = (-mean.grad * g["noise"]).flatten(1).sum(1)
    assert torch.equal(towards.sign(), advantage)


def test_dppo_drops_what_moves_away_and_is_too_far() -> None:
    cases = [
        # ratio, advantage, divergence, kept
        (1.1, 1.0, 2e-5, 0),
        (1.1, 1.0, 1e-5, 0),
        (1.1, 1.0, 0.5e-5, 1),
        (0.9, 1.0, 2e-5, 1),
        (0.9, -1.0, 2e-5, 0),
        (1.1, -1.0, 2e-5, 1),
        (1.0, 1.0, 2e-5, 1),
        (1.1, 0.0, 2e-5, 1),
    ]
    ratio, advantage, divergence, kept = torch.tensor(cases).unbind(1)
    ratio.requires_grad_()
    mask = dppo_mask(ratio, advantage, divergence, 1e-5)
    assert torch.equal(mask, kept) and not mask.requires_grad
    (-mask * advantage * ratio).sum().backward()
    torch.testing.assert_close(ratio.grad, -kept * advantage)


def test_noise_weights_are_tempflows() -> None:
    sigmas, eta = (
        torch.linspace(1, 0, 7),
        torch.tensor([[0.7, 0.7, 0.7, 0.7, 0.7, 0.0], [0.0, 0.7, 0.0, 0.7, 0.0, 0.0]]),
    )
    weight = noise_weight(step_std(flow_sde, sigmas, eta), eta > 0)
    for row in range(2):
        stds = {}
        for k in range(6):
            if eta[row, k] > 0:
                s, s_next = sigmas[k].item(), sigmas[k + 1].item()
                stds[k] = 0.7 * math.sqrt(s / (1 - (s_next if k == 0 else s))) * math.sqrt(s - s_next)
        average = sum(stds.values()) / len(stds)
        expected = torch.tensor([stds.get(k, 0.0) / average for k in range(6)])
        torch.testing.assert_close(weight[row], expected, atol=1e-5, rtol=1e-4)
        assert weight[row, eta[row] > 0].mean().item() == pytest.approx(1, rel=1e-5)


GROUP = torch.tensor([0, 0, 0, 1, 1, 1])


MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0]]).bool()


def scored(on_policy: bool = False) -> Actions:
    old = -torch.rand(6, 4)
    log_prob = old.clone() if on_policy else old + 0.2 * torch.randn(6, 4)
    return Actions(
        log_prob=log_prob.requires_grad_(),
        old_log_prob=old,
        advantage=torch.randn(6, 1).expand(6, 4),
        mask=MASK,
        group=GROUP,
        reward=torch.tensor([1.0, 0, 0, 1, 1, 0]),
    )


@pytest.mark.parametrize("name", ["ppo", "gspo", "cispo", "reinforce", "dro", "sapo", "gmpo", "luspo", "vespo", "dppo"])
def test_on_the_weights_that_sampled_all_have_one_gradient(name: str) -> None:
    actions = scored(on_policy=True)
    aggregated(getattr(losses, name)(actions)[0], MASK, "sequence").backward()
    expected = -(actions.advantage * MASK) / MASK.sum(1, keepdim=True) / 6
    torch.testing.assert_close(actions.log_prob.grad, expected)


def test_gspo_has_the_rows_ratio() -> None:
    actions = scored()
    made, _ = losses.gspo(actions, clip_range=10, clip_range_high=10)
    for b in range(6):
        drawn = [t for t in range(4) if MASK[b, t]]
        ratio = math.exp(sum((actions.log_prob - actions.old_log_prob)[b, t].item() for t in drawn) / len(drawn))
        for t in drawn:
            assert made[b, t].item() == pytest.approx(-ratio * actions.advantage[b, t].item(), rel=1e-5)


def test_cispo_never_loses_a_gradient() -> None:
    actions = scored()
    losses.cispo(actions, clip_range=0.01, clip_range_high=0.01)[0].sum().backward()
    assert (actions.log_prob.grad != 0).all()


def literal_rho(actions: Actions) -> Tensor:
    return torch.stack([(actions.log_prob - actions.old_log_prob)[b][MASK[b]].sum() for b in range(6)])


def test_reg_grpo_is_a_regression_of_the_advantage() -> None:
    actions = scored()
    rho = literal_rho(actions)
    centred = torch.cat([part - part.mean() for part in rho.split(3)])
    expected = (actions.advantage[:, 0] - 2.0 * centred) ** 2
    torch.testing.assert_close(losses.reg_grpo(actions, scale=2.0)[0], expected[:, None].expand(6, 4))


def test_reg_grpo_is_the_correlation_of_advantages_and_log_ratios() -> None:
    """Of a group whose advantages have mean 0 and deviation 1 the mean loss is 2 (1 - r), r as numpy has it."""
    actions = scored()
    parts = [(part - part.mean()) / part.std(unbiased=False) for part in actions.advantage[:, 0].split(3)]
    actions.advantage = torch.cat(parts)[:, None].expand(6, 4)
    made = losses.reg_grpo(actions, eps=1e-6)[0][:, 0].split(3)
    for loss, advantage, rho in zip(made, parts, literal_rho(actions).detach().split(3), strict=True):
        r = np.corrcoef(advantage, rho)[0, 1]
        assert loss.mean().item() == pytest.approx(2 * (1 - r), abs=1e-5)


@pytest.mark.parametrize(("settings", "factor"), [({"scale": 3.0}, 3.0), ({"eps": 0.5}, 2.0)])
def test_reg_grpo_starts_along_the_policy_gradient(settings: dict[str, float], factor: float) -> None:
    actions = scored(on_policy=True)
    actions.advantage = torch.tensor([1.0, 0.5, -1.5, 0.2, 0.4, -0.6])[:, None].expand(6, 4)
    aggregated(losses.reg_grpo(actions, **settings)[0], MASK, "sequence").backward()
    # the advantages of a group add up to 0, so centring changes nothing
    torch.testing.assert_close(actions.log_prob.grad, -2 * factor * actions.advantage * MASK / 6)


def test_pacs_is_the_cross_entropy_of_leave_one_out_scores() -> None:
    actions = scored()
    rho = 3 * literal_rho(actions)
    score = torch.stack(
        [rho[b] - torch.stack([rho[c] for c in range(6) if GROUP[c] == GROUP[b] and c != b]).mean() for b in range(6)]
    )
    expected = F.binary_cross_entropy_with_logits(score, actions.reward, reduction="none")
    made = losses.pacs(actions, beta=3.0)[0][:, 0]
    torch.testing.assert_close(made, expected)
    weight = torch.tensor([1.5, 0.75, 0.75, 0.75, 0.75, 1.5])
    torch.testing.assert_close(losses.pacs(actions, beta=3.0, weighting="balanced")[0][:, 0], weight * expected)


def test_without_a_clip_nothing_is_clipped() -> None:
    actions = scored()
    made, metrics = losses.ppo(actions, clip_range=None)
    torch.testing.assert_close(made, -actions.advantage * (actions.log_prob - actions.old_log_prob).exp())
    assert not metrics["policy/clip_fraction"].any()
    assert losses.ppo(actions, clip_range=0.01)[1]["policy/clip_fraction"].any()


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_dppo_cuts_what_moves_the_distribution_too_far(divergence: str) -> None:
    """verl's dppo_tv and dppo_kl, one action at a time; the KL as torch.distributions has it."""
    actions = scored()
    actions.log_prob, actions.old_log_prob = actions.log_prob - 1, actions.old_log_prob - 1
    made, metrics = losses.dppo(actions, divergence=divergence, threshold=0.02, threshold_high=0.01, largest=1.2)
    for b in range(6):
        for t in range(4):
            now, old = actions.log_prob[b, t].exp().item(), actions.old_log_prob[b, t].exp().item()
            gap = abs(now - old)
            if divergence == "kl":
                before, after = (torch.distributions.Bernoulli(torch.tensor(p)) for p in (old, now))
                gap = torch.distributions.kl_divergence(before, after).item()
            a = actions.advantage[b, t].item()
            cut = (a > 0 and now > old and gap > 0.01) or (a < 0 and now < old and gap > 0.02)
            expected = 0.0 if cut else -min(now / old, 1.2) * a * actions.log_prob[b, t].item()
            assert metrics["policy/clip_fraction"][b, t] == cut
            assert made[b, t].item() == pytest.approx(expected, abs=1e-6)
    assert 0 < metrics["policy/clip_fraction"].mean() < 1


NAMES = ["ppo", "gspo", "cispo", "reg_grpo", "pacs", "reinforce"]
NEWER = ["sapo", "gmpo", "luspo", "vespo", "dppo", "clip_cov", "kl_cov"]


@pytest.mark.parametrize("name", NAMES + NEWER)
@pytest.mark.parametrize("gap", [-200.0, 200.0])
def test_no_ratio_is_infinite(name: str, gap: float) -> None:
    """exp(89) is, and times an advantage of 0 it is no number."""
    log_prob = torch.full((4, 3), gap - 1).requires_grad_()
    mask, group = torch.ones(4, 3).bool(), torch.tensor([0, 0, 1, 1])
    advantage = torch.tensor([1.0, -1.0, 0.0, 0.0])[:, None].expand(4, 3)
    actions = Actions(
        log_prob=log_prob,
        old_log_prob=torch.full((4, 3), -1.0),
        advantage=advantage,
        mask=mask,
        group=group,
        reward=torch.tensor([1.0, 0, 1, 1]),
    )
    made = losses.LOSSES[name](actions)[0]
    made.sum().backward()
    assert made.isfinite().all() and actions.ratio.isfinite().all()
    assert log_prob.grad is not None and log_prob.grad.isfinite().all()


def test_losses_of_rows_are_averaged_over_rows() -> None:
    """PACS' loss is the mean of the rows' cross-entropies, however long they are, as in the authors' code."""
    of_rows = {name for name, loss in losses.LOSSES.items() if getattr(loss, "aggregation", "") == "sequence"}
    assert of_rows == {"gspo", "pacs", "reg_grpo", "sapo", "gmpo"}
    log_prob, old, reward = torch.randn(4, 3), torch.randn(4, 3), torch.tensor([1.0, 0, 0, 1])
    mask, group = torch.arange(3) < torch.tensor([3, 1, 2, 3])[:, None], torch.tensor([0, 0, 1, 1])
    actions = Actions(
        log_prob=log_prob, old_log_prob=old, advantage=torch.zeros(4, 3), mask=mask, group=group, reward=reward
    )
    score = ((log_prob - old) * mask).sum(1)
    others = score.view(2, 2).flip(1).flatten()
    expected = F.binary_cross_entropy_with_logits(score - others, reward)
    made = aggregated(losses.pacs(actions)[0], mask, losses.pacs.aggregation)
    torch.testing.assert_close(made, expected)


def test_dro_is_reinforce_held_by_a_square() -> None:
    actions = scored()
    losses.dro(actions, beta=0.3)[0].sum().backward()
    expected = -actions.advantage + 0.3 * (actions.log_prob - actions.old_log_prob).detach()
    torch.testing.assert_close(actions.log_prob.grad, expected)
