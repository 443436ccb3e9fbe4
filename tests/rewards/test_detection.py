"""GenEval's rules by hand, Flow-GRPO's by its authors' own function, and a real detector of transformers.

flow_grpo_geneval.jsonl: random detections for prompts of all six tasks, none to 20 objects of a class, and what
`evaluate_reward` of reward_server/gen_eval.py in github.com/yifan123/reward-server, 92ac29f, pays for them, with
`color_classification` replaced by `stand_in` below.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    DetrImageProcessor,
    RTDetrConfig,
    RTDetrForObjectDetection,
    RTDetrImageProcessor,
    RTDetrResNetConfig,
    YolosConfig,
    YolosForObjectDetection,
)

from rewards import RewardError, score
from rewards.detection import DetectedObject, Detection, geneval_name, graded, requirements, stands

GREY = Image.new("RGB", (32, 32), (128, 128, 128))
NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8))


def box(left, top, size=10.0, label="cat"):
    return DetectedObject(label, 0.9, (left, top, left + size, top + size))


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
    many = (2 - count + (5 - count) / 9) / 2
    assert scores.parts["graded"].tolist() == pytest.approx([1.0, count / (count + 1), many])
    with pytest.raises(RewardError, match="have no 'include'"):
        score(detector, [NOISE], ["p"], [{}])


def test_detection_requirements(detector):
    objects = [box(0, 0), box(30, 0, label="dog"), box(60, 0)]
    include = [{"class": "cat", "count": 1}, {"class": "dog", "count": 1, "position": ["right of", 0]}]
    ask = lambda **record: detector.judge(GREY, "p", record, objects)[0]  # noqa: E731
    assert ask(include=include) == [True, True, True]
    left = [include[0], include[1] | {"position": ["left of", 0]}]
    assert ask(include=left) == [True, True, False]  # the surest cat only
    assert ask(include=[{"class": "cat", "count": 2}], exclude=[{"class": "cat", "count": 3}]) == [True, True]
    assert ask(include=[{"class": "cat", "count": 1}], exclude=[{"class": "dog", "count": 1}]) == [True, False]
    assert ask(tag="counting", include=[{"class": "cat", "count": 1}]) == [False]
    with pytest.raises(RewardError, match="set colour_model"):
        ask(include=[{"class": "cat", "count": 1, "color": "red"}])


def stand_in(item):
    """A colour that follows from the box, in the place of CLIP's."""
    return ("red", "orange")[int(sum(item.box)) % 2]


def test_the_graded_reward_is_what_flow_grpo_pays():
    lines = (Path(__file__).parent / "flow_grpo_geneval.jsonl").read_text().splitlines()
    cases = [json.loads(line) for line in lines]
    assert len(cases) == 240 and sum(case["reward"] < 0 for case in cases) > 40
    for case in cases:
        found = [DetectedObject(geneval_name(name), score, tuple(box)) for name, box, score in case["objects"]]
        assert graded(case["metadata"], found, stand_in) == pytest.approx(case["reward"], abs=1e-6), case


def test_surplus_objects_pay_in_the_strict_reward_and_cost_in_the_graded_one():
    """The cases in which the two differ most: asked one and found three, one of two, three of four."""
    one, four = ({"include": [{"class": "dog", "count": count}]} for count in (1, 4))
    both = {"include": [{"class": name, "count": 1} for name in ("dog", "cat")]}
    dogs = [box(0, 0, label="dog")] * 3
    assert all(requirements(one, dogs, stand_in)) and graded(one, dogs, stand_in) == -1
    assert not all(requirements(both, dogs[:1], stand_in)) and graded(both, dogs[:1], stand_in) == 0.5
    assert not all(requirements(four, dogs, stand_in)) and graded(four, dogs, stand_in) == 0.75


def test_thresholds_are_those_of_the_detector(tmp_path, detector):
    folder = str(tmp_path)
    backbone = RTDetrResNetConfig(embedding_size=8, hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1], layer_type="basic")
    size = {"d_model": 16, "encoder_hidden_dim": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "num_queries": 5}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_layers": 1}
    config = RTDetrConfig(
        backbone_config=backbone,
        encoder_in_channels=[8, 8, 8],
        decoder_in_channels=[16, 16, 16],
        num_labels=2,
        **size,
        **heads,
    )
    RTDetrForObjectDetection(config).save_pretrained(folder)
    RTDetrImageProcessor().save_pretrained(folder)
    usual = Detection(folder, device="cpu")
    assert (usual.threshold, usual.counting_threshold) == (0.3, 0.6)
    assert Detection(folder, counting_threshold=0.8, device="cpu").counting_threshold == 0.8
    with pytest.raises(ValueError, match="no thresholds for a yolos; set threshold"):
        Detection(detector.network.config._name_or_path, device="cpu")
    with pytest.raises(ValueError, match="graded or has a strict_weight"):
        Detection(folder, strict_weight=0.5, graded=True, device="cpu")
