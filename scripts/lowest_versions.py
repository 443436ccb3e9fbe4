"""Print constraints for pip: the lowest version of each dependency that pyproject.toml allows (`make lowest`)."""

import re
import tomllib
from pathlib import Path


def lowest(project: dict) -> list[str]:
    """`name==version` of every dependency, those of the extras included."""
    named = [*project["dependencies"], *(own for group in project["optional-dependencies"].values() for own in group)]
    found = [re.fullmatch(r"([\w.-]+)(?:\[.*\])?>=([\w.]+)", entry) for entry in named]
    return sorted({f"{own[1]}=={own[2]}" for own in found if own})


if __name__ == "__main__":
    described = Path(__file__).parents[1] / "pyproject.toml"
    print("\n".join(lowest(tomllib.loads(described.read_text(encoding="utf-8"))["project"])))
