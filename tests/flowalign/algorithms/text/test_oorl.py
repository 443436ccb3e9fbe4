"""GRPO and a preference between groups of texts, against one text at a time."""

import json
import math
from pathlib import Path

import pytest
import torch

from flowalign.core.preferences import group_equivalence
from flowalign.errors import ConfigError
from tests.flowalign.small_run import small_run

LINES = [
    {"prompt": "17+25=", "answer": "42", "same": ["42", "042"], "other": ["43", "24", "7"]},
    {"prompt": "40-8=", "answer": "32", "same": "32", "other": "48"},
]


def test_the_preference_is_of_means_and_equivalents_gain_alike() -> None:
    gain = torch.tensor([1.0, 3.0, -1.0, 0.5, 0.25], dtype=torch.float64)
    good, group = torch.tensor([True, True, False, False, True]), torch.tensor([0, 0, 0, 1, 1])
    made = group_equivalence(gain, good, group, beta=0.5, equivalence=2.0).tolist()
    first = math.log(1 + math.exp(-0.5 * (2 - -1))) + 2.0 * 1.0
    assert made == pytest.approx([first, math.log(1 + math.exp(-0.5 * (0.25 - 0.5)))])


def test_a_runs_loss_is_grpos_plus_the_mean_preference(tmp_path: Path) -> None:
    file = tmp_path / "groups.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    small = (
        f"data={{prompts: {file}}}",
        "training.prompts_per_iteration=2",
        "training.group_size=4",
        "training.micro_batch_size=4",
        "rollout.max_new_tokens=4",
    )
    named = "algorithm={name: oorl, equivalent: same, inequivalent: other, weight: 0.3, beta: 0.5, equivalence: 2.0}"
    run, plain = (
        small_run("tiny_lm/grpo", tmp_path / name, *small, *more) for name, more in (("a", [named]), ("b", []))
    )
    policy, experience = run.policy, run.collect(run.groups.draw(0))
    sampled = plain.collect(plain.groups.draw(0))

    @torch.no_grad()
    def log_prob(prompt: str, text: str) -> float:
        context = policy.tokenizer(prompt).input_ids
        tokens = [*policy.tokenizer(text, add_special_tokens=False).input_ids, policy.tokenizer.eos_token_id]
        logits = policy.network(torch.tensor([context + tokens])).logits[0, len(context) - 1 : -1]
        return logits.log_softmax(-1)[range(len(tokens)), tokens].sum().item()

    def log_probs() -> list[dict[str, list[float]]]:
        keys = ("same", "other")
        listed = [{key: [line[key]] if isinstance(line[key], str) else line[key] for key in keys} for line in LINES]
        return [
            {key: [log_prob(line["prompt"], text) for text in texts[key]] for key in keys}
            for line, texts in zip(LINES, listed, strict=True)
        ]

    start = log_probs()
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.mul_(1.02)
        plain.policy.network.load_state_dict(policy.network.state_dict())
    expected = []
    for now, then in zip(log_probs(), start, strict=True):
        same, other = ([a - b for a, b in zip(now[key], then[key], strict=True)] for key in ("same", "other"))
        mean, less = sum(same) / len(same), sum(other) / len(other)
        spread = sum((value - mean) ** 2 for value in same) / len(same)
        expected.append(math.log(1 + math.exp(-0.5 * (mean - less))) + 2 * spread)
    assert len({round(value, 4) for value in expected}) == 2
    with torch.no_grad():
        mine = torch.cat([run.algorithm.losses(policy, experience, rows)[0] for rows in experience.items.split(3)])
        grpo = torch.cat([plain.algorithm.losses(plain.policy, sampled, rows)[0] for rows in sampled.items.split(3)])
    assert (mine - grpo).mean().item() == pytest.approx(0.3 * sum(expected) / 2, abs=1e-5)


def test_a_prompt_without_its_texts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no texts under 'equivalent' with the prompt"):
        small_run("tiny_lm/grpo", tmp_path, "algorithm={name: oorl}")
