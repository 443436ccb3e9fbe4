"""Checks of a rollout's record by itself: what is wrong shows without a model, and each finding names its cause."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flowalign.config import Config
from flowalign.rollouts.contract import RolloutFile
from samplers import KERNELS, transition
from samplers.noise import fingerprints

SURE = 6.0
"""Standard errors beyond which noise is not standard normal: one sound step in a billion goes as far."""
SMALL = 0.005
"""Relative error of noise that no training would notice."""
SAME = 0.99
"""Correlation from which two draws of noise are one."""
COMPARED = 2048
"""Elements of a draw of noise that are compared with those of others."""
LOG_PROB = 1e-3
"""Largest difference of log-probabilities that is rounding, for one of size 1."""
HALF_LOG_TAU = 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True)
class Finding:
    """A fault of a rollout, with its cause."""

    name: str
    """Name of the fault, the same for all of its kind."""
    cause: str

    def __str__(self) -> str:
        return f"{self.name}: {self.cause}"


def check_record(file: RolloutFile) -> list[Finding]:
    """Faults of what a rollout says and holds; later checks only where earlier ones leave something to look at."""
    if findings := [*shapes(file), *finite(file)] or doubled(file):
        return findings
    checks = (sigmas, endpoint, precision, stochastic, start_noise, groups)
    return [finding for check in checks for finding in check(file)]


def shapes(file: RolloutFile) -> list[Finding]:
    """Tensors whose numbers of samples or steps differ."""
    samples, states = file.latents.shape[:2]
    steps = states - 1
    findings = []
    if len(file.sigmas.shape) != 1 or len(file.sigmas) != states:
        numbers = f"{len(file.sigmas)} sigmas for {states} states"
        findings.append(Finding("sigmas", f"{numbers}: each state has one, and T steps have T + 1 states"))
    expected = {
        "log_prob": (samples, steps),
        "eta": (samples, steps),
        "velocity": (samples, steps, *file.latents.shape[2:]),
        "nodes": (samples, states),
    }
    for name, value in file.tensors().items():
        if name in expected and tuple(value.shape) != expected[name]:
            findings.append(Finding("shape", f"{name} is {list(value.shape)}, not {list(expected[name])}"))
    if len(file.about.prompts) != samples:
        dropped = f"{len(file.about.prompts)} samples were asked for, and {samples} are there"
        findings.append(Finding("dropped samples", f"{dropped}: some were lost or came twice"))
    return findings


def finite(file: RolloutFile) -> list[Finding]:
    """Tensors with values that are infinite or none."""
    wrong = [name for name, value in file.tensors().items() if not value.isfinite().all()]
    cause = "a step without noise has no Gaussian (std 0), or a sum overflowed 16 bits"
    return [Finding("not finite", f"{name} has values that are infinite or NaN: {cause}") for name in wrong]


def sigmas(file: RolloutFile) -> list[Finding]:
    """Noise levels that are none, or that do not fall."""
    levels = file.sigmas
    if bool((levels[1:] > levels[:-1]).any()) or float(levels.max()) > 1 or float(levels.min()) < 0:
        shown = ", ".join(f"{level:.3g}" for level in levels.tolist()[:8])
        return [Finding("sigmas", f"noise levels must fall from at most 1 to 0, and these are {shown} ...")]
    return []


def endpoint(file: RolloutFile) -> list[Finding]:
    """Trajectories that do not end at a finished sample."""
    if float(file.sigmas[-1]) != 0:
        last = float(file.sigmas[-1])
        return [
            Finding(
                "endpoint", f"the last state has sigma {last:.3g}, not 0: the last step or the last sigma is missing"
            )
        ]
    if torch.equal(file.latents[:, -1], file.latents[:, -2]):
        return [
            Finding(
                "endpoint", "the last step changes nothing: its state is stored twice, and the finished one is missing"
            )
        ]
    return []


def precision(file: RolloutFile) -> list[Finding]:
    """States that were rounded to 16 bits; the start noise may be, which networks in 16 bits draw so."""
    states = file.latents[:, 1:]
    formats = {"bfloat16": torch.bfloat16, "float16": torch.float16}
    kind = next((name for name, kind in formats.items() if torch.equal(states.to(kind).float(), states.float())), None)
    if kind is None:
        return []
    return [
        Finding("16 bits", f"states were rounded to {kind}, and a log-probability divides that by std; keep float32")
    ]


def stochastic(file: RolloutFile) -> list[Finding]:
    """Log-probabilities that are where no noise is, or are not where noise is."""
    noisy = file.eta > 0
    silent, absent = (file.log_prob != 0) & ~noisy, noisy & (file.log_prob == 0)
    if silent.any():
        steps = shown(silent.any(0).nonzero()[:, 0].tolist())
        return [
            Finding("stochastic steps", f"steps {steps} have eta 0 and yet a log-probability: another plan sampled")
        ]
    if absent.any():
        steps = shown(absent.any(0).nonzero()[:, 0].tolist())
        return [Finding("stochastic steps", f"steps {steps} are stochastic, and their log-probabilities are 0")]
    return []


def start_noise(file: RolloutFile) -> list[Finding]:
    """Start noise that repeats without being asked to: among groups always, in a group where it is not shared."""
    about, hashes = file.about, fingerprints(file.latents[:, 0]).tolist()
    # what samples share on purpose is one draw
    owners = list(zip(about.groups, hashes, strict=True)) if about.share_start_noise else list(range(len(hashes)))
    if file.nodes is not None:
        owners = [(about.groups[row], node) for row, node in enumerate(file.nodes[:, 0].tolist())]
    draws = dict(zip(owners, hashes, strict=True))
    distinct = len(set(draws.values()))
    if distinct == len(draws):
        return []
    seeds = len(set(about.seeds))
    cause = "the seeds repeat" if seeds <= distinct else "the seeds differ, and the engine did not use them"
    return [Finding("start noise", f"{len(draws)} draws of start noise, {distinct} of them distinct: {cause}")]


def doubled(file: RolloutFile) -> list[Finding]:
    """Finished samples that are there twice."""
    hashes = fingerprints(file.latents[:, -1]).tolist()
    twins = [f"{row} is {hashes.index(value)}" for row, value in enumerate(hashes) if hashes.index(value) < row]
    return [Finding("doubled samples", f"samples are there twice: {shown(twins)}")] if twins else []


def groups(file: RolloutFile) -> list[Finding]:
    """Groups of more than one prompt, or of different sizes."""
    about, findings = file.about, []
    prompts: dict[int, set[str]] = {}
    for group, prompt in zip(about.groups, about.prompts, strict=True):
        prompts.setdefault(group, set()).add(prompt)
    mixed = [group for group, texts in prompts.items() if len(texts) > 1]
    if mixed:
        findings.append(Finding("groups", f"groups {shown(mixed)} have samples of more than one prompt"))
    sizes = Counter(about.groups)
    if len(set(sizes.values())) > 1:
        least, most = min(sizes, key=sizes.__getitem__), max(sizes.values())
        findings.append(Finding("dropped samples", f"group {least} has {sizes[least]} samples, others have {most}"))
    return findings


def check_requested(file: RolloutFile, config: Config) -> list[Finding]:
    """What was sampled otherwise than a configuration asks."""
    about, sampling = file.about, config.rollout
    guidance = [sampling.guidance, *([] if sampling.guidance_2 is None else [sampling.guidance_2])]
    size = {name: getattr(sampling, name) for name in ("height", "width", "num_frames")}
    pairs = {
        "kernel": (about.kernel, sampling.kernel),
        "guidance": (about.guidance, guidance),
        "steps": (file.latents.shape[1] - 1, sampling.steps),
        "levels": (about.levels, sampling.sigmas),
        "size": (about.size, {name: side for name, side in size.items() if side is not None}),
        "share_start_noise": (about.share_start_noise, sampling.share_start_noise),
    }
    findings = [
        Finding(name, f"{got} was sampled with, and rollout.{name} asks for {wanted}")
        for name, (got, wanted) in pairs.items()
        if got != wanted
    ]
    prompts = config.data.kept(config.build_algorithm().read(config.data))
    negative = {record.get("negative_prompt", sampling.negative_prompt) for record in prompts.metadata}
    for name, texts, known in (
        ("prompt", about.prompts, set(prompts.texts)),
        ("negative prompt", about.negative_prompts, negative),
    ):
        others = [row for row, text in enumerate(texts) if text not in known]
        if others:
            first = texts[others[0]][:60]
            findings.append(Finding(name, f"samples {shown(others)} are of texts not asked for, such as {first!r}"))
    sizes = set(Counter(about.groups).values())
    if sizes != {config.training.group_size}:
        asked = f"training.group_size asks for {config.training.group_size}"
        findings.append(Finding("dropped samples", f"groups have {shown(sorted(sizes))} samples, and {asked}"))
    return findings


@dataclass(kw_only=True)
class Steps:
    """The steps of a rollout, by velocities at its states; T steps of B samples."""

    std: Tensor
    """[B, T] standard deviation of each step."""
    squared: Tensor
    """[B, T] mean of (next - mean)^2 over elements."""
    elements: int
    """Number of elements of a state."""
    strayed: Tensor
    """[T] size of next - mean at deterministic steps, relative to the step's."""
    depends: Tensor
    """[T] largest correlation of the noise with 1, state and velocity, in standard errors."""
    draws: Tensor
    """[T] number of distinct draws of noise."""
    noise: dict[tuple[int, int], Tensor]
    """First elements of each distinct draw, of norm 1, by sample and step."""

    @property
    def gaussian(self) -> Tensor:
        """[B, T] Gaussian log-probabilities, means over elements; 0 where a step is deterministic."""
        std = torch.where(self.std > 0, self.std, 1)
        value = -self.squared / (2 * std**2) - std.log() - HALF_LOG_TAU
        return torch.where(self.std > 0, value, 0)

    @property
    def squared_error(self) -> Tensor:
        """[B, T] log-probabilities by squared errors; 0 where a step is deterministic."""
        return torch.where(self.std > 0, -self.squared, 0)

    def log_prob(self, convention: str) -> Tensor:
        """[B, T] log-probabilities of a convention."""
        return self.gaussian if convention == "gaussian" else self.squared_error

    @property
    def scale(self) -> Tensor:
        """[T] size of the noise, which is 1 where std is the noise's; NaN at deterministic steps."""
        known = torch.where(self.std > 0, self.squared / self.std**2, torch.nan)
        return known.nanmean(0).sqrt()


