"""What can be set is shown as it is, by the command line, in docs/configuration.md and as a schema for editors."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from flowalign.app.cli.main import main
from flowalign.config import load, recipe
from flowalign.config.loader import recipes
from flowalign.config.reference import keys, markdown, schema
from flowalign.errors import ConfigError

DOCS = Path(__file__).parents[3] / "docs"


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as left:
        main(list(arguments))
    captured = capsys.readouterr()
    assert left.value.code == (2 if captured.err else 0)
    return captured.out or captured.err


def test_the_page_of_the_documentation_is_the_codes() -> None:
    assert (DOCS / "configuration.md").read_text() == markdown()


@pytest.mark.parametrize("text", [False, True])
def test_every_key_is_there_with_its_default(text: bool) -> None:
    config = load("tiny_lm/grpo" if text else "tiny_sd3/flow_grpo")
    listed = {key.path: key for key in keys(text)}
    assert listed["training.optimizer.learning_rate"].default == 3e-4
    assert listed["training.group_size"].default is PydanticUndefined

    def places(section: BaseModel, above: str) -> set[str]:
        found = set()
        for name, value in section:
            inner = isinstance(value, BaseModel) and f"{above}{name}" not in listed
            found |= places(value, f"{above}{name}.") if inner else {above + name}
        return found

    assert places(config, "") - listed.keys() == set()


@pytest.mark.parametrize("text", [False, True])
def test_kinds_are_words_and_meanings_are_phrases(text: bool) -> None:
    for key in keys(text):
        assert not set("<>.") & set(key.kind), key
        assert not key.meaning or (not key.meaning[0].islower() and key.meaning.endswith(".")), key


def test_a_section_is_shown_and_a_wrong_one_refused(capsys: pytest.CaptureFixture[str]) -> None:
    told = shown(capsys, "config", "training.optimizer")
    assert "training.optimizer.learning_rate: 0.0003    # number" in told
    assert len(told.splitlines()) == 8
    assert "did you mean 'rollout'?" in shown(capsys, "config", "rolout")
    assert "max_new_tokens" in shown(capsys, "config", "rollout", "--text")


def test_one_of_a_list_is_shown_with_its_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert "strict_weight: float" in shown(capsys, "list", "rewards", "shapes")
    assert "kl_weight: 0.0" in shown(capsys, "list", "algorithms", "flow_grpo")
    assert "did you mean 'clip_score'?" in shown(capsys, "list", "rewards", "clip_scor")


def test_the_schema_knows_sections_and_meanings() -> None:
    made: Any = json.loads(json.dumps(schema()))
    pictures, texts = made["anyOf"]
    assert "extends" in pictures["properties"] and "environment" in texts["properties"]
    sampling = pictures["$defs"]["RolloutSampling"]["properties"]
    assert sampling["guidance"]["description"].startswith("Scale of classifier-free guidance, 1 samples without")
    rollout = pictures["properties"]["rollout"]
    # pydantic before 2.9 writes a reference with a default as the only one of several
    (reference,) = rollout.get("allOf", [rollout])
    assert reference["$ref"] == "#/anyOf/0/$defs/RolloutSampling"


def test_recipes_go_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert load("tiny_sd3/demo") == load(recipe("tiny_sd3/demo"))
    assert load("tiny_sd3/demo").name == "tiny_sd3-demo-seed0"
    assert {"sd3/flow_grpo", "tiny_lm/demo"} <= recipes().keys() and "accelerate/fsdp2" not in recipes()
    assert "What `make demo` trains" in shown(capsys, "recipes")


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("learning_rate=1", "did you mean training.optimizer.learning_rate?"),
        ("rollout.learning_rate=1", "did you mean training.optimizer.learning_rate?"),
        ("guidance=2", "did you mean rollout.guidance or evaluation.guidance?"),
        ("training.output=runs", "did you mean output, at the top level?"),
        ("training.stepz=3", "unknown key 'stepz'"),
        ("rewards.3.weight=1", "'3' is no entry of a list of 1; count from 0"),
        ("rewards.first.weight=1", "'first' is no entry of a list of 1"),
    ],
)
def test_a_key_in_the_wrong_place_is_found(override: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load("tiny_sd3/demo", [override])
    assert hint in str(caught.value)


def test_overrides_reach_into_lists() -> None:
    changed = load("tiny_sd3/demo", ["rewards.0.weight=3", "rewards.0.strict_weight=0.1"]).rewards
    assert changed[0].weight == 3 and changed[0].settings["strict_weight"] == 0.1
    assert load("tiny_sd3/demo", ["rollout.sigmas.0=0.9"]).rollout.sigmas[0] == 0.9
