"""Names in configurations to code. Imports happen when a name is used; a dotted path needs no registration."""

import ast
import contextlib
import functools
import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from flowalign.errors import ConfigError, FlowalignError, nearest

ALGORITHMS = {
    "flow_grpo": "flowalign.algorithms.trajectory.flow_grpo:FlowGRPO",
    "flow_grpo_fast": "flowalign.algorithms.trajectory.flow_grpo_fast:FlowGRPOFast",
    "dance_grpo": "flowalign.algorithms.trajectory.dance_grpo:DanceGRPO",
    "mix_grpo": "flowalign.algorithms.trajectory.mix_grpo:MixGRPO",
    "dense_grpo": "flowalign.algorithms.trajectory.dense_grpo:DenseGRPO",
    "tp_grpo": "flowalign.algorithms.trajectory.tp_grpo:TPGRPO",
    "pref_grpo": "flowalign.algorithms.trajectory.pref_grpo:PrefGRPO",
    "g2rpo": "flowalign.algorithms.trajectory.g2rpo:G2RPO",
    "tempflow_grpo": "flowalign.algorithms.trajectory.tempflow_grpo:TempFlowGRPO",
    "branch_grpo": "flowalign.algorithms.trajectory.branch_grpo:BranchGRPO",
    "hicogen": "flowalign.algorithms.trajectory.hicogen:HiCoGen",
    "grpo_guard": "flowalign.algorithms.trajectory.grpo_guard:GRPOGuard",
    "flow_dppo": "flowalign.algorithms.trajectory.flow_dppo:FlowDPPO",
    "reinflow": "flowalign.algorithms.trajectory.reinflow:ReinFlow",
    "d3po": "flowalign.algorithms.trajectory.d3po:D3PO",
    "spo": "flowalign.algorithms.trajectory.spo:SPO",
    "prdp": "flowalign.algorithms.trajectory.prdp:PRDP",
    "dsrl": "flowalign.algorithms.trajectory.dsrl:DSRL",
    "grpo": "flowalign.algorithms.text.grpo:GRPO",
    "kdrl": "flowalign.algorithms.text.kdrl:KDRL",
    "g_opd": "flowalign.algorithms.text.g_opd:GOPD",
    "chord": "flowalign.algorithms.text.chord:CHORD",
    "relift": "flowalign.algorithms.text.relift:ReLIFT",
    "visurf": "flowalign.algorithms.text.visurf:ViSurf",
    "prefix_rft": "flowalign.algorithms.text.prefix_rft:PrefixRFT",
    "aepo": "flowalign.algorithms.text.aepo:AEPO",
    "nft": "flowalign.algorithms.matching.nft:NFT",
    "awm": "flowalign.algorithms.matching.awm:AWM",
    "dgpo": "flowalign.algorithms.matching.dgpo:DGPO",
    "crd": "flowalign.algorithms.matching.crd:CRD",
    "rwr": "flowalign.algorithms.matching.rwr:RWR",
    "raft": "flowalign.algorithms.matching.raft:RAFT",
    "online_dpo": "flowalign.algorithms.matching.online_dpo:OnlineDPO",
    "opd": "flowalign.algorithms.matching.opd:OPD",
    "dmd2": "flowalign.algorithms.matching.dmd2:DMD2",
    "tdm": "flowalign.algorithms.matching.tdm:TDM",
    "tdm_r1": "flowalign.algorithms.matching.tdm_r1:TDMR1",
    "dpo": "flowalign.algorithms.matching.dpo:DPO",
    "sdpo": "flowalign.algorithms.matching.sdpo:SDPO",
    "mapo": "flowalign.algorithms.matching.mapo:MaPO",
    "inpo": "flowalign.algorithms.matching.inpo:InPO",
    "kto": "flowalign.algorithms.matching.kto:KTO",
    "sft": "flowalign.algorithms.matching.sft:SFT",
    "rpo": "flowalign.algorithms.matching.rpo:RPO",
    "seppo": "flowalign.algorithms.matching.seppo:SePPO",
    "dragon": "flowalign.algorithms.matching.dragon:DRAGON",
    "soar": "flowalign.algorithms.matching.soar:SOAR",
    "srum": "flowalign.algorithms.matching.srum:SRUM",
    "refl": "flowalign.algorithms.direct.refl:ReFL",
    "draft": "flowalign.algorithms.direct.draft:DRaFT",
    "draft_plus": "flowalign.algorithms.direct.draft_plus:DRaFTPlus",
    "alignprop": "flowalign.algorithms.direct.alignprop:AlignProp",
    "leap_align": "flowalign.algorithms.direct.leap_align:LeapAlign",
    "srpo": "flowalign.algorithms.direct.srpo:SRPO",
    "r0": "flowalign.algorithms.direct.r0:R0",
    "instruct_video": "flowalign.algorithms.direct.instruct_video:InstructVideo",
    "reward_dance_refl": "flowalign.algorithms.direct.reward_dance_refl:RewardDanceReFL",
    "one_reward": "flowalign.algorithms.direct.one_reward:OneReward",
    "hypernoise": "flowalign.algorithms.direct.hypernoise:HyperNoise",
    "adjoint_matching": "flowalign.algorithms.direct.adjoint_matching:AdjointMatching",
}
REWARDS = {
    "shapes": "rewards.shapes.reward:ShapesReward",
    "shapes_mass": "rewards.shapes.mass:ShapesMass",
    "tiny_clip": "rewards.shapes.clip:TinyCLIP",
    "clip_score": "rewards.clip:CLIPScore",
    "pick_score": "rewards.clip:PickScore",
    "hpsv2": "rewards.clip:HPSv2",
    "hpsv3": "rewards.hpsv3:HPSv3",
    "hpsv3_plus": "rewards.hpsv3:HPSv3Plus",
    "edit_reward": "rewards.edit_reward:EditReward",
    "video_reward": "rewards.video_reward:VideoReward",
    "goal_baseline": "rewards.clip:GoalBaseline",
    "clip_i": "rewards.clip:CLIPImage",
    "lambda_harmonic": "rewards.clip:LambdaHarmonic",
    "aesthetic": "rewards.aesthetic:Aesthetic",
    "aesthetic_v25": "rewards.aesthetic:AestheticV25",
    "clip_t5": "rewards.clip_t5:ClipT5Score",
    "dina": "rewards.latent:DiNa",
    "face_identity": "rewards.face:FaceIdentity",
    "clap": "rewards.sound:CLAP",
    "imagebind": "rewards.imagebind:ImageBind",
    "q_align": "rewards.rated:QAlign",
    "deqa": "rewards.rated:DeQA",
    "image_reward": "rewards.image_reward:ImageReward",
    "pisces": "rewards.transport:PISCES",
    "relations": "rewards.relations:RelationsReward",
    "spelling": "rewards.spelling:SpellingReward",
    "ocr": "rewards.rules:OCR",
    "jpeg_size": "rewards.rules:JPEGSize",
    "image_statistic": "rewards.rules:ImageStatistic",
    "detection": "rewards.detection:Detection",
    "group_diversity": "rewards.rules:GroupDiversity",
    "frechet_distance": "rewards.sets:FrechetDistance",
    "vendi": "rewards.sets:Vendi",
    "weighted_sum": "rewards.compose:WeightedSum",
    "normalized": "rewards.compose:Normalized",
    "product": "rewards.compose:Product",
    "worst_case": "rewards.compose:WorstCase",
    "mean_minus_spread": "rewards.compose:MeanMinusSpread",
    "agreement": "rewards.compose:Agreement",
    "bounded_centred": "rewards.references:BoundedCentred",
    "calibrated": "rewards.references:Calibrated",
    "log_sigmoid": "rewards.references:LogSigmoidSum",
    "routed": "rewards.routed:Routed",
    "gate": "rewards.compose:Gate",
    "rescaled": "rewards.compose:Rescaled",
    "scheduled": "rewards.compose:ScheduledSum",
    "per_frame": "rewards.frames:PerFrame",
    "win_rate": "rewards.pairwise:WinRate",
    "cached": "rewards.cache:Cached",
    "vlm_judge": "rewards.judges.reward:JudgeReward",
    "vlm_regions": "rewards.judges.regions:RegionJudge",
    "vlm_pairwise": "rewards.judges.reward:PairwiseJudgeReward",
    "remote": "rewards.remote:RemoteReward",
    "exact_match": "rewards.text.verifiers:ExactMatch",
    "maths": "rewards.text.verifiers:Maths",
    "multiple_choice": "rewards.text.verifiers:MultipleChoice",
    "text_format": "rewards.text.shape:TextFormat",
    "soft_length": "rewards.text.shape:SoftLength",
    "length_switch": "rewards.text.shape:LengthSwitch",
    "majority": "rewards.text.shape:Majority",
    "rlpr": "rewards.text.likelihood:RLPR",
    "self_aligned": "rewards.text.likelihood:SelfAligned",
    "self_certainty": "rewards.text.likelihood:SelfCertainty",
    "implicit_prm": "rewards.text.steps:ImplicitPRM",
    "information_gain": "rewards.text.steps:InformationGain",
    "path_faithfulness": "rewards.text.steps:PathFaithfulness",
    "clip_bound": "rewards.text.steps:ClipBound",
    "delta_bound": "rewards.text.steps:DeltaBound",
    "gated": "rewards.text.steps:Gated",
    "trust_weighted": "rewards.text.steps:TrustWeighted",
    "text_judge": "rewards.judges.reward:JudgeReward",
    "text_pairwise": "rewards.judges.reward:PairwiseJudgeReward",
    "listener": "rewards.judges.listener:Listener",
    "thought_prm": "rewards.judges.thoughts:ThoughtPRM",
    "environment": "rewards.text.turns:EnvironmentReward",
    "compared": "rewards.pairwise:Compared",
    "picture": "flowalign.policies.rendering:Rendered",
    "votes": "flowalign.reward_training.live:LiveVotes",
}
SELECTIONS = {
    "shuffled": "flowalign.data.selection.shuffled:Shuffled",
    "together": "flowalign.data.selection.together:Together",
    "shares": "flowalign.data.selection.shares:Shares",
    "mopps": "flowalign.data.selection.mopps:MoPPS",
    "sec": "flowalign.data.selection.sec:SEC",
}
SEARCHES = {
    "best_of_n": "flowalign.search.best_of_n:BestOfN",
    "fk_steering": "flowalign.search.fk_steering:FKSteering",
    "beam": "flowalign.search.beam:Beam",
    "evosearch": "flowalign.search.evosearch:EvoSearch",
    "ttsnap": "flowalign.search.ttsnap:TTSnap",
    "dno": "flowalign.search.dno:DNO",
    "reno": "flowalign.search.reno:ReNO",
    "das": "flowalign.search.das:DAS",
    "nrg": "flowalign.search.nrg:NRG",
    "chain": "flowalign.search.chain:Chain",
}
SUITES = {
    "shapes": "flowalign.evaluation.benchmarks.worlds:Shapes",
    "relations": "flowalign.evaluation.benchmarks.worlds:Relations",
    "spelling": "flowalign.evaluation.benchmarks.worlds:Spelling",
    "geneval": "flowalign.evaluation.benchmarks.geneval:GenEval",
    "ocr": "flowalign.evaluation.benchmarks.ocr:Words",
    "geneval2": "flowalign.evaluation.benchmarks.geneval2:GenEval2",
    "dpg": "flowalign.evaluation.benchmarks.dpg:DPGBench",
    "t2i_compbench": "flowalign.evaluation.benchmarks.t2i_compbench:T2ICompBench",
    "unigenbench": "flowalign.evaluation.benchmarks.unigenbench:UniGenBench",
    "drawbench": "flowalign.evaluation.benchmarks.preference:DrawBench",
    "parti": "flowalign.evaluation.benchmarks.preference:PartiPrompts",
    "dreambench": "flowalign.evaluation.benchmarks.dreambench:DreamBench",
    "vbench": "flowalign.evaluation.benchmarks.vbench:VBench",
}
ENVIRONMENTS = {"higher_lower": "flowalign.policies.environments.higher_lower:HigherLower"}
MODELS = {
    "sd3": "flowalign.policies.diffusion.families.sd3:SD3",
    "sd3_inpaint": "flowalign.policies.diffusion.families.inpaint:SD3Inpaint",
    "flux": "flowalign.policies.diffusion.families.flux:Flux",
    "flux_kontext": "flowalign.policies.diffusion.families.flux:FluxKontext",
    "flux_fill": "flowalign.policies.diffusion.families.flux:FluxFill",
    "flux_control": "flowalign.policies.diffusion.families.flux:FluxControl",
    "flux2": "flowalign.policies.diffusion.families.flux2:Flux2",
    "flux2_klein": "flowalign.policies.diffusion.families.flux2:Flux2Klein",
    "qwen_image": "flowalign.policies.diffusion.families.qwen_image:QwenImage",
    "qwen_image_edit": "flowalign.policies.diffusion.families.qwen_image:QwenImageEdit",
    "qwen_image_edit_plus": "flowalign.policies.diffusion.families.qwen_image:QwenImageEditPlus",
    "qwen_image21": "flowalign.policies.diffusion.families.qwen_image:QwenImage21",
    "z_image": "flowalign.policies.diffusion.families.z_image:ZImage",
    "chroma": "flowalign.policies.diffusion.families.chroma:Chroma",
    "lumina2": "flowalign.policies.diffusion.families.lumina2:Lumina2",
    "sana": "flowalign.policies.diffusion.families.sana:Sana",
    "wan": "flowalign.policies.diffusion.families.wan:Wan",
    "wan_i2v": "flowalign.policies.diffusion.families.wan:WanImageToVideo",
    "ltx": "flowalign.policies.diffusion.families.ltx:LTX",
    "ltx_i2v": "flowalign.policies.diffusion.families.ltx:LTXImageToVideo",
    "ltx2": "flowalign.policies.diffusion.families.ltx2:LTX2",
    "ltx2_i2v": "flowalign.policies.diffusion.families.ltx2:LTX2ImageToVideo",
    "hunyuan_image": "flowalign.policies.diffusion.families.hunyuan:HunyuanImage",
    "hunyuan_video": "flowalign.policies.diffusion.families.hunyuan:HunyuanVideo",
    "hunyuan_video15": "flowalign.policies.diffusion.families.hunyuan:HunyuanVideo15",
    "hunyuan_video15_i2v": "flowalign.policies.diffusion.families.hunyuan:HunyuanVideo15ImageToVideo",
    "kandinsky5_image": "flowalign.policies.diffusion.families.kandinsky5:Kandinsky5Image",
    "kandinsky5_edit": "flowalign.policies.diffusion.families.kandinsky5:Kandinsky5ImageEdit",
    "kandinsky5_video": "flowalign.policies.diffusion.families.kandinsky5:Kandinsky5Video",
    "kandinsky5_i2v": "flowalign.policies.diffusion.families.kandinsky5:Kandinsky5ImageToVideo",
    "cogview4": "flowalign.policies.diffusion.families.cogview4:CogView4",
    "stable_diffusion": "flowalign.policies.diffusion.families.stable_diffusion:StableDiffusion",
    "stable_diffusion_inpaint": "flowalign.policies.diffusion.families.inpaint:StableDiffusionInpaint",
    "sdxl": "flowalign.policies.diffusion.families.stable_diffusion:SDXL",
    "sdxl_inpaint": "flowalign.policies.diffusion.families.inpaint:SDXLInpaint",
}

