"""Votes of which surer texts have more, modes that suit a prompt, and mixtures of data sets."""

import importlib
import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch

from rewards import Scores, Spec, score
from rewards.text.consensus import Borda
from rewards.text.modes import AdaptiveMode
from rewards.text.shape import Majority
from rewards.text.verifiers import ExactMatch


class Length:
    """Longer texts are surer."""

    name = "length"
    spec = Spec(frozenset({"text", "prompt"}))

    def __call__(self, samples, prompts, metadata):  # type: ignore[no-untyped-def]
        return Scores(torch.tensor([float(len(text)) for text in samples]))


def test_the_vote_is_bordas() -> None:
    texts, prompts = ["so 4", "then it is 5", "5", "4", "4", "aaaa 7", "7", "8", "8 ", ""], ["p"] * 5 + ["q"] * 5
    for power in (0.0, 0.5, 3.0):
        made = score(Borda(Length(), power, r"(\d)"), texts, prompts, [{}] * 10).value.tolist()
        for start in (0, 5):
            rows = sorted(range(start, start + 5), key=lambda i: -len(texts[i]))
            votes: dict[str, float] = defaultdict(float)
            for rank, i in enumerate(rows, 1):
                answer = "".join(c for c in texts[i] if c.isdigit())
                if answer:
                    votes[answer] += (5 - rank + 1) ** power
            winner = max(votes, key=votes.__getitem__)
            assert made[start : start + 5] == [float(winner in text) for text in texts[start : start + 5]]
    plain = score(Borda(Length(), 0.0, r"(\d)"), texts[:5], prompts[:5], [{}] * 5).value
    assert plain.tolist() == score(Majority(r"(\d)"), texts[:5], prompts[:5], [{}] * 5).value.tolist()


def test_long_reasoning_pays_on_hard_prompts_and_short_answers_on_easy_ones() -> None:
    texts = ["<think>a</think>1", "1", "1", "2", "<think>b</think>1", "1", "2", "2"]
    prompts, records = ["easy"] * 4 + ["hard"] * 4, [{"answer": "1"}] * 8
    made = score(AdaptiveMode(ExactMatch(pattern=r"(\d)$"), easy=0.6), texts, prompts, records)
    assert made.value.tolist() == [0.5, 1, 1, 0, 1, 0.5, 0, 0]


def test_a_mixture_is_found_that_no_run_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "scripts")
    script = importlib.import_module("fit_mixture")
    right, random = np.array([0.5, 0.2, 0.3]), np.random.default_rng(0)
    lines = []
    for shares in random.dirichlet(np.ones(3), 12):
        value = 0.7 - ((shares - right) ** 2).sum()
        lines.append({"shares": dict(zip("abc", (10 * shares).tolist(), strict=True)), "score": value})
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    script.main([str(tmp_path / "runs.jsonl"), "--ridge", "1e-9"])
    printed = capsys.readouterr().out
    found = json.loads(printed.split("data.selection=")[1])["shares"]
    assert [found[task] for task in "abc"] == pytest.approx(right.tolist(), abs=0.02)
    assert "predicted score 0.7" in printed
    (tmp_path / "few.jsonl").write_text(json.dumps(lines[0]))
    with pytest.raises(SystemExit):
        script.main([str(tmp_path / "few.jsonl")])
    assert "1 runs say too little about 3 data sets" in capsys.readouterr().err
