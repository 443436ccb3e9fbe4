"""The progress bar of a run: iterations done, and how far the present phase is."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm.auto import tqdm

from flowalign.config.sections import BaseConfig
from flowalign.data import Prompts
from flowalign.runs.progress import shown

SECONDS_BETWEEN = 0.2
"""Shortest time from one drawing to the next."""


class Bar:
    """Progress bar that names the phase of the run: 'base evaluation 24/80', 'sampling 40/64', 'update 2/4'.

    Args:
        config: configuration of the run.
        rows: processes that sample.
        silent: draw nothing.
    """

    def __init__(self, config: BaseConfig, rows: int, silent: bool) -> None:
        self.config, self.rows, self.silent = config, rows, silent
        self.budgeted = bool(config.training.budget.model_dump(exclude_none=True))
        self._phase, self._drawn_at = "", 0.0
        self._bar: tqdm[Any] | None = None

    @contextmanager
    def drawn(self, done: int) -> Iterator[None]:
        """Context in which the bar is drawn, with so many iterations done, below a line with the sizes of the run."""
        if not self.silent:
            tqdm.write(self._sizes(), file=sys.stderr)
        # with a budget the number of iterations is not known
        total = None if self.budgeted else self.config.training.iterations
        self._bar = tqdm(initial=done, total=total, disable=self.silent, desc=self.config.name)
        try:
            with shown(self._report):
                yield
        finally:
            self._bar.set_description_str(self.config.name, refresh=False)
            self._bar.close()
            self._bar = None

    def start_clock(self) -> None:
        """Begin to measure the time of an iteration: what came before was none."""
        if self._bar is not None:
            self._bar.unpause()

    def phase(self, name: str) -> None:
        """Name what the run does now."""
        self._phase = name
        self._draw(name)

    def iteration(self, headline: str, value: float | None, progress: float) -> None:
        """Count an iteration, and show its value.

        Args:
            value: None: all updates were skipped, so that there is none.
            progress: share of the training so far.
        """
        if self._bar is not None:
            values = {headline: "skipped" if value is None else f"{value:.3f}"}
            self._bar.set_postfix(values | ({"budget": f"{progress:.0%}"} if self.budgeted else {}), refresh=False)
            self._bar.update()

    def _sizes(self) -> str:
        """What an iteration and an evaluation take, in a line."""
        training, evaluation = self.config.training, self.config.evaluation
        samples = training.prompts_per_iteration * training.group_size
        prompts = "1 prompt" if training.prompts_per_iteration == 1 else f"{training.prompts_per_iteration} prompts"
        line = f"{prompts} x {training.group_size} = {samples} samples an iteration"
        line += f" on {self.rows} processes" if self.rows > 1 else ""
        line += f", updates from them: {training.updates}"
        if evaluation.prompts is not None:
            held_out = len(Prompts.of(evaluation)) * evaluation.samples_per_prompt
            when = f"every {evaluation.every} iterations" if evaluation.every else "at the end"
            line += f"; {held_out} held-out samples before, and {when}"
        return line

    def _report(self, done: int, total: int) -> None:
        if done == total or time.monotonic() - self._drawn_at > SECONDS_BETWEEN:
            self._draw(f"{self._phase} {done}/{total}")

    def _draw(self, doing: str) -> None:
        if self._bar is not None:
            self._drawn_at = time.monotonic()
            self._bar.set_description_str(f"{self.config.name}: {doing}")
