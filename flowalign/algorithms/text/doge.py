"""DoGe: a thinker explores a problem's context, a solver solves it knowing that, and each learns in its own stage.

Rollout: the first half of a group are thinkers, under `think`; each of the others is a solver, under `template` with a
thinker's text. Credit: a thinker earns its solver's reward, so that no answer of its own can pay; the halves are
normalised by themselves. In the first stage only thinkers learn, from `solver_from` on only solvers. The selection
`evolving` grows the problems from those that are solved.

After the abstract (arXiv 2512.06835). Departures: one set of weights plays both roles; thinkers see the question, where
the authors' see the context alone.
"""

import torch
from pydantic import Field
from torch import Tensor

from flowalign.algorithms.text.halves import Halves, HalvesSettings
from flowalign.algorithms.text.prompted import check_fields, filled
from flowalign.config import Data
from flowalign.data import Prompts
from flowalign.data.batches import Batch
from flowalign.policies.language.rollout import TextRollout
from flowalign.rollouts.language import LanguageSampler


class DoGeSettings(HalvesSettings):
    think: str = "{prompt}\n\nDo not solve this. Say what is given, what is asked, and what is to be known for it.\n"
    """Prompt of a thinker; names in braces are the prompt and keys of its metadata."""
    template: str = "{prompt}\n\nWhat somebody noted about it: {pioneer}\n\n{prompt}"
    """Prompt of a solver; {pioneer} is a thinker's text."""
    solver_from: float = Field(0.5, ge=0, le=1)
    """Share of the training after which solvers learn in the place of thinkers."""


class DoGe(Halves):
    """DoGe: thinkers learn by how well others solve with what they say, then solvers learn."""

    name = "doge"
    Settings = DoGeSettings
    settings: DoGeSettings
    solving = False
    """Whether solvers learn, told before each iteration."""

    def read(self, data: Data) -> Prompts:
        prompts = super().read(data)
        check_fields(self.settings.think, prompts)
        return prompts

    def progress(self, done: float) -> None:
        self.solving = done >= self.settings.solver_from

    def first(self, sampler: LanguageSampler, batch: Batch) -> TextRollout:
        prompts = [
            filled(self.settings.think, prompt, record)
            for prompt, record in zip(batch.prompts, batch.metadata, strict=True)
        ]
        arguments = sampler.config.rollout.arguments()
        return sampler.policy.sample(prompts, batch.noise_seeds, metadata=batch.metadata, **arguments)

    def credited(self, reward: Tensor, second: Tensor, group: Tensor) -> Tensor:
        return of_stage(reward, second, group, self.solving)


def of_stage(reward: Tensor, second: Tensor, group: Tensor, solving: bool) -> Tensor:
    """Rewards where the half that learns has the solvers' and the other half is all alike, and so teaches nothing.

    Args:
        reward: [B].
        second: [B] bool: the solvers; the k-th of a group was shown the text of its k-th thinker.
        group: [B] integers.
        solving: whether solvers learn, else thinkers.
    """
    changed = torch.zeros_like(reward)
    for number in group.unique().tolist():
        solvers = (group == number) & second
        changed[solvers if solving else (group == number) & ~second] = reward[solvers]
    return changed
