"""When a curve reaches a gain: an exponential approach to a plateau, through a start, a middle and an end.

With the gains g1 at time h and g2 at 2h and r = (g2 - g1) / g1 it is gain(t) = p (1 - r^(t / h)), p = g1 / (1 - r): a
stretch h gains r times what the one before did. A curve that does not flatten (r >= 1) goes on in the line to its end,
and r is at least `FLATTEST`, since one that falls back has no such form.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowalign.evaluation.statistics import Interval, redrawn

Array = NDArray[np.float64]
FLATTEST = 0.05


@dataclass(frozen=True)
class Approach:
    """Curves through draws of the two gains."""

    half: Array
    """[N] gain halfway."""
    end: Array
    """[N] gain at the end."""
    length: float
    """Iterations to the end."""

    def reached(self, gain: float) -> Interval:
        """Iterations to a gain: median and 95% interval; infinity where the curve stays below it."""
        if gain <= 0:
            return Interval(0.0, 0.0, 0.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.maximum((self.end - self.half) / self.half, FLATTEST)
            left = 1 - gain * (1 - ratio) / self.half
            bent = np.where(left > 0, self.length / 2 * np.log(left) / np.log(ratio), np.inf)
            line = np.where(self.end > 0, self.length * gain / self.end, np.inf)
        iterations = np.where((self.half > 0) & (ratio < 1), bent, line)
        # infinities are whole draws: no interpolation between them and numbers
        low, middle, high = np.quantile(iterations, (0.025, 0.5, 0.975), method="nearest").tolist()
        return Interval(middle, low, high)

    def record(self) -> dict[str, Any]:
        """The gain halfway as JSON, with its 95% interval; that of the end is the trial's."""
        low, middle, high = np.quantile(self.half, (0.025, 0.5, 0.975)).tolist()
        return {"median": middle, "low": low, "high": high}


def approach(half: Sequence[float], end: Sequence[float], prompts: Sequence[str], length: float) -> Approach:
    """The curves that paired gains of N samples allow, prompts being drawn with replacement.

    Args:
        half: gain of each sample halfway.
        end: gain of each sample at the end.
        prompts: prompt of each sample.
        length: iterations to the end.
    """
    _, group = np.unique(np.array(prompts), return_inverse=True)
    draws = redrawn(int(group.max()) + 1)
    size = draws @ np.bincount(group)
    halfway, last = (draws @ np.bincount(group, values) / size for values in (half, end))
    return Approach(halfway, last, length)
