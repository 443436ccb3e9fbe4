"""What the first update of each matching method does: at policy = old = reference, and what rewards may not change."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from flowalign.algorithms.matching.advantage import AdvantageMatching
from flowalign.algorithms.matching.base import Points
from flowalign.config import load, recipe
from flowalign.core.record import Record
from flowalign.errors import ConfigError
from tests.flowalign.algorithms.matching.made_points import gradient, method, points

GROUP = 3
SIGMA = torch.tensor([0.9, 0.9, 0.9, 0.4, 0.4, 0.4])


def drawn(size: int = 1, apart: float = 0.0, advantage: Tensor | None = None, count: int = 6) -> Points:
    """Random samples, noise, velocities and advantages, the policy so far from the old weights and the start's."""
    generator = torch.Generator().manual_seed(3)
    x0, noise, velocity, off, other = torch.randn(5, count, 2, 3, 3, generator=generator)
    own = torch.randn(count, generator=generator)
    velocity.requires_grad_()
    old, reference = (velocity.detach() + apart * moved for moved in (off, other))
    advantage = own if advantage is None else advantage
    return points(velocity, x0, noise, SIGMA[:count], advantage, old, reference, size)


def wide(values: Tensor) -> Tensor:
    return values.view(-1, 1, 1, 1)


def grad_e(at: Points) -> Tensor:
    """[N, ...] of a sample's error, the mean over elements of (v - v_t)^2."""
    off = at.velocity.detach() - at.noised.velocity
    return 2 * off / off[0].numel()


def advantage_times(scale: float, more: float = 0.0) -> Any:
    return lambda at: wide(scale * at.advantage + more) * grad_e(at)


def ghuber(at: Points) -> Tensor:
    return wide(at.noised.sigma * at.error.detach() ** -0.75 * at.advantage / 5) * grad_e(at)


def adaptive(at: Points) -> Tensor:
    s, off = at.noised.sigma, at.velocity.detach() - at.noised.velocity
    return wide(s**2 / (s * off.abs().flatten(1).mean(1)) * at.advantage) * grad_e(at)


def centred(at: Points) -> Tensor:
    of_groups = at.advantage.view(-1, GROUP)
    return wide((of_groups - of_groups.mean(1, keepdim=True)).flatten()) * grad_e(at)


def halves(at: Points) -> Tensor:
    """The chosen ones first."""
    sign = torch.tensor([1.0, 1, 1, -1, -1, -1])
    return 100 / 4 * wide(sign) * grad_e(at)


def of_pairs(more: float = 0.0, weighting: str = "uniform") -> Any:
    """Every two of an item, the better one matched and the other one unmatched, and the mean over the item's pairs."""

    def row(at: Points) -> Tensor:
        sign = torch.zeros(len(at.reward))
        for item in torch.arange(len(at.reward)).view(-1, at.size):
            twos = list(itertools.combinations(item.tolist(), 2))
            for i, j in twos:
                if at.reward[i] == at.reward[j]:
                    continue
                better, worse = (i, j) if at.reward[i] > at.reward[j] else (j, i)
                sign[better] += 1 / len(twos)
                sign[worse] -= 1 / len(twos)
        slope = at.noised.sigma * at.error.detach() ** -0.75 if weighting == "ghuber" else 1.0
        return wide(100 / 4 * sign * slope + more) * grad_e(at)

    return row


ROWS = [
    ("awm", {"weighting": "uniform"}, 1, advantage_times(1 / 5)),
    ("awm", {}, 1, ghuber),
    ("nft", {"adaptive": False}, 1, advantage_times(1)),
    ("nft", {"adaptive": False, "beta": 0.1}, 1, advantage_times(1)),
    ("nft", {"adaptive": False, "own_error_weight": 0.3}, 1, advantage_times(1, more=0.3)),
    ("nft", {"beta": 0.1}, 1, adaptive),
    ("crd", {"adaptive": False}, GROUP, centred),
    ("crd", {"adaptive": False, "beta": 0.3}, GROUP, centred),
    ("dgpo", {}, GROUP, advantage_times(1 / 2)),
    ("dgpo", {"beta": 3, "against": "old"}, GROUP, advantage_times(1 / 2)),
    ("dgpo", {"own_error_weight": 0.3}, GROUP, advantage_times(1 / 2, more=0.3)),
    ("rwr", {}, 1, advantage_times(1)),
    ("raft", {}, 1, grad_e),
    ("dpo", {"beta": 100}, 1, halves),
    ("online_dpo", {"beta": 100}, 2, of_pairs()),
    ("online_dpo", {"beta": 100, "own_error_weight": 0.3}, 2, of_pairs(more=0.3)),
    ("online_dpo", {"beta": 100, "pairs": "all"}, GROUP, of_pairs()),
    ("online_dpo", {"beta": 100, "pairs": "all", "weighting": "ghuber"}, GROUP, of_pairs(weighting="ghuber")),
]


