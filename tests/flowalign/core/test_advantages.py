"""Advantages against literal versions: loops, enumeration, closed forms."""

import inspect
import itertools
import math
import statistics
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from flowalign.core import advantages
from flowalign.core.groups import group_advantage, group_mean_std, zero_spread
from flowalign.core.record import Record
from rewards.text.process import clip_bound, delta_bound

GROUP = torch.tensor([7, 2, 7, 2, 2, 9, 7, 9])
"""interleaved, of different sizes, not counted from 0"""


def literal_advantage(reward: list[float], scale: str, eps: float = 1e-4) -> list[float]:
    advantages = []
    for r, g in zip(reward, GROUP.tolist(), strict=True):
        members = [other for other, h in zip(reward, GROUP.tolist(), strict=True) if h == g]
        mean = sum(members) / len(members)
        pool = {"group": members, "batch": reward, "none": None}[scale]
        divisor = 1.0
        if pool is not None:
            centre = sum(pool) / len(pool)
            divisor = math.sqrt(sum((p - centre) ** 2 for p in pool) / len(pool)) + eps
        advantages.append((r - mean) / divisor)
    return advantages


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_are_those_of_a_loop_over_groups(scale: str) -> None:
    reward = torch.randn(8)
    expected = torch.tensor(literal_advantage(reward.tolist(), scale))
    torch.testing.assert_close(group_advantage(reward, GROUP, scale), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_dense_rewards_are_normalised_for_each_step_on_its_own(scale: str) -> None:
    reward = torch.randn(8, 3) * torch.tensor([1.0, 5.0, 0.1])
    columns = [group_advantage(reward[:, t], GROUP, scale) for t in range(3)]
    torch.testing.assert_close(group_advantage(reward, GROUP, scale), torch.stack(columns, 1))


def test_advantages_are_clipped_on_both_sides() -> None:
    reward, group = torch.tensor([0.0] * 50 + [1.0] + [0.0] + [-1.0]), torch.zeros(53, dtype=torch.long)
    free, clipped = group_advantage(reward, group), group_advantage(reward, group, clip=3.0)
    assert free.max() > 3 and free.min() < -3
    assert torch.equal(clipped, free.clamp(-3, 3))


def test_a_group_of_one_reward_teaches_nothing() -> None:
    reward = torch.tensor([0.3, 0.5, 0.3, 0.7, 0.1, 1.0, 0.3, 1.0])
    advantage = group_advantage(reward, GROUP)
    assert (advantage[GROUP == 7].abs() < 1e-3).all() and (advantage[GROUP == 9] == 0).all()
    assert zero_spread(reward, GROUP).item() == pytest.approx(5 / 8)
    assert zero_spread(reward[:, None].expand(-1, 2), GROUP).item() == pytest.approx(5 / 8)
    # a group whose steps are not all alike teaches something
    dense = torch.stack([reward, torch.arange(8.0)], 1)
    assert zero_spread(dense, GROUP).item() == 0


def test_equal_rewards_leave_exactly_nothing() -> None:
    """Of any size, in groups of any size; the metric and the items that are left out agree on it."""
    group = torch.arange(1000) // 12
    values = torch.randn(84)[group] * torch.logspace(-3, 3, 84)[group]
    for settings in ({}, {"unbiased": True, "eps": 1e-8}):
        advantage = group_advantage(values, group, **settings)
        assert not advantage.any() and zero_spread(values, group) == 1
    values[0] = values[0].nextafter(torch.tensor(math.inf))
    assert group_advantage(values, group)[:12].any() and zero_spread(values, group) == pytest.approx(988 / 1000)


def test_group_statistics_do_not_depend_on_the_order_of_the_rows() -> None:
    reward, order = torch.randn(8), torch.randperm(8)
    mean, std = group_mean_std(reward, GROUP)
    again_mean, again_std = group_mean_std(reward[order], GROUP[order])
    torch.testing.assert_close(again_mean, mean[order])
    torch.testing.assert_close(again_std, std[order])


def test_masked_entries_enter_nothing() -> None:
    reward, group = torch.randn(12, 5), torch.arange(12) // 4
    mask = torch.rand(12, 5) > 0.4
    wild = torch.where(mask, reward, math.nan)
    for scale in ("group", "batch", "none"):
        made = group_advantage(wild, group, scale, mask=mask)
        for g, k in itertools.product(range(3), range(5)):
            rows = (group == g) & mask[:, k]
            part = reward[rows, k]
            std = {
                "group": part.std(correction=0) + 1e-4,
                "batch": reward[mask[:, k], k].std(correction=0) + 1e-4,
                "none": torch.tensor(1.0),
            }[scale]
            torch.testing.assert_close(made[rows, k], (part - part.mean()) / std, atol=1e-5, rtol=1e-5)
        assert not made[~mask].any()


def test_a_full_mask_changes_nothing() -> None:
    reward, group = torch.randn(12, 5), torch.arange(12) // 4
    full = torch.ones(12, 5, dtype=torch.bool)
    assert torch.equal(group_advantage(reward, group, mask=full), group_advantage(reward, group))
    mean, std = group_mean_std(reward, group)
    torch.testing.assert_close(mean, reward.view(3, 4, 5).mean(1).repeat_interleave(4, 0))
    torch.testing.assert_close(std, reward.view(3, 4, 5).std(1, correction=0).repeat_interleave(4, 0))


def test_zero_spread_looks_at_the_drawn_steps() -> None:
    reward = torch.tensor([[1.0, 5.0], [1.0, 6.0], [1.0, 7.0], [2.0, 7.0]])
    mask = torch.tensor([[True, False]] * 4)
    group = torch.tensor([0, 0, 1, 1])
    assert zero_spread(reward, group) == 0
    assert zero_spread(reward, group, mask) == 0.5


def record(reward: list[float] | Tensor, group: list[int], actions: int = 4, **more: Tensor) -> Record:
    reward = torch.as_tensor(reward)
    rows = len(group)
    return Record(
        reward=reward,
        group=torch.tensor(group),
        mask=more.pop("mask", torch.ones(rows, actions, dtype=torch.bool)),
        log_prob=torch.randn(rows, actions),
        rewards=more.pop("rewards", reward[None]),
        reward_weights=more.pop("reward_weights", torch.ones(1)),
        **more,
    )


TURNS = torch.tensor([[0, 0, 0, 1, 2, 2], [0, 1, 1, 1, -1, -1], [0, 0, 1, -1, -1, -1], [0, 0, 0, 0, 0, 0]])
"""of tokens, the environment's among them"""


SAID = torch.tensor([[1, 1, 0, 1, 0, 1], [1, 1, 1, 0, 0, 0], [1, 0, 1, 0, 0, 0], [0, 1, 1, 0, 1, 0]]).bool()


def test_each_reward_is_normalised_and_the_sum_too_by_gdpo() -> None:
    rewards, group = torch.randn(2, 12), (torch.arange(12) // 4).tolist()
    rewards[1] *= 100
    expected = torch.zeros(12)
    for g in range(3):
        rows = slice(4 * g, 4 * g + 4)
        for w, r in zip((0.6, 0.4), rewards):
            expected[rows] += w * (r[rows] - r[rows].mean()) / (r[rows].std(correction=0) + 1e-4)
    given = record(rewards.sum(0), group, rewards=rewards, reward_weights=torch.tensor([0.6, 0.4]))
    torch.testing.assert_close(advantages.per_reward(given), expected)
    torch.testing.assert_close(advantages.per_reward(given, clip=0.5), expected.clamp(-0.5, 0.5))
    normal = (expected - expected.mean()) / (expected.std(correction=0) + 1e-4)
    torch.testing.assert_close(advantages.gdpo(given), normal, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(advantages.gdpo(given, clip=0.5), normal.clamp(-0.5, 0.5), atol=1e-5, rtol=1e-5)
    # verl whitens over tokens, with the unbiased variance: long rows count more
    given.mask = torch.arange(5) < torch.randint(1, 6, (12, 1))
    tokens = [value for value, row in zip(expected.tolist(), given.mask) for _ in range(int(row.sum()))]
    mean, variance = statistics.mean(tokens), statistics.variance(tokens)
    white = (expected - mean) / (variance + 1e-8) ** 0.5
    torch.testing.assert_close(advantages.gdpo(given, over="actions"), white, atol=1e-5, rtol=1e-5)


def test_ngrpo_is_grpo_with_a_virtual_winner() -> None:
    made = advantages.ngrpo(record([0.0, 0, 0, 0.5, 1, 0.2], [4, 4, 4, 1, 1, 1]))
    for rows, rewards in (((0, 1, 2), [0.0, 0, 0]), ((3, 4, 5), [0.5, 1, 0.2])):
        pool = [*rewards, 1.0]
        for row, reward in zip(rows, rewards, strict=True):
            expected = (reward - statistics.mean(pool)) / (statistics.stdev(pool) + 1e-6)
            assert made[row].item() == pytest.approx(expected, rel=1e-5)
    assert (made[:3] < 0).all()


@pytest.mark.parametrize("k", [1, 2, 3, 5])
@pytest.mark.parametrize("right", range(6))
def test_pass_k_is_the_mean_over_all_choices_of_k_members(k: int, right: int) -> None:
    reward = [1.0] * right + [0.0] * (5 - right)
    made = advantages.pass_k(record(reward, [0] * 5), k=k)
    choices = [(choice, max(reward[i] for i in choice)) for choice in itertools.combinations(range(5), k)]
    mean = statistics.mean(best for _, best in choices)
    spread = statistics.pstdev(best for _, best in choices)
    for row in range(5):
        own = [best for choice, best in choices if row in choice]
        expected = (statistics.mean(own) - mean) / spread if spread > 0 else 0.0
        assert made[row].item() == pytest.approx(expected, abs=1e-6)


def test_pass_k_of_more_than_there_are_says_so() -> None:
    with pytest.raises(ValueError, match="at most the group size"):
        advantages.pass_k(record([1.0, 0.0], [0, 0]), k=3)


def test_max_rl_is_the_gradient_of_the_log_likelihood_as_far_as_a_group_reaches() -> None:
    made = advantages.max_rl(record([1.0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1]))
    assert made.tolist() == pytest.approx([3, -1, -1, -1, 0, 0])

    # over all groups of 4 draws: the mean of advantage times score is d/dp of -sum_k (1 - p)^k / k
    p, size, expected = 0.3, 4, 0.0
    for draws in itertools.product([1.0, 0.0], repeat=size):
        chance = math.prod(p if r else 1 - p for r in draws)
        slope = [1 / p if r else -1 / (1 - p) for r in draws]
        advantage = advantages.max_rl(record(list(draws), [0] * size)).tolist()
        expected += chance * statistics.mean(a * s for a, s in zip(advantage, slope, strict=True))
    assert expected == pytest.approx(sum((1 - p) ** (k - 1) for k in range(1, size)))


def test_bnpo_by_the_density_written_out() -> None:
    reward = [1.0, 0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 0]
    group = [0] * 4 + [1] * 4 + [2] * 4
    rates = [0.25, 0.5, 0.75]
    mean, variance = statistics.mean(rates), statistics.variance(rates)
    surplus = mean * (1 - mean) / variance - 1
    a, b = max(1, 1 + surplus * mean / 3), max(1, 1 + surplus * (1 - mean) / 3)

    def density(p: float) -> float:
        return p ** (a - 1) * (1 - p) ** (b - 1) * math.gamma(a + b) / math.gamma(a) / math.gamma(b)

    expected = [(r - rates[g]) / density(rates[g]) for r, g in zip(reward, group, strict=True)]
    torch.testing.assert_close(advantages.bnpo(record(reward, group)), torch.tensor(expected), atol=1e-5, rtol=1e-5)


def test_bnpo_sums_several_rewards_and_refuses_what_is_no_rate() -> None:
    group = [0, 0, 1, 1]
    rewards = torch.tensor([[1.0, 0, 1, 1], [0.0, 1, 0, 0]])
    both = record(rewards.sum(0), group, rewards=rewards, reward_weights=torch.tensor([1.0, 0.5]))
    parts = [advantages.bnpo(record(r, group)) for r in rewards]
    torch.testing.assert_close(advantages.bnpo(both), parts[0] + 0.5 * parts[1])
    with pytest.raises(ValueError, match="in \\[0, 1\\]"):
        advantages.bnpo(record([2.0, 0.0], [0, 0]))


@pytest.mark.parametrize("advantage", [advantages.grpo, advantages.rloo, advantages.ngrpo, advantages.bnpo])
def test_groups_all_right_teach_nothing(advantage) -> None:  # type: ignore[no-untyped-def]
    made = advantage(record([1.0, 1, 1, 0, 1, 0], [0, 0, 0, 1, 1, 1]))
    assert made[:3].abs().max() < 1e-6 and made[3:].abs().min() > 0


def test_all_wrong_teaches_only_under_ngrpo_and_nsr() -> None:
    wrong = record([0.0, 0, 1, 0], [0, 0, 1, 1])
    for name in ("grpo", "dr_grpo", "rloo", "bnpo", "best_margin"):
        assert not getattr(advantages, name)(wrong)[:2].any()
    assert (advantages.ngrpo(wrong)[:2] < 0).all()
    assert advantages.psr_nsr(wrong).tolist() == pytest.approx([-1, -1, 0.1, -1])


def test_rloo_leaves_one_out() -> None:
    made = advantages.rloo(record([3.0, 1, 5, 7], [0, 0, 0, 1]))
    assert made.tolist() == pytest.approx([3 - 3, 1 - 4, 5 - 2, 0])


@pytest.mark.parametrize("scale", ["group", "none"])
def test_gigpo_compares_actions_in_one_state(scale: Literal["group", "none"]) -> None:
    group = [0, 0, 0, 1, 1, 1]
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 1], [1, 1, 0]]).bool()
    state = torch.tensor([[0, 1, 2], [0, 1, 0], [0, 3, 1], [0, 9, 9], [0, 1, 4], [0, 1, 9]])
    reward = [1.0, 0, 0.5, 1, 0, 0]
    made = advantages.gigpo(record(reward, group, 3, mask=mask, state=state), weight=0.5, gamma=0.9, scale=scale)
    length = mask.sum(1).tolist()
    returns = {(b, t): reward[b] * 0.9 ** (length[b] - 1 - t) for b in range(6) for t in range(length[b])}

    def normal(value: float, pool: list[float]) -> float:
        spread = statistics.stdev(pool) + 1e-6 if scale == "group" and len(pool) > 1 else 1.0
        return (value - statistics.mean(pool)) / spread

    for b in range(6):
        episode = normal(reward[b], [r for r, g in zip(reward, group, strict=True) if g == group[b]])
        for t in range(3):
            if (b, t) not in returns:
                assert made[b, t] == 0
                continue
            pool = [v for (c, u), v in returns.items() if group[c] == group[b] and state[c, u] == state[b, t]]
            assert made[b, t].item() == pytest.approx(episode + 0.5 * normal(returns[b, t], pool), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("scale", ["group", "none"])
@pytest.mark.parametrize("steps", [True, False])
def test_gigpo_compares_whole_turns(steps: bool, scale: Literal["group", "none"]) -> None:
    group, states = [0, 0, 0, 1], [["a", "b", "a"], ["a", "b"], ["b", "c"], ["a"]]
    earned = [[0.5, 0.0, 1.0], [0.0, 0.25], [0.0, 0.0], [1.0]]
    nan = float("nan")
    # at the last token that was said in each turn
    placed = torch.tensor(
        [
            [nan, 0.5, nan, 0.0, nan, 1.0],
            [0.0, nan, 0.25, nan, nan, nan],
            [0.0, nan, 0.0, nan, nan, nan],
            [nan, nan, nan, nan, 1.0, nan],
        ]
    )
    if not steps:
        earned = [[0.0] * (len(own) - 1) + [sum(own)] for own in earned]
    total = [sum(own) for own in earned]
    names = {"a": 3, "b": 1, "c": 2}
    numbers = [[names[own[k]] if 0 <= k < len(own) else 7 for k in row] for own, row in zip(states, TURNS.tolist())]
    more = {"steps": placed} if steps else {}
    made = advantages.gigpo(
        record(total, group, 6, mask=SAID, state=torch.tensor(numbers), turn=TURNS, **more), gamma=0.9, scale=scale
    )
    returns = {
        (b, k): sum(0.9 ** (j - k) * own[j] for j in range(k, len(own)))
        for b, own in enumerate(earned)
        for k in range(len(own))
    }

    def normal(value: float, pool: list[float]) -> float:
        spread = statistics.stdev(pool) + 1e-6 if scale == "group" and len(pool) > 1 else 1.0
        return (value - statistics.mean(pool)) / spread

    for b in range(4):
        episode = normal(total[b], [t for t, g in zip(total, group, strict=True) if g == group[b]])
        for t in range(6):
            k = int(TURNS[b, t])
            if not SAID[b, t]:
                assert made[b, t] == 0
                continue
            # a turn counts once, however many tokens it has
            pool = [v for (c, u), v in returns.items() if group[c] == group[b] and states[c][u] == states[b][k]]
            assert made[b, t].item() == pytest.approx(episode + normal(returns[b, k], pool), rel=1e-4, abs=1e-5)


def test_process_advantages_add_up_later_steps_normalised_together() -> None:
    nan = float("nan")
    steps = torch.tensor([[nan, 0.5, nan, 1.0], [0.2, nan, 0.0, nan], [nan, nan, 3.0, nan], [1.0, nan, nan, nan]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 0], [1, 0, 0, 0]]).bool()
    group = torch.tensor([0, 0, 1, 1])
    record = Record(
        reward=torch.zeros(4),
        group=group,
        mask=mask,
        log_prob=torch.zeros(4, 4),
        rewards=torch.zeros(1, 4),
        reward_weights=torch.ones(1),
        steps=steps,
    )
    for gamma in (1.0, 0.5):
        made = advantages.process(record, gamma=gamma)
        for row in range(4):
            own = [steps[r, t].item() for r in range(4) for t in range(4) if group[r] == group[row] and mask[r, t]]
            own = [value for value in own if value == value]
            mean = sum(own) / len(own)
            std = (sum((value - mean) ** 2 for value in own) / (len(own) - 1)) ** 0.5
            for t in range(4):
                later = [steps[row, u].item() for u in range(t, 4) if not steps[row, u].isnan()]
                expected = sum(gamma**k * (value - mean) / (std + 1e-4) for k, value in enumerate(later))
                assert made[row, t].item() == pytest.approx(expected if mask[row, t] else 0, abs=1e-5)


