"""What a configuration takes from the Hugging Face hub, whether it is on this machine, and getting it."""

import inspect
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

from flowalign import registry
from flowalign.config import BaseConfig, Config, Named
from flowalign.data.files import is_data_set
from flowalign.errors import FlowalignError
from rewards.hub import AT, split_revision

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
NETWORKS = ("model", "weights", "head", "config", "tower", "colour_model")
"""Settings of rewards that name a network, or a file of it."""
READERS = ("processor", "tokenizer", "base")
"""Settings that name a tokenizer or a processor alone."""
PARTS = dict.fromkeys(NETWORKS, "network") | dict.fromkeys(READERS, "reader") | {"pipeline": "pipeline"}
"""Kind of download for each setting of a reward."""
SMALL = (".json", ".txt", ".model", ".jinja")
"""Endings of small files, which are no weights."""
WEIGHTS = (".safetensors", ".bin")
"""Endings of weights, the better first."""
VARIANT = re.compile(r"\.(fp16|bf16|fp32|fp8|ema|non_ema)[.-]")
"""Marks of a variant in the names of weights that are there a second time."""


@dataclass(frozen=True)
class Download:
    """A repository of the hub, or a part of it, that a configuration needs."""

    needed_by: str
    """Key of the configuration that needs it."""
    repository: str
    part: Literal["pipeline", "network", "reader", "data set"] | str
    """Kind of download, or the name of one file."""

    @property
    def kind(self) -> str:
        """As the hub calls it."""
        return "dataset" if self.part == "data set" else "model"

    @property
    def where(self) -> dict[str, Any]:
        """Arguments of huggingface_hub's functions."""
        name, revision = split_revision(self.repository)
        return {"repo_id": name, "revision": revision, "repo_type": self.kind}


def downloads(config: BaseConfig) -> list[Download]:
    """What a configuration takes from the hub, each once: model, teachers, rewards and their panel, prompts."""
    model = config.model
    found = [_repository("model.path", model.path, "pipeline" if isinstance(config, Config) else "network")]
    found.append(_repository("model.config", getattr(model, "config", None), "pipeline"))
    found.append(_repository("model.lora.path", None if model.lora is None else model.lora.path, "network"))
    learned = config.algorithm.settings
    found.append(_repository("algorithm.teacher", learned.get("teacher"), "network"))
    for teacher in learned.get("teachers", []):
        found.append(_repository("algorithm.teachers", teacher.get("path"), "pipeline"))
        found.append(_repository("algorithm.teachers", teacher.get("lora"), "network"))
    places: dict[str, Sequence[Named]] = {
        "rewards": config.rewards,
        "evaluation.rewards": config.evaluation.rewards or [],
        "evaluation.panel": config.evaluation.panel,
    }
    for where, rewards in places.items():
        for reward in rewards:
            if not reward.name.startswith(registry.GIVEN):
                found += _of_reward(where, reward)
    for where, listed in (("data", config.data), ("evaluation", config.evaluation)):
        for one in (listed, *listed.also):
            if one.prompts is not None and is_data_set(one.prompts):
                found.append(_repository(f"{where}.prompts", one.prompts, "data set"))
    once = {(one.repository, one.part): one for one in reversed(found) if one is not None}
    return list(reversed(once.values()))


def _repository(where: str, name: str | None, part: str) -> Download | None:
    """The repository of a hub name; None for what is on this machine."""
    if name is None or Path(name).exists() or not HUB_NAME.fullmatch(name):
        return None
    return Download(where, name, part)


def _of_reward(where: str, reward: Named) -> Iterable[Download | None]:
    """What a reward and those within it load, by the settings that name weights and their defaults."""
    for target, settings in registry.with_settings(reward.name, reward.settings):
        place = f"{where}: {getattr(target, 'name', reward.name)}"
        values = {**_defaults(target), **settings}
        judge = values.get("judge")
        values |= {"model": judge.get("model")} if isinstance(judge, Mapping) else {}
        if hasattr(target, "published"):
            values["weights"] = target.published(values)
        for key, part in PARTS.items():
            name = values.get(key)
            if not isinstance(name, str) or Path(name).exists():
                continue
            owner, repository, file = (*name.split("/", 2), "", "")[:3]
            # a revision at the end may have slashes of its own
            if file and not AT.fullmatch(name):
                yield Download(place, f"{owner}/{repository}", file)
            else:
                yield _repository(place, name, part)


def _defaults(target: Any) -> dict[str, Any]:
    """Of the settings of a class, also of those that it passes on to the classes it extends."""
    values: dict[str, Any] = {}
    for kind in reversed(inspect.getmro(target) if inspect.isclass(target) else []):
        if "__init__" in vars(kind):
            parameters = inspect.signature(vars(kind)["__init__"]).parameters.values()
            values |= {one.name: one.default for one in parameters if one.default is not one.empty}
    return values


