"""flowalign: align diffusion and flow models with rewards.

import flowalign as fa

policy = fa.load("tiny_sd3", lora={"rank": 8})
run = fa.train(policy, fa.reward("shapes"), "shapes_train", iterations=20)
"""

import importlib
import logging
import os
from typing import TYPE_CHECKING, Any

from flowalign.runs.version import __version__ as __version__

# Threads that wait for others sleep. By default they spin, and a run beside other busy processes takes many times as
# long. GNU's OpenMP, which torch's wheels bring, reads it when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# diffusers loads onnxruntime where it is installed. A thread of onnxruntime reports to Microsoft which models run.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

# peft loads it, and on a CPU it then warns of a kernel that flowalign does not use.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

# Asks who started this process before anything slow is loaded.
importlib.import_module("flowalign.runs.launcher")

if TYPE_CHECKING:
    from flowalign.app import gallery
    from flowalign.app.api import Run, compare, find, load, reward, train
    from flowalign.policies.diffusion import DiffusersPolicy, Rollout
    from flowalign.training import Trainer
    from flowalign.training.league import run_league as league

__all__ = [
    "DiffusersPolicy",
    "Rollout",
    "Run",
    "Trainer",
    "compare",
    "find",
    "gallery",
    "league",
    "load",
    "reward",
    "train",
]

PLACES = {
    "DiffusersPolicy": "flowalign.policies.diffusion:DiffusersPolicy",
    "Rollout": "flowalign.policies.diffusion:Rollout",
    "Trainer": "flowalign.training:Trainer",
    "league": "flowalign.training.league:run_league",
    **{name: f"flowalign.app.api:{name}" for name in ("Run", "compare", "find", "load", "reward", "train")},
}
"""Names that are loaded at their first use, so that `import flowalign` is quick."""


def __getattr__(name: str) -> Any:
    if name == "gallery":
        return importlib.import_module("flowalign.app.gallery")
    if name not in PLACES:
        raise AttributeError(f"module 'flowalign' has no attribute '{name}'")
    module, _, attribute = PLACES[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
