"""What docs/text.md says happens in the awkward cases, each through a whole training run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flowalign.app.cli.main import main
from flowalign.config import recipe
from flowalign.data import ASSETS
from flowalign.errors import ConfigError
from flowalign.policies.language.policy import LanguagePolicy
from flowalign.training import Trainer
from rewards import RewardError
from tests.flowalign.small_run import SMALL, small_run

FEWER = "training.group_size=4", "training.micro_batch_size=16"


def trainer(folder: Path, *overrides: str, end: float | None = None, **more: Any) -> Trainer:
    """Of the shipped language model.

    Args:
        end: how much likelier than the model says a text is to end at every token.
    """
    policy = LanguagePolicy.from_pretrained(ASSETS / "tiny_lm")
    if end is not None:
        bias = torch.zeros(policy.network.config.vocab_size)
        bias[policy.ends] = end
        policy.network.lm_head.bias = torch.nn.Parameter(bias)
    return small_run("tiny_lm/grpo", folder, *FEWER, *overrides, policy=policy, **more)


def moved(run: Trainer) -> bool:
    """Train, and say whether any weight changed."""
    before = [p.detach().clone() for p in run.learner.parameters.values()]
    run.train()
    return any(not torch.equal(a, b) for a, b in zip(before, run.learner.parameters.values(), strict=True))


def test_an_empty_text_is_one_action_and_wrong(tmp_path: Path) -> None:
    seen: list[str] = []

    def listening(texts: list[str], prompts: list[str]) -> list[float]:
        seen.extend(texts)
        return [0.0] * len(texts)

    trainer(tmp_path / "seen", end=50.0, reward=listening).train()
    assert seen == [""] * 16
    run = trainer(tmp_path / "wrong", end=50.0)
    assert not moved(run)
    (metrics,) = run.metrics.read()
    assert metrics["text/tokens"] == 1 and metrics["text/cut"] == 0 and metrics["reward/mean"] == 0


def test_a_text_that_is_cut_is_learned_from_unless_it_is_left_out(tmp_path: Path) -> None:
    def varied(texts: list[str], prompts: list[str]) -> list[float]:
        return [float(i % 2) for i in range(len(texts))]

    for masked in (False, True):
        run = trainer(tmp_path / str(masked), f"algorithm.mask_truncated={masked}", end=-50.0, reward=varied)
        assert moved(run) != masked
        (metrics,) = run.metrics.read()
        assert metrics["text/cut"] == 1 and metrics["text/tokens"] == 5 and metrics["reward/mean"] == 0.5


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_groups_that_are_all_wrong_or_all_right_teach_nothing_and_cost_nothing(value: float, tmp_path: Path) -> None:
    run = trainer(tmp_path, reward=lambda texts, prompts: [value] * len(texts))
    assert not moved(run)
    (metrics,) = run.metrics.read()
    assert metrics["reward/zero_spread"] == 1 and metrics["policy/gradient_norm"] == 0
    # those of sampling, and the one row that every process keeps
    assert metrics["forwards"] == 16 + 1


def test_one_group_with_spread_among_others_is_all_that_is_computed(tmp_path: Path) -> None:
    first = [1.0, 0.0, 0.0, 0.0] + [1.0] * 12
    run = trainer(tmp_path, reward=lambda texts, prompts: first)
    assert moved(run)
    (metrics,) = run.metrics.read()
    assert metrics["reward/zero_spread"] == 0.75 and metrics["forwards"] == 16 + 4


def failing_at(call: int) -> Callable[[list[str], list[str]], list[float]]:
    calls = 0

    def verifier(texts: list[str], prompts: list[str]) -> list[float]:
        nonlocal calls
        calls += 1
        if calls == call:
            raise TimeoutError("nobody answered\nafter a while")
        return [float(text[-1:] in {"1", "3", "5", "7", "9"}) for text in texts]

    return verifier


def test_a_verifier_that_fails_stops_the_run_with_one_line_and_the_run_goes_on(tmp_path: Path) -> None:
    settings = ["training.iterations=4", "training.checkpoint_every=2"]
    with pytest.raises(RewardError) as caught:
        trainer(tmp_path / "half", *settings, reward=failing_at(4)).train()
    message = str(caught.value)
    assert message.startswith("reward 'verifier' failed: TimeoutError: nobody answered after a while (")
    assert f"{Path(__file__).name}, line " in message and "\n" not in message
    again = trainer(tmp_path / "half", *settings, reward=failing_at(0), resume=True)
    assert again.iteration == 2
    again.train()
    whole = trainer(tmp_path / "whole", *settings, reward=failing_at(0))
    whole.train()
    for name, value in whole.learner.parameters.items():
        assert torch.equal(value, again.learner.parameters[name]), name


def test_a_prompt_without_an_answer_is_one_line_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "sums.txt").write_text("1+1=\n2+2=\n3+3=\n4+4=\n")
    arguments = [*SMALL, *FEWER, f"data.prompts={tmp_path / 'sums.txt'}", f"output={tmp_path}"]
    with pytest.raises(SystemExit) as left:
        main(["train", str(recipe("tiny_lm/grpo")), *arguments])
    assert left.value.code == 1
    complaint = capsys.readouterr().err.strip().splitlines()[-1]
    assert "flowalign: reward 'exact_match' needs the right answer; the prompt '" in complaint


def test_a_prompt_that_does_not_fit_stops_the_run_with_its_beginning(tmp_path: Path) -> None:
    long = "1+" * 20 + "1="
    prompts = tmp_path / "long.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": p, "answer": "2"}) + "\n" for p in ("1+1=", long)))
    with pytest.raises(ConfigError, match=r"43 tokens and max_new_tokens=5 do not fit .* context of 32: '1\+1\+"):
        trainer(tmp_path, f"data.prompts={prompts}").train()


def test_a_verifier_that_takes_too_long_counts_as_wrong_and_training_goes_on(tmp_path: Path) -> None:
    # each text that is stopped costs the start of a process
    few = ["training.prompts_per_iteration=2", "training.group_size=2"]
    run = trainer(tmp_path, "rewards=[{name: maths, timeout: 0.0}]", *few)
    assert not moved(run)
    (metrics,) = run.metrics.read()
    assert metrics["reward/maths_timeout"] == 1 and metrics["reward/mean"] == 0
