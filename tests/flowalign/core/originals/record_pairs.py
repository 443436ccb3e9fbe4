"""Record what D3PO's, SPO's and LPO's code makes of the inputs below; README.md says how to run it.

Their losses are lines of long scripts, and are run as they stand there, taken out by the names that they assign to.
"""

import ast
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

HERE = Path(__file__).parent
PAIRS, MEMBERS = 12, 4


def lines(file: Path, names: tuple[str, ...]) -> list[ast.stmt]:
    """The statements of a script that assign to these names, in their order."""
    found = [
        node
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in names
    ]
    return sorted(found, key=lambda node: node.lineno)


def run(statements: list[ast.stmt], names: dict[str, Any]) -> None:
    exec(compile(ast.Module(statements, []), "theirs", "exec"), names)


def loss(file: Path, given: dict[str, torch.Tensor], beta: float, **more: Any) -> dict[str, Any]:
    """Loss and gradients of the last assignments of ratios and loss in a training script."""
    own = {name: given[name].clone().requires_grad_() for name in ("total_prob_0", "total_prob_1")}
    config = SimpleNamespace(train=SimpleNamespace(beta=beta, eps=0.1))
    names: dict[str, Any] = {"torch": torch, "config": config, **given, **own, **more}
    run([statement for name in ("ratio_0", "ratio_1", "loss") for statement in lines(file, (name,))[-1:]], names)
    names["loss"].backward()
    return {"loss": names["loss"].item(), "gradients": [value.grad.tolist() for value in own.values()]}


def comparison(file: Path) -> dict[str, Any]:
    """A file of `compare_funcs` without its decorators and imports of its package."""
    kept = []
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []
        if isinstance(node, (ast.FunctionDef, ast.Assign)):
            kept.append(node)
    names: dict[str, Any] = {"torch": torch}
    run(kept, names)
    return names


def main() -> None:
    d3po, spo, lpo = (Path(folder).resolve() for folder in sys.argv[1:4])
    # their logarithm of an exponential rounds, which LPO's beta multiplies
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(7)
    given = {name: 0.08 * torch.randn(PAIRS) for name in ("total_prob_0", "total_prob_1")}
    given |= {f"total_ref_prob_{i}": value + 0.08 * torch.randn(PAIRS) for i, value in enumerate(given.values())}
    rewards = torch.randn(2, PAIRS).round(decimals=1)
    rewards[1, :3] = rewards[0, :3]
    human = torch.stack([(rewards[0] > rewards[1]).int() - (rewards[0] < rewards[1]).int()] * 2, 1)
    human[:, 1] *= -1
    scores = 0.3 * torch.randn(MEMBERS, 20)
    timesteps = torch.arange(951, 0, -50)
    recorded: dict[str, Any] = {
        "inputs": {name: value.tolist() for name, value in (given | {"rewards": rewards, "scores": scores}).items()},
        "d3po": loss(d3po / "scripts/rm/train_d3po.py", given, 0.1, human_prefer=human),
        "spo": loss(spo / "spo_training_and_inference/train_scripts/train_spo.py", given, 10.0),
        # their sigmoid of large negative numbers is 0, and its logarithm infinite
        "lpo": loss(lpo / "lpo/train_scripts/train_lpo.py", {k: 0.2 * v for k, v in given.items()}, 500.0),
    }
    theirs = comparison(spo / "spo_training_and_inference/spo/preference_models/compare_funcs.py")
    indices, valid = theirs["preference_score_compare"](scores, 0.3)
    recorded["spo"] |= {"indices": indices.tolist(), "valid": valid.tolist()}
    theirs = comparison(lpo / "lpo/lpo/preference_models/compare_funcs.py")
    indices, valid = theirs["preference_score_compare"](scores, 0.3, timesteps, "sigma", 0.35, 0.5)
    threshold = theirs["dynamic_threshold_sigma"](0.35, 0.5, timesteps)
    recorded["lpo"] |= {"indices": indices.tolist(), "valid": valid.tolist(), "threshold": threshold.tolist()}
    rounded = json.loads(json.dumps(recorded), parse_float=lambda text: float(f"{float(text):.9g}"))
    (HERE / "step_pairs.json").write_text(json.dumps(rounded) + "\n")


if __name__ == "__main__":
    main()
