"""Prompts made easier or harder, until they are about as hard as the others were of late."""

import re
from collections import deque
from collections.abc import Sequence
from typing import Any

from flowalign.data import Prompts
from flowalign.data.batches import shuffled
from flowalign.data.selection.variants import Variants
from flowalign.errors import ConfigError

STEPS = 10
"""Sizes of a change, so that a prompt has few variants."""


class Augmented:
    """Prompts in turn, hard ones with a part of their solution, easy ones with noise on their pictures (after accounts
    of DeepVideo-R1's difficulty-aware augmentation, arXiv 2506.07464).

    A prompt's difficulty is the mean reward of the groups of the last `window` iterations less that of its own last
    group. A hard prompt gets the first words of its solution, a share `strength` times its difficulty of them; the
    pictures of an easy one get Gaussian noise in proportion to its easiness, by `image_noise` of its metadata. What is
    changed stays so while the prompt is learned from. Departure: a prompt is changed when its turn comes again, by its
    last group, in the place of a look at it just before; a text without pictures is not made harder.

    Args:
        key: key of the metadata with the solution; a prompt without one is not made easier.
        template: a prompt with `{clue}`, the part of its solution, and `{prompt}`.
        window: iterations whose mean reward is the measure.
        strength: share of the solution's words that a difficulty of 1 shows, at most all.
        noise: standard deviation of the noise at an easiness of 1; pixels lie in [0, 1].
    """

    name = "augmented"

    def __init__(
        self,
        key: str = "solution",
        template: str = "{prompt}\n\nHint: {clue}\n",
        window: int = 8,
        strength: float = 1.0,
        noise: float = 0.5,
    ) -> None:
        if not {"{clue}", "{prompt}"} <= set(re.findall(r"\{\w+\}", template)):
            raise ValueError("augmented: template has {prompt} and {clue}")
        if window < 1 or strength < 0 or noise < 0:
            raise ValueError("augmented: window at least 1, strength and noise 0 or more")
        self.key, self.template, self.strength, self.noise = key, template, strength, noise
        self.recent: deque[float] = deque(maxlen=window)
        """Mean rewards of the last iterations."""
        self.last: dict[int, float] = {}
        """Mean reward of each prompt's last group."""
        self.variants, self.drawn = Variants(), 0

    def picks(self, prompts: Prompts, iteration: int, groups: int, seed: int, round: int = 0) -> list[int]:
        listed = self.variants.join(prompts)
        if not any(self.key in record or "image" in record for record in prompts.metadata):
            raise ConfigError(f"data.selection.augmented: no prompt has '{self.key}' or pictures in its metadata")
        first, self.drawn = self.drawn, self.drawn + groups
        return [self._changed(prompts, pick) for pick in shuffled(listed, first, groups, seed)]

    def difficulty(self, pick: int) -> float:
        """Of a prompt of the list, in [-1, 1]: 0 where it was never drawn; above 0 it is harder than others of late."""
        if pick not in self.last:
            return 0.0
        return sum(self.recent) / len(self.recent) - self.last[pick]

    def _changed(self, prompts: Prompts, pick: int) -> int:
        """Number of the variant that is as hard as wanted."""
        size = round(STEPS * self.difficulty(pick)) / STEPS
        text, record = prompts.texts[pick], prompts.metadata[pick]
        if size > 0 and self.key in record:
            words = str(record[self.key]).split(" ")
            clue = " ".join(words[: round(min(self.strength * size, 1.0) * len(words))])
            if clue:
                text = self.template.replace("{prompt}", text).replace("{clue}", clue)
                return self.variants.number(prompts, pick, text, {})
        if size < 0 and "image" in record and self.noise > 0:
            return self.variants.number(prompts, pick, text, {"image_noise": round(-size * self.noise, 4)})
        return pick

    def learn(self, picks: Sequence[int], prompts: Prompts, success: Sequence[float], gain: Sequence[float]) -> None:
        self.recent.append(sum(success) / len(success))
        for pick, rate in zip(picks, success, strict=True):
            self.last[self.variants.source(pick)] = rate

    def state_dict(self) -> dict[str, Any]:
        last = [[pick, rate] for pick, rate in self.last.items()]
        return {
            "recent": list(self.recent),
            "last": last,
            "drawn": self.drawn,
            "variants": self.variants.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.recent = deque(state["recent"], maxlen=self.recent.maxlen)
        self.last, self.drawn = dict(map(tuple, state["last"])), state["drawn"]
        self.variants.load_state_dict(state["variants"])
