"""Selections by what was measured: the priorities number by number, what is picked, and that a checkpoint keeps it."""

import json
import math

import numpy as np
import pytest
from scipy import stats

from flowalign.data import Prompts
from flowalign.data.selection.measured import MeasuredSelection, Paired, Uncertain, Valued, Varied

PROMPTS = Prompts([f"p{i}" for i in range(12)], [{} for _ in range(12)])
RATES = [0.0, 1 / 8, 0.5, 7 / 8, 1.0, 0.25, 0.75, 0.5, 1.0, 0.0, 5 / 8, 3 / 8]


def seen(selection: MeasuredSelection) -> MeasuredSelection:
    selection.learn(range(12), PROMPTS, RATES, [0.0] * 12)
    selection.drawn = 12
    return selection


def test_uncertain_prompts_get_the_groups() -> None:
    selection = Uncertain(members=8, explore=0.2)
    assert sorted(selection.picks(PROMPTS, 0, 12, 3)) == list(range(12)), "what was never drawn comes first"
    seen(selection)
    counts = [1.0] * 12

    def half(n: float) -> float:
        return stats.t.ppf(0.975, n - 1) / math.sqrt(n)

    for _ in range(10):
        worth = []
        for rate, count in zip(RATES, counts, strict=True):
            n = 8 * count
            s = np.std([1.0] * round(rate * n) + [0.0] * round((1 - rate) * n), ddof=1)
            worth.append(s * (half(n) - half(n + 8)) + 0.2 * math.sqrt(math.log(1 + 8 * sum(counts)) / n))
        assert selection.priorities(np.array(counts)) == pytest.approx(worth)
        best = max(range(12), key=lambda i: worth[i])
        counts[best] += 1
    picks = selection.picks(PROMPTS, 1, 10, 3)
    assert sorted(round(RATES[pick], 3) for pick in picks)[0] > 0, "nothing is learned of what is known"
    assert set(picks[:2]) == {2, 7}, "those of one in two are the least certain"


def test_replaced_groups_go_to_the_most_valuable() -> None:
    selection = seen(Valued(hard=0.5))
    plain = [pick for iteration in range(3) for pick in selection.picks(PROMPTS, iteration, 4, 0)]
    assert sorted(plain) == list(range(12))
    value = [4 * p * (1 - p) + 0.5 * (1 - p) for p in RATES]
    best = sorted(range(12), key=lambda i: -value[i])[:3]
    assert set(selection.picks(PROMPTS, 3, 3, 0, round=1)) == set(best)


def test_a_few_examples_that_varied_most() -> None:
    selection = Varied(examples=2, passes=3)
    random = np.random.default_rng(0)
    for iteration in range(9):
        picks = selection.picks(PROMPTS, iteration, 4, 0)
        selection.learn(picks, PROMPTS, [random.integers(2) if pick in (3, 8) else 0.5 for pick in picks], [0.0] * 4)
    if {0.0} == {np.var(selection.history[i]) for i in (3, 8)}:
        raise AssertionError("the draws of this test do not vary")
    varied = {i for i in (3, 8) if np.var(selection.history[i]) > 0}
    picked = selection.picks(PROMPTS, 9, 6, 0)
    assert varied <= set(picked) and len(set(picked)) == 2


def test_hard_and_easy_prompts_come_in_pairs() -> None:
    selection = Paired()
    first = [pick for iteration in range(3) for pick in selection.picks(PROMPTS, iteration, 4, 1)]
    assert sorted(first) == list(range(12))
    seen(selection)
    picks = selection.picks(PROMPTS, 4, 6, 1)
    assert set(picks[::2]) == {1, 5} and set(picks[1::2]) == {3, 6}


@pytest.mark.parametrize("kind", [Uncertain, Valued, Varied, Paired])
def test_what_was_measured_survives_a_checkpoint(kind: type[MeasuredSelection]) -> None:
    selection = seen(kind())
    selection.picks(PROMPTS, 0, 4, 0)
    again = kind()
    again.load_state_dict(json.loads(json.dumps(selection.state_dict())))
    assert again.picks(PROMPTS, 1, 5, 2) == selection.picks(PROMPTS, 1, 5, 2)
    assert again.state_dict() == selection.state_dict()
