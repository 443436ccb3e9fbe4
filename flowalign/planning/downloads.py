"""Files that a configuration needs from the Hugging Face hub: listing, finding and downloading them."""

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
"""Settings of rewards that name a network, or one of its files."""
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
        """Type of the repository in the hub's own words."""
        return "dataset" if self.part == "data set" else "model"

    @property
    def where(self) -> dict[str, Any]:
        """Arguments of huggingface_hub's functions."""
        name, revision = split_revision(self.repository)
        return {"repo_id": name, "revision": revision, "repo_type": self.kind}


def downloads(config: BaseConfig) -> list[Download]:
    """List what a configuration needs from the hub, each once: model, teachers, rewards and panel, prompts."""
    model = config.model
    needed = [_repository("model.path", model.path, "pipeline" if isinstance(config, Config) else "network")]
    needed.append(_repository("model.config", getattr(model, "config", None), "pipeline"))
    needed.append(_repository("model.lora.path", None if model.lora is None else model.lora.path, "network"))
    learned = config.algorithm.settings
    needed.append(_repository("algorithm.teacher", learned.get("teacher"), "network"))
    needed.append(_repository("algorithm.writer.path", learned.get("writer", {}).get("path"), "network"))
    taught = [("algorithm.teachers", teacher) for teacher in learned.get("teachers", [])]
    for key, network in [*taught, ("algorithm.anchor", learned.get("anchor") or {})]:
        needed.append(_repository(key, network.get("path"), "pipeline"))
        needed.append(_repository(key, network.get("lora"), "network"))
    sections: dict[str, Sequence[Named]] = {
        "rewards": config.rewards,
        "evaluation.rewards": config.evaluation.rewards or [],
        "evaluation.panel": config.evaluation.panel,
    }
    for key, rewards in sections.items():
        for reward in rewards:
            if not reward.name.startswith(registry.GIVEN):
                needed += _of_reward(key, reward)
    for key, prompt_lists in (("data", config.data), ("evaluation", config.evaluation)):
        for prompt_list in (prompt_lists, *prompt_lists.also):
            if prompt_list.prompts is not None and is_data_set(prompt_list.prompts):
                needed.append(_repository(f"{key}.prompts", prompt_list.prompts, "data set"))
    once = {(download.repository, download.part): download for download in reversed(needed) if download is not None}
    return list(reversed(once.values()))


def _repository(where: str, name: str | None, part: str) -> Download | None:
    """The repository of a hub name; None for a file or folder on this machine."""
    if name is None or Path(name).exists() or not HUB_NAME.fullmatch(name):
        return None
    return Download(where, name, part)


def _of_reward(where: str, reward: Named) -> Iterable[Download | None]:
    """List what a reward loads, and the rewards inside it: by the settings that name weights, and their defaults."""
    for target, settings in registry.with_settings(reward.name, reward.settings):
        needed_by = f"{where}: {getattr(target, 'name', reward.name)}"
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
                yield Download(needed_by, f"{owner}/{repository}", file)
            else:
                yield _repository(needed_by, name, part)


def _defaults(target: object) -> dict[str, Any]:
    """Default values of a class's settings, including the settings of the classes that it extends."""
    values: dict[str, Any] = {}
    for owner in reversed(inspect.getmro(target) if inspect.isclass(target) else []):
        if "__init__" in vars(owner):
            parameters = inspect.signature(vars(owner)["__init__"]).parameters.values()
            values |= {
                parameter.name: parameter.default
                for parameter in parameters
                if parameter.default is not parameter.empty
            }
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
    selected = []
    for folder, members in folders.items():
        if folder and folder not in components:
            continue
        selected += [file for file in members if file.endswith(SMALL) and not VARIANT.search(file)]
        if part != "reader" and (folder or part == "network"):
            weights = [file for file in members if file.endswith(WEIGHTS) and not VARIANT.search(file)]
            selected += [file for file in weights if file.endswith(best_ending(weights))]
    return sorted(selected)


