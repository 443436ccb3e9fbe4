"""Running a suite: samples and scores prompt by prompt, on any number of processes, in a folder that can be gone on in.

    SUITE/
        protocol.json               what is measured, under which protocol, sampled how
        base/prompts/00000.json     a prompt's seeds and scores, written whole or not at all
        base/pictures/00000.png     its first sample, of a few prompts spread over the list
        tuned/...                   the same of the tuned model
        results.json                means with intervals
        samples/, gallery/          the pictures of both, to look at

A prompt's samples depend on nothing but its number: prompts are taken in fixed chunks, a chunk in one batch, so that
any number of processes, and an interrupted run that goes on, write the same files.
"""

import inspect
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import PartialState
from PIL import Image
from tqdm.auto import tqdm

from flowalign.data import Prompts
from flowalign.errors import ConfigError
from flowalign.evaluation.benchmarks.base import SampleScores, Suite
from flowalign.evaluation.statistics import Interval, as_record, differences, means
from flowalign.policies.diffusion import DiffusersPolicy
from flowalign.policies.diffusion.storage import makes_videos
from flowalign.policies.settings import Sampling
from flowalign.runs.files import write_atomically
from flowalign.runs.samples import save_picture, save_samples
from rewards.pictures import read_frames

SEED = 600_000_000
"""Seed of the first start noise; nothing was tuned on these."""
BASE, TUNED = "base", "tuned"
"""Folders of a model before training or without its LoRA, and of what was trained."""
SHOWN = 48
"""Prompts whose first sample is saved."""


@dataclass(frozen=True)
class Measured:
    """The scores of one model under a suite, of all its prompts."""

    prompts: Prompts
    scores: list[list[SampleScores]]


def own_sampling(policy: DiffusersPolicy) -> Sampling:
    """As the pipeline's own call samples unless told otherwise: its steps and guidance."""
    call = inspect.signature(type(policy.pipeline).__call__).parameters
    # which argument takes the scale, and how: some pipelines count from 0
    one, two = (policy.family.arguments(scale) for scale in (2.0, 3.0))
    taken = [name for name in one if one[name] != two[name] and isinstance(call[name].default, int | float)]
    defaults = [call[name].default - (one[name] - 2.0) for name in taken]
    return Sampling(steps=call["num_inference_steps"].default, guidance=max([1.0, *defaults[:1]]))


def open_folder(folder: Path, protocol: Mapping[str, Any]) -> None:
    """Begin a measurement in a folder, or go on with the one that is there.

    Raises:
        ConfigError: it holds another measurement.
    """
    path = folder / "protocol.json"
    text = json.dumps(protocol, indent=2) + "\n"
    if path.is_file() and path.read_text(encoding="utf-8") != text:
        there = json.loads(path.read_text(encoding="utf-8"))
        other = [key for key in protocol if protocol[key] != there.get(key)]
        raise ConfigError(f"{folder} holds a measurement with another {' and '.join(other)}; --output names a new one")
    write_atomically(path, text)


