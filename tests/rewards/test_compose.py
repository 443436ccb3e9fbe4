"""Composition and the cache, each formula against numbers worked out by hand or with another library."""

import asyncio
import math
import threading

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.special import expit

from rewards import (
    FunctionReward,
    RewardError,
    Scores,
    Spec,
    WeightedSum,
    advance,
    groups,
    reference_images,
    score,
    spec_of,
)
from rewards.cache import Cached
from rewards.compose import (
    Agreement,
    Gate,
    JudgedBy,
    MeanMinusSpread,
    Normalized,
    Product,
    Rescaled,
    ScheduledSum,
    WorstCase,
)
from rewards.frames import PerFrame
from rewards.pairwise import WinRate, all_pairs
from rewards.references import BoundedCentred, CalibratedReward, LogSigmoidSum
from rewards.routed import Routed

PROMPTS = ["x", "x", "x", "y", "y"]
NO_METADATA = [{}] * 5
A, B = [0.1, 0.5, 0.9, 0.2, 0.2], [3.0, 1.0, 2.0, 4.0, 8.0]
PICTURES = [Image.new("RGB", (4, 4), (40 * i, 10, 10)) for i in range(5)]


def table(values, name):
    """A pointwise reward that knows its pictures by their red."""
    return FunctionReward(lambda images, prompts: [values[i.getpixel((0, 0))[0] // 40] for i in images], name)


class Brightness:
    """A differentiable reward."""

    name = "brightness"
    spec = Spec(frozenset({"image"}), differentiable=True)

    def __call__(self, samples, prompts, metadata):
        return Scores(torch.tensor([float(np.asarray(image).mean()) / 255 for image in samples]))

    def score_pixels(self, pixels, prompts, metadata):
        return Scores(pixels.mean(dim=(1, 2, 3)))


class BradleyTerry:
    """A pairwise reward."""

    spec = Spec(kind="pairwise")

    def __init__(self, reward, temperature=1.0):
        self.reward, self.temperature, self.name = reward, temperature, "bradley_terry"

    def compare(self, first, second, prompts, metadata):
        gap = score(self.reward, first, prompts, metadata).value - score(self.reward, second, prompts, metadata).value
        return Scores((gap / self.temperature).sigmoid())


def values(reward, prompts=PROMPTS, metadata=NO_METADATA):
    return score(reward, PICTURES, prompts, metadata).value


a, b = table(A, "a"), table(B, "b")


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        (WeightedSum([a, b], [2.0, -1.0]), [2 * x - y for x, y in zip(A, B)]),
        (WeightedSum([a, b]), [x + y for x, y in zip(A, B)]),
        (Product([a, b]), [x * y for x, y in zip(A, B)]),
        (WorstCase([a, b]), [min(x, y) for x, y in zip(A, B)]),
        (MeanMinusSpread([a, b], 0.5), [(x + y) / 2 - 0.5 * abs(x - y) / 2 for x, y in zip(A, B)]),
        (Gate(a, b, threshold=0.5, otherwise=-1.0), [-1.0, 1.0, 2.0, -1.0, -1.0]),
        (Rescaled(b, 2.0, 4.0), [0.5, 0.0, 0.0, 1.0, 1.0]),
        (Rescaled(b, 2.0, 4.0, clip=False), [0.5, -0.5, 0.0, 1.0, 3.0]),
        (BoundedCentred(b, reference=2.0, scale=0.5), [expit((y - 2) / 0.5) for y in B]),
        (
            LogSigmoidSum([a, b], [1.0, 0.5], [0.1, 2.0], reference=1.0),
            [math.log(expit((x - 1) / 0.1)) + 0.5 * math.log(expit((y - 1) / 2)) for x, y in zip(A, B)],
        ),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_formula(reward, expected):
    torch.testing.assert_close(values(reward), torch.tensor(expected, dtype=torch.float32))


def test_every_part_stays_visible_also_of_one_name():
    parts = score(WeightedSum([a, table(B, "a")], [1.0, 1.0]), PICTURES, PROMPTS, NO_METADATA).parts
    assert list(parts) == ["a", "a_2"]
    nested = score(WeightedSum([Product([a, b])]), PICTURES, PROMPTS, NO_METADATA).parts
    assert list(nested) == ["product(a,b)", "product(a,b)/a", "product(a,b)/b"]


def test_normalized_within_groups_is_the_z_score():
    ours = values(Normalized([a, b], [1.0, 2.0]))
    rows = np.array([A, B])
    for members in ([0, 1, 2], [3, 4]):
        own = rows[:, members]
        deviation = own.std(axis=1, keepdims=True)
        z = np.divide(own - own.mean(axis=1, keepdims=True), deviation, out=np.zeros_like(own), where=deviation > 0)
        np.testing.assert_allclose(ours[members], np.array([1.0, 2.0]) @ z, atol=1e-4)


def test_normalized_over_the_batch():
    ours = values(Normalized([b], over="batch"))
    np.testing.assert_allclose(ours, (np.array(B) - np.mean(B)) / np.std(B), atol=1e-5)
    assert spec_of(Normalized([b], over="batch")).kind == "set" and spec_of(Normalized([b])).kind == "group"


def test_agreement_weights_each_sample_by_its_disagreement_with_its_group():
    scores = score(Agreement(b, temperature=2.0), PICTURES, PROMPTS, NO_METADATA)
    assert scores.value.tolist() == B
    apart = [[abs(B[i] - B[j]) for j in members if j != i] for members in ([0, 1, 2], [3, 4]) for i in members]
    expected = torch.tensor([math.exp(-np.mean(own) / 2) for own in apart])
    torch.testing.assert_close(scores.weight, expected)
    # of two generations both have Ctrl-U's weight; of three each has its own
    assert scores.weight[3] == scores.weight[4] and len(set(scores.weight[:3].tolist())) > 1
    alone = score(Agreement(b), PICTURES, list("vwxyz"), NO_METADATA)
    assert alone.weight.tolist() == [1.0] * 5


def test_weights_are_kept_and_multiplied():
    one, two = Agreement(b), Agreement(a, temperature=3.0)
    first, second = (score(reward, PICTURES, PROMPTS, NO_METADATA).weight for reward in (one, two))
    summed = score(WeightedSum([one, a, two], [2.0, 1.0, 0.5]), PICTURES, PROMPTS, NO_METADATA)
    torch.testing.assert_close(summed.weight, first * second)
    torch.testing.assert_close(summed.value, torch.tensor(B) * 2 + torch.tensor(A) * 1.5)
    torch.testing.assert_close(score(Agreement(one), PICTURES, PROMPTS, NO_METADATA).weight, first * first)
    rows = torch.tensor([4, 0])
    torch.testing.assert_close(summed[rows].weight, summed.weight[rows])
    torch.testing.assert_close(Scores.cat([summed, summed[rows]]).weight, summed.weight[[0, 1, 2, 3, 4, 4, 0]])
    assert score(Product([a, b]), PICTURES, PROMPTS, NO_METADATA).weight is None


def test_par_averages_over_references_of_the_metadata():
    metadata = [{"reference_score": [1.0, 3.0]}, {"reference_score": 1.0}, {}, {}, {}]
    ours = values(BoundedCentred(b, reference=0.0), metadata=metadata)
    assert ours[0].item() == pytest.approx((expit(2.0) + expit(0.0)) / 2)
    assert ours[1].item() == pytest.approx(0.5) and ours[2].item() == pytest.approx(expit(2.0))
    with pytest.raises(RewardError, match="'x' has no 'reference_score'"):
        values(BoundedCentred(b))


def test_schedules_are_straight_lines_also_deep_inside():
    inner = ScheduledSum([a, b], [[(0.0, 1.0), (0.5, 0.0)], [(0.0, 0.0), (1.0, 2.0)]])
    reward = WeightedSum([inner])
    for progress, weights in ((0.0, (1.0, 0.0)), (0.25, (0.5, 0.5)), (0.75, (0.0, 1.5)), (1.0, (0.0, 2.0))):
        advance(reward, progress)
        expected = weights[0] * torch.tensor(A) + weights[1] * torch.tensor(B)
        torch.testing.assert_close(values(reward), expected)
    advance(a, 0.5)  # nothing to tell


def test_schedules_are_reached_through_whatever_wraps_them():
    inner = ScheduledSum([a, b], [[(0.0, 1.0), (1.0, 0.0)], [(0.0, 0.0), (1.0, 1.0)]])
    for wrapped in (WinRate(inner), PerFrame(inner), Rescaled(inner, 0.0, 1.0)):
        assert spec_of(wrapped).scheduled
        advance(wrapped, 0.0)
        assert inner.weights == [1.0, 0.0]
        advance(wrapped, 1.0)
        assert inner.weights == [0.0, 1.0]
    assert not spec_of(WeightedSum([a])).scheduled


def test_a_composition_is_as_wide_and_as_sure_as_its_parts():
    random = FunctionReward(lambda samples, prompts, metadata: [0.0] * len(samples), "random")
    random.spec = Spec(frozenset({"frames"}), deterministic=False)
    spec = spec_of(WeightedSum([a, Product([random, Normalized([a])])]))
    assert spec.kind == "group" and not spec.deterministic and {"frames", "prompt"} <= spec.needs
    assert spec_of(Product([Brightness(), Brightness()])).differentiable and not spec_of(Product([a])).differentiable


def test_gradient_goes_through_a_composition():
    pixels = torch.full((2, 3, 4, 4), 0.25, requires_grad=True)
    scores = Product([Brightness(), Brightness()]).score_pixels(pixels, ["x"] * 2, [{}] * 2)
    (gradient,) = torch.autograd.grad(scores.value.sum(), pixels)
    torch.testing.assert_close(gradient, torch.full_like(pixels, 2 * 0.25 / 48))
    with pytest.raises(RewardError, match="'a' is not differentiable"):
        Product([Brightness(), a]).score_pixels(pixels, ["x"] * 2, [{}] * 2)


def test_win_rate_is_the_mean_probability_to_beat_the_others():
    ours = values(WinRate(BradleyTerry(b, temperature=2.0)))
    for members in ([0, 1, 2], [3, 4]):
        for i in members:
            expected = np.mean([expit((B[i] - B[j]) / 2) for j in members if j != i])
            assert ours[i].item() == pytest.approx(expected, abs=1e-6)
    assert values(WinRate(BradleyTerry(b)), prompts=list("vwxyz")).tolist() == [0.5] * 5


def test_win_rate_of_a_pointwise_reward_counts_the_worse_ones():
    assert values(WinRate(b)).tolist() == [1.0, 0.0, 0.5, 0.0, 1.0]
    assert values(WinRate(a)).tolist() == [0.0, 0.5, 1.0, 0.5, 0.5]


def test_win_rate_cancels_a_liking_for_the_first_place():
    class Biased(BradleyTerry):
        def compare(self, first, second, prompts, metadata):
            return Scores((super().compare(first, second, prompts, metadata).value + 1) / 2)

    fair, biased = values(WinRate(BradleyTerry(b))), values(WinRate(Biased(b)))
    assert (fair.argsort() == biased.argsort()).all()
    torch.testing.assert_close(biased - 0.5, (fair - 0.5) / 2)


def test_win_rate_keeps_the_parts_of_the_verdicts():
    """A part is a sample's own win rate on it; what could not be read counts against neither of the two."""

    class InParts(BradleyTerry):
        def compare(self, first, second, prompts, metadata):
            scores = super().compare(first, second, prompts, metadata)
            apart = [i.getpixel((0, 0))[0] + j.getpixel((0, 0))[0] == 40 for i, j in zip(first, second)]
            lost = torch.tensor(apart)  # the verdicts on samples 0 and 1
            parts = {"style": torch.where(lost, torch.nan, scores.value), "unparsed": lost.float()}
            return Scores(torch.where(lost, 0.5, scores.value), parts)

    scores = score(WinRate(InParts(b)), PICTURES, PROMPTS, NO_METADATA)
    win = {(i, j): expit(B[i] - B[j]) for i in range(3) for j in range(3)}
    expected = [win[0, 2], win[1, 2], (win[2, 0] + win[2, 1]) / 2, expit(-4.0), expit(4.0)]
    torch.testing.assert_close(scores.parts["style"], torch.tensor(expected, dtype=torch.float32))
    assert scores.parts["unparsed"].tolist() == [0.5, 0.5, 0.0, 0.0, 0.0]
    assert scores.value[0].item() == pytest.approx((0.5 + win[0, 2]) / 2)


@pytest.mark.parametrize("count", range(2, 8))
@pytest.mark.parametrize("opponents", [1, 2, 3, None])
def test_win_rate_asks_each_pair_once_and_everyone_as_often(count, opponents):
    pairs = all_pairs([0] * count, opponents)
    reach = min(opponents or count, count - 1)
    wanted = {frozenset((i, (i + step) % count)) for i in range(count) for step in range(1, reach + 1)}
    assert len(pairs) == len(wanted) and {frozenset(pair) for pair in pairs} == wanted


def test_a_pairwise_reward_alone_is_refused():
    with pytest.raises(RewardError, match="wrap it in 'win_rate'"):
        values(BradleyTerry(a))


def test_per_frame_is_the_mean_over_frames_of_a_video():
    videos = [PICTURES, PICTURES[:3]]
    ours = score(PerFrame(b, frames=3), videos, ["x", "y"], [{}, {}]).value
    torch.testing.assert_close(ours, torch.tensor([(3 + 2 + 8) / 3, (3 + 1 + 2) / 3]))
    with pytest.raises(RewardError, match="needs frames"):
        score(PerFrame(b), PICTURES[:1], ["x"], [{}])
    with pytest.raises(RewardError, match="'per_frame' applies it"):
        score(b, videos, ["x", "y"], [{}, {}])


def test_groups_go_by_prompt_and_by_number_where_given():
    assert groups(PROMPTS, NO_METADATA) == [[0, 1, 2], [3, 4]]
    assert groups(["x"] * 4, [{"group": n} for n in (0, 1, 0, 1)]) == [[0, 2], [1, 3]]


def test_reference_pictures_from_memory_and_file(tmp_path):
    PICTURES[2].save(tmp_path / "picture.png")
    pictures = reference_images([{"reference": PICTURES[1]}, {"reference": tmp_path / "picture.png"}])
    assert pictures[0] is PICTURES[1] and pictures[1].tobytes() == PICTURES[2].tobytes()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: WeightedSum([]), "no rewards"),
        (lambda: WeightedSum([a], [1.0, 2.0]), "1 rewards but 2 weights"),
        (lambda: MeanMinusSpread([a]), "at least two"),
        (lambda: Rescaled(a, 1.0, 1.0), "not below"),
        (lambda: ScheduledSum([a], []), "as many schedules"),
        (lambda: ScheduledSum([a], [[(1.0, 0.0), (0.0, 1.0)]]), "in order"),
        (lambda: Cached(Normalized([a])), "cannot be cached"),
        (lambda: Cached(ScheduledSum([a], [[(0.0, 1.0)]])), "cannot be cached"),
        (lambda: Product([BradleyTerry(a)]), "wrap it in 'win_rate'"),
    ],
)
def test_what_cannot_work_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