TABLES: dict[str, dict[str, str] | str] = {
    "algorithms": ALGORITHMS,
    "kernels": "samplers.kernels:KERNELS",
    "plans": "samplers.plans:PLANS",
    "rewards": REWARDS,
    "models": MODELS,
    "advantages": "flowalign.core.advantages:ADVANTAGES",
    "losses": "flowalign.core.losses:LOSSES",
    "levels": "flowalign.algorithms.matching.levels:LEVELS",
    "caches": "flowalign.policies.diffusion.caching:CACHES",
    "selections": SELECTIONS,
    "environments": ENVIRONMENTS,
    "searches": SEARCHES,
    "suites": SUITES,
}
"""names to paths, or the path of a table that stands with what it names"""


GIVEN = "python:"
"""what a name begins with that stands for an object handed over in Python, which cannot be built again"""


def names(table: str) -> Mapping[str, Any]:
    """The names of a table, each with its path or with what it stands for."""
    entries = TABLES[table]
    return _imported(entries) if isinstance(entries, str) else entries


def _imported(path: str) -> Any:
    module, _, attribute = path.rpartition(":" if ":" in path else ".")
    return getattr(importlib.import_module(module), attribute)


OURS = ("flowalign", "rewards", "samplers")
_doubted: list[Path] = []


