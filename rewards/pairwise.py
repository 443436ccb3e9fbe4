"""Comparisons within groups: who meets whom, what the verdicts are worth, and rewards made of them.

Verdicts come from a reward that compares pairs; all groups of a batch are asked in one call, so that it can batch.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

from rewards import base
from rewards.base import (
    UNPARSED,
    Around,
    Metadata,
    PairwiseReward,
    Reward,
    Scores,
    Spec,
    as_reward,
    groups,
    score,
    spec_of,
)

Pair = tuple[int, int]
Ask = Callable[[list[Pair]], Sequence[float]]
"""[(i, j), ...], shown in this order -> for each 1 if row i wins, 0 if row j does, 0.5 for a tie or no verdict"""
Schedule = Literal["all", "tournament", "one"]


def compare(
    group: Sequence[int],
    ask: Ask,
    schedule: Schedule = "all",
    seed: int = 0,
    both: bool = False,
    opponents: int | None = None,
) -> Tensor:
    """Rewards [B] in [0, 1] from comparisons within the groups; the mean of a group is 1/2 if all meet all.

    Args:
        group: [B] group numbers; members of a group of one get 1/2.
        ask: gives the verdicts.
        schedule: 'all' pairs, each once (Pref-GRPO, arXiv 2508.20751); 'one' random member against all the others
            (BRPO, Writing-Zero, 2506.00103); a seeded single-elimination 'tournament' (ArenaRL, 2601.06487).
        seed: seed of the random member; another each iteration.
        both: ask every pair in both orders and average, against a judge's liking for a place.
        opponents: opponents for 'all', as in `all_pairs`.
    """
    if schedule == "tournament":
        return tournament(group, ask, seed, both)
    pairs = all_pairs(group, opponents) if schedule == "all" else against_one(group, seed)
    return win_rates(len(group), pairs, play(pairs, ask, both))


def all_pairs(group: Sequence[int], opponents: int | None = None) -> list[Pair]:
    """Every pair of every group once, the lower row first.

    Args:
        opponents: only members at most so many places apart when their group stands in a ring; default all.
    """
    pairs = []
    for rows in _members(group):
        count = len(rows)
        reach = opponents or count
        pairs += [(rows[i], rows[j]) for i, j in combinations(range(count), 2) if min(j - i, count - (j - i)) <= reach]
    return pairs


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


def play(pairs: list[Pair], ask: Ask, both: bool = False) -> list[float]:
    """The first's share of the win in each pair; with `both` the average over the two orders."""
    if not pairs:
        return []
    if not both:
        return list(ask(pairs))
    verdicts = list(ask(both_orders(pairs)))
    forth, back = verdicts[: len(pairs)], verdicts[len(pairs) :]
    return [(a + 1 - b) / 2 for a, b in zip(forth, back, strict=True)]


def win_rates(count: int, pairs: Sequence[Pair], verdicts: Sequence[float]) -> Tensor:
    """Wins over comparisons of each of `count` rows, [count] float32; 1/2 for a row that met nobody."""
    points: dict[int, list[float]] = defaultdict(list)
    for (i, j), verdict in zip(pairs, verdicts, strict=True):
        points[i].append(verdict)
        points[j].append(1 - verdict)
    return torch.tensor([sum(points[row]) / len(points[row]) if points[row] else 0.5 for row in range(count)])


