"""Judges as rewards: one value a sample, or the winner of a pair."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from PIL.Image import Image
from torch import Tensor

from rewards.base import (
    UNPARSED,
    Kind,
    Metadata,
    Reward,
    Scores,
    Spec,
    UnreadReplies,
    as_reward,
    bind,
    groups,
    reference_images,
    score,
    source_images,
)
from rewards.judges.base import Judge, Question
from rewards.judges.local import Local, LocalJudge
from rewards.judges.own import OwnModel
from rewards.judges.served import Served
from rewards.judges.template import Combine, Template, TemplateQuestion, Unparsed, combined, load_template
from rewards.judges.wording import with_wording
from rewards.usage import usage_of

logger = logging.getLogger(__name__)
RETRY_TEMPERATURE = 0.7  # the most probable reply would only come again
MOST_UNPARSED = 0.5  # of a batch's verdicts; beyond it the judge, not the pictures, is at fault

Verdict = tuple[float, dict[str, float]] | None


class Answers:
    """The verdicts of N samples on each question of a template."""

    def __init__(
        self, template: Template, rows: list[list[Verdict]], replies: list[dict[str, str]], example: str
    ) -> None:
        self.template, self.rows, self.example = template, rows, example
        self.replies = replies if any(replies) else None
        """Replies about each sample, by question; None where nothing is written."""
        self.values = [
            None if None in row else combined([verdict[0] for verdict in row if verdict], template.combine)
            for row in rows
        ]
        """Value of each sample; None where any of its verdicts could not be parsed."""

    def parts(self) -> dict[str, torch.Tensor]:
        """[N] values of each question and part where there are several, NaN where unparsed; and `unparsed`."""
        columns: dict[str, list[float]] = {}
        for i, question in enumerate(self.template.questions):
            names = [*question.scores] if len(question.scores) > 1 else []
            names += [""] if len(self.template.questions) > 1 else []
            for name in names:
                key = f"{question.name}/{name}" if name and len(self.template.questions) > 1 else name or question.name
                column = [row[i] for row in self.rows]
                columns[key] = [
                    float("nan") if verdict is None else verdict[1][name] if name else verdict[0] for verdict in column
                ]
        columns[UNPARSED] = [float(value is None) for value in self.values]
        return {name: torch.tensor(values) for name, values in columns.items()}

    def complain(self, name: str, most: float) -> None:
        """Raise UnreadReplies if more than a share `most` could not be parsed."""
        count = self.values.count(None)
        if count > most * len(self.values):
            raise UnreadReplies(
                f"reward '{name}': {count} of {len(self.values)} verdicts could not be parsed; the judge may not know "
                f"the format of template '{self.template.name}' (e.g. {self.example[-200:]!r})"
            )
        if count:
            logger.warning("reward '%s': %d of %d verdicts could not be parsed", name, count, len(self.values))


class AskingSettings(TypedDict, total=False):
    """Arguments of `Asking` besides the template and the judge."""

    name: str | None
    samples: int
    temperature: float
    max_tokens: int
    retries: int
    frames: int
    wording: str | None
    meta: Reward | None
    keep: int


class Asking:
    """Base of rewards that ask a judge a template's questions about samples: pictures, videos or texts.

    Args:
        template: name of a shipped template or path of a YAML file, which says what a sample is; see
            `rewards.judges.template`.
        judge: where the model is, local or served, or `{own: true}`: the language model in training.
        samples: replies to average, drawn at `temperature`.
        max_tokens: largest length of a reply.
        retries: further replies drawn where one cannot be parsed.
        frames: number of frames of a video that the judge sees.
        wording: the Python file of the authors in which the template's questions stand; their words take the place of
            ours, and nothing in it is run.
        meta: a reward of texts that scores each of `samples` replies to its question; only the `keep` best are averaged
            (the meta reward model of SPCT, arXiv 2504.02495, such as `text_score`).
        keep: replies that are averaged with `meta`.
        both_orders: ask comparisons of two pictures in both orders.
    """

    def __init__(
        self,
        template: str,
        judge: Local | Served | OwnModel,
        name: str | None = None,
        samples: int = 1,
        temperature: float = 0.0,
        max_tokens: int = 1024,
        retries: int = 2,
        frames: int = 8,
        wording: str | None = None,
        both_orders: bool = True,
        meta: Reward | None = None,
        keep: int = 1,
    ) -> None:
        if meta is None and keep != 1:
            raise ValueError("keep: chooses replies by `meta`, and there is none; leave it out")
        if meta is not None and not 1 <= keep <= samples:
            raise ValueError(f"keep: from 1 to the {samples} samples that `meta` chooses from")
        if samples > 1 and temperature <= 0:
            raise ValueError(f"{samples} samples at temperature 0 are all the same; set temperature, e.g. 0.7")
        self.template: Template = load_template(template)
        if wording is not None:
            self.template = with_wording(self.template, Path(wording))
        self.name = name or self.template.name
        self.judge: Judge = judge.build(self.name) if isinstance(judge, Local | Served | OwnModel) else judge
        self.usage = usage_of(self.name)
        self.samples, self.temperature, self.max_tokens = samples, temperature, max_tokens
        self.retries, self.frames, self.both_orders = retries, frames, both_orders
        self.meta: Reward | None = None if meta is None else as_reward(meta)
        self.keep = keep
        self.deterministic = temperature <= 0 and not isinstance(judge, OwnModel)
        self.off_device = self.deterministic and isinstance(judge, Served)
        """Whether a server answers, and the same whichever questions are asked together."""
        self.draw = 0
        """Number of the draw; replies at a temperature are others in another one."""

    def bind(self, model: Any) -> None:
        """Hand the model in training to a judge that is this model."""
        bind(self.judge, model)
        bind(self.meta, model)

    def ask(self, shown: list[dict[str, Any]], prompts: Sequence[str], metadata: Metadata) -> Answers:
        """Verdicts of N samples; `shown` has the pictures or texts of each under their names in the template."""
        if self.template.texts:
            metadata = [dict(record) | fields for record, fields in zip(metadata, shown, strict=True)]
        verdicts: list[list[Verdict]] = []
        written: list[dict[str, str]] = [{} for _ in shown]
        example = ""
        for question in self.template.questions:
            questions = self.questions(question, shown, prompts, metadata)
            turned = len(questions) > len(shown)
            scored, replies, unread = self._verdicts(question, questions, [*prompts] * (2 if turned else 1))
            for i, reply in enumerate(replies):
                turns = " (turned round)" if i >= len(shown) else ""
                written[i % len(shown)][f"{question.name}{turns}"] = reply
            example = example or unread
            if turned:
                scored = [_both(there, back) for there, back in zip(scored[: len(shown)], scored[len(shown) :])]
            verdicts.append(scored)
        return Answers(self.template, [list(row) for row in zip(*verdicts, strict=True)], written, example)

    def questions(
        self, question: TemplateQuestion, shown: list[dict[str, Any]], prompts: Sequence[str], metadata: Metadata
    ) -> list[Question]:
        """One a sample; of a comparison that is question in both orders all in the first, then all turned round."""
        turned = question.compares and self.both_orders
        return [
            Question(
                tuple(frame for name in order for frame in self._pictures(name, parts, record)),
                self.template.text(question, prompt, record),
                question.system,
            )
            for order in ([question.pictures, question.pictures[::-1]] if turned else [question.pictures])
            for parts, prompt, record in zip(shown, prompts, metadata, strict=True)
        ]

    def _pictures(self, name: str, parts: dict[str, Any], record: Mapping[str, Any]) -> Sequence[Any]:
        if name == "prompt":
            return source_images([record])[0] if "image" in record else []
        return self._frames(parts[name])

    def _frames(self, picture: Image | Tensor | Sequence[Image]) -> Sequence[Any]:
        """A picture, or frames spread evenly over a video; as tensors [3, H, W], or [3, F, H, W] of a video."""
        if isinstance(picture, Image) or (isinstance(picture, Tensor) and picture.dim() == 3):
            return [picture]
        frames = picture.unbind(1) if isinstance(picture, Tensor) else picture
        steps = torch.linspace(0, len(frames) - 1, min(self.frames, len(frames))).round().int().tolist()
        return [frames[step] for step in steps]

    def _verdicts(
        self, question: TemplateQuestion, questions: list[Question], prompts: list[str]
    ) -> tuple[list[Verdict], list[str], str]:
        """The verdict on each question, what was written for it (nothing where all answers are probabilities), and a
        reply that could not be read, if any."""
        if self.template.answer == "probability":
            chances = self.judge.choose(questions, question.labels)
            return [None if chance is None else (chance[0], {}) for chance in chances], [], ""
        if self.template.answer == "echo":
            return [(value, {}) for value in self.judge.echo(questions, prompts)], [], ""
        rounds, last = [], []
        example = ""
        written: list[list[str]] = [[] for _ in questions]
        for sample in range(self.samples):
            read: list[Verdict] = [None] * len(questions)
            said = [""] * len(questions)
            for attempt in range(self.retries + 1):
                left = [i for i, verdict in enumerate(read) if verdict is None]
                if not left:
                    break
                if attempt:
                    self.usage.add(redrawn=len(left))
                temperature = self.temperature if attempt == 0 else max(self.temperature, RETRY_TEMPERATURE)
                seed = (self.draw * self.samples + sample) * (self.retries + 1) + attempt
                replies = self.judge.reply([questions[i] for i in left], temperature, self.max_tokens, seed)
                for i, reply in zip(left, replies, strict=True):
                    read[i] = self._read(question, reply)
                    written[i].append(reply)
                    said[i] = reply
                    example = reply if read[i] is None else example
            rounds.append(read)
            last.append(said)
        texts = ["\n\n".join(replies) for replies in written]
        if self.meta is not None:
            rounds = self._vetted(self.meta, questions, rounds, last)
        return [_average([read[i] for read in rounds]) for i in range(len(questions))], texts, example

    def _vetted(
        self, meta: Reward, questions: list[Question], rounds: list[list[Verdict]], replies: list[list[str]]
    ) -> list[list[Verdict]]:
        """The verdicts, without those that are not among the `keep` best of their question by the meta reward."""
        asked = [question.text for question in questions]
        columns = []
        for said, read in zip(replies, rounds, strict=True):
            values = score(meta, said, asked, [{}] * len(said)).value
            columns.append(values.where(torch.tensor([verdict is not None for verdict in read]), -torch.inf))
        best = torch.stack(columns).argsort(dim=0, descending=True, stable=True).argsort(dim=0) < self.keep
        return [
            [verdict if keep else None for verdict, keep in zip(read, row, strict=True)]
            for read, row in zip(rounds, best.tolist(), strict=True)
        ]

    def _read(self, question: TemplateQuestion, reply: str) -> Verdict:
        if self.template.answer == "winner":
            winner = question.read_winner(reply)
            return None if winner is None else (winner, {})
        scores = question.read_scores(reply)
        return None if scores is None else (combined(list(scores.values()), question.combine), scores)


class JudgeReward(Asking):
    """A judge's value of each sample: a probability, an echo, or a score in [0, 1] (an echo: at most 0).

    Of texts, shipped: text_rubric (yes/no questions, one about the metadata's `criterion`), text_principles (the judge
    writes the principles that matter first, as SPCT's does, arXiv 2504.02495).

    Args:
        template, judge, asking: as of `Asking`.
        unparsed: value of a sample whose verdict cannot be parsed: group_mean (the mean of its group's others, so
            that it teaches nothing; of the batch's where a whole group is unparsed), lowest (0), or error. More than
            half of a batch unparsed is always an error.
    """

    def __init__(
        self,
        template: str,
        judge: Local | Served | OwnModel,
        unparsed: Unparsed = "group_mean",
        **asking: Unpack[AskingSettings],
    ) -> None:
        super().__init__(template, judge, **asking)
        if self.template.pairwise:
            raise ValueError(f"template '{template}' compares two samples; {_name(self.template)} takes it")
        self.unparsed = unparsed
        # a local model's logits always hold the labels
        always = self.template.answer == "echo" or (
            self.template.answer == "probability" and isinstance(judge, Local | OwnModel)
        )
        self.kind: Kind = "pointwise" if always or unparsed != "group_mean" else "group"

    @property
    def spec(self) -> Spec:
        """Differentiable where a local judge gives probabilities of what it sees."""
        of_probability = self.template.answer == "probability" and not self.template.texts
        differentiable = of_probability and getattr(self.judge, "differentiable", False)
        return Spec(self.template.needs, self.kind, differentiable, self.deterministic, off_device=self.off_device)

    def __call__(self, samples: Sequence[Any], prompts: Sequence[str], metadata: Metadata) -> Scores:
        answers = self.ask(self._shown(samples, metadata), prompts, metadata)
        answers.complain(self.name, 0.0 if self.unparsed == "error" else MOST_UNPARSED)
        values = list(answers.values)
        parsed = [value for value in values if value is not None]
        for members in groups(prompts, metadata):
            known = [value for value in (values[i] for i in members) if value is not None] or parsed
            for i in members:
                if values[i] is None:
                    values[i] = sum(known) / len(known) if self.unparsed == "group_mean" else 0.0
        return Scores(torch.tensor(values, dtype=torch.float32), answers.parts(), replies=answers.replies)

    def score_pixels(self, pixels: Tensor, prompts: Sequence[str], metadata: Metadata) -> Scores:
        """See `DifferentiableReward.score_pixels`: a local judge's probability of each question's first label.

        The processor's own resize, of tensors in place of 8 bits: values differ a little from what `score` gives the
        same pictures, except at the model's own size.
        """
        assert isinstance(self.judge, LocalJudge)
        shown, values = self._shown(list(pixels), metadata), []
        for each in self.template.questions:
            logits = self.judge.label_logits(self.questions(each, shown, prompts, metadata), each.labels)
            there, *back = logits.softmax(dim=-1)[:, 0].split(len(shown))
            values.append((there + 1 - back[0]) / 2 if back else there)
        named = {each.name: value.detach() for each, value in zip(self.template.questions, values, strict=True)}
        return Scores(_combined(torch.stack(values), self.template.combine), named if len(named) > 1 else {})

    def _shown(self, samples: Sequence[Any], metadata: Metadata) -> list[dict[str, Any]]:
        """The samples' pictures or texts for the judge, by their names in the template."""
        shown: list[dict[str, Any]] = [{"text" if self.template.texts else "sample": sample} for sample in samples]
        if "reference" in self.template.needs:
            for fields, reference in zip(shown, reference_images(metadata), strict=True):
                fields["reference"] = reference
        return shown


class PairwiseJudgeReward(Asking):
    """A judge that compares two samples of a prompt; `win_rate`, which asks in both orders, makes a reward of it.

    A comparison that cannot be parsed counts as a tie (0.5) and is reported as `unparsed`; more than half of them is
    an error.

    Args:
        template, judge, asking: as of `Asking`.
        both_orders: ask in both orders here, for use without `win_rate`.
    """

    def __init__(
        self,
        template: str,
        judge: Local | Served | OwnModel,
        both_orders: bool = False,
        **asking: Unpack[AskingSettings],
    ) -> None:
        super().__init__(template, judge, both_orders=both_orders, **asking)
        if not self.template.pairwise:
            raise ValueError(f"template '{template}' judges one sample; {_name(self.template)} takes it")
        self.spec = Spec(self.template.needs, "pairwise", deterministic=self.deterministic, off_device=self.off_device)

    def compare(
        self,
        first: Sequence[Any],
        second: Sequence[Any],
        prompts: Sequence[str],
        metadata: Metadata,
    ) -> Scores:
        """The probability that `first` is better, in [0, 1]."""
        shown = [{"first": a, "second": b} for a, b in zip(first, second, strict=True)]
        answers = self.ask(shown, prompts, metadata)
        answers.complain(self.name, MOST_UNPARSED)
        values = [0.5 if value is None else value for value in answers.values]
        return Scores(torch.tensor(values, dtype=torch.float32), answers.parts(), replies=answers.replies)


def _name(template: Template) -> str:
    """The reward that takes a template."""
    kind = "pairwise" if template.pairwise else "judge"
    return f"the reward '{'text' if template.texts else 'vlm'}_{kind}'"


def _combined(values: Tensor, how: Combine) -> Tensor:
    """[B] of the questions' values [Q, B], as `combined` has it."""
    if how in ("mean", "min"):
        return values.mean(dim=0) if how == "mean" else values.amin(dim=0)
    product = values.prod(dim=0)
    return product if how == "product" else product ** (1 / len(values))


def _both(there: Verdict, back: Verdict) -> Verdict:
    """A comparison question in both orders, for the picture that came first in the first."""
    if there is None or back is None:
        return None
    return (there[0] + 1 - back[0]) / 2, {}


def _average(verdicts: Sequence[Verdict]) -> Verdict:
    """The mean of the replies that could be parsed."""
    parsed = [verdict for verdict in verdicts if verdict is not None]
    if not parsed:
        return None
    scores = {name: sum(verdict[1][name] for verdict in parsed) / len(parsed) for name in parsed[0][1]}
    return sum(verdict[0] for verdict in parsed) / len(parsed), scores
