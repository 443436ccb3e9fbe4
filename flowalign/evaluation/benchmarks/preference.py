"""DrawBench (arXiv 2205.11487) and PartiPrompts (2206.10789), by models of people's preferences."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from flowalign import registry
from flowalign.data import Prompts
from flowalign.evaluation.benchmarks.base import SampleScores, Suite
from rewards import Metadata, Reward, score

JUDGES = ("pick_score", "hpsv2", "image_reward", "aesthetic")


class PreferenceSuite(Suite):
    """Base of suites that are a list of prompts with models of people's preferences, and report a mean of each.

    Args:
        prompts: a file or a data set with the prompts.
        column: column that has the prompts.
        rewards: names of rewards; the first is the headline.
        split: split of a data set.
    """

    def __init__(self, prompts: str, column: str, rewards: Sequence[str], split: str | None) -> None:
        self.source, self.column, self.split, self.rewards = prompts, column, split, tuple(rewards)
        self.headline = self.rewards[:1]  # type: ignore[misc]
        for name in self.rewards:
            registry.check("rewards", name, {}, f"{self.name}.rewards")

    @cached_property
    def _built(self) -> dict[str, Reward]:
        return {name: registry.build("rewards", name, {}, f"{self.name}.rewards") for name in self.rewards}

    def prompts(self) -> Prompts:
        return Prompts.read(self.source, column=self.column, split=self.split)

    def score(self, samples: Sequence[Any], prompts: Sequence[str], metadata: Metadata) -> list[SampleScores]:
        values = {
            name: score(reward, samples, prompts, metadata).value.tolist() for name, reward in self._built.items()
        }
        return [{name: column[i] for name, column in values.items()} for i in range(len(samples))]

    def settings(self) -> Mapping[str, Any]:
        return {"prompts": self.source, "rewards": list(self.rewards)}


class DrawBench(PreferenceSuite):
    """DrawBench: 200 prompts; the means of PickScore (the headline), HPSv2.1, ImageReward and aesthetics.

    Args:
        prompts: a file or a data set with the prompts.
        column: of the prompts in it.
        rewards: names of rewards; the first is the headline.
        split: of a data set.
    """

    name = "drawbench"

    def __init__(
        self,
        prompts: str = "sayakpaul/drawbench",
        column: str = "Prompts",
        rewards: Sequence[str] = JUDGES,
        split: str | None = None,
    ) -> None:
        super().__init__(prompts, column, rewards, split)


class PartiPrompts(PreferenceSuite):
    """PartiPrompts: 1,632 prompts, a picture each; the means of PickScore (the headline) and three others.

    Args:
        prompts: a file or a data set with the prompts.
        column: of the prompts in it.
        rewards: names of rewards; the first is the headline.
        split: of a data set.
    """

    name = "parti"
    pictures = 1

    def __init__(
        self,
        prompts: str = "nateraw/parti-prompts",
        column: str = "Prompt",
        rewards: Sequence[str] = JUDGES,
        split: str | None = None,
    ) -> None:
        super().__init__(prompts, column, rewards, split)
