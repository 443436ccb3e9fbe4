"""Will it learn? Short measurements of a configuration; every network they train is dropped, and nothing is written.

One batch tells what the groups and the gradient say at the start. A trial trains for a few iterations and compares
samples of the same prompts and start noises before and after it; a second one at four times the rate shows how far the
rate is from too much. A canary trains the recipe for a reward that any right adapter raises. Trials use the recipe's
highest rate, without its schedule and warm-up.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from flowalign.algorithms.matching.online import OnlineMatching
from flowalign.config import BaseConfig, EngineSettings
from flowalign.errors import ConfigError
from flowalign.evaluation.gradient_noise import gradient_noise, step_gain
from flowalign.evaluation.reward_noise import reward_noise
from flowalign.planning.first_batch import first_batch, noisy_steps, spread_by_step
from flowalign.planning.probed import Probe, Trial
from flowalign.planning.trials import AIMLESS, JudgedPrompts, canary_trial, fit_to_own_samples, run_trial
from flowalign.training import Trainer

STRESS = 4.0
"""Factor of the rate in the second trial."""


def probe(
    config: BaseConfig,
    iterations: int = 12,
    prompts: int = 48,
    samples: int = 4,
    tell: Callable[[str], None] = lambda phase: None,
) -> Probe:
    """Measure a configuration.

    Args:
        iterations: iterations of a trial.
        prompts: training prompts, spread over the list, on which a trial is judged.
        samples: samples of each of them.
        tell: called with the name of each measurement as it begins.

    Raises:
        ConfigError: the configuration does not work.
    """
    clock = Clock(tell)
    with tempfile.TemporaryDirectory() as folder:
        base = _quiet(config, folder)
        trainer = Trainer(base, progress=False)
        judged = JudgedPrompts(trainer.prompts.spread(prompts), samples, base)
        with clock.of("samples of the start"):
            before = judged.sample(trainer, trainer.scorer.reward)
            disturbed = reward_noise(trainer.scorer.reward, before)
        with clock.of("rollout and gradient"):
            start, gradients, part = first_batch(trainer)
            by_step = spread_by_step(trainer)
        per_update = base.training.prompts_per_iteration
        noise = gradient_noise(gradients, per_update, part) if len(gradients) >= 4 else None
        rate = base.training.optimizer.learning_rate
        with clock.of("trial"):
            trial = run_trial(trainer, judged, trainer.scorer.reward, before, iterations, paced=True)
        noisy = noisy_steps(trainer)
        matching, reward = isinstance(trainer.algorithm, OnlineMatching), trainer.scorer.reward
        learns_from_reward = trainer.scorer.calls > 0
        # one model at a time
        del trainer
        with clock.of("trial at four times the rate"):
            faster = base.model_copy(deep=True)
            faster.training.optimizer.learning_rate = STRESS * rate
            stress = run_trial(Trainer(faster, progress=False), judged, reward, before, iterations)
        with clock.of("canary"):
            canary = canary_trial(base, judged) if learns_from_reward else None
        own_fit = aimless = None
        if matching:
            with clock.of("fit to its own samples"):
                own_fit = fit_to_own_samples(base, judged, reward, before, iterations)
                aimless = fit_to_own_samples(base, judged, reward, before, iterations, AIMLESS)
    return Probe(
        iterations=config.training.iterations,
        groups=per_update,
        size=base.training.group_size,
        start=start,
        gradient=noise,
        first_step=step_gain(gradients, rate) if noise is not None else None,
        reward_noise=disturbed,
        by_step=by_step,
        noisy_steps=noisy,
        trial=trial,
        stress=stress,
        canary=canary,
        own_fit=own_fit,
        aimless=aimless,
        seconds=clock.seconds,
    )


def own_fit(config: BaseConfig, iterations: int = 12, prompts: int = 48, samples: int = 4) -> tuple[Trial, Trial]:
    """The probe's fit of a model to its own samples alone, before nft, awm or raft on a few-step model.

    Args:
        iterations, prompts, samples: as of `probe`.

    Returns:
        the fit, and as many updates without a direction: what the rate alone moves.

    Raises:
        ConfigError: the method does not match its own samples, or the configuration does not work.
    """
    if not issubclass(type(config.build_algorithm()), OnlineMatching):
        raise ConfigError(
            f"algorithm.name: {config.algorithm.name} does not match its own samples; nft, awm or raft do"
        )
    with tempfile.TemporaryDirectory() as folder:
        base = _quiet(config, folder)
        trainer = Trainer(base, progress=False)
        judged, reward = JudgedPrompts(trainer.prompts.spread(prompts), samples, base), trainer.scorer.reward
        before = judged.sample(trainer, reward)
        del trainer
        fit, aimless = (fit_to_own_samples(base, judged, reward, before, iterations, name) for name in ("rwr", AIMLESS))
    return fit, aimless


class Clock:
    """Seconds of named measurements."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.tell = tell
        self.seconds: dict[str, float] = {}

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Context whose seconds count for this name."""
        self.tell(name)
        begin = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - begin


def _quiet(config: BaseConfig, folder: str) -> BaseConfig:
    """The configuration for trials: its highest rate from the start, nothing evaluated, shown or saved."""
    quiet = config.model_copy(deep=True)
    quiet.output, quiet.name, quiet.trackers = folder, "probe", []
    quiet.rollout.workers, quiet.rollout.engine = None, EngineSettings()
    quiet.evaluation.rewards, quiet.evaluation.panel = None, []
    training = quiet.training
    training.previews, training.checkpoint_every = 0, 0
    training.budget = type(training.budget)()
    training.optimizer.schedule, training.optimizer.warmup_updates = "constant", 0
    return quiet
