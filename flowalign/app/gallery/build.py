"""Building the gallery: one page, its pictures and thumbnails, in a folder that opens from disk and can be moved."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader

from flowalign.app.gallery.runs import SavedRun, SavedSample, read_runs
from flowalign.runs.files import write_atomically
from flowalign.runs.foreign import ForeignError, check_folder, read_json, write_new
from flowalign.runs.samples import FOLDER as SAMPLES
from flowalign.runs.samples import THUMBNAIL, save_thumbnail, thumbnail_of

CLIPS = {".mp4", ".webm"}
SOUNDS = {".wav"}
PICTURES = {".png", ".jpg", ".jpeg", ".webp", ".gif", ".avif"}
POINTS = 1000
"""Most points of a curve on the page; of longer ones the extremes of equal intervals are shown."""
PLAIN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
"""Word of a picture's path in the gallery that needs no quoting in addresses, and leads to no other folder."""
NOTES = 50
"""Most notes of a run that are shown."""
SCRIPTS = "core grid compare previews tokens chart curves search slider vote news start".split()
NEWEST = "newest.js"
ASSETS = ("gallery.css", *(f"{name}.js" for name in SCRIPTS))


@dataclass
class Placed:
    """A sample in the gallery, with its row and column of the grid, and its file there."""

    sample: SavedSample
    row: int
    column: int
    picture: str
    """File of the picture; empty for a text."""
    size: tuple[int, int]


@dataclass(kw_only=True)
class Gallery:
    """Content of the page. A row is one prompt and seed, a column one moment of one run, base first."""

    runs: list[SavedRun]
    columns: list[tuple[int, int]]
    """(run, iteration)"""
    rows: list[dict[str, Any]]
    placed: list[Placed]
    previews: list[dict[str, Any]] = field(default_factory=list)
    searches: list[dict[str, Any]] = field(default_factory=list)
    sliders: list[dict[str, Any]] = field(default_factory=list)
    reached: str = ""
    """How far the runs were, by `reached`."""

    @property
    def trained(self) -> bool:
        """True if it shows more than searches and sliders."""
        return any(r.moments or r.previews or r.series or not (r.searches or r.slider) for r in self.runs)

    @property
    def curves(self) -> bool:
        """True if a run has metrics."""
        return any(run.series for run in self.runs)

    @property
    def texts(self) -> bool:
        """True if it shows a language model's texts."""
        members = (m for moment in self.previews for group in moment["groups"] for m in group["members"])
        return any(p.sample.text is not None for p in self.placed) or any(m["text"] is not None for m in members)


def build(runs: Sequence[Path | str], output: Path | str) -> Path:
    """Write the gallery of one or more run folders, or update it.

    Args:
        runs: run folders; they are only read.
        output: the gallery's folder. Pictures are hard links into the runs where the file system allows it.

    Returns:
        path of the page, output/index.html.

    Raises:
        ConfigError: a run folder is missing, or is none.
    """
    lay_out(runs, output)
    return Path(output) / "index.html"


def lay_out(runs: Sequence[Path | str], output: Path | str) -> Gallery:
    """Do the work of `build`, and return the content of the page."""
    far = reached(map(Path, runs))
    read, output = read_runs([Path(run) for run in runs]), Path(output)
    output.mkdir(parents=True, exist_ok=True)
    # the gallery's folder may be in a run's, which somebody else may have made
    check_folder(output)
    gallery = _arrange(read, output)
    gallery.reached = far
    assets = output / "assets"
    assets.mkdir(exist_ok=True)
    for name in ASSETS:
        write_new(assets / name, (Path(__file__).parent / "static" / name).read_bytes())
    environment = Environment(loader=PackageLoader("flowalign.app.gallery"), autoescape=True)
    # tojson escapes <, >, & and ' so that data cannot end its script element; NaN is no JSON
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    title = ", ".join(run.name for run in read)
    page = environment.get_template("gallery.html").render(
        title=title,
        headlines=[line for run in read if (line := headline(run, alone=len(read) == 1))],
        data=_page_data(gallery),
        scripts=ASSETS[1:],
        gallery=gallery,
    )
    write_atomically(output / "index.html", page)
    write_new(assets / NEWEST, newest(far))
    return gallery


