"""Reading run folders for the gallery: broken and half-written data are left out with a note, without an error."""

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowalign.errors import ConfigError
from flowalign.runs.foreign import ForeignError, inside, read_bytes, read_json
from flowalign.runs.previews import FOLDER as PREVIEWS
from flowalign.runs.reading import read_yaml
from flowalign.runs.samples import FOLDER as SAMPLES
from flowalign.runs.slider import SLIDER

MOMENT = re.compile(r"iteration-(\d{1,12})")
KNOWN = {"picture", "text", "prompt", "seed", "metadata", "rewritten", "replies"}
"""Keys of a samples.jsonl line that are not scores."""
TRIED = "tried.jsonl"
"""Name of a search's table: a line for each prompt and method."""


@dataclass(kw_only=True)
class SavedSample:
    """One picture, clip or text of a moment."""

    path: Path
    """Path of the picture or clip; for a text the file of lines that it is in."""
    prompt: str
    rewritten: str | None
    """Rewritten prompt, which the generator got."""
    seed: str
    metadata: dict[str, Any]
    scores: dict[str, float]
    text: str | None = None
    """Text of a language model."""
    replies: dict[str, str] = field(default_factory=dict)
    """Judges' texts about the sample."""


@dataclass(kw_only=True)
class Moment:
    """Samples and previews that a run saved at one iteration."""

    iteration: int
    samples: list[SavedSample] = field(default_factory=list)
    films: list[dict[str, Any]] = field(default_factory=list)
    """Lines of films.jsonl, every list of the right length, `pictures` as paths."""
    groups: list[dict[str, Any]] = field(default_factory=list)
    """Lines of groups.jsonl, `picture` as a path."""


@dataclass(kw_only=True)
class SavedRun:
    """Content of a run's folder."""

    folder: Path
    name: str
    moments: list[Moment]
    """Moments with samples, oldest first."""
    previews: list[Moment]
    """Moments with films or groups, oldest first."""
    series: dict[str, list[tuple[int, float]]]
    """Points (iteration, value) by name."""
    warnings: list[tuple[int, str, str]]
    """Warnings as (iteration, "suspect", "hacked" or "", text), from the keys `verdict` and `warnings` of a line."""
    notes: list[str]
    """Notes on data that were left out, with the reason."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Sections of the configuration; empty where it cannot be read."""
    searches: list[dict[str, Any]] = field(default_factory=list)
    """Lines of a search folder's tried.jsonl, pictures as paths."""
    slider: dict[str, Any] | None = None
    """Content of slider.json, pictures as paths."""


def read_runs(folders: list[Path]) -> list[SavedRun]:
    """Read run folders, each with the shortest name that no other one has.

    Raises:
        ConfigError: a folder is missing, or is not a run's.
    """
    folders = list(dict.fromkeys(folder.resolve() for folder in folders))
    names = Counter(folder.name for folder in folders)
    labels = [f.name if names[f.name] == 1 else f"{f.parent.name}/{f.name}" for f in folders]
    again = Counter(labels)
    return [read_run(folder, label if again[label] == 1 else str(folder)) for folder, label in zip(folders, labels)]


def read_run(folder: Path, name: str) -> SavedRun:
    """Read one run's folder; raises ConfigError if it is none."""
    if not folder.is_dir():
        raise ConfigError(f"no run's folder at {folder}")
    if not any((folder / file).exists() for file in ("config.yaml", "metrics.jsonl", SAMPLES, PREVIEWS, TRIED, SLIDER)):
        raise ConfigError(
            f"{folder} is not a run's folder: it has no config.yaml, metrics.jsonl or samples/, nor a search's {TRIED} "
            f"or a {SLIDER}"
        )
    run = SavedRun(folder=folder.resolve(), name=name, moments=[], previews=[], series={}, warnings=[], notes=[])
    run.settings = _settings(run)
    for file, prefix in (("metrics.jsonl", ""), ("evaluations.jsonl", "held-out ")):
        for record in _lines(run, folder / file):
            _add_points(run, record, prefix)
    for iteration, path in _moments(folder / SAMPLES):
        samples = [s for record in _lines(run, path / "samples.jsonl") if (s := _sample(run, path, record))]
        if samples:
            run.moments.append(Moment(iteration=iteration, samples=samples))
        elif not (path / "samples.jsonl").exists():
            run.notes.append(f"{path.name}: no samples.jsonl yet, left out (is the run still being written?)")
    for iteration, path in _moments(folder / PREVIEWS):
        films = [f for record in _lines(run, path / "films.jsonl") if (f := _film(run, path, record))]
        groups = [g for record in _lines(run, path / "groups.jsonl") if (g := _group(run, path, record))]
        if films or groups:
            run.previews.append(Moment(iteration=iteration, samples=[], films=films, groups=groups))
    run.searches = [tree for record in _lines(run, folder / TRIED) if (tree := _search(run, record))]
    run.slider = _slider(run)
    if not run.moments and not run.searches and not run.slider:
        run.notes.append("no pictures yet")
    return run


