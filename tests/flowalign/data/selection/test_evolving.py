"""Prompts that grow, written by a real language model, and problems that are barely solved."""

import json

import pytest
import torch

from flowalign.data import ASSETS, Prompts
from flowalign.data.selection.evolving import Evolving
from rewards import Scores, Spec, score
from rewards.judges.local import Local
from rewards.text.model import CausalModel
from rewards.text.proposed import BarelySolved

WRITER = Local(model=str(ASSETS / "tiny_lm"))


def test_new_prompts_are_written_from_failed_ones_and_dull_ones_are_dropped() -> None:
    def listed() -> Prompts:
        return Prompts([f"{i}+25=" for i in range(10, 18)], [{"answer": "0", "kind": "sum"} for _ in range(8)])

    prompts = listed()
    selection = Evolving(WRITER, template="{prompt}", most=3, every=2, count=2, pattern=r"(?P<prompt>\d+)")
    first = selection.picks(prompts, 0, 8, 1)
    assert sorted(first) == list(range(8))
    selection.learn(first, prompts, [0.0 if pick in (3, 5) else 1.0 for pick in first], [0.1] * 8)
    assert len(prompts) == 8, "only after two iterations"
    selection.learn(first, prompts, [1.0] * 8, [0.1] * 8)
    grown = len(prompts) - 8
    assert 1 <= grown <= 2 and all(text.isdigit() for text in prompts.texts[8:])
    assert prompts.metadata[8:] == [{"kind": "sum"}] * grown, "the answer is not theirs"

    again, fresh = Evolving(WRITER, template="{prompt}", most=3, pattern=r"(?P<prompt>\d+)"), listed()
    again.load_state_dict(json.loads(json.dumps(selection.state_dict())))
    picks = selection.picks(prompts, 2, 8, 1)
    assert again.picks(fresh, 2, 8, 1) == picks and fresh == prompts
    assert sum(pick >= 8 for pick in picks) == 4
    selection.learn([8], prompts, [0.0], [0.0])
    assert 8 not in selection.picks(prompts, 3, 8, 1)
    with pytest.raises(ValueError, match="a group named prompt"):
        Evolving(WRITER, pattern="(.*)")


class Even:
    """Answers that are even numbers are right."""

    name = "even"
    spec = Spec(frozenset({"text", "prompt"}))

    def __call__(self, samples, prompts, metadata):  # type: ignore[no-untyped-def]
        assert set(prompts) <= {"17+25=", "40-8=", "9+9="}, "the problem is the prompt"
        return Scores(torch.tensor([float(text[-1:] in {"0", "2", "4", "6", "8"}) for text in samples]))


def test_problems_pay_that_are_solved_now_and_then() -> None:
    problems = ["17+25=", "40-8=", "9+9="]
    reward = BarelySolved(Even(), str(ASSETS / "tiny_lm"), samples=6, most=5, most_solved=0.9)
    made = score(reward, problems, ["write a sum"] * 3, [{}] * 3)
    model = CausalModel.load(str(ASSETS / "tiny_lm"), "cpu")
    contexts = [model.begin(problem, {}) for problem in problems]
    answers = [model.continued(contexts, 5, 1.0, sample) for sample in range(6)]
    for i in range(3):
        rate = sum(row[i][-1:] in {"0", "2", "4", "6", "8"} for row in answers) / 6
        assert made.parts["solved"][i].item() == pytest.approx(rate)
        assert made.value[i] == float(0 < rate <= 0.9)
