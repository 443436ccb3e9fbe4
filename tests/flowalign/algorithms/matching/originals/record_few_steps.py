"""Record what RTDMD's own lines make of small inputs, on networks that are a formula.

In a folder with a clone of Harahan/RTDMD at 6c3cb03, in an environment with torch and safetensors:

    python tests/flowalign/algorithms/matching/originals/record_few_steps.py RTDMD

Its functions and the lines of its loops are run as they stand, with the names that they use; none of them is kept here.
"""

import ast
import contextlib
import math
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace as Names
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn import functional as F

TRAINERS = Path(sys.argv[1]) / "rtdmd/trainers"
SIGMAS = [1.0, 0.75, 0.5, 0.25, 0.0]
ROWS, SHAPE, ACTING = 5, (2, 3, 3), (0, 2)

generator = torch.Generator().manual_seed(26)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator)


given = {name: normal(ROWS, 3, *SHAPE) for name in ("x", "next", "velocity")}
given |= {name: normal(ROWS, *SHAPE) for name in ("noise", "fake", "teacher", "first", "second", "liking")}
given |= {"advantage": 4 * normal(ROWS), "moved": 2e-5 * normal(ROWS, 2)}
given |= {"t": torch.tensor([0.9, 0.6, 0.4, 0.25, 0.1]), "lower": torch.tensor([0.75, 0.5, 0.3, 0.05, 0.0])}
given |= {"slopes": torch.tensor([0.4, -0.3])}


class Drawn:
    """torch, whose draws are the recorded ones."""

    def __init__(self) -> None:
        self.noises = [given["first"], given["second"]]

    def randn_like(self, like: torch.Tensor) -> torch.Tensor:
        return self.noises.pop(0)

    def randint(self, **_: Any) -> torch.Tensor:
        return (1000 * (given["t"] - given["lower"])).round().long()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def run(nodes: list[Any], names: dict[str, Any]) -> dict[str, Any]:
    for node in nodes:
        for each in ast.walk(node):
            if isinstance(each, ast.FunctionDef):
                # annotations of packages that are not here
                each.returns, each.decorator_list = None, []
                for argument in [*each.args.args, *each.args.kwonlyargs]:
                    argument.annotation = None
    exec(compile(ast.fix_missing_locations(ast.Module(nodes, [])), "theirs", "exec"), names)
    return names


def function(file: Path, name: str, names: dict[str, Any]) -> Any:
    found = [node for node in ast.walk(ast.parse(file.read_text())) if getattr(node, "name", "") == name]
    return run(found[:1], names)[name]


def lines(file: Path, within: str, *wanted: str) -> list[ast.stmt]:
    """The first assignment to each of these names in a function."""
    [body] = [node for node in ast.walk(ast.parse(file.read_text())) if getattr(node, "name", "") == within]
    found = [
        next(
            node
            for node in sorted(
                (each for each in ast.walk(body) if isinstance(each, ast.Assign)), key=lambda each: each.lineno
            )
            if isinstance(node.targets[0], ast.Name) and node.targets[0].id == name
        )
        for name in wanted
    ]
    return found


utils = runpy.run_path(str(TRAINERS / "ac_dmd_utils.py"))
step = function(
    TRAINERS.parent / "diffusers_patch/sde_with_logprob.py", "sde_step_with_logprob", {"torch": torch, "math": math}
)
dmd_loss = function(TRAINERS / "dmd_trainer.py", "dmd_loss", {"torch": torch, "F": F})
settings = Names(
    ac_consistency_enabled=True,
    ac_consistency_weight=0.01,
    ac_consistency_epsilon_timestep=200.0,
    ac_consistency_num_steps=1,
    ac_consistency_use_two_sample_unbiased=True,
    ac_consistency_stopgrad_transitions=True,
    ac_fake_loss_weight_clamp_min=0.0,
    ac_fake_loss_weight_clamp_max=10.0,
    bp_reward_margin=3.0,
    bp_grad_scale=1.0e-4,
    weight=0.001,
)
scheduler = Names(sigmas=torch.tensor(SIGMAS), index_for_timestep=int)


