"""Prompts and their metadata, and preferences between two samples of a prompt."""

import functools
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from pydantic import Field

from flowalign.data.files import ASSETS, CLIPS, folder, is_data_set, located, records
from flowalign.data.votes import FEW
from flowalign.errors import ConfigError
from flowalign.settings import Section


def shipped(path: str) -> Path | str:
    """Path of a model: in flowalign's assets if it has that name, else as given."""
    return ASSETS / path if path.isidentifier() and os.path.isdir(ASSETS / path) else path


@dataclass(frozen=True)
class Source:
    """The picture files that a sample is made from: what an edit changes, a video begins with, a fill keeps."""

    images: tuple[str, ...]
    mask: str | None = None
    """Picture that is white where the sample is to be filled."""

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> "Source | None":
        """Source in a prompt's metadata: 'image' (a file, or a list of files) and 'mask'; None without."""
        images = metadata.get("image")
        if images is None:
            return None
        return cls((images,) if isinstance(images, str) else tuple(images), metadata.get("mask"))


class OneList(Section):
    """The keys that say which prompts: see `flowalign.data.files.records`."""

    prompts: str | None
    """A text, JSON lines or parquet file, a data set (a folder, or owner/name of the hub), or a shipped list."""
    column: str = "prompt"
    """Column of the prompts; the other columns are their metadata."""
    split: str | None = None
    subset: str | None = None
    where: dict[str, list[str | int]] = {}
    """Values of the metadata that a prompt must have, one of each list."""
    limit: int | None = Field(None, ge=1)
    """Number of prompts to use, spread evenly over the list."""
    metadata: dict[str, Any] = {}
    """Metadata of every prompt, besides its own; rewards and selections tell tasks apart by it."""


class PromptList(OneList):
    """The keys of a configuration that say which prompts, from one list or several."""

    also: list[OneList] = []
    """Further lists, each with these keys, whose prompts follow."""


class Difficulty(Section):
    """Prompts to keep by the success rate that their file gives; `flowalign difficulty` measures it."""

    low: float = 0.0
    high: float = 1.0
    key: str = "success_rate"
    """Key in the metadata."""


