"""The shipped tiny judge: small, safe to load, and as good as it says."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

from rewards.judges import JudgeReward, Local
from rewards.shapes import draw, heldout_requests, sample_requests


def test_it_is_as_accurate_as_stated(tiny_vlm):
    rng = np.random.default_rng(5)
    requests = sample_requests(heldout_requests(), 300, rng)
    # the next request is another one nearly always, and then the right answer is no
    asked = [request if i % 2 else requests[i - 1] for i, request in enumerate(requests)]
    images = [Image.fromarray(draw(request, rng)) for request in requests]
    judge = JudgeReward("shapes_show", Local(tiny_vlm, device="cpu", batch_size=64))
    values = judge(images, [request.prompt for request in asked], [{} for _ in asked]).value
    truths = [i % 2 == 1 or asked[i] in (requests[i], requests[i].twin) for i in range(len(asked))]
    right = np.mean([(value > 0.5) == truth for value, truth in zip(values.tolist(), truths)])
    stated = json.loads((Path(tiny_vlm) / "quality.json").read_text())["yes_no_accuracy"]
    assert right >= stated - 0.05  # these are easier questions than the stated ones


def test_files(tiny_vlm):
    files = [path for path in Path(tiny_vlm).rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 6e6
    assert {path.suffix for path in files} <= {".json", ".jinja", ".safetensors"}
