"""What becomes of verdicts that cannot be parsed, and of several replies to one question."""

import pytest
import torch
from PIL import Image

from rewards import RewardError, score
from rewards.check import REPLIES
from rewards.judges import JudgeReward, PairwiseJudgeReward

BLANK = Image.new("RGB", (8, 8))


class Scripted:
    """A judge that says what it is told to, by prompt; a list is worked off reply by reply."""

    def __init__(self, replies):
        self.replies, self.asked = replies, []

    def reply(self, questions, temperature, max_tokens, seed):
        self.asked.append((len(questions), temperature, seed))
        found = []
        for question in questions:
            said = next(said for prompt, said in self.replies.items() if f"[{prompt}]" in question.text)
            found.append(said.pop(0) if isinstance(said, list) else said)
        return found


def judge(replies, **settings):
    return JudgeReward("unified_reward_point", Scripted(replies), **settings)


def test_unparsed_gets_the_mean_of_its_group_and_is_reported():
    reward = judge({"a": ["Final Score: 5", "Final Score: 2", "Thought process:"], "b": "Final Score: 1"}, retries=0)
    scores = score(reward, [BLANK] * 4, ["a", "a", "a", "b"], [{}] * 4)
    assert scores.value.tolist() == pytest.approx([1.0, 0.25, 0.625, 0.0])
    assert scores.parts["unparsed"].tolist() == [0.0, 0.0, 1.0, 0.0]
    assert reward.spec.kind == "group"


def test_unparsed_may_get_the_lowest():
    reward = judge({"a": "Final Score: 5", "b": "..."}, retries=0, unparsed="lowest")
    assert score(reward, [BLANK] * 2, ["a", "b"], [{}] * 2).value.tolist() == [1.0, 0.0]
    assert reward.spec.kind == "pointwise"


def test_unparsed_may_be_an_error():
    with pytest.raises(RewardError, match=r"1 of 3 verdicts could not be parsed.*Thought process"):
        replies = {"a": "Final Score: 5", "b": "Thought process:"}
        score(judge(replies, retries=0, unparsed="error"), [BLANK] * 3, ["a", "a", "b"], [{}] * 3)


@pytest.mark.parametrize("reply", REPLIES)
def test_a_judge_that_says_only_this_is_an_error(reply):
    with pytest.raises(RewardError, match="could not be parsed"):
        score(judge({"a": reply}, retries=1), [BLANK] * 4, ["a"] * 4, [{}] * 4)


def test_unparsed_replies_are_asked_again():
    reward = judge({"a": ["hm", "Final Score: 3"], "b": "Final Score: 1"}, retries=2)
    scores = score(reward, [BLANK] * 2, ["a", "b"], [{}] * 2)
    assert scores.value.tolist() == [0.5, 0.0] and scores.parts["unparsed"].sum() == 0
    # the second time only the one, warm, with another seed
    assert reward.judge.asked == [(2, 0.0, 0), (1, 0.7, 1)]


def test_samples_are_averaged_over_those_parsed():
    reward = judge({"a": ["Final Score: 5", "Final Score: 3", "???"]}, samples=3, temperature=1.0, retries=0)
    assert score(reward, [BLANK], ["a"], [{}]).value.item() == pytest.approx(0.75)
    assert len({seed for _, _, seed in reward.judge.asked}) == 3
    assert not reward.spec.deterministic
    with pytest.raises(ValueError, match="temperature 0 are all the same"):
        judge({}, samples=3)


def test_unparsed_comparison_is_a_tie():
    replies = {"a": "Image 1 is better than Image 2.", "b": "neither", "c": "Image 2 is better than Image 1."}
    reward = PairwiseJudgeReward("unified_reward_pair", Scripted(replies), retries=0)
    scores = reward.compare([BLANK] * 3, [BLANK] * 3, ["a", "b", "c"], [{}] * 3)
    assert scores.value.tolist() == [1.0, 0.5, 0.0]
    assert scores.parts["unparsed"].tolist() == [0.0, 1.0, 0.0]


def test_a_judge_that_always_likes_the_first_is_a_tie_in_both_orders():
    said = Scripted({"a": "Image 1 is better than Image 2."})
    reward = PairwiseJudgeReward("unified_reward_pair", said, both_orders=True)
    assert reward.compare([BLANK], [BLANK], ["a"], [{}]).value.item() == 0.5


def test_templates_go_with_their_reward():
    with pytest.raises(ValueError, match="vlm_pairwise"):
        JudgeReward("unified_reward_pair", Scripted({}))
    with pytest.raises(ValueError, match="vlm_judge"):
        PairwiseJudgeReward("unified_reward_point", Scripted({}))


def test_parts_of_several_questions():
    class EditJudge(Scripted):
        def reply(self, questions, temperature, max_tokens, seed):
            numbers = "[20, 5]" if len(questions[0].pictures) == 2 else "[25, 10]"
            return [f'{{"reasoning": "", "score": {numbers}}}'] * len(questions)

    scores = JudgeReward("edit_score", EditJudge({}))([BLANK], ["a"], [{"reference": BLANK}])
    assert scores.value.item() == pytest.approx((0.2 * 0.4) ** 0.5)
    parts = {name: values.item() for name, values in scores.parts.items()}
    assert parts == pytest.approx(
        {
            "semantics": 0.2,
            "semantics/editing": 0.8,
            "semantics/consistency": 0.2,
            "quality": 0.4,
            "quality/naturalness": 1.0,
            "quality/artifacts": 0.4,
            "unparsed": 0.0,
        }
    )
    assert all(values.dtype == torch.float32 for values in scores.parts.values())
