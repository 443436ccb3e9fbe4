"""Running a suite: samples and scores by prompt, on any number of processes, in a folder where a run can be continued.

    SUITE/
        protocol.json               models, suite with version and settings, and sampling settings
        base/prompts/00000.json     a prompt's seeds and scores, written whole or not at all
        base/pictures/00000.png     a prompt's first sample, for a few prompts spread over the list
        tuned/...                   the same files for the tuned model
        results.json                means with intervals
        samples/, gallery/          pictures of both models, to look at

A prompt's samples depend on nothing but its number: prompts are taken in fixed chunks, a chunk in one batch, so that
any number of processes, or a run that was interrupted and continued, writes the same files.
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
"""Seed of the first start noise; no setting was tuned on these seeds."""
BASE, TUNED = "base", "tuned"
"""Folders of the model before training (or without its LoRA), and of the trained model."""
EARLIER = "earlier"
"""Label of the figures of an earlier measurement, which the present one is compared with."""
SHOWN = 48
"""Prompts whose first sample is saved."""


@dataclass(frozen=True)
class Measured:
    """Scores of one model on all prompts of a suite."""

    prompts: Prompts
    scores: list[list[SampleScores]]


def own_sampling(policy: DiffusersPolicy) -> Sampling:
    """Sampling settings by the defaults of the pipeline's own call: its steps and guidance."""
    call = inspect.signature(type(policy.pipeline).__call__).parameters
    of_steps = [name for name, scales in policy.family.arguments_by_step((2.0, 3.0)).items() if scales]
    if of_steps:
        return Sampling(steps=call["num_inference_steps"].default, guidance=list(call[of_steps[0]].default))
    # find the argument that takes the scale, and its offset: in some pipelines no guidance is 0
    one, two = (policy.family.arguments(scale) for scale in (2.0, 3.0))
    names = [name for name in one if one[name] != two[name] and isinstance(call[name].default, int | float)]
    defaults = [call[name].default - (one[name] - 2.0) for name in names]
    return Sampling(steps=call["num_inference_steps"].default, guidance=max([1.0, *defaults[:1]]))


def open_folder(folder: Path, protocol: Mapping[str, Any]) -> None:
    """Begin a measurement in a folder, or continue the one that is there.

    Raises:
        ConfigError: it holds another measurement.
    """
    path = folder / "protocol.json"
    text = json.dumps(protocol, indent=2) + "\n"
    if path.is_file() and path.read_text(encoding="utf-8") != text:
        existing = json.loads(path.read_text(encoding="utf-8"))
        other = [key for key in protocol if protocol[key] != existing.get(key)]
        raise ConfigError(f"{folder} holds a measurement with another {' and '.join(other)}; --output names a new one")
    write_atomically(path, text)


def measure(
    suite: Suite, policy: DiffusersPolicy, sampling: Sampling, folder: Path, limit: int | None = None, seed: int = SEED
) -> Measured | None:
    """Sample and score the prompts that are missing in a model's folder; the main process reads the scores of all.

    Args:
        folder: folder of this model and suite.
        limit: number of prompts to take, spread evenly over the list.

    Returns:
        the scores; None on other processes than the main one.

    Raises:
        ConfigError: the suite needs videos and the model makes pictures, or the other way round.
    """
    kind = type(policy.pipeline).__name__
    if suite.videos != makes_videos(kind):
        wants, makes = ("videos", "pictures") if suite.videos else ("pictures", "videos")
        raise ConfigError(f"{suite.name} is of {wants}, and {kind} makes {makes}")
    state, prompts = PartialState(), suite.prompts().spread(limit)
    shown = set(np.linspace(0, len(prompts) - 1, min(SHOWN, len(prompts))).round().astype(int).tolist())
    size = max(1, sampling.batch_size // suite.pictures)
    chunks = [range(first, min(first + size, len(prompts))) for first in range(0, len(prompts), size)]
    assigned = chunks[state.process_index :: state.num_processes]
    missing = [rows for rows in assigned if not all(result_of(folder, i).is_file() for i in rows)]
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
    """Sample and score a chunk of prompts; sample n of the whole list starts from the noise of seed + n."""
    owners = [i for i in rows for _ in range(suite.pictures)]
    seeds = list(range(seed + rows.start * suite.pictures, seed + rows.stop * suite.pictures))
    texts, metadata = [prompts.texts[i] for i in owners], [prompts.metadata[i] for i in owners]
    samples = policy.make(texts, seeds, sampling, metadata)
    scores = suite.score(samples, texts, metadata)
    for number, i in enumerate(rows):
        members = slice(number * suite.pictures, (number + 1) * suite.pictures)
        if i in shown:
            picture = folder / "pictures" / f"{i:05d}"
            picture.parent.mkdir(parents=True, exist_ok=True)
            save_picture(samples[members.start], picture, "png")
        record = {"prompt": prompts.texts[i], "seeds": seeds[members], "scores": scores[members]}
        write_atomically(result_of(folder, i), json.dumps(record) + "\n")


def read(folder: Path, prompts: Prompts) -> Measured:
    """Read the scores of all prompts.

    Raises:
        ConfigError: some are missing, since the processes do not share the folder.
    """
    files = [result_of(folder, i) for i in range(len(prompts))]
    lacking = sum(not file.is_file() for file in files)
    if lacking:
        raise ConfigError(f"{folder}: {lacking} prompts are missing; all processes must write into one shared folder")
    return Measured(prompts, [json.loads(file.read_text(encoding="utf-8"))["scores"] for file in files])


def results(suite: Suite, measured: Mapping[str, Measured]) -> dict[str, dict[str, Interval]]:
    """Means of each model by score, the headline first; with two models also the differences of the second."""
    intervals = {label: means(model.scores, suite.headline) for label, model in measured.items()}
    if len(measured) == 2:
        first, second = (model.scores for model in measured.values())
        intervals["difference"] = differences(first, second, suite.headline)
    return intervals


def write_results(folder: Path, protocol: Mapping[str, Any], intervals: Mapping[str, dict[str, Interval]]) -> None:
    """Write results.json: the protocol and the figures, without a date or a machine."""
    record = dict(protocol) | {"results": {label: as_record(figures) for label, figures in intervals.items()}}
    write_atomically(folder / "results.json", json.dumps(record, indent=2) + "\n")


def show(suite: Suite, folder: Path, measured: Mapping[str, Measured], seed: int = SEED) -> None:
    """Write the saved pictures where the gallery reads them, as one iteration for each model."""
    shutil.rmtree(folder / "samples", ignore_errors=True)
    for label, model in measured.items():
        paths = sorted((folder / label / "pictures").iterdir())
        lines = []
        for path in paths:
            i = int(path.stem)
            scores = {name: value for name, value in model.scores[i][0].items() if not isinstance(value, list)}
            record = {"prompt": model.prompts.texts[i], "seed": seed + i * suite.pictures}
            lines.append((_opened(path), record | {"metadata": model.prompts.metadata[i]} | scores))
        # the gallery calls iteration 0 the base
        save_samples(folder, 0 if label == BASE else 1, lines)


def _opened(path: Path) -> Image.Image | Sequence[Image.Image]:
    """A picture, or the frames of an animated one."""
    frames = read_frames(path)
    return frames if path.suffix == ".webp" else frames[0]
