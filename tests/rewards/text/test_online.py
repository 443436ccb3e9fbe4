"""Rewards that learn during a run, newer ones: literal versions of their rules, and their state through files."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from rewards import as_reward, score
from rewards.base import LearningReward, learning
from rewards.compose import WeightedSum
from rewards.learned_sum import LearnedSum, covariances
from rewards.text.latent_flow import LatentFlow, losses_of_tokens
from rewards.text.model import CausalModel
from rewards.text.online_prm import OnlinePRM
from rewards.text.turns import Transcript, Turn
from rewards.text.verifiers import ExactMatch
from rewards.text.vetted import Vetted

PROMPTS = ["17+25=", "17+25=", "40-8=", "40-8="]
TEXTS = ["42", "24", "3", "32"]
RECORDS = [{"answer": "42", "group": 0}] * 2 + [{"answer": "32", "group": 1}] * 2


def again(reward: Any, fresh: Any) -> None:
    """A state that goes through files gives the same rewards and the same next update."""
    tensors, state = reward.state()
    fresh.load_state({name: value.clone() for name, value in tensors.items()}, json.loads(json.dumps(state)))
    for _ in range(2):
        made, other = (score(each, TEXTS, PROMPTS, RECORDS).value for each in (reward, fresh))
        assert torch.equal(made, other)
        reward.learn(TEXTS, PROMPTS, RECORDS)
        fresh.learn(TEXTS, PROMPTS, RECORDS)


def token_log_probs(model: CausalModel, prompt: str, text: str) -> torch.Tensor:
    context, tokens = model.begin(prompt, {}), model.tokens(text)
    logits = model.network(torch.tensor([context + tokens])).logits[0, len(context) - 1 : -1]
    return logits.log_softmax(-1)[range(len(tokens)), tokens]


def test_oprls_process_model_learns_by_dpo_against_the_policy(tiny_lm: str, other_lm: str, model: CausalModel) -> None:
    def made() -> OnlinePRM:
        reward = OnlinePRM(ExactMatch(), other_lm, beta=0.5, separator="(?<=.)", learning_rate=1e-4)
        reward.bind(model)
        return reward

    reward, mine = made(), CausalModel.load(other_lm, "cpu")
    mine.network.requires_grad_(True)
    before = score(reward, TEXTS, PROMPTS, RECORDS)
    with torch.no_grad():
        for text, prompt, steps in zip(TEXTS, PROMPTS, before.steps, strict=True):
            gains = 0.5 * (token_log_probs(mine, prompt, text) - token_log_probs(model, prompt, text))
            assert [value for _, value in steps] == pytest.approx(gains.tolist(), abs=1e-4)
    # equation 3 on the two pairs of right and wrong texts
    implicit = [
        0.5 * (token_log_probs(mine, prompt, text) - token_log_probs(model, prompt, text).detach()).sum()
        for text, prompt in zip(TEXTS, PROMPTS, strict=True)
    ]
    expected = -(F.logsigmoid(implicit[0] - implicit[1]) + F.logsigmoid(implicit[3] - implicit[2])) / 2
    told = reward.learn(TEXTS, PROMPTS, RECORDS)
    assert told["pairs"] == 2 and told["loss"] == pytest.approx(expected.item(), abs=1e-4)
    expected.backward()
    torch.optim.AdamW(mine.network.parameters(), 1e-4, weight_decay=0.0).step()
    for ours, theirs in zip(reward.network.parameters(), mine.network.parameters(), strict=True):
        assert (ours - theirs).abs().max() < 2e-5
    for _ in range(3):
        reward.learn(TEXTS, PROMPTS, RECORDS)
    value = score(reward, TEXTS, PROMPTS, RECORDS).value
    assert value[0] - value[1] > before.value[0] - before.value[1] and value[3] - value[2] > 0
    assert reward.learn(["42", "42"], PROMPTS[:2], RECORDS[:2]) == {"pairs": 0}
    again(reward, made())


def test_an_environments_answers_earn_nothing(other_lm: str, model: CausalModel) -> None:
    reward = OnlinePRM(ExactMatch(), other_lm)
    reward.bind(model)
    turns = [
        Turn(begin=0, end=2, context=1, reward=0.0, state="a"),
        Turn(begin=4, end=5, context=5, reward=1.0, state=""),
    ]
    episode = Transcript("12+-3", turns, [])
    (row,) = score(reward, [episode], ["1+1="], [{"answer": "3"}]).steps
    (plain,) = reward._rewards(["12+-3"], ["1+1="], [{}])
    assert row == [(2, pytest.approx(plain[:2].sum().item())), (5, pytest.approx(plain[4].item()))]


def test_a_weight_follows_the_gradient_of_the_primary_return_through_a_natural_step() -> None:
    torch.manual_seed(0)
    logits, values = torch.randn(5, dtype=torch.float64), torch.randn(3, 5, dtype=torch.float64)
    weights = torch.tensor([0.7, 0.2], dtype=torch.float64, requires_grad=True)
    chance = logits.softmax(0)
    fisher = torch.diag(chance) - chance[:, None] * chance
    # the inner step of a softmax policy on the sum, and the primary return after it
    gradient = fisher @ (values[0] + weights @ values[1:])
    step = 1e-3
    (slope,) = torch.autograd.grad(
        (logits + step * torch.linalg.pinv(fisher) @ gradient).softmax(0) @ values[0], weights
    )
    rows = torch.multinomial(chance, 400_000, replacement=True, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(covariances(values[:, rows]), slope / step, atol=0.02)


def long(samples: Sequence[str], prompts: Sequence[str]) -> list[float]:
    return [float(len(text)) for text in samples]


def right(samples: Sequence[str], prompts: Sequence[str]) -> list[float]:
    return [float("9" in text) for text in samples]


def test_weights_of_heuristics_grow_where_they_help_and_fall_to_nothing_where_they_do_not() -> None:
    texts, prompts = ["9", "19", "111", "2222"], ["a", "a", "a", "a"]
    reward = LearnedSum(as_reward(right), [as_reward(long), as_reward(right)], learning_rate=0.5)
    assert score(reward, texts, prompts, [{}] * 4).value.tolist() == [3, 4, 3, 4]
    told = [reward.learn(texts, prompts, [{}] * 4) for _ in range(6)][-1]
    assert list(told.values()) == [0.0, 2.0]
    assert score(reward, texts, prompts, [{}] * 4).value.tolist() == [3, 3, 0, 0]
    assert learning(WeightedSum([reward])) == [reward] and isinstance(reward, LearningReward)
    again(reward, LearnedSum(as_reward(right), [as_reward(long), as_reward(right)], learning_rate=0.5))
    with pytest.raises(ValueError, match="1 weights for 2"):
        LearnedSum(as_reward(right), [as_reward(long), as_reward(right)], weights=[1.0])


def test_agreement_is_trusted_where_a_prompt_learns_as_labelled_ones_do() -> None:
    reward = Vetted(ExactMatch(), similarity=0.99, share=0.0)
    # of four texts each; of 'u' ever more agree, of 'v' ever fewer
    rounds = [
        (["1", "0", "0", "0"], ["7", "5", "6", "8"], ["7", "7", "7", "7"]),
        (["1", "1", "0", "0"], ["7", "7", "6", "8"], ["7", "7", "6", "8"]),
        (["1", "1", "1", "1"], ["7", "7", "7", "7"], ["7", "5", "6", "8"]),
    ]
    prompts = ["l"] * 4 + ["u"] * 4 + ["v"] * 4
    records: list[dict[str, Any]] = [{"answer": "1"}] * 4 + [{}] * 8
    texts: list[str] = []
    for number, parts in enumerate(rounds):
        texts = [text for part in parts for text in part]
        made = score(reward, texts, prompts, records)
        assert made.missing is not None and made.missing.tolist() == [*[False] * 4, *[number < 2] * 4, *[True] * 4]
        reward.learn(texts, prompts, records)
    labelled, u, v = ([0.25, 0.5, 1.0], [0.25, 0.5, 1.0], [1.0, 0.5, 0.25])
    assert reward.labelled == {"l": labelled} and reward.unlabelled == {"u": u, "v": v}
    assert reward._cosine(v) == pytest.approx(np.dot(labelled, v) / np.linalg.norm(labelled) / np.linalg.norm(v))
    assert reward.vetted() == {"u"}
    made = score(reward, texts, prompts, records)
    assert made.missing is not None and made.missing.tolist() == [False] * 8 + [True] * 4
    assert made.value.tolist() == [1] * 8 + [0] * 4
    half = Vetted(ExactMatch(), similarity=2.0, share=0.5)
    half.load_state({}, json.loads(json.dumps(reward.state()[1])))
    assert half.vetted() == {"u"}
    assert Vetted(ExactMatch()).vetted() == set()


def test_a_flow_learned_on_right_texts_tells_tokens_that_leave_it(model: CausalModel, tiny_lm: str) -> None:
    def made() -> LatentFlow:
        return LatentFlow(ExactMatch(), tiny_lm, learning_rate=3e-3, passes=20, threshold=0.0, most=1)

    reward = made()
    assert score(reward, ["42", ""], PROMPTS[:2], RECORDS[:2]).value.tolist() == [0.0, 0.0]
    losses = [reward.learn(TEXTS, PROMPTS, RECORDS)["loss"] for _ in range(4)]
    assert losses[-1] < 0.6 * losses[0]
    texts = ["42", "4242"]
    states, ends = reward._states(texts, ["17+25="] * 2, RECORDS[:2])
    # the authors' rule, a token at a time
    x, before, t = states[1][1:], states[1][:-1], 0.8
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(5))
    assert reward.field is not None
    with torch.no_grad():
        literal = [
            t / (1 - t) * float(((reward.field(torch.cat([t * a + (1 - t) * e, b])) - (a - e)) ** 2).mean())
            for a, b, e in zip(x, before, noise, strict=True)
        ]
    reward.random.manual_seed(5)
    (row,) = score(reward, texts[1:], ["17+25="], RECORDS[:1]).steps
    worst = int(np.argmax(literal)) + 1
    assert row == [(end, pytest.approx(-float(i == worst))) for i, end in enumerate(ends[1])]
    again(reward, made())


def test_of_the_worst_tokens_the_place_between_smallest_and_largest_is_lost() -> None:
    deviation = torch.tensor([1.0, 5.0, 4.0, 3.5, 2.0])
    assert losses_of_tokens(deviation, 0.6, 15).tolist() == pytest.approx([0, 1, 0.75, 0.625, 0])
    assert losses_of_tokens(deviation, 0.6, 2).tolist() == pytest.approx([0, 1, 0.75, 0, 0])
    assert losses_of_tokens(torch.zeros(0), 0.6, 2).tolist() == []
