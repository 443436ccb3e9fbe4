"""Each sample scored by the reward of its task."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rewards.base import END, Metadata, Reward, RewardError, Scores, Spec, score
from rewards.compose import Composition
from rewards.gradients import score_with_gradient


class Routed(Composition):
    """Each sample is scored by one reward, which its metadata name: several tasks in one run.

    A reward is asked about its own samples only. Parts: each reward's value, NaN for the samples of the others, which
    metrics leave out; a reward's own parts are not kept, as a batch without its task would lack them. Advantages are
    within groups, whose samples share their prompt, so the rewards need no common scale.

    Args:
        by: key of the metadata that picks the reward.
        rewards: by the value under that key.
        otherwise: the reward of samples without that key, or with another value.
    """

    def __init__(self, by: str, rewards: Mapping[str, Reward], otherwise: Reward | None = None) -> None:
        super().__init__([*rewards.values(), *([] if otherwise is None else [otherwise])], "routed")
        self.by, self.routes = by, list(rewards)
        self.default = None if otherwise is None else len(rewards)

    @property
    def spec(self) -> Spec:
        inner = super().spec
        # a reference picture is needed by the samples of some routes only, whose reward looks for it
        return replace(inner, needs=inner.needs - {"reference"} | {"metadata"})

    def combine(self, values: Tensor, prompts: Sequence[str], metadata: Metadata) -> Tensor:
        """[B] from [rewards, B] where each column has one number, the others NaN."""
        return values.nansum(dim=0)

    def __call__(self, samples: Sequence[Any], prompts: Sequence[str], metadata: Metadata) -> Scores:
        def ask(reward: Reward, rows: list[int]) -> Scores:
            return score(reward, [samples[i] for i in rows], [prompts[i] for i in rows], [metadata[i] for i in rows])

        return self._score(ask, prompts, metadata)

    def score_pixels(self, pixels: Tensor, prompts: Sequence[str], metadata: Metadata) -> Scores:
        """See `DifferentiableReward.score_pixels`; every reward must be differentiable."""

        def ask(reward: Reward, rows: list[int]) -> Scores:
            return score_with_gradient(reward, pixels[rows], [prompts[i] for i in rows], [metadata[i] for i in rows])

        return self._score(ask, prompts, metadata)

    def _score(self, ask: Callable[[Reward, list[int]], Scores], prompts: Sequence[str], metadata: Metadata) -> Scores:
        """The rewards' scores, each reward asked about its own rows."""
        routes = [self._route(record, prompt) for record, prompt in zip(metadata, prompts, strict=True)]
        columns = []
        labelled = {label: torch.full((len(prompts),), float("nan")) for label in self.labels}
        for number, reward in enumerate(self.rewards):
            rows = [i for i, route in enumerate(routes) if route == number]
            if rows:
                columns.append((rows, ask(reward, rows)))
                labelled[self.labels[number]][rows] = columns[-1][1].value.detach().float().cpu()
        results = [each for _, each in columns]
        back = torch.tensor([i for rows, _ in columns for i in rows]).argsort()
        joined = Scores(torch.cat([each.value for each in results])[back], labelled)
        if any(each.weight is not None for each in results):
            weights = [torch.ones_like(each.value) if each.weight is None else each.weight for each in results]
            joined.weight = torch.cat(weights)[back]
        if any(each.steps is not None for each in results):
            steps = [row for each in results for row in each.steps or [[(END, value)] for value in each.value.tolist()]]
            joined.steps = [steps[i] for i in back.tolist()]
        if any(each.replies is not None for each in results):
            replies = [row for each in results for row in each.replies or [{}] * len(each.value)]
            joined.replies = [replies[i] for i in back.tolist()]
        return joined

    def _route(self, record: Mapping[str, Any], prompt: str) -> int:
        """The number of a sample's reward."""
        named = record.get(self.by)
        if named in self.routes:
            return self.routes.index(named)
        if self.default is None:
            raise RewardError(
                f"{self.name}: the prompt {prompt!r} has {named!r} under '{self.by}' in its metadata; there are "
                f"rewards for {', '.join(self.routes)}, or set `otherwise`"
            )
        return self.default
