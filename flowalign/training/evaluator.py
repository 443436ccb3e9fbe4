"""A run's evaluations: scores of held-out prompts, samples to look at, and the watch on reward hacking."""

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import torch

from flowalign.algorithms.base import Algorithm
from flowalign.config.rewards import build_reward, build_rewards
from flowalign.config.sections import Watch
from flowalign.data import Prompts
from flowalign.errors import ConfigError, nearest
from flowalign.evaluation.comparison import Comparison
from flowalign.evaluation.scores import Evaluated, evaluate, judges, scores_of
from flowalign.evaluation.statistics import estimate
from flowalign.evaluation.watch import NOTHING_SEEN, Panel, diagnose, watched
from flowalign.rollouts.sampler import Sampler
from flowalign.rollouts.scoring import Scorer
from flowalign.runs.files import write_atomically
from flowalign.runs.metrics import MetricsFile
from flowalign.runs.samples import save_samples
from flowalign.training.learner import Learner
from flowalign.training.previews import preview, shown
from flowalign.training.tracking import show
from rewards import Reward, advance

logger = logging.getLogger(__name__)


def ended_at(folder: Path, watch: Watch) -> int:
    """The iteration of the evaluation of a run's result; 0 if there is none.

    It is the last evaluation, or the last good one if the watch stopped the run or the run keeps its best weights.
    """
    lines = MetricsFile(folder / "evaluations.jsonl").read()
    seen = [line["watch"] for line in lines if "watch" in line]
    if seen and (watch.action == "stop" or watch.returns_best):
        verdict = diagnose(seen, watch)
        if verdict.status == "hacked" or watch.returns_best:
            return verdict.last_good
    return max((line["iteration"] for line in lines), default=0)


def before_and_after(folder: Path, watch: Watch) -> Comparison | None:
    """Held-out scores before a run's training and of its result; None if one of them is missing."""
    last = ended_at(folder, watch)
    files = {"before": scores_of(folder, 0), "after": scores_of(folder, last)}
    if not last or not all(file.is_file() for file in files.values()):
        return None
    results = {label: Evaluated.read(file) for label, file in files.items()}
    before, after = results.values()
    # the prompts may have changed when the run was resumed
    same = (before.prompts, before.seeds) == (after.prompts, after.seeds)
    return Comparison(results) if same else None


