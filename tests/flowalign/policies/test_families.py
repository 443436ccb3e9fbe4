"""The table of models: what is registered is tested and documented."""

from pathlib import Path

import pytest

from flowalign.policies.families import Family
from flowalign.policies.tiny_pipelines import PIPELINES, build
from flowalign.registry import MODELS, resolve

DOCS = Path(__file__).parents[3] / "docs" / "models.md"


@pytest.fixture(scope="module")
def tested() -> set[str]:
    """The pipeline classes that the conformance suite has a tiny pipeline of."""
    return {type(build(name)).__name__ for name in PIPELINES}


@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_documented_and_conforms(name: str, tested: set[str]) -> None:
    family: type[Family] = resolve("models", name)
    assert family.pipelines and set(family.pipelines) <= tested
    rows = [line for line in DOCS.read_text().splitlines() if f"| `{name}` |" in line]
    assert len(rows) == 1 and all(f"`{pipeline}`" in rows[0] for pipeline in family.pipelines)
    # guidance that a class does not name itself is that of the table
    assert family.guidance.split(" in one call")[0].split(" a step")[0] in rows[0]
