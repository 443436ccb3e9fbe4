"""As many texts as a prompt deserves: the self-evaluation token by token, the choice by a slow loop over all texts."""

import pytest
import torch

from flowalign.data import ASSETS
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.search.adaptive import SelfEvaluation, adaptive_best_of_n, lines_of, pruned_best_of_n
from rewards.text.model import CausalModel
from samplers import derive_seed

PROMPTS = ["17+25=", "40-8=", "3+4=", "90-1="]
SAMPLING = {"max_new_tokens": 4}


@pytest.fixture(scope="module")
def policy() -> LanguagePolicy:
    return LanguagePolicy.from_pretrained(ASSETS / "tiny_lm")


@pytest.fixture(scope="module")
def evaluation(policy: LanguagePolicy) -> SelfEvaluation:
    return SelfEvaluation(CausalModel(policy.network, policy.tokenizer), question="=", better="1", same="2")


def literal(policy: LanguagePolicy, prompt: str, text: str) -> float:
    """exp(l_same) / (exp(l_same) + exp(l_better)) of one forward pass."""
    ids = policy.tokenizer(prompt).input_ids + policy.tokenizer(f"{text}=", add_special_tokens=False).input_ids
    with torch.no_grad():
        chances = policy.network(torch.tensor([ids])).logits[0, -1].softmax(0)
    better, same = (
        chances[policy.tokenizer(answer, add_special_tokens=False).input_ids[0]].item() for answer in ("1", "2")
    )
    return same / (same + better)


def test_the_probability_that_no_attempt_does_better(policy: LanguagePolicy, evaluation: SelfEvaluation) -> None:
    texts = ["42", "3", "", "8"]
    expected = [literal(policy, prompt, text) for prompt, text in zip(PROMPTS, texts, strict=True)]
    assert evaluation.sure(PROMPTS, texts).tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("enough", [0.0, 0.6])
def test_sampling_ends_where_a_text_is_sure_enough(
    policy: LanguagePolicy, evaluation: SelfEvaluation, enough: float
) -> None:
    settings = {"most": 4, "enough": enough, "temperatures": [1.0, 0.5], "seed": 3}
    made = adaptive_best_of_n(policy, evaluation, PROMPTS, **settings, **SAMPLING)
    for i, (prompt, chosen) in enumerate(zip(PROMPTS, made, strict=True)):
        drawn = []
        for number in range(4):
            seeds, temperature = [derive_seed(3, i, number)], 1.0 if number == 0 else 0.5
            (text,) = policy.decode(policy.sample([prompt], seeds, temperature=temperature, **SAMPLING))
            drawn.append((literal(policy, prompt, text), text))
            if drawn[-1][0] >= enough:
                break
        assert chosen.samples == len(drawn)
        assert chosen.sure == pytest.approx(max(drawn)[0], abs=1e-5) and chosen.text in {text for _, text in drawn}
    if enough == 0.6:
        assert len({chosen.samples for chosen in made}) > 1, "some prompts deserve more than others"


def test_the_least_sure_beginnings_are_given_up(policy: LanguagePolicy, evaluation: SelfEvaluation) -> None:
    chosen = pruned_best_of_n(policy, evaluation, "90+19=", count=6, at=1, keep=2, max_new_tokens=4, temperature=1.5)
    seeds = [derive_seed(0, number) for number in range(6)]
    begun = policy.decode(policy.sample(["90+19="] * 6, seeds, max_new_tokens=1, temperature=1.5))
    best = sorted({literal(policy, "90+19=", text): text for text in begun}.items())[-2:]
    assert any(chosen.text.startswith(text) for _, text in best)
    assert chosen.sure == pytest.approx(literal(policy, "90+19=", chosen.text), abs=1e-5) and chosen.samples == 6


def test_lines_teach_whether_another_attempt_was_better(evaluation: SelfEvaluation) -> None:
    lines = lines_of(evaluation, ["3+4="], [["7", "6", "7"]], torch.tensor([[1.0, 0.0, 1.0]]))
    assert [(line["prompt"], line["completion"]) for line in lines] == [
        ("3+4=7=", "2"),
        ("3+4=6=", "1"),
        ("3+4=7=", "2"),
    ]
