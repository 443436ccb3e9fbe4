"""scripts/compare_recipes.py: every recipe that bears a paper's name is as published, or says why not."""

import importlib.util
import sys
from pathlib import Path

import pytest

from flowalign.config import load, recipe

SCRIPT = Path(__file__).parents[2] / "scripts" / "compare_recipes.py"
SPEC = importlib.util.spec_from_file_location("compare_recipes", SCRIPT)
script = sys.modules["compare_recipes"] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(script)
TABLE = script.published()
OWN = ("tiny_sd3", "tiny_sd3_64", "tiny_speller", "tiny_video", "tiny_emu3", "tiny_vlm", "qwen_vl", "accelerate")


def test_every_recipe_that_bears_a_papers_name_has_a_table() -> None:
    paths = recipe("").parent.glob("*/*.yaml")
    named = {f"{path.parent.name}/{path.stem}" for path in paths if path.parent.name not in OWN}
    assert named == TABLE["recipes"].keys() | TABLE["without"].keys()
    assert all(entry["code"] in TABLE["code"] for entry in TABLE["recipes"].values())


@pytest.fixture(scope="module")
def compared() -> dict[str, list]:
    return {name: script.compare(name, entry["settings"]) for name, entry in TABLE["recipes"].items()}


def test_every_recipe_is_as_published_or_says_why_not(compared: dict[str, list]) -> None:
    assert [line for name, rows in compared.items() for line in script.unexplained(name, rows)] == []


def test_the_length_of_texts_of_every_recipe_is_compared() -> None:
    """It comes with what a recipe extends, whose authors may have another. ReinFlow's robot reads no texts."""
    silent = [
        name
        for name, entry in TABLE["recipes"].items()
        if getattr(load(recipe(name)).model, "encode", None)
        and "model.encode.max_sequence_length" not in entry["settings"]
    ]
    assert silent == ["sd3/reinflow"]


def test_the_pages_have_the_tables(compared: dict[str, list]) -> None:
    pages = script.pages(TABLE, {name: compared[name] for name in sorted(compared)})
    assert {page for page in pages if page != script.PAGE} == set(script.PAGE.with_suffix("").iterdir())
    assert [page.name for page, text in pages.items() if page.read_text() != text] == []
    assert all(f"## {name}\n" in pages[script.PAGE.with_suffix("") / f"{name.split('/')[0]}.md"] for name in compared)


def test_a_difference_without_a_reason_and_a_reason_without_a_difference_are_named() -> None:
    theirs = TABLE["recipes"]["sd3/dance_grpo"]["settings"] | {
        "rollout.eta": [0.2, "somewhere:3"],
        "rollout.height": [512, "somewhere:4"],
    }
    found = script.unexplained("sd3/dance_grpo", script.compare("sd3/dance_grpo", theirs))
    assert found == [
        "sd3/dance_grpo: rollout.eta is 0.3, theirs 0.2 (somewhere:3)",
        "sd3/dance_grpo: says why rollout.height differs, and it does not",
    ]
