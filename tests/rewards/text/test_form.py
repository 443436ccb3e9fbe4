"""Rewards of form against literal versions of their papers' rules."""

import math

import pytest
import torch

from rewards import score
from rewards.text.form import CosineLength, Flipped, Frequency, Phrases, Repetition, StepCount
from rewards.text.verifiers import ExactMatch


def cosine_of_the_authors(length: int, limit: int, right: bool, text: str) -> float:
    """As in openrlhf/reward/cosine.py of eddycmu/demystify-long-cot, without its margin of 16 tokens."""
    if length >= limit:
        return -10.0
    lowest, highest = (1.0, 2.0) if right else (0.0, -10.0)
    words, seen, penalty = text.lower().split(), set(), 0.0
    for i in range(len(words) - 1):
        gram = tuple(words[i : i + 2])
        penalty -= 0.05 if gram in seen else 0
        seen.add(gram)
    return lowest + 0.5 * (highest - lowest) * (1 + math.cos(length / limit * math.pi)) + (0 if right else penalty)


def test_the_cosine_of_the_length_is_the_authors() -> None:
    reward = CosineLength(ExactMatch(pattern=r"(\w+)$"), limit=24, repetition=0.05, ngram=2)
    texts = ["yes", "so it is yes", "no", "a b a b a b no", "x" * 24, "a b a b yes"]
    made = score(reward, texts, ["?"] * 6, [{"answer": "yes"}] * 6)
    expected = [cosine_of_the_authors(len(text), 24, text.endswith("yes"), text) for text in texts]
    assert made.value.tolist() == pytest.approx(expected, abs=1e-6)
    with pytest.raises(ValueError, match="at least 1"):
        CosineLength(ExactMatch(), limit=0)


def test_repetition_steps_and_phrases_are_counted() -> None:
    def of(reward: object, *texts: str) -> list[float]:
        return reward(texts, ["?"] * len(texts), [{}] * len(texts)).value.tolist()

    # of the 5 pairs of words of 'a b a b a c' two came before
    assert of(Repetition(2), "a b a b a c", "a b c", "") == pytest.approx([-2 / 5, 0, 0])
    assert of(StepCount(4), "one\ntwo\n\nthree", "", "one", "\n".join("abcdef")) == [0.75, 0, 0.25, 1]
    assert of(Phrases(["wait", "let me check"], 2), "Wait. Let me check, wait", "awaiting", "wait") == [1, 0, 0.5]


def test_a_share_of_the_verdicts_is_turned_and_always_the_same_ones() -> None:
    texts = [str(i) for i in range(2000)]
    records = [{"answer": text if i % 2 else ""} for i, text in enumerate(texts)]
    reward = Flipped(ExactMatch(), share=0.3, seed=1)
    made = score(reward, texts, ["?"] * 2000, records)
    right = torch.tensor([float(i % 2) for i in range(2000)])
    turned = made.value != right
    assert turned.float().mean().item() == pytest.approx(0.3, abs=0.03)
    assert torch.equal(made.parts["flipped"].bool(), turned)
    assert torch.equal(score(reward, texts[::-1], ["?"] * 2000, records[::-1]).value.flip(0), made.value)


def test_the_frequency_of_an_answer_less_the_groups_entropy() -> None:
    texts, prompts = ["=1", "=1", "=2", "none", "=3", "=3"], ["p"] * 4 + ["q"] * 2
    made = Frequency(r"=(\d)", certainty=0.5)(texts, prompts, [{}] * 6)
    entropy = -(2 / 3 * math.log(2 / 3) + 1 / 3 * math.log(1 / 3))
    expected = [2 / 3 - entropy / 2, 2 / 3 - entropy / 2, 1 / 3 - entropy / 2, 0, 1, 1]
    assert made.value.tolist() == pytest.approx(expected, abs=1e-6)
