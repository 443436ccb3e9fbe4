"""DVReward against its formula, with probabilities by one forward pass of transformers."""

from math import sqrt
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from rewards import RewardError, score
from rewards.judges import Local
from rewards.judges.dv_reward import DVReward
from rewards.shapes import draw, heldout_requests, sample_requests


@pytest.fixture
def pictures() -> list[Any]:
    rng = np.random.default_rng(0)
    return [Image.fromarray(draw(request, rng)) for request in sample_requests(heldout_requests(), 2, rng)]


def yes(text: str, picture: Any, tiny_vlm: str) -> float:
    processor = AutoProcessor.from_pretrained(tiny_vlm)
    model = AutoModelForImageTextToText.from_pretrained(tiny_vlm, dtype=torch.float32).eval()
    content = [{"type": "image"}, {"type": "text", "text": text}]
    turn = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    with torch.no_grad():
        odds = model(**processor(text=turn, images=[picture], return_tensors="pt")).logits[0, -1].exp()
    words = processor.tokenizer.batch_decode([[i] for i in range(len(processor.tokenizer))])
    there, back = (sum(odds[i] for i, w in enumerate(words) if w.strip().lower() == label) for label in ("yes", "no"))
    return float(there / (there + back))


def test_the_value_is_the_geometric_mean_of_two_means(tiny_vlm: str, pictures: list[Any]) -> None:
    semantic, quality = ["a red circle", "two blue squares", "a green star"], ["one triangle", "a yellow circle"]
    # as a list of texts, and of records
    metadata = [
        {"semantic_questions": semantic, "quality_questions": quality},
        {"semantic_questions": [{"question": "a red circle"}], "quality_questions": []},
    ]
    judge = Local(tiny_vlm, device="cpu")
    made = {
        combine: score(DVReward(judge, combine=combine, template="shapes_show"), pictures, ["", ""], metadata)  # type: ignore[arg-type]
        for combine in ("geometric", "mean", "all")
    }
    chances = {text: yes(f"Does this picture show {text}?", pictures[0], tiny_vlm) for text in [*semantic, *quality]}
    s, q = (np.mean([chances[text] for text in texts]) for texts in (semantic, quality))
    expected = {"geometric": sqrt(s * q), "mean": (s + q) / 2, "all": np.mean([*chances.values()])}
    for combine, value in expected.items():
        assert made[combine].value[0].item() == pytest.approx(value, abs=1e-5)
    alone = yes("Does this picture show a red circle?", pictures[1], tiny_vlm)
    assert made["geometric"].value[1].item() == pytest.approx(sqrt(alone), abs=1e-5)
    assert made["geometric"].parts["quality"].tolist() == pytest.approx([q, 1], abs=1e-5)


class Writes:
    """Splits once, and answers yes to what has a colour."""

    def __init__(self, reply: str) -> None:
        self.written, self.asked = reply, []  # type: ignore[var-annotated]

    def reply(self, questions: Any, temperature: float, max_tokens: int, seed: int) -> list[str]:
        self.asked += [question.text for question in questions]
        return [self.written]

    def choose(self, questions: Any, labels: Any) -> list[list[float] | None]:
        return [None if "?!" in q.text else [1.0, 0.0] if "red" in q.text else [0.25, 0.75] for q in questions]


def test_a_prompt_without_questions_is_split_once(pictures: list[Any]) -> None:
    writer = Writes(
        "- semantic: Is there a red cat?\n* Semantic: Are there two?\nquality: Is its fur red?\nThat is all."
    )
    reward = DVReward(writer, writer)  # type: ignore[arg-type]
    made = score(reward, pictures, ["two red cats"] * 2, [{}, {}])
    assert made.value.tolist() == pytest.approx([sqrt(0.625)] * 2)
    assert len(writer.asked) == 1 and "two red cats" in writer.asked[0]
    with pytest.raises(RewardError, match="semantic_questions"):
        score(DVReward(writer), pictures, ["a cat"] * 2, [{}, {}])  # type: ignore[arg-type]
    with pytest.raises(RewardError, match="no questions"):
        score(DVReward(writer, Writes("I cannot")), pictures, ["a cat"] * 2, [{}, {}])  # type: ignore[arg-type]


def test_replies_that_are_neither_yes_nor_no(pictures: list[Any]) -> None:
    reward = DVReward(Writes(""))  # type: ignore[arg-type]
    some = {"semantic_questions": ["red", "red?!"], "quality_questions": ["red"]}
    made = score(reward, pictures[:1], ["a cat"], [some])
    assert made.value.item() == pytest.approx(sqrt(0.5)) and made.parts["unparsed"].item() == pytest.approx(1 / 3)
    with pytest.raises(RewardError, match="neither yes nor no"):
        score(reward, pictures[:1], ["a cat"], [{"semantic_questions": ["red?!"]}])
    with pytest.raises(ValueError, match="dv_question works"):
        DVReward(Writes(""), template="edit_score")  # type: ignore[arg-type]
