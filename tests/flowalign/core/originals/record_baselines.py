"""Record what verl's advantages with other baselines make of the inputs in record.py; README.md says how to run it."""

import json
import sys
import types
from collections import defaultdict
from pathlib import Path
from typing import Any, Optional

import numpy as np
import torch
from record import HERE, inputs, lists, take

WANTED = ["optimal_token_baseline_advantage", "gae_advantage_return", "gpg_outcome_advantage", "value_loss"]


def verl(source: Path, given: dict[str, torch.Tensor]) -> dict[str, Any]:
    functional: dict[str, Any] = {"torch": torch}
    take(
        source / "verl/utils/torch_functional.py", functional, lambda n: n.startswith("masked_") or n == "clip_by_value"
    )
    names: dict[str, Any] = {"torch": torch, "np": np, "defaultdict": defaultdict, "Any": Any, "Optional": Optional}
    names |= {"AlgoConfig": dict, "register_adv_est": lambda _: lambda function: function}
    names |= {"verl_F": types.SimpleNamespace(**functional), "AdvantageEstimator": defaultdict}
    names["AdvantageEstimator"] = types.SimpleNamespace(OPTIMAL_TOKEN_BASELINE=1, GAE=2, GPG=3)
    wanted = {f"compute_{name}" for name in WANTED} | {"agg_loss"}
    take(source / "verl/trainer/ppo/core_algos.py", names, lambda name: name in wanted)
    mask, group = given["mask"], given["group"].numpy()
    rewards = given["reward"][:, None] * (mask.cumsum(1) == mask.sum(1, keepdim=True)) * mask
    # any numbers in their range will do
    collision, value = (-given["entropy"]).exp(), given["sampler"] / 3
    # later versions of verl handle the tail so by default
    otb, _ = names["compute_optimal_token_baseline_advantage"](
        rewards, mask, group, given["old_log_prob"], collision, handle_zero_tail=True
    )
    gae, returns = names["compute_gae_advantage_return"](rewards, value, mask, 0.97, 0.9)
    gpg, _ = names["compute_gpg_outcome_advantage"](rewards, mask, group)
    now = (value + given["advantage"]).requires_grad_()
    loss, _ = names["compute_value_loss"](now, returns, value, mask, 0.5)
    loss.backward()
    made = {"collision": collision, "value": value, "optimal_token_baseline": otb, "gae": gae, "returns": returns}
    return lists(made | {"gpg": gpg, "loss": loss.detach(), "gradient": now.grad})


if __name__ == "__main__":
    (HERE / "baselines.json").write_text(json.dumps(verl(Path(sys.argv[1]), inputs())) + "\n")