def steps_of(file: RolloutFile, velocity: Tensor, kernel: str | None = None) -> Steps:
    """Take a rollout's steps again, by velocities [B, T, ...].

    Args:
        kernel: another kernel than the rollout's.
    """
    samples, steps = file.eta.shape
    std, squared = torch.zeros(samples, steps), torch.zeros(samples, steps)
    strayed, depends, draws = (torch.zeros(steps) for _ in range(3))
    noise: dict[tuple[int, int], Tensor] = {}
    for k in range(steps):
        x, v, next = (value.float() for value in (file.latents[:, k], velocity[:, k], file.latents[:, k + 1]))
        at, to = (level.float().expand(samples) for level in file.sigmas[k : k + 2])
        step = transition(KERNELS[kernel or file.about.kernel], x, v, at, to, file.eta[:, k], next=next)
        distance = next - step.mean
        std[:, k], squared[:, k] = step.std.flatten(1).amax(1), distance.flatten(1).square().mean(1)
        still, rows = ~step.stochastic, first_draws(file, k, step.stochastic)
        if still.any():
            strayed[k] = distance[still].norm() / (v[still] * (to - at)[0]).norm().clamp(min=1e-12)
        if len(rows):
            drawn = (distance / torch.where(step.std > 0, step.std, 1))[rows]
            draws[k], depends[k] = len(rows), dependence(drawn, x[rows], v[rows])
            for row, each in zip(rows.tolist(), drawn.flatten(1)[:, :COMPARED], strict=True):
                noise[row, k] = each / each.norm().clamp(min=1e-12)
    return Steps(
        std=std,
        squared=squared,
        elements=file.latents[0, 0].numel(),
        strayed=strayed,
        depends=depends,
        draws=draws,
        noise=noise,
    )


