"""`flowalign env`: versions and settings for the report of a problem."""

import platform
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from flowalign.runs.version import __version__

PACKAGES = (
    *("torch", "torchvision", "diffusers", "transformers", "accelerate", "peft", "open-clip-torch"),
    *("xformers", "bitsandbytes", "vllm", "ray", "trl", "numpy", "pydantic"),
)


def env(
    run: Annotated[Path | None, typer.Argument(metavar="[RUN]", help="A run's folder: its configuration too.")] = None,
) -> None:
    """Print versions and devices, and a run's configuration without its secrets, for a report of a problem."""
    import torch
    import yaml

    versions = {"flowalign": __version__}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    cuda = range(torch.cuda.device_count())
    devices = [torch.cuda.get_device_name(number) for number in cuda] or ["no GPU that torch sees"]
    machine = {"python": platform.python_version(), "platform": platform.platform(), "cuda": torch.version.cuda}
    print(yaml.safe_dump({"versions": versions, "devices": devices} | machine, sort_keys=False), end="")
    if run is not None:
        from flowalign.errors import hide
        from flowalign.runs.reading import read_yaml

        print(hide(yaml.safe_dump({"config": read_yaml(run / "config.yaml")}, sort_keys=False)), end="")
