"""Values of a text's beginnings, by how often they lead to the right answer."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rewards.base import Metadata, Reward, RewardError, Scores, Spec, Steps, as_reward, bind, groups, score, spec_of
from rewards.text.model import AsksModel, CausalModel, Pictured
from rewards.text.steps import LINES, step_ends


class StepProgress(AsksModel):
    """What each step adds to the chance of a right answer, measured by going on from there.

    A step's reward is V(after) - V(before); V is the mean outcome of `samples` continuations of the text so far. With
    `model`, a prover, it is the process advantage of PAV (arXiv 2410.08146). With `lead`, which ends the reasoning and
    asks for the answer, under the model in training, it is the progress of MRT (2503.07572) over blocks: `separator`
    says what ends one. Both add it, weighted, to the outcome of the whole text: `weighted_sum`, or `size` here.
    `advantage: {name: process_returns}` learns from steps.

    Args:
        outcome: a verifier of texts. It gets the text so far, `lead` and the continuation as one text.
        model: folder or hub name of the model that goes on; default the one that is trained.
        lead: text after the steps so far.
        samples: continuations of each beginning.
        most: largest number of tokens of a continuation.
        temperature: 0 takes the most probable continuation, of which one is enough.
        size: weight of the progress beside the outcome of the text, which its last step gets.
        separator: a regular expression of what ends a step.
    """

    def __init__(
        self,
        outcome: Reward,
        model: str | None = None,
        lead: str = "",
        samples: int = 4,
        most: int = 64,
        temperature: float = 1.0,
        size: float = 1.0,
        separator: str = LINES,
    ) -> None:
        super().__init__(model)
        if samples < 1 or (samples > 1 and temperature <= 0):
            raise ValueError("step_progress: several samples at temperature 0 are all the same; samples: 1 works")
        self.outcome: Reward = as_reward(outcome)
        spec = spec_of(self.outcome)
        if spec.kind != "pointwise":
            raise ValueError(f"step_progress: '{self.outcome.name}' must score each text alone (pointwise)")
        self.name = f"step_progress({self.outcome.name})"
        self.lead, self.samples, self.most, self.temperature = lead, samples, most, temperature
        self.size, self.separator = size, separator
        self.spec = Spec(spec.needs | {"text", "prompt", "metadata"}, deterministic=False)

    def bind(self, model: CausalModel) -> None:
        """Take the model that is trained, and hand it on."""
        super().bind(model)
        bind(self.outcome, model)

    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        outcome = score(self.outcome, samples, prompts, metadata).value
        ends = [step_ends(text, self.separator) for text in samples]
        rows = [i for i, cut in enumerate(ends) for _ in range(1 + len(cut))]
        begun = [text[:end] for text, cut in zip(samples, ends, strict=True) for end in [0, *cut]]
        values = self.values(begun, [prompts[i] for i in rows], [metadata[i] for i in rows])
        steps: list[Steps] = []
        for cut, row, whole in zip(ends, values.split([1 + len(cut) for cut in ends]), outcome.tolist(), strict=True):
            gained = (self.size * row.diff()).tolist()
            gained[-1] += whole
            steps.append(list(zip(cut, gained, strict=True)))
        total = torch.tensor([sum(value for _, value in row) for row in steps])
        return Scores(total, {"outcome": outcome}, steps)

    def values(self, begun: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Tensor:
        """[N] mean outcome of continuations of each text that has begun."""
        model = self.model
        contexts = beginnings(self.name, model, [text + self.lead for text in begun], prompts, metadata)
        total = torch.zeros(len(begun))
        for sample in range(self.samples):
            ended = model.continued(contexts, self.most, self.temperature, sample)
            texts = [text + self.lead + more for text, more in zip(begun, ended, strict=True)]
            total += score(self.outcome, texts, prompts, metadata).value
        return total / self.samples


class BeatsPlain(AsksModel):
    """The outcome of a text that reasons, 0 where an answer without reasoning is better (after RAIF's abstract, arXiv
    2506.01413, on sample-wise contrast).

    The plain answer is the most probable continuation of the prompt and `lead`, once for each prompt.

    Args:
        outcome: a verifier of texts. It gets `lead` and the continuation as the plain text.
        lead: text that skips the reasoning, such as `<think></think>`.
        model: folder or hub name of the model that answers; default the one that is trained.
        most: largest number of tokens of the plain answer.
        ties: whether a text that is as good as the plain answer keeps its outcome.
    """

    def __init__(
        self, outcome: Reward, lead: str = "", model: str | None = None, most: int = 64, ties: bool = True
    ) -> None:
        super().__init__(model)
        self.outcome: Reward = as_reward(outcome)
        self.name = f"beats_plain({self.outcome.name})"
        self.lead, self.most, self.ties = lead, most, ties
        spec = spec_of(self.outcome)
        self.spec = Spec(spec.needs | {"text", "prompt", "metadata"}, spec.kind, deterministic=self.frozen)

    def bind(self, model: CausalModel) -> None:
        """Take the model that is trained, and hand it on."""
        super().bind(model)
        bind(self.outcome, model)

    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        outcome = score(self.outcome, samples, prompts, metadata).value
        members_of = groups(prompts, metadata)
        first = [members[0] for members in members_of]
        asked, records = [prompts[i] for i in first], [metadata[i] for i in first]
        contexts = beginnings(self.name, self.model, [self.lead] * len(first), asked, records)
        answers = [self.lead + text for text in self.model.continued(contexts, self.most)]
        plain = torch.zeros(len(samples))
        for value, members in zip(score(self.outcome, answers, asked, records).value, members_of, strict=True):
            plain[members] = value
        beats = outcome >= plain if self.ties else outcome > plain
        return Scores(outcome.where(beats, 0.0), {"outcome": outcome, "plain": plain})


def beginnings(
    name: str, model: CausalModel, texts: Sequence[str], prompts: Sequence[str], metadata: Metadata
) -> list[list[int]]:
    """Token ids of prompts and the beginnings of texts.

    Raises:
        RewardError: a prompt shows pictures.
    """
    contexts = []
    for text, prompt, record in zip(texts, prompts, metadata, strict=True):
        context = model.begin(prompt, record)
        if isinstance(context, Pictured):
            raise RewardError(f"reward '{name}': continuations are of texts without pictures")
        contexts.append(context + model.tokens(text))
    return contexts
