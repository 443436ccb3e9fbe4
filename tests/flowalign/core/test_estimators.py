"""Advantages against literal versions: loops, enumeration, closed forms."""

import itertools
import math
import statistics
from typing import Literal

import pytest
import torch
from torch import Tensor

from flowalign.core import estimators
from flowalign.core.entropy import entropy_modulated, regulating_temperature, uncertain, unlikeliness
from flowalign.core.record import Record


def record(reward: list[float] | Tensor, group: list[int], actions: int = 4, **more: Tensor) -> Record:
    reward = torch.as_tensor(reward)
    rows = len(group)
    return Record(
        reward=reward,
        group=torch.tensor(group),
        mask=more.pop("mask", torch.ones(rows, actions, dtype=torch.bool)),
        log_prob=torch.randn(rows, actions),
        rewards=more.pop("rewards", reward[None]),
        weights=more.pop("weights", torch.ones(1)),
        **more,
    )


def test_ngrpo_is_grpo_with_a_virtual_winner() -> None:
    made = estimators.ngrpo(record([0.0, 0, 0, 0.5, 1, 0.2], [4, 4, 4, 1, 1, 1]))
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
    made = estimators.pass_k(record(reward, [0] * 5), k=k)
    choices = [(choice, max(reward[i] for i in choice)) for choice in itertools.combinations(range(5), k)]
    mean = statistics.mean(best for _, best in choices)
    spread = statistics.pstdev(best for _, best in choices)
    for row in range(5):
        own = [best for choice, best in choices if row in choice]
        expected = (statistics.mean(own) - mean) / spread if spread > 0 else 0.0
        assert made[row].item() == pytest.approx(expected, abs=1e-6)


def test_pass_k_of_more_than_there_are_says_so() -> None:
    with pytest.raises(ValueError, match="at most the group size"):
        estimators.pass_k(record([1.0, 0.0], [0, 0]), k=3)


def test_max_rl_is_the_gradient_of_the_log_likelihood_as_far_as_a_group_reaches() -> None:
    made = estimators.max_rl(record([1.0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1]))
    assert made.tolist() == pytest.approx([3, -1, -1, -1, 0, 0])

    # over all groups of 4 draws: the mean of advantage times score is d/dp of -sum_k (1 - p)^k / k
    p, size, expected = 0.3, 4, 0.0
    for draws in itertools.product([1.0, 0.0], repeat=size):
        chance = math.prod(p if r else 1 - p for r in draws)
        slope = [1 / p if r else -1 / (1 - p) for r in draws]
        advantage = estimators.max_rl(record(list(draws), [0] * size)).tolist()
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
    torch.testing.assert_close(estimators.bnpo(record(reward, group)), torch.tensor(expected), atol=1e-5, rtol=1e-5)


def test_bnpo_sums_several_rewards_and_refuses_what_is_no_rate() -> None:
    group = [0, 0, 1, 1]
    rewards = torch.tensor([[1.0, 0, 1, 1], [0.0, 1, 0, 0]])
    both = record(rewards.sum(0), group, rewards=rewards, weights=torch.tensor([1.0, 0.5]))
    parts = [estimators.bnpo(record(r, group)) for r in rewards]
    torch.testing.assert_close(estimators.bnpo(both), parts[0] + 0.5 * parts[1])
    with pytest.raises(ValueError, match="in \\[0, 1\\]"):
        estimators.bnpo(record([2.0, 0.0], [0, 0]))


@pytest.mark.parametrize("estimator", [estimators.grpo, estimators.rloo, estimators.ngrpo, estimators.bnpo])
def test_groups_all_right_teach_nothing(estimator) -> None:  # type: ignore[no-untyped-def]
    made = estimator(record([1.0, 1, 1, 0, 1, 0], [0, 0, 0, 1, 1, 1]))
    assert made[:3].abs().max() < 1e-6 and made[3:].abs().min() > 0


def test_all_wrong_teaches_only_under_ngrpo_and_nsr() -> None:
    wrong = record([0.0, 0, 1, 0], [0, 0, 1, 1])
    for name in ("grpo", "dr_grpo", "rloo", "bnpo", "best_margin"):
        assert not getattr(estimators, name)(wrong)[:2].any()
    assert (estimators.ngrpo(wrong)[:2] < 0).all()
    assert estimators.psr_nsr(wrong).tolist() == pytest.approx([-1, -1, 0.1, -1])


def test_rloo_leaves_one_out() -> None:
    made = estimators.rloo(record([3.0, 1, 5, 7], [0, 0, 0, 1]))
    assert made.tolist() == pytest.approx([3 - 3, 1 - 4, 5 - 2, 0])


@pytest.mark.parametrize("scale", ["group", "none"])
def test_gigpo_compares_actions_in_one_state(scale: Literal["group", "none"]) -> None:
    group = [0, 0, 0, 1, 1, 1]
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 1], [1, 1, 0]]).bool()
    state = torch.tensor([[0, 1, 2], [0, 1, 0], [0, 3, 1], [0, 9, 9], [0, 1, 4], [0, 1, 9]])
    reward = [1.0, 0, 0.5, 1, 0, 0]
    made = estimators.gigpo(record(reward, group, 3, mask=mask, state=state), weight=0.5, gamma=0.9, scale=scale)
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


