"""The chain of synthesis: units of a prompt, and pictures to which a model that edits adds them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image as pictures
from PIL.Image import Image

import flowalign as fa
from flowalign.errors import ConfigError
from flowalign.planning import tiny_pipelines
from flowalign.policies.diffusion import DiffusersPolicy
from flowalign.search import chain
from flowalign.search.chain import Chain, split
from rewards import Scores
from rewards.shapes.reward import ShapesReward

PROMPT = "a red circle and a blue square"
OPTIONS = tiny_pipelines.PIPELINES["flux2_klein"].encode
SIZE: dict[str, Any] = {"height": 16, "width": 16, "steps": 2, "progress": False}


def test_rules_split_a_prompt_into_units_with_the_text_up_to_each() -> None:
    assert split("a quiet lake, a boat with a red sail and two ducks.") == [
        ("a quiet lake", "a quiet lake"),
        ("a boat", "a quiet lake, a boat"),
        ("a red sail", "a quiet lake, a boat with a red sail"),
        ("two ducks", "a quiet lake, a boat with a red sail and two ducks."),
    ]
    assert split("a cat; and a dog") == [("a cat", "a cat"), ("a dog", "a cat; and a dog")]
    assert split("a sandwich") == [("a sandwich", "a sandwich")]


def test_a_language_model_may_split_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Model:
        def sample(self, prompts: list[str], seeds: list[int], **_: Any) -> Any:
            assert PROMPT in prompts[0]
            return "rollout"

        def decode(self, rollout: Any) -> list[str]:
            return ["1. a blue square\n\n2. a red circle"]

    monkeypatch.setattr(chain, "_language_model", lambda path: Model())
    units = Chain(splitter="some/model").units(PROMPT, 0)
    assert units == [("a blue square", "a blue square"), ("a red circle", PROMPT)]


class Texts:
    """How light a picture is; remembers what it was asked."""

    name = "texts"

    def __init__(self) -> None:
        self.asked: list[tuple[str, list[bytes]]] = []

    def __call__(self, samples: list[Image], prompts: list[str], metadata: Any) -> Scores:
        self.asked.append((prompts[0], [sample.tobytes() for sample in samples]))
        return Scores(torch.tensor([sample.convert("L").resize((1, 1)).getpixel((0, 0)) / 255 for sample in samples]))


def test_each_unit_is_added_to_the_best_picture_of_those_before(tmp_path: Path) -> None:
    tiny_pipelines.build("flux_kontext").save_pretrained(tmp_path / "editor")
    texts = ["a red circle", "a red circle, a blue square", "a red circle, a blue square and a dog"]
    policy, reward, seen = fa.load(tiny_pipelines.build("flux")), Texts(), {}
    plain = DiffusersPolicy._call

    def recorded(self: Any, prompts: Any, source: Any, *rest: Any) -> None:
        if source is not None:
            seen[prompts[0][0]] = pictures.open(source.images[0]).tobytes()
        plain(self, prompts, source, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DiffusersPolicy, "_call", recorded)
        [found] = policy.search(
            texts[-1:], "chain", reward, "samples=9", settings={"editor": str(tmp_path / "editor")}, **SIZE
        )
    # 3 candidates of each of 3 units, 2 forwards each
    assert found.forwards == 18 and [node.step for node in found.nodes] == [2, 2, 2, 4, 4, 4, 6, 6, 6]
    assert [found.nodes[n].step for n in found.path()] == [2, 4, 6]
    assert sum(node.kept for node in found.nodes) == 5 and all(found.nodes[n].kept for n in found.path())
    # the whole so far and each unit so far choose; the last are judged by the prompt alone
    assert [text for text, _ in reward.asked] == [texts[0], texts[0], texts[1], texts[0], "a blue square", texts[2]]
    shown = dict(reward.asked[2::-1])
    for k, unit in enumerate(["a blue square", "a dog"]):
        scores = [node.score for node in found.nodes[3 * k : 3 * k + 3]]
        best = shown[texts[k]][scores.index(max(scores))]
        assert seen[f"Add {unit} to the picture, and keep the rest as it is."] == best


def test_a_model_that_edits_too_is_its_own_editor() -> None:
    policy = fa.load(tiny_pipelines.build("flux2_klein"), encode_options=OPTIONS)
    # the smallest that it edits
    given: dict[str, Any] = SIZE | {"height": 64, "width": 64}
    [found] = policy.search([PROMPT], "chain", ShapesReward(), "samples=100", settings={"candidates": 2}, **given)
    assert found.forwards == 8 and [node.parent is None for node in found.nodes] == [True, True, False, False]
    # one unit is plain best of n
    one, other = (
        policy.search(["a red circle"], m, ShapesReward(), "samples=2", **given)[0] for m in ("chain", "best_of_n")
    )
    assert one.record()["nodes"] == other.record()["nodes"] and one.sample.tobytes() == other.sample.tobytes()


def test_what_cannot_be_chained_says_so() -> None:
    policy = fa.load(tiny_pipelines.build("flux"))
    with pytest.raises(ConfigError, match="FluxPipeline does not take; chain.editor names"):
        policy.search([PROMPT], "chain", ShapesReward(), **SIZE)
    with pytest.raises(ConfigError, match="StableDiffusion3Pipeline does not take; chain.editor names"):
        policy.search([PROMPT], "chain", ShapesReward(), settings={"editor": "tiny_sd3"}, **SIZE)
    with pytest.raises(ConfigError, match="names neither"):
        policy.search([PROMPT], "chain", ShapesReward(), settings={"instruction": "Draw on."}, **SIZE)
