"""scripts/compare_search_training.py: best of n, with a standard error over prompts and a deviation over seeds."""

import importlib.util
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "scripts" / "compare_search_training.py"
SPEC = importlib.util.spec_from_file_location("compare_search_training", SCRIPT)
script = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(script)


def test_the_best_of_every_few_neighbours_is_judged() -> None:
    strict = torch.tensor([[1.0, 0, 0, 1], [0, 0, 1, 0]])
    scores = torch.tensor([[0.3, 0.9, 0.1, 0.2], [0.5, 0.1, 0.4, 0.3]])
    assert script.passed(strict, scores, 1) == [0.5, 0.25]
    assert script.passed(strict, scores, 2) == [0.5, 0.5]
    assert script.passed(strict, scores, 4) == [0.0, 0.0]


def test_a_row_has_the_error_over_prompts_of_the_base_and_the_spread_over_seeds() -> None:
    made = script.row("checker", 2, [0.0, 1.0], [[0.2, 0.4], [0.6, 0.8], [0.4, 0.6]])
    assert made["forwards"] == 10 and made["base"] == 50 and made["base_error"] == pytest.approx(50)
    assert made["trained"] == pytest.approx(50) and made["trained_spread"] == pytest.approx(20)
