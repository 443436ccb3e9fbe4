"""A judge that is the language model in training."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rewards.base import RewardError
from rewards.judges.base import Question
from rewards.judges.local import LocalJudge
from rewards.judges.texts import TextProcessor
from rewards.text.model import CausalModel
from rewards.usage import Usage, usage_of


@dataclass
class OwnModel:
    """Settings of the model in training as judge (SSR-Zero, arXiv 2505.16637; URPO, 2507.17515)."""

    __pydantic_config__ = {"extra": "forbid"}

    own: Literal[True]
    """Always true."""
    weights: str | None = None
    """Snapshot of `training.snapshots` that judges; default the current weights, as published."""
    batch_size: int = 8
    """Questions in a network call."""

    def build(self, name: str) -> "OwnJudge":
        return OwnJudge(name, self.weights, self.batch_size, usage_of(name))


class OwnJudge:
    """Asks the language model that is trained, by its chat template where it has one."""

    differentiable = False

    def __init__(self, name: str, weights: str | None = None, batch_size: int = 8, usage: Usage | None = None) -> None:
        self.name, self.weights, self.batch_size, self.usage = name, weights, batch_size, usage
        self._model: CausalModel | None = None
        self._asked: LocalJudge | None = None

    def bind(self, model: CausalModel) -> None:
        """Take the model that is trained."""
        # a judge pads questions on the left, which is no business of the policy's tokenizer
        processor = TextProcessor(copy.copy(model.tokenizer)) if model.processor is None else copy.copy(model.processor)
        processor.tokenizer = copy.copy(processor.tokenizer)
        self._model, self._asked = model, LocalJudge(model.network, processor, self.batch_size, self.usage)

    def choose(self, questions: Sequence[Question], labels: Sequence[str]) -> list[list[float] | None]:
        asked, model = self._bound()
        with model.under(self.weights):
            return asked.choose(questions, labels)

    def echo(self, questions: Sequence[Question], answers: Sequence[str]) -> list[float]:
        asked, model = self._bound()
        with model.under(self.weights):
            return asked.echo(questions, answers)

    def reply(self, questions: Sequence[Question], temperature: float, max_tokens: int, seed: int) -> list[str]:
        asked, model = self._bound()
        with model.under(self.weights):
            return asked.reply(questions, temperature, max_tokens, seed)

    def _bound(self) -> tuple[LocalJudge, CausalModel]:
        if self._asked is None or self._model is None:
            raise RewardError(
                f"reward '{self.name}' asks the language model that is trained, and there is none here; "
                "judge: {model: PATH} names a frozen one"
            )
        return self._asked, self._model