class Counted:
    name = "counted"

    def __init__(self, needs=frozenset({"image", "prompt"})):
        self.asked, self.spec = 0, Spec(needs)

    def __call__(self, samples, prompts, metadata):
        self.asked += len(samples)
        sums = torch.tensor([float(np.asarray(image).sum()) for image in samples])
        return Scores(sums + torch.tensor([float(len(p)) for p in prompts]), {"sum": sums})


def test_cache_asks_once_for_each_content_and_changes_nothing():
    inner = Counted()
    cached = Cached(inner)
    pictures, prompts = [*PICTURES, PICTURES[0].copy()], [*PROMPTS, "x"]
    first = score(cached, pictures, prompts, [{}] * 6)
    again = score(cached, pictures[::-1], prompts[::-1], [{"n": i} for i in range(6)])
    plain = score(Counted(), pictures, prompts, [{}] * 6)
    assert inner.asked == 5 and (cached.hits, cached.misses) == (7, 5)
    for ours in (first, Scores(again.value.flip(0), {"sum": again.parts["sum"].flip(0)})):
        torch.testing.assert_close(ours.value, plain.value, rtol=0, atol=0)
        torch.testing.assert_close(ours.parts["sum"], plain.parts["sum"], rtol=0, atol=0)


def test_cache_tells_samples_apart_by_all_that_the_reward_needs():
    inner = Counted(frozenset({"image", "prompt", "metadata", "reference"}))
    cached = Cached(inner)
    base = (PICTURES[0], "x", {"reference": PICTURES[1], "text": "one"})
    others = [
        (PICTURES[1], "x", base[2]),
        (PICTURES[0], "y", base[2]),
        (PICTURES[0], "x", {"reference": PICTURES[2], "text": "one"}),
        (PICTURES[0], "x", {"reference": PICTURES[1], "text": "two"}),
        (PICTURES[0].resize((2, 8)), "x", base[2]),
    ]
    for count, sample in enumerate([base, *others], start=1):
        score(cached, *([part] for part in sample))
        assert inner.asked == count
    score(cached, *([part] for part in base))
    score(cached, [base[0]], ["x"], [{**base[2], "group": 7}])  # the group is not what the sample is
    assert inner.asked == 6


