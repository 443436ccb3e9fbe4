"""Record what the code of Flash-GRPO and Flow-OPD makes of the inputs below; README.md says how to run it.

Steps are their functions, and losses the lines of their loops, as they stand there.
"""

import ast
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

HERE = Path(__file__).parent
SIGMAS = [1.0, 0.9, 0.75, 0.5, 0.2, 0.0]
ROWS = 8


def run(nodes: list[ast.stmt], names: dict[str, Any]) -> dict[str, Any]:
    for node in nodes:
        if isinstance(node, ast.FunctionDef):
            # annotations of packages that are not here
            node.returns, node.decorator_list = None, []
            for argument in node.args.args:
                argument.annotation = None
    exec(compile(ast.fix_missing_locations(ast.Module(nodes, [])), "theirs", "exec"), names)
    return names


def step_function(file: Path) -> Any:
    found = [node for node in ast.parse(file.read_text()).body if getattr(node, "name", "") == "sde_step_with_logprob"]
    return run(found, {"torch": torch, "math": math})["sde_step_with_logprob"]


def line(file: Path, name: str, has: str, number: int = 0) -> ast.stmt:
    """The assignment to a name that contains a text, of several the one with this number."""
    text = file.read_text()
    found = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id == name
        and has in (ast.get_source_segment(text, node) or "")
    ]
    return sorted(found, key=lambda node: node.lineno)[number]


def scheduler() -> Any:
    return SimpleNamespace(sigmas=torch.tensor(SIGMAS), index_for_timestep=int)


def flash(folder: Path, given: dict[str, torch.Tensor]) -> dict[str, Any]:
    step = step_function(folder / "flow_grpo/diffusers_patch/wan2_1_pipeline_with_logprob_sample.py")
    script = folder / "scripts/train_wanx2_1_flash.py"
    velocity = given["velocity"].clone().requires_grad_()
    made = step(
        scheduler(), velocity, given["steps"], given["x"], prev_sample=given["next"], return_dt_and_std_dev_t=True
    )
    _, log_prob, _, _, _, scale = made
    names = {
        "torch": torch,
        "advantages": given["advantage"],
        "ratio": torch.exp(log_prob - (log_prob + given["moved"]).detach()),
        "value_tensor": scale.flatten(),
        "accelerator": SimpleNamespace(reduce=lambda value, reduction: value),
        "config": SimpleNamespace(train=SimpleNamespace(clip_range=1e-3)),
    }
    run([line(script, name, "") for name in ("w", "unclipped_loss", "clipped_loss", "policy_loss")], names)
    (gradient,) = torch.autograd.grad(names["policy_loss"], velocity)
    return {"scale": scale.flatten().tolist(), "loss": names["policy_loss"].item(), "gradient": gradient.tolist()}


def opd(folder: Path, given: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Of each row by itself: among several their advantages [N, 1] would meet the ratios [N] of all."""
    step = step_function(folder / "flow_grpo/diffusers_patch/sd3_sde_with_logprob.py")
    script = folder / "scripts/train_sd3_opd_mix.py"
    train = SimpleNamespace(kl_scale=-1, adv_clip_max=5, clip_range=1e-4, beta=0.04)
    recorded: dict[str, Any] = {"kl_only": [], "gkd": []}
    for row in range(ROWS):
        one = slice(row, row + 1)

        def steps(velocity: torch.Tensor, one: slice = one) -> Any:
            return step(scheduler(), velocity, given["steps"][one], given["x"][one], prev_sample=given["next"][one])

        for mode in recorded:
            velocity = given["velocity"][one].clone().requires_grad_()
            _, log_prob, mean, std = steps(velocity)
            names = {
                "torch": torch,
                "config": SimpleNamespace(train=train),
                "prev_sample_mean": mean,
                "prev_sample_mean_ref_lora": steps(given["taught"][one])[2],
                "prev_sample_mean_ref_base": steps(given["anchor"][one])[2],
                "std_dev_t": std,
                "ratio": torch.exp(log_prob - (log_prob + given["moved"][one]).detach()),
            }
            if mode == "kl_only":
                lines = [
                    line(script, "kl_reward", "prev_sample_mean_ref_lora"),
                    line(script, "kl_reward", "squeeze"),
                    line(script, "advantages", "kl_scale * kl_reward"),
                    line(script, "advantages", "clamp"),
                    line(script, "unclipped_loss", ""),
                    line(script, "clipped_loss", ""),
                    line(script, "policy_loss", "maximum"),
                ]
                total = line(script, "loss", "policy_loss + config.train.beta")
            else:
                lines = [line(script, "kl_reward_gkd", "std_dev_t"), line(script, "gkd_loss", "mean")]
                total = line(script, "loss", "gkd_loss + config.train.beta")
            anchor = [line(script, "kl_loss", "prev_sample_mean_ref_base"), line(script, "kl_loss", "torch.mean")]
            run([*lines, *anchor, total], names)
            (gradient,) = torch.autograd.grad(names["loss"], velocity)
            recorded[mode].append({"loss": names["loss"].item(), "gradient": gradient[0].tolist()})
    return recorded


def main() -> None:
    flash_grpo, flow_opd = (Path(folder).resolve() for folder in sys.argv[1:3])
    torch.manual_seed(5)
    given = {name: torch.randn(ROWS, 2, 1, 3, 3) for name in ("x", "velocity", "next", "taught", "anchor")}
    given["next"] = 0.8 * given["x"] + 0.4 * given["next"]
    given["taught"] = given["velocity"] + 0.5 * given["taught"]
    given["anchor"] = given["velocity"] + 0.5 * given["anchor"]
    given["advantage"] = torch.randn(ROWS)
    # log-probabilities when they were drawn less those now
    given["moved"] = torch.tensor([0.0, 5e-5, -5e-5, 3e-3, -3e-3, 5e-4, -5e-4, 0.0])
    given["steps"] = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3])
    pictures = {name: value[:, :, 0] if value.dim() == 5 else value for name, value in given.items()}
    recorded = {
        "inputs": {name: value.tolist() for name, value in pictures.items()} | {"sigmas": SIGMAS},
        "flash_grpo": flash(flash_grpo, given),
        "flow_opd": opd(flow_opd, pictures),
    }
    rounded = json.loads(json.dumps(recorded), parse_float=lambda text: float(f"{float(text):.9g}"))
    (HERE / "methods_2026.json").write_text(json.dumps(rounded) + "\n")


if __name__ == "__main__":
    main()
