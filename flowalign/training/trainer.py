"""The training loop: collect experience, update, measure, save; the same for every algorithm."""

from collections.abc import Callable, Sequence

from flowalign.algorithms.base import Experience
from flowalign.config import BaseConfig
from flowalign.evaluation.scores import Evaluated
from flowalign.policies.base import Policy
from flowalign.rollouts.audit import audit
from flowalign.rollouts.draw import Draw
from flowalign.rollouts.engine import Generate
from flowalign.rollouts.saved import SavedRollouts
from flowalign.runs.metrics import MetricsFile
from flowalign.runs.result import Result
from flowalign.training.assembly import assemble
from flowalign.training.bar import Bar
from flowalign.training.engines.trainside import Trainside
from flowalign.training.evaluator import Evaluator
from flowalign.training.health import Health
from flowalign.training.saving import Saving
from flowalign.training.scoring import Scoring
from flowalign.training.spent import Spent
from flowalign.training.supervision import Supervision
from flowalign.training.tracking import begin_tracking, show_extremes
from rewards import Reward, advance


class Trainer:
    """Trains a policy with the algorithm of a configuration.

    Args:
        config: a `Config` or `TextConfig`, or its keys and values as a dictionary.
        policy: policy to train; default the configuration's model.
        reward: a reward or any function (samples, prompts) -> list of floats; default the configuration's.
        resume: continue from the newest whole checkpoint of the run's folder.
        progress: show a progress bar.

    Raises:
        ConfigError: says what is wrong in the configuration, or what does not fit the resumed run.
    """

    def __init__(
        self,
        config: BaseConfig | dict[str, object],
        policy: Policy | None = None,
        reward: Reward | Callable[..., Sequence[float]] | None = None,
        resume: bool = False,
        progress: bool = True,
    ) -> None:
        components = assemble(config, policy, reward, resume)
        self.config, self.folder, self.checkpoints = components.config, components.folder, components.checkpoints
        self.accelerator, self.processes = components.accelerator, components.processes
        self.algorithm, self.policy, self.learner = components.algorithm, components.policy, components.learner
        self.groups = components.groups
        self.prompts, self.selection = self.groups.prompts, self.groups.selection
        self.sampler, self.scorer = components.sampler, components.scorer
        self.engine, self.ahead = components.engine, components.ahead
        self.main = self.accelerator.is_main_process
        self.bar = Bar(self.config, self.processes.rows, silent=not (progress and self.main))
        self.evaluator = Evaluator(self.algorithm, self.sampler, self.scorer, self.learner, self.folder)
        self.metrics = MetricsFile(self.folder / "metrics.jsonl")
        self.health = Health(self.config.training, self.config.evaluation.watch.returns_best, silent=not self.main)
        """Warnings of this process; a resumed run starts without earlier rewards."""
        self.supervision = Supervision(components)
        self.spent = Spent(self.config, self.policy, self.scorer)
        self.saving = Saving(components, self.spent)
        self.rollouts = SavedRollouts(self.config, self.folder, self.processes)
        self.iteration = 0
        self.resumed = components.checkpoint is not None
        """True if the run continues from a checkpoint."""
        if components.checkpoint is not None:
            self.iteration = self.saving.load(components.checkpoint)
            if self.main:
                self._forget()

    def train(self) -> Result:
        """Run the remaining iterations; evaluate before, in between as configured, and after.

        Returns:
            the run's folder with its metrics, evaluations and adapter.

        Raises:
            FlowalignError: another process is gone, or too late; says where each was.
            Stopped: a signal ended the run, with a checkpoint.
        """
        with self.supervision.watching(), self.bar.drawn(self.iteration):
            self._begin_run()
            self.bar.start_clock()
            self._iterations()
            self._end_run()
        return Result(self.folder)

    def _begin_run(self) -> None:
        if self.main and not self.resumed:
            self._forget()
        begin_tracking(self.config, self.accelerator, self.folder, self.iteration)
        if not self.resumed:
            self.evaluate()
            if self.config.evaluation.watching:
                self.save()

    def _iterations(self) -> None:
        training, evaluation = self.config.training, self.config.evaluation
        progress = self.progress()
        while progress < 1 and not self.evaluator.ends():
            self.supervision.leave_if_asked(self.iteration, self._save_once)
            with self.spent.counted():
                metrics = self.iterate()
            self.iteration += 1
            progress = self.progress()
            last = progress >= 1
            self._log(metrics)
            self.health.see(self.iteration, metrics)
            self.bar.iteration(self.algorithm.headline, metrics.get(self.algorithm.headline), progress)
            evaluates = last or (evaluation.every and self.iteration % evaluation.every == 0)
            if evaluates:
                self.evaluate()
            due = training.checkpoint_every and self.iteration % training.checkpoint_every == 0
            # the watch may return to an evaluation as the last good one, so its weights must be saved
            if last or due or (evaluates and evaluation.watching):
                self.save()

    def _end_run(self) -> None:
        self.learner.check_moved()
        if self.evaluator.returns(self.iteration):
            self.saving.return_to_good(self.evaluator.verdict, self.iteration)
        self.export()
        if self.config.trackers:
            self.accelerator.end_training()

    def iterate(self) -> dict[str, float]:
        """Do one iteration: sample and score groups, record, learn; return its metrics."""
        progress = self.progress()
        experience = self.experience()
        if self.iteration == 0:
            self.algorithm.verify(self.policy, experience)
        outcome = experience.outcome()
        if outcome is not None:
            self.groups.learn(experience.batch, *outcome)
        self._at("update")
        metrics = experience.metrics | self.learner.learn(experience, self.iteration, progress) | self.scorer.learn()
        return metrics | self.engine.measured() | self.spent.counts() | self.scorer.judged()

    def experience(self) -> Experience:
        """Sample and score the groups of this iteration, and record them; the weights stay as they are."""
        state = {"progress": self._begin(), "updates": self.algorithm.updates} | self.sampler.state()
        with self.learner.sampling():
            begun = self.ahead.next(self.iteration, self.learner.parameters, state)
            # repeated from the start if an attempt ran out of memory
            return self.supervision.while_it_fits(lambda: self.collect(begun.draw, begun.generate))

    def collect(self, groups: Draw, generate: Generate | None = None) -> Experience:
        """Experience of these groups: each part is sampled, and scored during the next one; then all are recorded.

        Args:
            generate: begins to sample parts; default this process samples them.
        """
        algorithm, sampler, scorer = self.algorithm, self.sampler, self.scorer
        generate = generate or Trainside(algorithm, sampler).generate
        every = self.config.show_every
        sampler.metrics = {}
        # people look at the samples of these iterations
        sampler.shown = bool(self.config.trackers and every and self.iteration % every == 0)
        scorer.begin(sampler.shown, groups.parts)
        with Scoring(threaded=groups.parts > 1) as scoring:
            # a second round and later ones replace groups from which nothing is learned
            for parts in groups:
                for task in generate(parts):
                    self.bar.phase("sampling")
                    rollout, batch, samples = task.result()
                    self.bar.phase("scoring")
                    if samples is None:
                        groups.put(rollout, batch, None)
                        continue
                    scorer.keep(samples, batch)
                    groups.put(rollout, batch, scoring.submit(algorithm.score, scorer, samples, batch))
            sampled = groups.whole()
        scorer.end()
        sampled.metrics |= scoring.seconds | audit(sampled, self.processes, "whole" in algorithm.combines)
        self.rollouts.save(sampled)
        record = algorithm.record(sampled, self.processes)
        experience = algorithm.experience(sampled, record, self.processes)
        experience.metrics |= sampled.metrics | sampler.metrics
        return experience

    def _begin(self) -> float:
        """Prepare all parts for an iteration; return the progress of training."""
        training = self.config.training
        self.processes.seed(training.seed, self.iteration)
        progress = self.progress()
        self.algorithm.progress(progress)
        self.algorithm.updates = self.iteration * training.updates
        advance(self.scorer.reward, progress)
        self._at("sampling and scoring")
        return progress

    def _at(self, phase: str) -> None:
        self.supervision.at(self.iteration, phase)
        self.bar.phase(phase)

    def progress(self) -> float:
        """Progress of training in [0, 1]: the share of the iterations or of the budget, whichever is larger."""
        return self.spent.progress(self.iteration)

    def evaluate(self) -> Evaluated | None:
        """Score the held-out prompts, and append the means to evaluations.jsonl."""
        self._at("evaluation" if self.iteration else "base evaluation")
        result = self.evaluator.run(self.iteration, self.progress())
        if result is not None:
            self.health.evaluated(self.iteration, result)
        return result

    def save(self) -> None:
        """Write a checkpoint, from which a run resumes bit for bit on the same number of processes, and a LoRA."""
        self._at("checkpoint")
        good = self.evaluator.verdict.last_good if self.config.evaluation.watching else None
        self.saving.save(self.iteration, good)

    def _save_once(self) -> None:
        if self.saving.newest != self.iteration:
            self.save()

    def export(self) -> None:
        """Write the result for plain diffusers or transformers: `lora/`, an adapter, or `model/`, the whole network."""
        self.saving.export()

    def _forget(self) -> None:
        """Remove metrics and evaluations of iterations that come again, since the run was killed in them."""
        self.metrics.keep_before(self.iteration)
        # the evaluation at a checkpoint's own iteration came before the checkpoint
        self.evaluator.keep_before(self.iteration + self.resumed)
        if self.iteration == 0 and not self.resumed:
            self.saving.forget_samples()

    def _log(self, metrics: dict[str, float]) -> None:
        if self.main:
            self.metrics.append({"iteration": self.iteration - 1, **metrics})
        if self.config.trackers:
            self.accelerator.log(metrics, step=self.iteration)
        if self.scorer.extremes is not None:
            show_extremes(self.accelerator, self.scorer.extremes, self.iteration)
            self.scorer.extremes, self.sampler.shown = None, False
