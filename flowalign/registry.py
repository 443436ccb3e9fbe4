"""Names in configurations to code. Imports happen when a name is used; a dotted path needs no registration."""

import functools
import importlib
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from flowalign.errors import ConfigError, nearest

ALGORITHMS = {
    "flow_grpo": "flowalign.algorithms.flow_grpo:FlowGRPO",
    "flow_grpo_fast": "flowalign.algorithms.flow_grpo_fast:FlowGRPOFast",
    "dance_grpo": "flowalign.algorithms.dance_grpo:DanceGRPO",
    "mix_grpo": "flowalign.algorithms.mix_grpo:MixGRPO",
    "dense_grpo": "flowalign.algorithms.dense_grpo:DenseGRPO",
    "tp_grpo": "flowalign.algorithms.tp_grpo:TPGRPO",
    "pref_grpo": "flowalign.algorithms.pref_grpo:PrefGRPO",
    "g2rpo": "flowalign.algorithms.g2rpo:G2RPO",
    "tempflow_grpo": "flowalign.algorithms.tempflow_grpo:TempFlowGRPO",
    "branch_grpo": "flowalign.algorithms.branch_grpo:BranchGRPO",
    "hicogen": "flowalign.algorithms.hicogen:HiCoGen",
    "grpo_guard": "flowalign.algorithms.grpo_guard:GRPOGuard",
    "flow_dppo": "flowalign.algorithms.flow_dppo:FlowDPPO",
    "reinflow": "flowalign.algorithms.reinflow:ReinFlow",
    "grpo": "flowalign.algorithms.grpo:GRPO",
    "dpo": "flowalign.algorithms.dpo:DPO",
}
REWARDS = {
    "shapes": "rewards.shapes.reward:ShapesReward",
    "tiny_clip": "flowalign.embedded:TinyCLIP",
    "clip_score": "rewards.clip:CLIPScore",
    "pick_score": "rewards.clip:PickScore",
    "hpsv2": "rewards.clip:HPSv2",
    "goal_baseline": "rewards.clip:GoalBaseline",
    "clip_i": "rewards.clip:CLIPImage",
    "lambda_harmonic": "rewards.clip:LambdaHarmonic",
    "aesthetic": "rewards.aesthetic:Aesthetic",
    "image_reward": "rewards.image_reward:ImageReward",
    "ocr": "rewards.rules:OCR",
    "jpeg_size": "rewards.rules:JPEGSize",
    "image_statistic": "rewards.rules:ImageStatistic",
    "detection": "rewards.rules:Detection",
    "group_diversity": "rewards.rules:GroupDiversity",
    "weighted_sum": "rewards.compose:WeightedSum",
    "normalized": "rewards.compose:Normalized",
    "product": "rewards.compose:Product",
    "worst_case": "rewards.compose:WorstCase",
    "mean_minus_spread": "rewards.compose:MeanMinusSpread",
    "agreement": "rewards.compose:Agreement",
    "bounded_centred": "rewards.compose:BoundedCentred",
    "gate": "rewards.compose:Gate",
    "rescaled": "rewards.compose:Rescaled",
    "scheduled": "rewards.compose:ScheduledSum",
    "per_frame": "rewards.compose:PerFrame",
    "win_rate": "rewards.compose:WinRate",
    "cached": "rewards.cache:Cached",
    "vlm_judge": "rewards.judges.reward:VLMJudge",
    "vlm_pairwise": "rewards.judges.reward:PairwiseVLMJudge",
    "remote": "rewards.remote:RemoteReward",
    "exact_match": "rewards.text.verifiers:ExactMatch",
    "maths": "rewards.text.verifiers:Maths",
    "multiple_choice": "rewards.text.verifiers:MultipleChoice",
    "text_format": "rewards.text.shape:TextFormat",
    "soft_length": "rewards.text.shape:SoftLength",
    "length_switch": "rewards.text.shape:LengthSwitch",
    "majority": "rewards.text.shape:Majority",
}
KERNELS = {
    name: f"samplers.kernels:{name}" for name in ("ode", "flow_sde", "dance_sde", "cps", "cps_published", "ddim")
}
PLANS = {
    "all": "samplers.plans:All",
    "window": "samplers.plans:Window",
    "single": "samplers.plans:Single",
    "decay": "samplers.plans:Decay",
    "calibrated": "samplers.plans:Calibrated",
    "tree": "samplers.plans:Tree",
}
ADVANTAGES = {
    name: f"flowalign.core.estimators:{name}"
    for name in (
        "grpo",
        "dr_grpo",
        "rloo",
        "reinforce_pp",
        "remax",
        "gdpo",
        "bnpo",
        "ngrpo",
        "gigpo",
        "pass_k",
        "best_margin",
        "psr_nsr",
    )
}
LOSSES = {
    name: f"flowalign.core.policy_losses:{name}" for name in ("ppo", "reinforce", "gspo", "cispo", "reg_grpo", "pacs")
}
SELECTIONS = {
    "shuffled": "flowalign.selection:Shuffled",
    "mopps": "flowalign.selection:MoPPS",
    "sec": "flowalign.selection:SEC",
}
MODELS = {"sd3": "flowalign.policies.families:SD3"}

