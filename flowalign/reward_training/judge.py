"""Training a vision-language model to judge pairs of pictures, and the questions that it answers about them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import PIL.Image
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoProcessor

from flowalign.data import Preferences
from flowalign.errors import ConfigError
from rewards.judges import LocalJudge, Question, Template, load_template
from rewards.vision import pick_device


class JudgeScorer:
    """A VLM judge in training: margins are log-odds of its labels, so that log sigmoid(margin) is the objective.

    With a template that compares, the margin of a pair is the log-odds of the label that names the chosen picture, in
    either order: the likelihood of the right label, RewardDance's objective (arXiv 2509.08826). With one that judges
    single pictures, it is by how much the log-odds of yes of the chosen picture exceed those of the rejected one:
    Bradley and Terry's model, the base line that RewardDance compares with, here without a head of its own.

    Args:
        model: folder or hub name of an image-text-to-text model.
        template: name or file of a template with one question whose answer is a probability.
    """

    def __init__(self, model: str, template: str, device: str = "auto") -> None:
        self.template = judging_template(template)
        self.asked = self.template.questions[0]
        try:
            self.network = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
            self.processor = AutoProcessor.from_pretrained(model)
        except (OSError, ValueError) as error:
            raise ConfigError(f"no model to train at '{model}': {' '.join(str(error).split())[:300]}") from error
        self.judge = LocalJudge(self.network.to(pick_device(device)).eval(), self.processor)

    def __call__(self, pairs: Preferences, rows: Sequence[int]) -> Tensor:
        """[N] margins of these pairs; [2 N], first the chosen and then the rejected picture in front, where the
        template compares."""
        sides = [[_picture(pairs, i, key) for i in rows] for key in ("chosen", "rejected")]
        texts = [self.template.text(self.asked, pairs.texts[i], pairs.metadata[i]) for i in rows]
        if not self.template.pairwise:
            shown = [(picture,) for side in sides for picture in side]
            chosen, rejected = self._log_odds(shown, texts * 2).chunk(2)
            return chosen - rejected
        there, back = self._log_odds([*zip(*sides), *zip(*reversed(sides))], texts * 2).chunk(2)
        return torch.cat([there, -back])

    def _log_odds(self, shown: Sequence[tuple[PIL.Image.Image, ...]], texts: Sequence[str]) -> Tensor:
        """[N] of the first label against the second."""
        questions = [Question(pictures, text, self.asked.system) for pictures, text in zip(shown, texts, strict=True)]
        good, bad = self.judge.label_logits(questions, self.asked.labels).unbind(-1)
        return good - bad

    @torch.no_grad()
    def accuracy(self, pairs: Preferences, batch_size: int) -> float:
        """Share of the pairs whose chosen picture wins, as `vlm_pairwise` with `both_orders` judges them; a tie counts
        half."""
        share = []
        for rows in torch.arange(len(pairs)).split(batch_size):
            chance = self(pairs, rows.tolist()).sigmoid()
            share.append(torch.stack(chance.chunk(2)).mean(0) if self.template.pairwise else chance)
        mean = torch.cat(share)
        return ((mean > 0.5).float() + (mean == 0.5) / 2).mean().item()

    def save(self, folder: Path) -> None:
        """Write what `vlm_pairwise` and `vlm_judge` load."""
        for part in (self.network, self.processor):
            part.save_pretrained(folder)


def judging_template(name: str) -> Template:
    """A template with one question whose answer is a probability: what can be trained by its labels.

    Raises:
        ConfigError: no such template, or another kind.
    """
    template = _loaded(name)
    if template.answer != "probability" or len(template.questions) != 1 or "reference" in template.needs:
        raise ConfigError(
            f"template '{name}': a judge is trained by the probability of one question's labels about one or two "
            "pictures; reward_dance_pair or vqa_score works"
        )
    return template


def questions(pairs: Preferences, name: str) -> list[dict[str, Any]]:
    """Each pair as two questions: `prompt`, `image`, `answer`, and `pair`, which the two have in common.

    Of texts there is no `image`: the template has them in its fields {first} and {second}, as text_better.

    A template that compares is asked in both orders. One about single pictures is asked about either, and the first
    label (yes) is the answer for the chosen one. Where a reply names the winner, the answer is that name, as the
    template's replies give it.
    """
    template = _loaded(name)
    by_winner = template.answer == "winner" and len(template.questions) == 1
    asked, records = (template if by_winner else judging_template(name)).questions[0], []
    if by_winner and [asked.read_winner(f"{asked.after} {label}") for label in asked.labels] != [1, 0]:
        raise ConfigError(
            f"template '{name}': labels [{', '.join(asked.labels)}] are not read as the first and the second winning; "
            "name them as its replies do, e.g. labels: [A, B] where one ends with 'Winner: A'"
        )
    shown = [("chosen", "rejected"), ("rejected", "chosen")] if template.pairwise else [("chosen",), ("rejected",)]
    for number, (text, record) in enumerate(zip(pairs.texts, pairs.metadata, strict=True)):
        texts = record.get("medium") == "text"
        if texts != ({"first", "second"} <= template.fields.keys()):
            own, other = ("texts", "text_better") if texts else ("pictures", "reward_dance_pair")
            raise ConfigError(f"template '{name}': the preferences are between {own}; {other} asks about those")
        for keys, answer in zip(shown, asked.labels, strict=True):
            sides = [record[key] for key in keys]
            if texts:
                told = record | dict(zip(("first", "second"), sides, strict=True))
                question: dict[str, Any] = {"prompt": template.text(asked, text, told)}
            else:
                files = [str(Path(file).absolute()) for file in sides]
                question = {"prompt": template.text(asked, text, record), "image": files}
            records.append(question | {"answer": answer, "pair": number})
    return records


def _loaded(name: str) -> Template:
    try:
        return load_template(name)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _picture(pairs: Preferences, row: int, key: str) -> PIL.Image.Image:
    return PIL.Image.open(pairs.metadata[row][key])