def first_draws(file: RolloutFile, step: int, stochastic: Tensor) -> Tensor:
    """[N] the samples with a draw of noise of their own at a step; samples on a shared path have one draw."""
    rows: Tensor = stochastic.nonzero()[:, 0]
    if file.nodes is None:
        return rows
    nodes = file.nodes[rows, step + 1].tolist()
    return rows[[i for i, node in enumerate(nodes) if nodes.index(node) == i]]


def dependence(noise: Tensor, x: Tensor, v: Tensor) -> float:
    """The largest correlation of noise [N, ...] with 1, x and v, in standard errors: fresh noise knows none of them."""
    others = [torch.ones_like(x), x, v]
    return max(float((noise * other).sum().abs() / other.norm().clamp(min=1e-12)) for other in others)


def check_steps(file: RolloutFile, steps: Steps, small: float = SMALL) -> list[Finding]:
    """Faults of steps that were taken again: noise that repeats, other means and stds, other log-probabilities.

    Args:
        small: relative error of the noise that the velocities themselves may have.
    """
    if repeated := repeated_noise(file, steps):
        return repeated
    findings = []
    strayed = [k for k, size in enumerate(steps.strayed.tolist()) if size > max(2 * small, 1e-3)]
    if strayed:
        cause = "they were sampled with noise, by another solver, or states are of other steps"
        findings.append(
            Finding("deterministic steps", f"steps {shown(strayed)} do not end where the ODE does: {cause}")
        )
    error = SURE / (steps.draws * steps.elements).clamp(min=1).sqrt()
    depends = [
        k for k, size in enumerate((steps.depends * error / SURE).tolist()) if size > max(float(error[k]), small)
    ]
    if depends:
        cause = "their mean is not the kernel's for these sigmas, eta and velocities"
        findings.append(Finding("mean", f"the noise of steps {shown(depends)} depends on the states: {cause}"))
    scale = steps.scale
    off = [k for k, size in enumerate(scale.tolist()) if abs(size - 1) > max(float(error[k]), small)]
    if off:
        sizes = ", ".join(f"{size:.3g}" for size in scale[off][:4].tolist())
        cause = f"it is {sizes} times what eta says: another eta, kernel or schedule drew it"
        findings.append(Finding("standard deviation", f"the noise of steps {shown(off)} has another size: {cause}"))
    return findings


