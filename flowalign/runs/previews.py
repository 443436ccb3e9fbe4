"""Previews: files that show people how samples came to be and how groups were judged.

The previews of an iteration are one folder of the run, which appears by one rename:

    previews/iteration-000010/
        films.jsonl     a line for each film
        groups.jsonl    a line for each group
        *.webp          pictures that the lines name; of sounds *.wav, the first seconds

A film line is `{"prompt", "seed", "metadata", "sigmas", "pictures", "rewards", "dense", "advantages", "sparse",
"ratios", "noise", "stochastic", "turning"}`, a group line `{"prompt", "metadata", "members": [{"picture", "seed",
"reward", "advantage", "parts", "rewritten"}], "wins"}`; a member that is a text has "text" and "tokens" instead of
"picture". The fields are those of `Film` and `Group`; a value that is missing or NaN is null.
"""

import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL.Image import Image

from flowalign.runs.samples import Picture, Sample, frames_of, save_picture
from flowalign.runs.sounds import save_sound, small

FOLDER = "previews"


@dataclass(kw_only=True)
class Film:
    """One sample's denoising in T steps: T + 1 states, from the start noise to the finished sample."""

    prompt: str
    seed: int
    pictures: Sequence[Picture]
    """[T + 1] picture or video that each state would end in: its ODE completion, or the one-step estimate of x0."""
    rewards: Sequence[float] | None = None
    """[T + 1] reward of each of these pictures"""
    dense: Sequence[float] | None = None
    """[T] gain of each step; default the difference of the two states' rewards"""
    advantages: Sequence[float] | None = None
    """[T] advantages that the run learns from, NaN for steps that it does not learn from."""
    sparse: float | None = None
    """Advantage by the finished sample's reward alone, where `advantages` are of each step's own reward."""
    ratios: Sequence[float] | None = None
    """[T] probability of each step under the weights over that under the start weights, NaN where it drew no noise."""
    noise: Sequence[float] | None = None
    """[T] standard deviation of the noise that each step drew, 0 where it drew none"""
    stochastic: Sequence[bool] | None = None
    """[T] True where the step drew noise."""
    turning: Sequence[bool] | None = None
    """[T] True where the step is a turning point (TP-GRPO)."""
    sigmas: Sequence[float] | None = None
    """[T + 1] noise level of each state, 1 is pure noise"""
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class Group:
    """The G samples of one prompt, judged against each other."""

    prompt: str
    seeds: Sequence[int]
    """[G]"""
    samples: Sequence[Sample]
    """[G]"""
    rewards: Sequence[float]
    """[G]"""
    advantages: Sequence[float] | None = None
    """[G]"""
    parts: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Named [G] rewards."""
    wins: Sequence[Sequence[float]] | None = None
    """[G, G] pairwise verdicts: 1 where the row's sample beat the column's, 0 where it lost, 0.5 for a tie"""
    rewritten: Sequence[str] | None = None
    """[G] prompts after rewriting, if a prompt rewriter is trained."""
    tokens: Sequence[Sequence[tuple[str, float, float, float]]] | None = None
    """[G] lists of a text's tokens: its piece of the text, log-probability, entropy, advantage."""
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of the previews. With the defaults an iteration's take 1 to 2 MB, and a run's at most 40 MB."""

    films: int = 4
    groups: int = 4
    frames: int = 21
    """Pictures of a film; a longer film is saved with pictures of evenly spread states, and all its numbers."""
    members: int = 24
    """Pictures of a group."""
    side: int = 256
    """Pixels of a side; larger pictures are scaled down."""
    moments: int = 20
    """Iterations whose previews are kept: the first, the newest and an even spread between."""


def save_previews(
    run: Path,
    iteration: int,
    films: Sequence[Film] = (),
    groups: Sequence[Group] = (),
    limits: Limits | None = None,
) -> Path:
    """Save the previews of one iteration into a run's folder and thin out earlier ones.

    Returns:
        the folder of the iteration's previews; earlier files in it are replaced.
    """
    limits = limits or Limits()
    parent = run / FOLDER
    final = parent / f"iteration-{iteration:06d}"
    partial = parent / f".partial-{final.name}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    film_lines = [_save_film(partial, i, film, limits) for i, film in enumerate(films[: limits.films])]
    group_lines = [_save_group(partial, i, group, limits) for i, group in enumerate(groups[: limits.groups])]
    for name, lines in (("films.jsonl", film_lines), ("groups.jsonl", group_lines)):
        (partial / name).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    shutil.rmtree(final, ignore_errors=True)
    os.replace(partial, final)
    _thin(parent, limits.moments)
    return final


def _save_film(folder: Path, number: int, film: Film, limits: Limits) -> dict[str, Any]:
    states = len(film.pictures)
    shown = {round(i * (states - 1) / max(limits.frames - 1, 1)) for i in range(limits.frames)}
    names = [
        save_small(folder / f"film-{number:02d}-{i:03d}", picture, limits.side) if i in shown else None
        for i, picture in enumerate(film.pictures)
    ]
    return {
        "prompt": film.prompt,
        "seed": film.seed,
        "metadata": dict(film.metadata),
        "sigmas": _numbers(film.sigmas),
        "pictures": names,
        "rewards": _numbers(film.rewards),
        "dense": _numbers(film.dense),
        "advantages": _numbers(film.advantages),
        "sparse": None if film.sparse is None else _number(film.sparse),
        "ratios": _numbers(film.ratios),
        "noise": _numbers(film.noise),
        "stochastic": None if film.stochastic is None else [bool(x) for x in film.stochastic],
        "turning": None if film.turning is None else [bool(x) for x in film.turning],
    }


def _save_group(folder: Path, number: int, group: Group, limits: Limits) -> dict[str, Any]:
    size = min(len(group.samples), limits.members)
    members = [_member(folder / f"group-{number:02d}-{i:03d}", group, i, limits.side) for i in range(size)]
    wins = None if group.wins is None else [_numbers(row[:size]) for row in group.wins[:size]]
    return {"prompt": group.prompt, "metadata": dict(group.metadata), "members": members, "wins": wins}


def _member(path: Path, group: Group, i: int, side: int) -> dict[str, Any]:
    sample, tokens = group.samples[i], group.tokens[i] if group.tokens else []
    if isinstance(sample, str):
        pieces = [[piece, *(_number(value) for value in values)] for piece, *values in tokens]
        content: dict[str, Any] = {"text": sample, "tokens": pieces}
    else:
        content = {"picture": save_small(path, sample, side)}
    return content | {
        "seed": int(group.seeds[i]),
        "reward": float(group.rewards[i]),
        "advantage": None if group.advantages is None else _number(group.advantages[i]),
        "parts": {name: _number(values[i]) for name, values in group.parts.items()},
        "rewritten": None if group.rewritten is None else group.rewritten[i],
    }


def save_small(path: Path, sample: Picture, side: int) -> str:
    """Save a picture as WebP: small ones without loss, others scaled down, with a loss that is not visible.

    Of a sound its first seconds are saved, as WAV of one channel.
    """
    if not isinstance(sample, Image | Sequence):
        return save_sound(small(sample), path).name
    frames = [frame.convert("RGB") for frame in frames_of(sample)]
    lossless = max(frames[0].size) <= 64
    for frame in frames:
        frame.thumbnail((side, side))
    shown = frames[0] if isinstance(sample, Image) else frames
    return save_picture(shown, path, "webp", quality=85, lossless=lossless).name


def _numbers(values: Sequence[float] | None) -> list[float | None] | None:
    return None if values is None else [_number(value) for value in values]


def _number(value: float) -> float | None:
    """A number for JSON, which has no NaN: it becomes null."""
    return None if math.isnan(value) else float(value)


def _thin(parent: Path, moments: int) -> None:
    """Remove previews until few enough are left, each time those whose two neighbours are closest together."""
    folders = sorted(parent.glob("iteration-*"))
    while len(folders) > max(moments, 2):
        iterations = [int(folder.name.removeprefix("iteration-")) for folder in folders]
        drop = min(range(1, len(iterations) - 1), key=lambda i: iterations[i + 1] - iterations[i - 1])
        shutil.rmtree(folders.pop(drop))
