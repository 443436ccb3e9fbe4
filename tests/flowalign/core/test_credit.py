"""Credit against slow, literal references, and against the truth on a chain where it is known."""

import math

import pytest
import torch
from torch import Tensor

from flowalign.core.credit import (
    back_up,
    best_and_worst,
    dense_rewards,
    first_of,
    hierarchical,
    lasting_gains,
    turning_point_rewards,
    turning_points,
)
from flowalign.core.groups import group_advantage
from samplers import Tree


def sign(x: float) -> int:
    return (x > 0) - (x < 0)


def literal_turning_points(row: list[float]) -> list[bool]:
    """TP-GRPO's definition, one number at a time; steps count from 1."""
    d = [row[k] - row[k - 1] for k in range(1, len(row))]
    s = [sign(x) * sign(row[-1] - row[0]) for x in d]
    return [s[0] > 0] + [s[k - 1] < 0 and s[k] > 0 for k in range(1, len(s))]


def literal_released(rows: list[list[float]]) -> list[list[float]]:
    """The launch scripts' switches of the authors' trainer, in the order it applies them."""
    chosen, bonus, plain = [], [], []
    for b, row in enumerate(rows):
        total = row[-1] - row[0]
        d = [row[k] - row[k - 1] for k in range(1, len(row))]
        s = [sign(x) * sign(total) for x in d]
        for k in range(len(d)):
            consistent = sign(d[k]) * sign(row[-1] - row[k + 1]) > 0
            if consistent and (k == 0 or (s[k - 1] < 0 and s[k] > 0)):
                chosen.append((b, k, total))
        bonus.append([row[-1] - row[k] for k in range(len(d))])
        plain.append(d)
    up = sorted([c for c in chosen if c[2] > 0], key=lambda c: -abs(c[2]))
    down = sorted([c for c in chosen if c[2] < 0], key=lambda c: -abs(c[2]))
    if up and down:
        keep = min(len(up), len(down))
        chosen = up[:keep] + down[:keep]
    for b, k, _ in chosen:
        plain[b][k] = bonus[b][k]
    return plain


HAND_MADE = [
    [0, 1, 2, 3, 4],  # all up: only step 1
    [4, 3, 2, 1, 0],  # all down: only step 1
    [0, 2, 1, 3, 2],  # zigzag up
    [2, 3, 1, 2, 0],  # zigzag down
    [0, -1, 0, -1, 3],  # down first
    [0, 1, 1, 2, 2],  # ties
    [0, -1, -1, 1, 1],  # a tie between the dip and the rise
    [0, 1, -1, 1, 0],  # zero total
    [0, 0, 0, 0, 0],
]


EXPECTED = [[0], [0], [0, 2], [1, 3], [1, 3], [0], [], [], []]


def random_rewards(rows: int, steps: int) -> Tensor:
    """Half of them whole numbers, so that there are ties and zero totals."""
    values = torch.randn(rows, steps + 1)
    return torch.cat([values, (values * 1.2).round()])


def test_dense_rewards_telescope() -> None:
    values = torch.randn(50, 12)
    torch.testing.assert_close(dense_rewards(values).sum(1), values[:, -1] - values[:, 0], atol=1e-5, rtol=0)


def test_turning_points_of_hand_made_trajectories() -> None:
    turns = turning_points(torch.tensor(HAND_MADE, dtype=torch.float32))
    assert [row.nonzero().flatten().tolist() for row in turns] == EXPECTED


def test_deterministic_steps_do_not_count_as_steps() -> None:
    """With steps 0, 3 and 4 deterministic, the first stochastic step is the first of all."""
    values = torch.randint(0, 4, (200, 4), generator=torch.Generator().manual_seed(3)).float()
    mask = torch.tensor([False, True, True, False, False, True]).expand(200, -1)
    with_still_states = values[:, [0, 0, 1, 2, 2, 2, 3]]
    turns = turning_points(with_still_states, mask)
    assert turns[:, [1, 2, 5]].tolist() == [literal_turning_points(row) for row in values.tolist()]
    assert not turns[:, [0, 3, 4]].any()
    rewards = turning_point_rewards(with_still_states, mask=mask)
    torch.testing.assert_close(rewards[:, [1, 2, 5]], turning_point_rewards(values))


@pytest.mark.parametrize("steps", [1, 2, 3, 10])
def test_turning_points_agree_with_the_literal_rule(steps: int) -> None:
    values = random_rewards(300, steps)
    assert turning_points(values).tolist() == [literal_turning_points(row) for row in values.tolist()]