def _settings(run: SavedRun) -> dict[str, Any]:
    """The sections of the run's configuration; none where it cannot be read."""
    try:
        return read_yaml(inside(run.folder, "config.yaml"))
    except (OSError, ConfigError, ForeignError):
        return {}


def _moments(parent: Path) -> list[tuple[int, Path]]:
    matches = [(MOMENT.fullmatch(p.name), p) for p in parent.iterdir()] if parent.is_dir() else []
    return sorted((int(match[1]), path) for match, path in matches if match)


def _lines(run: SavedRun, path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file of lines; other lines are noted."""
    try:
        lines = read_bytes(inside(run.folder, str(path.relative_to(run.folder)))).split(b"\n")
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, ForeignError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error).partition(" ")[2]
        run.notes.append(f"{_relative(run, path)}: {reason}, left out")
        return
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if b"\xed" in line or b"\\u" in line:
                # half of a surrogate pair, which UTF-8 does not allow, is shown as a question mark
                record = json.loads(json.dumps(record, ensure_ascii=False).encode(errors="replace"))
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict):
            yield record
        else:
            end = " (is the run still being written?)" if number == len(lines) else ""
            run.notes.append(f"{_relative(run, path)}, line {number}: not a JSON object, left out{end}")


def _relative(run: SavedRun, path: Path) -> str:
    return path.relative_to(run.folder).as_posix() if path.is_relative_to(run.folder) else path.name


def _add_points(run: SavedRun, record: dict[str, Any], prefix: str) -> None:
    iteration = record.pop("iteration", None)
    if isinstance(iteration, bool) or not isinstance(iteration, int) or not 0 <= iteration < 10**12:
        run.notes.append("a line of metrics without an iteration, left out")
        return
    warnings, verdict = record.pop("warnings", []), record.pop("verdict", "")
    verdict = verdict if verdict in ("suspect", "hacked") else ""
    run.warnings += [
        (iteration, verdict, _text(text)) for text in (warnings if isinstance(warnings, list) else [warnings])
    ]
    for key, value in record.items():
        number = _number(value)
        if number is not None:
            run.series.setdefault(prefix + key, []).append((iteration, number))
        elif isinstance(value, float):
            run.notes.append(f"iteration {iteration}: {prefix}{key} is {value}, left out of the curve")


def _number(value: object) -> float | None:
    """A finite number, or None."""
    try:
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
    except OverflowError:
        return None


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _file(run: SavedRun, folder: Path, name: Any) -> Path | None:
    """The file of this name in the run's folder; None, with a note, if there is none."""
    try:
        path = inside(run.folder, os.path.normpath(folder.relative_to(run.folder) / name))
        if path.is_file():
            return path
        reason = "missing"
    except ForeignError as error:
        reason = (
            "outside the run's folder"
            if "leads out" in str(error)
            else "a link, which may lead outside the run's folder"
        )
    except (OSError, ValueError, TypeError):
        reason = "not a file name"
    run.notes.append(f"{_relative(run, folder)}: picture {_text(name)[:120]} is {reason}, left out")
    return None


def _metadata(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _sample(run: SavedRun, folder: Path, record: dict[str, Any]) -> SavedSample | None:
    text = record["text"] if isinstance(record.get("text"), str) else None
    path = _file(run, folder, record.get("picture")) if text is None else folder / "samples.jsonl"
    if path is None:
        return None
    scores = {k: n for k, value in record.items() if k not in KNOWN and (n := _number(value)) is not None}
    rewritten = record.get("rewritten")
    return SavedSample(
        path=path,
        prompt=_text(record.get("prompt", "")),
        rewritten=None if rewritten is None else _text(rewritten),
        seed=_text(record.get("seed", path.name)),
        metadata=_metadata(record.get("metadata")),
        scores=scores,
        text=text,
        replies={name: _text(reply) for name, reply in _metadata(record.get("replies")).items()},
    )


def _row(values: object, length: int) -> list[float | None] | None:
    """A list of this length, with None for entries that are no numbers; None for anything else."""
    return [_number(v) for v in values] if isinstance(values, list) and len(values) == length else None


def _tokens(values: object) -> list[list[Any]]:
    """[piece of the text, log-probability, entropy, advantage] of each token; [] if an entry is not of this form."""
    if not isinstance(values, list):
        return []
    rows = [[_text(v[0]), *(_number(n) for n in v[1:])] for v in values if isinstance(v, list) and len(v) == 4]
    return rows if len(rows) == len(values) else []


def _film(run: SavedRun, folder: Path, record: dict[str, Any]) -> dict[str, Any] | None:
    names = record.get("pictures")
    if not isinstance(names, list) or not names:
        run.notes.append(f"{_relative(run, folder)}: a film without pictures, left out")
        return None
    states = len(names)
    rewards = _row(record.get("rewards"), states)
    dense = _row(record.get("dense"), states - 1)
    if dense is None and rewards is not None:
        dense = [None if a is None or b is None else b - a for a, b in zip(rewards, rewards[1:])]
    return {
        "prompt": _text(record.get("prompt", "")),
        "seed": _text(record.get("seed", "")),
        "pictures": [None if name is None else _file(run, folder, name) for name in names],
        "rewards": rewards,
        "dense": dense,
        "sigmas": _row(record.get("sigmas"), states),
        "advantages": _row(record.get("advantages"), states - 1),
        "sparse": _number(record.get("sparse")),
        "ratios": _row(record.get("ratios"), states - 1),
        "noise": _row(record.get("noise"), states - 1),
        "stochastic": _row(record.get("stochastic"), states - 1),
        "turning": _row(record.get("turning"), states - 1),
    }


def _group(run: SavedRun, folder: Path, record: dict[str, Any]) -> dict[str, Any] | None:
    listed = record.get("members")
    listed = listed if isinstance(listed, list) else []
    members = [member for member in listed if isinstance(member, dict)]
    if not members:
        run.notes.append(f"{_relative(run, folder)}: a group without members, left out")
        return None
    wins = record.get("wins")
    rows: list[list[float | None] | None] = []
    if isinstance(wins, list) and len(wins) == len(members) == len(listed):
        rows = [_row(row, len(members)) for row in wins]
    return {
        "prompt": _text(record.get("prompt", "")),
        "members": [
            {
                "picture": None if "text" in member else _file(run, folder, member.get("picture")),
                "text": _text(member["text"]) if "text" in member else None,
                "tokens": _tokens(member.get("tokens")),
                "seed": _text(member.get("seed", "")),
                "reward": _number(member.get("reward")),
                "advantage": _number(member.get("advantage")),
                "parts": {k: n for k, v in _metadata(member.get("parts")).items() if (n := _number(v)) is not None},
                "rewritten": None if member.get("rewritten") is None else _text(member["rewritten"]),
            }
            for member in members
        ],
        "wins": rows if rows and all(row is not None for row in rows) else None,
    }


def _search(run: SavedRun, record: dict[str, Any]) -> dict[str, Any] | None:
    listed = record.get("nodes")
    nodes = [_node(node, number) for number, node in enumerate(listed if isinstance(listed, list) else [])]
    whole = [node for node in nodes if node is not None]
    best = _metadata(record.get("best")).get("node")
    if not whole or len(whole) < len(nodes) or type(best) is not int or not 0 <= best < len(whole):
        run.notes.append(f"{TRIED}: a search whose nodes cannot be read, left out")
        return None
    pictures, sheet = _metadata(record.get("pictures")), _metadata(record.get("tried"))
    numbers = sheet.get("nodes")
    shape = [sheet.get("width"), sheet.get("height")]
    fits = isinstance(numbers, list) and all(type(n) is int for n in numbers) and all(type(n) is int for n in shape)
    return {
        "number": record["number"] if type(record.get("number")) is int else 0,
        "prompt": _text(record.get("prompt", "")),
        "method": _text(record.get("method", "")),
        "steps": record.get("steps"),
        "forwards": _number(record.get("forwards")),
        "calls": _number(record.get("reward_calls")),
        "best": best,
        "nodes": whole,
        "pictures": {name: _file(run, run.folder, pictures[name]) for name in ("first", "best") if name in pictures},
        "sheet": _file(run, run.folder, sheet.get("picture")) if fits else None,
        "places": numbers if fits else [],
        "tile": shape if fits else [],
    }


def _slider(run: SavedRun) -> dict[str, Any] | None:
    """Content of slider.json, pictures as paths; None where there is none, with a note where it cannot be read."""
    try:
        record = read_json(inside(run.folder, SLIDER))
    except FileNotFoundError:
        return None
    except (OSError, ForeignError):
        record = {}
    prompts, listed = record.get("prompts"), record.get("positions")
    prompts = [_text(prompt) for prompt in prompts] if isinstance(prompts, list) else []
    positions = [_position(run, _metadata(position)) for position in (listed if isinstance(listed, list) else [])]
    if not positions or any(len(position["pictures"]) != len(prompts) for position in positions):
        run.notes.append(f"{SLIDER}: no positions with a picture for each prompt, left out")
        return None
    return {"title": _text(record.get("title", "")), "prompts": prompts, "positions": positions}


def _position(run: SavedRun, position: dict[str, Any]) -> dict[str, Any]:
    names = position.get("pictures")
    figures = {name: _metadata(figure) for name, figure in _metadata(position.get("figures")).items()}
    return {
        "label": _text(position.get("label", "")),
        "figures": {
            name: [_number(figure.get(end)) for end in ("mean", "low", "high")] for name, figure in figures.items()
        },
        "pictures": [_file(run, run.folder, name) for name in (names if isinstance(names, list) else [])],
    }


def _node(node: object, number: int) -> list[Any] | None:
    """[parent or -1, step, score, forwards, kept] of a node; None for anything else."""
    node = _metadata(node)
    parent, score = node.get("parent"), _number(node.get("score"))
    parent = -1 if parent is None else parent
    whole = [parent, node.get("step"), node.get("forwards")]
    if not all(type(value) is int for value in whole) or not -1 <= parent < number or score is None:
        return None
    return [parent, whole[1], float(f"{score:.6g}"), whole[2], bool(node.get("kept", True))]
