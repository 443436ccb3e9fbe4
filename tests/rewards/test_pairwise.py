"""Comparisons: who meets whom, what verdicts are worth, and how few tell the best."""

import random
from collections.abc import Sequence

import pytest
import torch

from rewards import Scores, Spec, as_reward, score
from rewards.pairwise import (
    Compared,
    Games,
    Pair,
    against_one,
    all_pairs,
    both_orders,
    bracket,
    compare,
    tournament,
    win_rates,
)


class Judge:
    """Prefers the higher quality, with an optional bias for what is shown first; counts what it is asked."""

    def __init__(self, quality: Sequence[float], bias: float = 0.0) -> None:
        self.quality, self.bias = quality, bias
        self.asked: list[Pair] = []
        self.calls = 0

    def __call__(self, pairs: list[Pair]) -> list[float]:
        assert pairs
        self.asked += pairs
        self.calls += 1
        margins = [self.quality[i] - self.quality[j] + self.bias for i, j in pairs]
        return [0.5 if m == 0 else float(m > 0) for m in margins]


def test_all_pairs_meet_once_within_their_group() -> None:
    assert all_pairs([0, 1, 0, 1, 0]) == [(0, 2), (0, 4), (2, 4), (1, 3)]


def test_one_random_member_meets_all_the_others() -> None:
    group = [0, 0, 0, 0, 5, 5, 5]
    chosen = set()
    for seed in range(60):
        pairs = against_one(group, seed)
        ones = {group[j]: j for _, j in pairs}
        assert sorted(i for i, _ in pairs) == sorted(set(range(7)) - set(ones.values()))
        assert all(group[i] == group[j] for i, j in pairs)
        chosen |= set(ones.values())
    assert chosen == set(range(7))
    assert against_one(group, 3) == against_one(group, 3)


def test_both_orders() -> None:
    assert both_orders([(0, 1), (2, 3)]) == [(0, 1), (2, 3), (1, 0), (3, 2)]


def test_win_rates_are_wins_over_comparisons() -> None:
    """By hand: 0 beats 1, ties with 2; 1 beats 2; 3 meets nobody."""
    rates = win_rates(4, [(0, 1), (0, 2), (1, 2)], [1, 0.5, 1])
    torch.testing.assert_close(rates, torch.tensor([0.75, 0.5, 0.25, 0.5]))
    with pytest.raises(ValueError, match="zip"):
        win_rates(2, [(0, 1)], [1, 0])


def test_an_exact_judge_of_all_pairs_gives_the_ranks() -> None:
    quality, group = [0.3, 0.9, 0.1, 0.3, 0.5, 0.2, 0.8], [0, 0, 0, 0, 1, 1, 1]
    rates = compare(group, Judge(quality))
    assert rates.tolist() == pytest.approx([0.5, 1, 0, 0.5, 0.5, 0, 1])


def test_both_orders_take_a_position_bias_out() -> None:
    quality = [0.0, 0.1, 0.2, 0.9]
    fair, group = compare([0] * 4, Judge(quality)), [0] * 4
    biased = compare(group, Judge(quality, bias=0.35))
    assert biased[0] > biased[2]
    both = compare(group, Judge(quality, bias=0.35), both=True)
    # close pairs become ties, the clear winner stays; nobody gains from being first
    torch.testing.assert_close(both, torch.tensor([1 / 3, 1 / 3, 1 / 3, 1.0]))
    assert fair.argmax() == both.argmax()


def test_the_bracket_keeps_the_best_apart() -> None:
    assert bracket(1) == [0]
    assert bracket(4) == [0, 3, 1, 2]
    assert bracket(5) == bracket(8) == [0, 7, 3, 4, 1, 6, 2, 5]


def literal_tournament(quality: list[float], one: int) -> list[float]:
    """ArenaRL's scheme for one group of a power of two and an exact judge, played by hand."""

    def beats(i: int, j: int) -> float:
        return 0.5 if quality[i] == quality[j] else float(quality[i] > quality[j])

    points: list[list[float]] = [[] for _ in quality]
    for i in range(len(quality)):
        if i != one:
            points[i].append(beats(i, one))
            points[one].append(1 - beats(i, one))
    seeded = sorted(range(len(quality)), key=lambda i: -sum(points[i]) / len(points[i]))
    alive, out = [seeded[i] for i in bracket(len(quality))], {}
    stage = 0
    while len(alive) > 1:
        winners = []
        for a, b in zip(alive[::2], alive[1::2]):
            points[a].append(beats(a, b))
            points[b].append(beats(b, a))
            better = beats(a, b) > 0.5 or (beats(a, b) == 0.5 and seeded.index(a) < seeded.index(b))
            winners.append(a if better else b)
            out[b if better else a] = stage
        alive, stage = winners, stage + 1
    out[alive[0]] = stage
    key = [(out[i], sum(points[i]) / len(points[i])) for i in range(len(quality))]
    n = len(quality)
    return [(sum(k < key[i] for k in key) + 0.5 * (sum(k == key[i] for k in key) - 1)) / (n - 1) for i in range(n)]


@pytest.mark.parametrize("seed", range(10))
def test_the_tournament_is_the_one_played_by_hand(seed: int) -> None:
    rng = random.Random(seed)
    quality = [float(rng.randrange(6)) for _ in range(8)]
    one = against_one([0] * 8, seed)[0][1]
    rewards = tournament([0] * 8, Judge(quality), seed)
    torch.testing.assert_close(rewards, torch.tensor(literal_tournament(quality, one)))