def chosen(files: Iterable[str], part: str, components: Sequence[str] = ()) -> list[str]:
    """The files of a repository that are loaded.

    Args:
        components: folders of a pipeline.
    """
    if part == "data set":
        return list(files)
    if part not in ("pipeline", "network", "reader"):
        return [part]
    folders: dict[str, list[str]] = {}
    for file in files:
        folders.setdefault(file.rpartition("/")[0], []).append(file)
    kept = []
    for folder, own in folders.items():
        if folder and folder not in components:
            continue
        kept += [file for file in own if file.endswith(SMALL) and not VARIANT.search(file)]
        if part != "reader" and (folder or part == "network"):
            weights = [file for file in own if file.endswith(WEIGHTS) and not VARIANT.search(file)]
            kept += [file for file in weights if file.endswith(best_ending(weights))]
    return sorted(kept)


def best_ending(weights: Sequence[str]) -> str:
    """Of weights that are there as safetensors and pickled."""
    return next((ending for ending in WEIGHTS if any(file.endswith(ending) for file in weights)), WEIGHTS[0])


def here(one: Download) -> Path | None:
    """Where it is in the cache; None if a part is missing."""
    try:
        folder = huggingface_hub.snapshot_download(**one.where, local_files_only=True)
    except LocalEntryNotFoundError:
        return None
    path = Path(folder)
    if one.part == "pipeline":
        whole = _pipeline_is_whole(path)
    elif one.part == "network":
        whole = _has_weights(path)
    elif one.part in ("reader", "data set"):
        whole = any(path.rglob("*.*"))
    else:
        whole = (path / one.part).is_file()
    return path if whole else None


def components(index: Path) -> dict[str, str]:
    """The parts of a pipeline by their folders, each with its class."""
    saved = json.loads(index.read_text(encoding="utf-8"))
    return {name: entry[1] for name, entry in saved.items() if isinstance(entry, list) and entry[0] is not None}


def _pipeline_is_whole(folder: Path) -> bool:
    if not (folder / "model_index.json").is_file():
        return False
    for name, kind in components(folder / "model_index.json").items():
        reads = kind.endswith(("Scheduler", "Processor", "Extractor")) or "Tokenizer" in kind
        if not (any((folder / name).glob("*.*")) if reads else _has_weights(folder / name)):
            return False
    return True


def _has_weights(folder: Path) -> bool:
    """Every shard of an index, or a file of weights."""
    for index in folder.glob("*.index.json"):
        if not VARIANT.search(index.name):
            files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            return all((folder / file).is_file() for file in files)
    return any(path.suffix in WEIGHTS for path in folder.glob("*.*"))


@dataclass
class Size:
    """What the hub says of a download."""

    files: list[str]
    gigabytes: float
    licence: str


def size(one: Download) -> Size:
    """Ask the hub what is to be loaded, and how large it is.

    Raises:
        FlowalignError: the hub refuses, or is out of reach; says what to do.
    """
    try:
        info: Any = huggingface_hub.HfApi().repo_info(**one.where, files_metadata=True, timeout=10)
        folders = []
        if one.part == "pipeline":
            index = huggingface_hub.hf_hub_download(**one.where, filename="model_index.json")
            folders = list(components(Path(index)))
    except GatedRepoError as error:
        raise FlowalignError(_gated(one)) from error
    except RepositoryNotFoundError as error:
        raise FlowalignError(f"{one.needed_by}: the hub has no {one.repository}, or it is private") from error
    except (OSError, huggingface_hub.errors.OfflineModeIsEnabled) as error:
        raise Unreachable(" ".join(str(error).split())[:200]) from error
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
    files = chosen(sizes, one.part, folders)
    licence = (info.card_data or {}).get("license") or "see its page"
    return Size(files, sum(sizes.get(file, 0) for file in files) / 1e9, str(licence))


class Unreachable(FlowalignError):
    """The hub does not answer."""


def _gated(one: Download) -> str:
    name, _ = split_revision(one.repository)
    return (
        f"{one.needed_by}: {name} is gated: accept its licence at https://huggingface.co/{name}, "
        "then `hf auth login` with a token of that account"
    )


def get(one: Download, files: Sequence[str]) -> None:
    """Load files of a repository into the cache."""
    try:
        huggingface_hub.snapshot_download(**one.where, allow_patterns=list(files))
    except GatedRepoError as error:
        raise FlowalignError(_gated(one)) from error


def offline() -> bool:
    """Whether the hub is not to be asked."""
    return bool(constants.HF_HUB_OFFLINE)


def missing(config: BaseConfig) -> list[Download]:
    """What of the hub a configuration needs and this machine has not."""
    return [one for one in downloads(config) if here(one) is None]
