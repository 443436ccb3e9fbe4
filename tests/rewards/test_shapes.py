"""The shapes world: the grammar reads back what it writes, and the checker reads back what is drawn."""

import time
from hashlib import sha256

import numpy as np
import pytest
from PIL import Image, ImageDraw

from rewards.shapes import (
    CATEGORIES,
    Request,
    Thing,
    all_requests,
    check,
    draw,
    heldout_requests,
    parse,
    sample_requests,
    train_requests,
)
from rewards.shapes.checker import find_objects
from rewards.shapes.draw import BACKGROUND, PALETTE
from rewards.shapes.grammar import OPPOSITES, RELATIONS


def picture(*things: tuple[str, str, int, int]) -> Image.Image:
    """A picture made by hand: 8x8 pixel things as (colour, shape, top, left)."""
    image = Image.new("RGB", (32, 32), BACKGROUND)
    pen = ImageDraw.Draw(image)
    for colour, shape, top, left in things:
        fill = PALETTE.get(colour, (20, 20, 20))
        if shape == "square":
            pen.rectangle((left, top, left + 7, top + 7), fill)
        elif shape == "circle":
            pen.ellipse((left, top, left + 7, top + 7), fill)
        else:
            pen.polygon([(left, top + 7), (left + 7, top + 7), (left + 3.5, top)], fill)
    return image


def drawings(requests: list[Request], seed: int) -> list[Image.Image]:
    rng = np.random.default_rng(seed)
    return [Image.fromarray(draw(request, rng)) for request in requests]


def test_every_prompt_parses_back_to_its_request() -> None:
    assert len({request.prompt for request in all_requests()}) == len(all_requests()) == 1620
    assert all(parse(request.prompt) == request for request in all_requests())


def test_prompts_are_english() -> None:
    orange, red = Thing("orange", "square"), Thing("red", "circle")
    assert Request("single", (orange,)).prompt == "an orange square"
    assert Request("counting", (red,)).prompt == "one red circle"
    assert Request("counting", (orange,) * 3).prompt == "three orange squares"
    assert Request("two_objects", (red, orange)).prompt == "a red circle and an orange square"
    assert Request("position", (orange, red), "left of").prompt == "an orange square left of a red circle"


def test_parse_ignores_case_and_spaces() -> None:
    assert parse("  A red  Circle ") == Request("single", (Thing("red", "circle"),))


@pytest.mark.parametrize(
    ("prompt", "nearest"),
    [
        ("a orange circle", "an orange circle"),
        ("two red circle", "two red circles"),
    ],
)
def test_parse_refuses_other_prompts_in_one_line(prompt: str, nearest: str) -> None:
    with pytest.raises(ValueError, match="is not a shapes prompt; did you mean") as error:
        parse(prompt)
    assert "\n" not in str(error.value)
    assert nearest in str(error.value)


@pytest.mark.parametrize("prompt", ["", "a red circle and a red circle", "two red circles\nand a dog"])
def test_parse_refuses_what_resembles_nothing(prompt: str) -> None:
    with pytest.raises(ValueError, match="is not a shapes prompt") as error:
        parse(prompt)
    assert "\n" not in str(error.value)


def test_heldout_means_nothing_that_is_trained_on() -> None:
    heldout, train = set(heldout_requests()), set(train_requests())
    assert not heldout & train
    assert heldout | train == set(all_requests())
    assert not {request.twin for request in heldout} & train
    assert all(request.twin is None or request.twin.twin == request for request in all_requests())


def test_heldout_covers_every_kind() -> None:
    """The list is fixed: trained weights depend on it, so a change of it must be meant."""
    counts = {name: sum(r.category == name for r in heldout_requests()) for name in CATEGORIES}
    assert counts == {"single": 5, "counting": 20, "two_objects": 24, "position": 32}
    assert {len(r.things) for r in heldout_requests() if r.category == "counting"} == {1, 2, 3, 4}
    assert {r.relation for r in heldout_requests() if r.category == "position"} == set(RELATIONS)
    prompts = "\n".join(request.prompt for request in heldout_requests())
    assert sha256(prompts.encode()).hexdigest()[:16] == "788231f1be794274"


def test_sampling_is_seeded_and_weighted() -> None:
    first, again = (sample_requests(train_requests(), 50, np.random.default_rng(3)) for _ in range(2))
    assert first == again
    only = sample_requests(train_requests(), 20, np.random.default_rng(3), weights={"counting": 1.0})
    assert {request.category for request in only} == {"counting"}


def test_drawing_is_seeded() -> None:
    request = parse("four orange triangles")
    first, again = (draw(request, np.random.default_rng(5)) for _ in range(2))
    assert first.shape == (32, 32, 3) and first.dtype == np.uint8
    assert (first == again).all()


def test_checker_passes_what_is_drawn() -> None:
    requests = sample_requests(all_requests(), 2000, np.random.default_rng(0))
    verdicts = [check(image, r.prompt) for image, r in zip(drawings(requests, seed=1), requests, strict=True)]
    assert np.mean([verdict.strict for verdict in verdicts]) >= 0.99


def test_a_larger_drawing_is_the_same_picture() -> None:
    for request in heldout_requests():
        small, large = (draw(request, np.random.default_rng(7), scale) for scale in (1, 2))
        assert large.shape == (64, 64, 3) and check(Image.fromarray(large), request.prompt).strict
        shrunk = np.asarray(Image.fromarray(large).resize((32, 32), Image.Resampling.BOX), dtype=int)
        # edges are sampled more finely
        assert abs(shrunk - small).mean() < 1


