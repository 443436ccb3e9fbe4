"""A reward from comparisons within a group, by the schedules that the core knows."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rewards.base import Metadata, PairwiseReward, Reward, Scores, advance, bind, groups, spec_of
from rewards.pairwise import Pair, Schedule, compare
from rewards.preference import as_judge


class Compared:
    """Win rates in [0, 1] with O(G) comparisons of a group of G: BRPO's one opponent, ArenaRL's tournament.

    BRPO is arXiv 2506.00103, ArenaRL 2601.06487; 'all' is `win_rate` with every pair in one order. For texts and
    pictures alike.

    Args:
        reward: a pairwise reward, or a pointwise one whose higher score wins.
        schedule: 'one' random member against all others, 'tournament', or 'all' pairs.
        both_orders: ask twice, against the judge's liking for a side.

    The random member has the same place in its group every time: members are drawn alike, so any place is random.
    """

    def __init__(
        self,
        reward: PairwiseReward | Reward,
        schedule: Schedule = "one",
        both_orders: bool = False,
    ) -> None:
        self.reward, self.schedule, self.both_orders = as_judge(reward), schedule, both_orders
        self.name = f"compared({self.reward.name})"
        self.spec = replace(spec_of(self.reward), kind="group", differentiable=False)

    def advance(self, progress: float) -> None:
        """Pass on how far training is, in [0, 1]."""
        advance(self.reward, progress)

    def bind(self, model: Any) -> None:
        """Pass on the language model in training."""
        bind(self.reward, model)

    def __call__(self, samples: Sequence[Any], prompts: Sequence[str], metadata: Metadata) -> Scores:
        group = [0] * len(samples)
        for number, members in enumerate(groups(prompts, metadata)):
            for i in members:
                group[i] = number

        def verdicts(pairs: list[Pair]) -> list[float]:
            first, second = zip(*pairs, strict=True)
            told = [prompts[i] for i in first], [metadata[i] for i in first]
            judged = self.reward.compare([samples[i] for i in first], [samples[i] for i in second], *told)
            return judged.value.tolist()

        return Scores(compare(group, verdicts, self.schedule, both=self.both_orders))