def test_cache_forgets_the_longest_unused():
    inner = Counted()
    cached = Cached(inner, entries=2)
    for number in (0, 1, 0, 2, 0, 1):
        score(cached, [PICTURES[number]], ["x"], [{}])
    assert inner.asked == 4 and len(cached.scores) == 2


REFERENCES = [{"reference_score": {"a": [0.1, 0.3, 0.5, 0.7], "b": 2.0}}] * 5


@pytest.mark.parametrize(
    ("exponent", "expected"),
    # 0.1 ties with one of four, 0.5 beats two and ties with one, 0.9 beats all, 0.2 beats one
    [(0.0, [0.125, 0.625, 1.0, 0.25, 0.25]), (-2.0, [-math.exp(-2 * u) for u in (0.125, 0.625, 1.0, 0.25, 0.25)])],
)
def test_calibrated_is_the_quantile_among_the_reference_scores(exponent, expected):
    ours = values(CalibratedReward(a, exponent=exponent), metadata=REFERENCES)
    torch.testing.assert_close(ours, torch.tensor(expected))
    rescaled = FunctionReward(lambda images, prompts: [4 * v for v in a(images, prompts, []).value], "a")
    same = [{"reference_score": {"a": [4 * r for r in REFERENCES[0]["reference_score"]["a"]]}}] * 5
    torch.testing.assert_close(values(CalibratedReward(rescaled, exponent=exponent), metadata=same), ours)
    assert not spec_of(CalibratedReward(Brightness())).differentiable


