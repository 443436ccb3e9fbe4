"""The lowest versions that pyproject.toml allows, as constraints for pip."""

import runpy
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_dependency_has_a_floor() -> None:
    lowest = runpy.run_path(str(ROOT / "scripts" / "lowest_versions.py"))["lowest"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    made = {entry.split("==")[0]: entry.split("==")[1] for entry in lowest(project)}
    # the device of a pipeline is that of its modules from here on, wherever its first one is
    assert made["diffusers"] == "0.41"
    named = [*project["dependencies"], *(own for group in project["optional-dependencies"].values() for own in group)]
    assert len({entry.split(">=")[0].split("[")[0] for entry in named} - {"flowalign"}) == len(made)