def generator_stage() -> dict[str, torch.Tensor]:
    velocity = given["velocity"].clone().requires_grad_()
    rows, total = torch.ones(ROWS, dtype=torch.long), 0.0
    for place, j in enumerate(ACTING):
        _, log_prob, _, _ = step(
            scheduler,
            velocity[:, place],
            rows * j,
            given["x"][:, place],
            prev_sample=given["next"][:, place],
            noise_level=0.9,
            sde_type="cps",
        )
        names = {
            "torch": torch,
            "log_prob": log_prob,
            "batch": {"log_probs": (log_prob.detach() + given["moved"][:, place])[:, None]},
            "j": 0,
            "adv": given["advantage"].clamp(-5, 5),
            "clip_lt": 1e-5,
            "clip_gt": 1e-5,
        }
        wanted = ("ratio", "unclipped_loss", "clipped_loss", "policy_loss")
        run(lines(TRAINERS / "rtdmd_trainer.py", "_grpo_dmd_training_stage", *wanted), names)
        total = total + names["policy_loss"]
    x0 = given["x"][:, 2] - SIGMAS[3] * velocity[:, 2]
    t = given["t"].view(-1, 1, 1, 1)
    at = utils["flow_forward_v2"](torch.zeros(ROWS), given["t"], x0, given["noise"])
    loss, _ = dmd_loss(x0, at.detach() - t * given["fake"], at.detach() - t * given["teacher"])
    names = {"F": F, "ls_cfg": settings, "weighted_reward": (given["liking"] * x0).flatten(1).sum(1)}
    run(lines(TRAINERS / "bp_mixin.py", "_compute_bp_loss", "loss_bp_raw"), names)
    total = total + settings.weight * loss + settings.bp_grad_scale * names["loss_bp_raw"]
    # its loop divides by the number of steps that a sample learns from
    (gradient,) = torch.autograd.grad(total / 3, velocity)
    return {"gradient": gradient}


def fake_stage() -> dict[str, torch.Tensor]:
    slopes = given["slopes"].clone().requires_grad_()
    drawn = Drawn()

    def network(net: None, sample: torch.Tensor, prompt: None, timestep: torch.Tensor, *_: Any, **__: Any) -> Any:
        return slopes[0] * sample + slopes[1] * (timestep / 1000).view(-1, 1, 1, 1)

    x0, zero = given["x"][:, 2] - SIGMAS[3] * given["velocity"][:, 2], torch.zeros(ROWS)
    at = utils["flow_forward_v2"](zero, given["t"], x0, given["noise"])
    target, scale = utils["flow_forward_target_v2"](zero, given["t"], x0, given["noise"], move_scale_out=True)
    names: dict[str, Any] = utils | {
        "torch": drawn,
        "F": F,
        "ls_cfg": settings,
        "v_pred": network(None, at, None, 1000 * given["t"]),
    }
    names |= {"ac_scale": scale, "v_target": target}
    wanted = ("loss_raw", "inv_scale_weight", "loss_fake_ac")
    run(lines(TRAINERS / "ac_dmd_mixin.py", "_train_fake_score_ac_from_rollout", *wanted), names)
    consistency = function(TRAINERS / "ac_dmd_mixin.py", "_compute_ac_consistency_loss", names)
    trainer = Names(
        _ac_transition_is_stochastic=lambda: True,
        _autocast=contextlib.nullcontext,
        _predict_noise=network,
        _model_timestep_to_sigma=lambda timestep: timestep / 1000,
        fake_score_net=None,
        config=Names(dmd=Names(generator_scheduler="cps", cps_eta=0.9)),
    )
    nothing = dict.fromkeys(("prompt_embeds", "pooled_embeds", "uncond_embeds", "uncond_pooled"))
    agreement, _ = consistency(
        trainer,
        xt_noised=at,
        renoise_timestep=1000 * given["t"],
        sigma_end=given["t"],
        v_pred_end=names["v_pred"],
        ls_cfg=settings,
        fake_train_guidance_scale=1.0,
        **nothing,
    )
    loss = names["loss_fake_ac"] + settings.ac_consistency_weight * agreement
    (gradient,) = torch.autograd.grad(loss, slopes)
    return {"agreement": agreement.detach(), "fake_loss": loss.detach(), "fake_gradient": gradient}


save_file(given | generator_stage() | fake_stage(), Path(__file__).parent / "few_steps.safetensors")