def test_log_sigmoid_is_centred_at_the_quantile_of_each_rewards_references():
    middle = LogSigmoidSum([a, b], quantile=0.5)
    expected = [math.log(expit(x - 0.4)) + math.log(expit(y - 2)) for x, y in zip(A, B)]
    torch.testing.assert_close(values(middle, metadata=REFERENCES), torch.tensor(expected))
    with pytest.raises(RewardError, match="log_sigmoid.a,b.: the prompt 'x' has no 'reference_score' of 'a'"):
        values(middle)


def test_each_sample_is_scored_by_the_reward_of_its_task_alone():
    seen = []

    def noted(images, prompts):
        seen.append(prompts)
        return [10.0] * len(images)

    tasks = [{"task": "count"}, {"task": "draw"}, {"task": "count"}, {}, {"task": "draw"}]
    routed = Routed("task", {"count": a, "draw": b}, otherwise=FunctionReward(noted, "rest"))
    scores = score(routed, PICTURES, PROMPTS, tasks)
    assert scores.value.tolist() == pytest.approx([0.1, 1.0, 0.9, 10.0, 8.0]) and seen == [["y"]]
    expected = {"a": [0.1, np.nan, 0.9, np.nan, np.nan], "b": [np.nan, 1, np.nan, np.nan, 8]}
    expected["rest"] = [np.nan] * 3 + [10] + [np.nan]
    for name, part in expected.items():
        np.testing.assert_allclose(scores.parts[name], part)
    with pytest.raises(RewardError, match="the prompt 'y' has None under 'task' in its metadata; .* count, draw"):
        score(Routed("task", {"count": a, "draw": b}), PICTURES, PROMPTS, tasks)