def reached(runs: Iterable[Path]) -> str:
    """How far runs are: another text after every evaluation, and when they have saved more samples."""
    evaluated = samples = 0
    for run in runs:
        samples += len(list((run / SAMPLES).glob("iteration-*/samples.jsonl")))
        file = run / "evaluations.jsonl"
        evaluated += file.stat().st_size if file.is_file() else 0
    return f"{samples}-{evaluated}"


def newest(far: str) -> str:
    """The script that tells an open page how far its runs are; from disk a page may read nothing but scripts."""
    return f'gallery.reached("{far}");\n'


def headline(run: SavedRun, alone: bool) -> str:
    """A run in a line: model, method, reward, and its held-out score before and after; a search's prompts and methods.

    Empty where nothing is known.

    Args:
        alone: the page shows no other run, and has its name in the title.
    """
    rewards = run.settings.get("rewards")
    entries = [(run.settings.get("model"), "path"), (run.settings.get("algorithm"), "name")]
    entries += [(reward, "name") for reward in rewards] if isinstance(rewards, list) else []
    named = [str(section[key])[:80] for section, key in entries if isinstance(section, dict) and section.get(key)]
    words = ([] if alone else [run.name]) + named
    for score in ("strict", "reward"):
        points = run.series.get(f"held-out all/{score}", [])
        if len(points) > 1:
            (_, before), (iteration, after) = points[0], points[-1]
            words.append(f"held-out {score} {before:.3g} → {after:.3g} after {iteration} iterations")
            break
    if run.searches:
        count = len({record["number"] for record in run.searches})
        methods = ", ".join(dict.fromkeys(str(record["method"])[:80] for record in run.searches))
        words.append(f"search of {count} prompt{'s' if count > 1 else ''} by {methods}")
    return " · ".join(words) if alone or len(words) > 1 else ""


def _arrange(runs: list[SavedRun], output: Path) -> Gallery:
    store = PictureStore(output)
    columns = [(i, moment.iteration) for i, run in enumerate(runs) for moment in run.moments]
    column_of = {column: n for n, column in enumerate(columns)}
    samples = [(i, m.iteration, s) for i, run in enumerate(runs) for m in run.moments for s in m.samples]
    pictures = [(i, sample.path) for i, _, sample in samples if sample.text is None]
    files = iter(store.place(runs, pictures))
    sizes = [next(files) if sample.text is None else ("", (0, 0)) for _, _, sample in samples]

    rows: dict[tuple[str, str, int], int] = {}
    table: list[dict[str, Any]] = []
    placed = []
    seen: dict[tuple[int, str, str], int] = {}
    for (i, iteration, sample), entry in zip(samples, sizes):
        if entry is None:
            continue
        column = column_of[i, iteration]
        # a prompt may be sampled twice with one seed; its n-th sample is in one row with the n-th of other moments
        key = (column, sample.prompt, sample.seed)
        count = seen[key] = seen.get(key, -1) + 1
        row = rows.setdefault((sample.prompt, sample.seed, count), len(rows))
        if row == len(table):
            table.append({"prompt": sample.prompt, "seed": sample.seed, "metadata": _facts(sample.metadata)})
        placed.append(Placed(sample, row, column, *entry))
    gallery = Gallery(runs=runs, columns=columns, rows=table, placed=placed)
    for i, run in enumerate(runs):
        for moment in run.previews:
            gallery.previews.append(_place_previews(store, runs, i, moment))
        gallery.searches += _place_searches(store, runs, i)
        gallery.sliders += _place_slider(store, runs, i)
    store.finish()
    return gallery


def _place_previews(store: "PictureStore", runs: list[SavedRun], i: int, moment: Any) -> dict[str, Any]:
    paths = [p for film in moment.films for p in film["pictures"]] + [
        m["picture"] for g in moment.groups for m in g["members"]
    ]
    pictures = [path for path in paths if path is not None]
    entries = store.place(runs, [(i, path) for path in pictures])
    name = {path: entry[0] for path, entry in zip(pictures, entries) if entry is not None}
    return {
        "run": i,
        "iteration": moment.iteration,
        "films": [{**film, "pictures": [name.get(path) for path in film["pictures"]]} for film in moment.films],
        "groups": [
            {**group, "members": [{**m, "picture": name.get(m["picture"])} for m in group["members"]]}
            for group in moment.groups
        ],
    }