@dataclass
class Prompts:
    """A list of prompts with a metadata record each."""

    noun: ClassVar[str] = "prompt"
    """Noun for messages."""
    samples: ClassVar[tuple[str, ...]] = ()
    """Keys of the metadata that name files of pictures or videos to learn from."""
    texts: list[str]
    metadata: list[dict[str, Any]]

    def __len__(self) -> int:
        return len(self.texts)

    @classmethod
    def read(
        cls,
        source: str,
        where: Mapping[str, Sequence[str | int]] | None = None,
        column: str = "prompt",
        split: str | None = None,
        subset: str | None = None,
    ) -> Self:
        """Read prompts from a file, a data set or a shipped list: see `flowalign.data.files.records`.

        Under 'image' and 'mask' the metadata name picture files (`Source`); relative paths start from the file's
        folder. The first picture is the metadata's 'reference', unless they have another.

        Args:
            where: keep the prompts whose metadata has one of the values given for each key.
            column, split, subset: see `records`.

        Raises:
            ConfigError: names the file and its line or row.
        """
        cls.check_source(source)
        texts, metadata, files = [], [], folder(source)
        named: list[tuple[str, str]] = []
        for place, text, line in records(source, column, split, subset):
            for record in cls.parts(line):
                cls.check(record, files, place)
                if all(record.get(key) in values for key, values in (where or {}).items()):
                    named += [(place, file) for file in cls.pictures(record)]
                    texts.append(text)
                    metadata.append(record)
        check_pictures(named)
        if not texts:
            raise ConfigError(f"{located(source)}: no {cls.noun} is left" + (f" where {dict(where)}" if where else ""))
        return cls(texts, metadata)

    @classmethod
    def check_source(cls, source: str) -> None:
        """Nothing: files, data sets and lists that are shipped all have prompts."""

    @classmethod
    def parts(cls, record: dict[str, Any]) -> list[dict[str, Any]]:
        """Records of a line; here one."""
        return [record]

    @classmethod
    def of(cls, listed: PromptList) -> Self:
        """The prompts that a section of the configuration asks for.

        A file is read again only when it has changed: a long one takes seconds, and a run asks several times.
        """
        for number, one in enumerate(listed.also):
            if one.prompts is None:
                raise ConfigError(f"data.also[{number}].prompts: null names no prompts; leave the list out")
        first, *others = (cls._of_one(one) for one in (listed, *listed.also))
        if not others:
            return first
        return cls(
            [text for prompts in (first, *others) for text in prompts.texts],
            [record for prompts in (first, *others) for record in prompts.metadata],
        )

    @classmethod
    def _of_one(cls, listed: OneList) -> Self:
        """The prompts of one list."""
        assert listed.prompts is not None
        path = located(listed.prompts)
        stamp = (path.stat().st_mtime_ns, path.stat().st_size) if os.path.isfile(path) else None
        kind: Any = cls
        prompts: Self = _prompts(kind, listed.model_dump_json(include=set(OneList.model_fields)), stamp)
        return prompts

    @property
    def files(self) -> list[str]:
        """The pictures and videos to learn from."""
        return [record[key] for record in self.metadata for key in self.samples]

    @classmethod
    def pictures(cls, record: dict[str, Any]) -> list[str]:
        """The files of pictures that a checked record names."""
        named = [record[key] for key in (*cls.samples, "image", "mask") if key in record]
        return [file for entry in named for file in ([entry] if isinstance(entry, str) else entry)]

    @classmethod
    def check(cls, record: dict[str, Any], folder: Path, place: str) -> None:
        """Make the files that the metadata name paths of files that are there."""
        for key in cls.samples:
            if not isinstance(record.get(key), str):
                raise ConfigError(f"{place}: no file name under the key {key!r}")
            record[key] = _picture(folder / record[key], place)
        for key in ("image", "mask"):
            if key not in record:
                continue
            names = [record[key]] if isinstance(record[key], str) else record[key]
            if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
                raise ConfigError(f"{place}: '{key}' is not a file name or a list of them")
            files = [_picture(folder / name, place) for name in names]
            record[key] = files[0] if isinstance(record[key], str) else files
            if key == "image":
                # what rewards that compare with a picture compare an edit with
                record.setdefault("reference", files[0])
        if not isinstance(record.get("negative_prompt", ""), str):
            raise ConfigError(f"{place}: 'negative_prompt' is not a text; '' is none")

    def take(self, rows: Sequence[int]) -> Self:
        """Some of the prompts."""
        return type(self)([self.texts[i] for i in rows], [self.metadata[i] for i in rows])

    def between(self, key: str, low: float, high: float) -> Self:
        """The prompts whose metadata have a number from low to high under a key.

        Raises:
            ConfigError: a prompt has none, or no prompt is left.
        """
        for text, record in zip(self.texts, self.metadata, strict=True):
            if not isinstance(record.get(key), int | float):
                raise ConfigError(
                    f"data.difficulty: the prompt {text[:60]!r} has no number under '{key}'; "
                    "`flowalign difficulty CONFIG OUT.jsonl` measures it"
                )
        rows = [i for i, record in enumerate(self.metadata) if low <= record[key] <= high]
        if not rows:
            raise ConfigError(f"data.difficulty: no prompt has '{key}' from {low:g} to {high:g}")
        return self.take(rows)

    def spread(self, limit: int | None) -> Self:
        """`limit` prompts taken evenly over the list."""
        if limit is None or limit >= len(self):
            return self
        return self.take(np.linspace(0, len(self) - 1, limit).round().astype(int).tolist())


