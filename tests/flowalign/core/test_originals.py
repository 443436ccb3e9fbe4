"""Advantages, losses and their gradients against numbers recorded from TRL and verl (originals/README.md)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flowalign.core import advantages, losses
from flowalign.core.aggregation import Aggregation, action_weights
from flowalign.core.baselines import clipped_value_loss, generalised
from flowalign.core.divergences import sampled_kl
from flowalign.core.losses import Losses, cispo, gspo, ppo
from flowalign.core.off_policy import kept
from flowalign.core.record import Actions, Record

NUMBERS = json.loads((Path(__file__).parent / "originals" / "numbers.json").read_text())
GIVEN = {name: torch.tensor(values) for name, values in NUMBERS["inputs"].items()}
MASK = GIVEN["mask"].bool()
AGGREGATIONS: dict[str, Aggregation] = {
    "token-mean": "token",
    "seq-mean-token-mean": "sequence",
    "seq-mean-token-sum": "sum",
    "seq-mean-token-sum-norm": "constant",
}


def close(made: Tensor, expected: Any) -> None:
    torch.testing.assert_close(made, torch.as_tensor(expected), atol=1e-6, rtol=1e-5)


def record(**changed: Any) -> Record:
    return Record(
        **{
            "reward": GIVEN["reward"],
            "group": GIVEN["group"],
            "mask": MASK,
            "log_prob": GIVEN["old_log_prob"],
            "rewards": GIVEN["reward"][None],
            "reward_weights": torch.ones(1),
            "baseline": GIVEN["baseline"],
            **changed,
        }
    )


@pytest.mark.parametrize(
    ("name", "advantage"),
    [
        ("grpo", lambda r: advantages.grpo(r, unbiased=True, eps=1e-6)),
        ("dr_grpo", advantages.dr_grpo),
        ("rloo", advantages.rloo),
        ("best_margin", advantages.best_margin),
        ("reinforce_pp", advantages.reinforce_pp),
        ("reinforce_pp_discounted", lambda r: advantages.reinforce_pp(r, gamma=0.9)),
        ("reinforce_pp_baseline", lambda r: advantages.reinforce_pp(r, baseline=True)),
        ("remax", advantages.remax),
    ],
)
def test_advantages_are_verls(name: str, advantage: Any) -> None:
    made = advantage(record())
    made = made[:, None].expand_as(MASK) if made.dim() == 1 else made
    close(made * MASK, NUMBERS["verl"]["advantages"][name])


def scored() -> Actions:
    return Actions(
        log_prob=GIVEN["log_prob"].clone().requires_grad_(),
        old_log_prob=GIVEN["old_log_prob"],
        advantage=GIVEN["advantage"],
        mask=MASK,
        group=GIVEN["group"],
        reward=GIVEN["reward"],
    )


def aggregated(losses: Tensor, aggregation: Aggregation, length: int | None = None) -> Tensor:
    return (losses.where(MASK, 0) * action_weights(MASK, aggregation, length)).sum()


VERL_LOSSES = {
    "ppo": lambda s: ppo(s, clip_range=0.2, clip_range_high=0.3, dual_clip=3.0),
    "gspo": lambda s: gspo(s, clip_range=0.2, clip_range_high=0.3),
    "cispo": lambda s: cispo(s, clip_range=0.2, clip_range_high=0.3),
}


@pytest.mark.parametrize("case", NUMBERS["verl"]["losses"])
def test_losses_and_gradients_are_verls(case: str) -> None:
    name, mode = case.split()
    # verl averages gspo over rows whatever it is asked for
    aggregation = "sequence" if name == "gspo" else AGGREGATIONS[mode]
    actions = scored()
    loss = aggregated(VERL_LOSSES[name](actions)[0], aggregation)
    if name != "gspo" and mode == "seq-mean-token-sum-norm":
        # verl leaves out the division by the number of rows
        loss = loss * len(MASK)
    loss.backward()
    expected = NUMBERS["verl"]["losses"][case]
    assert loss.item() == pytest.approx(expected["loss"], abs=1e-6)
    close(actions.log_prob.grad, expected["gradient"])


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimates_are_verls(estimator: Any) -> None:
    close(sampled_kl(GIVEN["log_prob"], GIVEN["reference"], estimator), NUMBERS["verl"]["kl"][estimator])


TRL_LOSSES = {
    "grpo": (lambda s: ppo(s, clip_range=0.2, clip_range_high=0.3), "sequence"),
    "bnpo": (lambda s: ppo(s, clip_range=0.2, clip_range_high=0.3), "token"),
    "dapo": (lambda s: ppo(s, clip_range=0.2, clip_range_high=0.3), "token"),
    "dr_grpo": (lambda s: ppo(s, clip_range=0.2, clip_range_high=0.3), "constant"),
    "cispo": (lambda s: cispo(s, clip_range_high=4.0), "token"),
    "gspo": (lambda s: gspo(s, clip_range=0.2, clip_range_high=0.3), "sequence"),
}


@pytest.mark.parametrize("case", NUMBERS["trl"]["losses"])
def test_losses_and_gradients_are_trls(case: str) -> None:
    name, beta = case.split()
    loss_of, aggregation = TRL_LOSSES[name]
    actions = scored()
    losses = loss_of(actions)[0] + float(beta) * sampled_kl(actions.log_prob, GIVEN["reference"], "k3")
    # TRL's trainer was told of 10 tokens at most
    loss = aggregated(losses, aggregation, length=10)
    loss.backward()
    expected = NUMBERS["trl"]["losses"][case]
    assert loss.item() == pytest.approx(expected["loss"], abs=1e-6)
    close(actions.log_prob.grad, expected["gradient"])


NEWER = json.loads((Path(__file__).parent / "originals" / "losses.json").read_text())


def masked(actions: Actions) -> Losses:
    losses, values = ppo(actions, clip_range=0.2, clip_range_high=0.3)
    return losses * kept(actions.log_prob, actions.old_log_prob, actions.advantage, actions.mask, 0.05), values


@pytest.mark.parametrize(
    ("source", "name", "loss_of", "aggregation"),
    [
        ("verl", "sapo", losses.sapo, None),
        ("verl", "geo_mean", lambda s: losses.gmpo(s, clip_range=0.2, clip_range_high=0.3), "sequence"),
        (
            "verl",
            "clip_cov",
            lambda s: losses.clip_cov(s, clip_range_high=0.3, share=1.0, lowest=0.1, highest=1.0),
            "token",
        ),
        ("verl", "kl_cov", lambda s: losses.kl_cov(s, share=0.2), "token"),
        ("trl", "sapo", losses.sapo, None),
        ("trl", "gmpo", lambda s: losses.gmpo(s, clip_range=0.2, clip_range_high=0.3), "sequence"),
        ("trl", "luspo", lambda s: losses.luspo(s, clip_range=0.2, clip_range_high=0.3), "sum"),
        ("trl", "vespo", losses.vespo, None),
        ("trl", "masked", masked, "sequence"),
    ],
)
def test_newer_losses_and_gradients_are_theirs(source: str, name: str, loss_of: Any, aggregation: Any) -> None:
    actions = scored()
    loss = aggregated(loss_of(actions)[0], aggregation or loss_of.aggregation)
    loss.backward()
    expected = NEWER[source]["losses"][name] if source == "verl" else NEWER[source][name]
    assert loss.item() == pytest.approx(expected["loss"], abs=1e-6)
    close(actions.log_prob.grad, expected["gradient"])


def test_opo_and_low_var_kl_are_verls() -> None:
    close(advantages.opo(record())[:, None] * MASK, NEWER["verl"]["opo"])
    far = GIVEN["log_prob"] - 10 * GIVEN["entropy"]
    close(sampled_kl(far, GIVEN["reference"], "low_var_kl"), NEWER["verl"]["low_var_kl"])


BASELINES = {
    name: torch.tensor(values)
    for name, values in json.loads((Path(__file__).parent / "originals" / "baselines.json").read_text()).items()
}


def test_other_baselines_and_the_critics_loss_are_verls() -> None:
    given = record(collision=BASELINES["collision"], value=BASELINES["value"])
    close(advantages.optimal_token_baseline(given), BASELINES["optimal_token_baseline"])
    close(advantages.gae(given, gamma=0.97, smoothing=0.9), BASELINES["gae"] * MASK)
    returns = generalised(given, 0.97, 0.9) + given.value
    close(returns.where(MASK, 0), BASELINES["returns"].where(MASK, 0))
    # of the eight rewards four are 0, which verl leaves out of its count; all groups have spread
    close(advantages.gpg(given)[:, None] * MASK * 8 / 4, BASELINES["gpg"])
    value = (BASELINES["value"] + GIVEN["advantage"]).requires_grad_()
    loss = aggregated(clipped_value_loss(value, BASELINES["value"], BASELINES["returns"], 0.5), "token")
    loss.backward()
    close(loss, BASELINES["loss"])
    close(value.grad, BASELINES["gradient"])
