"""Names in configurations to code: a class of a folder is known by its `name`. Imports happen when a name is used."""

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

NAMED_BY_THEIR_PARTS = {
    "weighted_sum": "rewards.compose:WeightedSum",
    "normalized": "rewards.compose:Normalized",
    "product": "rewards.compose:Product",
    "worst_case": "rewards.compose:WorstCase",
    "mean_minus_spread": "rewards.compose:MeanMinusSpread",
    "agreement": "rewards.compose:Agreement",
    "bounded_centred": "rewards.references:BoundedCentred",
    "calibrated": "rewards.references:CalibratedReward",
    "log_sigmoid": "rewards.references:LogSigmoidSum",
    "learned_sum": "rewards.learned_sum:LearnedSum",
    "routed": "rewards.routed:Routed",
    "gate": "rewards.compose:Gate",
    "rescaled": "rewards.compose:Rescaled",
    "judged_by": "rewards.compose:JudgedBy",
    "scheduled": "rewards.compose:ScheduledSum",
    "per_frame": "rewards.frames:PerFrame",
    "win_rate": "rewards.pairwise:WinRate",
    "cached": "rewards.cache:Cached",
    "vlm_judge": "rewards.judges.reward:JudgeReward",
    "vlm_regions": "rewards.judges.regions:RegionJudge",
    "vlm_pairwise": "rewards.judges.reward:PairwiseJudgeReward",
    "remote": "rewards.remote:RemoteReward",
    "length_switch": "rewards.text.shape:LengthSwitch",
    "consistency": "rewards.text.confidence:Consistency",
    "cosine_length": "rewards.text.form:CosineLength",
    "flipped": "rewards.text.form:Flipped",
    "stated_confidence": "rewards.text.checks:StatedConfidence",
    "lexicographic": "rewards.text.ranked:Lexicographic",
    "information_gain": "rewards.text.steps:InformationGain",
    "clip_bound": "rewards.text.steps:ClipBound",
    "delta_bound": "rewards.text.steps:DeltaBound",
    "gated": "rewards.text.steps:Gated",
    "progress": "rewards.text.learned:Progress",
    "beats_plain": "rewards.text.answering:BeatsPlain",
    "step_progress": "rewards.text.answering:StepProgress",
    "borda": "rewards.text.consensus:Borda",
    "adaptive_mode": "rewards.text.modes:AdaptiveMode",
    "barely_solved": "rewards.text.proposed:BarelySolved",
    "learned_prm": "rewards.text.learned:LearnedPRM",
    "learned_score": "rewards.text.learned:LearnedScore",
    "distilled": "rewards.text.learned:Distilled",
    "online_prm": "rewards.text.online_prm:OnlinePRM",
    "latent_flow": "rewards.text.latent_flow:LatentFlow",
    "vetted": "rewards.text.vetted:Vetted",
    "gold_path": "rewards.text.golden:GoldPath",
    "rule_and_model": "rewards.text.rule_and_model:RuleAndModel",
    "memory": "rewards.text.novelty:Memory",
    "renormed": "rewards.judges.steps:Renormed",
    "weighted_criteria": "rewards.judges.criteria:WeightedCriteria",
    "evolving_judge": "rewards.judges.evolving:EvolvingJudge",
    "trust_weighted": "rewards.text.steps:TrustWeighted",
    "text_judge": "rewards.judges.reward:JudgeReward",
    "text_pairwise": "rewards.judges.reward:PairwiseJudgeReward",
    "compared": "rewards.pairwise:Compared",
    "picture": "flowalign.policies.rendering:Rendered",
    "answered": "flowalign.policies.answering:Answered",
    "votes": "flowalign.reward_training.live:LiveVotes",
}
"""Rewards whose own name says what they are made of, e.g. win_rate(shapes), and those that stand in other folders."""

