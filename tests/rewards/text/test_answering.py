"""Values of beginnings, against transformers' own generate and the chances of the next token."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rewards import RewardError, as_reward, score
from rewards.text.answering import BeatsPlain, StepProgress
from rewards.text.golden import GoldPath
from rewards.text.model import CausalModel
from rewards.text.rule_and_model import RuleAndModel
from rewards.text.steps import PathFaithfulness
from rewards.text.verifiers import ExactMatch

DIGITS = r"(?<=\d)(?=\d)"
PROMPTS, TEXTS = ["17+25=", "40-8=", "9+9="], ["42", "31", "18"]
RECORDS = [{"answer": "42"}, {"answer": "32"}, {"answer": "18"}]


def test_a_step_earns_what_it_adds_to_the_chance_of_a_right_answer(tiny_lm: str) -> None:
    reward = StepProgress(ExactMatch(), tiny_lm, samples=1, most=5, temperature=0.0, size=0.5, separator=DIGITS)
    made = score(reward, TEXTS, PROMPTS, RECORDS)
    network, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_lm), AutoTokenizer.from_pretrained(tiny_lm)
    assert made.steps is not None
    for prompt, text, record, steps in zip(PROMPTS, TEXTS, RECORDS, made.steps, strict=True):
        values = []
        for end in range(len(text) + 1):
            begun = tokenizer(prompt + text[:end], return_tensors="pt")
            ids = network.generate(**begun, max_new_tokens=5, do_sample=False)[0]
            ended = tokenizer.decode(ids, skip_special_tokens=True).removeprefix(prompt)
            values.append(float(ended == record["answer"]))
        right = float(text == record["answer"])
        expected = [0.5 * (values[1] - values[0]), 0.5 * (values[2] - values[1]) + right]
        assert [end for end, _ in steps] == [1, 2]
        assert [value for _, value in steps] == pytest.approx(expected)
    assert made.parts["outcome"].tolist() == [1, 0, 1]


def test_the_value_of_a_beginning_is_the_chance_of_ending_well(tiny_lm: str, model: CausalModel) -> None:
    reward = StepProgress(ExactMatch(), samples=32, most=1, separator=DIGITS)
    reward.bind(model)
    made = reward.values(["4", "1"], ["17+25=", "9+9="], [{"answer": "42"}, {"answer": "18"}])
    for value, context, digit in zip(made.tolist(), ["17+25=4", "9+9=1"], ["2", "8"], strict=True):
        begun = torch.tensor([model.begin(context, {})])
        with torch.no_grad():
            chance = model.network(begun).logits[0, -1].softmax(-1)[model.tokens(digit)[0]].item()
        assert value == pytest.approx(chance, abs=4 * (chance * (1 - chance) / 32) ** 0.5 + 1e-6)
    with pytest.raises(ValueError, match="samples: 1 works"):
        StepProgress(ExactMatch(), samples=4, temperature=0.0)


def test_a_text_counts_where_the_plain_answer_is_not_better(tiny_lm: str) -> None:
    texts, prompts = ["42", "7", "18", "1", "32", "3"], ["17+25="] * 2 + ["9+9="] * 2 + ["40-8="] * 2
    records = [{"answer": answer} for answer in ("42", "42", "0", "0", "32", "32")]
    made = score(BeatsPlain(ExactMatch(), model=tiny_lm, most=5, ties=False), texts, prompts, records)
    model = CausalModel.load(tiny_lm, "cpu")
    asked = sorted(set(prompts))
    plain = dict(zip(asked, model.continued([model.begin(prompt, {}) for prompt in asked], 5), strict=True))
    for i, (text, prompt, record) in enumerate(zip(texts, prompts, records, strict=True)):
        right, alone = text == record["answer"], plain[prompt] == record["answer"]
        assert made.parts["plain"][i] == alone and made.value[i] == float(right and not alone)
    again = score(BeatsPlain(ExactMatch(), model=tiny_lm, most=5), texts, prompts, records)
    assert again.value.tolist() == again.parts["outcome"].tolist() == [1, 0, 0, 0, 1, 0]


def test_the_right_reasoning_is_the_most_probable_of_those_found_with_the_answer(model: CausalModel) -> None:
    """The tiny model's reasoning is the answer's digits, and every text with the right first digit counts as right."""

    def begins_well(samples: list[str], prompts: list[str], metadata: list[dict[str, str]]) -> list[float]:
        return [float(text[:1] == record["answer"][:1]) for text, record in zip(samples, metadata, strict=True)]

    reward = GoldPath(as_reward(begins_well), template="{prompt}", tries=6, most=2, separator=DIGITS)
    reward.bind(model)
    prompts, records = [*PROMPTS, "1+1="], [*RECORDS, {"answer": "x"}]
    found = reward.reasonings(prompts, records)
    drawn = [model.continued([model.begin(each, {}) for each in prompts], 2, 1.0, i) for i in range(6)]
    for number, (prompt, record, gold) in enumerate(zip(prompts, records, found, strict=True)):
        right = {texts[number] for texts in drawn if texts[number][:1] == record["answer"][:1]}
        context = model.begin(prompt, {})
        means = {text: model.log_probs([context], [model.tokens(text)])[0].mean().item() for text in right}
        assert gold == max(means, key=means.__getitem__, default=None)
    rows = [number for number, gold in enumerate(found) if gold is not None]
    # the model cannot add 9 and 9, and nothing is right for the last
    assert rows == [0, 1]
    reward.draw = 0
    made = score(reward, [*TEXTS, "2"], prompts, records)
    known = PathFaithfulness(key="gold", separator=DIGITS)
    known.bind(model)
    expected = score(known, TEXTS[:2], PROMPTS[:2], [{"gold": text} for text in found[:2]])
    assert made.value.tolist() == pytest.approx([*expected.value.tolist(), 0, 0], abs=1e-4)
    assert made.parts["gold"].tolist() == [1, 1, 0, 0]
    with pytest.raises(RewardError, match="no 'hint' with the prompt"):
        GoldPath(as_reward(begins_well), template="{hint}")._shown({"prompt": "1+1="})


def test_a_rule_counts_as_far_as_it_is_sure() -> None:
    def model_of(samples: list[str], prompts: list[str]) -> list[float]:
        return [0.25] * len(samples)

    def sure(samples: list[str], prompts: list[str]) -> list[float]:
        return [len(text) / 2 for text in samples]

    rule, learned = ExactMatch(), as_reward(model_of)
    made = score(RuleAndModel(rule, learned, as_reward(sure)), ["42", "4", "3"], ["17+25="] * 3, [{"answer": "42"}] * 3)
    assert made.value.tolist() == [1.0, 0.125, 0.125]
    assert score(RuleAndModel(rule, learned, 0.8), ["42"], ["17+25="], [{"answer": "42"}]).value[
        0
    ].item() == pytest.approx(0.85)
    with pytest.raises(ValueError, match="from 0 to 1"):
        RuleAndModel(rule, learned, 3)
