"""Rewards of meaning against one text at a time, and CLIP's own score."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModel, AutoTokenizer

from rewards import RewardError, score
from rewards.compose import Normalized
from rewards.shapes import draw, train_requests
from rewards.shapes.clip import TINY_CLIP, TinyCLIP
from rewards.text.embedding import PictureMatch, TextSimilarity, TokenSimilarity
from rewards.text.verifiers import ExactMatch

TEXTS, RIGHT = ["12+3", "12", "", "9=9"], ["12+3", "77-5", "1", "99"]
RECORDS = [{"answer": text} for text in RIGHT]


@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
def test_similarity_is_the_cosine_of_pooled_vectors(pooling: str, tiny_lm: str) -> None:
    made = score(TextSimilarity(tiny_lm, pooling=pooling, device="cpu"), TEXTS, ["?"] * 4, RECORDS).value.tolist()  # type: ignore[arg-type]
    network, tokenizer = AutoModel.from_pretrained(tiny_lm, dtype=torch.float32), AutoTokenizer.from_pretrained(tiny_lm)

    def vector(text: str) -> torch.Tensor:
        with torch.no_grad():
            hidden = network(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        return {"mean": hidden.mean(0), "first": hidden[0], "last": hidden[-1]}[pooling]

    for value, text, right in zip(made, TEXTS, RIGHT, strict=True):
        expected = torch.cosine_similarity(vector(text), vector(right), dim=0).item() if text else 0.0
        assert value == pytest.approx(expected, abs=1e-5)
    with pytest.raises(ValueError, match="no encoder of texts at 'no/such'"):
        TextSimilarity("no/such")


def test_tokens_are_matched_with_their_nearest_in_both_directions(tiny_lm: str) -> None:
    made = score(TokenSimilarity(tiny_lm, device="cpu"), TEXTS, ["?"] * 4, RECORDS).value.tolist()
    table = AutoModel.from_pretrained(tiny_lm, dtype=torch.float32).get_input_embeddings().weight
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm)
    for value, text, right in zip(made, TEXTS, RIGHT, strict=True):
        first, second = (tokenizer(each, add_special_tokens=False).input_ids for each in (text, right))

        def best(a: list[int], b: list[int]) -> float:
            return float(
                np.mean([max(torch.cosine_similarity(table[i], table[j], dim=0).item() for j in b) for i in a])
            )

        assert value == pytest.approx((best(first, second) + best(second, first)) / 2 if first else 0.0, abs=1e-5)
    assert made[0] == pytest.approx(1)


def test_texts_match_pictures_as_clip_scores_do(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    requests = train_requests()[:2]
    pictures = [Image.fromarray(draw(request, rng)) for request in requests]
    reward = PictureMatch(str(TINY_CLIP), device="cpu")
    prompts = [request.prompt for request in requests]
    records = [{"image": picture} for picture in pictures]
    made = score(reward, prompts, ["caption"] * 2, records).value
    clip = TinyCLIP(device="cpu")
    expected = score(clip, pictures, prompts, [{}] * 2).value / clip.encoder.scale
    assert torch.allclose(made, expected, atol=1e-5)
    both = score(reward, prompts[:1], ["?"], [{"image": pictures}]).value
    (other,) = score(reward, prompts[:1], ["?"], records[1:]).value
    assert both.item() == pytest.approx((made[0] + other).item() / 2, abs=1e-5)
    tagged = PictureMatch(str(TINY_CLIP), pattern="<see>(.*?)</see>", device="cpu")
    assert score(tagged, [f"so <see>{prompts[0]}</see>", "no"], ["?"] * 2, records).value.tolist() == pytest.approx(
        [made[0].item(), 0], abs=1e-5
    )
    with pytest.raises(RewardError, match="shows no pictures"):
        score(reward, ["a"], ["?"], [{}])


def test_close_similarities_get_the_spread_of_the_verdicts_in_their_group(tiny_lm: str) -> None:
    texts = ["12+3", "12", "7", "9=9"]
    reward = Normalized([ExactMatch(), TextSimilarity(tiny_lm, device="cpu")])
    parts = score(reward, texts, ["?"] * 4, [{"answer": "12"}] * 4)
    verdict, similarity = parts.parts["exact_match"], parts.parts["text_similarity"]
    expected = sum((each - each.mean()) / each.std(correction=0) for each in (verdict, similarity))
    assert torch.allclose(parts.value, expected, atol=1e-3)