@pytest.mark.parametrize(("name", "settings", "size", "row"), ROWS)
def test_the_first_gradient_is_the_tables(name: str, settings: dict[str, Any], size: int, row: Any) -> None:
    at = drawn(size)
    _, made = gradient(method(name, **settings), at)
    assert made.abs().max() > 0.01
    torch.testing.assert_close(made, row(at), atol=1e-5, rtol=1e-5)


def test_samples_of_one_reward_are_no_pair() -> None:
    at = drawn(GROUP, advantage=torch.tensor([0.5, 1.0, 1.0, 0.2, 0.2, 0.2]))
    _, made = gradient(method("online_dpo", pairs="all"), at)
    torch.testing.assert_close(made, of_pairs()(at))
    assert made[:3].abs().max() > 0.01 and not made[3:].any()


def record(reward: Tensor, **others: list[float]) -> Record:
    """Of `reward`, and of other rewards, which are not trained on."""
    one_action = torch.zeros(len(reward), 1)
    group = torch.arange(len(reward)) // GROUP
    return Record(
        log_prob=one_action,
        mask=one_action == 0,
        reward=reward,
        group=group,
        rewards=torch.stack([reward, *map(torch.tensor, others.values())]),
        reward_weights=torch.tensor([1.0] + [0.0] * len(others)),
        names=("main", *others),
    )


@pytest.mark.parametrize("beta", [1.0, 0.1])
def test_nfts_beta_is_the_weight_that_holds_the_velocity_to_the_old_one(beta: float) -> None:
    """Its gradient is the error's at the old velocity times the advantage, and a pull of 5 beta."""
    at = drawn(apart=0.3)
    assert at.old is not None
    moved = at.velocity.detach() - at.old
    at_old = 2 * (at.old - at.noised.velocity) / moved[0].numel()
    expected = wide(at.advantage) * at_old + 5 * beta * 2 * moved / moved[0].numel()
    _, made = gradient(method("nft", adaptive=False, beta=beta, kl_weight=0), at)
    torch.testing.assert_close(made, expected)


ADVANTAGE_BASED = ["nft", "awm", "dgpo", "crd"]


@pytest.mark.parametrize("name", ADVANTAGE_BASED)
def test_equal_rewards_teach_nothing_at_first_and_a_constant_changes_nothing(name: str) -> None:
    algorithm = method(name)
    assert isinstance(algorithm, AdvantageMatching)
    size = GROUP if algorithm.whole_groups else 1
    credit = algorithm.credit(record(torch.tensor([0.7] * 3 + [0.2] * 3)))
    _, made = gradient(algorithm, drawn(size, advantage=credit))
    assert made.abs().max() < 1e-6

    rewards = torch.tensor([0.5, 0.25, 1.0, 0.0, 0.0, 0.75])
    credits = [algorithm.credit(record(rewards + constant)) for constant in (0.0, 2.0)]
    first, shifted = (gradient(algorithm, drawn(size, apart=0.3, advantage=credit))[1] for credit in credits)
    assert first.abs().max() > 0.01
    torch.testing.assert_close(first, shifted, atol=1e-5, rtol=1e-5)


def test_dgpo_with_a_pair_is_dpo() -> None:
    """One group of a good and a bad sample, away from the start: DPO's gradient over beta / 2."""
    at = drawn(size=2, apart=0.2, advantage=torch.tensor([1.0, -1.0]), count=2)
    _, groups = gradient(method("dgpo", beta=5, clip_range=None, kl_weight=0), at)
    _, pairs = gradient(method("dpo", beta=5), at)
    assert pairs.abs().max() > 0.01
    torch.testing.assert_close(groups * 5 / 2, pairs, atol=1e-6, rtol=1e-5)