def test_routed_keeps_gradients_weights_and_what_one_route_needs():
    class Trusted(Brightness):
        def __call__(self, samples, prompts, metadata):
            return Scores(torch.ones(len(samples)), weight=torch.full((len(samples),), 0.25))

    class Compared(Brightness):
        spec = Spec(frozenset({"image", "reference"}), differentiable=True)

    tasks = [{"task": "b"}, {"task": "a"}, {"task": "b"}]
    both = Routed("task", {"a": Trusted(), "b": Brightness()})
    assert score(both, PICTURES[:3], PROMPTS[:3], tasks).weight.tolist() == [1, 0.25, 1]
    pixels = torch.rand(3, 3, 2, 2, requires_grad=True)
    value = both.score_pixels(pixels, PROMPTS[:3], tasks).value
    torch.testing.assert_close(value, pixels.mean(dim=(1, 2, 3)))
    value.sum().backward()
    assert (pixels.grad != 0).all()
    one_needs = Routed("task", {"a": Brightness(), "b": Compared()})
    assert len(score(one_needs, PICTURES[:1], ["x"], [{"task": "a"}]).value) == 1
    with pytest.raises(RewardError, match="needs a reference picture"):
        score(one_needs, PICTURES[:1], ["x"], [{"task": "b"}])


