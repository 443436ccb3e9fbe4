"""Training a model to judge pairs of pictures or texts, and the questions that it answers about them."""

import re
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import PIL.Image
import torch
from torch import Tensor

from flowalign.data import Preferences
from flowalign.errors import ConfigError
from flowalign.reward_training.scorer import PreferenceModel
from rewards.check import TEXTS
from rewards.hub import reason
from rewards.judges import LocalJudge, Question, Template, load_template
from rewards.judges.texts import classes_of
from rewards.pictures import read_picture


class JudgeScorer(PreferenceModel):
    """A judge, for `vlm_pairwise` and `vlm_judge`, `text_pairwise` and `text_judge`: log sigmoid(margin) is the
    objective.

    With a template that compares, the margin of a pair is the log-odds of the label that names the chosen picture, in
    either order: the likelihood of the right label, RewardDance's objective (arXiv 2509.08826). With a template about
    single pictures it is the difference between the two pictures' log-odds of yes: Bradley and Terry's model, the
    baseline of RewardDance, here without a separate head.

    Args:
        model: folder or hub name of an image-text-to-text model, or of texts of any language model.
        template: name or file of a template with one question whose answer is a probability.
    """

    def __init__(self, model: str, template: str, device: str = "auto") -> None:
        self.template = judging_template(template)
        self.question = self.template.questions[0]
        try:
            network, processor = classes_of(model)
        except (OSError, ValueError) as error:
            raise ConfigError(f"no model to train at '{model}': {reason(error)}") from error
        super().__init__(model, network, [(processor, model)], device)
        self.judge = LocalJudge(self.network, *self.processors)

    def margins(self, pairs: Preferences, rows: Sequence[int]) -> Tensor:
        if self.template.texts:
            texts = self._asked(pairs, rows)
            shown: list[tuple[PIL.Image.Image, ...]] = [()] * len(texts)
        else:
            sides = [[read_picture(pairs.metadata[i][key]) for i in rows] for key in ("chosen", "rejected")]
            texts = [self.template.text(self.question, pairs.texts[i], pairs.metadata[i]) for i in rows] * 2
            if self.template.pairwise:
                shown = [*zip(*sides, strict=True), *zip(*reversed(sides), strict=True)]
            else:
                shown = [(picture,) for side in sides for picture in side]
        first, second = self._log_odds(shown, texts).chunk(2)
        return torch.stack([first, -second]) if self.template.pairwise else (first - second)[None]

    def _asked(self, pairs: Preferences, rows: Sequence[int]) -> list[str]:
        """Questions about pairs of texts: all in one order, or about the chosen ones, then the others."""
        names = ("first", "second") if self.template.pairwise else ("text",)
        orders = (("chosen", "rejected"), ("rejected", "chosen"))
        records = [
            pairs.metadata[i] | {name: pairs.metadata[i][key] for name, key in zip(names, order, strict=False)}
            for order in orders
            for i in rows
        ]
        prompts = [pairs.texts[i] for i in rows] * 2
        return [self.template.text(self.question, text, record) for text, record in zip(prompts, records, strict=True)]

    def _log_odds(self, shown: Sequence[tuple[PIL.Image.Image, ...]], texts: Sequence[str]) -> Tensor:
        """Log-odds [N] of the first label against the second."""
        questions = [
            Question(pictures, text, self.question.system) for pictures, text in zip(shown, texts, strict=True)
        ]
        good, bad = self.judge.label_logits(questions, self.question.labels).unbind(-1)
        return good - bad


def judging_template(name: str) -> Template:
    """Load a template with one question whose answer is a probability, since only its labels can be trained on.

    Raises:
        ConfigError: there is no such template, or it is of another kind.
    """
    template = _loaded(name)
    if template.answer != "probability" or len(template.questions) != 1 or "reference" in template.needs:
        raise ConfigError(
            f"template '{name}': a judge is trained by the probability of one question's labels about one or two "
            "pictures; reward_dance_pair or vqa_score works"
        )
    return template


