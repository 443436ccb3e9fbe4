"""B-STaR's balance score against its authors' lines, and the script on the tiny language model."""

import importlib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts")
    return importlib.import_module("choose_sampling")


def test_the_score_is_the_authors(script: ModuleType) -> None:
    random = np.random.default_rng(0)
    right, kept = random.random((20, 16)) < 0.6, random.random((20, 16)) < 0.7
    kept[0] = True
    theirs = []
    for row in range(20):
        # cal_modi_acc_soft of determine_hyper.py
        num, total = int((right[row] & kept[row]).sum()), int(kept[row].sum())
        ratio = num / total
        theirs.append(ratio if num >= 8 else num * ratio / 8)
    made = script.balance(torch.tensor(right), torch.tensor(kept), 8)
    assert made == pytest.approx(np.mean(theirs), abs=1e-6)


def test_the_threshold_keeps_right_texts(script: ModuleType) -> None:
    right = torch.tensor([[True, True, False, False]])
    threshold, best = script.best_threshold(right, torch.tensor([[0.9, 0.8, 0.7, 0.1]]), 2)
    assert 0.69 < threshold < 0.8 and best == pytest.approx(1.0)


def test_temperatures_are_printed_best_first(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    script.main(
        ["tiny_lm", "sums_train", "--limit", "4", "--samples", "3", "--tokens", "4", "--temperatures", "0.5", "9"]
    )
    lines = capsys.readouterr().out.splitlines()
    scores = [float(line.split()[1]) for line in lines]
    assert len(lines) == 2 and scores == sorted(scores, reverse=True) and "temperature 0.5" in lines[0]
