"""Rewards that learn during a run: their updates against literal ones, their state in checkpoints and on two
processes."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch.nn import functional as F

from flowalign.config import load, recipe
from flowalign.reward_training.texts import TextScorer
from flowalign.training import Trainer
from rewards import RewardError, Scores, as_reward, score
from rewards.base import LearningReward, learning
from rewards.compose import WeightedSum
from rewards.text.learned import Distilled, LearnedPRM, LearnedScore, Progress
from rewards.text.model import CausalModel
from rewards.text.novelty import Memory, Visits
from rewards.text.turns import Transcript, Turn
from rewards.text.verifiers import ExactMatch
from tests.flowalign.training.processes import together

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


def nines(samples: Sequence[str], prompts: Sequence[str]) -> list[float]:
    return [float(text.count("9")) for text in samples]


def test_progress_learns_which_steps_earn_the_outcome_and_shares_the_rest(tiny_lm: str, model: CausalModel) -> None:
    random = np.random.default_rng(0)
    texts = ["".join(random.choice(list("1239"), random.integers(2, 5))) for _ in range(60)]
    asked = ["1+1="] * 60

    def made() -> Progress:
        return Progress(as_reward(nines), tiny_lm, r"(?<=\d)(?=\d)", learning_rate=1e-2, passes=20)

    reward = made()
    (context, tokens) = model.begin("1+1=", {}), model.tokens("9\n1\n2")
    with torch.no_grad():
        hidden = model.network(torch.tensor([context + tokens]), output_hidden_states=True).hidden_states[-1][0]
    # a character is a token: the steps are '9\\n', '1\\n' and '2'
    places = [len(context) + i for i in (1, 3, 4)]
    states = model.states(["12345678", "9\n1\n2", ""], ["1=", "1+1=", "2="], [{}] * 3, [[8], [2, 4, 5], [0]])
    assert torch.allclose(states[1], hidden[places], atol=1e-4) and [len(row) for row in states] == [1, 3, 1]
    before = score(reward, texts, asked, [{}] * 60)
    # a head that knows nothing shares evenly
    share = before.value[1].item() / len(before.steps[1])
    assert [value for _, value in before.steps[1]] == pytest.approx([share] * len(before.steps[1]))
    errors = [reward.learn(texts, asked, [{}] * 60)["error"] for _ in range(12)]
    assert errors[-1] < 0.2 * errors[0]
    after = score(reward, texts, asked, [{}] * 60)
    assert torch.equal(after.value, before.value)

    def of_nines(scores: Scores) -> float:
        """How much more steps that are a 9 earn than others."""
        earned: dict[bool, list[float]] = {True: [], False: []}
        for text, row, outcome in zip(texts, scores.steps, scores.value.tolist(), strict=True):
            assert sum(value for _, value in row) == pytest.approx(outcome, abs=1e-5)
            for step, (_, value) in zip(text, row, strict=True):
                earned[step == "9"].append(value)
        return float(np.mean(earned[True]) - np.mean(earned[False]))

    # sharing evenly tells them apart by their texts alone
    assert of_nines(after) > 0.8 and of_nines(before) < 0.5
    fresh = made()
    fresh.load_state(*reward.state())
    assert score(fresh, texts, asked, [{}] * 60).steps == after.steps


def test_the_process_reward_model_takes_primes_update(tiny_lm: str) -> None:
    reward = LearnedPRM(ExactMatch(), tiny_lm, beta=0.5, learning_rate=1e-4)
    assert score(reward, TEXTS, PROMPTS, RECORDS).value.abs().max() < 1e-4
    mine, start = CausalModel.load(tiny_lm, "cpu"), CausalModel.load(tiny_lm, "cpu")
    mine.network.requires_grad_(True)
    optimizer = torch.optim.AdamW(mine.network.parameters(), 1e-4, weight_decay=0.0)
    for _ in range(2):
        losses = []
        for text, prompt, right in zip(TEXTS, PROMPTS, [1.0, 0.0, 0.0, 1.0], strict=True):
            context, tokens = mine.begin(prompt, {}), mine.tokens(text)
            rows = torch.arange(len(context) - 1, len(context) - 1 + len(tokens))
            gain = sum(
                sign
                * each.network(torch.tensor([context + tokens]))
                .logits[0, rows]
                .log_softmax(-1)[range(len(tokens)), tokens]
                .sum()
                for each, sign in ((mine, 1), (start, -1))
            )
            losses.append(F.binary_cross_entropy(torch.sigmoid(0.5 * gain), torch.tensor(right)))
        expected = torch.stack(losses).mean()
        assert reward.learn(TEXTS, PROMPTS, RECORDS)["loss"] == pytest.approx(expected.item(), abs=1e-4)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
    # Adam's first step divides a gradient by its own size: where that is rounding alone, so is the step
    apart = [
        (a - b).abs().flatten() for a, b in zip(reward.network.parameters(), mine.network.parameters(), strict=True)
    ]
    assert (torch.cat(apart) > 2e-5).float().mean() < 1e-4
    for _ in range(10):
        reward.learn(TEXTS, PROMPTS, RECORDS)
    made = score(reward, TEXTS, PROMPTS, RECORDS)
    assert made.steps is not None and (made.value[[0, 3]].min() > made.value[[1, 2]].max())
    again(reward, LearnedPRM(ExactMatch(), tiny_lm, beta=0.5, learning_rate=1e-4))


def test_right_texts_rise_above_wrong_ones_of_their_group(tiny_lm: str, tmp_path: Path) -> None:
    TextScorer(tiny_lm).save(tmp_path)

    def made() -> LearnedScore:
        return LearnedScore(ExactMatch(), str(tmp_path), "answer", learning_rate=3e-4, device="cpu")

    reward = made()
    margins = [(value := score(reward, TEXTS, PROMPTS, RECORDS).value)[0] - value[1] + value[3] - value[2]]
    for _ in range(8):
        assert reward.learn(TEXTS, PROMPTS, RECORDS)["pairs"] == 2
    value = score(reward, TEXTS, PROMPTS, RECORDS).value
    assert value[0] - value[1] + value[3] - value[2] > margins[0] + 0.1
    assert reward.learn(TEXTS[:1], PROMPTS[:1], RECORDS[:1]) == {"pairs": 0}
    again(reward, made())


def test_a_judge_is_asked_about_few_and_ridge_regression_tells_the_rest() -> None:
    asked: list[str] = []

    def judge(samples: Sequence[str], prompts: Sequence[str]) -> list[float]:
        asked.extend(samples)
        return [float("good" in text) for text in samples]

    random = np.random.default_rng(0)
    texts = [" ".join(random.choice(["good", "bad", "so", "it", "is"], 4)) for _ in range(200)]
    reward = Distilled(as_reward(judge), asked=10, size=128, ridge=0.1)
    assert score(reward, texts, [""] * 200, [{}] * 200).value.tolist() == [0.5] * 200 and not asked
    for start in range(0, 150, 30):
        reward.learn(texts[start : start + 30], [""] * 30, [{}] * 30)
    assert len(asked) == 50
    features = torch.stack([reward._features(text, "") for text in asked])
    verdicts = torch.tensor([float("good" in text) for text in asked], dtype=torch.float64) - 0.5
    gram = features @ features.T + 0.1 * torch.eye(len(features), dtype=torch.float64)
    unseen = torch.stack([reward._features(text, "") for text in texts[150:]])
    # kernel ridge regression, the other form of the same estimate
    expected = 0.5 + unseen @ features.T @ torch.linalg.solve(gram, verdicts)
    value = score(reward, texts[150:], [""] * 50, [{}] * 50).value
    assert torch.allclose(value.double(), expected, atol=1e-5)
    right = torch.tensor(["good" in text for text in texts[150:]])
    assert ((value > 0.5) == right).float().mean() > 0.8
    again(reward, Distilled(as_reward(judge), asked=10, size=128, ridge=0.1))


def test_texts_near_right_ones_and_far_from_all_earn_more(tiny_lm: str) -> None:
    reward = Memory(ExactMatch(), tiny_lm, exploit=1.0, explore=0.0, neighbours=1, device="cpu")
    assert score(reward, TEXTS, PROMPTS, RECORDS).value.tolist() == [1, 0, 0, 1]
    reward.learn(TEXTS, PROMPTS, RECORDS)
    near = score(reward, TEXTS, PROMPTS, RECORDS).parts["near"]
    assert near[0].item() == pytest.approx(1, abs=1e-5) and near[1] < 1
    bold = Memory(ExactMatch(), tiny_lm, exploit=0.0, explore=1.0, device="cpu", most=2)
    bold.learn(TEXTS[:2], PROMPTS[:2], RECORDS[:2])
    new = score(bold, [*TEXTS[:2], "9"], [*PROMPTS[:2], "1+8="], [*RECORDS[:2], {"answer": "9"}]).parts["new"]
    assert new[:2].abs().max() < 1e-5 and new[2] > 0.001
    again(reward, Memory(ExactMatch(), tiny_lm, exploit=1.0, explore=0.0, neighbours=1, device="cpu"))


def test_rare_states_earn_more() -> None:
    def episode(*states: str) -> Transcript:
        turns = [Turn(begin=i, end=i + 1, context=1, reward=0.0, state=state) for i, state in enumerate(states)]
        return Transcript("x" * len(states), turns, [])

    texts = [episode("a", "b", "a"), episode("c")]
    for over, expected in (
        ("run", [3.0, 1.0]),
        ("episode", [2 + 1 / math.sqrt(2), 1.0]),
        ("both", [2 + 1 / math.sqrt(2), 1.0]),
    ):
        assert score(Visits(over), texts, ["?"] * 2, [{}] * 2).value.tolist() == pytest.approx(expected)
    reward = Visits("run")
    reward.learn(texts, ["?"] * 2, [{}] * 2)
    made = score(reward, texts, ["?"] * 2, [{}] * 2)
    assert made.value.tolist() == pytest.approx([2 / math.sqrt(3) + 1 / math.sqrt(2), 1 / math.sqrt(2)])
    fresh = Visits("run")
    fresh.load_state({}, json.loads(json.dumps(reward.state()[1])))
    assert fresh.counts == {"a": 2, "b": 1, "c": 1}
    with pytest.raises(RewardError, match="counts the states of an environment"):
        score(reward, ["text"], ["?"], [{}])


def test_rewards_that_learn_are_found_within_others(tiny_lm: str) -> None:
    inner = Distilled(as_reward(nines))
    assert learning(WeightedSum([as_reward(nines), inner])) == [inner] and isinstance(inner, LearningReward)
    assert not learning(ExactMatch())


def long(samples: Sequence[str], prompts: Sequence[str]) -> list[float]:
    return [len(text) / 10 for text in samples]


SMALL = [
    "training.prompts_per_iteration=4",
    "training.group_size=4",
    "training.micro_batch_size=4",
    "training.previews=0",
]
SMALL += ["evaluation.prompts=null", "training.checkpoint_every=1", "name=run", "model.lora=null"]
INNER = "{name: distilled, size: 64, reward: {name: exact_match}}"
LEARNS = f"rewards=[{{name: weighted_sum, rewards: [{{name: exact_match}}, {INNER}]}}]"


def trained(folder: Path, iterations: int, resume: bool = False) -> Path:
    overrides = [
        *SMALL,
        LEARNS,
        f"training.iterations={iterations}",
        f"output={folder}",
        "training.optimizer.schedule=constant",
        "training.optimizer.warmup_updates=0",
    ]
    Trainer(load(recipe("tiny_lm/grpo"), overrides), resume=resume, progress=False).train()
    return folder / "run"


def test_a_resumed_run_goes_on_with_what_its_reward_has_learned(tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", 3)
    trained(tmp_path / "parts", 2)
    parts = trained(tmp_path / "parts", 3, resume=True)
    states = [load_file(run / "checkpoints" / "checkpoint-000003" / "reward_0.safetensors") for run in (whole, parts)]
    assert states[0]["products"].abs().sum() > 0
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name])
    rows = [[json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in (whole, parts)]
    assert [row["reward/mean"] for row in rows[0]] == [row["reward/mean"] for row in rows[1]]
    assert rows[0][0]["reward/distilled(exact_match)/asked"] == 16


def test_of_two_processes_one_learns_from_the_samples_of_both(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
        overrides = [*SMALL, LEARNS, "training.iterations=2", f"output={folder}"]
        values = load(recipe("tiny_lm/grpo"), overrides).model_dump(mode="json", exclude_unset=True)
        (folder / "config.yaml").write_text(yaml.safe_dump(values))
        (folder / "launch.yaml").write_text("{}")
    trained(folders[0], 2)
    together(2, folders[1])
    states = [
        load_file(folder / "run" / "checkpoints" / "checkpoint-000002" / "reward_0.safetensors") for folder in folders
    ]
    torch.testing.assert_close(states[0]["products"], states[1]["products"], atol=0.3, rtol=0)
    rows = [json.loads((folder / "run" / "metrics.jsonl").read_text().splitlines()[0]) for folder in folders]
    # the same samples are asked about: 16 of all 16
    for row in rows:
        assert row["reward/distilled(exact_match)/asked"] == 16
