"""Pairwise comparisons within groups: who meets whom, and what the verdicts are worth.

The judge stays outside: a function from pairs of rows to verdicts. All groups of a batch are asked in one call, so
that it can batch.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Pair = tuple[int, int]
Judge = Callable[[list[Pair]], Sequence[float]]
"""[(i, j), ...], shown in this order -> for each 1 if row i wins, 0 if row j does, 0.5 for a tie or no verdict"""
Schedule = Literal["all", "tournament", "one"]


def compare(
    group: Sequence[int], judge: Judge, schedule: Schedule = "all", seed: int = 0, both: bool = False
) -> Tensor:
    """Rewards [B] in [0, 1] from comparisons within the groups; the mean of a group is 1/2 if all meet all.

    Args:
        group: [B] group numbers; members of a group of one get 1/2.
        judge: gives the verdicts.
        schedule: 'all' pairs, each once (Pref-GRPO, arXiv 2508.20751); 'one' random member against all the others
            (BRPO, Writing-Zero, 2506.00103); a seeded single-elimination 'tournament' (ArenaRL, 2601.06487).
        seed: of the random member; another each iteration.
        both: ask every pair in both orders and average, against the judge's bias for a position.
    """
    if schedule == "tournament":
        return tournament(group, judge, seed, both)
    pairs = all_pairs(group) if schedule == "all" else against_one(group, seed)
    return win_rates(len(group), pairs, play(pairs, judge, both))


def comparisons(members: int, schedule: Schedule, both: bool = False) -> int:
    """How often a group of this size asks the judge."""
    once = {"all": members * (members - 1) // 2, "one": members - 1, "tournament": 2 * (members - 1)}[schedule]
    return once * (1 + both)


def all_pairs(group: Sequence[int]) -> list[Pair]:
    """Every pair of every group once, the lower row first."""
    return [pair for rows in _members(group) for pair in combinations(rows, 2)]


def against_one(group: Sequence[int], seed: int) -> list[Pair]:
    """Every member of a group against one random member of it, who comes second."""
    pairs = []
    for rows in _members(group):
        one = rows[int(np.random.default_rng([seed, group[rows[0]]]).integers(len(rows)))]
        pairs += [(row, one) for row in rows if row != one]
    return pairs


def both_orders(pairs: list[Pair]) -> list[Pair]:
    """The pairs, then the same pairs the other way round."""
    return pairs + [(j, i) for i, j in pairs]


def play(pairs: list[Pair], judge: Judge, both: bool = False) -> list[float]:
    """The first's share of the win in each pair; with `both` the average over the two orders."""
    if not pairs:
        return []
    if not both:
        return list(judge(pairs))
    verdicts = list(judge(both_orders(pairs)))
    forth, back = verdicts[: len(pairs)], verdicts[len(pairs) :]
    return [(a + 1 - b) / 2 for a, b in zip(forth, back, strict=True)]


def win_rates(count: int, pairs: Sequence[Pair], verdicts: Sequence[float]) -> Tensor:
    """Wins over comparisons of each of `count` rows, [count] float32; 1/2 for a row that met nobody."""
    points = _points(pairs, verdicts)
    return torch.tensor([sum(points[row]) / len(points[row]) if points[row] else 0.5 for row in range(count)])


def win_table(count: int, met: Mapping[Pair, Sequence[float]]) -> Tensor:
    """[count, count] the row's mean share of the win over the column, NaN for pairs that did not meet.

    Args:
        met: (i, j) -> row i's share each time they were judged in this order.
    """
    total, times = torch.zeros(count, count), torch.zeros(count, count)
    for (i, j), shares in met.items():
        total[i, j] += sum(shares)
        total[j, i] += len(shares) - sum(shares)
        times[i, j] += len(shares)
        times[j, i] += len(shares)
    return total / times


def tournament(group: Sequence[int], judge: Judge, seed: int = 0, both: bool = False) -> Tensor:
    """Share of the group placed below each row after a seeded single elimination, [B] in [0, 1] (arXiv 2601.06487).

    Comparisons with one random member order the members, a bracket keeps the good ones apart until late, and the
    place is the round reached, then the win rate over all comparisons. In the bracket a tie goes to the better
    seed. 2 (G - 1) comparisons for a group of G, and log2(G) + 1 calls of the judge.

    Departure from the authors' code: a group that is no power of two gives the free passes to its best seeds.
    """
    members = _members(group)
    pairs = against_one(group, seed)
    verdicts = play(pairs, judge, both)
    rates = win_rates(len(group), pairs, verdicts).tolist()
    seeded = [sorted(rows, key=lambda row: -rates[row]) for rows in members]
    seeds = {row: place for rows in seeded for place, row in enumerate(rows)}
    # None is a free slot, whose opponent passes
    slots = [[rows[i] if i < len(rows) else None for i in bracket(len(rows))] for rows in seeded]
    reached = [0] * len(group)
    while any(len(places) > 1 for places in slots):
        meetings = [[*zip(places[::2], places[1::2])] for places in slots]
        met = [(a, b) for places in meetings for a, b in places if a is not None and b is not None]
        results = play(met, judge, both)
        pairs, verdicts = pairs + met, verdicts + results
        share = dict(zip(met, results, strict=True))
        slots = [[_winner(a, b, share, seeds) for a, b in places] for places in meetings]
        for row in (row for places in slots for row in places if row is not None):
            reached[row] += 1
    rates = win_rates(len(group), pairs, verdicts).tolist()
    standing = [*zip(reached, rates)]
    below = [0.5] * len(group)
    for rows in members:
        for row in rows if len(rows) > 1 else []:
            beaten = sum((standing[row] > standing[o]) + 0.5 * (standing[row] == standing[o]) for o in rows)
            # a row ties with itself
            below[row] = (beaten - 0.5) / (len(rows) - 1)
    return torch.tensor(below)


def _winner(a: int | None, b: int | None, share: dict[Pair, float], seeds: dict[int, int]) -> int | None:
    if a is None or b is None:
        return b if a is None else a
    return a if (share[a, b], seeds[b]) > (0.5, seeds[a]) else b


def bracket(members: int) -> list[int]:
    """Seeds in the order of the first round's slots, a power of two of them; the best two meet in the final only."""
    seeds = [0]
    while len(seeds) < members:
        seeds = [place for seed in seeds for place in (seed, 2 * len(seeds) - 1 - seed)]
    return seeds


def _members(group: Sequence[int]) -> list[list[int]]:
    """The rows of each group."""
    rows = defaultdict(list)
    for row, number in enumerate(group):
        rows[number].append(row)
    return list(rows.values())


def _points(pairs: Sequence[Pair], verdicts: Sequence[float]) -> dict[int, list[float]]:
    points: dict[int, list[float]] = defaultdict(list)
    for (i, j), verdict in zip(pairs, verdicts, strict=True):
        points[i].append(verdict)
        points[j].append(1 - verdict)
    return points