def tournament(group: Sequence[int], ask: Ask, seed: int = 0, both: bool = False) -> Tensor:
    """Share of the group placed below each row after a seeded single elimination, [B] in [0, 1] (arXiv 2601.06487).

    Comparisons with one random member order the members, a bracket keeps the good ones apart until late, and the
    place is the round reached, then the win rate over all comparisons. In the bracket a tie goes to the better
    seed. 2 (G - 1) comparisons for a group of G, and log2(G) + 1 calls of the judge.

    Departure from the authors' code: a group that is no power of two gives the free passes to its best seeds.
    """
    members = _members(group)
    pairs = against_one(group, seed)
    verdicts = play(pairs, ask, both)
    rates = win_rates(len(group), pairs, verdicts).tolist()
    seeded = [sorted(rows, key=lambda row: -rates[row]) for rows in members]
    seeds = {row: rank for rows in seeded for rank, row in enumerate(rows)}
    # None is a free slot, whose opponent passes
    slots = [[rows[i] if i < len(rows) else None for i in bracket(len(rows))] for rows in seeded]
    reached = [0] * len(group)
    while any(len(bracketed) > 1 for bracketed in slots):
        meetings = [[*zip(bracketed[::2], bracketed[1::2])] for bracketed in slots]
        met = [(a, b) for bracketed in meetings for a, b in bracketed if a is not None and b is not None]
        results = play(met, ask, both)
        pairs, verdicts = pairs + met, verdicts + results
        share = dict(zip(met, results, strict=True))
        slots = [[_winner(a, b, share, seeds) for a, b in bracketed] for bracketed in meetings]
        for row in (row for bracketed in slots for row in bracketed if row is not None):
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
        seeds = [slot for seed in seeds for slot in (seed, 2 * len(seeds) - 1 - seed)]
    return seeds


def _members(group: Sequence[int]) -> list[list[int]]:
    """The rows of each group."""
    rows = defaultdict(list)
    for row, number in enumerate(group):
        rows[number].append(row)
    return list(rows.values())


class ScoreJudge(Around):
    """Compares two samples by a pointwise reward.

    Args:
        reward: whose higher score wins.
        margin: scores no further apart than this are a tie.
    """

    def __init__(self, reward: Reward, margin: float = 0.0) -> None:
        self.reward, self.margin = reward, margin
        self.name = reward.name

    @property
    def spec(self) -> Spec:
        return replace(spec_of(self.reward), kind="pairwise")

    def compare(
        self, first: Sequence[Any], second: Sequence[Any], prompts: Sequence[str], metadata: Metadata
    ) -> Scores:
        """1 where the first wins, 0 where the second does, 0.5 for a tie."""
        # a sample meets many others and is scored once
        met = {
            (id(sample), prompt): (sample, prompt, record)
            for side in (first, second)
            for sample, prompt, record in zip(side, prompts, metadata, strict=True)
        }
        scored = dict(zip(met, score(self.reward, *zip(*met.values(), strict=True)).value.tolist(), strict=True))
        gaps = [scored[id(a), prompt] - scored[id(b), prompt] for a, b, prompt in zip(first, second, prompts)]
        return Scores(torch.tensor([0.5 if abs(gap) <= self.margin else float(gap > 0) for gap in gaps]))


def as_judge(reward: PairwiseReward | Reward) -> PairwiseReward:
    """A pairwise reward as it is, a pointwise one wrapped."""
    return cast(PairwiseReward, reward) if hasattr(reward, "compare") else ScoreJudge(as_reward(reward))


