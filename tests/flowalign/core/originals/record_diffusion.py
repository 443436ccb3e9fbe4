"""Record what verl-omni and Flow-Factory make of the inputs below; README.md says how to run it.

Their functions and the lines of Flow-Factory's loops are run as they stand there, without the packages around them.
"""

import __future__

import ast
import json
import math
import sys
from collections import defaultdict
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

HERE = Path(__file__).parent
SIGMAS = [1.0, 0.8, 0.45, 0.2, 0.0]
SHAPE = (6, 4, 3)


def run(nodes: list[Any], names: dict[str, Any]) -> dict[str, Any]:
    module = ast.fix_missing_locations(ast.Module(nodes, []))
    exec(compile(module, "theirs", "exec", __future__.annotations.compiler_flag), names)
    return names


def defined(file: Path, wanted: set[str], names: dict[str, Any]) -> dict[str, Any]:
    """Functions and classes of a file by their names, without decorators of their package, and bases."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in wanted:
            node.decorator_list = []
            if isinstance(node, ast.ClassDef):
                node.bases = []
            found.append(node)
    return run(found, names)


def assigned(file: Path, wanted: tuple[str, ...], names: dict[str, Any], method: str) -> dict[str, Any]:
    """The last assignment of each name within a method, in their order."""
    (body,) = [
        node
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == method
    ]
    last = {}
    for node in ast.walk(body):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in wanted:
            last[node.targets[0].id] = node
    return run(sorted(last.values(), key=lambda node: node.lineno), names)


def gradients(loss: torch.Tensor, *inputs: torch.Tensor) -> dict[str, Any]:
    found = torch.autograd.grad(loss, inputs)
    return {"loss": loss.item(), "gradients": [each.tolist() for each in found]}


def steps(scheduler: Any, flow_factory: Path, given: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Means and log-probabilities of stored next samples, with the gradient that reaches the velocity."""
    names = {"torch": torch, "math": math, "logger": None, "SDESchedulerOutput": SimpleNamespace(from_dict=dict)}
    defined(flow_factory / "src/flow_factory/utils/base.py", {"to_broadcast_tensor"}, names)
    defined(flow_factory / "src/flow_factory/scheduler/flow_match_euler_discrete.py", {"step"}, names)
    theirs = SimpleNamespace(sigmas=torch.tensor(SIGMAS), is_eval=False, dynamics_type=None)
    recorded: dict[str, Any] = {"verl_omni": {}, "flow_factory": {}}
    levels = {"sde": 0.7, "cps": 0.8, "dance_sde": 0.3}
    for kind, level in levels.items():
        recorded["verl_omni"][kind], recorded["flow_factory"][kind] = [], []
        for k in range(len(SIGMAS) - 1 if kind != "cps" else len(SIGMAS) - 2):
            velocity = given["velocity"].clone().requires_grad_()
            time = torch.full((SHAPE[0],), float(scheduler.timesteps[k]))
            _, log_prob, mean, *_ = scheduler.sample_previous_step(
                given["x"], velocity, time, noise_level=level, prev_sample=given["next"], sde_type=kind
            )
            (gradient,) = torch.autograd.grad(log_prob.sum(), velocity)
            made = {"mean": mean.tolist(), "log_prob": log_prob.tolist(), "gradient": gradient.tolist()}
            recorded["verl_omni"][kind].append(made)
            dynamics = {"sde": "Flow-SDE", "cps": "CPS", "dance_sde": "Dance-SDE"}[kind]
            velocity = given["velocity"].clone().requires_grad_()
            found = names["step"](
                theirs,
                velocity,
                torch.full((SHAPE[0],), 1000 * SIGMAS[k]),
                given["x"],
                next_latents=given["next"],
                timestep_next=torch.full((SHAPE[0],), 1000 * SIGMAS[k + 1]),
                noise_level=level,
                dynamics_type=dynamics,
            )
            (gradient,) = torch.autograd.grad(found["log_prob"].sum(), velocity)
            recorded["flow_factory"][kind].append(
                {
                    "mean": found["next_latents_mean"].tolist(),
                    "log_prob": found["log_prob"].tolist(),
                    "gradient": gradient.tolist(),
                }
            )
    return recorded


