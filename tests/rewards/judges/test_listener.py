"""The listener's confidence, against one forward pass written out."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from rewards import RewardError, score
from rewards.judges import Local, Question
from rewards.judges.listener import Listener
from rewards.shapes import draw, sample_requests, train_requests


@pytest.fixture
def shown(tmp_path: Path) -> list[str]:
    rng = np.random.default_rng(0)
    files = [str(tmp_path / f"{i}.png") for i in range(2)]
    for file, request in zip(files, sample_requests(train_requests(), 2, rng), strict=True):
        Image.fromarray(draw(request, rng)).save(file)
    return files


def asked(text: str, files: list[str], tiny_vlm: str, labels: list[str]) -> torch.Tensor:
    """Probabilities of one-token labels after a user's turn with two pictures, by transformers alone."""
    processor = AutoProcessor.from_pretrained(tiny_vlm)
    model = AutoModelForImageTextToText.from_pretrained(tiny_vlm, dtype=torch.float32).eval()
    content = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": text}]
    turn = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    inputs = processor(text=turn, images=[Image.open(file) for file in files], return_tensors="pt")
    with torch.no_grad():
        odds = model(**inputs).logits[0, -1].exp()
    words = processor.tokenizer.batch_decode([[i] for i in range(len(processor.tokenizer))])
    each = [sum(odds[i] for i, word in enumerate(words) if word.strip().lower() == label) for label in labels]
    return torch.stack(each) / sum(each)


def test_the_value_is_how_probable_the_right_answer_is_after_the_reasoning(tiny_vlm: str, shown: list[str]) -> None:
    question = "Which picture shows a red circle better, 1 or 2?"
    replies = ["a red circle, two blue squares: 1", "two blue squares, a red circle: 1", "no reasoning"]
    reward = Listener(Local(tiny_vlm, device="cpu"), "shapes_listener", pattern="^(.*):")
    made = score(reward, replies, [question] * 3, [{"image": shown, "answer": "2"}] * 3)  # type: ignore[arg-type]
    for value, reply in zip(made.value[:2], replies, strict=False):
        thought = reply.partition(":")[0]  # the verdict is not told
        expected = asked(f"{thought}: {question}", shown, tiny_vlm, ["1", "2"])[1]
        assert value.item() == pytest.approx(expected.item(), abs=1e-5)
    assert made.value[0] != made.value[1] and made.value[2] == 0
    assert made.parts["unparsed"].tolist() == [0, 0, 1]


class Hears:
    """Answers what was thought, and looks at how many pictures there are."""

    def choose(self, questions: Any, labels: Any) -> list[list[float] | None]:
        assert all(len(question.pictures) == 2 for question in questions)
        return [
            None if "?!" in self.thought(q) else [0.9, 0.1] if "yes" in self.thought(q) else [0.2, 0.8]
            for q in questions
        ]

    def thought(self, question: Question) -> str:
        return question.text.split("this question:\n")[1].split("\nLook at")[0]


def test_reasoning_that_contradicts_its_verdict_earns_less(shown: list[str]) -> None:
    judge: Any = Hears()
    texts = [
        "<think>so yes</think><answer>yes</answer>",
        "<think>so no</think><answer>yes</answer>",
        "<think>?!</think>",
    ]
    made = score(Listener(judge), texts, ["q"] * 3, [{"image": shown, "answer": "Yes"}] * 3)  # type: ignore[arg-type]
    assert made.value.tolist() == pytest.approx([0.9, 0.2, 0.0])


def test_what_a_listener_cannot_know_is_said(shown: list[str]) -> None:
    judge: Any = Hears()
    with pytest.raises(RewardError, match="answer='maybe'.* knows the answers yes, no"):
        score(Listener(judge), ["<think>a</think>"], ["q"], [{"answer": "maybe"}])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'vqa_score': a listener is asked for a probability"):
        Listener(judge, "vqa_score")
