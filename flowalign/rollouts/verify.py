"""Does a policy make what a rollout recorded? A file is replayed step by step, and what differs is explained."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flowalign.config import Config
from flowalign.policies.diffusion import DiffusersPolicy, Rollout
from flowalign.policies.diffusion.checks import replay_tolerance
from flowalign.rollouts.checks import (
    LOG_PROB,
    SMALL,
    Finding,
    check_log_prob,
    check_record,
    check_requested,
    check_steps,
    shown,
    steps_of,
)
from flowalign.rollouts.contract import RolloutFile, identity
from samplers import KERNELS

SCHEDULE = 1e-5
"""Largest difference of a sigma that is rounding."""
START = 2e-2
"""Largest relative difference of start noise that is rounding, by networks in 16 bits."""
CANDIDATES = 16
"""Other prompts that are tried, at most."""
BROKEN = {"shape", "not finite", "sigmas", "dropped samples", "doubled samples"}
"""Faults after which there is nothing to replay."""
UNEXPLAINED = "neither guidance nor a prompt of the file explains it; other weights, or another encoding of prompts"
"""Cause of velocities of which nothing that a file says is the cause."""


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """A step of a rollout beside its replay."""

    sigma: float
    std: float
    """Standard deviation of the step, the mean over the samples that are stochastic there; 0: none is."""
    mean: float
    """Largest difference of the means, a root mean square over elements, in units of std where that is not 0."""
    scale: float
    """Size of the step's noise by the replay, which is 1; NaN without noise."""
    log_prob: float
    """Mean size of the difference of log-probabilities."""
    largest: float
    """The largest difference."""


@dataclass(kw_only=True)
class Verdict:
    """The findings about a rollout, and its steps as far as they could be replayed."""

    findings: list[Finding]
    steps: list[StepReport]


class Replay:
    """A policy that takes the steps of a rollout file again.

    Args:
        batch_size: samples of a network call.
    """

    def __init__(self, policy: DiffusersPolicy, file: RolloutFile, batch_size: int) -> None:
        self.policy, self.file, self.batch_size = policy, file, batch_size

    def stay(self, prompts: Sequence[str] | None = None, guidance: Sequence[float] | None = None) -> Rollout:
        """The same samples, all states at their start noise: the schedule, and what the network is called with.

        Args:
            prompts, guidance: others than the file's.
        """
        about = self.file.about
        scales = zip(("guidance", "guidance_2"), about.guidance if guidance is None else guidance, strict=False)
        settings: dict[str, Any] = {**dict(scales), **about.size}
        return self.policy.sample(
            about.prompts if prompts is None else prompts,
            about.seeds,
            steps=self.file.latents.shape[1] - 1,
            sigmas=about.levels,
            metadata=[{"negative_prompt": text} if text else {} for text in about.negative_prompts],
            batch_size=self.batch_size,
            dry=True,
            **settings,
        )

    def velocities(self, stay: Rollout, samples: Tensor | None = None, steps: Sequence[int] | None = None) -> Tensor:
        """[N, K, ...] float32 velocities at the file's states, on the CPU.

        Args:
            stay: what the network is called with.
            samples, steps: only these N samples and K steps.
        """
        file, device = self.file, stay.trajectory.latents.device
        nodes = None if file.nodes is None else file.nodes.to(device)
        rollout = replace(
            stay, trajectory=replace(stay.trajectory, latents=file.latents.float().to(device), nodes=nodes)
        )
        rows = (torch.arange(len(file.latents)) if samples is None else samples).to(device).split(self.batch_size)
        taken = []
        for step in range(file.latents.shape[1] - 1) if steps is None else steps:
            parts = [self.policy.velocity(rollout, part, torch.full_like(part, step)) for part in rows]
            taken.append(torch.cat(parts).float().cpu())
        return torch.stack(taken, 1)