@pytest.mark.parametrize("size", range(2, 14))
def test_a_tournament_of_any_size_finds_the_best_and_asks_little(size: int) -> None:
    rng = random.Random(size)
    quality = [rng.random() for _ in range(size)]
    judge = Judge(quality)
    rewards = compare([7] * size, judge, "tournament", seed=1)
    assert rewards.argmax().item() == max(range(size), key=quality.__getitem__)
    assert rewards.max() == 1 and rewards.min() >= 0
    assert rewards.mean().item() == pytest.approx(0.5)
    assert len(judge.asked) == 2 * (size - 1)


def test_groups_of_different_sizes_play_side_by_side() -> None:
    group = [0] * 8 + [1] * 3 + [2]
    quality = [random.random() for _ in group]
    judge = Judge(quality)
    together = tournament(group, judge, 5)
    # seeding and three rounds
    assert judge.calls == 4
    for number in (0, 1, 2):
        rows = [row for row, g in enumerate(group) if g == number]
        if len(rows) > 1:
            assert together[rows].argmax().item() == max(range(len(rows)), key=lambda i: quality[rows[i]])
            assert together[rows].mean().item() == pytest.approx(0.5)
    assert together[-1] == 0.5


@pytest.mark.parametrize("schedule", ["all", "one", "tournament"])
@pytest.mark.parametrize("both", [False, True])
def test_the_budget_is_what_is_asked(schedule: str, both: bool) -> None:
    judge = Judge([random.random() for _ in range(6)])
    rewards = compare([0] * 6, judge, schedule, 2, both)
    once = {"all": 15, "one": 5, "tournament": 10}[schedule]
    assert len(judge.asked) == once * (1 + both)
    assert rewards.shape == (6,) and rewards.dtype == torch.float32


def test_a_group_of_one_asks_nothing() -> None:
    judge = Judge([1.0])
    for schedule in ("all", "one", "tournament"):
        assert compare([0], judge, schedule).tolist() == [0.5]
    assert not judge.calls


TEXTS = ["3", "1", "2", "5", "4", "9", "9", "0"]
RECORDS = [{"group": i // 4} for i in range(8)]


def size(texts: Sequence[str], prompts: Sequence[str]) -> list[float]:
    return [float(text) for text in texts]


def test_one_opponent_is_beaten_or_not() -> None:
    made = score(Compared(as_reward(size)), TEXTS, ["p"] * 8, RECORDS).value.tolist()
    pairs = against_one([0] * 4 + [1] * 4, 0)
    for start in (0, 4):
        (one,) = {b for a, b in pairs if start <= b < start + 4}
        for row in range(start, start + 4):
            others = [row] if row != one else [r for r in range(start, start + 4) if r != one]
            wins = [float(int(TEXTS[r]) > int(TEXTS[one])) + 0.5 * (TEXTS[r] == TEXTS[one]) for r in others]
            share = sum(wins) / len(wins)
            assert made[row] == (share if row != one else pytest.approx(1 - share))


def test_a_tournament_places_the_best_above_all() -> None:
    made = score(Compared(as_reward(size), "tournament"), TEXTS, ["p"] * 8, RECORDS).value
    assert made[3] == 1 and made[1] < made[0]
    # one of the two equal ones wins, and nothing is below 0
    assert made[5:7].max() == 1 and made[7] == made[4:].min()


def test_asking_twice_cancels_a_judge_that_prefers_a_side() -> None:
    class First:
        name = "first"
        spec = Spec(frozenset({"text", "prompt"}), "pairwise")

        def compare(self, first, second, prompts, metadata):  # type: ignore[no-untyped-def]
            return Scores(torch.ones(len(first)))

    made = score(Compared(First(), "all", both_orders=True), TEXTS, ["p"] * 8, RECORDS)
    assert made.value.tolist() == [0.5] * 8


def test_games_remember_who_won_and_what_could_not_be_read() -> None:
    """By hand: 0 meets 1 in both orders, 1 meets 2 once, 3 nobody; the second verdict is unread, a tie."""

    class Scripted:
        name = "scripted"
        spec = Spec(frozenset({"text", "prompt"}), "pairwise")

        def compare(self, first, second, prompts, metadata):  # type: ignore[no-untyped-def]
            known = {("a", "b"): (1.0, 0.0), ("b", "a"): (0.5, 1.0), ("b", "c"): (0.25, 0.0)}
            values, unparsed = zip(*(known[pair] for pair in zip(first, second, strict=True)), strict=True)
            return Scores(torch.tensor(values), {"unparsed": torch.tensor(unparsed)})

    games = Games(Scripted(), ["a", "b", "c", "d"], ["p"] * 4, [{}] * 4)
    assert games([(0, 1), (1, 0)]) == [1.0, 0.5] and games([(1, 2)]) == [0.25]
    nan = torch.nan
    expected = [[nan, 0.75, nan, nan], [0.25, nan, 0.25, nan], [nan, 0.75, nan, nan], [nan] * 4]
    torch.testing.assert_close(games.table(), torch.tensor(expected), equal_nan=True)
    torch.testing.assert_close(games.parts()["unparsed"], torch.tensor([0.5, 1 / 3, 0, nan]), equal_nan=True)
