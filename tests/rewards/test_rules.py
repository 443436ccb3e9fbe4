"""Rewards by rule, against values worked out by hand and against the real library or model."""

import io

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont

from rewards import RewardError, score
from rewards.rules import (
    OCR,
    STATISTICS,
    GroupDiversity,
    ImageStatistic,
    JPEGSize,
    containment,
    edit_distance,
    grid,
    image_statistics,
    similarity,
    wanted_text,
)

GREY, RED = Image.new("RGB", (32, 32), (128, 128, 128)), Image.new("RGB", (32, 32), (255, 0, 0))
NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8))
CHECKS = Image.fromarray(np.kron(np.indices((8, 8)).sum(0) % 2, np.full((4, 4), 255)).astype(np.uint8)).convert("RGB")


@pytest.mark.parametrize(
    ("first", "second", "distance"),
    [("", "", 0), ("abc", "", 3), ("kitten", "sitting", 3), ("flaw", "lawn", 2), ("same", "same", 0), ("ab", "ba", 2)],
)
def test_edit_distance(first, second, distance):
    assert edit_distance(first, second) == edit_distance(second, first) == distance


def test_similarity_is_in_the_unit_interval_and_punishes_what_was_not_asked_for():
    assert similarity("hello", "hello") == 1 and similarity("", "hello") == 0 and similarity("", "") == 1
    assert similarity("hello hello", "hello") < 0.5 and similarity("xyz", "hello") == 0


def test_containment_is_what_flow_grpo_pays():
    """What `OcrScorer` of yifan123/flow_grpo 9745241 gives where its PaddleOCR reads the first text."""
    paid = {
        ("open 24 hours", "open"): 1.0,
        ("o p e n", "open"): 1.0,
        ("open", "open 24 hours"): 4 / 11,
        ("opem", "open"): 0.75,
        ("a wall full of other words", "open"): 0.0,
        ("", "open"): 0.0,
        ("stop signs", "top sign"): 1.0,
        ("hello wrld", "hello world"): 0.9,
    }
    assert {pair: containment(*pair) for pair in paid} == pytest.approx(paid)


@pytest.mark.parametrize(
    ("prompt", "record", "text"),
    [
        ('a sign that says "Open"', {}, "Open"),
        ("a sign that says “Open late”", {}, "Open late"),
        ("a cat's sign that says 'Don't'", {}, "Don't"),
        ('"Fish" and "Chips"', {}, "Fish Chips"),
        ('a "wrong" sign', {"text": "right"}, "right"),
    ],
)
def test_wanted_text(prompt, record, text):
    assert wanted_text(prompt, record) == text


def test_a_prompt_without_text_is_named():
    with pytest.raises(RewardError, match="'a plain sign' quotes no text"):
        wanted_text("a plain sign", {})


def test_ocr_reads_real_pictures(monkeypatch):
    reader = OCR()
    picture = Image.new("RGB", (480, 160), "white")
    ImageDraw.Draw(picture).text((40, 40), "Hello World", fill="black", font=ImageFont.load_default(60))
    prompts = ['a sign "hello world"', 'a sign "Hello Word"', 'a sign "Bonjour"', 'a sign "Hello"']
    blank = Image.new("RGB", (480, 160), "white")
    assert (reader.read(picture), reader.read(blank)) == ("Hello World", "")
    # which takes two seconds each time
    monkeypatch.setattr("rapidocr.RapidOCR", lambda **_: None)
    monkeypatch.setattr(OCR, "read", lambda _, image: "Hello World" if image == picture else "")
    images = [picture, picture, picture, blank]
    scores = score(reader, images, prompts, [{}] * 4)
    assert scores.parts["exact"].tolist() == [1, 0, 0, 0]
    torch.testing.assert_close(scores.value[:2], torch.tensor([1.0, 1 - 1 / 11]))
    assert scores.value[2] < 0.4 and scores.value[3] == 0
    longer = score(OCR("containment"), images[:1], ['a sign "hello"'], [{}])
    assert longer.value.tolist() == [1] and longer.parts["similarity"].item() == pytest.approx(5 / 11)
    assert score(OCR("exact", case_sensitive=True), images[:1], prompts[:1], [{}]).value.tolist() == [0]


