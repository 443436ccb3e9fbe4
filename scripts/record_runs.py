"""What the code does, for a restructuring that must not change it: metrics and weights of short runs, bit for bit.

    python scripts/record_runs.py before.json            # then change the code
    python scripts/record_runs.py after.json --against before.json

Three iterations each of recipes that between them pass through most of the code, on one thread. Compares with another
recording made on the same machine; the exit code is 1 where a run differs. `--pairs` and `--questions` name files for
DPO and for the judge, as `scripts/label_pairs.py` and `flowalign pair-questions` write them.
"""

import flowalign  # noqa: F401  before torch: it lets threads that wait sleep

# isort: split
import argparse
import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from flowalign.config import load, recipe
from flowalign.training import Trainer

SMALL = ["iterations=3", "prompts_per_iteration=4", "previews=0", "checkpoint_every=0"]
CALIBRATED = "rollout.plan={name: calibrated, tolerance: 0, z: 0.1, step: 0.05}"
RUNS: dict[str, tuple[str, list[str]]] = {
    "flow_grpo": ("tiny_sd3/flow_grpo", []),
    "flow_grpo under guidance": ("tiny_sd3/flow_grpo", ["algorithm.kl_weight=0.01", "rollout.guidance=2.0"]),
    "dense_grpo": ("tiny_sd3/dense_grpo", [CALIBRATED]),
    "tp_grpo": ("tiny_sd3/tp_grpo", []),
    "pref_grpo": ("tiny_sd3/pref_grpo", []),
    "g2rpo": ("tiny_sd3/g2rpo", ["training.updates_per_iteration=1"]),
    "branch_grpo": ("tiny_sd3/branch_grpo", []),
    "mix_grpo": ("tiny_sd3/mix_grpo", ["algorithm.flash=0.5"]),
    "reinflow": ("tiny_sd3/reinflow", []),
    "dance_grpo": ("tiny_sd3/dance_grpo", ["rollout.overlap=2", "data.dynamic_sampling={rounds: 3}"]),
    "grpo_guard": ("tiny_sd3/grpo_guard", []),
    "tempflow_grpo": ("tiny_sd3/tempflow_grpo", []),
    "grpo": ("tiny_lm/grpo", []),
    "kdrl": ("tiny_lm/kdrl", []),
    "chord": ("tiny_lm/chord", []),
    "turns_gigpo": ("tiny_lm/turns_gigpo", []),
    "prompt_enhancer": ("tiny_lm/prompt_enhancer", []),
}


def record(path: str, overrides: list[str]) -> dict[str, Any]:
    """The metrics of a short run, without times, and a checksum of what it trained."""
    with tempfile.TemporaryDirectory() as folder:
        small = [*(f"training.{setting}" for setting in SMALL), "evaluation.prompts=null", "name=run"]
        trainer = Trainer(load(recipe(path), [*small, f"output={folder}", *overrides]), progress=False)
        trainer.train()
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    checksum = hashlib.sha256()
    for parameter in trainer.learner.parameters.values():
        checksum.update(parameter.detach().float().cpu().contiguous().numpy().tobytes())
    metrics = [{k: v for k, v in json.loads(line).items() if not k.startswith("seconds/")} for line in lines]
    return {"weights": checksum.hexdigest(), "metrics": metrics}


def differences(now: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """What a recording has that another has not, or has otherwise; runs that only one of them has do not count."""
    found = []
    for name in now.keys() & before.keys():
        if now[name]["weights"] != before[name]["weights"]:
            found.append(f"{name}: weights")
        for i, (own, other) in enumerate(zip(now[name]["metrics"], before[name]["metrics"], strict=True)):
            keys = sorted(key for key in own.keys() | other.keys() if own.get(key) != other.get(key))
            found += [f"{name}, iteration {i}: {key} {other.get(key)} -> {own.get(key)}" for key in keys]
    return sorted(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--against", type=Path, help="an earlier recording")
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), metavar="RUN")
    parser.add_argument("--pairs", type=Path)
    parser.add_argument("--questions", type=Path)
    own = parser.parse_args()
    runs = {name: RUNS[name] for name in own.only}
    if own.pairs is not None:
        runs["dpo"] = ("tiny_sd3/dpo", [f"data.prompts={own.pairs}"])
    if own.questions is not None:
        runs["judge"] = ("tiny_vlm/judge", [f"data.prompts={own.questions}"])
    torch.set_num_threads(1)
    recorded = {name: record(*run) for name, run in runs.items()}
    own.output.write_text(json.dumps(recorded, indent=1))
    changed = differences(recorded, json.loads(own.against.read_text())) if own.against else []
    print("\n".join(changed) or f"{len(recorded)} runs recorded" + (", all as before" if own.against else ""))
    return bool(changed)


if __name__ == "__main__":
    raise SystemExit(main())