def main() -> None:
    omni, flow_factory = (Path(folder).resolve() for folder in sys.argv[1:3])
    torch.manual_seed(11)
    given = {name: torch.randn(SHAPE) for name in ("x", "velocity", "next", "old", "reference", "x0", "noise")}
    given["next"] = 0.8 * given["x"] + 0.3 * given["next"]
    given["old"] = given["velocity"] + 0.1 * given["old"]
    given["old_mean"], given["mean"] = given["x"] + 0.02 * given["noise"], given["x"] + 0.02 * given["reference"]
    given["old_log_prob"] = torch.randn(6)
    given["log_prob"] = given["old_log_prob"] + 2e-3 * torch.randn(6)
    given["reward"] = torch.tensor([0.1, 0.9, 0.4, 0.7, 0.7, 0.2])
    given["sigma"] = torch.tensor([0.15, 0.5, 0.9, 0.3, 0.75, 0.6])
    group = [0, 0, 0, 1, 1, 1]

    sys.path.insert(0, str(omni / "verl_omni/pipelines/schedulers"))
    scheduler = import_module("flow_match_sde").FlowMatchSDEDiscreteScheduler(shift=1.0)
    scheduler.set_timesteps(sigmas=SIGMAS[:-1])
    recorded: dict[str, Any] = {
        "inputs": {name: value.tolist() for name, value in given.items()} | {"group": group, "sigmas": SIGMAS},
        "steps": steps(scheduler, flow_factory, given),
    }

    wanted = {
        "compute_flow_grpo_outcome_advantage",
        "FlowGRPOLoss",
        "FlowDPPOLoss",
        "GRPOGuardLoss",
        "DiffusionNFTLoss",
    }
    algorithms = omni / "verl_omni/trainer/diffusion/diffusion_algos.py"
    names = defined(algorithms, wanted, {"torch": torch, "defaultdict": defaultdict})
    recorded["advantages"] = {
        scale: names["compute_flow_grpo_outcome_advantage"](
            given["reward"][:, None], group, global_std=scale == "batch"
        )[0][:, 0].tolist()
        for scale in ("batch", "group")
    }
    advantage = given["advantage"] = torch.tensor(recorded["advantages"]["group"])

    def config(**settings: float) -> Any:
        return SimpleNamespace(diffusion_loss=SimpleNamespace(adv_clip_max=1.0, **settings))

    log_prob, mean = (given[name].clone().requires_grad_() for name in ("log_prob", "mean"))
    common = {"old_log_prob": given["old_log_prob"], "log_prob": log_prob, "advantages": advantage}
    moved = {
        "old_prev_sample_mean": given["old_mean"],
        "prev_sample_mean": mean,
        "std_dev_t": torch.full((6, 1, 1), 0.6),
        "sqrt_dt": torch.full((6,), 0.35**0.5),
    }
    loss, _ = names["FlowGRPOLoss"].compute_loss(**common, config=config(clip_ratio=1e-3))
    recorded["flow_grpo"] = gradients(loss, log_prob)
    loss, _ = names["GRPOGuardLoss"].compute_loss(**common, **moved, config=config(clip_ratio=1e-3))
    recorded["grpo_guard"] = gradients(loss, log_prob, mean)
    loss, _ = names["FlowDPPOLoss"].compute_loss(**common, **moved, config=config(kl_mask_threshold=2e-3))
    recorded["flow_dppo"] = gradients(loss, log_prob)

    s = given["sigma"].view(-1, 1, 1)
    noised = (1 - s) * given["x0"] + s * given["noise"]
    velocity = given["velocity"].clone().requires_grad_()
    nft = names["DiffusionNFTLoss"]
    good = nft._advantage_to_reward_prob(advantage, adv_clip_max=5.0, adv_mode="all")
    settings = config(mix_beta=0.3, adaptive_weight_min=1e-5, ref_kl_coef=1e-2)
    settings.diffusion_loss.adv_clip_max = 5.0
    loss, _ = nft.compute_loss(
        forward_prediction=velocity,
        old_prediction=given["old"],
        ref_forward_prediction=given["reference"],
        x0=given["x0"],
        xt=noised,
        t_expanded=s,
        reward_prob=good,
        config=settings,
    )
    recorded["nft"] = gradients(loss, velocity)

    file = flow_factory / "src/flow_factory/trainers/awm.py"
    names = {"torch": torch, "flow_match_sigma": lambda t: t / 1000}
    defined(file, {"compute_weighted_log_prob"}, names)
    target = given["noise"] - given["x0"]
    recorded["awm"] = {}
    for weighting in ("Uniform", "t", "t**2", "huber", "ghuber"):
        velocity = given["velocity"].clone().requires_grad_()
        score = names["compute_weighted_log_prob"](velocity, target, 1000 * given["sigma"], weighting)
        # as on the weights that sampled, where their ratio is 1
        own = {**names, "log_prob": score, "old_log_prob": score.detach(), "ratio_clip_range": (-1e-4, 1e-4)}
        own["adv"] = advantage.clamp(-1, 1)
        loss = assigned(file, ("ratio", "unclipped_loss", "clipped_loss", "policy_loss"), own, "optimize")[
            "policy_loss"
        ]
        recorded["awm"][weighting.lower()] = gradients(loss, velocity)
    (HERE / "diffusion.json").write_text(json.dumps(recorded) + "\n")


if __name__ == "__main__":
    main()
