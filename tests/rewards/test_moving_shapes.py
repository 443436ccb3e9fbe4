"""The world of moving shapes: drawn clips are right, and wrong where one thing is changed."""

from collections import Counter

import numpy as np
import pytest
from PIL import Image

from flowalign.data import Prompts
from rewards import score
from rewards.moving_shapes import (
    DIRECTIONS,
    FRAMES,
    SIZE,
    Movement,
    MovingShapesReward,
    all_movements,
    check,
    draw,
    heldout_movements,
    parse,
    train_movements,
)
from rewards.shapes.draw import BACKGROUND


def clip(movement: Movement, seed: int = 0) -> list[Image.Image]:
    return [Image.fromarray(frame) for frame in draw(movement, np.random.default_rng(seed))]


def test_the_grammar_reads_back_what_it_writes_and_holds_out_one_direction_of_each_thing() -> None:
    assert len({movement.prompt for movement in all_movements()}) == 48
    assert all(parse(f" {movement.prompt.upper()} ") == movement for movement in all_movements())
    assert len(train_movements()) == 36 and not set(train_movements()) & set(heldout_movements())
    assert len({movement.thing for movement in heldout_movements()}) == 12
    assert set(Counter(movement.direction for movement in heldout_movements()).values()) == {3}
    for name, movements in {"train": train_movements(), "heldout": heldout_movements()}.items():
        shipped = Prompts.read(f"moving_shapes_{name}")
        assert shipped.texts == [movement.prompt for movement in movements]
        assert [record["category"] for record in shipped.metadata] == [movement.direction for movement in movements]
    with pytest.raises(ValueError, match="'a red circle' is no prompt of moving shapes; 'a red circle moving left' is"):
        parse("a red circle")


def test_drawn_clips_are_right_and_no_other_prompt_fits_them() -> None:
    for movement in all_movements():
        frames = clip(movement)
        assert len(frames) == FRAMES and frames[0].size == (SIZE, SIZE)
        verdict = check(frames, movement.prompt)
        assert verdict.strict and verdict.soft == 1, movement.prompt
        others = [other for other in all_movements() if other.thing == movement.thing and other != movement]
        others += [other for other in all_movements() if other.direction == movement.direction and other != movement]
        # what is right of it counts softly
        verdicts = [check(frames, other.prompt) for other in others]
        assert all(not verdict.strict and 0 < verdict.soft < 1 for verdict in verdicts)


def test_each_requirement_counts_for_itself() -> None:
    movement = parse("a red circle moving left")
    frames = clip(movement)

    def shares(video: list[Image.Image], prompt: str = movement.prompt) -> tuple[float, float, float, bool]:
        verdict = check(video, prompt)
        return verdict.colour, verdict.shape, verdict.direction, verdict.strict

    assert shares(frames, "a blue circle moving left") == (0, 1, 1, False)
    assert shares(frames, "a red square moving left") == (1, 0, 1, False)
    assert shares(frames[::-1]) == (1, 1, 0, False)
    assert shares([frames[0]] * FRAMES) == (1, 1, 0, False)
    # one frame of another shape, and one frame without any
    square = clip(parse("a red square moving left"))
    assert shares([*frames[:-1], square[-1]])[1:] == (6 / 7, pytest.approx(1, abs=0.2), False)
    empty = Image.new("RGB", (SIZE, SIZE), BACKGROUND)
    assert shares([empty, *frames[1:]]) == (6 / 7, 6 / 7, 5 / 6, False)
    # a second object in a frame hides the first
    crowded = np.asarray(frames[3]).copy()
    crowded[0:4, 12:16] = (40, 90, 220)
    assert shares([*frames[:3], Image.fromarray(crowded), *frames[4:]]) == (6 / 7, 6 / 7, 4 / 6, False)


@pytest.mark.parametrize(
    ("down", "across", "way"), [(0, -1, "left"), (0, 1, "right"), (-1, 0, "up"), (1, 0, "down"), (1, 1, None)]
)
def test_a_square_drawn_by_hand_moves_where_one_sees_it_move(down: int, across: int, way: str | None) -> None:
    frames = np.full((FRAMES, SIZE, SIZE, 3), BACKGROUND, dtype=np.uint8)
    for i in range(FRAMES):
        # rows go down, columns to the right
        top, left = (6 * (step < 0) + step * i for step in (down, across))
        frames[i, top : top + 8, left : left + 8] = (40, 90, 220)
    video = [Image.fromarray(frame) for frame in frames]
    seen = {word: check(video, f"a blue square moving {word}").direction for word in DIRECTIONS}
    # in between is in no direction
    assert seen == {word: float(word == way) for word in ("left", "right", "up", "down")}


def test_the_reward_is_half_strict_and_half_soft() -> None:
    movement = train_movements()[0]
    frames = clip(movement)
    scores = score(MovingShapesReward(), [frames, frames[::-1]], [movement.prompt] * 2, [{}] * 2)
    assert scores.parts["strict"].tolist() == [1, 0]
    assert scores.value.tolist() == pytest.approx([1, 1 / 3])
    assert score(MovingShapesReward(0.0), [frames[::-1]], [movement.prompt], [{}]).value.item() == pytest.approx(2 / 3)