@contextlib.contextmanager
def only_ours(file: Path) -> Iterator[None]:
    """Within it no name imports code that is not flowalign's: it may come from a file that somebody else wrote."""
    _doubted.append(file)
    try:
        yield
    finally:
        _doubted.pop()


def resolve(table: str, name: str, where: str = "") -> Any:
    """The object behind a registered name or a dotted path ('package.module:name' or 'package.module.name').

    Args:
        where: the name stands in the configuration, for messages.
    """
    singular = {"losses": "loss", "searches": "method of search"}
    place, kind = f"{where}: " if where else "", singular.get(table, table[:-1])
    if name.startswith(GIVEN):
        own = name.removeprefix(GIVEN)
        raise ConfigError(
            f"{place}the {kind} '{own}' was handed over in Python and cannot be built from its name; hand it over "
            f"again ({kind}=...), or write it in a file and name it there (my_file:{own})"
        )
    found = names(table).get(name, name)
    if not isinstance(found, str):
        return found
    if ":" not in found and "." not in found:
        raise ConfigError(f"{place}no {kind} is called '{name}'; {nearest(name, names(table))}")
    if _doubted and re.split(r"[.:]", found)[0] not in OURS:
        raise ConfigError(f"{place}{_doubted[-1]} names the code '{name}', which would run here; --trust allows it")
    try:
        return _imported(found)
    except (Exception, SystemExit) as error:  # a module runs whatever its author wrote
        raise ConfigError(f"{place}{kind} '{name}' cannot be imported: {_reason(error)}") from error


