"""A run's evaluations: the held-out prompts scored, samples kept to look at, and the watch on reward hacking."""

import logging
from pathlib import Path
from typing import Any

import torch

from flowalign.algorithms.base import Algorithm
from flowalign.config.rewards import build_reward, build_rewards
from flowalign.config.sections import Watch
from flowalign.data import Prompts
from flowalign.evaluation.comparison import Comparison
from flowalign.evaluation.scores import Evaluated, evaluate, scores_of
from flowalign.evaluation.watch import NOTHING_SEEN, Panel, diagnose, watched
from flowalign.rollouts.sampler import Sampler
from flowalign.rollouts.scoring import Scorer
from flowalign.runs.metrics import MetricsFile
from flowalign.runs.samples import save_samples
from flowalign.training.learner import Learner
from flowalign.training.previews import preview, shown
from flowalign.training.tracking import show
from rewards import Reward, advance

logger = logging.getLogger(__name__)


def ended_at(folder: Path, watch: Watch) -> int:
    """The iteration of the evaluation that is of a run's result: the last one, or the last good one of a run that the
    watch stopped or that keeps its best; 0 where there is none."""
    lines = MetricsFile(folder / "evaluations.jsonl").read()
    seen = [line["watch"] for line in lines if "watch" in line]
    if seen and (watch.action == "stop" or watch.early_stop is not None):
        verdict = diagnose(seen, watch)
        if verdict.status == "hacked" or watch.early_stop is not None:
            return verdict.last_good
    return max((line["iteration"] for line in lines), default=0)


def before_and_after(folder: Path, watch: Watch) -> Comparison | None:
    """The held-out scores before a run's training and of its result; None without both."""
    last = ended_at(folder, watch)
    files = {"before": scores_of(folder, 0), "after": scores_of(folder, last)}
    if not last or not all(file.is_file() for file in files.values()):
        return None
    results = {label: Evaluated.read(file) for label, file in files.items()}
    before, after = results.values()
    # a run may have gone on with other prompts
    same = (before.prompts, before.seeds) == (after.prompts, after.seeds)
    return Comparison(results) if same else None


class Evaluator:
    """Evaluates the policy that is trained, as the evaluation section of its configuration says.

    Args:
        sampler: has the policy.
        scorer: has the reward that is trained.
        folder: of the run; the means are appended to its `evaluations.jsonl`.
    """

    def __init__(self, algorithm: Algorithm, sampler: Sampler, scorer: Scorer, learner: Learner, folder: Path) -> None:
        self.algorithm, self.learner, self.folder = algorithm, learner, folder
        self.sampler, self.scorer, self.processes = sampler, scorer, scorer.processes
        self.config, self.settings = sampler.config, sampler.config.evaluation
        self.accelerator = self.processes.accelerator
        own = self.settings.rewards
        self.reward: Reward = build_reward(own, "evaluation.rewards") if own else scorer.reward
        watchers = build_rewards(self.settings.panel, "evaluation.panel")
        self.panel = Panel(self.reward, watchers, scorer.reward, folder, self.processes.row)
        sampler.policy.bind(self.panel)
        self.verdict = NOTHING_SEEN
        self.lines = MetricsFile(folder / "evaluations.jsonl")

    def run(self, iteration: int, done: float) -> Evaluated | None:
        """Score the held-out prompts, and append the means to evaluations.jsonl; None where there are none.

        Args:
            done: share of the training that came before, for rewards that follow it.
        """
        settings = self.settings
        if settings.prompts is None:
            return None
        prompts = Prompts.of(settings)
        advance(self.panel, done)
        with self.learner.averaged(), self.learner.usable():
            result = evaluate(
                self.sampler.policy,
                self.panel,
                prompts,
                settings,
                settings.samples_per_prompt,
                settings.seed,
                self.processes,
            )
        line: dict[str, Any] = {"iteration": iteration} | self.scorer.judged()
        if self.algorithm.measures or self.config.training.previews:
            # whole weights on every process, where they are in shards
            with self.learner.alone():
                if self.accelerator.is_main_process and self.algorithm.measures:
                    with self.processes.alone():
                        line |= self.algorithm.measure(self.sampler)
                if self.accelerator.is_main_process and self.config.training.previews:
                    preview(self.sampler, self.scorer, self.algorithm, prompts, self.folder, iteration)
        if self.accelerator.is_main_process:
            for label, row in result.means(by="category").items():
                # statistics of every category would be many, and say little
                line |= {f"{label}/{n}": v for n, v in row.items() if label == "all" or not n.startswith("statistics/")}
            self.lines.append(self._watched(line, result))
            result.save(scores_of(self.folder, iteration))
            samples = result.lines()
            count = min(settings.save_samples, len(samples))
            spread = torch.linspace(0, len(samples) - 1, count).round().int().tolist() if count else []
            kept = shown(self.reward, [samples[row] for row in spread])
            save_samples(self.folder, iteration, kept)
            if self.config.show_every:
                show(self.accelerator, "held-out", kept, iteration)
        if self.config.trackers:
            self.accelerator.log({f"evaluation/{n}": v for n, v in result.means()["all"].items()}, step=iteration)
        return result

    def _watched(self, line: dict[str, Any], result: Evaluated) -> dict[str, Any]:
        """The line of an evaluation with what the watch on reward hacking says of it."""
        if not self.settings.watching:
            return line
        line, self.verdict = watched(line, result.value, result.parts, self.lines.read(), self.settings.watch)
        if self.verdict.status in ("suspect", "hacked"):
            logger.warning("iteration %d: reward hacking? %s", line["iteration"], self.verdict.message)
        return line

    def ends(self) -> bool:
        """Whether the watch ends the run: the main process's word, for all."""
        return bool(self.processes.maximum(self._ends()))

    def _ends(self) -> bool:
        hacked = self.settings.watch.action == "stop" and self.verdict.status == "hacked"
        return hacked or self.verdict.status == "stalled"

    def returns(self, iteration: int) -> bool:
        """Whether a run that is over after so many iterations has earlier weights for its result."""
        return bool(self.processes.maximum(self.accelerator.is_main_process and self._result(iteration) < iteration))

    def _result(self, last: int) -> int:
        """The iteration whose weights are the result of a run that was last evaluated after so many."""
        best = self.settings.watch.early_stop is not None
        return self.verdict.last_good if best or self._ends() else last

    def gain(self) -> Comparison | None:
        """The held-out scores before training and with the weights that the run ends with; None without both."""
        return before_and_after(self.folder, self.settings.watch)

    def keep_before(self, iteration: int) -> None:
        """Forget the evaluations from this iteration on, as a run does that goes on from there."""
        self.lines.keep_before(iteration)
        lines = [line for line in self.lines.read() if "watch" in line]
        if lines:
            self.verdict = diagnose([line["watch"] for line in lines], self.settings.watch)
