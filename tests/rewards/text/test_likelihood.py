"""Rewards of likelihoods against one token at a time."""

import math
import re

import pytest
import torch

from rewards import RewardError, WeightedSum, bind, score
from rewards.text.likelihood import RLPR, CriticalEntropy, SelfAligned, SelfCertainty
from rewards.text.model import CausalModel
from rewards.text.verifiers import ExactMatch

PROMPTS = ["17+25=", "40-8=", "3+4="]
TEXTS = ["42", "", "13=7"]
RECORDS = [{"answer": "42"}, {"answer": "32"}, {"answer": "7"}]


def one_by_one(model: CausalModel, context: str, text: str, begin: bool = True) -> list[float]:
    """Probabilities of the text's characters, each from a forward pass of its own."""
    ids, found = ([1] if begin else []) + model.tokens(context), []
    for token in model.tokens(text):
        with torch.no_grad():
            found.append(model.network(torch.tensor([ids])).logits[0, -1].softmax(-1)[token].item())
        ids.append(token)
    return found


def test_texts_of_several_lengths_are_scored_together_as_alone(model: CausalModel) -> None:
    contexts = [model.begin(prompt, {}) for prompt in PROMPTS]
    made, mask = model.log_probs(contexts, [model.tokens(text) for text in TEXTS])
    assert mask.sum(1).tolist() == [2, 0, 4]
    for row, (prompt, text) in enumerate(zip(PROMPTS, TEXTS, strict=True)):
        assert made[row][mask[row]].exp().tolist() == pytest.approx(one_by_one(model, prompt, text), abs=1e-5)


@pytest.mark.parametrize("debias", [True, False])
def test_rlpr_is_the_mean_probability_of_the_right_answer_after_the_text(model: CausalModel, debias: bool) -> None:
    reward = RLPR(lead="=", debias=debias)
    bind(reward, model)
    made = score(reward, TEXTS, PROMPTS, RECORDS).value  # type: ignore[arg-type]
    for value, prompt, text, record in zip(made.tolist(), PROMPTS, TEXTS, RECORDS, strict=True):
        own = one_by_one(model, f"{prompt}{text}=", record["answer"])
        without = one_by_one(model, f"{prompt}=", record["answer"])
        expected = sum(own) / len(own)
        if debias:
            expected = min(max(expected - sum(without) / len(without), 0), 1)
        assert value == pytest.approx(expected, abs=1e-5)


def test_rlpr_puts_the_right_answer_in_the_place_of_the_texts_own(model: CausalModel) -> None:
    reward = RLPR(pattern=r"=(\d+)", debias=False)
    reward.bind(model)
    made = reward(["9=1=5", "12", "=7"], PROMPTS, RECORDS).value.tolist()
    for value, before, prompt, record in zip(made, ["9=1=", None, "="], PROMPTS, RECORDS, strict=True):
        own = [0.0] if before is None else one_by_one(model, prompt + before, record["answer"])
        assert value == pytest.approx(sum(own) / len(own), abs=1e-5)


def test_self_aligned_compares_perplexities_with_and_without_the_prompt(model: CausalModel, tiny_lm: str) -> None:
    made = SelfAligned(tiny_lm)(TEXTS, PROMPTS, [{}] * 3).value.tolist()
    for value, prompt, text in zip(made, PROMPTS, TEXTS, strict=True):
        if not text:
            assert value == 0
            continue
        after, alone = (
            math.exp(-sum(map(math.log, one_by_one(model, context, text))) / len(text)) for context in (prompt, "")
        )
        assert value == pytest.approx(min(max((alone - after) / alone, -1), 1), abs=1e-4)


def test_self_certainty_is_the_divergence_from_uniform(model: CausalModel, tiny_lm: str) -> None:
    made = SelfCertainty(tiny_lm)(TEXTS, PROMPTS, [{}] * 3).value.tolist()
    size = model.network.config.vocab_size
    for value, prompt, text in zip(made, PROMPTS, TEXTS, strict=True):
        ids, own = model.begin(prompt, {}), []
        for token in model.tokens(text):
            with torch.no_grad():
                chances = model.network(torch.tensor([ids])).logits[0, -1].double().softmax(-1)
            own.append(sum(math.log(1 / size / chance) / size for chance in chances.tolist()))
            ids.append(token)
        assert value == pytest.approx(sum(own) / len(own) if own else 0, abs=1e-4)


def test_the_trained_model_reaches_rewards_inside_others_and_a_frozen_one_stays(
    model: CausalModel, tiny_lm: str
) -> None:
    asking, frozen = SelfCertainty(), SelfCertainty(tiny_lm)
    kept = frozen.model
    bind(WeightedSum([ExactMatch(), asking, frozen]), model)
    assert asking.model is model and frozen.model is kept
    assert not asking.spec.deterministic and frozen.spec.deterministic


def test_without_a_model_the_error_says_what_works() -> None:
    with pytest.raises(RewardError, match="`model: PATH` names a frozen one"):
        SelfCertainty()(["1"], ["1="], [{}])
    with pytest.raises(ValueError, match="no language model at 'nowhere'"):
        SelfAligned("nowhere")
    with pytest.raises(RewardError, match="no 'answer'"):
        RLPR()(["1"], ["1="], [{}])


def test_critical_entropy_is_of_the_distributions_that_critical_words_came_from(model: CausalModel) -> None:
    """The entropy as torch.distributions has it, from a forward pass for every critical token."""
    reward = CriticalEntropy(words=["+", "1=", "="])
    # neither a word nor a sign is looked for within a word
    reward.words = re.compile(r"\+|1=|=")
    bind(reward, model)
    texts = ["4+21=7", "", "42", "="]
    made = score(reward, texts, [*PROMPTS, PROMPTS[0]], [{}] * 4)
    expected = []
    for text, places in ((texts[0], [1, 3]), (texts[3], [0])):
        entropies = []
        for place in places:
            ids = [1, *model.tokens(PROMPTS[0] + text[:place])]
            with torch.no_grad():
                logits = model.network(torch.tensor([ids])).logits[0, -1]
            entropies.append(torch.distributions.Categorical(logits=logits).entropy().item())
        expected.append(sum(entropies) / len(entropies))
    assert made.value.tolist() == pytest.approx([expected[0], 0, 0, expected[1]], abs=1e-5)
    assert made.parts["words"].tolist() == [2, 0, 0, 1]
    assert CriticalEntropy().words.findall("Wait, awaiting; but let me wait.") == ["Wait", "but", "let me", "wait"]