def test_ocr_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "rapidocr", None)
    with pytest.raises(ValueError, match=r"pip install 'flowalign\[ocr\]'"):
        OCR()


def test_jpeg_size_is_that_of_the_file():
    file = io.BytesIO()
    NOISE.save(file, "JPEG", quality=80)
    small = score(JPEGSize(80), [NOISE, GREY], ["", ""], [{}, {}]).value
    large = score(JPEGSize(80, prefer="large"), [NOISE, GREY], ["", ""], [{}, {}]).value
    assert small[0].item() == pytest.approx(-len(file.getvalue()) / 1000) and small[1] > small[0]
    torch.testing.assert_close(small, -large)


def test_image_statistics_of_pictures_known_by_hand():
    grey, red, noise, checks = (image_statistics(image) for image in (GREY, RED, NOISE, CHECKS))
    assert grey == {
        "brightness": pytest.approx(128 / 255),
        "saturation": 0,
        "colour_entropy": 0,
        "edge_density": 0,
        "sharpness": pytest.approx(0, abs=1e-9),
        "grid": 0,
    }
    assert red["saturation"] == 1 and red["brightness"] == pytest.approx(0.299)
    assert checks["colour_entropy"] == pytest.approx(1.0) and checks["brightness"] == pytest.approx(0.5)
    assert 8 < noise["colour_entropy"] <= 9 and noise["edge_density"] > 0.5
    # a step from 0 to 1 along a side of 4 pixels: its two pixels change by half each
    assert 0.5 <= checks["edge_density"] < 1 and noise["sharpness"] > grey["sharpness"]
    assert tuple(grey) == STATISTICS


@pytest.mark.parametrize("period", [8, 16])
def test_a_grid_stands_out_and_what_is_no_grid_does_not(period):
    """Lines every 8 or 16 pixels; the same lines every 11 pixels are no grid of patches, and neither is noise."""
    luma = np.random.default_rng(0).normal(0.5, 0.05, (256, 208))

    def lined(every):
        lines = luma.copy()
        lines[::every] += 0.1
        lines[:, ::every] += 0.1
        return lines

    assert grid(lined(period)) > 2 and abs(grid(luma)) < 0.3 and grid(lined(11)) < 0.3
    # a seam that cannot be seen in one row is seen in all of them
    assert grid(luma + 0.04 * (lined(period) > luma)) > 0.7
    assert grid(np.full((64, 64), 0.5)) == 0 and grid(lined(period)[:16]) == 0


def test_image_statistic_as_a_reward():
    values = score(ImageStatistic("brightness"), [GREY, RED], ["", ""], [{}, {}]).value
    torch.testing.assert_close(values, torch.tensor([128 / 255, 0.299]))
    near = score(ImageStatistic("brightness", target=0.3), [GREY, RED], ["", ""], [{}, {}]).value
    torch.testing.assert_close(near, -(values - 0.3).abs())


def test_group_diversity():
    white = Image.new("RGB", (32, 32), (255, 255, 255))
    black = Image.new("RGB", (32, 32))
    reward = GroupDiversity()
    values = score(reward, [white, black, black, white, NOISE], ["x", "x", "x", "y", "z"], [{}] * 5).value
    torch.testing.assert_close(values, torch.tensor([1.0, 0.5, 0.5, 0.0, 0.0]))
    values = score(GroupDiversity(nearest=True), [white, black, black, NOISE], ["x", "x", "x", "z"], [{}] * 4).value
    torch.testing.assert_close(values, torch.tensor([1.0, 0.0, 0.0, 0.0]))
