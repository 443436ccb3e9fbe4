"""Right reasoning that the model finds itself, shown the answer, and how far a text's steps lead to it."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rewards.base import Metadata, Reward, RewardError, Scores, Spec, Steps, as_reward, bind, groups, score, spec_of
from rewards.text.answering import beginnings
from rewards.text.contrast import row_means
from rewards.text.model import CausalModel
from rewards.text.steps import LINES, PathFaithfulness, step_ends

FIELD = re.compile(r"\{(\w+)\}")


class GoldPath(PathFaithfulness):
    """Probability of the rest of a right reasoning after each step of a text, the reasoning being the model's own (P2S,
    arXiv 2601.20649, after the abstract).

    Once for each prompt of an iteration, `tries` reasonings are drawn under `template`, which shows the answer. Of
    those that the outcome accepts, the one that is the most probable under the plain prompt, on the mean over its
    tokens, is the right reasoning. A prompt without one earns nothing. With `weighted_sum` and the outcome beside it;
    `advantage: {name: process_returns}` learns from each step.

    Args:
        outcome: the verifier of candidates; from 1/2 on is right.
        template: prompt under which candidates are drawn; names in braces are the prompt and keys of its metadata.
        tries: reasonings of each prompt.
        most: largest number of tokens of one.
        model, separator: as of `path_faithfulness`.
    """

    def __init__(
        self,
        outcome: Reward,
        template: str = "{prompt}\n\n(The right answer is {answer}.)\n",
        tries: int = 4,
        most: int = 512,
        temperature: float = 1.0,
        model: str | None = None,
        separator: str = LINES,
    ) -> None:
        if tries < 1 or not temperature > 0:
            raise ValueError("gold_path: tries at least 1, temperature above 0")
        super().__init__(model, "gold", separator)
        self.outcome: Reward = as_reward(outcome)
        self.name = f"gold_path({self.outcome.name})"
        self.template, self.tries, self.most, self.temperature = template, tries, most, temperature
        self.spec = Spec(spec_of(self.outcome).needs | {"text", "prompt", "metadata"}, deterministic=False)
        self.draw = 0
        """Number of the draw of candidates; they are others in another one."""

    def bind(self, model: CausalModel) -> None:
        """Take the model that is trained, and hand it on."""
        super().bind(model)
        bind(self.outcome, model)

    def __call__(self, samples: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        members_of = groups(prompts, metadata)
        first = [members[0] for members in members_of]
        found = self.reasonings([prompts[i] for i in first], [metadata[i] for i in first])
        gold: list[str | None] = [None] * len(samples)
        for members, reasoning in zip(members_of, found, strict=True):
            for i in members:
                gold[i] = reasoning
        rows = [i for i, reasoning in enumerate(gold) if reasoning]
        steps: list[Steps] = [[(end, 0.0) for end in step_ends(text, self.separator)] for text in samples]
        if rows:
            records = [dict(metadata[i]) | {"gold": gold[i]} for i in rows]
            told = super().__call__([samples[i] for i in rows], [prompts[i] for i in rows], records)
            for i, row in zip(rows, told.steps or [], strict=True):
                steps[i] = row
        has = torch.tensor([float(bool(reasoning)) for reasoning in gold])
        return Scores(torch.tensor([sum(value for _, value in row) for row in steps]), {"gold": has}, steps)

    def reasonings(self, prompts: Sequence[str], metadata: Metadata) -> list[str | None]:
        """A right reasoning for each prompt, None where none of the candidates is right."""
        rich = [self._shown({**record, "prompt": prompt}) for prompt, record in zip(prompts, metadata, strict=True)]
        contexts = beginnings(self.name, self.model, [""] * len(rich), rich, metadata)
        plain = beginnings(self.name, self.model, [""] * len(rich), prompts, metadata)
        texts, likely = [], []
        for number in range(self.tries):
            drawn = self.model.continued(contexts, self.most, self.temperature, self.draw * self.tries + number)
            right = score(self.outcome, drawn, prompts, metadata).value >= 0.5
            mean = row_means(*self.model.log_probs(plain, [self.model.tokens(text) for text in drawn]))
            texts.append(drawn)
            likely.append(mean.where(right & torch.tensor([bool(text) for text in drawn]), -torch.inf))
        self.draw += 1
        best = torch.stack(likely).max(0)
        return [
            texts[number][i] if value > -torch.inf else None
            for i, (value, number) in enumerate(zip(best.values.tolist(), best.indices.tolist(), strict=True))
        ]

    def _shown(self, values: Mapping[str, Any]) -> str:
        """The template with a prompt and its metadata filled in."""
        missing = [name for name in FIELD.findall(self.template) if name not in values]
        if missing:
            raise RewardError(f"reward '{self.name}': no '{missing[0]}' with the prompt {values['prompt']!r}")
        return FIELD.sub(lambda name: str(values[name[1]]), self.template)
