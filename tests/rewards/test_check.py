"""The hostile suite passes an honest reward and catches those that can be bought."""

from pathlib import Path

import numpy as np
import pytest

from rewards import FunctionReward
from rewards.base import RewardFailed
from rewards.check import check_reward
from rewards.judges.template import load_template
from rewards.shapes.reward import ShapesReward


def failed(checks):
    return {check.name for check in checks if not check.passed}


def test_the_checker_passes():
    checks = check_reward(ShapesReward())
    assert not failed(checks), checks
    assert {"noise", "words on a wrong picture", "batch and order"} <= {check.name for check in checks}


def test_a_reward_for_dark_pictures_is_caught():
    darkness = FunctionReward(lambda images, prompts: [1 - np.asarray(i.convert("L")).mean() / 255 for i in images])
    assert {"black", "words on a wrong picture"} <= failed(check_reward(darkness))


def test_a_reward_that_reads_words_is_caught():
    honest = ShapesReward()

    def gullible(images, prompts):
        values = honest(images, prompts, [{}] * len(images)).value.tolist()
        # sees black ink, which no shape has
        return [1.0 if (np.asarray(image).max(-1) == 0).any() else value for image, value in zip(images, values)]

    assert "words buy nothing" in failed(check_reward(FunctionReward(gullible)))


def test_a_reward_that_looks_at_its_neighbours_is_caught():
    honest = ShapesReward()

    def by_place(images, prompts):
        values = honest(images, prompts, [{}] * len(images)).value.tolist()
        return [value + 0.01 * place for place, value in enumerate(values)]

    assert failed(check_reward(FunctionReward(by_place))) == {"batch and order"}


def test_a_template_that_reads_anything_is_caught(tmp_path: Path):
    path = tmp_path / "naive.yaml"
    path.write_text(
        "source: a test\nanswer: score\nquestions:\n"
        "  - {name: naive, ask: 'Score {prompt}', scores: {any: '{number}'}, range: [0, 100]}\n"
    )
    checks = check_reward(ShapesReward(), load_template(str(path)))
    assert failed(checks) == {"hostile replies"}


def test_a_reward_that_refuses_nonsense_passes():
    honest = ShapesReward()

    def strict(images, prompts):
        values = honest(images, prompts, [{}] * len(images)).value.tolist()
        if 0.0 in values:
            raise ValueError("nothing to see")
        return values

    with pytest.raises(RewardFailed, match="ValueError: nothing to see"):  # only a RewardError of its own is a refusal
        check_reward(FunctionReward(strict))


def test_small_pictures_work_too():
    assert not failed(check_reward(ShapesReward(), size=32))
