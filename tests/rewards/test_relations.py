"""The relations world against pictures that are drawn to be right, and wrong in one thing."""

import numpy as np
import pytest
from PIL import Image

from rewards import score
from rewards.relations import RelationsReward, check, is_of_two_colours
from rewards.shapes import all_requests, draw
from rewards.shapes.grammar import RELATIONS


def test_drawn_pictures_are_right_and_turned_ones_are_not():
    rng = np.random.default_rng(0)
    requests = [request for request in all_requests() if is_of_two_colours(request)]
    assert len(requests) == 1080
    for i in rng.integers(len(requests), size=60):
        request, picture = requests[i], Image.fromarray(draw(requests[i], rng))
        *_, placed, right = check(picture, request.prompt)
        assert right and placed > 0.8
        others = [request.prompt.replace(request.relation, other) for other in RELATIONS if other != request.relation]
        assert not any(check(picture, prompt)[3] for prompt in others)
    # a shape says nothing, a colour all
    assert check(picture, request.prompt.replace(request.things[0].shape, "triangle"))[3]


def test_what_is_missing_or_too_much_is_not_right():
    picture = np.full((32, 32, 3), 243, dtype=np.uint8)
    red, blue, green = (220, 40, 40), (40, 90, 220), (40, 165, 60)
    picture[10:18, 2:10] = red
    prompt = "a red circle left of a blue square"
    assert check(Image.fromarray(picture), prompt) == (1.0, 0.0, 0.0, False)
    picture[10:12, 20:25] = blue
    assert check(Image.fromarray(picture), prompt)[1:] == (0.5, pytest.approx(0.5, abs=0.02), False)
    picture[10:18, 20:28] = blue
    good = Image.fromarray(picture.copy())
    assert check(good, prompt) == (1.0, 1.0, 1.0, True)
    picture[22:30, 10:22] = green
    scores = score(RelationsReward(), [good, Image.fromarray(picture)], [prompt] * 2, [{}] * 2)
    assert scores.parts["strict"].tolist() == [1.0, 0.0] and scores.parts["soft"].tolist() == [1.0, 1.0]
    assert scores.value.tolist() == [1.0, 0.5]
    with pytest.raises(ValueError, match="does not place two colours"):
        check(good, "a red circle and a blue square")
