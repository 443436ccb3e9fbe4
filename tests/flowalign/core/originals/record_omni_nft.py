"""Record what OmniNFT's script makes of the inputs below; README.md says how to run it.

The lines of its loop, as they stand there: advantages by modality, and the losses of both.
"""

import ast
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

HERE = Path(__file__).parent
ROWS, SIGMAS = 6, [0.9, 0.7, 0.5, 0.3, 0.8, 0.2]
NAMES = ["videoalign_score", "hpsv3_score_video", "clap_score", "av_desync_reward"]
WEIGHTS = dict(zip(NAMES, [1.0, 1.5, 0.5, 2.0], strict=True))


def run(nodes: list[ast.stmt], names: dict[str, Any]) -> dict[str, Any]:
    exec(compile(ast.fix_missing_locations(ast.Module(nodes, [])), "theirs", "exec"), names)
    return names


def loop(tree: ast.Module, over: str) -> ast.For:
    return next(node for node in ast.walk(tree) if isinstance(node, ast.For) and ast.unparse(node.iter) == over)


def assigned(tree: ast.Module, name: str, has: str) -> ast.stmt:
    found = (node for node in ast.walk(tree) if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name)
    return next(node for node in found if has in ast.unparse(node.value))


def routed(tree: ast.Module, folder: Path, rewards: dict[str, list[float]]) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec((folder / "flow_grpo/stat_tracking.py").read_text(), names)
    prompts = ["a"] * 3 + ["b"] * 3
    names |= {
        "per_reward_adv": {
            name: names["PerPromptStatTracker"]().update(prompts, np.array(value)[:, None])
            for name, value in rewards.items()
        },
        "video_route_keys": {"hpsv3_score_video", "videoalign_score"},
        "audio_route_keys": {"audiobox_aesthetics_score", "clap_score"},
        "sync_route_keys": {"av_align_score", "av_desync_reward"},
        "reward_config": WEIGHTS,
        "adv_video_all": None,
        "adv_audio_all": None,
    }
    functions: list[ast.stmt] = [node for node in tree.body if getattr(node, "name", "") == "_infer_reward_route"]
    run([*functions, loop(tree, "per_reward_adv.items()")], names)
    return {side: names[f"adv_{side}_all"][:, 0].tolist() for side in ("video", "audio")}


def losses(tree: ast.Module, given: dict[str, torch.Tensor], advantage: dict[str, Any], detached: bool) -> Any:
    sigma = torch.tensor(SIGMAS)[:, None, None]
    velocity = {side: given[f"{side}_velocity"].clone().requires_grad_() for side in ("video", "audio")}
    states = {}
    for side in velocity:
        x0, noise = given[f"{side}_x0"], given[f"{side}_noise"]
        xt = (1 - sigma) * x0 + sigma * noise
        asked = {"fwd": velocity[side], "old": given[f"{side}_old"], "ref": given[f"{side}_reference"]}
        states[side] = {name: xt - sigma * v for name, v in asked.items()} | {"x0": x0, "xt": xt, "sigma_cur": sigma}
    names: dict[str, Any] = {
        "torch": torch,
        "modality_states": states,
        "modality_adv_key": {"video": "adv_video", "audio": "adv_audio"},
        "b": {f"adv_{side}": torch.tensor(advantage[side])[:, None] for side in velocity},
        "adv_clip_max": 5.0,
        "beta_mix": 0.5,
        "modality_policy": {},
        "modality_kl": {},
        "modality_weights": {"video": 1.0, "audio": 1.0},
        "weight_sum": 2.0,
        "config": None,
        "_cfg_get": lambda config, key, default: default,
    }
    names["b"]["attn_w_video"] = torch.ones(given["video_x0"].shape[:2])
    body = loop(tree, "['video', 'audio']")
    if detached:
        at = next(i for i, node in enumerate(body.body) if ast.unparse(node).startswith("wn ="))
        body.body[at + 1 : at + 1] = ast.parse("wp, wn = wp.detach(), wn.detach()").body
    whole = [assigned(tree, "policy", "modality_weights"), assigned(tree, "kl", "modality_weights")]
    run([body, *whole], names)
    each = names["policy"] + 1e-4 * names["kl"]
    made = torch.autograd.grad(each.sum(), list(velocity.values()))
    return {"loss": each.tolist(), **{side: g.tolist() for side, g in zip(velocity, made, strict=True)}}


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    source = (folder / "scripts/train_omninft_ltx_fsdp.py").read_text()
    torch.manual_seed(6)
    shapes = {"video": (ROWS, 4, 2), "audio": (ROWS, 3, 2)}
    sides = ("x0", "noise", "velocity", "old", "reference")
    given = {f"{side}_{name}": torch.randn(shape) for side, shape in shapes.items() for name in sides}
    rewards = {name: torch.randn(ROWS).tolist() for name in NAMES}
    advantage = routed(ast.parse(source), folder, rewards)
    recorded = {
        "inputs": {name: value.tolist() for name, value in given.items()},
        "rewards": rewards,
        "weights": list(WEIGHTS.values()),
        "sigma": SIGMAS,
        "advantage": advantage,
        "theirs": losses(ast.parse(source), given, advantage, detached=False),
        "detached": losses(ast.parse(source), given, advantage, detached=True),
    }
    rounded = json.loads(json.dumps(recorded), parse_float=lambda text: float(f"{float(text):.9g}"))
    (HERE / "omni_nft.json").write_text(json.dumps(rounded) + "\n")


if __name__ == "__main__":
    main()
