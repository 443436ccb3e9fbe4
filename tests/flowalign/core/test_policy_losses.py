"""Losses, aggregation, corrections and guidance against literal versions."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flowalign.core import guidance, policy_losses
from flowalign.core.aggregation import aggregate
from flowalign.core.divergences import sampled_kl
from flowalign.core.off_policy import correction
from flowalign.core.record import ScoredTokens

GROUP = torch.tensor([0, 0, 0, 1, 1, 1])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0]]).bool()


def scored(on_policy: bool = False) -> ScoredTokens:
    old = -torch.rand(6, 4)
    log_prob = old.clone() if on_policy else old + 0.2 * torch.randn(6, 4)
    return ScoredTokens(
        log_prob=log_prob.requires_grad_(),
        old_log_prob=old,
        advantage=torch.randn(6, 1).expand(6, 4),
        mask=MASK,
        group=GROUP,
        reward=torch.tensor([1.0, 0, 0, 1, 1, 0]),
    )


@pytest.mark.parametrize("name", ["ppo", "gspo", "cispo", "reinforce"])
def test_on_the_weights_that_sampled_all_have_one_gradient(name: str) -> None:
    actions = scored(on_policy=True)
    aggregate(getattr(policy_losses, name)(actions), MASK, "sequence").backward()
    expected = -(actions.advantage * MASK) / MASK.sum(1, keepdim=True) / 6
    torch.testing.assert_close(actions.log_prob.grad, expected)


def test_gspo_has_the_rows_ratio() -> None:
    actions = scored()
    losses = policy_losses.gspo(actions, clip_range=10, clip_range_high=10)
    for b in range(6):
        drawn = [t for t in range(4) if MASK[b, t]]
        ratio = math.exp(sum((actions.log_prob - actions.old_log_prob)[b, t].item() for t in drawn) / len(drawn))
        for t in drawn:
            assert losses[b, t].item() == pytest.approx(-ratio * actions.advantage[b, t].item(), rel=1e-5)


def test_cispo_never_loses_a_gradient() -> None:
    actions = scored()
    policy_losses.cispo(actions, clip_range=0.01, clip_range_high=0.01).sum().backward()
    assert (actions.log_prob.grad != 0).all()


def literal_rho(actions: ScoredTokens) -> Tensor:
    return torch.stack([(actions.log_prob - actions.old_log_prob)[b][MASK[b]].sum() for b in range(6)])


def test_reg_grpo_is_a_regression_of_the_advantage() -> None:
    actions = scored()
    rho = literal_rho(actions)
    centred = torch.cat([part - part.mean() for part in rho.split(3)])
    expected = (actions.advantage[:, 0] - 2.0 * centred) ** 2
    torch.testing.assert_close(policy_losses.reg_grpo(actions, scale=2.0), expected[:, None].expand(6, 4))


def test_reg_grpo_starts_along_the_policy_gradient() -> None:
    actions = scored(on_policy=True)
    actions.advantage = torch.tensor([1.0, 0.5, -1.5, 0.2, 0.4, -0.6])[:, None].expand(6, 4)
    aggregate(policy_losses.reg_grpo(actions), MASK, "sequence").backward()
    # the advantages of a group add up to 0, so centring changes nothing
    torch.testing.assert_close(actions.log_prob.grad, -2 * actions.advantage * MASK / 6)


def test_pacs_is_the_cross_entropy_of_leave_one_out_scores() -> None:
    actions = scored()
    rho = 3 * literal_rho(actions)
    score = torch.stack(
        [rho[b] - torch.stack([rho[c] for c in range(6) if GROUP[c] == GROUP[b] and c != b]).mean() for b in range(6)]
    )
    expected = F.binary_cross_entropy_with_logits(score, actions.reward, reduction="none")
    made = policy_losses.pacs(actions, beta=3.0)[:, 0]
    torch.testing.assert_close(made, expected)
    weight = torch.tensor([1.5, 0.75, 0.75, 0.75, 0.75, 1.5])
    torch.testing.assert_close(policy_losses.pacs(actions, beta=3.0, weighting="balanced")[:, 0], weight * expected)


def test_aggregations_by_loops() -> None:
    losses = torch.randn(6, 4)
    rows = [[losses[b, t].item() for t in range(4) if MASK[b, t]] for b in range(6)]
    everything = [x for row in rows for x in row]
    expected = {
        "token": sum(everything) / len(everything),
        "sequence": sum(sum(row) / len(row) for row in rows) / 6,
        "sum": sum(everything) / 6,
        "constant": sum(everything) / 6 / 9,
    }
    for name, value in expected.items():
        assert aggregate(losses, MASK, name, length=9).item() == pytest.approx(value, rel=1e-5)


def test_an_empty_row_weighs_nothing_but_counts() -> None:
    mask = torch.tensor([[True, True], [False, False]])
    losses = torch.tensor([[1.0, 3.0], [torch.nan, torch.inf]])
    assert aggregate(losses, mask, "sequence").item() == 1.0
    assert aggregate(losses, mask, "token").item() == 2.0


def test_kl_estimates_have_the_expected_values_and_gradients() -> None:
    """Over all actions of a categorical distribution, weighted by their probability: k1 and k3 give the KL, k2 its
    gradient."""
    logits, reference = torch.randn(7, requires_grad=True), torch.randn(7)
    log_p, log_q = logits.log_softmax(0), reference.log_softmax(0)
    exact = (log_p.exp() * (log_p - log_q)).sum()
    (expected,) = torch.autograd.grad(exact, logits, retain_graph=True)
    for estimator in ("k1", "k3"):
        mean = (log_p.exp() * sampled_kl(log_p, log_q, estimator)).sum()
        assert mean.item() == pytest.approx(exact.item(), abs=1e-6)
    drawn = (log_p.exp().detach() * sampled_kl(log_p, log_q, "k2")).sum()
    torch.testing.assert_close(torch.autograd.grad(drawn, logits, retain_graph=True)[0], expected)
    assert (sampled_kl(log_p, log_q, "k3") >= 0).all()


def test_off_policy_weights_by_loops() -> None:
    old, sampler = -torch.rand(6, 4) * 2, -torch.rand(6, 4) * 2
    token = (old - sampler).exp()
    made = correction(old, sampler, MASK, largest=1.3)
    torch.testing.assert_close(made[MASK], token.clamp(max=1.3)[MASK])
    masked = correction(old, sampler, MASK, rule="mask", largest=1.3, smallest=0.7)
    expected = torch.where((token >= 0.7) & (token <= 1.3), token, 0)
    torch.testing.assert_close(masked[MASK], expected[MASK])
    row = torch.stack([token[b][MASK[b]].prod() for b in range(6)])[:, None]
    torch.testing.assert_close(correction(old, sampler, MASK, level="sequence", largest=1.5), row.clamp(max=1.5))
    assert torch.equal(correction(old, old, MASK), torch.ones(6, 4))


def test_distillation_as_reward_and_as_loss() -> None:
    log_prob, teacher, reference = -torch.rand(3, 4), -torch.rand(3, 4), -torch.rand(3, 4)
    plain = guidance.distillation_advantage(log_prob, teacher)
    torch.testing.assert_close(plain, teacher - log_prob)
    torch.testing.assert_close(guidance.distillation_advantage(log_prob, teacher, reference), plain)
    beyond = guidance.distillation_advantage(log_prob, teacher, reference, 1.25)
    torch.testing.assert_close(beyond, plain + 0.25 * (teacher - reference))
    guided = guidance.distillation_loss(log_prob, teacher, torch.tensor([1.0, 0.0, 0.5]))
    assert not guided[0].any()
    torch.testing.assert_close(guided[1:], (log_prob - teacher)[1:] ** 2 / 2)


def test_imitation_is_strongest_where_the_policy_is_undecided() -> None:
    log_prob = torch.tensor([0.99, 0.5, 0.01]).log().requires_grad_()
    guidance.imitation_loss(log_prob, "chord").sum().backward()
    torch.testing.assert_close(log_prob.grad, -torch.tensor([0.99 * 0.01, 0.25, 0.01 * 0.99]))
    assert torch.equal(guidance.imitation_loss(log_prob), -log_prob)


def test_schedules_of_demonstrations() -> None:
    shares = [guidance.imitation_share(step, 2, 4, 0.8, 0.2) for step in range(8)]
    assert shares == pytest.approx([0, 0.4, 0.8, 0.8 - 0.6 * (1 - math.cos(math.pi / 4)) / 2, 0.5, 0.2878679, 0.2, 0.2])
    assert [guidance.prefix_share(d) for d in (0, 0.5, 1)] == pytest.approx([0.95, 0.5, 0.05])
    assert guidance.annealed(0.25, 4.0, 0.0) == 3.0


def test_the_prefix_learns_where_it_is_uncertain() -> None:
    entropy = torch.tensor([[0.1, 0.9, 0.5, 0.2, 9.0], [1.0, 2.0, 3.0, 4.0, 5.0]])
    prefix = torch.tensor([[1, 1, 1, 1, 0], [0, 0, 0, 0, 0]]).bool()
    assert guidance.uncertain_prefix(entropy, prefix, 0.5).tolist() == [[False, True, True, False, False], [False] * 5]


def test_which_prompts_need_a_demonstration_and_when_it_stops_to_matter() -> None:
    reward, group = torch.tensor([0.0, 0, 1, 0, 0, 0.5]), torch.tensor([3, 3, 1, 1, 2, 2])
    assert guidance.needs_demonstration(reward, group).tolist() == [True, True, False, False, False, False]
    shown = torch.tensor([False, True, False, True, False, True])
    reward = torch.tensor([0.0, 1, 1, 1, 0.4, 0.5])
    assert guidance.demonstrated_reward(reward, shown, group).tolist() == [0, 1, 1, 1, pytest.approx(0.4), 0.5]
