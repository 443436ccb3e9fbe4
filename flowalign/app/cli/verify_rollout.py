"""`flowalign verify-rollout`: is a rollout, whoever sampled it, what training takes it for?"""

import contextlib
import math
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from flowalign.app.cli import sampling as options
from flowalign.app.cli.modules import find_beside, opened
from flowalign.errors import ConfigError, FlowalignError

if TYPE_CHECKING:
    from flowalign.config import Config
    from flowalign.policies.diffusion import DiffusersPolicy
    from flowalign.rollouts.verify import StepReport

LARGEST_ANSWER = 2**32
"""Bytes that are taken from an address, at most: 4 GiB."""
TIMEOUT = 60
"""Seconds that an address may say nothing."""


def verify_rollout(
    file: Annotated[
        str, typer.Argument(metavar="FILE|URL", help="A rollout (docs/rollouts.md), as a run writes them.")
    ],
    model: Annotated[
        str, typer.Option(help="What sampled it: a run's folder, or a model: folder, hub name, 'tiny_sd3'.")
    ],
    lora: options.Lora = None,
    config: Annotated[
        Path | None, typer.Option(help="What was asked for: a YAML configuration. Default the run's own, or none.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples of a network call.")] = 16,
    dtype: options.Dtype = "float32",
    trust: options.Trust = False,
) -> None:
    """Replay a rollout and name every fault with its cause, a line each; exit code 1 where there are faults."""
    from flowalign.config import Config
    from flowalign.policies.diffusion import DiffusersPolicy
    from flowalign.rollouts.contract import read
    from flowalign.rollouts.verify import verify

    with local(file) as path:
        rollout = read(path)
    policy, settings = loaded(model, lora, config, dtype, trust, rollout.about.iteration)
    if not isinstance(policy, DiffusersPolicy) or not isinstance(settings, Config | None):
        raise ConfigError(f"--model: {model} is a language model, and rollouts of pictures and videos are verified")
    verdict = verify(policy, rollout, settings, batch_size)
    for finding in verdict.findings:
        print(finding)
    if verdict.steps:
        print_steps(verdict.steps, None if settings is None else clip_range(settings))
    samples, steps = rollout.log_prob.shape
    print(f"{samples} samples of {steps} steps by {rollout.about.kernel}: {len(verdict.findings)} findings")
    if verdict.findings:
        raise typer.Exit(1)


@contextlib.contextmanager
def local(file: str) -> Iterator[Path]:
    """Context in which there is a file: the one that is named, or what an address answers.

    Raises:
        ConfigError: the address gives none, or one that is too large.
    """
    if not re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", file):
        if not Path(file).is_file():
            raise ConfigError(f"there is no file '{file}'")
        yield Path(file)
        return
    import urllib.request

    if not re.match(r"https?://", file):
        raise ConfigError(f"{file}: an address begins with http:// or https://")
    with tempfile.TemporaryDirectory() as folder:
        path, size = Path(folder) / "rollout.safetensors", 0
        try:
            with urllib.request.urlopen(file, timeout=TIMEOUT) as answer, open(path, "wb") as written:
                while chunk := answer.read(2**20):
                    size += written.write(chunk)
                    if size > LARGEST_ANSWER:
                        raise ConfigError(f"{file} answers more than {LARGEST_ANSWER:,} bytes; load it yourself first")
        except (OSError, ValueError) as error:
            raise FlowalignError(f"{file} gave no rollout: {error}") from error
        yield path


def loaded(
    model: str, lora: Path | None, config: Path | None, dtype: str, trust: bool, iteration: int
) -> "tuple[DiffusersPolicy | Any, Config | Any | None]":
    """The policy that a rollout is replayed with, and what was asked for.

    Args:
        iteration: of a run the weights that its checkpoint of this iteration has, where it has one.
    """
    from flowalign.app.loading import load_for_sampling
    from flowalign.config import load
    from flowalign.policies.base import best_device, fitting_lora
    from flowalign.training.building import build_policy

    run = Path(model)
    is_run = (run / "config.yaml").is_file()
    if config is not None:
        find_beside(config)
        settings = load(config)
        if not is_run:
            settings.model.path, settings.model.dtype = model, dtype
            policy = build_policy(settings, best_device())
            if lora is not None:
                with fitting_lora("--lora", lora):
                    policy.load(lora)
            return policy, settings
    with opened(model, trust, ("model", "algorithm", "rollout", "data")):
        if is_run and config is None:
            settings = load(run / "config.yaml")
        saved, weights = run / "checkpoints" / f"checkpoint-{iteration:06d}", lora
        if is_run and lora is None and settings.model.lora is not None:
            weights = saved if saved.is_dir() else None
            if weights is None and iteration > 0:
                raise ConfigError(
                    f"{run} has no checkpoint of iteration {iteration}, whose weights sampled this; --lora names a "
                    "folder with them, and training.checkpoint_every and keep_checkpoints let more of them stay"
                )
        policy, _ = load_for_sampling(model, weights, dtype, trained=iteration > 0 or not is_run)
    return policy, settings if is_run else None


def clip_range(config: "Config") -> float | None:
    """The clip range of a method's ratios, where its configuration or the method's own default names one."""
    loss = getattr(config.build_algorithm().settings, "loss", None)
    value = None if loss is None else loss.settings.get("clip_range")
    return float(value) if value else None


def print_steps(steps: "list[StepReport]", clip: float | None) -> None:
    """Print a table of the steps beside their replay.

    Args:
        clip: the clip range of the method, to compare differences of log-probabilities with.
    """
    title = "the rollout beside its replay, step by step"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    headings = ["step", "sigma", "std", "mean off by", "noise size", "log-prob off by", "largest"]
    for heading in [*headings, *([f"of clip {clip:g}"] if clip else [])]:
        table.add_column(heading, justify="right")
    for number, step in enumerate(steps):
        size = "" if math.isnan(step.scale) else f"{step.scale:.4f}"
        std = f"{step.std:.3g}" if step.std else ""
        row = [
            str(number),
            f"{step.sigma:.4f}",
            std,
            f"{step.mean:.1e}",
            size,
            f"{step.log_prob:.1e}",
            f"{step.largest:.1e}",
        ]
        table.add_row(*row, *([f"{step.largest / clip:.2%}"] if clip else []))
    Console().print(table)