def test_process_advantages_of_outcomes_alone_are_grpos() -> None:
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]]).bool()
    reward = torch.tensor([1.0, 0.0, 0.5, 0.2])
    record = Record(
        reward=reward,
        group=torch.zeros(4).long(),
        mask=mask,
        log_prob=torch.zeros(4, 3),
        rewards=reward[None],
        reward_weights=torch.ones(1),
    )
    expected = advantages.grpo(record, unbiased=True)[:, None].where(mask, 0)
    torch.testing.assert_close(advantages.process(record), expected)


@pytest.mark.parametrize("name", advantages.ADVANTAGES)
def test_every_division_by_a_spread_says_which(name: str) -> None:
    """Where there is a standard deviation there are `eps` and `unbiased`, and both do something."""
    settings = set(inspect.signature(advantages.ADVANTAGES[name]).parameters)
    assert ("eps" in settings) == ("unbiased" in settings)
    if "eps" not in settings:
        return
    mask = torch.ones(6, 4, dtype=torch.bool)
    more = {"state": torch.zeros(6, 4, dtype=torch.long), "influence": torch.rand(6, 4), "reference": torch.zeros(6, 4)}
    given = record([1.0, 0.2, 0, 0.7, 0, 1], [0, 0, 0, 1, 1, 1], mask=mask, **more)
    # published without a division
    scale = {"scale": "group"} if name == "semi_online" else {}
    made = [
        advantages.ADVANTAGES[name](given, **scale, **changed)
        for changed in ({}, {"eps": 0.5}, {"unbiased": True}, {"unbiased": False})
    ]
    assert not torch.allclose(made[0], made[1]) and not torch.allclose(made[2], made[3])