def test_checker_fails_mismatched_prompts() -> None:
    requests = sample_requests(all_requests(), 2000, np.random.default_rng(0))
    others = sample_requests(all_requests(), 2000, np.random.default_rng(1))
    verdicts = [check(image, r.prompt) for image, r in zip(drawings(requests, seed=1), others, strict=True)]
    assert np.mean([verdict.strict for verdict in verdicts]) <= 0.05


def test_checker_fails_prompts_that_differ_in_one_thing() -> None:
    """A neighbour shares the category; only one colour, shape, number or the relation is another."""
    rng = np.random.default_rng(2)
    requests = sample_requests(all_requests(), 1000, rng)
    passed = []
    for image, request in zip(drawings(requests, seed=3), requests, strict=True):
        neighbours = [other for other in all_requests() if differences(request, other) == 1]
        passed.append(check(image, neighbours[rng.integers(len(neighbours))].prompt).strict)
    assert np.mean(passed) <= 0.05


def differences(a: Request, b: Request) -> int | None:
    """How many of number, relation, colours and shapes differ; None between categories."""
    if a.category != b.category:
        return None
    if a.category == "counting":
        pairs = [(a.things[0], b.things[0])]
    else:
        pairs = list(zip(a.things, b.things, strict=True))
    apart = sum((x.colour != y.colour) + (x.shape != y.shape) for x, y in pairs)
    return apart + (len(a.things) != len(b.things)) + (a.relation != b.relation)


@pytest.mark.parametrize(
    ("prompt", "things", "unmet"),
    [
        ("a red circle", [("red", "circle", 4, 4)], set()),
        ("a red circle", [("blue", "circle", 4, 4)], {"all red"}),
        ("a red circle", [("red", "square", 4, 4)], {"all circles"}),
        ("a red circle", [("red", "circle", 4, 4), ("red", "circle", 20, 20)], {"one in all"}),
        ("a red circle", [("black", "circle", 4, 4)], {"all red"}),
        ("a red circle", [], {"all red", "all circles", "one in all"}),
        ("two red circles", [("red", "circle", 4, 4)], {"two in all"}),
        ("two red circles", [("red", "circle", 4, 4), ("red", "square", 20, 4)], {"all circles"}),
        ("a red circle and a blue square", [("red", "circle", 4, 4), ("blue", "square", 20, 4)], set()),
        (
            "a red circle and a blue square",
            [("blue", "circle", 4, 4), ("red", "square", 20, 4)],
            {"red circle", "blue square"},
        ),
        ("a red circle and a blue square", [("blue", "square", 20, 4)], {"red circle", "two in all"}),
        ("a red circle left of a blue square", [("red", "circle", 9, 2), ("blue", "square", 4, 20)], set()),
        (
            "a red circle right of a blue square",
            [("red", "circle", 9, 2), ("blue", "square", 4, 20)],
            {"right of"},
        ),
        ("a red circle above a blue square", [("red", "circle", 9, 2), ("blue", "square", 4, 20)], {"above"}),
        ("a red circle above a blue square", [("red", "circle", 2, 9), ("blue", "square", 20, 4)], set()),
        (
            "a red circle above a blue square",
            [("red", "circle", 2, 9)],
            {"blue square", "two in all", "above"},
        ),
    ],
)
def test_soft_is_the_share_of_requirements_met(
    prompt: str, things: list[tuple[str, str, int, int]], unmet: set[str]
) -> None:
    verdict = check(picture(*things), prompt)
    assert {name for name, met in verdict.requirements.items() if not met} == unmet
    assert verdict.soft == pytest.approx(1 - len(unmet) / len(verdict.requirements))
    assert verdict.strict == (not unmet)


@pytest.mark.parametrize("relation", RELATIONS)
def test_a_relation_excludes_the_others(relation: str) -> None:
    request = Request("position", (Thing("red", "circle"), Thing("blue", "square")), relation)
    image = drawings([request], seed=0)[0]
    for other in OPPOSITES:
        assert check(image, f"a red circle {other} a blue square").strict == (other == relation)


def test_specks_are_not_objects_and_bars_have_no_shape() -> None:
    image = picture(("red", "circle", 4, 4))
    pen = ImageDraw.Draw(image)
    pen.rectangle((20, 20, 21, 22), PALETTE["blue"])
    assert check(image, "a red circle").strict
    pen.rectangle((2, 26, 29, 29), PALETTE["blue"])
    assert {(found.colour, found.shape) for found in find_objects(image)} == {
        ("red", "circle"),
        ("blue", "blob"),
    }


def test_touching_objects_of_two_colours_are_two() -> None:
    image = picture(("red", "square", 10, 6), ("blue", "square", 10, 14))
    assert check(image, "a red square left of a blue square").strict


@pytest.mark.parametrize("shade", [0, 128, 255])
def test_plain_pictures_pass_nothing(shade: int) -> None:
    image = Image.new("RGB", (32, 32), (shade, shade, shade))
    assert not any(check(image, f"one {colour} square").strict for colour in PALETTE)


def test_other_sizes_and_modes_are_read() -> None:
    image = picture(("green", "square", 4, 4), ("purple", "circle", 20, 20))
    assert check(image.resize((256, 256)).convert("RGBA"), "a green square and a purple circle").strict


def test_checker_refuses_prompts_outside_the_grammar() -> None:
    with pytest.raises(ValueError, match="not a shapes prompt"):
        check(picture(), "a photo of a cat")


def test_checking_is_fast() -> None:
    """At most 0.5 ms a picture; three times that is allowed here, for a busy machine."""
    requests = sample_requests(all_requests(), 200, np.random.default_rng(0))
    images = drawings(requests, seed=1)
    started = time.process_time()
    for image, request in zip(images, requests, strict=True):
        check(image, request.prompt)
    assert (time.process_time() - started) / len(images) <= 1.5e-3
