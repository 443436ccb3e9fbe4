"""What short measurements of a configuration say: will it learn, and what would help."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from flowalign.evaluation.approach import Approach
from flowalign.evaluation.gradient_noise import GradientNoise
from flowalign.evaluation.statistics import Interval

Verdict = Literal["it learns", "it is dead", "it does harm", "cannot tell"]

STILL = 0.002
"""Distance to the start, in distances of samples of one prompt, below which a whole run changes nothing to be seen."""
FITTED = 0.1
"""The same distance after fitting a model to its own samples, above which matching alone changes the model."""
NOISY = 0.5
"""Share of the spread in groups from which on the reward's own noise is named."""


@dataclass(frozen=True, kw_only=True)
class GroupSpread:
    """Rewards of groups of samples of one prompt."""

    groups: int
    size: int
    within: Interval
    """Standard deviation in a group, with its 95% interval over groups."""
    dead: Interval
    """Share of the groups whose samples all have one value."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A few iterations of training, and samples of the same prompts and start noises before and after."""

    rate: float
    iterations: int
    before: float
    """Mean reward before."""
    gain: Interval
    """Mean reward after less before."""
    moved: Interval
    """Mean distance of a sample to the one before training, over the mean distance of two samples of a prompt."""
    seconds: float
    """Seconds of an iteration."""
    clipped: float | None
    """Share of the ratios that were clipped, of the last iteration."""
    pace: Approach | None = None
    """Gains halfway and at the end, by which a target is reached; None where it was not judged halfway."""
    failure: str | None = None
    """Error that ended it."""

    @property
    def learned(self) -> bool:
        return self.failure is None and (self.gain.low or 0) > 0

    def still(self, iterations: int) -> bool:
        """Whether a run of this length would hardly change a sample, by the upper end of the distance moved."""
        return self.moved.ends[1] * iterations / self.iterations < STILL

    @property
    def harmed(self) -> bool:
        return self.failure is not None or (self.gain.high or 0) < 0


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Measurements of a configuration."""

    iterations: int
    """Iterations of the whole run."""
    groups: int
    """Groups of an iteration."""
    size: int
    """Samples of a group."""
    start: GroupSpread | None
    """Rewards of the first rollout; None where the method compares no samples."""
    gradient: GradientNoise | None
    """None where the gradient is 0."""
    first_step: Interval | None
    """Fall of the loss by the first update, on other groups than it learned from, to first order."""
    reward_noise: Mapping[str, Interval]
    """Standard deviation of the reward of one picture, by how it was disturbed, over the spread in a group."""
    by_step: Mapping[int, GroupSpread]
    """Rewards of groups with noise in this denoising step alone."""
    noisy_steps: Sequence[int]
    """Denoising steps with noise, as configured."""
    trial: Trial
    stress: Trial
    canary: Trial | None
    """None where the method learns from no reward, or from one that cannot be replaced."""
    own_fit: Trial | None = None
    """Fit to its own samples, all of one weight, as matching methods do it; its gain is of the configured reward."""
    aimless: Trial | None = None
    """As many updates by the same losses, up and down in turn: what the rate moves without any direction."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each measurement."""

    @property
    def verdict(self) -> Verdict:
        """Judgement by the trial where it shows a change, else by what the first batch lacks."""
        if self.trial.harmed:
            return "it does harm"
        if self.trial.learned:
            return "it learns"
        return "it is dead" if self.dead() else "cannot tell"

    @property
    def alike(self) -> bool:
        """Whether the rewards of every group were all alike."""
        return self.start is not None and self.start.dead.mean == 1

    def dead(self) -> list[str]:
        """Causes by which nothing is learned."""
        causes = []
        if self.alike:
            causes.append("the samples of a prompt all have one reward")
        if self.gradient is None:
            causes.append("the gradient is 0")
        if self.trial.still(self.iterations):
            causes.append(f"the whole run at {self.trial.rate:g} would hardly change a sample")
        return causes

    def iterations_to(self, target: float) -> Interval | None:
        """Iterations to a reward by the fit to the trial, median and 95% interval; None where it may never come.

        An end of infinity: perhaps never.
        """
        missing = target - self.trial.before
        if missing <= 0:
            return Interval(0.0, 0.0, 0.0)
        if self.trial.pace is None or not self.trial.learned:
            return None
        iterations = self.trial.pace.reached(missing)
        return None if iterations.low == math.inf else iterations

    def advice(self) -> list[str]:
        """What to change, with numbers; an empty list where nothing stands out."""
        trial, stress = self.trial, self.stress
        lines = []
        if self.verdict == "cannot tell" and trial.gain.low is not None and trial.gain.mean > 0:
            reach = (trial.gain.mean - trial.gain.low) / trial.gain.mean
            lines.append(
                f"--prompts: about {reach**2:.1f} times as many would show a gain of {trial.gain.mean:.3f}, or more "
                "--iterations a larger one"
            )
        alike = self.alike
        if alike and self.canary is not None and self.canary.learned:
            lines.append("rewards: this one is the same for all samples of a prompt, and another one is learned")
        elif alike:
            lines.append("noise: the samples of a prompt are alike; rollout.eta above 0, or share_start_noise: false")
        elif self.start is not None and self.start.dead.mean > 0.5:
            lines.append(
                f"training.group_size: {2 * self.size} (now {self.size}), or data.dynamic_sampling: "
                f"{self.start.dead.mean:.0%} of the groups teach nothing"
            )
        if trial.harmed:
            lines.append(f"training.optimizer.learning_rate: {trial.rate / 4:.2g} or less (now {trial.rate:g})")
        elif stress.harmed:
            lines.append(
                f"training.optimizer.learning_rate: {trial.rate:g} has no margin, since four times as much does harm; "
                "a schedule that falls, and evaluation.every, to see a fall early"
            )
        elif not alike and trial.still(self.iterations):
            lines.append(f"training.optimizer.learning_rate: at least {100 * trial.rate:.2g} (now {trial.rate:g})")
        elif stress.learned and (stress.gain.low or 0) > trial.gain.mean:
            lines.append(
                f"training.optimizer.learning_rate: {stress.rate:.2g} gained more in {trial.iterations} iterations "
                f"than {trial.rate:g}"
            )
        if self.gradient is not None and not alike:
            lines += self._groups_advice(self.gradient)
        wide = self._wider_step()
        if wide is not None:
            lines.append(
                f"rollout.plan: {{name: window, start: {wide}, size: 1}}: noise in step {wide} spreads the reward most "
                f"({self.by_step[wide].within})"
            )
        noise = [name for name, size in self.reward_noise.items() if (size.low or 0) > NOISY]
        if noise:
            lines.append(f"rewards: more than half the spread in a group is noise of one picture: {', '.join(noise)}")
        if self.own_fit is not None and self.aimless is not None:
            lines += fit_advice(self.own_fit, self.aimless)
        return lines

    def _groups_advice(self, gradient: GradientNoise) -> list[str]:
        scale = gradient.scale
        if scale.low is not None and scale.low > gradient.groups:
            return [
                f"training.prompts_per_iteration: noise is as large as the signal at {scale.low:.0f} groups or more, "
                f"and an update has {gradient.groups}; more of them teach almost in proportion"
            ]
        if scale.high is not None and scale.high < gradient.groups / 4:
            return [
                f"training.prompts_per_iteration: {max(math.ceil(scale.high), 2)} would do (now {gradient.groups}): "
                "the gradient has little noise, and more updates are worth more than more samples"
            ]
        return []

    def _wider_step(self) -> int | None:
        """The step whose noise spreads the reward most, if all configured ones surely spread it less."""
        if len(self.by_step) < 2:
            return None
        best = max(self.by_step, key=lambda step: self.by_step[step].within.mean)
        low = self.by_step[best].within.low or 0
        used = [self.by_step[step].within.high or 0 for step in self.noisy_steps if step in self.by_step]
        return best if used and max(used) < low else None

    def record(self) -> dict[str, Any]:
        """The figures as JSON."""
        return plain(vars(self)) | {"verdict": self.verdict, "causes": self.dead(), "advice": self.advice()}