def measure(
    suite: Suite, policy: DiffusersPolicy, sampling: Sampling, folder: Path, limit: int | None = None, seed: int = SEED
) -> Measured | None:
    """Sample and score what is missing in a model's folder; the main process reads all of it back.

    Args:
        folder: of this model and suite.
        limit: of the prompts only so many, spread evenly.

    Returns:
        the scores; None on other processes than the main one.

    Raises:
        ConfigError: the suite is of videos and the model makes pictures, or the other way round.
    """
    kind = type(policy.pipeline).__name__
    if suite.videos != makes_videos(kind):
        wants, makes = ("videos", "pictures") if suite.videos else ("pictures", "videos")
        raise ConfigError(f"{suite.name} is of {wants}, and {kind} makes {makes}")
    state, prompts = PartialState(), suite.prompts().spread(limit)
    shown = set(np.linspace(0, len(prompts) - 1, min(SHOWN, len(prompts))).round().astype(int).tolist())
    size = max(1, sampling.batch_size // suite.pictures)
    chunks = [range(first, min(first + size, len(prompts))) for first in range(0, len(prompts), size)]
    own = chunks[state.process_index :: state.num_processes]
    missing = [rows for rows in own if not all(result_of(folder, i).is_file() for i in rows)]
    for rows in tqdm(missing, desc=f"{suite.name}: {folder.name}", disable=not state.is_main_process):
        _measure_chunk(suite, policy, sampling, folder, prompts, rows, shown, seed)
    state.wait_for_everyone()
    return read(folder, prompts) if state.is_main_process else None


def result_of(folder: Path, prompt: int) -> Path:
    """The file of a prompt's scores."""
    return folder / "prompts" / f"{prompt:05d}.json"


def _measure_chunk(
    suite: Suite,
    policy: DiffusersPolicy,
    sampling: Sampling,
    folder: Path,
    prompts: Prompts,
    rows: range,
    shown: set[int],
    seed: int,
) -> None:
    """The samples of a chunk of prompts, sample n of the whole list from the noise of seed + n, and their scores."""
    owners = [i for i in rows for _ in range(suite.pictures)]
    seeds = list(range(seed + rows.start * suite.pictures, seed + rows.stop * suite.pictures))
    texts, metadata = [prompts.texts[i] for i in owners], [prompts.metadata[i] for i in owners]
    samples = policy.make(texts, seeds, sampling, metadata)
    scores = suite.score(samples, texts, metadata)
    for number, i in enumerate(rows):
        part = slice(number * suite.pictures, (number + 1) * suite.pictures)
        if i in shown:
            picture = folder / "pictures" / f"{i:05d}"
            picture.parent.mkdir(parents=True, exist_ok=True)
            save_picture(samples[part.start], picture, "png")
        record = {"prompt": prompts.texts[i], "seeds": seeds[part], "scores": scores[part]}
        write_atomically(result_of(folder, i), json.dumps(record) + "\n")


def read(folder: Path, prompts: Prompts) -> Measured:
    """The scores of all prompts.

    Raises:
        ConfigError: some are missing: the processes do not share the folder.
    """
    files = [result_of(folder, i) for i in range(len(prompts))]
    lacking = sum(not file.is_file() for file in files)
    if lacking:
        raise ConfigError(f"{folder}: {lacking} prompts are missing; all processes must write into one shared folder")
    return Measured(prompts, [json.loads(file.read_text(encoding="utf-8"))["scores"] for file in files])


def results(suite: Suite, measured: Mapping[str, Measured]) -> dict[str, dict[str, Interval]]:
    """Means of each model by score, the headline first; of the second also the differences to the first."""
    found = {label: means(own.scores, suite.headline) for label, own in measured.items()}
    if len(measured) == 2:
        first, second = (own.scores for own in measured.values())
        found["difference"] = differences(first, second, suite.headline)
    return found


def write_results(folder: Path, protocol: Mapping[str, Any], found: Mapping[str, dict[str, Interval]]) -> None:
    """results.json: the protocol and the figures, without anything of when or where."""
    record = dict(protocol) | {"results": {label: as_record(own) for label, own in found.items()}}
    write_atomically(folder / "results.json", json.dumps(record, indent=2) + "\n")


def show(suite: Suite, folder: Path, measured: Mapping[str, Measured], seed: int = SEED) -> None:
    """Put the pictures that were kept where the gallery looks, a moment a model."""
    shutil.rmtree(folder / "samples", ignore_errors=True)
    for label, own in measured.items():
        kept = sorted((folder / label / "pictures").iterdir())
        lines = []
        for path in kept:
            i = int(path.stem)
            scores = {name: value for name, value in own.scores[i][0].items() if not isinstance(value, list)}
            record = {"prompt": own.prompts.texts[i], "seed": seed + i * suite.pictures}
            lines.append((_opened(path), record | {"metadata": own.prompts.metadata[i]} | scores))
        # the gallery calls iteration 0 the base
        save_samples(folder, 0 if label == BASE else 1, lines)


def _opened(path: Path) -> Image.Image | Sequence[Image.Image]:
    """A picture, or the frames of an animated one."""
    frames = read_frames(path)
    return frames if path.suffix == ".webp" else frames[0]
