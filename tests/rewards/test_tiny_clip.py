"""The shipped tiny preference model: small, safe to load, and as good as it says."""

import json

import numpy as np
from PIL import Image

from rewards.pairwise import as_judge
from rewards.shapes import Request, Thing, draw
from rewards.shapes.clip import TINY_CLIP, TinyCLIP
from rewards.shapes.grammar import COLOURS, SHAPES


def test_it_prefers_the_right_number_about_as_often_as_stated():
    rng = np.random.default_rng(11)
    things = [Thing(colour, shape) for colour in COLOURS for shape in SHAPES]
    right = [Request("counting", (things[i % 18],) * (2 + i % 3)) for i in range(216)]
    # one too many or one too few, which is harder than any other number, as the stated figure has it
    wrong = [
        Request("counting", (r.things[0],) * (len(r.things) + (-1 if i % 2 or len(r.things) == 4 else 1)))
        for i, r in enumerate(right)
    ]
    pictures = [[Image.fromarray(draw(request, rng)) for request in side] for side in (right, wrong)]
    judged = as_judge(TinyCLIP()).compare(*pictures, [r.prompt for r in right], [{}] * len(right))
    quality = json.loads((TINY_CLIP / "quality.json").read_text())
    stated = quality["prefers the right picture to one wrong in one thing"]["counting"]
    assert judged.value.mean() >= stated - 0.12


def test_files():
    files = [path for path in TINY_CLIP.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 2e6
    assert {path.suffix for path in files} <= {".json", ".safetensors"}
