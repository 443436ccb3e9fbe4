"""Judges of texts: the tiny VLM without pictures, and judges that follow a rule."""

import re
from collections.abc import Sequence
from typing import Any

import pytest

from rewards import RewardError, as_reward, score
from rewards.judges.base import Question
from rewards.judges.local import Local
from rewards.judges.reward import JudgeReward, PairwiseJudgeReward
from rewards.judges.template import load_template
from rewards.judges.thoughts import ThoughtPRM
from rewards.pairwise import WinRate


class Rule:
    """Answers by looking at the question's text."""

    def choose(self, questions: Sequence[Question], labels: Sequence[str]) -> list[list[float] | None]:
        return [[1.0, 0.0] if self.agrees(question.text) else [0.0, 1.0] for question in questions]

    def agrees(self, text: str) -> bool:
        """About thoughts: 'wait' takes back what has its last word in it, and an answer has what it adopts."""
        others = r"(?:A later step: (.*?)\. |The answer in the end: (.*?)\. )?"
        found = re.match(rf"A step of a reasoning: (.*?)\. {others}", text)
        assert found is not None
        step, reflection, answer = found.groups()
        if reflection is not None:
            return reflection.split()[-1] in step
        return "wait" in step if answer is None else step.split()[-1] in answer

    def echo(self, questions: Sequence[Question], answers: Sequence[str]) -> list[float]:
        raise NotImplementedError

    def reply(self, questions: Sequence[Question], temperature: float, max_tokens: int, seed: int) -> list[str]:
        replies = []
        for question in questions:
            if "Answer A: " in question.text:
                first, second = (question.text.split(f"Answer {side}: ")[1].split("\n")[0] for side in "AB")
                replies.append(f"Winner: {'tie' if len(first) == len(second) else 'A' if first > second else 'B'}")
            else:
                answer = question.text.split("The answer was: ")[1].split("\n")[0]
                replies.append(f"Principle 1 of 10: brevity (weight 3). Score: {len(answer)}" if answer else "none")
        return replies


def judged(judge: Any) -> Any:
    """For a reward that is made with one."""
    return judge


def test_a_rubric_is_the_mean_of_the_judges_probabilities(tiny_vlm: str) -> None:
    local = Local(tiny_vlm)
    reward = JudgeReward("text_rubric", local)
    texts, prompts = ["a red circle", "a blue square"], ["two shapes", "two shapes"]
    made = score(reward, texts, prompts, [{"criterion": "short"}, {}])
    questions = [
        Question((), f"The task was: two shapes. The answer was: {text}. Is it {how}? Answer with yes or no.")
        for text, how in zip(texts, ("short", "correct"), strict=True)
    ]
    chances = local.build("x").choose(questions, ["yes", "no"])
    assert [chance[0] for chance in chances if chance] == pytest.approx(made.parts["criterion"].tolist(), abs=1e-5)
    expected = (made.parts["criterion"] + made.parts["task"]) / 2
    assert made.value.tolist() == pytest.approx(expected.tolist(), abs=1e-6)


def test_principles_come_before_a_score_that_is_read_from_the_end() -> None:
    reward = JudgeReward("text_principles", judged(Rule()))
    made = score(reward, ["1", "12345", "", "12345678"], ["p"] * 4, [{"group": 0}] * 4)
    known = [0, 4 / 9, 7 / 9]
    assert made.value.tolist() == pytest.approx([*known[:2], sum(known) / 3, known[2]])
    assert made.parts["unparsed"].tolist() == [0, 0, 1, 0]


def test_texts_are_compared_and_ranked() -> None:
    reward = WinRate(PairwiseJudgeReward("text_pair", judged(Rule())))
    made = score(reward, ["a", "bb", "ccc", "dd"], ["p"] * 4, [{}] * 4)
    assert made.value.tolist() == pytest.approx([0, 1.5 / 3, 2 / 3, 2.5 / 3])


