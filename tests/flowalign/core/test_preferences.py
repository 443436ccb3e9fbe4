"""Losses of pairs and of labelled texts, with their gradients, against numbers recorded from TRL."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flowalign.core import preferences
from flowalign.core.preferences import PREFERENCES, Pairs, label_loss
from flowalign.core.token_preferences import token_guided, token_regularised

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
    assert {*OF_PAIRS, "cpo", "simpo", "orpo", "selm", "dno"} == PREFERENCES.keys()


def test_dno_regresses_the_margin_to_the_chance_of_the_win_rates() -> None:
    given = replace(pairs(GIVEN["log_prob"]), gap=torch.linspace(0, 2, len(pairs(GIVEN["log_prob"]).chosen)))
    loss = PREFERENCES["dno"](given, beta=0.3)
    for i in range(len(loss)):
        ratios = math.exp(given.chosen_gain[i]), math.exp(given.rejected_gain[i])
        wins = ratios[0] ** 0.3 / (ratios[0] ** 0.3 + ratios[1] ** 0.3)
        label = 1 / (1 + math.exp(-given.gap[i]))
        assert loss[i].item() == pytest.approx(-label * math.log(wins) - (1 - label) * math.log(1 - wins), rel=1e-4)


def test_tokens_rewards_scale_or_hold_their_gains() -> None:
    """TGDPO's loss as its authors write it, a pair and a token at a time; T-REG's regulariser beside DPO."""
    torch.manual_seed(0)
    gain, guide = torch.randn(6, 4), torch.randn(6, 4)
    mask = torch.arange(4) < torch.tensor([4, 2, 3, 1, 4, 2])[:, None]
    beta, alpha = 0.7, 0.5
    tgdpo, t_reg = (loss(gain, guide, mask, beta, alpha) for loss in (token_guided, token_regularised))
    for i in range(3):
        chosen = [(float(gain[i, t]), float(guide[i, t])) for t in range(int(mask[i].sum()))]
        rejected = [(float(gain[3 + i, t]), float(guide[3 + i, t])) for t in range(int(mask[3 + i].sum()))]
        logit = sum(beta * (1 + alpha * r) * g for g, r in chosen) - sum(
            beta * (1 - alpha * r) * g for g, r in rejected
        )
        assert tgdpo[i].item() == pytest.approx(math.log(1 + math.exp(-logit)), rel=1e-4)
        dpo = math.log(1 + math.exp(-beta * (sum(g for g, _ in chosen) - sum(g for g, _ in rejected))))
        apart = [sum((beta * g - r) ** 2 for g, r in text) / len(text) for text in (chosen, rejected)]
        assert t_reg[i].item() == pytest.approx(dpo + alpha * sum(apart) / 2, rel=1e-4)


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
