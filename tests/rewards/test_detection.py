"""GenEval's rules by hand, and a real detector of transformers."""

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import DetrImageProcessor, YolosConfig, YolosForObjectDetection

from rewards import RewardError, score
from rewards.detection import Detection, Found, stands

GREY = Image.new("RGB", (32, 32), (128, 128, 128))
NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8))


def box(left, top, size=10.0, label="cat"):
    return Found(label, 0.9, (left, top, left + size, top + size))


def test_places_by_genevals_rule():
    # offset (-30, 0); a tenth of both sizes is 2, so -28 / 30 along x
    assert stands("left of", box(0, 0), box(30, 0)) and stands("right of", box(30, 0), box(0, 0))
    assert stands("above", box(0, 0), box(0, 30)) and stands("below", box(0, 30), box(0, 0))
    assert not stands("left of", box(0, 0), box(2, 0))  # too near
    assert not stands("left of", box(0, 0), box(10, 30))  # mainly above
    assert stands("left of", box(0, 0), box(30, 30)) and stands("above", box(0, 0), box(30, 30))


@pytest.fixture(scope="module")
def detector(tmp_path_factory):
    """A real detector of transformers with random weights, which sees something everywhere."""
    folder = tmp_path_factory.mktemp("detector")
    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = YolosConfig(**size, image_size=[32, 32], patch_size=8, num_detection_tokens=5, num_labels=2)
    config.id2label, config.label2id = {0: "cat", 1: "dog"}, {"cat": 0, "dog": 1}
    YolosForObjectDetection(config).save_pretrained(folder)
    DetrImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    return Detection(str(folder), threshold=0.0, counting_threshold=0.0, strict_weight=0.5, device="cpu")


def test_detection_gives_what_the_model_gives(detector):
    (found,) = detector.detect([NOISE])
    inputs = detector.processor(images=[NOISE], return_tensors="pt")
    with torch.no_grad():
        output = detector.network(**inputs)
    probability = output.logits.softmax(dim=-1)[0, :, :-1].max(dim=-1)
    assert sorted(item.score for item in found) == pytest.approx(sorted(probability.values.tolist()), rel=1e-5)
    assert all(0 < item.score <= 1 and item.label in ("cat", "dog") for item in found)
    count = sum(item.label == found[0].label for item in found)
    other = {"cat": "dog", "dog": "cat"}[found[0].label]
    record = {"tag": "counting", "include": [{"class": found[0].label, "count": count}]}
    wrong = {"tag": "counting", "include": [{"class": found[0].label, "count": count + 1}]}
    mixed = {"include": [{"class": found[0].label, "count": 1}, {"class": other, "count": 9}]}
    scores = score(detector, [NOISE] * 3, ["p"] * 3, [record, wrong, mixed])
    assert scores.value.tolist() == [1.0, 0.0, 0.25] and scores.parts["soft"].tolist() == [1.0, 0.0, 0.5]
    with pytest.raises(RewardError, match="have no 'include'"):
        score(detector, [NOISE], ["p"], [{}])


def test_detection_requirements(detector):
    objects = [box(0, 0), box(30, 0, label="dog"), box(60, 0)]
    include = [{"class": "cat", "count": 1}, {"class": "dog", "count": 1, "position": ["right of", 0]}]
    ask = lambda **record: detector.requirements(GREY, "p", record, objects)  # noqa: E731
    assert ask(include=include) == [True, True, True]
    left = [include[0], include[1] | {"position": ["left of", 0]}]
    assert ask(include=left) == [True, True, False]  # the surest cat only
    assert ask(include=[{"class": "cat", "count": 2}], exclude=[{"class": "cat", "count": 3}]) == [True, True]
    assert ask(include=[{"class": "cat", "count": 1}], exclude=[{"class": "dog", "count": 1}]) == [True, False]
    assert ask(tag="counting", include=[{"class": "cat", "count": 1}]) == [False]
    with pytest.raises(RewardError, match="set colour_model"):
        ask(include=[{"class": "cat", "count": 1, "color": "red"}])