@torch.no_grad()
def verify(policy: DiffusersPolicy, file: RolloutFile, config: Config | None = None, batch_size: int = 16) -> Verdict:
    """Check a rollout by itself and against a policy, which has the weights that should have sampled it.

    Args:
        config: what was asked for; None: what the file says of itself.
        batch_size: samples of a network call.
    """
    findings = check_record(file) + ([] if config is None else check_requested(file, config))
    if any(finding.name in BROKEN for finding in findings):
        return Verdict(findings=findings, steps=[])
    name = type(policy.pipeline).__name__
    if name != file.about.model:
        findings.append(Finding("model", f"{file.about.model} sampled, and the model given is {name}"))
        return Verdict(findings=findings, steps=[])
    findings += check_weights(policy, file)
    replay = Replay(policy, file, batch_size)
    stay = replay.stay()
    findings += check_start(file, stay.trajectory.latents[:, 0].cpu(), stay.trajectory.sigmas.cpu())
    if any(finding.name in ("size", "sigmas") for finding in findings):
        return Verdict(findings=findings, steps=[])
    replayed, tolerance = replay.velocities(stay), replay_tolerance(policy)
    # what a log-probability divides by std was lost with the other bits of the states
    if not any(finding.name == "16 bits" for finding in findings):
        if file.velocity is None:
            steps, small = steps_of(file, replayed), max(SMALL, 2 * tolerance)
            findings += check_steps(file, steps, small) + check_log_prob(
                file, steps, replayed, max(LOG_PROB, tolerance)
            )
        else:
            steps = steps_of(file, file.velocity)
            findings += check_steps(file, steps) + check_log_prob(file, steps, file.velocity)
    if file.velocity is not None:
        other = any(finding.name == "weights" for finding in findings)
        cause = "the weights are of another version" if other else UNEXPLAINED
        findings += check_velocities(replay, replayed, tolerance, cause)
    return Verdict(findings=findings, steps=reports(file, replayed))


def check_weights(policy: DiffusersPolicy, file: RolloutFile) -> list[Finding]:
    """Weights that are not those that the file names."""
    said = file.about.weights
    own = identity(policy, whole=said.network is not None and not policy.lora)
    if said.lora != own.lora:
        names = [f"the adapter {name[:8]}" if name else "no adapter" for name in (said.lora, own.lora)]
        return [Finding("weights", f"sampled with {names[0]}, and the model given has {names[1]}: another version")]
    if said.network is not None and said.network != own.network:
        return [Finding("weights", f"sampled with the weights {said.network[:8]}, and the model given has others")]
    return []


def check_start(file: RolloutFile, noise: Tensor, sigmas: Tensor) -> list[Finding]:
    """Sizes, schedules and start noises that are not what the pipeline makes of the file's settings.

    Args:
        noise: [B, ...] the pipeline's own start noise for the file's seeds.
        sigmas: [T + 1] the pipeline's own noise levels.
    """
    if noise.shape != file.latents[:, 0].shape:
        own, got = list(noise.shape[1:]), list(file.latents.shape[2:])
        return [Finding("size", f"a state is {got}, and the pipeline makes {own} for size {file.about.size}")]
    findings = []
    if len(sigmas) != len(file.sigmas):
        return [Finding("sigmas", f"{len(file.sigmas)} of them, and the pipeline's schedule has {len(sigmas)}")]
    if not torch.allclose(sigmas, file.sigmas.float(), atol=SCHEDULE, rtol=0):
        findings.append(Finding("sigmas", unlike(file.sigmas.float(), sigmas)))
    seeds = first_of_paths(file)
    start = file.latents[:, 0].float()
    apart = (start - noise[seeds]).flatten(1).norm(dim=1) / noise[seeds].flatten(1).norm(dim=1)
    wrong = (apart > START).nonzero()[:, 0].tolist()
    if wrong and file.about.generator == "cpu":
        cause = "another generator or device drew it, or other seeds"
        if bool((torch.cdist(start.flatten(1), noise.flatten(1)).argmin(1)[wrong] != torch.tensor(wrong)).all()):
            cause = "it is that of other samples, in another order"
        findings.append(
            Finding("seeds", f"the start noise of samples {shown(wrong)} is not that of their seeds: {cause}")
        )
    return findings


def first_of_paths(file: RolloutFile) -> Tensor:
    """[B] the sample whose seed drew a sample's start noise: itself, or the first on a shared path."""
    if file.nodes is None:
        return torch.arange(len(file.latents))
    nodes = file.nodes[:, 0].tolist()
    return torch.tensor([nodes.index(node) for node in nodes])


def unlike(got: Tensor, own: Tensor) -> str:
    """How two schedules differ: a shift that was left out, or came twice, is one factor of the odds at all levels."""
    inner = slice(1 if bool(own[0] >= 1) else 0, -1)
    odds = (got[inner] * (1 - own[inner])) / (own[inner] * (1 - got[inner]))
    listed = [", ".join(f"{level:.3g}" for level in levels[:4].tolist()) for levels in (got, own)]
    said = f"they are {listed[0]} ..., the pipeline's {listed[1]} ..."
    if odds.numel() > 1 and odds.isfinite().all() and float(odds.max() / odds.min()) < 1.01:
        return f"{said}: shifted once more by {float(odds.mean()):.3g}, or by another factor"
    return said


