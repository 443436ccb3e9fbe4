"""scripts/draw_targets.py: drawings that meet their prompts."""

import importlib.util
from pathlib import Path

from PIL import Image

from flowalign.config import load, recipe
from flowalign.data import Prompts, Targets
from rewards.shapes.checker import check

SCRIPT = Path(__file__).parents[2] / "scripts" / "draw_targets.py"
SPEC = importlib.util.spec_from_file_location("draw_targets", SCRIPT)
assert SPEC is not None and SPEC.loader is not None
script = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(script)


def test_drawings_meet_their_prompts(tmp_path: Path) -> None:
    prompts = Prompts.of(load(recipe("tiny_sd3/flow_grpo"), []).data)
    targets = Targets.read(str(script.draw_targets(prompts, 6, tmp_path)))
    assert len(set(targets.texts)) == 6 and set(targets.texts) <= set(prompts.texts)
    for text, record in zip(targets.texts, targets.metadata, strict=True):
        assert check(Image.open(record["target"]), text).strict
