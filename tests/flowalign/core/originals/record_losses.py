"""Record what newer losses of TRL and verl make of the inputs in record.py; README.md says how to run it."""

import json
import sys
import types
from collections import defaultdict
from pathlib import Path
from typing import Any, Optional

import numpy as np
import torch
from record import HERE, inputs, lists, take

SETTINGS = {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05, "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0}
SETTINGS |= {"vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0, "delta": None, "use_bias_correction_kl": False}


def verl(source: Path, given: dict[str, torch.Tensor]) -> dict[str, Any]:
    functional: dict[str, Any] = {"torch": torch}
    take(source / "verl/utils/torch_functional.py", functional, lambda name: name.startswith("masked_"))
    names: dict[str, Any] = {"torch": torch, "np": np, "defaultdict": defaultdict, "Any": Any, "Optional": Optional}
    names |= {"ActorConfig": types.SimpleNamespace, "AlgoConfig": dict, "DictConfig": dict}
    names |= {name: lambda _: lambda function: function for name in ("register_adv_est", "register_policy_loss")}
    names |= {"verl_F": types.SimpleNamespace(**functional)}
    names["AdvantageEstimator"] = types.SimpleNamespace(OPO="opo")
    wanted = [f"compute_policy_loss_{name}" for name in ("sapo", "clip_cov", "kl_cov", "geo_mean")]
    wanted += ["compute_opo_outcome_advantage", "agg_loss", "kl_penalty_forward"]
    take(source / "verl/trainer/ppo/core_algos.py", names, lambda name: name in wanted)
    # a share of 1: which of the actions are chosen is no matter of chance
    policy_loss = {
        "clip_cov_ratio": 1.0,
        "clip_cov_lb": 0.1,
        "clip_cov_ub": 1.0,
        "kl_cov_ratio": 0.2,
        "ppo_kl_coef": 1.0,
    }
    config = types.SimpleNamespace(
        clip_ratio=0.2,
        clip_ratio_low=0.2,
        clip_ratio_high=0.3,
        tau_pos=1.0,
        tau_neg=1.05,
        global_batch_info={},
        policy_loss=types.SimpleNamespace(**policy_loss),
    )
    made: dict[str, Any] = {}
    for name in ("sapo", "clip_cov", "kl_cov", "geo_mean"):
        log_prob = given["log_prob"].clone().requires_grad_()
        loss, _ = names[f"compute_policy_loss_{name}"](
            given["old_log_prob"], log_prob, given["advantage"], given["mask"], "token-mean", config
        )
        loss.backward()
        made[name] = {"loss": loss.item(), "gradient": log_prob.grad.tolist()}
    rewards = given["reward"][:, None] * (given["mask"].cumsum(1) == given["mask"].sum(1, keepdim=True)) * given["mask"]
    opo, _ = names["compute_opo_outcome_advantage"](rewards, given["mask"], given["group"].numpy())
    far = given["log_prob"] - 10 * given["entropy"]
    kl = names["kl_penalty_forward"](far, given["reference"], "low_var_kl")
    return {"losses": made} | lists({"opo": opo, "low_var_kl": kl})


def trl(given: dict[str, torch.Tensor]) -> dict[str, Any]:
    from accelerate import Accelerator
    from trl import GRPOTrainer
    from trl.experimental.gmpo import GMPOTrainer

    made = {}
    for name in ("sapo", "luspo", "vespo", "gmpo", "masked"):
        kind = GMPOTrainer if name == "gmpo" else GRPOTrainer
        trainer = kind.__new__(kind)
        trainer.accelerator, trainer.model = Accelerator(cpu=True), torch.nn.Linear(1, 1)
        trainer.args = types.SimpleNamespace(**SETTINGS, steps_per_generation=1)
        trainer.loss_type = {"masked": "grpo", "gmpo": "grpo"}.get(name, name)
        trainer.importance_sampling_level = "sequence" if name == "luspo" else "token"
        trainer.epsilon_low, trainer.epsilon_high, trainer.beta = 0.2, 0.3, 0.0
        trainer.top_entropy_quantile, trainer.max_completion_length = 1.0, 10
        trainer.use_vllm, trainer.tools, trainer.current_gradient_accumulation_steps = False, None, 1
        trainer.vllm_importance_sampling_correction, trainer.aux_loss_enabled = False, False
        trainer._entropy_bonus_enabled = False
        trainer.off_policy_mask_threshold = 0.05 if name == "masked" else None
        trainer._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
        log_prob = given["log_prob"].clone().requires_grad_()
        answer = log_prob, given["entropy"], None
        trainer._get_per_token_logps_and_entropies = lambda *_, answer=answer, **__: answer
        rows, actions = given["mask"].shape
        loss = trainer._compute_loss(
            trainer.model,
            {
                "prompt_ids": torch.zeros(rows, 2, dtype=torch.long),
                "prompt_mask": torch.ones(rows, 2, dtype=torch.long),
                "completion_ids": torch.zeros(rows, actions, dtype=torch.long),
                "completion_mask": given["mask"].long(),
                "advantages": given["advantage"][:, 0],
                "old_per_token_logps": given["old_log_prob"],
                "num_items_in_batch": given["mask"].sum(),
            },
        )
        loss.backward()
        made[name] = {"loss": loss.item(), "gradient": log_prob.grad.tolist()}
    return made


if __name__ == "__main__":
    given = inputs()
    numbers = {"verl": verl(Path(sys.argv[1]), given), "trl": trl(given)}
    (HERE / "losses.json").write_text(json.dumps(numbers) + "\n")
