"""Writing and reading a run's checkpoints, and writing its result."""

import logging
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from flowalign.evaluation.scores import FOLDER as SCORES
from flowalign.evaluation.watch import WatchVerdict
from flowalign.rollouts.saved import FOLDER as ROLLOUTS
from flowalign.runs import previews, samples
from flowalign.runs.checkpoint import fitting, seal
from flowalign.runs.files import write_folder
from flowalign.training.assembly import Components
from flowalign.training.resuming import changed
from flowalign.training.spent import Spent

logger = logging.getLogger(__name__)


class Saving:
    """Writes a run's result and its checkpoints, from which it resumes, bit for bit on the same number of processes.

    Args:
        components: all components of the run.
        spent: seconds, forwards and reward calls of the run so far.
    """

    def __init__(self, components: Components, spent: Spent) -> None:
        self.components, self.spent = components, spent
        self.policy, self.learner, self.folder, self.main = (
            components.policy,
            components.learner,
            components.folder,
            components.accelerator.is_main_process,
        )
        self.newest: int | None = None
        """Iteration of the newest checkpoint."""

    def save(self, iteration: int, good: int | None) -> None:
        """Write a checkpoint, and a LoRA.

        Args:
            good: iteration of the last good evaluation, whose checkpoint is kept.
        """
        components = self.components
        tensors, learned = self.learner.state()
        adapted, algorithm_state = components.algorithm.state()
        replayed, groups = components.groups.state()
        judged, learned_rewards = components.scorer.state()
        tensors |= adapted | replayed | judged
        state: dict[str, Any] = (
            {"iteration": iteration, "seconds": self.spent.seconds, "groups": groups} | learned | learned_rewards
        )
        state["actor"] = self.spent.counts() | components.sampler.state() | algorithm_state
        sampling, state["ahead"] = components.ahead.state()
        tensors |= sampling
        state["config"] = components.config.model_dump(mode="json")
        weights = self.learner.full_state_dict() if self.policy.lora else None
        if self.main:
            # a resumed run's exported model is out of date; all weights are written once, at the end
            shutil.rmtree(self.folder / "model", ignore_errors=True)
            export = partial(self._export, weights) if self.policy.lora else None
            components.checkpoints.save(iteration, tensors, state, export, good)
            if export is not None:
                write_folder(self.folder / "lora", partial(self._sealed, weights))
        self.newest = iteration
        components.accelerator.wait_for_everyone()

    def load(self, checkpoint: Path) -> int:
        """Continue from a whole checkpoint; return its iteration."""
        components = self.components
        with fitting(checkpoint):
            tensors, state = components.checkpoints.load(checkpoint)
            self.learner.load_state(tensors, state)
            self.spent.seconds = state["seconds"]
            self.spent.load_counts(state["actor"])
            components.sampler.load_state(state["actor"])
            components.algorithm.load_state(tensors, state["actor"], components.processes.device)
            components.groups.load_state(tensors, state["groups"])
            components.scorer.load_state(tensors, state)
            components.ahead.load_state(tensors, state.get("ahead", []))
        changes = changed(state["config"], components.config)
        if changes and self.main:
            logger.warning("%s goes on with other settings: %s", checkpoint, "; ".join(changes))
        self.newest = int(state["iteration"])
        return self.newest

    def return_to_good(self, verdict: WatchVerdict, iteration: int) -> None:
        """Load the weights of the last good evaluation, when a run ends at this iteration."""
        good = self.components.checkpoints.newest(until=self.components.processes.maximum(verdict.last_good))
        assert good is not None, "a checkpoint is saved with every evaluation that is watched"
        self.learner.load_weights(*self.components.checkpoints.load(good))
        watch = self.components.config.evaluation.watch
        best = "keep_best=false" if watch.early_stop is None else "early_stop=null"
        if self.main:
            logger.warning(
                "ended at iteration %d: %s; the run's result has the weights of %s. To train on from those, delete "
                "the checkpoints after it and --resume; to train on from the newest, evaluation.watch.%s",
                iteration,
                verdict.message or "an earlier evaluation scored higher",
                good,
                "action=warn" if verdict.status == "hacked" else best,
            )

    def forget_samples(self) -> None:
        """Remove the samples, scores and rollouts of an earlier run in the folder."""
        for name in (samples.FOLDER, previews.FOLDER, SCORES, ROLLOUTS):
            shutil.rmtree(self.folder / name, ignore_errors=True)

    def export(self) -> None:
        """Write the result for plain diffusers or transformers: `lora/`, an adapter, or `model/`, the whole network."""
        weights = self.learner.full_state_dict()
        if self.main:
            name = "lora" if self.policy.lora else "model"
            write_folder(self.folder / name, partial(self._sealed, weights))
        self.components.accelerator.wait_for_everyone()

    def _export(self, weights: dict[str, Tensor] | None, folder: Path) -> None:
        with self.learner.averaged():
            self.policy.save(folder, weights)

    def _sealed(self, weights: dict[str, Tensor] | None, folder: Path) -> None:
        self._export(weights, folder)
        seal(folder)