def _place_searches(store: "PictureStore", runs: list[SavedRun], i: int) -> list[dict[str, Any]]:
    pictures = [
        path
        for record in runs[i].searches
        for path in (*record["pictures"].values(), record["sheet"])
        if path is not None
    ]
    entries = store.place(runs, [(i, path) for path in pictures])
    name = {path: entry[0] for path, entry in zip(pictures, entries) if entry is not None}
    return [
        {**record, "run": i, "sheet": name.get(record["sheet"])}
        | {"pictures": {end: name.get(path) for end, path in record["pictures"].items()}}
        for record in runs[i].searches
    ]


def _place_slider(store: "PictureStore", runs: list[SavedRun], i: int) -> list[dict[str, Any]]:
    slider = runs[i].slider
    if slider is None:
        return []
    pictures = [path for position in slider["positions"] for path in position["pictures"] if path is not None]
    entries = store.place(runs, [(i, path) for path in pictures])
    name = {path: entry[0] for path, entry in zip(pictures, entries) if entry is not None}
    positions = [
        {**position, "pictures": [name.get(path) for path in position["pictures"]]} for position in slider["positions"]
    ]
    return [{**slider, "run": i, "positions": positions}]


def _facts(metadata: dict[str, Any]) -> dict[str, str]:
    """Plain entries of a sample's metadata, short enough to show."""
    return {str(k)[:80]: str(v)[:200] for k, v in list(metadata.items())[:20] if isinstance(v, str | int | float)}


class PictureStore:
    """The pictures in a gallery's folder: each is linked and gets a thumbnail once, and again when it changes."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.cache = output / ".pictures.json"
        try:
            known = read_json(self.cache)
        except (OSError, ForeignError):
            known = {}
        self.known = {name: tuple(entry) for name, entry in known.items() if _ours(name, entry)}
        self.used: dict[str, tuple[int, ...]] = {}

    def place(
        self, runs: list[SavedRun], pictures: Iterable[tuple[int, Path]]
    ) -> list[tuple[str, tuple[int, int]] | None]:
        """Names in the gallery and sizes in pixels of (run, path) pictures; None, with a note, for unreadable ones."""
        folders = [f"{_safe(run.folder.name)}-{_digest(str(run.folder))[:8]}" for run in runs]
        todo = [(f"{folders[i]}/{_name(path.relative_to(runs[i].folder))}", path) for i, path in pictures]
        # Pillow releases the interpreter's lock while it decodes, scales and encodes
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            entries = list(pool.map(lambda job: self._one(*job), todo))
        placed: list[tuple[str, tuple[int, int]] | None] = []
        for (i, path), (name, _), entry in zip(pictures, todo, entries):
            if entry is None:
                relative = path.relative_to(runs[i].folder).as_posix()
                runs[i].notes.append(f"{relative}: unreadable as a picture, left out (is it still being written?)")
                placed.append(None)
            else:
                self.used[name] = entry
                placed.append((name, (entry[2], entry[3])))
        return placed

    def _one(self, name: str, source: Path) -> tuple[int, ...] | None:
        """Put a picture into the gallery; return its (mtime, bytes, width, height), width 0 but for pictures."""
        target, thumbnail = self.output / "pictures" / name, self.output / "thumbnails" / f"{name}.jpg"
        try:
            state = source.stat()
            known = self.known.get(name)
            if known is not None and known[:2] == (state.st_mtime_ns, state.st_size) and target.exists():
                return known
            suffix = source.suffix.lower()
            size = (0, 0)
            if suffix in PICTURES:
                size = self._thumbnail(source, thumbnail)
            elif suffix not in CLIPS | SOUNDS:
                return None
            _link(source, target)
        except (OSError, ValueError):
            return None
        return (state.st_mtime_ns, state.st_size, *size)

    @staticmethod
    def _thumbnail(source: Path, thumbnail: Path) -> tuple[int, int]:
        # imported here since it loads torch, which a gallery without new pictures does not need
        from rewards.pictures import opened

        saved = thumbnail_of(source)
        with opened(source) as picture:
            size = picture.size
            if max(size) <= THUMBNAIL:
                picture.load()
            elif _newer(saved, source) and saved.resolve().is_relative_to(source.parent):
                _link(saved, thumbnail)
            else:
                # it may be a link to the run's own thumbnail
                thumbnail.unlink(missing_ok=True)
                save_thumbnail(picture, thumbnail)
        return size

    def finish(self) -> None:
        """Remove pictures that no run shows any more, and write the list of the others."""
        for name in set(self.known) - set(self.used):
            (self.output / "pictures" / name).unlink(missing_ok=True)
            (self.output / "thumbnails" / f"{name}.jpg").unlink(missing_ok=True)
        write_atomically(self.cache, json.dumps(self.used, separators=(",", ":")))


def _newer(file: Path, other: Path) -> bool:
    return file.is_file() and file.stat().st_mtime_ns >= other.stat().st_mtime_ns


def _link(source: Path, target: Path) -> None:
    """Replace a file by a hard link, or by a copy if the file system has no links."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _ours(name: str, entry: object) -> bool:
    """True if `finish` may have written this entry of the list of pictures, by which files are removed."""
    words = name.split("/")
    plain = len(words) > 1 and all(PLAIN.fullmatch(word) for word in words)
    return plain and isinstance(entry, list) and len(entry) == 4 and all(type(number) is int for number in entry)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name)[:40] or "run"