def best_ending(weights: Sequence[str]) -> str:
    """Ending of the weight files to load, where the same weights may be there as safetensors and pickled."""
    return next((ending for ending in WEIGHTS if any(file.endswith(ending) for file in weights)), WEIGHTS[0])


def here(download: Download) -> Path | None:
    """Folder of a download in the cache; None if it is not there, or not whole."""
    try:
        folder = huggingface_hub.snapshot_download(**download.where, local_files_only=True)
    except LocalEntryNotFoundError:
        return None
    path = Path(folder)
    if download.part == "pipeline":
        whole = _pipeline_is_whole(path)
    elif download.part == "network":
        whole = _has_weights(path)
    elif download.part in ("reader", "data set"):
        whole = any(path.rglob("*.*"))
    else:
        whole = (path / download.part).is_file()
    return path if whole else None


def components(index: Path) -> dict[str, str]:
    """The parts of a pipeline by their folders, each with its class."""
    saved = json.loads(index.read_text(encoding="utf-8"))
    return {name: entry[1] for name, entry in saved.items() if isinstance(entry, list) and isinstance(entry[0], str)}


def _pipeline_is_whole(folder: Path) -> bool:
    if not (folder / "model_index.json").is_file():
        return False
    for name, kind in components(folder / "model_index.json").items():
        reads = kind.endswith(("Scheduler", "Processor", "Extractor")) or "Tokenizer" in kind
        if not (any((folder / name).glob("*.*")) if reads else _has_weights(folder / name)):
            return False
    return True


def _has_weights(folder: Path) -> bool:
    """True if the folder has every shard of its index, or, without an index, a file of weights."""
    for index in folder.glob("*.index.json"):
        if not VARIANT.search(index.name):
            files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            return all((folder / file).is_file() for file in files)
    return any(path.suffix in WEIGHTS for path in folder.glob("*.*"))


@dataclass
class Size:
    """Files, size and licence of a download, from the hub."""

    files: list[str]
    gigabytes: float
    licence: str


def size(download: Download) -> Size:
    """Ask the hub which files a download needs, and how large they are.

    Raises:
        FlowalignError: the hub refuses, or is out of reach; says what to do.
    """
    try:
        info: Any = huggingface_hub.HfApi().repo_info(**download.where, files_metadata=True, timeout=10)
        folders = []
        if download.part == "pipeline":
            index = huggingface_hub.hf_hub_download(**download.where, filename="model_index.json")
            folders = list(components(Path(index)))
    except GatedRepoError as error:
        raise FlowalignError(_gated(download)) from error
    except RepositoryNotFoundError as error:
        raise FlowalignError(f"{download.needed_by}: the hub has no {download.repository}, or it is private") from error
    except (OSError, huggingface_hub.errors.OfflineModeIsEnabled) as error:
        raise Unreachable(" ".join(str(error).split())[:200]) from error
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
    files = chosen(sizes, download.part, folders)
    licence = (info.card_data or {}).get("license") or "see its page"
    return Size(files, sum(sizes.get(file, 0) for file in files) / 1e9, str(licence))


class Unreachable(FlowalignError):
    """The hub does not answer."""


def _gated(download: Download) -> str:
    name, _ = split_revision(download.repository)
    return (
        f"{download.needed_by}: {name} is gated: accept its licence at https://huggingface.co/{name}, "
        "then `hf auth login` with a token of that account"
    )


def get(download: Download, files: Sequence[str]) -> None:
    """Load files of a repository into the cache."""
    try:
        huggingface_hub.snapshot_download(**download.where, allow_patterns=list(files))
    except GatedRepoError as error:
        raise FlowalignError(_gated(download)) from error


def offline() -> bool:
    """True if the environment forbids calls to the hub (HF_HUB_OFFLINE)."""
    return bool(constants.HF_HUB_OFFLINE)


def missing(config: BaseConfig) -> list[Download]:
    """List the downloads that a configuration needs and this machine does not have."""
    return [download for download in downloads(config) if here(download) is None]