def summary(table: str, name: str) -> str:
    """First line of a registered name's docstring, read from the source: to import all of them takes a minute."""
    module, _, attribute = listed(table)[name].partition(":")
    docstrings = {
        part.name: ast.get_docstring(part)
        for part in _source(module).body
        if isinstance(part, ast.ClassDef | ast.FunctionDef)
    }
    return (docstrings[attribute] or "").partition("\n")[0]


def described(table: str, name: str) -> str:
    """The docstring of what a name stands for, and its settings with their defaults.

    Raises:
        ConfigError: there is no such name.
    """
    target = resolve(table, name)
    lines = [inspect.getdoc(target) or "", "", "settings:"]
    section = getattr(target, "Settings", None)
    if section is not None:
        fields = section.model_fields.items()
        lines += [f"  {key}: {field.get_default(call_default_factory=True)}" for key, field in fields]
    else:
        own = inspect.signature(target).parameters.values()
        taken = own if inspect.isclass(target) else [p for p in own if p.kind is p.KEYWORD_ONLY]
        lines += [f"  {parameter}" for parameter in taken if parameter.kind is not parameter.VAR_KEYWORD]
    return "\n".join(lines if lines[-1] != "settings:" else lines[:-2])


def listed(table: str) -> dict[str, str]:
    """The paths of a table's names, without importing what they stand for."""
    entries = TABLES[table]
    if not isinstance(entries, str):
        return entries
    module, _, attribute = entries.partition(":")
    for part in _source(module).body:
        if isinstance(part, ast.AnnAssign) and ast.unparse(part.target) == attribute:
            assert isinstance(part.value, ast.Dict)
            pairs = zip(part.value.keys, part.value.values, strict=True)
            return {ast.literal_eval(key): f"{module}:{ast.unparse(value)}" for key, value in pairs if key is not None}
    raise KeyError(entries)


