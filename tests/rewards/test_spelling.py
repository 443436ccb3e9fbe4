"""The spelling world against words that are drawn, blurred, misspelt and crowded."""

import numpy as np
import pytest
from PIL import Image, ImageFilter

from rewards import RewardError, score
from rewards.spelling import LETTERS, SpellingReward, draw, prompt_of, read, words


def drawn(some, seed=0):
    rng = np.random.default_rng(seed)
    return [Image.fromarray(draw(word, rng)) for word in some]


def test_every_letter_is_read_wherever_it_is_drawn_and_blurred():
    assert len(words()) == 14 * 5 * 14 * 6 == len(set(words()))
    some = [str(word) for word in np.random.default_rng(0).choice(words(), 200)]
    assert set("".join(some)) == set(LETTERS)
    pictures = drawn(some)
    for seen in (pictures, [own.filter(ImageFilter.GaussianBlur(0.5)) for own in pictures]):
        texts, stray = read(seen)
        assert texts == some and max(stray) == 0
    # the letters' forms differ: no other is nearly as likely after a blur that leaves half of the contrast
    texts, _ = read([own.filter(ImageFilter.GaussianBlur(0.7)) for own in pictures])
    assert np.mean([text == word for text, word in zip(texts, some)]) > 0.75


def test_nothing_is_read_in_noise_and_paper():
    noise = np.random.default_rng(1).integers(0, 255, (20, 32, 32, 3)).astype(np.uint8)
    texts, _ = read([*map(Image.fromarray, noise), Image.new("RGB", (32, 32), (240, 240, 240))])
    assert max(len(text) for text in texts) <= 1 and texts[-1] == ""


def test_a_wrong_letter_a_second_line_and_a_gap_cost():
    page = np.full((32, 32, 3), 240, dtype=np.uint8)
    word = np.asarray(drawn(["bat"])[0])
    rows, columns = np.where(word[..., 0] < 140)
    letters = word[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
    page[2:9, 1:20] = letters
    right = Image.fromarray(page)
    crowded = page.copy()
    crowded[20:27, 5:24] = letters
    apart = np.full_like(page, 240)
    apart[2:9, 1:6], apart[2:9, 14:26] = letters[:, :5], letters[:, 7:]
    pictures = [right, right, Image.fromarray(crowded), Image.fromarray(apart), right.resize((64, 64))]
    prompts = [prompt_of("bat"), prompt_of("bad"), *[prompt_of("bat")] * 3]
    scores = score(SpellingReward(), pictures, prompts, [{}] * 5)
    assert scores.parts["strict"].tolist() == [1, 0, 0, 0, 1]
    assert scores.parts["soft"].tolist() == pytest.approx([1, 2 / 3, 1, 3 / 4, 1])
    assert scores.value.tolist() == pytest.approx([1, 1 / 3, 1 / 2, 3 / 8, 1])
    told = score(SpellingReward(strict_weight=1.0), [right], ["a sign"], [{"text": "bat"}])
    assert told.value.tolist() == [1]
    with pytest.raises(RewardError, match="quotes no text"):
        score(SpellingReward(), [right], ["a sign"], [{}])