@pytest.mark.parametrize("bound", [lambda r, _: clip_bound(r, 0.5), delta_bound])
def test_under_a_bound_more_steps_do_not_pay_with_returns_and_do_with_process(bound: Any) -> None:
    """Two texts of one quality a step, the second twice as long, and a third: which of two gains, the bounds decide."""
    quality = torch.tensor([[0.4, 0.4, 0.0, 0.0], [0.4, 0.4, 0.4, 0.4], [0.1, 0.1, 0.0, 0.0]])
    taken = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0]]).bool()
    steps = bound(quality, taken).where(taken, torch.nan)
    given = record(steps.nansum(1), [0, 0, 0], mask=taken, steps=steps)
    short, long, _ = advantages.process_returns(given)[:, 0].tolist()
    assert long <= short + 1e-6
    if bound is not delta_bound:
        short, long, _ = advantages.process(given)[:, 0].tolist()
        assert long > short


def test_process_returns_are_normalised_sums() -> None:
    nan = float("nan")
    steps = torch.tensor([[nan, 0.5, nan, 1.0], [0.2, nan, 0.0, nan]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]).bool()
    made = advantages.process_returns(record([1.5, 0.2], [0, 0], mask=mask, steps=steps), gamma=0.5, scale="group")
    returns = [[1.0, 1.0, 1.0, 1.0], [0.2, 0.0, 0.0]]
    pool = [r for row in returns for r in row]
    for row, own in enumerate(returns):
        for t, value in enumerate(own):
            expected = (value - statistics.mean(pool)) / (statistics.stdev(pool) + 1e-4)
            assert made[row, t].item() == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert made[1, 3] == 0


def test_gpg_makes_up_for_groups_that_teach_nothing() -> None:
    made = advantages.gpg(record([1.0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 2, 2]))
    # two of six rows have a gradient
    assert made.tolist() == pytest.approx([1.5, -1.5, 0, 0, 0, 0])


def test_rows_that_no_reward_applies_to_are_in_no_mean() -> None:
    """TRL's nanmean and nanstd."""
    reward = torch.tensor([1.0, math.nan, 0.5, 3.0, 2.0, math.nan])
    made = advantages.grpo(record(reward, [0, 0, 0, 1, 1, 1]), unbiased=True)
    for rows in ([0, 2], [3, 4]):
        given = reward[rows]
        torch.testing.assert_close(made[rows], (given - given.mean()) / (given.std() + 1e-4))