def questions(pairs: Preferences, name: str, hostile: float = 0.0) -> list[dict[str, Any]]:
    """Turn each pair into two questions: `prompt`, `image`, `answer`, and the number `pair` that both share.

    Questions about texts have no `image`: the template has the texts in its fields {first} and {second}, like
    text_better, or one of them in {text}, like text_verdict.

    A template that compares is asked in both orders. A template about single samples is asked about each of the two,
    and the first label (yes) is the answer for the chosen one. If a reply names the winner, the answer is that name, in
    the template's words.

    Args:
        hostile: hostile answers that are asked about too, as a share of the pairs of texts; the chosen text is better
            than each (arXiv 2507.08794).
    """
    if hostile > 0:
        pairs = with_hostile(pairs, hostile)
    template = _loaded(name)
    by_winner = template.answer == "winner" and len(template.questions) == 1
    entry, records = (template if by_winner else judging_template(name)).questions[0], []
    if by_winner and [entry.read_winner(f"{entry.after} {label}") for label in entry.labels] != [1, 0]:
        raise ConfigError(
            f"template '{name}': labels [{', '.join(entry.labels)}] are not read as the first and the second winning; "
            "name them as its replies do, e.g. labels: [A, B] where one ends with 'Winner: A'"
        )
    shown = [("chosen", "rejected"), ("rejected", "chosen")] if template.pairwise else [("chosen",), ("rejected",)]
    for number, (text, record) in enumerate(zip(pairs.texts, pairs.metadata, strict=True)):
        texts = record.get("medium") == "text"
        if texts != (template.texts and bool({"first", "text"} & template.fields.keys())):
            needed, works = ("texts", "text_better") if texts else ("pictures", "reward_dance_pair")
            raise ConfigError(f"template '{name}': the preferences are between {needed}; {works} asks about those")
        for keys, answer in zip(shown, entry.labels, strict=True):
            sides = [record[key] for key in keys]
            if texts:
                names = ("first", "second") if template.pairwise else ("text",)
                fields = record | dict(zip(names, sides, strict=True))
                question: dict[str, Any] = {"prompt": template.text(entry, text, fields)}
            else:
                files = [str(Path(file).absolute()) for file in sides]
                question = {"prompt": template.text(entry, text, record), "image": files}
            records.append(question | {"answer": answer, "pair": number})
    return records


def with_hostile(pairs: Preferences, share: float) -> Preferences:
    """The pairs, and for this share of them one more: the chosen text against a text that judges are fooled by.

    Master-RM (arXiv 2507.08794) labels first sentences of answers, which have said nothing yet, as wrong. Here these
    stand beside the hostile texts of `flowalign reward-check`.

    Raises:
        ConfigError: the pairs are of pictures.
    """
    if any(record.get("medium") != "text" for record in pairs.metadata):
        raise ConfigError("hostile answers are texts, and these preferences are between pictures; leave hostile out")
    added = [i for i in range(len(pairs)) if int((i + 1) * share) > int(i * share)]
    records = []
    for number, i in enumerate(added):
        chosen, rejected = pairs.metadata[i]["chosen"], pairs.metadata[i]["rejected"]
        texts = hostile_texts(chosen, rejected)
        records.append(pairs.metadata[i] | {"rejected": texts[number % len(texts)]})
    return Preferences([*pairs.texts, *(pairs.texts[i] for i in added)], [*pairs.metadata, *records])


def hostile_texts(chosen: str, wrong: str) -> list[str]:
    """The first sentence of an answer that has several, and hostile texts, some of which contain a wrong answer."""
    sentences = re.split(r"(?<=[.!?:])\s+|\n+", chosen.strip())
    first = sentences[:1] if len(sentences) > 1 else []
    kinds = [[*texts] for kind, texts in TEXTS.items() if kind != "wrong answer"]
    # one of each kind in turn, so that few of them are of many kinds
    mixed = [text for row in zip_longest(*kinds) for text in row if text is not None]
    return [*first, *(text.replace("{wrong}", wrong) for text in mixed if text != chosen)]


def _loaded(name: str) -> Template:
    try:
        return load_template(name)
    except ValueError as error:
        raise ConfigError(str(error)) from error