def test_thoughts_are_judged_by_what_the_reasoning_says_of_itself() -> None:
    """Three texts of a group, two right: by hand, outcomes normalised to +-0.7071 and -1.4142, r = 3 * 2/3 = 2."""
    texts = [
        "first 1\ntry 5\nwith 5\nwait, not 5\nso 7</think>\nit is 7",
        "it is 7",
        "first 1\nmaybe 9\nthen 4\n</think>so 4\nit is 4",
    ]
    outcome = as_reward(lambda texts, prompts: [float(text.endswith("7")) for text in texts])
    reward = ThoughtPRM(outcome, judged(Rule()), strength=3.0)
    made = score(reward, texts, ["p"] * 3, [{}] * 3)
    assert made.steps is not None
    high, low = 2**-0.5, -(2**0.5)
    ends = [
        [text.index("\n", text.index(word)) + 1 for word in words]
        for text, words in ((texts[0], ("first", "with")), (texts[2], ("maybe",)))
    ]
    assert [end for end, _ in made.steps[0]] == [*ends[0], len(texts[0])]
    assert [value for _, value in made.steps[0]] == pytest.approx([2, -2, high], abs=1e-4)
    assert made.steps[1] == [(len(texts[1]), pytest.approx(high, abs=1e-4))]
    # what a wrong text did not adopt is not punished: from there to the end the rewards add up to 0
    assert [end for end, _ in made.steps[2]] == [*ends[1], len(texts[2])]
    assert [value for _, value in made.steps[2]] == pytest.approx([-low, low], abs=1e-4)
    assert made.value.tolist() == pytest.approx([high, high, 0], abs=1e-4)
    assert made.parts["thoughts"].tolist() == [3, 1, 2]


def test_a_judge_of_thoughts_need_not_solve_the_problem() -> None:
    """The questions never show the task."""

    class Spy(Rule):
        def choose(self, questions: Sequence[Question], labels: Sequence[str]) -> list[list[float] | None]:
            assert all("17 * 3" not in question.text for question in questions)
            return super().choose(questions, labels)

    reward = ThoughtPRM(as_reward(lambda texts, prompts: [1.0, 0.0]), judged(Spy()))
    assert len(score(reward, ["a 1\nwait 1\nso 2"] * 2, ["17 * 3?"] * 2, [{}] * 2).value) == 2


@pytest.mark.parametrize("template", ["text_pair", "text_better"])
def test_templates_of_texts_and_of_pictures_are_one_judges(template: str) -> None:
    assert load_template(template).texts and not load_template("shapes_better").texts
    assert PairwiseJudgeReward(template, judged(Rule())).spec.needs == {"text", "prompt", "metadata"}
    with pytest.raises(ValueError, match="compares two samples; the reward 'text_pairwise' takes it"):
        JudgeReward(template, judged(Rule()))


def test_texts_are_not_judged_by_a_template_of_pictures(tiny_vlm: str) -> None:
    with pytest.raises(RewardError, match="scores pictures, but got a text"):
        score(JudgeReward("rubric", Local(tiny_vlm)), ["a text"], ["p"], [{}])


REASONED = """<type> Reasoning </type>
<solution> 6 * 7 is 42. A verdict would be <answer>[[B]]</answer> if A were wrong. </solution>
<eval> <quote_A>It is 42</quote_A> agrees, <summary_B>says 41 and ends with [[B]]</summary_B> does not. </eval>
<answer>[[A]]</answer>"""
CHATTED = """<type>Chat</type>
<rubric> Clarity (60%), warmth (40%) <justify> a question of taste </justify> </rubric>
<eval> <summary_A>long</summary_A> <quote_B>short</quote_B> </eval>
<answer>[[B]]</answer>"""


class Replies:
    """A judge that replies one after the other."""

    def __init__(self, *replies: str) -> None:
        self.replies = list(replies)

    def reply(self, questions: Sequence[Question], temperature: float, max_tokens: int, seed: int) -> list[str]:
        return [self.replies.pop(0) for _ in questions]


def published_winner(reply: str) -> str:
    """Which of two answers a reply prefers, by the end that RM-R1's system prompt (its Figure 3) asks for."""
    (winner,) = re.findall(r"<answer>\[\[([AB])\]\]</answer>\s*$", reply)
    return str(winner)


@pytest.mark.parametrize("reply", [REASONED, CHATTED])
def test_rm_r1s_replies_are_read_by_their_end(reply: str) -> None:
    (question,) = load_template("text_pair_rubric").questions
    assert all(f"<{tag}>" in question.ask for tag in ("type", "solution", "rubric", "justify", "eval", "answer"))
    compared = PairwiseJudgeReward("text_pair_rubric", judged(Replies(reply)))
    chance = compared.compare(["first"], ["second"], ["a task"], [{}]).value
    assert chance.item() == (1.0 if published_winner(reply) == "A" else 0.0)


@pytest.mark.parametrize(
    ("reply", "right"), [("x = 3. Verdict: 0, I thought, but it is 4.\nVerdict: 1", 1.0), ("It is 5.\nVerdict: 0", 0.0)]
)
def test_a_judge_that_solves_first_gives_libras_labels(reply: str, right: float) -> None:
    """Libra Bench's labels are 1 for a right final answer and 0 for a wrong one."""
    reward = JudgeReward("text_solution_first", judged(Replies(reply)), retries=0)
    assert score(reward, ["it is 4"], ["2+2"], [{}]).value.tolist() == [right]