def test_a_reward_that_does_not_apply_is_left_out_of_the_sum() -> None:
    def first(samples, prompts):
        return [1.0, None, None, 4.0, 5.0]

    def second(samples, prompts):
        return [1.0, 2.0, None, 4.0, 5.0]

    scores = score(
        WeightedSum([FunctionReward(first), FunctionReward(second)], [1.0, 2.0]), [""] * 5, PROMPTS, NO_METADATA
    )
    assert scores.value.tolist() == [3, 4, 0, 12, 15]
    assert scores.missing.tolist() == [False, False, True, False, False]
    assert scores.parts["first"].isnan().tolist() == [False, True, True, False, False]
    assert score(FunctionReward(second), [""] * 5, PROMPTS, NO_METADATA).missing.tolist() == [0, 0, 1, 0, 0]


def test_rewards_that_wait_are_asked_at_once() -> None:
    begun = threading.Barrier(2, timeout=20)

    async def slow(samples, prompts):
        # a second one must have begun
        await asyncio.to_thread(begun.wait)
        return [1.0] * len(samples)

    rewards = [FunctionReward(slow, "a"), FunctionReward(slow, "b"), FunctionReward(lambda s, p: [1.0] * len(s), "c")]
    assert score(WeightedSum(rewards), [""] * 5, PROMPTS, NO_METADATA).value.tolist() == [3.0] * 5


def test_a_reward_may_be_told_a_text_of_the_metadata() -> None:
    length = FunctionReward(lambda images, prompts: [float(len(text)) for text in prompts], "length")
    judged = JudgedBy(length, "means")
    assert score(judged, PICTURES[:2], PROMPTS[:2], [{"means": "ab"}, {"means": "abc"}]).value.tolist() == [2, 3]
    with pytest.raises(RewardError, match="the prompt 'x' has no 'means'"):
        score(judged, PICTURES[:2], PROMPTS[:2], [{"means": "ab"}, {}])