@functools.cache
def _source(module: str) -> ast.Module:
    return ast.parse(
        Path(__file__).parents[1].joinpath(*module.split(".")).with_suffix(".py").read_text(encoding="utf-8")
    )


Make = Callable[[str, str, Mapping[str, Any], str], Any]


def check(table: str, name: str, arguments: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The arguments of what a name stands for, checked against its signature; nothing is made.

    Raises:
        ConfigError: an unknown name or argument, or a value of a wrong type.
    """
    return _checked(table, name, arguments, where, nested=check)


def build(table: str, name: str, arguments: Mapping[str, Any], where: str) -> Any:
    """Make the object a name stands for, with checked arguments; rewards among them are made first.

    A class is instantiated; a plain function takes no arguments and is returned as it is.

    Raises:
        ConfigError: an unknown name or argument, or a value of a wrong type or range.
    """
    target, checked = resolve(table, name, where), _checked(table, name, arguments, where, nested=build)
    if not inspect.isclass(target):
        return target
    try:
        return target(**checked)
    except FlowalignError:
        raise
    except (TypeError, ValueError, OSError, ImportError) as error:
        raise ConfigError(f"{where}: {_reason(error)}") from error
    except (Exception, SystemExit) as error:  # its author's code
        raise ConfigError(f"{where}: '{name}' cannot be made: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """In one line; to call sys.exit while something is made is a failure too."""
    if isinstance(error, SystemExit):
        return f"it calls sys.exit({error.code!r})"
    plain = isinstance(error, ImportError | AttributeError | ValueError | TypeError | OSError)
    return " ".join((str(error) if plain else repr(error)).split())


def rewards_within(name: str, settings: Mapping[str, Any]) -> list[Any]:
    """What the name of a reward stands for, and the names of all rewards in its settings; nothing is made."""
    return [target for target, _ in with_settings(name, settings)]


def with_settings(name: str, settings: Mapping[str, Any]) -> list[tuple[Any, Mapping[str, Any]]]:
    """As `rewards_within`, each with its own settings."""
    found = []

    def visit(table: str, name: str, settings: Mapping[str, Any], where: str) -> None:
        found.append((resolve(table, name, where), settings))
        _checked(table, name, settings, where, nested=visit)

    visit("rewards", name, settings, "")
    return found


def _checked(table: str, name: str, arguments: Mapping[str, Any], where: str, nested: Make) -> dict[str, Any]:
    """Checked arguments; `nested` says what becomes of the rewards among them."""
    target = resolve(table, name, where)
    if not inspect.isclass(target):
        if arguments:
            raise ConfigError(f"{where}: '{name}' is a function and takes no settings ({', '.join(arguments)})")
        return {}
    settings = _settings(target)
    checked = {}
    for key, value in arguments.items():
        if key not in settings:
            raise ConfigError(f"{where}: '{name}' has no setting '{key}'; {nearest(key, settings)}")
        hint, place = settings[key], f"{where}.{key}"
        if _holds_rewards(hint):
            checked[key] = _rewards(hint, value, place, nested)
            continue
        checked[key] = _value(hint, value, place)
    try:
        inspect.signature(target).bind(**checked)
    except TypeError as error:
        raise ConfigError(f"{where}: '{name}': {error}") from error
    return checked


def part(table: str, name: str, settings: Mapping[str, Any], where: str) -> Callable[[Any], Any]:
    """A function of one argument with settings as keywords (an advantage, a loss), its settings checked and bound.

    Raises:
        ConfigError: an unknown name or setting, or a value of a wrong type or range.
    """
    target = resolve(table, name, where)
    hints = get_type_hints(target, include_extras=True)
    known = [p.name for p in inspect.signature(target).parameters.values() if p.kind is p.KEYWORD_ONLY]
    bound = {}
    for key, value in settings.items():
        if key not in known:
            raise ConfigError(f"{where}: '{name}' has no setting '{key}'; {nearest(key, known)}")
        bound[key] = _value(hints.get(key, Any), value, f"{where}.{key}")
    # what the function declares is to be read from the part too
    return functools.update_wrapper(functools.partial(target, **bound), target)


def _value(hint: Any, value: Any, where: str) -> Any:
    try:
        return TypeAdapter(hint).validate_python(value)
    except ValidationError as error:
        raise ConfigError(f"{where}: {error.errors()[0]['msg']} (got {value!r})") from error


def _settings(target: type) -> dict[str, Any]:
    """Names and types of what a class is made with, `**settings: Unpack[...]` included."""
    hints = get_type_hints(target.__init__)  # type: ignore[misc]
    settings: dict[str, Any] = {}
    for name, parameter in inspect.signature(target).parameters.items():
        hint = hints.get(name, Any)
        if parameter.kind is not parameter.VAR_KEYWORD:
            settings[name] = hint
        elif get_args(hint):
            settings |= get_type_hints(get_args(hint)[0])
    return settings


def _holds_rewards(hint: Any) -> bool:
    from rewards import PairwiseReward, Reward

    return hint in (Reward, PairwiseReward) or any(_holds_rewards(inner) for inner in get_args(hint))


def _rewards(hint: Any, value: Any, where: str, nested: Make) -> Any:
    """A setting that is a reward, or a list or mapping of rewards: each is written as its name and settings."""
    from rewards import PairwiseReward, Reward

    kind, inner = get_origin(hint), get_args(hint)
    if hint in (Reward, PairwiseReward):
        if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
            raise ConfigError(f"{where}: a reward is its name and settings, e.g. {{name: shapes}} (got {value!r})")
        return nested("rewards", value["name"], {key: own for key, own in value.items() if key != "name"}, where)
    if inspect.isclass(kind) and issubclass(kind, Mapping):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where}: give rewards by name, e.g. {{mine: {{name: shapes}}}} (got {value!r})")
        return {key: _rewards(inner[1], own, f"{where}.{key}", nested) for key, own in value.items()}
    if inspect.isclass(kind) and issubclass(kind, Sequence):
        if not isinstance(value, list):
            raise ConfigError(f"{where}: give a list of rewards, e.g. [{{name: shapes}}] (got {value!r})")
        return [_rewards(inner[0], own, f"{where}.{i}", nested) for i, own in enumerate(value)]
    if value is None and NoneType in inner:
        return None
    return _rewards(next(option for option in inner if _holds_rewards(option)), value, where, nested)
