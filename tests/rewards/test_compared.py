"""Rewards from comparisons, against the schedules they name."""

from collections.abc import Sequence

import pytest
import torch

from rewards import Scores, Spec, as_reward, score
from rewards.compared import Compared
from rewards.pairwise import against_one

TEXTS = ["3", "1", "2", "5", "4", "9", "9", "0"]
RECORDS = [{"group": i // 4} for i in range(8)]


def size(texts: Sequence[str], prompts: Sequence[str]) -> list[float]:
    return [float(text) for text in texts]


def test_one_opponent_is_beaten_or_not() -> None:
    made = score(Compared(as_reward(size)), TEXTS, ["p"] * 8, RECORDS).value.tolist()  # type: ignore[arg-type]
    pairs = against_one([0] * 4 + [1] * 4, 0)
    for start in (0, 4):
        (one,) = {b for a, b in pairs if start <= b < start + 4}
        for row in range(start, start + 4):
            others = [row] if row != one else [r for r in range(start, start + 4) if r != one]
            wins = [float(int(TEXTS[r]) > int(TEXTS[one])) + 0.5 * (TEXTS[r] == TEXTS[one]) for r in others]
            share = sum(wins) / len(wins)
            assert made[row] == (share if row != one else pytest.approx(1 - share))


def test_a_tournament_places_the_best_above_all() -> None:
    made = score(Compared(as_reward(size), "tournament"), TEXTS, ["p"] * 8, RECORDS).value  # type: ignore[arg-type]
    assert made[3] == 1 and made[1] < made[0]
    # one of the two equal ones wins, and nothing is below 0
    assert made[5:7].max() == 1 and made[7] == made[4:].min()


def test_asking_twice_cancels_a_judge_that_prefers_a_side() -> None:
    class First:
        name = "first"
        spec = Spec(frozenset({"text", "prompt"}), "pairwise")

        def compare(self, first, second, prompts, metadata):  # type: ignore[no-untyped-def]
            return Scores(torch.ones(len(first)))

    made = score(Compared(First(), "all", both_orders=True), TEXTS, ["p"] * 8, RECORDS)  # type: ignore[arg-type]
    assert made.value.tolist() == [0.5] * 8
