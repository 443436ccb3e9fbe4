"""Where prompts are read from: text, JSON lines, CSV, parquet, and data sets of the Hugging Face hub."""

import csv
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from flowalign.data.messages import MESSAGES, checked_messages, readable
from flowalign.errors import ConfigError, nearest

ASSETS = Path(str(resources.files("flowalign.data"))) / "assets"
TABLES = {".csv": ",", ".tsv": "\t"}
"""Endings of tables in text, each with the character between its cells."""
SUFFIXES = (".txt", ".jsonl", *TABLES, ".parquet")
PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
CLIPS = (".mp4", ".webm", ".mov", ".mkv", ".gif")
"""Endings of the files of pictures, and of videos."""


def is_clip(file: str) -> bool:
    """Whether a file is a video; an animated WebP is one, as runs save them."""
    ending = Path(file).suffix.lower()
    if ending != ".webp":
        return ending in CLIPS
    # which loads torch, and lists of texts need none
    from rewards.pictures import is_animated

    return is_animated(file)


LONGEST = 100_000
"""Largest length of a prompt, in characters."""
Rows = Iterator[tuple[str, Any]]
"""A row's place for messages, such as 'prompts.txt, line 3', and its content."""


def records(
    source: str, column: str = "prompt", split: str | None = None, subset: str | None = None
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """The prompts of a file, a data set, or a list shipped with flowalign.

    Args:
        source: a file: text with a prompt a line, JSON lines (.jsonl), a table with a first line of names (.csv, .tsv;
            its cells are texts), or parquet; a folder of pictures or videos, each
            with its prompt in a .txt of its name, or all in a metadata.jsonl, where 'file_name' names them; a folder
            that `datasets.load_dataset` reads; 'owner/name' of a data set of the hub; or the name of a shipped list.
            The file of a picture or video is the metadata's 'target'.
        column: which one has the prompts.
        split, subset: of a data set; by default the split 'train'.

    Yields:
        A place for messages, the prompt, and the other columns. Missing values of parquet and of data sets are left
        out, so that a record is the same whatever it was stored in; so are a data set's columns of pictures, sound and
        video, since metadata are what JSON can hold.

    Raises:
        ConfigError: nothing there, or something that is no prompt; names the file and its line or row.
    """
    for place, record in _rows_of(source, column, split, subset):
        if isinstance(record, dict) and isinstance(record.get(column), list):
            messages = checked_messages(record[column], place)
            record = record | {column: readable(messages), MESSAGES: messages}
        if not isinstance(record, dict) or not isinstance(record.get(column), str):
            keys = f"; its keys are {', '.join(map(str, record))[:200]}" if isinstance(record, dict) else ""
            raise ConfigError(f"{place}: not a record with a text under the key {column!r}{keys}")
        problem = unusable(record[column])
        if problem is not None:
            raise ConfigError(f"{place}: the prompt {problem}")
        yield place, record[column], {key: value for key, value in record.items() if key != column}


def _rows_of(source: str, column: str, split: str | None, subset: str | None) -> Rows:
    """The rows of a source, before they are checked; the arguments are those of `records`."""
    path = located(source)
    if os.path.isfile(path):
        if split or subset:
            raise ConfigError(f"{path} is a file and has no split or subset; only data sets have them")
        return _rows_of_file(path, column)
    if os.path.isdir(path) and _is_captioned(path):
        if split or subset:
            raise ConfigError(f"{path} is a folder of pictures and has no split or subset; only data sets have them")
        return _captioned(path, column)
    if is_data_set(source):
        return _data_set(source, split or "train", subset)
    shipped = [path.stem for path in (ASSETS / "prompts").glob("*.jsonl")]
    raise ConfigError(
        f"no prompts at '{source}'; give a {_either(SUFFIXES)} file, a data set of the "
        f"hub (owner/name), or a shipped list: {nearest(source, shipped)}"
    )


def _rows_of_file(path: Path, column: str) -> Rows:
    """The rows of a file, by its suffix."""
    suffix = path.suffix.lower()
    if suffix == ".jsonl":
        return _json_lines(path)
    if suffix == ".parquet":
        return _parquet(path)
    if suffix in TABLES:
        return _table(path, TABLES[suffix])
    if suffix != ".txt":
        raise ConfigError(f"{path}: prompts are read from {_either(SUFFIXES)} files, and from data sets")
    return ((place, {column: line}) for place, line in _lines(path))


def _either(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def unusable(prompt: str) -> str | None:
    """Why no model can be given a prompt."""
    if len(prompt) > LONGEST:
        return f"has {len(prompt):,} characters; at most {LONGEST:,} work"
    if "\0" in prompt:
        return "holds a NUL character"
    if not prompt.isascii() and any("\ud800" <= character <= "\udfff" for character in prompt):
        return "holds half of a surrogate pair, which is no character"
    return None


def is_data_set(source: str) -> bool:
    """Whether it is a folder, or looks like 'owner/name' of the hub."""
    hub = re.fullmatch(r"[\w.-]+/[\w.-]+", source) is not None and Path(source).suffix not in SUFFIXES
    return bool(source) and (os.path.isdir(source) or hub)


def located(source: str) -> Path:
    """The file of a shipped list, or else the path as given."""
    shipped = ASSETS / "prompts" / f"{source}.jsonl"
    return shipped if "/" not in source and os.path.isfile(shipped) else Path(source)


def folder(source: str) -> Path:
    """Folder of relative file names in the records."""
    path = located(source)
    return path.parent if os.path.isfile(path) else path if os.path.isdir(path) else Path()


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """The lines of a text file that are not blank."""
    try:
        # as bytes, whose lines end at \n alone: a text may hold U+2028 and its like
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                place = f"{path}, line {number}"
                try:
                    text = line.rstrip(b"\r\n").decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    raise ConfigError(f"{place}: not UTF-8 text") from error
                if text.strip():
                    yield place, text
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


def _json_lines(path: Path) -> Rows:
    for place, line in _lines(path):
        try:
            yield place, json.loads(line)
        except (ValueError, RecursionError):
            yield place, None


def _is_captioned(path: Path) -> bool:
    """Whether a folder holds pictures or videos with prompts in texts beside them, or in a list of its own."""
    return (path / "metadata.jsonl").is_file() or any(file.with_suffix(".txt").is_file() for file in _media(path))


def _media(path: Path) -> list[Path]:
    """The pictures and videos of a folder and of those within it, in order of their names."""
    return sorted(file for file in path.rglob("*") if file.suffix.lower() in (*PICTURES, *CLIPS))


def _captioned(path: Path, column: str) -> Rows:
    """The pictures and videos of a folder with their prompts."""
    listed = path / "metadata.jsonl"
    if listed.is_file():
        for place, record in _json_lines(listed):
            if isinstance(record, dict) and "file_name" in record:
                record["target"] = record.pop("file_name")
            yield place, record
        return
    for file in _media(path):
        caption = file.with_suffix(".txt")
        if not caption.is_file():
            raise ConfigError(f"{file}: no prompt beside it in {caption.name}, and no metadata.jsonl in {path}")
        text = " ".join(line.strip() for _, line in _lines(caption))
        yield str(caption), {column: text, "target": str(file.relative_to(path))}


def _table(path: Path, delimiter: str) -> Rows:
    """The rows of a CSV or TSV file, whose first one names the columns; empty cells are left out."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file, delimiter=delimiter, strict=True)
            for row in rows:
                place = f"{path}, line {rows.line_num}"
                if None in row or None in row.values():
                    raise ConfigError(
                        f"{place}: not as many cells as the first line has names ({len(rows.fieldnames or ())})"
                    )
                yield place, {name: cell for name, cell in row.items() if cell}
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text") from error
    except csv.Error as error:
        raise ConfigError(f"{path}, after line {rows.line_num}: not readable as a table: {error}") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


def _parquet(path: Path) -> Rows:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(f"{path}: to read parquet, pip install 'flowalign[data]'") from error
    try:
        table = pyarrow.parquet.read_table(path)
        rows = table.to_pylist()
    except (OSError, ValueError, OverflowError, pyarrow.ArrowException) as error:
        raise ConfigError(f"{path}: not readable as parquet: {' '.join(str(error).split())}") from error
    return _rows(str(path), rows)


def _data_set(source: str, split: str, subset: str | None) -> Rows:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(f"no file at '{source}'; to read it as a data set, pip install 'flowalign[data]'") from error
    try:
        data = datasets.load_dataset(source, subset, split=split)
    except Exception as error:
        # the library's own, and those it stumbles over
        raise ConfigError(f"the data set '{source}' cannot be read: {' '.join(str(error).split())}") from error
    media = (datasets.Image, datasets.Audio, datasets.Video)
    data = data.remove_columns([name for name, feature in data.features.items() if isinstance(feature, media)])
    return _rows(f"{source}, split {split}", data)


def _rows(name: str, rows: Iterable[object]) -> Rows:
    """Numbered rows, each checked to be something that JSON can hold."""
    for number, row in enumerate(rows, 1):
        place = f"{name}, row {number}"
        record = _present(row)
        for key, value in record.items():
            try:
                json.dumps(value)
            except (TypeError, ValueError) as error:
                raise ConfigError(f"{place}: the column '{key}' cannot be metadata: {error}") from error
        yield place, record


def _present(value: object) -> Any:
    """Without the missing values of records: a table gives every row every key, at every depth."""
    if isinstance(value, dict):
        return {key: _present(item) for key, item in value.items() if item is not None}
    return [_present(item) for item in value] if isinstance(value, list) else value
