"""Will it learn? Short measurements of a configuration; every network they train is dropped, and nothing is written.

One batch tells what the groups and the gradient say at the start. A trial trains for a few iterations and compares
samples of the same prompts and start noises before and after it; a second one at four times the rate shows how far the
rate is from too much. A canary trains the recipe for a reward that any right adapter raises. Trials use the recipe's
highest rate, without its schedule and warm-up.
"""

import io
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from flowalign.algorithms.base import Experience
from flowalign.algorithms.matching.online import OnlineMatching
from flowalign.config import BaseConfig, Named, Weighted
from flowalign.data import Prompts
from flowalign.data.batches import draw_batch
from flowalign.errors import ConfigError, FlowalignError
from flowalign.evaluation.gradient_noise import gradient_noise, step_gain
from flowalign.evaluation.scores import Evaluated, evaluate
from flowalign.evaluation.statistics import Interval, redrawn, share_interval, significance
from flowalign.planning.dry_run import StandIn
from flowalign.planning.probed import GroupSpread, Probe, Trial
from flowalign.rollouts.pictures import DiffusionSampler
from flowalign.training import Trainer
from rewards import Reward, score, spec_of

Array = NDArray[np.float64]

PARTS = 8
"""Parts of a batch whose gradients are compared."""
COORDINATES = 2**22
"""Most parameters that a gradient is looked at in; they are spread evenly over all."""
CANARY = "flowalign.planning.probe:Canary"
STRESS = 4.0
"""Factor of the rate in the second trial."""
CANARY_ITERATIONS = 15
CANARY_PROMPTS = 16
"""Most prompts of an iteration of the canary."""
STEP_PROMPTS = 8
"""Prompts whose groups show where noise spreads the reward."""


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
        judged = _Judged(trainer.prompts.spread(prompts), samples, base)
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
            trial = _trial(trainer, judged, trainer.scorer.reward, before, iterations)
        noisy = _noisy_steps(trainer)
        matching, reward = isinstance(trainer.algorithm, OnlineMatching), trainer.scorer.reward
        learns_from_reward = trainer.scorer.calls > 0
        # one model at a time
        del trainer
        with clock.of("trial at four times the rate"):
            faster = base.model_copy(deep=True)
            faster.training.optimizer.learning_rate = STRESS * rate
            stress = _trial(Trainer(faster, progress=False), judged, reward, before, iterations)
        with clock.of("canary"):
            canary = _canary(base, judged) if learns_from_reward else None
        own_fit = None
        if matching:
            with clock.of("fit to its own samples"):
                own_fit = fit_to_own_samples(base, judged, reward, before, iterations)
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
        seconds=clock.seconds,
    )


class Canary(StandIn):
    """A reward that any right adapter raises: brightness of pictures, share of a text's characters of even number."""

    name = "canary"

    def value(self, sample: Image.Image | str) -> float:
        if isinstance(sample, str):
            return sum(ord(character) % 2 == 0 for character in sample) / max(len(sample), 1)
        return super().value(sample)


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


@dataclass(frozen=True)
class _Judged:
    """How trials are judged: the same prompts and start noises each time."""

    prompts: Prompts
    samples: int
    config: BaseConfig

    def sample(self, trainer: Trainer, reward: Reward) -> Evaluated:
        settings = self.config.evaluation
        with trainer.learner.usable():
            return evaluate(trainer.policy, reward, self.prompts, settings, self.samples, settings.seed)


def _quiet(config: BaseConfig, folder: str) -> BaseConfig:
    """The configuration for trials: its highest rate from the start, nothing evaluated, shown or saved."""
    quiet = config.model_copy(deep=True)
    quiet.output, quiet.name, quiet.trackers = folder, "probe", []
    quiet.rollout.workers = None
    quiet.evaluation.rewards, quiet.evaluation.panel = None, []
    training = quiet.training
    training.previews, training.checkpoint_every = 0, 0
    training.budget = type(training.budget)()
    training.optimizer.schedule, training.optimizer.warmup_updates = "constant", 0
    return quiet