TURNS = torch.tensor([[0, 0, 0, 1, 2, 2], [0, 1, 1, 1, -1, -1], [0, 0, 1, -1, -1, -1], [0, 0, 0, 0, 0, 0]])
"""of tokens, the environment's among them"""
SAID = torch.tensor([[1, 1, 0, 1, 0, 1], [1, 1, 1, 0, 0, 0], [1, 0, 1, 0, 0, 0], [0, 1, 1, 0, 1, 0]]).bool()


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
    made = estimators.gigpo(
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


def test_parts_that_need_more_than_there_is_say_so() -> None:
    with pytest.raises(ValueError, match="greedy"):
        estimators.remax(record([1.0, 0], [0, 0]))
    with pytest.raises(ValueError, match="state"):
        estimators.gigpo(record([1.0, 0], [0, 0]))


def test_unlikely_right_answers_keep_their_reward() -> None:
    log_prob = torch.tensor([-1.0, -3, -2, -2, -0.5])
    made = unlikeliness(torch.tensor([1.0, 1, 1, 0, 1]), log_prob, torch.tensor([0, 0, 0, 0, 1]), penalty=0.4)
    assert made.tolist() == pytest.approx([1 - 0.4 * 3 / 4, 1, 1 - 0.4 * 1 / 4, 0, 1])


def test_entropy_modulation_number_by_number() -> None:
    advantage, entropy = torch.tensor([[1.0, 1, 1], [-1, -1, 0]]), torch.tensor([[0.0, 2, 1], [2, 0.5, 7]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()
    made = entropy_modulated(advantage, entropy, mask, sharpness=1.5, clarity=0.2, clarity_sharpness=0.5)
    level = {(0, 0): 0.0, (0, 1): 1.0, (0, 2): 0.5, (1, 0): 1.0, (1, 1): 0.25}
    mean = statistics.mean(math.exp(-1.5 * h) for h in level.values())
    raw = {
        (b, t): advantage[b, t].item() * math.exp(-1.5 * h) / mean
        + (0.2 * math.exp(-0.5 * level[b, t + 1]) if (b, t + 1) in level else 0)
        for (b, t), h in level.items()
    }
    centre = statistics.mean(raw.values())
    for at, value in raw.items():
        assert made[at].item() == pytest.approx(value - centre, abs=1e-5)
    assert made[1, 2] == 0


def test_entropy_modulation_of_turns_number_by_number() -> None:
    torch.manual_seed(0)
    entropy, advantage = torch.rand(4, 6), torch.tensor([1.0, -0.5, 0.0, 2.0])[:, None].expand(4, 6)
    made = entropy_modulated(advantage, entropy, SAID, sharpness=1.5, clarity=0.2, clarity_sharpness=0.5, turn=TURNS)
    own = {
        (b, k): statistics.mean(entropy[b][SAID[b] & (TURNS[b] == k)].tolist())
        for b in range(4)
        for k in range(int(TURNS[b].max()) + 1)
    }
    low, high = min(own.values()), max(own.values())
    level = {at: (h - low) / (high - low) for at, h in own.items()}
    mean = statistics.mean(math.exp(-1.5 * h) for h in level.values())
    raw = {
        (b, k): advantage[b, 0].item() * math.exp(-1.5 * h) / mean
        + (0.2 * math.exp(-0.5 * level[b, k + 1]) if (b, k + 1) in level else 0)
        for (b, k), h in level.items()
    }
    centre = statistics.mean(raw.values())
    for b in range(4):
        for t in range(6):
            expected = raw[b, int(TURNS[b, t])] - centre if SAID[b, t] else 0.0
            assert made[b, t].item() == pytest.approx(expected, abs=1e-5)


def test_only_the_most_uncertain_actions_are_kept() -> None:
    entropy = torch.arange(20.0).view(2, 10)
    mask = torch.ones(2, 10, dtype=torch.bool)
    mask[1, 5:] = False
    kept = uncertain(entropy, mask, 0.2)
    assert kept.nonzero().tolist() == [[1, 2], [1, 3], [1, 4]]
    assert torch.equal(uncertain(entropy, mask, 1.0), mask)


def test_the_temperature_pushes_the_entropy_to_its_target() -> None:
    assert regulating_temperature(0.2, 0.5) > 1 > regulating_temperature(0.8, 0.5)


def test_process_advantages_add_up_later_steps_normalised_together() -> None:
    nan = float("nan")
    steps = torch.tensor([[nan, 0.5, nan, 1.0], [0.2, nan, 0.0, nan], [nan, nan, 3.0, nan], [1.0, nan, nan, nan]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 0], [1, 0, 0, 0]]).bool()
    group = torch.tensor([0, 0, 1, 1])
    record = Record(torch.zeros(4), group, mask, torch.zeros(4, 4), torch.zeros(1, 4), torch.ones(1), steps=steps)
    for gamma in (1.0, 0.5):
        made = estimators.process(record, gamma=gamma)
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
    record = Record(reward, torch.zeros(4).long(), mask, torch.zeros(4, 3), reward[None], torch.ones(1))
    expected = estimators.grpo(record, unbiased=True)[:, None].where(mask, 0)
    torch.testing.assert_close(estimators.process(record), expected)
