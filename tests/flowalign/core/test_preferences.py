"""Losses of pairs and of labelled texts, with their gradients, against numbers recorded from TRL."""

import json
from pathlib import Path

import pytest
import torch

from flowalign.core import preferences
from flowalign.core.preferences import PREFERENCES, Pairs, label_loss

NUMBERS = json.loads((Path(__file__).parent / "originals" / "preferences.json").read_text())
GIVEN = {name: torch.tensor(values) for name, values in NUMBERS["inputs"].items()}
SMOOTHED = {"exo_pair", "robust", "aot", "aot_unpaired"}
OF_PAIRS = sorted(NUMBERS["losses"].keys() & PREFERENCES.keys() - {"cpo", "simpo", "orpo"})


def pairs(log_prob: torch.Tensor) -> Pairs:
    chosen, rejected = log_prob.sum(1).chunk(2)
    reference_chosen, reference_rejected = GIVEN["reference"].sum(1).chunk(2)
    chosen_tokens, rejected_tokens = GIVEN["mask"].sum(1).chunk(2)
    return Pairs(
        chosen=chosen,
        rejected=rejected,
        reference_chosen=reference_chosen,
        reference_rejected=reference_rejected,
        chosen_tokens=chosen_tokens,
        rejected_tokens=rejected_tokens,
    )


def test_every_loss_of_pairs_is_compared() -> None:
    assert {*OF_PAIRS, "cpo", "simpo", "orpo", "selm"} == PREFERENCES.keys()


def test_selm_adds_the_policys_own_reward_to_dpo() -> None:
    """The authors' trainer takes a third, own text; here each text of a pair is one, and the losses' mean is ours."""
    given = pairs(GIVEN["log_prob"])
    beta, alpha = 0.3, 0.05
    expected = torch.zeros_like(given.chosen)
    for own, of_reference in ((given.chosen, given.reference_chosen), (given.rejected, given.reference_rejected)):
        logits = (given.chosen - given.rejected) - (given.reference_chosen - given.reference_rejected)
        loss = -torch.nn.functional.logsigmoid(beta * logits) + alpha * beta * (own - of_reference)
        expected = expected + loss / 2
    torch.testing.assert_close(PREFERENCES["selm"](given, beta=beta, alpha=alpha), expected)


@pytest.mark.parametrize("name", OF_PAIRS)
def test_a_loss_of_pairs_is_trls(name: str) -> None:
    log_prob = GIVEN["log_prob"].clone().requires_grad_()
    settings = {"label_smoothing": 0.1} if name in SMOOTHED else {}
    loss = PREFERENCES[name](pairs(log_prob), **settings).mean()
    loss.backward()
    expected = NUMBERS["losses"][name]
    torch.testing.assert_close(loss, torch.tensor(expected["loss"]), atol=1e-6, rtol=1e-5)
    assert log_prob.grad is not None
    torch.testing.assert_close(log_prob.grad, torch.tensor(expected["gradient"]), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("name", "settings"), [("cpo", {"beta": 2.0}), ("simpo", {}), ("orpo", {})])
def test_a_loss_without_a_reference_is_trls(name: str, settings: dict[str, float]) -> None:
    """SimPO's and ORPO's are of mean log-probabilities of tokens: here each text has two."""
    tokens = torch.full((4,), 2 if name in ("simpo", "orpo") else 1)
    chosen, rejected = GIVEN["means"] * tokens
    nothing = torch.full((4,), torch.nan)
    given = Pairs(
        chosen=chosen,
        rejected=rejected,
        reference_chosen=nothing,
        reference_rejected=nothing,
        chosen_tokens=tokens,
        rejected_tokens=tokens,
    )
    made = PREFERENCES[name](given, **settings)
    torch.testing.assert_close(made, torch.tensor(NUMBERS["losses"][name]["losses"]), atol=1e-6, rtol=1e-5)
    assert name in preferences.WITHOUT_REFERENCE


def test_the_loss_of_labelled_texts_is_trls() -> None:
    log_prob = GIVEN["log_prob"][:4].clone().requires_grad_()
    good = torch.tensor([True, False, False, True])
    gain = (log_prob - GIVEN["reference"][:4]).sum(1)
    loss = (torch.where(good, 1.5, 0.5) * label_loss(gain, good, torch.tensor(0.25))).mean()
    loss.backward()
    expected = NUMBERS["losses"]["kto"]
    torch.testing.assert_close(loss, torch.tensor(expected["loss"]), atol=1e-6, rtol=1e-5)
    assert log_prob.grad is not None
    torch.testing.assert_close(log_prob.grad, torch.tensor(expected["gradient"]), atol=1e-6, rtol=1e-5)
