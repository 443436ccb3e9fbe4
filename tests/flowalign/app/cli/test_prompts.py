"""`flowalign difficulty` and `reference-scores`: what they measure is what the data and rewards read."""

import json
from pathlib import Path

import pytest
import torch

from flowalign.app.cli.main import main
from flowalign.config import load, recipe
from flowalign.config.rewards import referenced
from flowalign.data import Prompts
from flowalign.errors import ConfigError
from flowalign.training.building import build_policy
from rewards import score
from rewards.references import CalibratedReward
from rewards.text.verifiers import ExactMatch


def test_measured_success_rates_choose_the_prompts(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    few, rated = tmp_path / "few.jsonl", tmp_path / "rated.jsonl"
    sums = Prompts.read("sums_train").spread(20)
    records = [{"prompt": text, **m} for text, m in zip(sums.texts, sums.metadata, strict=True)]
    few.write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(SystemExit) as left:
        main(["difficulty", str(recipe("tiny_lm/grpo")), str(rated), f"data.prompts={few}", "--samples", "4"])
    assert not left.value.code
    lines = [json.loads(line) for line in rated.read_text().splitlines()]
    assert "20 prompts" in capsys.readouterr().out
    assert [{k: v for k, v in line.items() if k != "success_rate"} for line in lines] == records

    policy = build_policy(load(recipe("tiny_lm/grpo")))
    made = policy.sample([text for text in sums.texts for _ in range(4)], list(range(80)), max_new_tokens=5)
    right = [text == sums.metadata[i // 4]["answer"] for i, text in enumerate(policy.decode(made))]
    rates = torch.tensor(right).float().view(-1, 4).mean(1).tolist()
    assert [line["success_rate"] for line in lines] == rates

    data = load(recipe("tiny_lm/grpo"), [f"data.prompts={rated}", "data.difficulty={low: 0.2, high: 0.8}"]).data
    middling = [line["prompt"] for line in lines if 0.2 <= line["success_rate"] <= 0.8]
    assert 0 < len(middling) < 20 and data.kept(Prompts.read(str(rated))).texts == middling


def test_reference_scores_are_the_inner_rewards_of_the_start_model(tmp_path: Path) -> None:
    few, scored = tmp_path / "few.jsonl", tmp_path / "scored.jsonl"
    sums = Prompts.read("sums_train").spread(3)
    few.write_text("".join(json.dumps({"prompt": t, **m}) + "\n" for t, m in zip(sums.texts, sums.metadata)))
    given = [f"data.prompts={few}", "rewards=[{name: calibrated, reward: {name: exact_match}}]"]
    with pytest.raises(SystemExit) as left:
        main(["reference-scores", str(recipe("tiny_lm/grpo")), str(scored), *given, "--samples", "4"])
    assert not left.value.code
    policy = build_policy(load(recipe("tiny_lm/grpo")))
    made = policy.decode(
        policy.sample([text for text in sums.texts for _ in range(4)], list(range(12)), max_new_tokens=5)
    )
    right = [float(text == sums.metadata[i // 4]["answer"]) for i, text in enumerate(made)]
    lines = [json.loads(line) for line in scored.read_text().splitlines()]
    assert [line["reference_score"] for line in lines] == [{"exact_match": right[4 * i : 4 * i + 4]} for i in range(3)]
    # and the reward that asked for them reads them
    calibrated = CalibratedReward(ExactMatch())
    read = Prompts.read(str(scored))
    value = score(calibrated, [made[0]], read.texts[:1], read.metadata[:1]).value.item()
    assert value == sum(0.5 if other == right[0] else float(right[0] > other) for other in right[:4]) / 4
    with pytest.raises(ConfigError, match="rewards: none is compared with reference scores"):
        referenced(load(recipe("tiny_lm/grpo")).rewards)
