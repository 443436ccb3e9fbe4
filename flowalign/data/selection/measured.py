"""Prompts chosen by how their groups fared so far: by uncertainty, by value, by variance, in pairs of hard and easy."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from flowalign.data import Prompts
from flowalign.data.batches import shuffled

Floats = NDArray[np.float64]


class MeasuredSelection:
    """Base: the mean rewards of each prompt's groups, in the order in which they came; rewards in [0, 1].

    Prompts that were never drawn come first, in a seeded order, where a subclass asks for them by a score of infinity.
    """

    def __init__(self) -> None:
        self.history: dict[int, list[float]] = {}
        self.drawn = 0

    def scores(self, count: int, iteration: int) -> Floats:
        """[count] how much each prompt is wanted; infinity: before all that were drawn."""
        raise NotImplementedError

    def picks(self, prompts: Prompts, iteration: int, groups: int, seed: int, round: int = 0) -> list[int]:
        scores = self.scores(len(prompts), iteration)
        # ties in another order each time
        order = np.random.default_rng([seed, iteration, 6, round]).permutation(len(prompts))
        best = order[np.argsort(-scores[order], kind="stable")]
        return [int(best[i % len(best)]) for i in range(groups)]

    def rates(self, count: int) -> Floats:
        """[count] mean rewards of each prompt, NaN of those that were never drawn."""
        rates = np.full(count, np.nan)
        for prompt, seen in self.history.items():
            rates[prompt] = np.mean(seen)
        return rates

    def learn(self, picks: Sequence[int], prompts: Prompts, success: Sequence[float], gain: Sequence[float]) -> None:
        for pick, rate in zip(picks, success, strict=True):
            self.history.setdefault(pick, []).append(min(max(rate, 0.0), 1.0))

    def state_dict(self) -> dict[str, Any]:
        return {"history": [[prompt, seen] for prompt, seen in self.history.items()], "drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.history, self.drawn = {prompt: list(seen) for prompt, seen in state["history"]}, state["drawn"]


class Uncertain(MeasuredSelection):
    """XRPO's allocation (arXiv 2510.06672): the prompts whose mean reward gets surer by another group.

    A prompt of n members with deviation s is worth h(n) - h(n + G) + explore sqrt(log(1 + T) / n), T members in all,
    where h = t s / sqrt(n) is half the confidence interval by Student's t. Several groups of one prompt are possible:
    each counts as drawn for the next. After accounts of the paper, which allocates single members in rounds; here whole
    groups are allocated from iteration to iteration. `novel` is its advantage; `hinted` shows solved examples.

    Args:
        members: members of a group.
        explore: weight of prompts that were drawn seldom.
        level: of the confidence interval.
    """

    name = "uncertain"

    def __init__(self, members: int = 8, explore: float = 0.1, level: float = 0.95) -> None:
        super().__init__()
        if members < 2 or not 0 < level < 1 or explore < 0:
            raise ValueError("uncertain: members at least 2, level in (0, 1), explore 0 or more")
        self.members, self.explore, self.level = members, explore, level

    def picks(self, prompts: Prompts, iteration: int, groups: int, seed: int, round: int = 0) -> list[int]:
        seen = np.array([len(self.history.get(i, ())) for i in range(len(prompts))], dtype=np.float64)
        order = np.random.default_rng([seed, iteration, 6, round]).permutation(len(prompts))
        picks = []
        for _ in range(groups):
            scores = self.priorities(seen)
            pick = int(order[np.argmax(scores[order])])
            picks.append(pick)
            seen[pick] += 1
        return picks

    def priorities(self, seen: Floats) -> Floats:
        """[count] expected gain of another group of each prompt, of which there were so many, those of now included."""
        rates = np.nan_to_num(self.rates(len(seen)), nan=0.5)
        drawn = seen * self.members
        safe = np.maximum(drawn, self.members)
        # of rewards 0 and 1
        spread = np.sqrt(rates * (1 - rates) * safe / (safe - 1))
        gain = spread * (self._interval(safe) - self._interval(safe + self.members))
        bonus = self.explore * np.sqrt(np.log1p(drawn.sum()) / safe)
        return np.where(seen == 0, np.inf, gain + bonus)

    def _interval(self, members: Floats) -> Floats:
        t: Floats = stats.t.ppf((1 + self.level) / 2, members - 1)
        return t / np.sqrt(members)


class Valued(MeasuredSelection):
    """Prompts in turn; those that take the place of groups without spread by their value (VSPO, arXiv 2512.07478).

    The value is 4 p (1 - p) + hard (1 - p) of the mean reward p, uncertainty and difficulty; `data.dynamic_sampling`
    says which groups are replaced. After the abstract, which has no formula. The advantage `value_smoothed` clips.

    Args:
        hard: weight of difficulty.
    """

    name = "valued"

    def __init__(self, hard: float = 0.5) -> None:
        super().__init__()
        self.hard = hard

    def scores(self, count: int, iteration: int) -> Floats:
        rates = self.rates(count)
        # what was never drawn is worth as much as one of two
        value: Floats = np.nan_to_num(4 * rates * (1 - rates) + self.hard * (1 - rates), nan=1 + self.hard / 2)
        return value

    def picks(self, prompts: Prompts, iteration: int, groups: int, seed: int, round: int = 0) -> list[int]:
        if round > 0:
            return super().picks(prompts, iteration, groups, seed, round)
        first, self.drawn = self.drawn, self.drawn + groups
        return shuffled(len(prompts), first, groups, seed)


class Varied(MeasuredSelection):
    """A few prompts whose mean reward varied most over the first iterations (1-shot RLVR, arXiv 2504.20571).

    Every prompt in turn until each was drawn `passes` times; from then on the `examples` with the largest variance of
    their groups' mean rewards alone. The authors measure it in a run of its own.
    """

    name = "varied"

    def __init__(self, examples: int = 1, passes: int = 4) -> None:
        super().__init__()
        if examples < 1 or passes < 2:
            raise ValueError("varied: examples at least 1, passes at least 2")
        self.examples, self.passes = examples, passes
        self.chosen: list[int] = []

    def picks(self, prompts: Prompts, iteration: int, groups: int, seed: int, round: int = 0) -> list[int]:
        if self.drawn < self.passes * len(prompts):
            first, self.drawn = self.drawn, self.drawn + groups
            return shuffled(len(prompts), first, groups, seed)
        if not self.chosen:
            variance = np.array([np.var(self.history.get(i, [0.0])) for i in range(len(prompts))])
            self.chosen = [int(i) for i in np.argsort(-variance, kind="stable")[: self.examples]]
        return [self.chosen[i % len(self.chosen)] for i in range(groups)]

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"chosen": self.chosen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.chosen = list(state["chosen"])


class Paired(MeasuredSelection):
    """Hard prompts that were solved now and then, each beside an easy one that sometimes fails (arXiv 2602.03452).

    Every prompt in turn until each was drawn `passes` times; from then on pairs of one with a success rate in (0, low]
    and one with a rate in [high, 1). Rare successes and rare failures thus have large advantages in one update, by
    `grpo`'s division by the spread: the paper's weights of right and wrong ones are a line through both, which that
    division takes out again. Where there is none of a kind, prompts come in turn.
    """

    name = "paired"

    def __init__(self, low: float = 0.25, high: float = 0.75, passes: int = 1) -> None:
        super().__init__()
        if not 0 < low <= high < 1 or passes < 1:
            raise ValueError("paired: 0 < low <= high < 1, passes at least 1")
        self.low, self.high, self.passes = low, high, passes

    def picks(self, prompts: Prompts, iteration: int, groups: int, seed: int, round: int = 0) -> list[int]:
        rates, random = self.rates(len(prompts)), np.random.default_rng([seed, iteration, 6, round])
        kinds = [(rates > 0) & (rates <= self.low), (rates >= self.high) & (rates < 1)]
        members = [random.permutation(np.flatnonzero(kind)) for kind in kinds]
        if self.drawn < self.passes * len(prompts) or not all(map(len, members)):
            first, self.drawn = self.drawn, self.drawn + groups
            return shuffled(len(prompts), first, groups, seed)
        return [int(members[i % 2][i // 2 % len(members[i % 2])]) for i in range(groups)]