class Games:
    """Asks a pairwise reward about pairs of B samples, and remembers the verdicts."""

    def __init__(
        self, reward: PairwiseReward, samples: Sequence[Any], prompts: Sequence[str], metadata: Metadata
    ) -> None:
        self.reward, self.samples, self.prompts, self.metadata = reward, samples, prompts, metadata
        self.pairs: list[Pair] = []
        self.verdicts: list[Scores] = []

    def __call__(self, pairs: list[Pair]) -> list[float]:
        """The first's share of the win in each pair."""
        first, second = zip(*pairs, strict=True)
        verdicts = base.compare(
            self.reward,
            [self.samples[i] for i in first],
            [self.samples[j] for j in second],
            [self.prompts[i] for i in first],
            [self.metadata[i] for i in first],
        )
        self.pairs += pairs
        self.verdicts.append(verdicts)
        return verdicts.value.tolist()

    def parts(self) -> dict[str, Tensor]:
        """[B] each part's mean over a sample's comparisons, as its own share of the win; NaN is left out.

        The part `unparsed` is its share of comparisons without a verdict. A sample without comparisons has NaN.
        """
        if not self.pairs:
            return {}
        rows, count = torch.tensor(self.pairs).T.flatten(), len(self.samples)
        means = {}
        for name, values in Scores.cat(self.verdicts).parts.items():
            shares = torch.cat([values, values if name == UNPARSED else 1 - values])
            known = ~shares.isnan()
            total = torch.zeros(count).index_add_(0, rows[known], shares[known])
            means[name] = total / rows[known].bincount(minlength=count)
        return means

    def replies(self) -> list[dict[str, str]] | None:
        """A judge's replies about a sample and each other one of its group; None where it wrote nothing."""
        written = Scores.cat(self.verdicts).replies if self.pairs else None
        if written is None:
            return None
        of_sample: list[dict[str, str]] = [{} for _ in self.samples]
        for (i, j), texts in zip(self.pairs, written, strict=True):
            for name, text in texts.items():
                of_sample[i][f"{name}, first, beside {self._seed(j)}"] = text
                of_sample[j][f"{name}, second, beside {self._seed(i)}"] = text
        return of_sample

    def _seed(self, row: int) -> str:
        return f"seed {self.metadata[row]['seed']}" if "seed" in self.metadata[row] else f"sample {row}"

    def table(self) -> Tensor:
        """[B, B] the row's mean share of the win over the column, NaN for pairs that did not meet."""
        total, times = torch.zeros(2, len(self.samples), len(self.samples))
        if self.pairs:
            i, j = torch.tensor(self.pairs).T
            value = Scores.cat(self.verdicts).value
            for a, b, share in ((i, j, value), (j, i, 1 - value)):
                total.index_put_((a, b), share, accumulate=True)
                times.index_put_((a, b), torch.ones_like(share), accumulate=True)
        return total / times


class WinRate(Around):
    """The mean probability of a sample to beat others of its group (Pref-GRPO, arXiv 2508.20751), in [0, 1].

    A sample alone in its group gets 0.5. A part of the verdicts becomes a sample's mean over its comparisons.

    Args:
        reward: a pairwise reward, or a pointwise one whose higher score wins.
        opponents: how many members on either side of a sample it is compared with, the group standing in a ring;
            default all.
    """

    title = "win_rate"

    def __init__(self, reward: PairwiseReward | Reward, opponents: int | None = None) -> None:
        self._compare(reward, "all", True, opponents)

    def _compare(
        self, reward: PairwiseReward | Reward, schedule: Schedule, both_orders: bool, opponents: int | None = None
    ) -> None:
        self.reward, self.schedule = as_judge(reward), schedule
        self.both_orders, self.opponents = both_orders, opponents
        self.name = f"{self.title}({self.reward.name})"
        self.spec = replace(spec_of(self.reward), kind="group", differentiable=False)

    def __call__(self, samples: Sequence[Any], prompts: Sequence[str], metadata: Metadata) -> Scores:
        group = [0] * len(samples)
        for number, members in enumerate(groups(prompts, metadata)):
            for i in members:
                group[i] = number
        games = Games(self.reward, samples, prompts, metadata)
        value = compare(group, games, self.schedule, both=self.both_orders, opponents=self.opponents)
        return Scores(value, games.parts(), replies=games.replies())


class Compared(WinRate):
    """Win rates with O(G) comparisons of a group of G: BRPO's one opponent, ArenaRL's tournament.

    BRPO is arXiv 2506.00103, ArenaRL 2601.06487. The random member has the same place in its group every time: members
    are drawn alike, so any place is random.

    Args:
        reward: a pairwise reward, or a pointwise one whose higher score wins.
        schedule: 'one' random member against all others, 'tournament', or 'all' pairs.
        both_orders: ask twice, against a judge's liking for a place.
    """

    title = "compared"

    def __init__(self, reward: PairwiseReward | Reward, schedule: Schedule = "one", both_orders: bool = False) -> None:
        self._compare(reward, schedule, both_orders)