@pytest.mark.parametrize("values", [random_rewards(60, 6), torch.tensor(HAND_MADE, dtype=torch.float32)])
def test_turning_point_rewards_agree_with_the_literal_rules(values: Tensor) -> None:
    aggregate, total = [], []
    for row in values.tolist():
        turns = literal_turning_points(row)
        d = [row[k + 1] - row[k] for k in range(len(turns))]
        aggregate.append([row[-1] - row[k] if turn else d[k] for k, turn in enumerate(turns)])
        total.append([row[-1] - row[0] + (d[k] if turn else 0) for k, turn in enumerate(turns)])
    torch.testing.assert_close(turning_point_rewards(values), torch.tensor(aggregate))
    torch.testing.assert_close(turning_point_rewards(values, "total"), torch.tensor(total))


@pytest.mark.parametrize("seed", range(20))
def test_the_released_variant_agrees_with_the_authors_switches(seed: int) -> None:
    torch.manual_seed(seed)
    values = torch.randn(12, 6) + torch.linspace(0, seed % 3 - 1, 6)
    torch.testing.assert_close(
        turning_point_rewards(values, "released"), torch.tensor(literal_released(values.tolist()))
    )


def test_the_released_variant_keeps_every_turn_when_all_trajectories_rise() -> None:
    values = torch.tensor([[0.0, 1, 2], [0, 2, 3]])
    assert turning_point_rewards(values, "released").tolist() == [[2, 1], [3, 1]]
    falling = torch.cat([values, -values[:1]])
    assert turning_point_rewards(falling, "released").tolist() == [[1, 1], [3, 1], [-2, -1]]


def test_levels_that_do_not_apply_are_stood_in_for() -> None:
    scores = {
        "global": torch.tensor([0.5, 0.5]),
        "subject": torch.tensor([1.0, 1.0]),
        "relation": torch.tensor([0.0, math.nan]),
        "unused": torch.tensor([9.0, 9.0]),
    }
    made = hierarchical(scores, {"global": 1, "subject": 2, "relation": 1})
    torch.testing.assert_close(made, torch.tensor([2.5, 2.5 * 4 / 3]))


