"""Rules about what a text says, against counts by hand and brute force."""

import itertools
import math
import random
import re

import pytest

from rewards import RewardError, score
from rewards.pairwise import WinRate
from rewards.text.checks import (
    Assignment,
    Bleu,
    Boxes,
    Click,
    Keywords,
    NumberWithin,
    StatedConfidence,
    in_order,
    overlap,
)
from rewards.text.form import StepCount
from rewards.text.ranked import Lexicographic, Ranked
from rewards.text.verifiers import ExactMatch


def values(reward: object, texts: list[str], records: list[dict], prompts: list[str] | None = None) -> list[float]:
    return score(reward, texts, prompts or ["?"] * len(texts), records).value.tolist()


def test_boxes_are_matched_so_that_their_overlaps_add_up_to_most() -> None:
    assert overlap([0, 0, 2, 2], [1, 1, 3, 3]) == pytest.approx(1 / 7) and overlap([0, 0, 1, 1], [5, 5, 6, 6]) == 0
    right = [[0, 0, 10, 10], [20, 20, 30, 30]]
    texts = [
        "[20, 20, 30, 30] and (0, 0, 10, 10)",
        "[0, 0, 10, 8]",
        "no box",
        "[0, 0, 10, 4], [20, 20, 30, 30], [1,1,2,2]",
    ]
    assert values(Boxes(), texts, [{"boxes": right}] * 4) == pytest.approx([1, 0.8 / 2, 0, 1 / 3])
    assert values(Boxes(), ["none", "[0,0,1,1]"], [{"boxes": []}] * 2) == [1, 0]
    sure = "{'Position': [0, 0, 10, 10], 'Confidence': 0.9}, {'Position': [50, 50, 60, 60], 'Confidence': 0.4}"
    # overlaps (1 + 0) / 2, confidences (0.9 + (1 - 0.4)) / 2
    assert values(Boxes(confidence=True), [sure], [{"boxes": right}]) == pytest.approx([0.5 + 0.75])
    randomness = random.Random(0)
    for _ in range(20):
        corners = [[randomness.randrange(5), randomness.randrange(5)] for _ in range(6)]
        given, wanted = ([[x, y, x + 4, y + 4] for x, y in part] for part in (corners[:3], corners[3:]))
        best = max(
            sum(overlap(a, b) for a, b in zip(given, order, strict=True)) for order in itertools.permutations(wanted)
        )
        (made,) = values(Boxes(threshold=0), [str(given)], [{"boxes": wanted}])
        assert made == pytest.approx(best / 3)
    with pytest.raises(RewardError, match="no list of boxes"):
        values(Boxes(), [""], [{"boxes": [[1, 2]]}])
    with pytest.raises(RewardError, match="has no 'boxes'"):
        values(Boxes(), [""], [{}])


def test_numbers_within_a_tolerance() -> None:
    texts = ["It is 104.", "1,050 at most 95", "94", "none", "about 1e2"]
    assert values(NumberWithin(), texts, [{"answer": 100}] * 5) == [1, 1, 0, 0, 1]
    assert values(NumberWithin(), ["1,040"], [{"answer": "1000"}]) == [1]
    with pytest.raises(RewardError, match="is no number"):
        values(NumberWithin(), ["1"], [{"answer": "one"}])


def test_clicks_and_how_sure_a_text_says_that_it_is() -> None:
    box = {"box": [0, 0, 10, 20]}
    assert values(Click(), ["(5, 10)", "click 11, 3", "9,19 then 0, 0", ""], [box] * 4) == [1, 0, 1, 0]
    made = values(Click(spread=0.25), ["(5, 10)", "(7.5, 10)", "(7.5, 15)", "(11, 10)"], [box] * 4)
    assert made == pytest.approx([1, math.exp(-1 / 2), math.exp(-1), 0])
    texts = ["(5, 10), confidence: 0.9", "(50, 10), confidence 90%", "(5, 10)"]
    assert values(StatedConfidence(Click()), texts, [box] * 3) == pytest.approx([0.99, 1 - 0.81, 0])
    with pytest.raises(RewardError, match="is no box"):
        values(Click(), [""], [{"box": [3, 0, 1, 1]}])


