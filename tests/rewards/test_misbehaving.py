"""Sixty rewards that misbehave: each is named in one line, and changes nothing but its own scores."""

import logging
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from flowalign.config.rewards import build_reward
from flowalign.config.sections import Weighted
from flowalign.errors import ConfigError
from rewards import RewardError, Scores, Spec, WeightedSum, as_reward, base, score
from rewards.pairwise import WinRate

N = 3
PROMPTS = ["a", "b", "c"]
GOOD = torch.tensor([0.0, 0.5, 1.0])
NAN, INF = float("nan"), float("inf")


def brightness(samples, prompts):
    return [float(np.asarray(sample).mean()) for sample in samples]


def pictures():
    return [Image.new("RGB", (4, 4), (80 * i,) * 3) for i in range(N)]


class Says:
    """A reward that gives a fixed answer."""

    name = "bad"

    def __init__(self, answer, spec=None):
        self.answer = answer
        if spec is not None:
            self.spec = spec

    def __call__(self, samples, prompts, metadata):
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


def part(values):
    return Scores(GOOD, {"part": values})


def ask(reward):
    """Its scores as a part of a sum of rewards, as a training asks it."""
    both = WeightedSum([as_reward(reward), as_reward(brightness)])
    return score(both, pictures(), PROMPTS, [{"n": i} for i in range(N)])


@pytest.mark.parametrize(
    "answer",
    [
        None,
        0.5,
        "high",
        GOOD,
        [0.1, 0.2, 0.3],
        {"value": GOOD},
        (GOOD, {}),
        Scores(None),
        Scores("high"),
        Scores(0.5),
        Scores(torch.tensor(0.5)),
        Scores(GOOD[:2]),
        Scores(GOOD.repeat(2)),
        Scores(GOOD[:, None]),
        Scores(GOOD[None]),
        Scores([[0.1], [0.2], [0.3]]),
        Scores([0.1, None, 0.3]),
        Scores(["a", "b", "c"]),
        Scores(GOOD * NAN),
        Scores(GOOD * INF),
        Scores(torch.tensor([1e300] * N, dtype=torch.float64)),
        Scores(GOOD.to(torch.complex64)),
        part(0.5),
        part("high"),
        part(None),
        part(GOOD[:2]),
        part(GOOD[:, None]),
        part(torch.tensor(0.5)),
        part(["a", "b", "c"]),
        part(torch.tensor([1.0, INF, 0.0])),
        part({"more": GOOD}),
        Scores(GOOD, None),
        Scores(GOOD, [GOOD]),
        Scores(GOOD, {1: GOOD}),
        Scores(GOOD, weight=GOOD[:2]),
        Scores(GOOD, weight=GOOD * NAN),
        Scores(GOOD, weight=GOOD - 1),
        Scores(GOOD, weight="high"),
        Scores(GOOD, steps=[[(1, 0.5)]]),
        Scores(GOOD, steps=[0.1, 0.2, 0.3]),
        Scores(GOOD, steps=[[(1, NAN)], [], []]),
        Scores(GOOD, steps=[[("a", 0.5)], [], []]),
        KeyError("colour"),
        RuntimeError("two\nlines"),
        MemoryError(),
        SystemExit(0),
        StopIteration(),
        AssertionError(),
    ],
    ids=repr,
)
def test_an_answer_that_is_none_is_named_in_one_line(answer):
    with pytest.raises(RewardError, match="reward 'bad'") as caught:
        ask(Says(answer))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "answer",
    [
        Scores(torch.tensor([0, 1, 2])),
        Scores(torch.tensor([False, True, True])),
        Scores([0, 0.5, 1]),
        Scores(np.array([0, 0.5, 1])),
        Scores(GOOD.double()),
        Scores(GOOD.clone().requires_grad_()),
        part([0, 1, 2]),
        part(torch.tensor([NAN, 1.0, 0.0])),
        part(np.array([0, 1, 2])),
        Scores(GOOD, weight=[0, 1, 1]),
    ],
    ids=repr,
)
def test_numbers_of_any_kind_are_taken(answer):
    scores = ask(Says(answer))
    wanted = torch.as_tensor(answer.value).float() + torch.tensor(brightness(pictures(), PROMPTS))
    assert torch.equal(scores.value, wanted) and not scores.value.requires_grad
    for own in scores.parts.values():
        assert own.dtype == torch.float32 and own.shape == (N,)