def first_batch(trainer: Trainer) -> tuple[GroupSpread | None, Array, float]:
    """Rewards of the first groups, and the gradients [K, D] of parts of them, each of other groups.

    Small iterations are repeated until each part has a group.

    Returns:
        the spread, the gradients, and the groups of a part.
    """
    spreads: list[list[float]] = []
    gradients: list[Array] = []
    rounds = -(-PARTS // trainer.config.training.prompts_per_iteration)
    for _ in range(rounds):
        experience = trainer.experience()
        spreads += group_values(experience)
        groups = list(dict.fromkeys(experience.batch.group))
        items = experience.items.unflatten(0, (len(groups), -1))
        parts = min(PARTS, len(groups)) if rounds == 1 else len(groups)
        for chunk in items.tensor_split(parts):
            gradient = trainer.learner.gradient(experience, chunk.flatten(0, 1), most=COORDINATES)
            gradients.append(gradient.numpy().astype(np.float64))
        trainer.iteration += 1
    trainer.iteration = 0
    even = len(gradients) - len(gradients) % 2
    return spread_of(spreads) if spreads else None, np.stack(gradients[:even]), len(groups) / parts


def group_values(experience: Experience) -> list[list[float]]:
    """Rewards of each group; an empty list where the method compares no samples."""
    outcome = experience.outcome()
    if outcome is None:
        return []
    values: dict[int, list[float]] = {}
    for group, value in zip(experience.batch.group, outcome[0].tolist(), strict=True):
        values.setdefault(group, []).append(value)
    return list(values.values())


def spread_of(groups: Sequence[Sequence[float]]) -> GroupSpread:
    """Spread of the rewards of groups of one size."""
    table = np.array(groups, dtype=np.float64)
    variances = table.var(axis=1, ddof=1)
    dead = int((np.ptp(table, axis=1) == 0).sum())
    draws = np.sqrt(redrawn(len(table)) @ variances / len(table))
    low, high = np.quantile(draws, (0.025, 0.975)).tolist()
    share = dead / len(table)
    return GroupSpread(
        groups=len(table),
        size=table.shape[1],
        within=Interval(float(variances.mean() ** 0.5), low, high),
        dead=Interval(share, *share_interval(share, len(table))),
    )


def spread_by_step(trainer: Trainer) -> dict[int, GroupSpread]:
    """Spread of groups that share their start and have noise in one denoising step alone, for each step but the last.

    Methods whose samples differ by other noise than the kernel's have none.
    """
    sampler, training = trainer.sampler, trainer.config.training
    if not isinstance(sampler, DiffusionSampler) or trainer.algorithm.noise != "kernel":
        return {}
    rollout, algorithm = sampler.config.rollout, trainer.algorithm
    if not rollout.eta or not rollout.share_start_noise or rollout.plan.name not in ("all", "window"):
        return {}
    batch = draw_batch(trainer.prompts, 0, STEP_PROMPTS, training.group_size, training.seed, True)
    spreads = {}
    for step in range(rollout.steps - 1):
        eta = torch.zeros(rollout.steps)
        eta[step] = rollout.eta
        with torch.no_grad(), trainer.learner.sampling():
            pictures = sampler.decode(sampler.rollout(batch, eta))
        values = algorithm.score(trainer.scorer, pictures, batch).value
        spreads[step] = spread_of(values.view(-1, training.group_size).tolist())
    return spreads


def _noisy_steps(trainer: Trainer) -> list[int]:
    if not isinstance(trainer.sampler, DiffusionSampler) or trainer.algorithm.noise != "kernel":
        return []
    rollout = trainer.sampler.config.rollout
    etas = trainer.sampler.plan.etas(rollout.steps, rollout.eta, 0, trainer.config.training.seed)
    return [int(step) for step in (etas.view(-1, rollout.steps)[0] > 0).nonzero()[:, 0]]


def _shifted(picture: Image.Image) -> Image.Image:
    """A crop that leaves out 4% at the left and the top, at the same size."""
    width, height = picture.size
    return picture.crop((width * 4 // 100, height * 4 // 100, width, height)).resize(
        picture.size, Image.Resampling.BICUBIC
    )


def _compressed(picture: Image.Image, quality: int) -> Image.Image:
    file = io.BytesIO()
    picture.convert("RGB").save(file, "JPEG", quality=quality)
    return Image.open(file).convert("RGB")


DISTURBANCES: Mapping[str, Callable[[Image.Image], Image.Image]] = {
    "same picture twice": lambda picture: picture,
    "crop without 4%": _shifted,
    "JPEG at 90": lambda picture: _compressed(picture, 90),
    "JPEG at 75": lambda picture: _compressed(picture, 75),
}


def reward_noise(reward: Reward, result: Evaluated) -> dict[str, Interval]:
    """Noise of the reward over its spread in a prompt's samples, by what was done to pictures; texts are read twice.

    A sample's two values r, r' have the noise sd(r' - r) / sqrt(2); a shift that all samples have alike is none.
    """
    if spec_of(reward).needs & {"latents", "sound", "frames", "reference"} or not result.samples:
        return {}
    pictures = isinstance(result.samples[0], Image.Image)
    numbers = {prompt: i for i, prompt in enumerate(dict.fromkeys(result.prompts))}
    group = np.array([numbers[prompt] for prompt in result.prompts])
    records = [
        record | {"group": number, "seed": seed}
        for record, number, seed in zip(result.metadata, group.tolist(), result.seeds, strict=True)
    ]
    value = np.array(result.value)
    draws = redrawn(len(numbers))
    count = np.bincount(group)

    def squares(values: Array) -> Array:
        """Sum of squares around the group's mean, of each group."""
        centred = values - (np.bincount(group, values) / count)[group]
        total: Array = np.bincount(group, centred**2).astype(np.float64)
        return total

    spread = squares(value)
    if not spread.any():
        return {}
    noise = {}
    for name, change in DISTURBANCES.items():
        if not pictures and name != "same picture twice":
            continue
        samples = [change(sample) for sample in result.samples] if pictures else result.samples
        again = score(reward, samples, result.prompts, records).value.double().numpy()
        error = squares(again - value) / 2
        below = draws @ spread
        ratios = np.sqrt(np.divide(draws @ error, below, out=np.zeros(len(draws)), where=below > 0))
        low, high = np.quantile(ratios, (0.025, 0.975)).tolist()
        noise[name if pictures else "same text twice"] = Interval(float((error.sum() / spread.sum()) ** 0.5), low, high)
    return noise


def _trial(trainer: Trainer, judged: _Judged, reward: Reward, before: Evaluated, iterations: int) -> Trial:
    """Train, and compare with `before`; what `reward` judges may be another one than is trained on."""
    # updates that train other sets of weights alone come before
    updates = trainer.config.training.updates
    begin, failure, metrics = time.perf_counter(), None, {}
    total = iterations + -(-trainer.learner.head_start // updates)
    try:
        for _ in range(total):
            metrics = trainer.iterate()
            trainer.iteration += 1
        seconds = (time.perf_counter() - begin) / total
        after = judged.sample(trainer, reward)
    except ConfigError:
        raise
    except FlowalignError as error:
        seconds, after, failure = (time.perf_counter() - begin) / total, before, str(error)
    return Trial(
        rate=trainer.config.training.optimizer.learning_rate,
        iterations=iterations,
        before=float(np.mean(before.value)),
        gain=paired_gain(before, after),
        moved=distance_moved(before, after),
        seconds=seconds,
        clipped=metrics.get("policy/clip_fraction"),
        failure=failure,
    )


def paired_gain(before: Evaluated, after: Evaluated) -> Interval:
    """Mean of the paired differences, with its 95% bootstrap interval over prompts."""
    gains = [b - a for a, b in zip(before.value, after.value, strict=True)]
    found = significance(gains, before.prompts)
    return Interval(float(np.mean(gains)), None if found is None else found.low, None if found is None else found.high)


def distance_moved(before: Evaluated, after: Evaluated) -> float:
    """Mean distance of the samples to those before, over the mean distance of two samples of a prompt.

    Pictures and videos: root mean square over pixels; texts: 1 where they differ. 0 where nothing differs at all.
    """
    apart = [
        distance(before.samples[i], before.samples[i + 1])
        for i in range(len(before.samples) - 1)
        if before.prompts[i] == before.prompts[i + 1]
    ]
    moved = [distance(a, b) for a, b in zip(before.samples, after.samples, strict=True)]
    return float(np.mean(moved) / np.mean(apart)) if apart and any(apart) else float(np.mean(moved))


def distance(one: Any, two: Any) -> float:
    """Root mean square over the pixels of two pictures or videos, in [0, 1]; of two texts, 1 where they differ."""
    if isinstance(one, str):
        return float(one != two)
    a, b = (np.stack([np.asarray(frame, dtype=np.float64) for frame in _frames(each)]) for each in (one, two))
    return float((((a - b) / 255) ** 2).mean() ** 0.5)


def _frames(sample: Any) -> list[Any]:
    return [sample] if isinstance(sample, Image.Image) else list(sample)


def _canary(config: BaseConfig, judged: _Judged) -> Trial | None:
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
    return _trial(trainer, judged, reward, judged.sample(trainer, reward), CANARY_ITERATIONS)


def fit_to_own_samples(
    config: BaseConfig, judged: _Judged, reward: Reward, before: Evaluated, iterations: int
) -> Trial:
    """How far a model moves when it is fitted to its own samples, all of one weight, as a matching method would.

    A model that samples by the flow it was trained for stays where it is, up to noise. One that was distilled to few
    steps does not: its velocities are not those of its samples' flow, and matching makes them so.
    """
    fitted = config.model_copy(deep=True)
    shared = {"levels", "levels_of", "noise_of", "guidance"} & set(config.algorithm.settings)
    settings = {key: config.algorithm.settings[key] for key in shared}
    # weights exp(0 r) are 1 for all
    fitted.algorithm = Named.model_validate({"name": "rwr", "beta": 0.0, "kl_weight": 0.0, **settings})
    fitted.training.snapshots, fitted.rollout.weights = {}, None
    return _trial(Trainer(fitted, progress=False), judged, reward, before, iterations)
