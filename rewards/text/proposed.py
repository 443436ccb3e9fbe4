"""A reward of problems: whether the solver just about solves them."""

from collections.abc import Sequence

import torch

from rewards.base import Metadata, Reward, Scores, Spec, as_reward, bind, score, spec_of
from rewards.text.answering import beginnings
from rewards.text.model import AsksModel, CausalModel


class BarelySolved(AsksModel):
    """1 for a text that is a problem which the model solves now and then, else 0 (STP's proposer, arXiv 2502.00212).

    The model answers the text `samples` times; it is barely solved where the share of right answers is above 0 and at
    most `most_solved`. `routed` trains proposer and solver in one run, by a task of each. After the abstract; the
    authors check proofs by Lean, and filter proposals that are trivial.

    Args:
        outcome: a verifier that needs no right answer in the data, such as a proof checker or a judge; it gets answers
            with the text as their prompt.
        model: folder or hub name of the solver; default the model that is trained.
        lead: text between a problem and its answer.
        samples: answers to each text.
        most: largest number of tokens of an answer.
    """

    def __init__(
        self,
        outcome: Reward,
        model: str | None = None,
        lead: str = "",
        samples: int = 8,
        most: int = 256,
        temperature: float = 1.0,
        most_solved: float = 0.25,
    ) -> None:
        super().__init__(model)
        if samples < 2 or temperature <= 0 or not 0 < most_solved <= 1:
            raise ValueError("barely_solved: samples at least 2, temperature above 0, most_solved in (0, 1]")
        self.outcome: Reward = as_reward(outcome)
        self.name = f"barely_solved({self.outcome.name})"
        self.lead, self.samples, self.most = lead, samples, most
        self.temperature, self.most_solved = temperature, most_solved
        self.spec = Spec(spec_of(self.outcome).needs | {"text", "prompt", "metadata"}, deterministic=False)

    def bind(self, model: CausalModel) -> None:
        """Take the model that is trained, and hand it on."""
        super().bind(model)
        bind(self.outcome, model)

    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        contexts = beginnings(self.name, self.model, [self.lead] * len(samples), samples, metadata)
        rate = torch.zeros(len(samples))
        for sample in range(self.samples):
            answers = self.model.continued(contexts, self.most, self.temperature, sample)
            rate += score(self.outcome, answers, samples, metadata).value >= 0.5
        rate /= self.samples
        return Scores(((rate > 0) & (rate <= self.most_solved)).float(), {"solved": rate})