@pytest.mark.parametrize(
    "function",
    [
        lambda samples, prompts: None,
        lambda samples, prompts: 0.5,
        lambda samples, prompts: (s for s in samples),
        lambda samples, prompts: [[0.1]] * len(samples),
        lambda samples: [0.5] * len(samples),
        lambda samples, prompts, metadata, more: [0.5] * len(samples),
        sys.getsizeof,
    ],
)
def test_functions_that_are_no_rewards(function):
    if function is not sys.getsizeof:
        function.__name__ = "bad"
    with pytest.raises(RewardError, match="reward '(bad|getsizeof)'") as caught:
        ask(function)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "spec",
    [
        {"needs": ["image"]},
        "pointwise",
        frozenset({"image"}),
        Spec,
        SimpleNamespace(needs=frozenset({"image"})),
    ],
    ids=repr,
)
def test_a_spec_of_a_wrong_type(spec):
    with pytest.raises(RewardError, match="reward 'bad'.*Spec"):
        ask(Says(Scores(GOOD), spec))


@pytest.mark.parametrize("wrong", [{"needs": "image"}, {"needs": {"picture"}}, {"kind": "pointwize"}, {"needs": None}])
def test_a_spec_is_checked_where_it_is_made(wrong):
    with pytest.raises(ValueError, match="needs|kind"):
        Spec(**wrong)
    assert Spec(needs=["image", "prompt"]) == Spec(frozenset({"image", "prompt"}))


@pytest.mark.parametrize(
    "body",
    ["raise KeyError('x')", "1 / 0", "raise SystemExit(0)", "raise RuntimeError('two\\nlines')", "import nothing_here"],
)
@pytest.mark.parametrize("place", ["constructor", "module"])
def test_constructors_and_modules_that_raise(tmp_path, monkeypatch, body, place):
    indent = "        "
    made = (
        f"class Bad:\n    name = 'bad'\n    def __init__(self):\n{indent}{body if place == 'constructor' else 'pass'}\n"
    )
    (tmp_path / "bad_reward.py").write_text((f"{body}\n" if place == "module" else "") + made)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "bad_reward", raising=False)
    with pytest.raises(ConfigError, match=r"^rewards\.0: ") as caught:
        build_reward([Weighted(name="bad_reward.Bad")])
    assert "\n" not in str(caught.value)


class Painter:
    """Paints on the pictures, and writes into whatever else it is given."""

    name = "painter"

    def __call__(self, samples, prompts, metadata):
        values = brightness(samples, prompts)
        for sample in samples:
            ImageDraw.Draw(sample).rectangle([0, 0, 4, 4], fill="white")
        for record in metadata:
            record["n"] = 99
            ImageDraw.Draw(record["reference"]).rectangle([0, 0, 4, 4], fill="white")
        samples.clear()
        prompts.reverse()
        metadata.pop()
        return Scores(torch.tensor(values))


def test_a_reward_that_paints_changes_nothing_else():
    given, prompts = pictures(), list(PROMPTS)
    metadata = [{"n": i, "reference": picture} for i, picture in enumerate(pictures())]
    before = [picture.tobytes() for picture in given]
    both = WeightedSum([Painter(), as_reward(brightness)])
    scores = score(both, given, prompts, metadata)
    assert scores.parts["painter"].tolist() == scores.parts["brightness"].tolist()
    assert [picture.tobytes() for picture in given] == before and prompts == PROMPTS
    assert [(record["n"], record["reference"].tobytes()) for record in metadata] == list(enumerate(before))
    frames = [pictures()] * N
    video = as_reward(lambda samples, prompts: [samples[0][0].putpixel((0, 0), (9, 9, 9)) or 0.0] * N)
    video.spec = Spec(frozenset({"frames"}))
    score(video, frames, PROMPTS, [{}] * N)
    assert [picture.tobytes() for picture in frames[0]] == before


def test_a_reward_that_hangs_is_named_and_of_rewards_within_it_the_innermost(monkeypatch, caplog):
    monkeypatch.setattr(base, "SLOW", 0.05)

    class Slow(Says):
        name = "slow"

        def __call__(self, samples, prompts, metadata):
            time.sleep(0.25)
            return self.answer

    with caplog.at_level(logging.WARNING):
        ask(Slow(Scores(GOOD)))
    lines = [record.getMessage() for record in caplog.records]
    assert 1 <= len(lines) <= 3 and all("reward 'slow' has not answered for" in line for line in lines)


class Compares:
    name = "bad"
    spec = Spec(kind="pairwise")

    def __init__(self, answer):
        self.answer = answer

    def compare(self, first, second, prompts, metadata):
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    "answer", [None, GOOD, Scores(GOOD[:1]), Scores(GOOD[:, None]), Scores(GOOD * NAN), Scores(GOOD + 1), KeyError("x")]
)
def test_verdicts_on_pairs(answer):
    with pytest.raises(RewardError, match="reward 'bad'") as caught:
        score(WinRate(Compares(answer)), pictures(), ["a"] * N, [{}] * N)
    assert "\n" not in str(caught.value)
