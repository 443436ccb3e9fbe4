"""Means, standard errors over prompts and paired differences, against their closed forms."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from flowalign.evaluation.comparison import Comparison
from flowalign.evaluation.scores import Evaluated
from flowalign.evaluation.statistics import Estimate, estimate, share_interval, significance

NAN = float("nan")


def evaluated(value: list[float], **parts: list[float]) -> Evaluated:
    prompts = [prompt for prompt in ("a", "b", "c") for _ in range(2)]
    metadata = [{"category": "single" if prompt == "a" else "pair"} for prompt in prompts]
    return Evaluated(
        prompts=prompts, metadata=metadata, seeds=list(range(6)), value=value, parts=parts, samples=[], rows=[]
    )


def test_the_error_counts_prompts_and_not_samples() -> None:
    # the prompts' means are 1, 2 and 6: a deviation of sqrt(7)
    found = estimate([0.0, 2.0, 2.0, 2.0, 5.0, 7.0], list("aabbcc"))
    assert found == Estimate(3.0, pytest.approx((7 / 3) ** 0.5))
    assert f"{found}" == "3.000 ± 1.528" and f"{found:+}" == "+3.000 ± 1.528"
    assert f"{Estimate(-0.5, None):+}" == "-0.500"
    # a score that does not apply to a sample; to none of a prompt; to none at all
    assert estimate([0.0, NAN, 2.0], list("aab")) == Estimate(1.0, pytest.approx(1.0))
    assert estimate([1.0, NAN], list("ab")) == Estimate(1.0, None)
    assert estimate([NAN], ["a"]) is None


def test_differences_are_paired_and_by_category() -> None:
    before = evaluated([0.0, 2.0, 2.0, 2.0, 5.0, 7.0], soft=[0.0, 1.0, NAN, NAN, NAN, NAN], only=[0.0] * 6)
    # every sample gains 1, so their spread does not matter
    after = evaluated([1.0, 3.0, 3.0, 3.0, 6.0, 8.0], soft=[1.0, 1.0, NAN, NAN, NAN, NAN])
    rows = {(row.prompts, row.score): row for row in Comparison({"before": before, "after": after}).rows()}
    labels = ("all", "pair", "single")
    assert list(rows) == [(label, score) for label in labels for score in ("reward", "soft")]
    assert rows["all", "reward"].differences == [Estimate(1.0, 0.0)]
    assert rows["single", "reward"].means == [Estimate(1.0, None), Estimate(2.0, None)]
    assert rows["all", "soft"].differences == [Estimate(0.5, None)]
    assert rows["pair", "soft"].means == [None, None]
    record = json.loads(json.dumps(Comparison({"before": before, "after": after}).record()))
    assert record["samples"] == 6 and record["prompts"] == 3 and record["compared_with"] == "before"
    assert record["differences"]["after"]["all"]["reward"] == {"mean": 1.0, "error": 0.0}
    assert record["means"]["before"]["pair"] == {"reward": {"mean": 4.0, "error": pytest.approx(2.0)}}


def test_scores_are_kept_in_a_file(tmp_path: Path) -> None:
    made = evaluated([0.1, 2.0, 2.0, 2.0, 5.0, 7.0], soft=[0.25] * 6)
    made.save(tmp_path / "scores" / "iteration-000003.jsonl")
    assert Evaluated.read(tmp_path / "scores" / "iteration-000003.jsonl") == made


def test_what_judges_wrote_stands_beside_the_samples_of_this_process() -> None:
    made = replace(evaluated([0.0] * 6), samples=["x", "y"], rows=[1, 4], replies=[{"quality": "2"}, {"quality": "5"}])
    assert [(sample, line["seed"], line["replies"]) for sample, line in made.lines()] == [
        ("x", 1, {"quality": "2"}),
        ("y", 4, {"quality": "5"}),
    ]


def test_significance_counts_prompts_and_agrees_with_scipy() -> None:
    # 5 prompts, all gains alike: 2 of 32 patterns of signs
    found = significance([0.1] * 10, [name for name in "abcde" for _ in range(2)])
    assert found.p == 2 / 32 and found.low == pytest.approx(0.1) == found.high and found.better == 1
    assert significance([1.0, 2.0], ["a", "a"]) is None and significance([NAN, 1.0], ["a", "b"]) is None
    few = np.array([0.3, -0.1, 0.8, 0.2, 0.0, 0.5, -0.2])
    expected = stats.permutation_test((few,), np.sum, permutation_type="samples", n_resamples=np.inf)
    assert significance(few.tolist(), list("abcdefg")).p == pytest.approx(expected.pvalue)
    assert significance(few.tolist(), list("abcdefg")).better == 4.5 / 7
    many = np.random.default_rng(1).normal(0.15, 1.0, 200)
    found = significance(many.tolist(), [str(n) for n in range(200)])
    assert found.p == pytest.approx(stats.ttest_1samp(many, 0).pvalue, abs=0.01)
    means = np.random.default_rng(0).choice(many, (9999, 200)).mean(1)
    assert (found.low, found.high) == pytest.approx(np.percentile(means, (2.5, 97.5)), abs=0.01)


def test_the_interval_of_a_share_is_exact() -> None:
    """7 of 10 may be a coin's (0.348 to 0.933 in tables of Clopper and Pearson), 70 of 100 not."""
    assert share_interval(0.7, 10) == pytest.approx((0.3475, 0.9333), abs=1e-4)
    assert share_interval(0.7, 100)[0] > 0.5
