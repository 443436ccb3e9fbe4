"""Record what TRL and verl make of the inputs below; README.md says how to run it.

verl's module wants its whole training stack, so its functions are taken out of their files; TRL's loss is called on a
trainer that was never set up, with the attributes that it reads.
"""

import ast
import json
import sys
import types
from collections import defaultdict
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any, Optional

import numpy as np
import torch

HERE = Path(__file__).parent
ROWS, ACTIONS = 8, 6
GROUP = [3, 3, 3, 3, 5, 5, 5, 5]
LENGTHS = [6, 4, 1, 5, 6, 2, 3, 6]


def inputs() -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    mask = torch.arange(ACTIONS) < torch.tensor(LENGTHS)[:, None]
    old = -torch.rand(ROWS, ACTIONS).mul(3)
    return {
        "log_prob": old + 0.3 * torch.randn(ROWS, ACTIONS),
        "old_log_prob": old,
        "reference": old + 0.5 * torch.randn(ROWS, ACTIONS),
        "sampler": old + 0.4 * torch.randn(ROWS, ACTIONS),
        "entropy": torch.rand(ROWS, ACTIONS) * 2,
        "advantage": torch.randn(ROWS)[:, None].repeat(1, ACTIONS),
        "mask": mask.float(),
        "group": torch.tensor(GROUP),
        "reward": torch.tensor([1.0, 0, 0.25, 1, 0, 0, 1, 0]),
        "second": torch.randn(ROWS),
        "baseline": torch.tensor([0.0] * 4 + [1.0] * 4),
    }


def verl(source: Path, given: dict[str, torch.Tensor]) -> dict[str, Any]:
    functional: dict[str, Any] = {"torch": torch}
    take(source / "verl/utils/torch_functional.py", functional, lambda name: name.startswith("masked_"))

    class ActorConfig(types.SimpleNamespace):
        def get(self, key: str, default: Any = None) -> Any:
            return getattr(self, key, default)

    names: dict[str, Any] = {
        "torch": torch,
        "np": np,
        "defaultdict": defaultdict,
        "Enum": Enum,
        "Any": Any,
        "Optional": Optional,
        "Callable": Callable,
        "verl_F": types.SimpleNamespace(**functional),
        "AlgoConfig": dict,
        "ActorConfig": ActorConfig,
        "DictConfig": dict,
        "deprecated": lambda _: lambda function: function,
        "register_adv_est": lambda _: lambda function: function,
        "register_policy_loss": lambda _: lambda function: function,
    }
    wanted = ("compute_", "agg_loss", "kl_penalty", "AdvantageEstimator")
    take(source / "verl/trainer/ppo/core_algos.py", names, lambda name: name.startswith(wanted))
    mask, group = given["mask"], given["group"].numpy()
    last = torch.tensor(LENGTHS) - 1
    whitened = names["compute_reinforce_plus_plus_baseline_outcome_advantage"]
    rewards = torch.zeros(ROWS, ACTIONS).scatter(1, last[:, None], given["reward"][:, None])
    common = {"token_level_rewards": rewards, "response_mask": mask}
    made: dict[str, Any] = {
        "grpo": names["compute_grpo_outcome_advantage"](**common, index=group)[0],
        "dr_grpo": names["compute_grpo_outcome_advantage"](**common, index=group, norm_adv_by_std_in_grpo=False)[0],
        "rloo": names["compute_rloo_outcome_advantage"](**common, index=group)[0],
        "best_margin": names["compute_grpo_passk_outcome_advantage"](**common, index=group, config={})[0],
        "reinforce_pp": names["compute_reinforce_plus_plus_outcome_advantage"](
            **common, config=types.SimpleNamespace(gamma=1.0)
        )[0],
        "reinforce_pp_discounted": names["compute_reinforce_plus_plus_outcome_advantage"](
            **common, config=types.SimpleNamespace(gamma=0.9)
        )[0],
        "reinforce_pp_baseline": whitened(**common, index=group)[0],
        "remax": names["compute_remax_outcome_advantage"](**common, reward_baselines=given["baseline"])[0],
    }
    losses: dict[str, Any] = {}
    config = ActorConfig(
        clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.3, clip_ratio_c=3.0, global_batch_info={}
    )
    for name, function in (("ppo", "vanilla"), ("gspo", "gspo"), ("cispo", "cispo")):
        for mode in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"):
            log_prob = given["log_prob"].clone().requires_grad_()
            loss, _ = names[f"compute_policy_loss_{function}"](
                given["old_log_prob"], log_prob, given["advantage"], mask, mode, config
            )
            loss.backward()
            losses[f"{name} {mode}"] = {"loss": loss.item(), "gradient": log_prob.grad.tolist()}
    kl = {name: names["kl_penalty"](given["log_prob"], given["reference"], name) for name in ("k1", "k2", "k3")}
    return {"advantages": lists(made), "losses": losses, "kl": lists(kl)}


def take(path: Path, names: dict[str, Any], wanted: Any) -> None:
    """Define a file's functions and classes of these names."""
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if wanted(getattr(node, "name", ""))]
    exec(compile(tree, str(path), "exec"), names)


def trl(given: dict[str, torch.Tensor]) -> dict[str, Any]:
    from accelerate import Accelerator
    from trl import GRPOTrainer

    made = {}
    for kind in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "gspo"):
        for beta in (0.0, 0.04):
            trainer = GRPOTrainer.__new__(GRPOTrainer)
            trainer.accelerator = Accelerator(cpu=True)
            trainer.model = torch.nn.Linear(1, 1)
            trainer.args = types.SimpleNamespace(delta=None, use_bias_correction_kl=False)
            trainer.loss_type = "grpo" if kind == "gspo" else kind
            trainer.importance_sampling_level = "sequence" if kind == "gspo" else "token"
            trainer.epsilon_low, trainer.epsilon_high, trainer.beta = 0.2, 5.0 if kind == "cispo" else 0.3, beta
            trainer.top_entropy_quantile, trainer.max_completion_length = 1.0, 10
            trainer.use_vllm, trainer.tools, trainer.current_gradient_accumulation_steps = False, None, 1
            trainer.off_policy_mask_threshold = None
            trainer._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
            log_prob = given["log_prob"].clone().requires_grad_()
            trainer._get_per_token_logps_and_entropies = lambda *_, log_prob=log_prob, **__: (
                log_prob,
                given["entropy"],
            )
            loss = trainer._compute_loss(
                trainer.model,
                {
                    "prompt_ids": torch.zeros(ROWS, 2, dtype=torch.long),
                    "prompt_mask": torch.ones(ROWS, 2, dtype=torch.long),
                    "completion_ids": torch.zeros(ROWS, ACTIONS, dtype=torch.long),
                    "completion_mask": given["mask"].long(),
                    "advantages": given["advantage"][:, 0],
                    "old_per_token_logps": given["old_log_prob"],
                    "ref_per_token_logps": given["reference"],
                    "num_items_in_batch": given["mask"].sum(),
                },
            )
            loss.backward()
            made[f"{kind} {beta}"] = {"loss": loss.item(), "gradient": log_prob.grad.tolist()}
    return {"losses": made}


def lists(values: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: value.tolist() for name, value in values.items()}


def main() -> None:
    given = inputs()
    recorded = {"inputs": lists(given), "verl": verl(Path(sys.argv[1]).resolve(), given), "trl": trl(given)}
    rounded = json.loads(json.dumps(recorded), parse_float=lambda text: float(f"{float(text):.9g}"))
    (HERE / "numbers.json").write_text(json.dumps(rounded) + "\n")


if __name__ == "__main__":
    main()
