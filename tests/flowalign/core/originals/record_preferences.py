"""Record what TRL's losses of pairs and of labelled texts make of small inputs; README.md says how to run it."""

import json
import types
from collections import defaultdict
from typing import Any

import torch
from accelerate import Accelerator
from record import HERE
from trl import DPOTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer
from trl.trainer.kto_trainer import KTOTrainer

PAIRS, LENGTH = 4, 5
LABELS = [True, False, False, True]
NAMES = "sigmoid hinge ipo exo_pair nca_pair robust bco_pair sppo_hard aot aot_unpaired apo_zero apo_down discopop"


def inputs() -> dict[str, torch.Tensor]:
    """Log-probabilities of the tokens of 4 preferred texts, then of the 4 others."""
    torch.manual_seed(11)
    mask = torch.arange(LENGTH) < torch.tensor([5, 3, 4, 1, 2, 5, 3, 4])[:, None]
    log_prob, reference = (-3 * torch.rand(2, 2 * PAIRS, LENGTH) * mask).unbind()
    return {"log_prob": log_prob, "reference": reference, "mask": mask.long()}


def unset(kind: Any, **attributes: Any) -> Any:
    """A trainer that was never set up, with what its loss reads."""
    trainer = kind.__new__(kind)
    trainer.accelerator, trainer.model = Accelerator(cpu=True), torch.nn.Linear(1, 1)
    trainer.model.is_gradient_checkpointing = False
    trainer._tp_size = 1
    trainer._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
    trainer.aux_loss_enabled, trainer.precompute_ref_logps, trainer._total_train_tokens = False, False, 0
    trainer.args = types.SimpleNamespace(discopop_tau=0.05, gradient_checkpointing=False)
    trainer.args.gradient_checkpointing_kwargs = None
    vars(trainer).update(attributes)
    return trainer


def answering(log_prob: torch.Tensor) -> torch.nn.Module:
    """A model with these log-probabilities."""
    model, nothing = torch.nn.Linear(1, 1), torch.zeros_like(log_prob).detach()
    answer = types.SimpleNamespace(log_probs=log_prob, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool())
    model.forward = lambda **_: answer  # type: ignore[method-assign]
    model.is_gradient_checkpointing = False
    return model


def batch_of(mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a trainer gets, after a prompt of one token."""
    completion = torch.nn.functional.pad(mask, (1, 0))
    return {"input_ids": completion, "attention_mask": completion, "completion_mask": completion}


def dpo(given: dict[str, torch.Tensor], name: str) -> dict[str, Any]:
    log_prob = given["log_prob"].clone().requires_grad_()
    trainer = unset(
        DPOTrainer,
        beta=0.1,
        loss_types=[name],
        loss_weights=[1.0],
        label_smoothing=0.1,
        f_divergence_type="reverse_kl",
        ld_alpha=None,
        use_weighting=False,
        ref_model=answering(given["reference"]),
    )
    loss = trainer._compute_loss(answering(log_prob), batch_of(given["mask"]), False)
    loss.backward()
    return {"loss": loss.item(), "gradient": log_prob.grad.tolist()}


def kto(given: dict[str, torch.Tensor]) -> dict[str, Any]:
    log_prob, reference = given["log_prob"][:PAIRS].clone().requires_grad_(), given["reference"][:PAIRS]
    model = answering(log_prob)
    trainer = unset(
        KTOTrainer,
        beta=0.1,
        loss_type="kto",
        calculate_KL=True,
        desirable_weight=1.5,
        undesirable_weight=0.5,
        ref_model=answering(reference),
    )
    trainer._compute_kl_logps = lambda which, batch: torch.full((PAIRS,), -1.0 if which is model else -1.25)
    loss = trainer._compute_loss(model, batch_of(given["mask"][:PAIRS]) | {"label": torch.tensor(LABELS)}, False)
    loss.backward()
    return {"loss": loss.item(), "gradient": log_prob.grad.tolist()}


def main() -> None:
    given = inputs()
    made = {name: dpo(given, name) for name in [*NAMES.split(), "sigmoid_norm", "sft"]}
    made["kto"] = kto(given)
    means = torch.tensor([-0.5, -1.0, -2.0, -0.1]), torch.tensor([-0.7, -0.4, -2.5, -1.1])
    for name, settings in {
        "cpo": {"loss_type": "sigmoid"},
        "simpo": {"loss_type": "simpo", "simpo_gamma": 1.0},
    }.items():
        trainer = unset(CPOTrainer, beta=2.0, alpha=0.0, label_smoothing=0.0, **settings)
        made[name] = {"losses": trainer.cpo_loss(*means)[0].tolist()}
    trainer = unset(ORPOTrainer, beta=0.1)
    # it is subtracted from the likelihood's loss
    made["orpo"] = {"losses": (-trainer.odds_ratio_loss(*means)[0]).tolist()}
    lists = {name: values.tolist() for name, values in given.items()} | {"means": [each.tolist() for each in means]}
    (HERE / "preferences.json").write_text(json.dumps({"inputs": lists, "losses": made}, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