TABLES: dict[str, dict[str, str]] = {
    "algorithms": ALGORITHMS,
    "kernels": KERNELS,
    "plans": PLANS,
    "rewards": REWARDS,
    "models": MODELS,
    "advantages": ADVANTAGES,
    "losses": LOSSES,
    "selections": SELECTIONS,
}


def resolve(table: str, name: str) -> Any:
    """The object behind a registered name or a dotted path ('package.module:name' or 'package.module.name')."""
    path = TABLES[table].get(name, name)
    module, _, attribute = path.rpartition(":" if ":" in path else ".")
    if not module:
        raise ConfigError(f"no {table[:-1]} is called '{name}'; {nearest(name, TABLES[table])}")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{table[:-1]} '{name}' cannot be imported: {error}") from error


def summary(table: str, name: str) -> str:
    """First line of what a name stands for."""
    return (inspect.getdoc(resolve(table, name)) or "").partition("\n")[0]


def check(table: str, name: str, arguments: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The arguments of what a name stands for, checked against its signature; nothing is made.

    Raises:
        ConfigError: an unknown name or argument, or a value of a wrong type.
    """
    target = resolve(table, name)
    if not inspect.isclass(target):
        if arguments:
            raise ConfigError(f"{where}: '{name}' is a function and takes no settings ({', '.join(arguments)})")
        return {}
    parameters = inspect.signature(target).parameters
    checked = _checked(name, arguments, parameters, get_type_hints(target.__init__), where)
    try:
        inspect.signature(target).bind(**checked)
    except TypeError as error:
        raise ConfigError(f"{where}: '{name}': {error}") from error
    return checked


def part(table: str, name: str, settings: Mapping[str, Any], where: str) -> Callable[[Any], Tensor]:
    """A function of one argument with settings as keywords (an advantage, a loss), its settings checked and bound.

    Raises:
        ConfigError: an unknown name or setting, or a value of a wrong type or range.
    """
    target = resolve(table, name)
    hints = get_type_hints(target, include_extras=True)
    known = [p.name for p in inspect.signature(target).parameters.values() if p.kind is p.KEYWORD_ONLY]
    return functools.partial(target, **_checked(name, settings, known, hints, where))


def _checked(
    name: str, arguments: Mapping[str, Any], known: Collection[str], hints: Mapping[str, Any], where: str
) -> dict[str, Any]:
    checked = {}
    for key, value in arguments.items():
        if key not in known:
            raise ConfigError(f"{where}: '{name}' has no setting '{key}'; {nearest(key, known)}")
        try:
            checked[key] = TypeAdapter(hints.get(key, Any)).validate_python(value)
        except ValidationError as error:
            raise ConfigError(f"{where}.{key}: {error.errors()[0]['msg']} (got {value!r})") from error
    return checked


def build(table: str, name: str, arguments: Mapping[str, Any], where: str) -> Any:
    """Make the object a name stands for, with checked arguments.

    A class is instantiated; a plain function takes no arguments and is returned as it is.

    Raises:
        ConfigError: an unknown name or argument, or a value of a wrong type or range.
    """
    target, checked = resolve(table, name), check(table, name, arguments, where)
    if not inspect.isclass(target):
        return target
    try:
        return target(**checked)
    except (TypeError, ValueError, OSError, ImportError) as error:
        raise ConfigError(f"{where}: {' '.join(str(error).split())}") from error