class Evaluator:
    """Evaluates the trained policy, with the settings of the evaluation section.

    Args:
        sampler: sampler with the policy.
        scorer: scorer with the trained reward.
        folder: folder of the run; the means are appended to its `evaluations.jsonl`.
    """

    def __init__(self, algorithm: Algorithm, sampler: Sampler, scorer: Scorer, learner: Learner, folder: Path) -> None:
        self.algorithm, self.learner, self.folder = algorithm, learner, folder
        self.sampler, self.scorer, self.processes = sampler, scorer, scorer.processes
        self.config, self.settings = sampler.config, sampler.config.evaluation
        self.accelerator = self.processes.accelerator
        named = self.settings.rewards
        self.reward: Reward = build_reward(named, "evaluation.rewards") if named else scorer.reward
        watchers = build_rewards(self.settings.panel, "evaluation.panel")
        self.panel = Panel(self.reward, watchers, scorer.reward, folder, self.processes.row, self.processes.rows)
        best_by, known = self.settings.watch.best_by, ["reward", *self.panel.others]
        if best_by not in known:
            raise ConfigError(f"evaluation.watch.best_by: '{best_by}' is not measured; {nearest(best_by, known)}")
        sampler.policy.bind(self.panel)
        self.verdict = NOTHING_SEEN
        self.lines = MetricsFile(folder / "evaluations.jsonl")

    def run(self, iteration: int, done: float) -> Evaluated | None:
        """Score the held-out prompts, and append the means to evaluations.jsonl; None if there are no prompts.

        Args:
            done: share of the training so far, for rewards with a schedule.
        """
        settings = self.settings
        if settings.prompts is None:
            return None
        prompts = Prompts.of(settings)
        advance(self.panel, done)
        with self.learner.averaged(), self.learner.usable():
            result = self._evaluate(prompts, settings)
            second = None if settings.also_at is None else self._at_second_size(prompts)
        line: dict[str, Any] = {"iteration": iteration} | self.scorer.judged()
        if second is not None:
            line |= self._named(second)
        if self.algorithm.measures or self.config.training.previews:
            # a process works alone here, and needs whole weights even if they are sharded
            with self.learner.alone():
                if self.accelerator.is_main_process and self.algorithm.measures:
                    with self.processes.alone():
                        line |= self.algorithm.measure(self.sampler)
                if self.accelerator.is_main_process and self.config.training.previews:
                    preview(self.sampler, self.scorer, self.algorithm, prompts, self.folder, iteration)
        if self.accelerator.is_main_process:
            for label, row in result.means(by="category").items():
                # statistics of each category would be many numbers of little use
                line |= {f"{label}/{n}": v for n, v in row.items() if label == "all" or not n.startswith("statistics/")}
            self.lines.append(self._watched(line, result))
            scores = scores_of(self.folder, iteration)
            result.save(scores)
            card = result.card(settings.arguments(), judges(self.config))
            write_atomically(scores.with_suffix(".card.json"), json.dumps(card, indent=2) + "\n")
            samples = result.lines()
            count = min(settings.save_samples, len(samples))
            spread = torch.linspace(0, len(samples) - 1, count).round().int().tolist() if count else []
            chosen = shown(self.reward, [samples[row] for row in spread])
            if second is not None:
                lines = second.lines()
                chosen = [*chosen, *shown(self.reward, [lines[row] for row in spread if row < len(lines)])]
            save_samples(self.folder, iteration, chosen)
            if self.config.show_every:
                show(self.accelerator, "held-out", chosen, iteration)
        if self.config.trackers:
            self.accelerator.log({f"evaluation/{n}": v for n, v in result.means()["all"].items()}, step=iteration)
        return result

    def _evaluate(self, prompts: Prompts, settings: Any) -> Evaluated:
        policy, count = self.sampler.policy, settings.samples_per_prompt
        return evaluate(policy, self.panel, prompts, settings, count, settings.seed, self.processes)

    def _at_second_size(self, prompts: Prompts) -> Evaluated:
        """The same prompts at the size of `also_at`, from start noises of their own, which follow the others'."""
        assert self.settings.also_at is not None
        size = self.settings.also_at.model_dump()
        prompts = dataclasses.replace(prompts, metadata=[record | size for record in prompts.metadata])
        seed = self.settings.seed + len(prompts) * self.settings.samples_per_prompt
        return self._evaluate(prompts, self.settings.model_copy(update={"seed": seed}))

    def _named(self, second: Evaluated) -> dict[str, float]:
        """Means of the second size, and the standard error of its reward."""
        size = self.settings.also_at
        assert size is not None
        means = second.means()["all"]
        reward = estimate(second.value, second.prompts)
        if reward is not None and reward.error is not None:
            means["reward_error"] = reward.error
        return {f"{size.height}x{size.width}/{name}": value for name, value in means.items()}

    def _watched(self, line: dict[str, Any], result: Evaluated) -> dict[str, Any]:
        """Add the verdict of the watch on reward hacking to the line of an evaluation."""
        if not self.settings.watching:
            return line
        before = self.verdict.status
        line, self.verdict = watched(line, result.value, result.parts, self.lines.read(), self.settings.watch)
        # once: a long run would say it at every evaluation, and the gallery shows each
        if self.verdict.status in ("suspect", "hacked") and self.verdict.status != before:
            logger.warning("iteration %d: reward hacking? %s", line["iteration"], self.verdict.message)
        return line

    def ends(self) -> bool:
        """True if the watch ends the run; the main process decides for all."""
        return bool(self.processes.maximum(self._ends()))

    def _ends(self) -> bool:
        hacked = self.settings.watch.action == "stop" and self.verdict.status == "hacked"
        return hacked or self.verdict.status == "stalled"

    def returns(self, iteration: int) -> bool:
        """True if a run that ends after this iteration has earlier weights as its result."""
        return bool(self.processes.maximum(self.accelerator.is_main_process and self._result(iteration) < iteration))

    def _result(self, last: int) -> int:
        """The iteration whose weights are the result of a run whose last evaluation was at `last`."""
        best = self.settings.watch.returns_best
        return self.verdict.last_good if best or self._ends() else last

    def gain(self) -> Comparison | None:
        """Held-out scores before training and of the run's result; None if one of them is missing."""
        return before_and_after(self.folder, self.settings.watch)

    def keep_before(self, iteration: int) -> None:
        """Drop the evaluations of this and later iterations, when a run is resumed from it."""
        self.lines.keep_before(iteration)
        lines = [line for line in self.lines.read() if "watch" in line]
        if lines:
            self.verdict = diagnose([line["watch"] for line in lines], self.settings.watch)