def _name(relative: Path) -> str:
    """A path that needs no quoting in addresses: unusual file names become a digest."""
    words = [word if PLAIN.fullmatch(word) else _digest(word)[:24] for word in relative.parts]
    suffix = relative.suffix.lower()
    return "/".join(words) + (
        "" if words[-1].lower().endswith(suffix) else suffix if suffix in PICTURES | CLIPS else ""
    )


def thinned(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most `POINTS` points: the lowest and the highest one of equal intervals, and both ends."""
    if len(points) <= POINTS:
        return points
    points = sorted(points)
    bins = POINTS // 2 - 1
    shown = {0, len(points) - 1}
    for b in range(bins):
        stretch = range(b * len(points) // bins, (b + 1) * len(points) // bins)
        shown |= {min(stretch, key=lambda i: points[i][1]), max(stretch, key=lambda i: points[i][1])}
    return [points[i] for i in sorted(shown)]


def _page_data(gallery: Gallery) -> dict[str, Any]:
    """Data for the page's scripts; texts and names of scores are listed once, and pictures are short rows."""
    prompts: dict[str, int] = {}
    rewritten: dict[str, int] = {}
    scores: dict[str, int] = {}
    pictures = []
    for p in gallery.placed:
        for name in p.sample.scores:
            scores.setdefault(name, len(scores))
        values = [_short(p.sample.scores.get(name)) for name in scores]
        text = p.sample.rewritten
        rewrite = -1 if text is None else rewritten.setdefault(text, len(rewritten))
        pictures.append([p.row, p.column, p.picture, *p.size, rewrite, values])
    rows = [[prompts.setdefault(row["prompt"], len(prompts)), row["seed"], row["metadata"]] for row in gallery.rows]
    return {
        "thumbnail": THUMBNAIL,
        "runs": [
            {
                "name": run.name,
                "notes": run.notes[:NOTES] + ([f"and {len(run.notes) - NOTES} more"] if len(run.notes) > NOTES else []),
                "warnings": run.warnings[:1000],
                "series": {k: [[i, _short(v)] for i, v in thinned(points)] for k, points in run.series.items()},
            }
            for run in gallery.runs
        ],
        "columns": gallery.columns,
        "prompts": list(prompts),
        "rewritten": list(rewritten),
        "scores": list(scores),
        "rows": rows,
        "pictures": pictures,
        "texts": [p.sample.text for p in gallery.placed] if gallery.texts else [],
        "replies": {i: p.sample.replies for i, p in enumerate(gallery.placed) if p.sample.replies},
        "previews": gallery.previews,
        "searches": gallery.searches,
        "sliders": gallery.sliders,
        "reached": gallery.reached,
    }


def _short(value: float | None) -> float | None:
    """A value with six digits, which are enough for the page."""
    return None if value is None else float(f"{value:.6g}")