@dataclass(frozen=True, kw_only=True)
class Unexplained:
    """Recorded velocities at one step that the policy does not make of what the file says."""

    rows: Tensor
    """[N] the samples."""
    step: int
    recorded: Tensor
    """[N, ...]"""
    tolerance: float
    """Largest difference that is rounding."""

    def fit(self, velocity: Tensor) -> Tensor:
        """[N] bool: the samples that velocities [N, ...] explain."""
        return (velocity - self.recorded).flatten(1).abs().amax(1) <= self.tolerance


def check_velocities(replay: Replay, replayed: Tensor, tolerance: float, otherwise: str) -> list[Finding]:
    """Velocities that the policy does not make, with what does.

    Args:
        otherwise: the cause, where no guidance or prompt is.
    """
    assert replay.file.velocity is not None
    recorded = replay.file.velocity.float()
    largest = float(recorded.abs().max())
    error = (recorded - replayed).flatten(2).abs().amax(2) / max(largest, 1e-12)
    wrong = error > tolerance
    if not wrong.any():
        return []
    rows, step = wrong.any(1).nonzero()[:, 0], int(error.amax(0).argmax())
    unexplained = Unexplained(rows=rows, step=step, recorded=recorded[rows, step], tolerance=3 * tolerance * largest)
    steps = wrong.any(0).nonzero()[:, 0].tolist()
    said = f"up to {float(error.max()):.2g} from the replay, samples {shown(rows.tolist())}, steps {shown(steps)}"
    explanations = (explain(replay, unexplained) for explain in (of_start_weights, of_prompts, of_guidance))
    cause = next(filter(None, explanations), otherwise)
    return [Finding("velocity", f"{said}: {cause}")]


def of_start_weights(replay: Replay, wrong: Unexplained) -> str | None:
    """Are they those of the model without its adapter?"""
    if not replay.policy.lora:
        return None
    with replay.policy.reference():
        bare = replay.velocities(replay.stay(), wrong.rows, [wrong.step])[:, 0]
    return "the model without its adapter sampled" if wrong.fit(bare).all() else None


def of_prompts(replay: Replay, wrong: Unexplained) -> str | None:
    """Are some of them those of other prompts of the file, or of none?"""
    about = replay.file.about
    found: dict[int, str] = {}
    for text in [*list(dict.fromkeys(about.prompts))[:CANDIDATES], ""]:
        stay = replay.stay(prompts=[text] * len(about.prompts))
        fits = wrong.fit(replay.velocities(stay, wrong.rows, [wrong.step])[:, 0])
        found |= dict.fromkeys(wrong.rows[fits].tolist(), text)
    if not found:
        return None
    row, text = next(iter(found.items()))
    return f"samples {shown(sorted(found))} are of other prompts, {row} of {text[:60]!r}"


def of_guidance(replay: Replay, wrong: Unexplained) -> str | None:
    """Are they those of another guidance scale, on which velocities depend along a line?"""
    said = replay.file.about.guidance
    low, high = (
        replay.velocities(replay.stay(guidance=[scale + more for scale in said]), wrong.rows, [wrong.step])[:, 0]
        for more in (0, 2)
    )
    along = high - low
    share = float(((wrong.recorded - low) * along).sum() / along.square().sum().clamp(min=1e-12))
    if not wrong.fit(low + share * along).all():
        return None
    return f"guidance {said[0] + 2 * share:.3g} sampled, and the file says {said[0]:.3g}"


def reports(file: RolloutFile, replayed: Tensor) -> list[StepReport]:
    """The steps beside their replay, whose velocities are [B, T, ...]."""
    steps = steps_of(file, replayed)
    apart = (file.log_prob - steps.log_prob(file.about.log_prob)).abs()
    found = []
    for k, (sigma, scale) in enumerate(zip(file.sigmas.tolist(), steps.scale.tolist(), strict=False)):
        noisy = steps.std[:, k] > 0
        std = float(steps.std[noisy, k].mean()) if noisy.any() else 0.0
        report = StepReport(
            sigma=sigma,
            std=std,
            mean=0.0 if file.velocity is None else drift(file, replayed, k, std),
            scale=scale,
            log_prob=float(apart[:, k].mean()),
            largest=float(apart[:, k].max()),
        )
        found.append(report)
    return found


def drift(file: RolloutFile, replayed: Tensor, step: int, std: float) -> float:
    """Largest distance of a step's means by recorded and by replayed velocities, a root mean square over elements."""
    assert file.velocity is not None
    kernel = KERNELS[file.about.kernel]
    shape = (-1, *[1] * (replayed.dim() - 2))
    at, to = file.sigmas[step : step + 2].float()
    eta = file.eta[:, step].float().view(shape)
    own, other = (
        kernel(file.latents[:, step].float(), velocity[:, step].float(), at, to, eta)[0]
        for velocity in (file.velocity, replayed)
    )
    return float((own - other).flatten(1).square().mean(1).sqrt().max()) / (std or 1.0)
