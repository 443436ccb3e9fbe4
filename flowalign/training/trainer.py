"""The training loop: collect experience, update, measure, save; the same for every algorithm."""

import logging
import re
import shutil
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import InitProcessGroupKwargs
from torch import Tensor
from tqdm.auto import tqdm

from flowalign import registry
from flowalign.algorithms.base import Algorithm
from flowalign.config import kind_of
from flowalign.config.rewards import build_reward
from flowalign.config.sections import BaseConfig
from flowalign.errors import ConfigError, FlowalignError
from flowalign.evaluation.scores import FOLDER as SCORES
from flowalign.evaluation.scores import Evaluated
from flowalign.policies.base import Policy
from flowalign.rollouts.base import Actor
from flowalign.rollouts.draw import Draw, parts_of
from flowalign.rollouts.extremes import Extremes
from flowalign.rollouts.groups import Groups
from flowalign.rollouts.scoring import Scoring
from flowalign.runs import previews, samples
from flowalign.runs.checkpoint import Checkpoints, fitting, seal
from flowalign.runs.environment import flat, record_environment
from flowalign.runs.files import write_folder
from flowalign.runs.lock import locked
from flowalign.runs.metrics import MetricsFile
from flowalign.runs.result import Result
from flowalign.settings import parse
from flowalign.training.building import (
    build_accelerator,
    build_actor,
    build_policy,
    check_media,
    check_sound,
    check_trackers,
    make_trainable,
)
from flowalign.training.distributed.heartbeat import Heartbeat
from flowalign.training.distributed.sharding import distribute, whole
from flowalign.training.evaluator import Evaluator
from flowalign.training.given import recorded
from flowalign.training.health import Health
from flowalign.training.learner import Learner
from flowalign.training.memory import out_of_memory, while_it_fits
from flowalign.training.resuming import changed, check_resumable
from flowalign.training.signals import Signals, Stopped
from flowalign.training.tracking import show_extremes
from flowalign.training.workers.ahead import Ahead
from flowalign.training.workers.fleet import Fleet
from flowalign.training.workers.worker import Weights
from rewards import Reward, advance, as_reward, spec_of
from samplers import derive_seed

logger = logging.getLogger(__name__)

LOST = re.compile("gloo|nccl|connection|timed? ?out", re.IGNORECASE)
"""in the communication libraries' errors when a process is gone or late"""


