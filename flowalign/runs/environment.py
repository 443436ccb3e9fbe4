"""Record of a run's environment: its configuration, the versions of packages, and the machine."""

import os
import platform
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate import Accelerator

from flowalign.runs.checkpoint import FORMAT
from flowalign.runs.files import write_atomically
from flowalign.runs.version import __version__

PACKAGES = ("flowalign", "torch", "diffusers", "transformers", "accelerate", "peft", "numpy")


def record_environment(folder: Path, config: str, accelerator: Accelerator, iteration: int = 0) -> None:
    """Write config.yaml, which is the text `config`, and versions.yaml into a run's folder.

    Args:
        iteration: iteration from which the run continues. If the configuration has changed, the earlier one is kept as
            config-until-000010.yaml.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, before = folder / "config.yaml", folder / f"config-until-{iteration:06d}.yaml"
    if iteration and path.is_file() and path.read_text(encoding="utf-8") != config and not before.exists():
        os.replace(path, before)
    write_atomically(path, config)
    versions: dict[str, Any] = {"format": FORMAT} | installed(PACKAGES)
    versions |= {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name() if accelerator.device.type == "cuda" else accelerator.device.type,
        "processes": accelerator.num_processes,
    }
    write_atomically(folder / "versions.yaml", yaml.safe_dump(versions, sort_keys=False))


def installed(packages: Iterable[str]) -> dict[str, str]:
    """Versions of packages; flowalign's own is that of its code, since a checkout runs without being installed."""
    return {name: __version__ if name == "flowalign" else version(name) for name in packages}


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as 'section.key', for trackers that take plain values only."""
    pairs: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            pairs |= flat(value, f"{prefix}{key}.")
        else:
            pairs[prefix + key] = value if isinstance(value, int | float | str | bool) else str(value)
    return pairs