def test_dgpo_samples_from_the_close_average_after_its_switch() -> None:
    algorithm = method("dgpo", switch_after=200)
    seen = []
    for updates in (0, 200, 201):
        algorithm.updates = updates
        seen.append(algorithm.sampling_weights)
    assert seen == ["policy", "policy", "old"]


def test_groups_that_a_judge_cannot_tell_apart_or_likes_all_are_left_out() -> None:
    reward = torch.tensor([0.5, 0.5, 0.55, 0.2, 0.6, 0.9])
    assert method("nft").kept(record(reward)) is None
    apart = method("nft", least_std=0.05).kept(record(reward))
    assert apart.tolist() == [False] * 3 + [True] * 3
    poor = method("nft", largest_mean=0.55).kept(record(reward))
    assert poor.tolist() == [True] * 3 + [False] * 3


def test_gardos_gate_holds_back_what_other_rewards_do_not_confirm() -> None:
    reward = torch.tensor([0.9, 0.8, 0.1, 0.2, 0.3, 0.4])
    other = [0.1, 0.8, 0.2, 0.9, 0.5, 0.4]
    gate = {"by": ["other"], "share": 0.5}
    # ranks 5 4 0 1 2 3 and 0 4 1 5 3 2: of the three that lead by 5, 0 and 1 one is above their median
    held = method("nft", kl_gate=gate).held(record(reward, other=other))
    assert held.tolist() == [6, 0, 0, 0, 0, 0]
    # nothing stands out: everything is held back
    same = method("nft", kl_gate=gate).held(record(reward, other=reward.tolist()))
    assert same.tolist() == [1] * 6
    at = drawn(apart=0.3)
    at.held = held
    with_gate, without = (method("nft", kl_weight=weight).penalized(torch.zeros(6), at)[0] for weight in (0.5, 0))
    assert (with_gate - without).nonzero().tolist() == [[0]]


def test_gardos_advantage_favours_good_samples_that_are_unlike_the_others() -> None:
    reward = torch.tensor([1.0, 1.0, 0.4, 0.5, 0.5, 0.5])
    unlike = [0.3, 0.1, 0.2, 0.0, 0.0, 0.0]
    advantage = method("nft", advantage={"name": "diverse", "by": "unlike"}).credit(record(reward, unlike=unlike))
    torch.testing.assert_close(advantage, torch.tensor([0.2 * 1.5, 0.2 * 0.5, -0.4, 0, 0, 0]))


def test_rewards_and_snapshots_that_a_run_has_not_are_refused() -> None:
    for override, message in [
        ("algorithm.kl_gate={by: [aesthetics]}", "algorithm.kl_gate.by: no reward of this run is called 'aesthetics'"),
        ("algorithm.advantage={name: diverse}", "algorithm.advantage.by: no reward .* 'group_diversity'"),
        ("algorithm.reference=anchor", "algorithm.reference: no snapshot is called 'anchor'"),
    ]:
        with pytest.raises(ConfigError, match=message):
            load(recipe("tiny_sd3/nft"), [override]).check(processes=1)


def test_raft_keeps_the_best_of_each_group_or_of_all_with_their_ties() -> None:
    reward = torch.tensor([1.0, 0.5, 1.0, 0.1, 0.3, 0.2])
    assert method("raft").kept(record(reward)).tolist() == [True, False, True, False, True, False]
    assert method("raft", best=2).kept(record(reward)).tolist() == [True, False, True, False, True, True]
    assert method("raft", share=0.5).kept(record(reward)).tolist() == [True, True, True, False, False, False]


def test_rwr_weighs_by_the_reward_or_its_exponential() -> None:
    reward = torch.tensor([0.0, 0.5, 1.0, 0.0, 0.0, 2.0])
    assert method("rwr", weight="reward").credit(record(reward)).tolist() == reward.tolist()
    torch.testing.assert_close(method("rwr", beta=0.5).credit(record(reward)), (reward / 2).exp())


def test_awm_with_power_1_is_weighted_by_the_level() -> None:
    at = drawn(apart=0.3)
    torch.testing.assert_close(
        gradient(method("awm", power=1), at)[1], gradient(method("awm", weighting="t"), at)[1], atol=1e-6, rtol=1e-5
    )
