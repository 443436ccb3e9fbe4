"""The model in training as its own judge, judges paid for right verdicts, and votes that a meta reward vets."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from flowalign.data import Preferences
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.reward_training.judge import questions
from rewards import RewardError, score
from rewards.judges import JudgeReward, Local, OwnModel, Question
from rewards.judges.template import load_template
from rewards.judges.verdict import RightVerdict

TINY_LM = Path(__file__).parents[3] / "flowalign" / "data" / "assets" / "tiny_lm"
TEMPLATE = """
source: sums
answer: probability
fields: {text: ""}
questions:
  - {name: right, pictures: [], ask: '{prompt}{text}=', labels: ['1', '2']}
"""
PROMPTS, TEXTS, NONE = ["7+5", "9", "30-11"], ["", "+8", ""], [{}] * 3


def test_the_model_in_training_judges_with_the_weights_of_now(tmp_path: Path) -> None:
    (tmp_path / "sums.yaml").write_text(TEMPLATE)
    template = str(tmp_path / "sums.yaml")
    reward = JudgeReward(template, OwnModel(own=True))
    assert not reward.spec.deterministic
    with pytest.raises(RewardError, match="asks the language model that is trained, and there is none here"):
        score(reward, TEXTS, PROMPTS, NONE)
    policy = LanguagePolicy.from_pretrained(TINY_LM)
    side = policy.tokenizer.padding_side
    policy.bind(reward)
    made = score(reward, TEXTS, PROMPTS, NONE).value
    frozen = score(JudgeReward(template, Local("tiny_lm", device="cpu")), TEXTS, PROMPTS, NONE).value
    torch.testing.assert_close(made, frozen, atol=1e-6, rtol=0)
    with torch.no_grad():
        for parameter in policy.network.parameters():
            parameter.mul_(0.5)
    assert (score(reward, TEXTS, PROMPTS, NONE).value - made).abs().max() > 1e-3
    assert policy.tokenizer.padding_side == side


def test_a_judge_is_paid_where_the_better_answer_got_the_higher_score() -> None:
    pairs = Preferences(["2+2?"], [{"medium": "text", "chosen": "4", "rejected": "5"}])
    asked = questions(pairs, "text_scores")
    assert "Answer A: 4" in asked[0]["prompt"] and "Answer A: 5" in asked[1]["prompt"]
    replies = [
        "Principles ...\nScore A: 9\nScore B: 3",
        "Score A: 3\nScore B: 9",
        "Score A: 5 Score B: 5",
        "Both good.",
    ]
    for record, expected in zip(asked, ([1.0, 0, 0, 0], [0, 1.0, 0, 0]), strict=True):
        made = score(RightVerdict("text_scores"), replies, ["?"] * 4, [record] * 4)
        assert made.value.tolist() == expected and made.parts["unparsed"].tolist() == [0, 0, 0, 1]
    with pytest.raises(ValueError, match="text_scores works"):
        RightVerdict("text_verdict")
    assert load_template("text_consistent").questions[0].labels == ["yes", "no"]


class Scripted:
    """A judge whose k-th reply to every question is the k-th of these."""

    said = ("so Score: 2", "thus Score: 10", "hm", "then Score: 8")

    def reply(self, questions: Sequence[Question], temperature: float, max_tokens: int, seed: int) -> list[str]:
        return [self.said[seed]] * len(questions)


def test_a_meta_reward_chooses_the_judgements_that_vote() -> None:
    """SPCT's k_meta of k: the mean score of the best judgements, of those that can be read."""

    def meta(samples: Sequence[str], prompts: Sequence[str]) -> list[float]:
        assert all("Which word?" in prompt for prompt in prompts)
        return [float({"so": 1, "thus": 3, "hm": 9, "then": 2}[text.split()[0]]) for text in samples]

    for keep, scores in ((1, [10]), (2, [10, 8]), (3, [10, 8, 2])):
        reward = JudgeReward("text_principles", Scripted(), samples=4, temperature=1.0, retries=0, meta=meta, keep=keep)
        made = score(reward, ["this"], ["Which word?"], [{}]).value
        assert made.item() == pytest.approx(sum((n - 1) / 9 for n in scores) / len(scores))
    with pytest.raises(ValueError, match="keep: from 1 to the 4 samples"):
        JudgeReward("text_principles", Scripted(), samples=4, temperature=1.0, meta=meta, keep=5)
    with pytest.raises(ValueError, match="keep: chooses replies by `meta`, and there is none"):
        JudgeReward("text_principles", Scripted(), samples=4, temperature=1.0, keep=2)
