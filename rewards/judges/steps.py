"""Process rewards by a judge that is asked about each step of a text, or each turn with an environment."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from rewards.base import Metadata, Reward, Scores, Spec, Steps, bind
from rewards.judges.base import Judge, Question
from rewards.judges.local import Local
from rewards.judges.own import OwnModel
from rewards.judges.reward import MOST_UNPARSED, Asking, AskingSettings
from rewards.judges.served import Served
from rewards.judges.template import load_template
from rewards.text.steps import LINES, OfSteps, step_ends
from rewards.text.turns import Transcript


def parts_of(text: str, separator: str) -> tuple[list[int], list[dict[str, str]]]:
    """Where each step or turn of a text ends, and the fields `step` and `before` of a template."""
    if isinstance(text, Transcript):
        places = [(turn.begin, turn.end) for turn in text.turns]
    else:
        ends = step_ends(text, separator)
        places = list(zip([0, *ends[:-1]], ends, strict=True))
    return [end for _, end in places], [{"step": text[a:b].strip(), "before": text[:a].strip()} for a, b in places]


class StepJudge:
    """A judge's verdict on each step of a text, or each of its turns: the text's value is the mean, a step's reward its
    share of it.

    A template has the fields {step} and {before}, and perhaps {answer}: text_step judges by principles (after PPR,
    arXiv
    2509.25598), text_step_reference against the right answer, text_utterance by three qualities of a remark (after
    Sotopia-RL, arXiv 2508.03905). Several templates are an ensemble, whose mean counts (AURORA, arXiv 2502.11520). A
    verdict that cannot be read counts as the mean of the text's others; of more than half that is an error.
    `advantage: {name: process_returns}` learns from each step.

    Args:
        template: a template, or several.
        judge: where the model is, local or served.
        weights: weights of the templates' questions by name; default all alike.
        separator: a regular expression of what ends a step, without an environment.
        asking: as of `rewards.judges.reward.Asking`; `samples` averages several replies.
    """

    name = "step_judge"

    def __init__(
        self,
        template: str | list[str],
        judge: Local | Served | OwnModel,
        weights: dict[str, float] | None = None,
        separator: str = LINES,
        **asking: Unpack[AskingSettings],
    ) -> None:
        names = [template] if isinstance(template, str) else template
        if not names:
            raise ValueError("step_judge: at least one template")
        self.askers = [Asking(name, judge, **asking) for name in names]
        for each in self.askers:
            if not each.template.texts or "step" not in each.template.fields:
                raise ValueError(
                    f"template '{each.template.name}': a judge of steps is asked with the field step; text_step works"
                )
        self.weights, self.separator = weights, separator
        known = {question.name for each in self.askers for question in each.template.questions}
        if weights is not None and (unknown := sorted(weights.keys() - known)):
            raise ValueError(f"step_judge: no question is called '{unknown[0]}'; there are {', '.join(sorted(known))}")
        deterministic = all(each.deterministic for each in self.askers)
        off_device = all(each.off_device for each in self.askers)
        needs = frozenset({"text", "prompt", "metadata"})
        self.spec = Spec(needs, deterministic=deterministic, off_device=off_device)

    def bind(self, model: Any) -> None:
        """Hand the model in training to a judge that is this model."""
        for each in self.askers:
            bind(each, model)

    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        cuts = [parts_of(text, self.separator) for text in samples]
        rows = [i for i, (ends, _) in enumerate(cuts) for _ in ends]
        shown = [fields for _, row in cuts for fields in row]
        asked, records = [prompts[i] for i in rows], [metadata[i] for i in rows]
        verdicts = torch.stack([self._verdicts(each, shown, asked, records) for each in self.askers]).nanmean(0)
        values: list[float] = []
        steps: list[Steps] = []
        for (ends, _), row in zip(cuts, verdicts.split([len(ends) for ends, _ in cuts]), strict=True):
            read = row.where(~row.isnan(), row.nanmean().nan_to_num(0.5)) / max(1, len(row))
            steps.append(list(zip(ends, read.tolist(), strict=True)))
            values.append(sum(value for _, value in steps[-1]))
        counts = torch.tensor([float(len(row)) for row in steps])
        return Scores(torch.tensor(values), {"steps": counts}, steps)

    def _verdicts(
        self, asker: Asking, shown: list[dict[str, Any]], prompts: Sequence[str], records: Metadata
    ) -> Tensor:
        """[N] values of steps, NaN where a reply could not be read."""
        answers = asker.ask(shown, prompts, records)
        answers.complain(self.name, MOST_UNPARSED)
        names = [question.name for question in asker.template.questions]
        if self.weights is None or len(names) == 1:
            return torch.tensor([float("nan") if value is None else value for value in answers.values])
        parts = answers.parts()
        weights = [self.weights.get(name, 0.0) for name in names]
        total = sum(weight * parts[name] for weight, name in zip(weights, names, strict=True))
        return total / sum(weights)  # type: ignore[return-value]


class Renormed(OfSteps):
    """Step rewards in [0, 1 / K] of K steps, moved by (outcome - 1) / K (after PPR's ReNorm, arXiv 2509.25598).

    A right text earns from 0 to 1 and each of its steps at least 0, a wrong one from -1 to 0: good steps cannot
    outweigh the result. The abstract alone was at hand.

    Args:
        reward: reward of steps, such as `step_judge`.
        outcome: a verifier in [0, 1].
    """

    def __init__(self, reward: Reward, outcome: Reward) -> None:
        super().__init__([reward, outcome], "renormed")

    def change(self, values: Tensor, mask: Tensor, scores: Sequence[Scores]) -> Tensor:
        return values + (scores[1].value - 1)[:, None] / mask.sum(1, keepdim=True).clamp(min=1)


class Subgoals:
    """Shares of a task that are done: a judge splits it into subgoals, and says at each step which one is reached
    (CALM, after the abstract).

    Each of K subgoals pays 1 / K at the first step that reaches it. A task is split once; where nothing can be read
    from
    the reply the task itself is the only subgoal.

    Args:
        judge: where the model is, local or served.
        template: questions named split and reached.
        most: largest number of subgoals.
        separator: a regular expression of what ends a step, without an environment.
    """

    name = "subgoals"
    spec = Spec(frozenset({"text", "prompt", "metadata"}))
    line = re.compile(r"^\s*\d+[.)]\s*(.+?)\s*$", re.MULTILINE)

    def __init__(
        self,
        judge: Local | Served | OwnModel,
        template: str = "text_subgoals",
        most: int = 8,
        separator: str = LINES,
        max_tokens: int = 512,
    ) -> None:
        self.template = load_template(template)
        self.questions = {question.name: question for question in self.template.questions}
        if self.template.answer != "probability" or self.questions.keys() != {"split", "reached"}:
            raise ValueError(f"template '{template}': subgoals asks for probabilities, in questions split and reached")
        self.judge: Judge = judge.build(self.name) if isinstance(judge, Local | Served | OwnModel) else judge
        self.most, self.separator, self.max_tokens = most, separator, max_tokens
        self.known: dict[str, list[str]] = {}
        """Subgoals by prompt."""

    def bind(self, model: Any) -> None:
        """Hand the model in training to a judge that is this model."""
        bind(self.judge, model)

    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        self._split([prompt for prompt in dict.fromkeys(prompts) if prompt not in self.known])
        cuts = [parts_of(text, self.separator) for text in samples]
        asked = [
            (i, k, goal)
            for i, (ends, _) in enumerate(cuts)
            for goal in range(len(self.known[prompts[i]]))
            for k in range(len(ends))
        ]
        questions = [
            self._question("reached", prompts[i], cuts[i][1][k] | {"subgoal": self.known[prompts[i]][goal]})
            for i, k, goal in asked
        ]
        chances = self.judge.choose(questions, self.questions["reached"].labels)
        first: dict[tuple[int, int], int] = {}
        for (i, k, goal), chance in zip(asked, chances, strict=True):
            if chance is not None and chance[0] >= 0.5:
                first.setdefault((i, goal), k)
        rewards = [[0.0] * len(ends) for ends, _ in cuts]
        for (i, _), k in first.items():
            rewards[i][k] += 1 / len(self.known[prompts[i]])
        steps = [list(zip(ends, row, strict=True)) for (ends, _), row in zip(cuts, rewards, strict=True)]
        counts = torch.tensor([float(len(self.known[prompt])) for prompt in prompts])
        return Scores(torch.tensor([sum(row) for row in rewards]), {"subgoals": counts}, steps)

    def _split(self, prompts: Sequence[str]) -> None:
        """Ask for the subgoals of prompts."""
        if prompts:
            questions = [self._question("split", prompt, {}) for prompt in prompts]
            for prompt, reply in zip(prompts, self.judge.reply(questions, 0.0, self.max_tokens, 0), strict=True):
                self.known[prompt] = self.line.findall(reply.rpartition("</think>")[2])[: self.most] or [prompt]

    def _question(self, name: str, prompt: str, fields: Mapping[str, str]) -> Question:
        question = self.questions[name]
        return Question((), self.template.text(question, prompt, fields), question.system)