def repeated_noise(file: RolloutFile, steps: Steps) -> list[Finding]:
    """Draws of noise that repeat: among samples, from step to step, or the start noise."""
    if not steps.noise:
        return []
    places = list(steps.noise)
    noise = torch.stack([*steps.noise.values()])
    start = file.latents[:, 0].float().flatten(1)[:, :COMPARED]
    start = start / start.norm(dim=1, keepdim=True).clamp(min=1e-12)
    pairs, again = 0, 0
    for first in range(0, len(noise), 1024):
        chunk = noise[first : first + 1024]
        alike = (chunk @ noise.T > SAME).nonzero() + torch.tensor([first, 0])
        pairs += int((alike[:, 0] < alike[:, 1]).sum())
        again += int((chunk @ start.T > SAME).any(1).sum())
    findings = []
    if pairs:
        cause = "samples or steps share a generator's state, or a seed"
        findings.append(
            Finding("step noise", f"{pairs} pairs among {len(places)} draws of step noise are one: {cause}")
        )
    if again:
        cause = "both were drawn with the same seeds"
        findings.append(Finding("step noise", f"{again} draws of step noise are a start noise again: {cause}"))
    return findings


def check_log_prob(file: RolloutFile, steps: Steps, velocity: Tensor, tolerance: float = LOG_PROB) -> list[Finding]:
    """Log-probabilities that are not those of the steps, with what they are instead."""
    expected = steps.log_prob(file.about.log_prob)
    wrong = ~close(file.log_prob, expected, tolerance)
    if not wrong.any():
        return []
    causes: dict[str, Callable[[], Tensor]] = {
        "they leave out the constants - log std - log(2 pi) / 2": lambda: without_constants(steps, log_std=False),
        "they leave out the constant - log(2 pi) / 2": lambda: without_constants(steps, log_std=True),
        "they are sums over elements, not means": lambda: expected * steps.elements,
        "they are squared errors": lambda: steps.squared_error,
        "they are the Gaussian's, not squared errors": lambda: steps.gaussian,
        "they are those of the next step": lambda: expected.roll(-1, 1),
        "they are those of the step before": lambda: expected.roll(1, 1),
    }
    for name in KERNELS:
        causes[f"they are those of the kernel {name}"] = lambda name=name: steps_of(file, velocity, name).gaussian  # type: ignore[misc]
    most = float((file.log_prob - expected).abs().max())
    said = f"up to {most:.2g} from those of steps {shown(wrong.any(0).nonzero()[:, 0].tolist())}"
    for cause, value in causes.items():
        if close(file.log_prob, value(), tolerance).all():
            return [Finding("log-probability", f"{said}: {cause}")]
    if close(file.log_prob.sort(0).values, expected.sort(0).values, tolerance).all():
        return [Finding("log-probability", f"{said}: they are those of other samples, in another order")]
    return [Finding("log-probability", f"{said}: recorded by other means, stds or states than those of the file")]


def without_constants(steps: Steps, log_std: bool) -> Tensor:
    """[B, T] Gaussian log-probabilities without log(2 pi) / 2, with or without log std."""
    std = torch.where(steps.std > 0, steps.std, 1)
    value = -steps.squared / (2 * std**2) - (std.log() if log_std else 0)
    return torch.where(steps.std > 0, value, 0)


def close(value: Tensor, expected: Tensor, tolerance: float) -> Tensor:
    """Bool, like both: equal but for rounding."""
    return (value - expected).abs() <= tolerance * expected.abs().clamp(min=1)


def shown(numbers: Sequence[object]) -> str:
    """A few of many numbers, for a line."""
    listed = ", ".join(map(str, numbers[:6]))
    return listed if len(numbers) <= 6 else f"{listed} ... ({len(numbers)} in all)"