TABLES = {
    "algorithms": "flowalign.algorithms",
    "kernels": "samplers.kernels:KERNELS",
    "plans": "samplers.plans:PLANS",
    "rewards": "rewards",
    "models": "flowalign.policies.diffusion.families",
    "advantages": "flowalign.core.advantages:ADVANTAGES",
    "losses": "flowalign.core.losses:LOSSES",
    "preferences": "flowalign.core.preferences:PREFERENCES",
    "levels": "flowalign.algorithms.matching.levels:LEVELS",
    "caches": "flowalign.policies.diffusion.caching:CACHES",
    "selections": "flowalign.data.selection",
    "environments": "flowalign.policies.environments",
    "searches": "flowalign.search",
    "suites": "flowalign.evaluation.benchmarks",
}
"""Folder whose classes have a `name`, or path of a table that stands with what it names."""


GIVEN = "python:"
"""Beginning of a name that stands for an object handed over in Python, which cannot be built again."""


def names(table: str) -> dict[str, Any]:
    """The names of a table, each with its path or with what it stands for."""
    source = TABLES[table]
    return imported(source) if ":" in source else _in_folder(source)


NAMED_CLASS = re.compile(r'^(?:class (\w+)|def |@)|^    name = "(\w+)"', re.MULTILINE)


@functools.cache
def _in_folder(package: str) -> dict[str, str]:
    """Paths of the classes of a folder whose body says `name = "..."`, read from their files without importing them."""
    found: dict[str, str] = dict(NAMED_BY_THEIR_PARTS) if package == "rewards" else {}
    root = Path(__file__).parents[1]
    for file in sorted(root.joinpath(*package.split(".")).rglob("*.py")):
        owner = None
        for match in NAMED_CLASS.finditer(file.read_text(encoding="utf-8")):
            name = match[2]
            if name is None:
                owner = match[1]
            elif owner is not None:
                path = f"{'.'.join(file.relative_to(root).with_suffix('').parts)}:{owner}"
                if name in found:
                    raise ConfigError(f"two classes are called '{name}': {found[name]} and {path}; rename one")
                found[name] = path
    return found


def imported(path: str) -> Any:
    """What a dotted path ('package.module:name') stands for."""
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
    found = names(table).get(name, name) if table in TABLES else name
    if not isinstance(found, str):
        return found
    if ":" not in found and "." not in found:
        known = nearest(name, names(table)) if table in TABLES else "a dotted path such as my_file:name works"
        raise ConfigError(f"{place}no {kind} is called '{name}'; {known}")
    if _doubted and re.split(r"[.:]", found)[0] not in OURS:
        raise ConfigError(f"{place}{_doubted[-1]} names the code '{name}', which would run here; --trust allows it")
    try:
        return imported(found)
    except (Exception, SystemExit) as error:  # a module runs whatever its author wrote
        raise ConfigError(f"{place}{kind} '{name}' cannot be imported: {_reason(error)}") from error


def function(path: str, where: str) -> Callable[..., Any]:
    """A function by its dotted path, such as 'my_file:add'.

    Raises:
        ConfigError: there is none, or a folder from a stranger names it.
    """
    found = resolve("functions", path, where)
    if not callable(found):
        raise ConfigError(f"{where}: '{path}' is no function")
    return found


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
    source = TABLES[table]
    if ":" not in source:
        return _in_folder(source)
    module, _, attribute = source.partition(":")
    body = _source(module).body
    # a table may name what it imports from a file beside it
    beside = {name.name: part.module for part in body if isinstance(part, ast.ImportFrom) for name in part.names}
    for part in body:
        if isinstance(part, ast.AnnAssign) and ast.unparse(part.target) == attribute:
            assert isinstance(part.value, ast.Dict)
            pairs = zip(part.value.keys, map(ast.unparse, part.value.values), strict=True)
            return {ast.literal_eval(key): f"{beside.get(value, module)}:{value}" for key, value in pairs if key}
    raise KeyError(source)


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
        from rewards.hub import failure

        of_hub = failure(error)
        said = _reason(error) if of_hub is None else f"the weights of '{name}': {of_hub}"
        raise ConfigError(f"{where}: {said}") from error
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


def _holds_rewards(hint: object) -> bool:
    from rewards import PairwiseReward, Reward

    return hint in (Reward, PairwiseReward) or any(_holds_rewards(inner) for inner in get_args(hint))


def _rewards(hint: object, value: object, where: str, nested: Make) -> Any:
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
