"""Short trainings whose weights are dropped, judged by the same prompts and start noises before and after."""

import time
from dataclasses import dataclass
from statistics import fmean
from typing import cast

import numpy as np
from PIL import Image
from torch import Tensor

from flowalign.algorithms.matching.rwr import RWR, RWRSettings
from flowalign.config import BaseConfig, Named, Weighted
from flowalign.core.record import Record
from flowalign.data import Prompts
from flowalign.errors import ConfigError, FlowalignError
from flowalign.evaluation.approach import Approach, approach
from flowalign.evaluation.scores import Evaluated, evaluate
from flowalign.evaluation.statistics import Interval, by_prompt, ratio, significance
from flowalign.planning.dry_run import StandIn
from flowalign.planning.probed import Trial
from flowalign.runs.samples import Picture, frames_of
from flowalign.training import Trainer
from rewards import Reward, Sound

CANARY = "flowalign.planning.trials:Canary"
AIMLESS = "flowalign.planning.trials:Aimless"
CANARY_ITERATIONS = 15
CANARY_PROMPTS = 16
"""Most prompts of an iteration of the canary."""


@dataclass(frozen=True)
class JudgedPrompts:
    """How trials are judged: the same prompts and start noises each time."""

    prompts: Prompts
    samples: int
    config: BaseConfig

    def sample(self, trainer: Trainer, reward: Reward) -> Evaluated:
        settings = self.config.evaluation
        with trainer.learner.usable():
            return evaluate(trainer.policy, reward, self.prompts, settings, self.samples, settings.seed)


def run_trial(
    trainer: Trainer, judged: JudgedPrompts, reward: Reward, before: Evaluated, iterations: int, paced: bool = False
) -> Trial:
    """Train, and compare with `before`.

    Args:
        reward: reward that judges; it may be another one than is trained on.
        paced: judge halfway too, for the time to a target.
    """
    # updates that train other sets of weights alone come before
    head_start = -(-trainer.learner.head_start // trainer.config.training.updates)
    seconds, failure, metrics, halfway = 0.0, None, {}, None
    after = before
    total = iterations + head_start
    try:
        for number in range(1, total + 1):
            begin = time.perf_counter()
            metrics = trainer.iterate()
            seconds += (time.perf_counter() - begin) / total
            trainer.iteration += 1
            if paced and 2 * (number - head_start) == iterations:
                halfway = judged.sample(trainer, reward)
        after = judged.sample(trainer, reward)
    except ConfigError:
        raise
    except FlowalignError as error:
        failure = str(error)
    return Trial(
        rate=trainer.config.training.optimizer.learning_rate,
        iterations=iterations,
        before=float(np.mean(before.value)),
        gain=paired_gain(before, after),
        moved=distance_moved(before, after),
        seconds=seconds,
        clipped=metrics.get("policy/clip_fraction"),
        pace=_pace(before, halfway, after, iterations) if paced and failure is None else None,
        failure=failure,
    )


def _pace(before: Evaluated, halfway: Evaluated | None, after: Evaluated, iterations: int) -> Approach:
    """The curve through the gains halfway and at the end; a line where an odd number has no middle."""
    end = np.array(after.value) - np.array(before.value)
    half = end / 2 if halfway is None else np.array(halfway.value) - np.array(before.value)
    return approach(half.tolist(), end.tolist(), before.prompts, iterations)


def paired_gain(before: Evaluated, after: Evaluated) -> Interval:
    """Mean of the paired differences, with its 95% bootstrap interval over prompts."""
    gains = [b - a for a, b in zip(before.value, after.value, strict=True)]
    found = significance(gains, before.prompts)
    return Interval(float(np.mean(gains)), None if found is None else found.low, None if found is None else found.high)


def distance_moved(before: Evaluated, after: Evaluated) -> Interval:
    """Mean distance of the samples to those before, over the mean distance of two samples of a prompt.

    Its 95% interval is over prompts, which all have as many samples. Pictures and videos: root mean square over pixels;
    texts: 1 where they differ. Where the samples of every prompt are alike, the distance itself.
    """
    moved = by_prompt(list(map(distance, before.samples, after.samples)), before.prompts)
    neighbours = [i for i in range(1, len(before.samples)) if before.prompts[i] == before.prompts[i - 1]]
    between = [distance(before.samples[i - 1], before.samples[i]) for i in neighbours]
    apart = by_prompt(between, [before.prompts[i] for i in neighbours])
    alike = not any(map(sum, apart))
    return ratio([fmean(each) for each in moved], None if alike else [fmean(each) for each in apart])


def distance(one: object, two: object) -> float:
    """Root mean square over the pixels of two pictures or videos, in [0, 1]; of two texts, 1 where they differ."""
    if isinstance(one, str):
        return float(one != two)
    frames = (frames_of(cast(Picture, each)) for each in (one, two))
    a, b = (np.stack([np.asarray(frame, dtype=np.float64) for frame in each]) for each in frames)
    return float((((a - b) / 255) ** 2).mean() ** 0.5)


class Canary(StandIn):
    """A reward that any right adapter raises: brightness of pictures, share of a text's characters of even number."""

    name = "canary"

    def value(self, sample: Image.Image | Sound | str) -> float:
        if isinstance(sample, str):
            return sum(ord(character) % 2 == 0 for character in sample) / max(len(sample), 1)
        return super().value(sample)


def canary_trial(config: BaseConfig, judged: JudgedPrompts) -> Trial | None:
    """A trial with the canary's reward; its gain is of that."""
    canary = config.model_copy(deep=True)
    canary.rewards = [Weighted.model_validate({"name": CANARY})]
    canary.training.prompts_per_iteration = min(canary.training.prompts_per_iteration, CANARY_PROMPTS)
    try:
        trainer = Trainer(canary, progress=False)
    except ConfigError:
        # the method looks at parts of its rewards by name, or at their pairs
        return None
    reward = trainer.scorer.reward
    return run_trial(trainer, judged, reward, judged.sample(trainer, reward), CANARY_ITERATIONS)


class Aimless(RWR):
    """Matching on own samples, uphill and downhill in turn: it moves as far as gradients without a direction do."""

    name = "aimless"

    def __init__(self, settings: RWRSettings) -> None:
        super().__init__(settings)
        self.sign = -1.0

    def credit(self, record: Record) -> Tensor:
        self.sign = -self.sign
        return self.sign * super().credit(record)


def fit_to_own_samples(
    config: BaseConfig,
    judged: JudgedPrompts,
    reward: Reward,
    before: Evaluated,
    iterations: int,
    algorithm: str = "rwr",
) -> Trial:
    """How far a model moves when it is fitted to its own samples, all of one weight, as a matching method would.

    A model that samples by the flow it was trained for stays where it is, up to noise. One that was distilled to few
    steps does not: its velocities are not those of its samples' flow, and matching makes them so.

    Args:
        algorithm: "rwr", or `AIMLESS` for the noise alone.
    """
    fitted = config.model_copy(deep=True)
    shared = {"levels", "levels_of", "noise_of", "guidance", "stochastic"} & set(config.algorithm.settings)
    settings = {key: config.algorithm.settings[key] for key in shared}
    # weights exp(0 r) are 1 for all
    fitted.algorithm = Named.model_validate({"name": algorithm, "beta": 0.0, "kl_weight": 0.0, **settings})
    fitted.training.snapshots, fitted.rollout.weights = {}, None
    return run_trial(Trainer(fitted, progress=False), judged, reward, before, iterations)
