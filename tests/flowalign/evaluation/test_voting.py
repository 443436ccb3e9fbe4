"""What votes leave open, agreement and how many more are needed, where the answer is known."""

import numpy as np
import pytest
from scipy.special import expit

from flowalign.evaluation.voting import BradleyTerry, alpha, more_needed, wilson
from scripts.compare_vote_order import accuracies


def test_the_posterior_is_that_of_the_same_model_written_with_weights() -> None:
    rng = np.random.default_rng(0)
    features, (first, second) = rng.normal(size=(12, 3)), np.triu_indices(12, 1)
    model = BradleyTerry(features, first, second)
    votes, worth = rng.permutation(len(first))[:30], rng.integers(0, 3, 30) / 2
    model.fit(votes, worth)
    each = np.eye(12)[second] - np.eye(12)[first]
    columns = np.concatenate([model.linear, each * np.sqrt(model.single)], 1)
    weights = np.zeros(15)
    for _ in range(30):
        chance = expit(columns[votes] @ weights)
        precision = np.eye(15) + columns[votes].T @ ((chance * (1 - chance))[:, None] * columns[votes])
        weights -= np.linalg.solve(precision, columns[votes].T @ (chance - worth) + weights)
    mean, variance = model.predict(np.arange(len(first)))
    np.testing.assert_allclose(mean, columns @ weights, atol=1e-6)
    np.testing.assert_allclose(variance, ((columns @ np.linalg.inv(precision)) * columns).sum(1), atol=1e-6)


def test_a_pair_whose_order_follows_from_others_is_less_open() -> None:
    # a > b and b > c were voted three times each: of a > c little is left to learn, of two new samples much
    model = BradleyTerry(np.zeros((5, 0)), np.array([0, 1, 0, 3]), np.array([1, 2, 2, 4]))
    model.fit(np.array([0, 0, 0, 1, 1, 1]), np.zeros(6))
    openness = model.openness(np.arange(4))
    assert openness.argmax() == 3 and openness[2] < openness[3] / 2


def test_chosen_pairs_teach_a_reward_with_a_third_fewer_votes() -> None:
    features = np.random.default_rng(0).normal(size=(60, 4, 6))
    curves = {how: np.mean([accuracies(features, how, 60, seed) for seed in range(3)], 0) for how in ("random", "open")}
    assert (curves["open"][:40] >= curves["random"][-1]).any()


def test_alpha_is_that_of_krippendorffs_coincidence_matrix() -> None:
    rng = np.random.default_rng(1)
    kinds = ("first", "second", "tie")
    table = {rater: {str(p): kinds[rng.integers(3)] for p in range(20) if rng.random() < 0.8} for rater in "abc"}
    matrix = np.zeros((3, 3))
    for p in map(str, range(20)):
        votes = [kinds.index(table[rater][p]) for rater in "abc" if p in table[rater]]
        for i, one in enumerate(votes):
            for j, other in enumerate(votes):
                if i != j:
                    matrix[one, other] += 1 / (len(votes) - 1)
    totals, number = matrix.sum(0), matrix.sum()
    expected = 1 - (number - 1) * (number - np.trace(matrix)) / (number**2 - (totals**2).sum())
    agreement, pairs = alpha(table)
    assert agreement is not None and agreement.mean == pytest.approx(expected) and pairs <= 20
    assert agreement.low is not None and agreement.high is not None and agreement.low < expected < agreement.high
    same, _ = alpha({rater: {str(p): kinds[p % 2] for p in range(20)} for rater in "ab"})
    assert same is not None and same.mean == 1
    assert alpha({"a": {"1": "tie"}, "b": {"1": "tie"}}) == (None, 1) and alpha({"a": {"1": "tie"}}) == (None, 0)


@pytest.mark.parametrize("wins, trials", [(6, 10), (55, 100), (41, 80)])
def test_more_votes_tell_a_rate_that_stays(wins: int, trials: int) -> None:
    needed = more_needed(wins, trials)
    assert needed is not None and needed[1] is not None
    fewest, staying = needed
    assert fewest <= staying
    for more, told in ((staying, True), (staying - 2, False)):
        number = trials + more
        assert (wilson(number * wins / trials, number)[0] > 0.5) == told


def test_votes_that_tell_need_no_more_and_a_half_never_tells() -> None:
    assert more_needed(80, 100) is None and more_needed(20, 100) is None
    assert more_needed(5, 10) == (more_needed(5, 10)[0], None)  # type: ignore[index]
    assert more_needed(0, 0) == (4, None)