@dataclass
class Preferences(Prompts):
    """Choices between two pictures of a prompt: `metadata` has the files under 'chosen' and 'rejected'.

    Where a line's 'medium' is 'text' they are texts, for judges of texts.

    `flowalign gallery RUN --export FILE` writes them; where={"rater": ["Ada"]} keeps the choices of one rater.
    """

    noun = "preference"
    samples = ("chosen", "rejected")

    @classmethod
    def check_source(cls, source: str) -> None:
        """No list that is shipped has preferences."""
        if not (os.path.isfile(source) or is_data_set(source)):
            raise ConfigError(f"no preferences at '{source}'; `flowalign gallery RUN --export FILE` writes them")

    def check_enough(self, least: int | None, option: str) -> None:
        """Refuse too few preferences to train on.

        Args:
            least: fewest that will do, by default `FEW`.
            option: name of the option that sets it.

        Raises:
            ConfigError: there are fewer.
        """
        if len(self) < (least or FEW):
            raise ConfigError(
                f"too few preferences yet ({len(self)}): a model that was trained on 50 was worse than before "
                f"(docs/gallery.md). Vote on, to {least or FEW}; {option}={len(self)} trains on these all the same"
            )

    def of_pictures(self) -> Self:
        """Itself, where nothing in it is a choice between texts."""
        if any(record.get("medium") == "text" for record in self.metadata):
            raise ConfigError(
                "these preferences are between texts, and pictures are wanted; `flowalign pair-questions FILE "
                "--template text_better` makes questions of them, to train a judge of texts on"
            )
        return self

    @classmethod
    def pictures(cls, record: dict[str, Any]) -> list[str]:
        """The files of pictures that a checked record names: none, where it is a choice between texts."""
        return [] if record.get("medium") == "text" else super().pictures(record)

    @classmethod
    def check(cls, record: dict[str, Any], folder: Path, place: str) -> None:
        """Make 'chosen' and 'rejected' paths of files that are there; texts stay."""
        if record.get("medium") != "text":
            super().check(record, folder, place)
            return
        for key in cls.samples:
            if not isinstance(record.get(key), str):
                raise ConfigError(f"{place}: no text under the key {key!r}")


@functools.lru_cache(maxsize=2)
def _prompts(kind: type[Prompts], asked: str, stamp: tuple[int, int] | None) -> Any:
    """The prompts of a section given as JSON, from a file of this time and size."""
    listed = OneList.model_validate_json(asked)
    assert listed.prompts is not None
    prompts = kind.read(listed.prompts, listed.where, listed.column, listed.split, listed.subset).spread(listed.limit)
    return kind(prompts.texts, [listed.metadata | record for record in prompts.metadata])


DECODED = 1000
"""Pictures of a list that are decoded before training; of the others the headers are read."""


def check_pictures(named: Sequence[tuple[str, str]]) -> None:
    """Refuse files that cannot be read as pictures, before anything is learned from the first.

    The headers of all are read, and the first `DECODED` pictures whole: to decode 100,000 takes minutes to an hour.

    Args:
        named: place that names each file, and the file; videos are left to their reader.

    Raises:
        ConfigError: the first of them, and the line that names it.
    """
    if not named:
        return
    # which loads torch, and lists of texts need none
    from rewards.pictures import PictureError, opened, read_picture

    places = {file: place for place, file in reversed(named) if Path(file).suffix.lower() not in CLIPS}
    whole = set(list(places)[::-1][:DECODED])

    def problem(file: str) -> str | None:
        try:
            if file in whole:
                read_picture(file)
            else:
                with opened(file):
                    pass
        except PictureError as error:
            return str(error)
        return None

    # Pillow lets go of the interpreter while it decodes
    with ThreadPoolExecutor() as pool:
        for file, said in zip(places, pool.map(problem, places), strict=True):
            if said is not None:
                raise ConfigError(f"{places[file]}: {said}")


def _picture(path: Path, place: str) -> str:
    if not os.path.isfile(path):
        raise ConfigError(f"{place}: no picture at {path}")
    return str(path)
