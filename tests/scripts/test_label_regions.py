"""scripts/label_regions.py: what `srum` learns from, by the checker."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flowalign.config import load, recipe
from flowalign.data import Judged
from flowalign.errors import ConfigError
from rewards.shapes.draw import draw
from rewards.shapes.grammar import parse
from rewards.shapes.reward import ShapesReward

SCRIPT = Path(__file__).parents[2] / "scripts" / "label_regions.py"
SPEC = importlib.util.spec_from_file_location("label_regions", SCRIPT)
assert SPEC is not None and SPEC.loader is not None
script = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(script)


def test_objects_that_were_asked_for_are_worth_one_and_others_minus_one() -> None:
    picture = draw(parse("three red circles"), np.random.default_rng(0))
    (regions,) = ShapesReward().regions([Image.fromarray(picture)], ["two red circles"], [{}])
    assert sorted(region.reward for region in regions) == [-1, 1, 1]
    ink = np.abs(picture.astype(int) - picture[0, 0]).sum(-1) > 40
    for region in regions:
        left, top, right, bottom = (round(32 * side) for side in region.box)
        ink[top:bottom, left:right] = False
    # all that is drawn lies in a box, but for the blurred rims
    assert ink.sum() < 60


def test_pictures_are_labelled(tmp_path: Path) -> None:
    config = load(recipe("tiny_sd3/flow_grpo"), ["evaluation.batch_size=2"])
    judged = Judged.read(str(script.label_regions(config, 3, tmp_path, background=0.1)))
    assert len(judged) == 3 and len({record["target"] for record in judged.metadata}) == 3
    assert all(record["background"] == 0.1 for record in judged.metadata)
    with pytest.raises(ConfigError, match="'jpeg_size' does not say where it is earned"):
        script.label_regions(load(recipe("tiny_sd3/flow_grpo"), ["rewards=[{name: jpeg_size}]"]), 1, tmp_path)