class Trainer:
    """Trains a policy with the algorithm of a configuration.

    Args:
        config: a `Config` or `TextConfig`, or its keys and values as a dictionary.
        policy: default the configuration's model.
        reward: a reward or any function (samples, prompts) -> list of floats; default the configuration's.
        resume: go on from the newest whole checkpoint of the run's folder.
        progress: show a progress bar.

    Raises:
        ConfigError: what is wrong with the configuration, or in it with a run that is to go on.
    """

    def __init__(
        self,
        config: BaseConfig | dict[str, Any],
        policy: Policy | None = None,
        reward: Reward | Callable[..., Sequence[float]] | None = None,
        resume: bool = False,
        progress: bool = True,
    ) -> None:
        config = parse(kind_of(config), config) if isinstance(config, dict) else config
        self.config = config = recorded(config, policy, reward)
        self.folder = Path(config.output) / (config.name or "run")
        check_trackers(config.trackers)
        self.accelerator = build_accelerator(
            log_with=config.trackers or None,
            project_dir=str(self.folder),
            kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=config.training.timeout))],
        )
        config.check(self.accelerator.num_processes)
        self.checkpoints = Checkpoints(self.folder / "checkpoints", config.training.keep_checkpoints)
        if self.checkpoints.all() and not resume:
            raise ConfigError(f"{self.folder} already holds a run; --resume goes on with it, name=... starts another")
        there = self.folder.is_dir() and self.accelerator.is_main_process
        with locked(self.folder) if there else nullcontext():
            checkpoint = self.checkpoints.newest() if resume else None
        if checkpoint is not None:
            with fitting(checkpoint):
                check_resumable(self.checkpoints.state(checkpoint)["config"], config)
        workers = getattr(config.rollout, "workers", None)
        if workers is not None and policy is not None:
            raise ConfigError(
                "rollout.workers: they load the model themselves, and this one was handed over in Python; give its "
                "folder or hub name as model.path"
            )
        self.show_progress = progress and self.accelerator.is_main_process

        training = config.training
        # before the model, which may take minutes to load
        torch.manual_seed(training.seed)
        check_sound(config, policy)
        reward = build_reward(config.rewards) if reward is None else as_reward(reward)
        check_media(reward, config.model.kind)
        torch.manual_seed(training.seed)
        self.algorithm: Algorithm = config.build_algorithm()
        self.algorithm.check_reward(reward, config)
        unused = self.algorithm.without_effect(config)
        if unused and self.accelerator.is_main_process:
            logger.warning(
                "%s has no effect: %s samples along the ODE, without noise on the way; algorithm.stochastic: true "
                "samples with it",
                ", ".join(unused),
                config.algorithm.name,
            )
        if parts_of(config) > 1 and spec_of(reward).kind == "set":
            key = "overlap" if workers is None else "workers"
            raise ConfigError(
                f"rollout.{key}: the reward '{reward.name}' looks at all pictures of an iteration at once, so they "
                f"cannot be scored in parts; {key}: {1 if workers is None else '{count: 1}'} works"
            )
        if workers is not None and spec_of(reward).needs & {"latents", "sound"}:
            raise ConfigError(
                f"rollout.workers: they send pictures, videos and texts, and the reward '{reward.name}' needs "
                f"{' and '.join(sorted(spec_of(reward).needs & {'latents', 'sound'}))}; without workers it works"
            )
        # they load the model at the same time
        self.fleet = (
            None if workers is None else Fleet(config, workers, self.accelerator.device, self.accelerator.num_processes)
        )
        self.policy: Policy = policy or build_policy(config, self.accelerator.device)
        sampled = getattr(config.rollout, "weights", None)
        make_trainable(self.policy, config.model, self.algorithm.uses_reference or sampled == "reference")
        sharding = distribute(self.policy, config, self.accelerator)
        self.actor: Actor = build_actor(config, self.policy, reward, self.accelerator)
        self.sampler = self.actor.sampler
        self.prompts = config.data.kept(self.algorithm.read(config.data))
        selection = config.data.selection
        self.selection = registry.build("selections", selection.name, selection.settings, "data.selection")
        self.groups = Groups(self.prompts, self.selection, self.actor, self.algorithm.branches(config))
        self.policy.expect(self.groups.coming)
        self.learner = Learner(self.algorithm, self.actor, sharding)
        self.ahead: Ahead | None = None
        """of a run with workers"""
        if self.fleet is not None and workers is not None:
            self.fleet.policy = self.policy
            self.ahead = Ahead(self.fleet, self.groups, workers.staleness, training.iterations)
        self.evaluator = Evaluator(self.algorithm, self.actor, self.learner, self.folder)

        self.iteration = 0
        self.resumed = False
        """a checkpoint was found to go on from"""
        self.seconds = 0.0
        """that iterations took so far"""
        self.metrics = MetricsFile(self.folder / "metrics.jsonl")
        self.health = Health(training, silent=not self.accelerator.is_main_process)
        """of what this process has seen; a resumed run begins to look anew"""
        self.heartbeat: Heartbeat | None = None
        self.signals = Signals(announce=self.accelerator.is_main_process)
        self._saved: int | None = None
        """iteration of the newest checkpoint"""
        if checkpoint is not None:
            self._resume(checkpoint)
        elif resume and self.accelerator.is_main_process:
            logger.warning("nothing to resume: %s holds no checkpoint; the run starts at its beginning", self.folder)

    def train(self) -> Result:
        """Run the remaining iterations; evaluates before, in between as configured, and after.

        Returns:
            the run's folder: its metrics, evaluations and adapter.

        Raises:
            FlowalignError: another process is gone, or did not come in time; says where each was. `Stopped`: a signal
                asked the run to leave, with a checkpoint.
        """
        processes = self.accelerator.num_processes
        lock = locked(self.folder) if self.accelerator.is_main_process else nullcontext()
        try:
            with lock, self.signals:
                self._train() if processes == 1 else self._train_together()
        except torch.OutOfMemoryError as error:
            raise FlowalignError(out_of_memory(self.config, processes)) from error
        except SystemExit as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            raise FlowalignError(
                f"iteration {self.iteration}: {where.filename}, line {where.lineno}, called sys.exit({error.code!r}), "
                "which would pass for the end of the run"
            ) from error
        finally:
            if self.fleet is not None:
                self.fleet.close()
        return Result(self.folder)

    def _train_together(self) -> None:
        store = torch.distributed.distributed_c10d._get_default_store()
        world = self.accelerator.process_index, self.accelerator.num_processes
        self.heartbeat = Heartbeat(store, *world, self.config.training.patience)
        try:
            self._train()
        except RuntimeError as error:
            if not LOST.search(str(error)):
                raise
            reason = str(error).strip().splitlines()[-1]
            raise FlowalignError(
                f"process {world[0]} lost another one ({reason}). {self.heartbeat.others()}. --resume goes on from the "
                "run's last checkpoint; training.timeout is how long processes wait for each other"
            ) from error
        finally:
            self.heartbeat.stop()

    def _at(self, place: str) -> None:
        if self.heartbeat is not None:
            self.heartbeat.place = f"iteration {self.iteration}, {place}"

    def _train(self) -> None:
        training, evaluation = self.config.training, self.config.evaluation
        if self.accelerator.is_main_process:
            if not self.resumed:
                self._forget()
            record_environment(self.folder, self.config.dump(), self.accelerator, self.iteration)
        if self.config.trackers:
            self.accelerator.init_trackers("flowalign", config=flat(self.config.model_dump(mode="json")))
        watching = evaluation.watching
        if not self.resumed:
            self.evaluate()
            if watching:
                self.save()
        budgeted = any(limit is not None for limit in training.budget.model_dump().values())
        bar = tqdm(
            initial=self.iteration,
            # how many iterations a budget lasts is not known
            total=None if budgeted else training.iterations,
            disable=not self.show_progress,
            desc=self.config.name,
        )
        progress = self.progress()
        while progress < 1 and not self.evaluator.ends():
            self._leave_if_asked()
            begin = time.perf_counter()
            metrics = self.iterate()
            self.seconds += time.perf_counter() - begin
            self.iteration += 1
            progress = self.progress()
            last = progress >= 1
            self._log(metrics)
            self.health.see(self.iteration, metrics)
            headline = self.algorithm.headline
            # an iteration whose updates were all skipped measured nothing
            shown = {headline: f"{metrics[headline]:.3f}" if headline in metrics else "skipped"}
            bar.set_postfix(shown | ({"budget": f"{progress:.0%}"} if budgeted else {}))
            bar.update()
            evaluates = last or (evaluation.every and self.iteration % evaluation.every == 0)
            if evaluates:
                self.evaluate()
            due = training.checkpoint_every and self.iteration % training.checkpoint_every == 0
            # where the watch may call an evaluation the last good one, its weights must be there
            if last or due or (evaluates and watching):
                self.save()
        bar.close()
        self.learner.check_moved()
        if self.evaluator.returns(self.iteration):
            self._return_to_good()
        self.export()
        if self.config.trackers:
            self.accelerator.end_training()

    def progress(self) -> float:
        """How far training is, in [0, 1]: the share of the iterations or of the budget, whichever is larger.

        The same on every process, though each counts its own work.
        """
        budget = self.config.training.budget
        shares = [self.iteration / self.config.training.iterations]
        if budget.seconds is not None:
            seconds = self.actor.gather(torch.tensor([self.seconds], device=self.actor.device))
            shares.append(seconds.max().item() / budget.seconds)
        counts = self.actor.counts()
        for name in ("forwards", "reward_calls"):
            if getattr(budget, name) is not None:
                shares.append(counts[name] / getattr(budget, name))
        return max(shares)

    def iterate(self) -> dict[str, float]:
        """One iteration, and what the metrics say of it: sample and score groups, record, learn."""
        progress = self._begin()
        begun = self.actor.exchanges
        with self.learner.sampling():
            groups = self._groups(progress)
            # from the start again, where an attempt ran out of memory
            fits = partial(while_it_fits, self.config, "rollout", "batch_size", by_itself=partial(self._alone, begun))
            experience = fits(partial(self.collect, groups))
        if self.iteration == 0:
            self.algorithm.verify(self.policy, experience)
        outcome = experience.outcome()
        if outcome is not None:
            self.groups.learn(experience.batch, *outcome)
        self._at("update")
        begin = time.perf_counter()
        metrics = experience.metrics | self.learner.learn(experience, self.iteration, progress)
        metrics["seconds/update"] = time.perf_counter() - begin
        if self.fleet is not None:
            metrics |= self.fleet.measured()
        return metrics | self.actor.counts() | self.actor.judged()

    def collect(self, groups: Draw) -> Any:
        """What these groups teach: each part is sampled, and scored while the next one is; then all are recorded."""
        self.sampler.shown = self._looking()
        self.actor.extremes = Extremes() if self.sampler.shown else None
        score = self.algorithm.scorer(self.actor)
        with Scoring(groups.parts > 1, self.actor.add_seconds) as scoring:
            for part, task in groups:
                if task is None or self.fleet is None:
                    rollout, batch, samples, _ = self.algorithm.made(self.sampler, part)
                else:
                    rollout, batch, samples, _ = self.fleet.result(task)
                groups.put(rollout, batch, None if samples is None else scoring.submit(score, samples, batch))
            sampled = groups.whole()
        record = self.algorithm.record(sampled, self.actor)
        return self.algorithm.experience(sampled, record, self.actor)

    def _begin(self) -> float:
        """Tell all parts that an iteration begins; how far training is."""
        training = self.config.training
        # Stateless randomness: a resumed iteration draws what the uninterrupted one would have drawn.
        torch.manual_seed(derive_seed(training.seed, self.iteration, self.actor.processes.row))
        progress = self.progress()
        self.algorithm.progress(progress)
        self.algorithm.updates = self.iteration * training.updates_per_iteration
        advance(self.actor.reward, progress)
        self._at("sampling and scoring")
        return progress

    def _groups(self, progress: float) -> Draw:
        """The groups of this iteration, which workers have begun with where there are some."""
        return self.groups.draw(self.iteration) if self.ahead is None else self.ahead.next(self._weights(progress))

    def _alone(self, begun: int) -> bool:
        """Whether no other process waits for what this one did since so many exchanges."""
        by_copies = self.learner.replicated and self.actor.processes.columns == 1
        return self.accelerator.num_processes == 1 or (by_copies and self.actor.exchanges == begun)

    def _weights(self, progress: float) -> Weights:
        """What workers sample with."""
        tensors = whole({**self.learner.parameters}, keep=True)
        rest = {"progress": progress, "updates": self.algorithm.updates}
        plan: Any = getattr(self.sampler, "plan", None)
        if hasattr(plan, "state_dict"):
            rest["plan"] = plan.state_dict()
        # as they are now, whatever the updates make of them
        return Weights(self.iteration, {name: tensor.clone() for name, tensor in tensors.items()}, rest)

    def evaluate(self) -> Evaluated | None:
        """Score the held-out prompts, and append the means to evaluations.jsonl."""
        self._at("evaluation")
        result = self.evaluator.run(self.iteration, self.progress())
        if result is not None:
            self.health.evaluated(self.iteration, result)
        return result

    def _forget(self) -> None:
        """Remove what the folder holds of iterations that are still to come: of a run that was killed in them."""
        self.metrics.keep_before(self.iteration)
        # the evaluation at a checkpoint's own iteration came before the checkpoint
        self.evaluator.keep_before(self.iteration + self.resumed)
        if self.iteration == 0 and not self.resumed:
            for name in (samples.FOLDER, previews.FOLDER, SCORES):
                shutil.rmtree(self.folder / name, ignore_errors=True)

    def _leave_if_asked(self) -> None:
        """Save and leave where a signal came to any process."""
        if not self.actor.maximum(self.signals.received is not None):
            return
        if self._saved != self.iteration:
            self.save()
        received = self.signals.received or "a signal to another process"
        raise Stopped(
            f"{received}: left after {self.iteration} of {self.config.training.iterations} iterations; "
            f"--resume goes on from {self.folder}"
        )

    def _return_to_good(self) -> None:
        """Load the weights of the last good evaluation."""
        verdict = self.evaluator.verdict
        good = self.checkpoints.newest(until=self.actor.maximum(verdict.last_good))
        assert good is not None, "a checkpoint is saved with every evaluation that is watched"
        self.learner.load_weights(*self.checkpoints.load(good))
        if self.accelerator.is_main_process:
            hacked = verdict.status == "hacked"
            logger.warning(
                "ended at iteration %d: %s; the run's result has the weights of %s. To train on from those, delete "
                "the checkpoints after it and --resume; to train on from the newest, evaluation.watch.%s",
                self.iteration,
                verdict.message or "an earlier evaluation scored higher",
                good,
                "action=warn" if hacked else "early_stop=null",
            )

    def save(self) -> None:
        """Write a checkpoint that a resumed run continues from, bit for bit on as many processes, and a LoRA."""
        self._at("checkpoint")
        tensors, learned = self.learner.state()
        adapted, extra = self.actor.state()
        replayed, groups = self.groups.state()
        tensors |= adapted | replayed
        state = {"iteration": self.iteration, "seconds": self.seconds, "actor": extra, "groups": groups} | learned
        if self.ahead is not None:
            sampling, state["ahead"] = self.ahead.state()
            tensors |= sampling
        state["config"] = self.config.model_dump(mode="json")
        good = self.evaluator.verdict.last_good if self.config.evaluation.watching else None
        weights = self.learner.whole_weights() if self.policy.lora else None
        if self.accelerator.is_main_process:
            # what a run exported that now goes on is old; all weights are written once, at the end
            shutil.rmtree(self.folder / "model", ignore_errors=True)
            export = partial(self._write_export, weights) if self.policy.lora else None
            self.checkpoints.save(self.iteration, tensors, state, export, good)
            if export is not None:
                write_folder(self.folder / "lora", partial(self._write_sealed, weights))
        self._saved = self.iteration
        self.accelerator.wait_for_everyone()

    def _write_export(self, weights: dict[str, Tensor] | None, folder: Path) -> None:
        with self.learner.averaged():
            self.policy.save(folder, weights)

    def _write_sealed(self, weights: dict[str, Tensor] | None, folder: Path) -> None:
        self._write_export(weights, folder)
        seal(folder)

    def export(self) -> None:
        """Write the result for plain diffusers or transformers: `lora/`, an adapter, or `model/`, the whole network."""
        weights = self.learner.whole_weights()
        if self.accelerator.is_main_process:
            name = "lora" if self.policy.lora else "model"
            write_folder(self.folder / name, partial(self._write_sealed, weights))
        self.accelerator.wait_for_everyone()

    def _resume(self, checkpoint: Path) -> None:
        """Go on from a checkpoint that is whole."""
        with fitting(checkpoint):
            tensors, state = self.checkpoints.load(checkpoint)
            self.iteration = self._saved = state["iteration"]
            self.resumed = True
            self.learner.load_state(tensors, state)
            self.actor.load_state(tensors, state["actor"])
            self.seconds = state["seconds"]
            self.groups.load_state(tensors, state["groups"])
            if self.ahead is not None:
                self.ahead.load_state(tensors, state.get("ahead", []))
        if self.accelerator.is_main_process:
            self._forget()
            changes = changed(state["config"], self.config)
            if changes:
                logger.warning("%s goes on with other settings: %s", checkpoint, "; ".join(changes))

    def _log(self, metrics: dict[str, float]) -> None:
        if self.accelerator.is_main_process:
            self.metrics.append({"iteration": self.iteration - 1, **metrics})
        if self.config.trackers:
            self.accelerator.log(metrics, step=self.iteration)
        if self.actor.extremes is not None:
            show_extremes(self.accelerator, self.actor.extremes, self.iteration)
            self.actor.extremes, self.sampler.shown = None, False

    def _looking(self) -> bool:
        """Whether the trackers show samples of the coming iteration."""
        every = self.config.show_every
        return bool(self.config.trackers and every and self.iteration % every == 0)