def plain(value: object) -> Any:
    """A record as JSON."""
    if isinstance(value, (GradientNoise, Approach)):
        return value.record()
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    return plain(vars(value)) if hasattr(value, "__dataclass_fields__") else value


def fit_advice(fit: Trial, aimless: Trial) -> list[str]:
    """The warning before a matching method, unless the fit to own samples surely leaves the model where it is."""
    low, high = fit.moved.ends
    if high <= FITTED and not fit.harmed:
        return []
    said = [
        f"algorithm: fitted to its own samples, before any reward is learned, the model moves by {fit.moved} distances "
        f"of two samples ({aimless.moved} by updates without a direction) and its reward changes by {fit.gain:+}"
    ]
    if low <= FITTED < high:
        said.append(f"whether it moves by more than {FITTED:g} it cannot tell (more --prompts)")
    if low <= aimless.moved.ends[1]:
        said.append("the rate alone may move it as far")
    if not fit.harmed and not fit.learned:
        said.append("whether that costs reward it cannot tell")
    said.append("whether the model is distilled it cannot tell: any model that samples in few steps moves")
    said.append(
        "a lower rate, more steps or a larger algorithm.kl_weight holds it, or a policy-gradient method (flow_grpo), "
        "which does not fit samples"
    )
    return ["; ".join(said)]
