"""A reward of the thoughts in a reasoning, by what the reasoning itself says of its steps."""

import re
from collections.abc import Mapping, Sequence

import torch

from rewards.base import Metadata, Reward, Scores, Spec, Steps, as_reward, groups, score
from rewards.judges.base import Judge, Question
from rewards.judges.local import Local
from rewards.judges.served import Served
from rewards.judges.template import load_template
from rewards.text.process import thoughts
from rewards.text.steps import LINES, step_ends

QUESTIONS = ("reflects", "taken_back", "adopted")


class ThoughtPRM:
    """Thought-level process rewards by intrinsic signals, for which no judge has to solve the problem (TP-GRPO, arXiv
    2507.23317).

    In a right text a mistake was taken back, or it would have reached the answer: the judge finds the steps that call
    something before them wrong, and the earlier steps that say or build on it; these are wrong, all others right. In a
    wrong text the steps that the answer adopted are wrong, and the others may have been worth trying. Steps in a row
    of one verdict are a thought. With o the outcome, normalised within the group, and r = strength * the share of right
    texts in the group, the rewards of thoughts add up from any thought to the end of the text to

        right text:  o in right thoughts, o - r in wrong ones       wrong text:  o in adopted thoughts, 0 in others

    which are the paper's advantages. `process_returns` keeps their order; the paper does not normalise them once more.

    A detailed summary of the paper was at hand, not its text. Departures: a separator makes the steps, not a model; one
    question traces a mistake and verifies the steps after it; wordings and the default strength are our own.

    Args:
        outcome: a verifier; from 1/2 on is right.
        judge: where the model is, local or served.
        template: yes/no questions named reflects (about a {step}), taken_back (a {step} and a later {reflection}) and
            adopted (a {step} and the {answer}); what cannot be read is no.
        separator: a regular expression of what ends a step.
        answer: a regular expression; after its last match comes the answer, else the last step is the answer.
        strength: strength of the rewards of right texts' thoughts.
    """

    name = "thought_prm"
    bounds_sum = True
    """Whether it bounds the sum of steps, which advantages that centre each step would undo."""

    def __init__(
        self,
        outcome: Reward,
        judge: Local | Served,
        template: str = "text_thoughts",
        separator: str = LINES,
        answer: str = "</think>",
        strength: float = 1.0,
    ) -> None:
        self.template = load_template(template)
        self.questions = {question.name: question for question in self.template.questions}
        if self.template.answer != "probability" or self.questions.keys() != set(QUESTIONS):
            raise ValueError(f"template '{template}': thought_prm asks for probabilities, in {', '.join(QUESTIONS)}")
        self.outcome: Reward = as_reward(outcome)
        self.judge: Judge = judge.build(self.name) if isinstance(judge, Local | Served) else judge
        self.separator, self.answer, self.strength = separator, re.compile(answer), strength
        self.spec = Spec(frozenset({"text", "prompt", "metadata"}), "group")

    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        scores = score(self.outcome, samples, prompts, metadata)
        right = (scores.value >= 0.5).tolist()
        ends = [step_ends(text, self.separator) for text in samples]
        steps = [[text[a:b].strip() for a, b in zip([0, *cut], cut)] for text, cut in zip(samples, ends, strict=True)]
        begins = [self._answer_begins(text, cut) for text, cut in zip(samples, ends, strict=True)]
        valid = [[True] * len(cut) for cut in ends]

        later = [(row, k) for row, begin in enumerate(begins) if right[row] for k in range(1, begin)]
        reflects = self._ask("reflects", prompts, [(row, {"step": steps[row][k]}) for row, k in later])
        pairs = [(row, j, k) for (row, k), yes in zip(later, reflects, strict=True) if yes for j in range(k)]
        queries = [(row, {"step": steps[row][j], "reflection": steps[row][k]}) for row, j, k in pairs]
        for (row, j, _), yes in zip(pairs, self._ask("taken_back", prompts, queries), strict=True):
            valid[row][j] &= not yes

        tried = [(row, k) for row, begin in enumerate(begins) if not right[row] for k in range(begin)]
        queries = [(row, {"step": steps[row][k], "answer": " ".join(steps[row][begins[row] :])}) for row, k in tried]
        for (row, k), yes in zip(tried, self._ask("adopted", prompts, queries), strict=True):
            valid[row][k] = yes

        rewarded: list[Steps] = [[] for _ in samples]
        for members in groups(prompts, metadata):
            cut = scores.value[members]
            normal = ((cut - cut.mean()) / (cut.std(correction=0) + 1e-6)).tolist()
            share = sum(right[row] for row in members) / len(members)
            for row, outcome in zip(members, normal, strict=True):
                size = self.strength * share if right[row] else outcome
                rewarded[row] = [(ends[row][k], reward) for k, reward in thoughts(valid[row], outcome, size)]
        value = torch.tensor([sum(reward for _, reward in cut) for cut in rewarded])
        counts = torch.tensor([float(len(cut)) for cut in rewarded])
        return Scores(value, {self.outcome.name: scores.value, "thoughts": counts}, rewarded, scores.weight)

    def _answer_begins(self, text: str, ends: list[int]) -> int:
        """Number of the first step that is part of the answer, the last step at most."""
        matches = list(self.answer.finditer(text))
        return sum(end <= matches[-1].end() for end in ends[:-1]) if matches else len(ends) - 1

    def _ask(self, name: str, prompts: Sequence[str], queries: Sequence[tuple[int, Mapping[str, str]]]) -> list[bool]:
        """Whether the judge says yes, of (row, fields of the question)."""
        question = self.questions[name]
        questions = [
            Question((), self.template.text(question, prompts[row], fields), question.system) for row, fields in queries
        ]
        return [bool(chance and chance[0] >= 0.5) for chance in self.judge.choose(questions, question.labels)]