@pytest.mark.parametrize("k", [0, 1, 2, 3, 4, 7, 8])
def test_best_and_worst_are_the_ends_of_the_sorted_group(k: int) -> None:
    advantage, group = torch.randn(24), torch.arange(24) % 3
    chosen = best_and_worst(advantage, group, k)
    for g in range(3):
        rows = (group == g).nonzero().flatten()
        order = rows[advantage[rows].argsort(descending=True)].tolist()
        expected = order[: (k + 1) // 2] + order[len(order) - k // 2 :]
        assert sorted(expected) == (chosen & (group == g)).nonzero().flatten().tolist()


def test_best_and_worst_keep_their_number_among_ties() -> None:
    assert best_and_worst(torch.zeros(8), torch.arange(8) // 4, 3).tolist() == [True, True, False, True] * 2


def test_leaf_rewards_are_averaged_to_every_node() -> None:
    trees, steps = 3, 5
    tree = Tree([0, 2, 3])
    nodes = torch.cat([tree.nodes(steps) + i * tree.leaves for i in range(trees)])
    reward = torch.randn(trees * tree.leaves)
    values = back_up(reward, nodes)
    first = first_of(nodes)
    for depth in range(steps + 1):
        for node in nodes[:, depth].unique():
            rows = nodes[:, depth] == node
            torch.testing.assert_close(values[rows, depth], reward[rows].mean().expand(int(rows.sum())))
            assert first[rows, depth].tolist() == [True] + [False] * (int(rows.sum()) - 1)
    assert torch.equal(values[:, -1], reward)
    # a tree's edges: the widths after each step
    assert first[:, 1:].sum() == trees * sum(tree.widths(steps)[1:])
    # the steps' gains up a tree telescope as well
    torch.testing.assert_close(dense_rewards(values).sum(1), reward - values[:, 0])


def test_rows_may_come_in_any_order() -> None:
    nodes = Tree([0, 1]).nodes(3)
    reward, order = torch.randn(4), torch.tensor([2, 0, 3, 1])
    torch.testing.assert_close(back_up(reward[order], nodes[order]), back_up(reward, nodes)[order])


CONTRIBUTION = torch.tensor([0.1, 1.0, 0.3, 2.0, 0.05, 0.6])
"""spread of what each step of the chain adds to the final reward"""


def chain(samples: int) -> tuple[Tensor, Tensor]:
    """A chain x' = x + noise whose reward is linear, so that the values of its states are closed forms.

    Reward = sum of c_k z_k, z_k the noise of step k; the noise-free finish after step k is the partial sum.

    Returns:
        noise [B, T] and the completions' rewards [B, T + 1].
    """
    noise = torch.randn(samples, len(CONTRIBUTION))
    values = torch.cat([torch.zeros(samples, 1), (CONTRIBUTION * noise).cumsum(1)], 1)
    return noise, values


def test_dense_credit_is_the_true_effect_of_each_step_and_sparse_credit_is_not() -> None:
    """Within one trajectory dense credit ranks the steps as the truth does; sparse credit gives all the same."""
    noise, values = chain(512)
    truth = CONTRIBUTION * noise
    dense = dense_rewards(values)
    torch.testing.assert_close(dense, truth, atol=1e-5, rtol=1e-4)
    sparse = (values[:, -1:] - values[:, :1]).expand_as(truth)

    def agreement(credit: Tensor) -> float:
        """Pairs of steps of one trajectory ordered as the truth orders them, a tie half."""
        first, second = torch.combinations(torch.arange(truth.shape[1])).unbind(1)
        order = (truth[:, first] - truth[:, second]).sign()
        claim = (credit[:, first] - credit[:, second]).sign()
        return (0.5 + 0.5 * order * claim).mean().item()

    assert agreement(dense) > 0.999
    assert agreement(sparse) == pytest.approx(0.5)


def test_dense_advantages_have_less_noise_than_sparse_ones() -> None:
    """Each step's advantage against its own effect: dense is perfect, sparse as good as the step's share of it."""
    noise, values = chain(4096)
    group = torch.zeros(4096, dtype=torch.long)
    dense = group_advantage(dense_rewards(values), group)
    sparse = group_advantage(values[:, -1], group)[:, None].expand_as(dense)
    share = CONTRIBUTION / CONTRIBUTION.square().sum().sqrt()
    for k in range(len(CONTRIBUTION)):
        assert torch.corrcoef(torch.stack([dense[:, k], noise[:, k]]))[0, 1] > 0.999
        found = torch.corrcoef(torch.stack([sparse[:, k], noise[:, k]]))[0, 1]
        assert found == pytest.approx(share[k].item(), abs=0.05)


@pytest.mark.parametrize("lasts", [0.2, 0.5, 1.0])
def test_lasting_gains_are_the_true_effects_where_values_fade(lasts: float) -> None:
    """R_k = lasts R_{k-1} + z_k from a start that a group shares: the slope finds what lasts."""
    group = torch.arange(4096) // 8
    noise, level = torch.randn(4096, 6), 5 * torch.randn(512)[group]
    steps = [torch.zeros(4096)]
    for k in range(6):
        steps.append(lasts * steps[-1] + noise[:, k])
    values = torch.stack(steps, 1) + level[:, None]

    def agreement(credit: Tensor) -> Tensor:
        pairs = zip(*(group_advantage(x, group, "none").T for x in (credit, noise)), strict=True)
        return torch.stack([torch.corrcoef(torch.stack(pair))[0, 1] for pair in pairs])

    assert (agreement(lasting_gains(values, group)) > 0.998).all()
    # R_k - R_{k-1} is z_k - (1 - lasts) R_{k-1}, and the variance of R_{k-1} is a geometric series
    before = torch.tensor([sum(lasts ** (2 * j) for j in range(k)) for k in range(6)])
    known = (1 + (1 - lasts) ** 2 * before) ** -0.5
    torch.testing.assert_close(agreement(dense_rewards(values)), known, atol=0.02, rtol=0)


def test_a_state_that_its_group_shares_takes_nothing_and_a_step_without_noise_earns_nothing() -> None:
    group = torch.arange(3).repeat_interleave(8)
    # completed in different batches, a shared state's values may differ by rounding
    shared, reached = torch.randn(3)[group] + 1e-7 * torch.randn(24), torch.randn(24)
    gains = lasting_gains(torch.stack([shared, reached, reached], 1), group)
    torch.testing.assert_close(gains[:, 0], reached)
    torch.testing.assert_close(gains[:, 1], torch.zeros(24), atol=1e-6, rtol=0)


def test_single_step_credit_is_the_true_effect_of_its_step() -> None:
    """One step of the group has noise and the prefix is shared: reward minus the group's mean is c_k z_k."""
    for k in range(len(CONTRIBUTION)):
        mask = torch.zeros(64, len(CONTRIBUTION), dtype=torch.bool)
        mask[:, k] = True
        noise = torch.randn(64, len(CONTRIBUTION)) * mask
        reward = 3.0 + (CONTRIBUTION * noise).sum(1)
        advantage = group_advantage(reward[:, None] * mask, torch.zeros(64, dtype=torch.long), "none", mask=mask)
        effect = CONTRIBUTION * noise
        torch.testing.assert_close(advantage, (effect - effect.mean(0)) * mask, atol=1e-5, rtol=1e-4)