def test_keywords_count_in_their_order() -> None:
    def slowly(text: str, words: list[str]) -> int:
        """The longest choice of words that one regular expression finds."""
        for size in range(len(words), 0, -1):
            for chosen in itertools.combinations(words, size):
                pattern = ".*?".join(rf"(?<!\w){re.escape(word)}(?!\w)" for word in chosen)
                if re.search(pattern, text, re.DOTALL):
                    return size
        return 0

    randomness = random.Random(1)
    for _ in range(60):
        text = " ".join(randomness.choices("abcdx", k=8))
        words = randomness.choices("abcd", k=4)
        assert in_order(text, words) == slowly(text, words)
    assert values(Keywords(), ["Heat, then ice", "ice then heat", ""], [{"keywords": ["heat", "ice"]}] * 3) == [
        1,
        0.5,
        0,
    ]
    with pytest.raises(RewardError, match="no list of words"):
        values(Keywords(), [""], [{"keywords": "heat"}])


def test_an_assignment_makes_every_clause_true() -> None:
    record = {"clauses": [[1, -2, 3], [-1, 2, 3]]}
    texts = ["x1=1, x2=1, x3=0", "x1=1, x2=0, x3=0", "x3 = true", "x1=false, x2=false, x3=true"]
    assert values(Assignment(), texts, [record] * 4) == [1, 0, 0, 1]


def test_no_number_is_too_large_to_be_read() -> None:
    many = "9" * 5000
    box = {"box": [0, 0, 1, 1], "boxes": [[0, 0, 1, 1]], "answer": 1, "clauses": [[1]], "list": 1, "relevant": True}
    for reward in (
        Boxes(),
        Boxes(confidence=True),
        NumberWithin(),
        Click(),
        StatedConfidence(Click()),
        Assignment(),
        Ranked(),
    ):
        for text in (
            f"x{many}=1",
            f"[{many}, 0, 1, 1e999]",
            f'{{"Position": [{many[:400]}, 0, 1, 1]}}',
            f"confidence {many}",
        ):
            assert values(reward, [text], [box])[0] <= 1


def test_a_score_earns_by_the_rank_that_it_gives_its_document() -> None:
    texts = ["8", "6", "7", "3", "no score", "9"]
    prompts = ["good"] * 2 + ["bad"] * 2 + ["worse"] * 2
    records = [{"list": 1, "relevant": i < 2} for i in range(6)]
    # means of the others: bad 5, worse 9; good 7
    assert values(Ranked(), texts, records, prompts) == pytest.approx([1 / 2, 1 / 2, -1 / 2, -1 / 3, -1, -1])


def test_the_first_reward_that_tells_two_texts_apart_decides() -> None:
    reward = Lexicographic([ExactMatch(pattern=r"(\d)"), StepCount(4)], margins=[0, 0.3])
    texts = ["1\nb\nc", "1", "2\nb\nc\nd", "1\nb"]
    wins = reward.compare(
        [texts[0], texts[1], texts[0], texts[2]],
        [texts[1], texts[2], texts[3], texts[0]],
        ["?"] * 4,
        [{"answer": "1"}] * 4,
    )
    # more steps; right; 3 to 2 steps is a tie within the margin; wrong
    assert wins.value.tolist() == [1, 1, 0.5, 0]
    assert values(WinRate(reward), texts, [{"answer": "1"}] * 4) == pytest.approx(
        [2.5 / 3, 1 / 3 + 0.5 / 3, 0, 2 / 3], abs=1e-6
    )


# sentence_bleu of nltk 3.9 with equal weights up to the reference's length (at most 4) and SmoothingFunction().method2
NLTK = [
    (
        "It is a guide to action which ensures that the military always obeys the commands of the party",
        "It is a guide to action that ensures that the military will forever heed Party commands",
        0.4452945001507636,
    ),
    ("the red house", "the red house", 1.0),
    ("red house", "the red house", 0.4814037036394002),
    ("it is paris", "paris", 0.3333333333333333),
    ("paris france", "paris", 0.5),
    ("a b c d e", "a b d c e f", 0.3498330125272252),
    ("a a a", "a b a", 0.4807498567691361),
    ("x", "paris", 0.0),
]


def test_bleu_is_nltks_with_n_grams_no_longer_than_the_reference() -> None:
    texts, records = [text for text, _, _ in NLTK], [{"answer": reference} for _, reference, _ in NLTK]
    assert values(Bleu(ignore_case=False), texts, records) == pytest.approx([value for _, _, value in NLTK])
    answer = {"answer": "Paris"}
    assert values(Bleu(pattern="<answer>(.*?)</answer>"), ["<answer>paris</answer>", "paris"], [answer] * 2) == [1, 0]
