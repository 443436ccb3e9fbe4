"""Pictures, videos and texts in tensorboard and wandb, with their prompts and scores.

The same held-out samples have the same tags at every evaluation, so that a slider over the steps shows how they change.
Every `show_every` iterations the best and the worst samples of that iteration are shown too. Other trackers only get
numbers.
"""

import io
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object
from PIL import Image, ImageDraw

from flowalign.config import BaseConfig
from flowalign.rollouts.extremes import Extremes
from flowalign.runs.environment import flat, record_environment
from flowalign.runs.samples import MILLISECONDS, Sample, frames_of

SIDE = 512
"""Pixels of a picture's longer side, at most."""
LEAST = 192
"""Pixels of its width, at least, so that a caption can be read."""
LINE = 14
"""Pixels of a caption's line."""


def begin_tracking(config: BaseConfig, accelerator: Accelerator, folder: Path, iteration: int) -> None:
    """Record the environment in a run's folder, and start the trackers."""
    if accelerator.is_main_process:
        record_environment(folder, config.dump(), accelerator, iteration)
    if config.trackers:
        accelerator.init_trackers("flowalign", config=flat(config.model_dump(mode="json")))


def show(
    accelerator: Accelerator, title: str, samples: Sequence[tuple[Sample, Mapping[str, Any]]], iteration: int
) -> None:
    """Show samples in the trackers that can show them; only the main process calls this.

    Args:
        title: title of the samples; the tracker shows those of one title together, by iteration.
        samples: each with its 'prompt', its 'reward' and other numbers by name.
    """
    for tracker in accelerator.trackers:
        if samples and tracker.name == "tensorboard":
            _in_tensorboard(tracker.tracker, title, samples, iteration)
        elif samples and tracker.name == "wandb":
            _in_wandb(tracker.tracker, title, samples, iteration)


def show_extremes(accelerator: Accelerator, local: Extremes, iteration: int) -> None:
    """Show the best and the worst samples of an iteration over all processes, which call this together."""
    gathered = Extremes()
    for best, worst in gather_object([(local.best, local.worst)]):
        gathered.add(best, worst)
    if accelerator.is_main_process:
        show(accelerator, "best of an iteration", gathered.best, iteration)
        show(accelerator, "worst of an iteration", gathered.worst, iteration)


def _in_tensorboard(
    writer: Any, title: str, samples: Sequence[tuple[Sample, Mapping[str, Any]]], iteration: int
) -> None:
    """Add a tag for each sample, with its prompt and score below the picture, and a table of all under Text."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    for number, (sample, record) in enumerate(samples):
        if isinstance(sample, str):
            continue
        frames = [captioned(frame, record) for frame in frames_of(sample)]
        image = Summary.Image(
            width=frames[0].width, height=frames[0].height, colorspace=3, encoded_image_string=_encoded(frames)
        )
        value = Summary.Value(tag=f"{title}/{number:02d}", image=image)
        writer.file_writer.add_summary(Summary(value=[value]), iteration)
    writer.add_text(title, _table(samples), iteration)
    writer.flush()


def _in_wandb(run: Any, title: str, samples: Sequence[tuple[Sample, Mapping[str, Any]]], iteration: int) -> None:
    """Log pictures and videos with captions, and texts as a table."""
    import wandb

    media: list[Any] = []
    rows = [[record["reward"], record["prompt"], sample] for sample, record in samples if isinstance(sample, str)]
    for sample, record in samples:
        if isinstance(sample, str):
            continue
        frames = [_sized(frame) for frame in frames_of(sample)]
        if not isinstance(sample, Sequence):
            media.append(wandb.Image(frames[0], caption=_caption(record)))
        else:
            clip = io.BytesIO(_encoded(frames))
            media.append(wandb.Video(clip, caption=_caption(record), format="gif"))
    shown = {title: media} if media else {title: wandb.Table(columns=["reward", "prompt", "text"], data=rows)}
    run.log(shown, step=iteration)


def captioned(picture: Image.Image, record: Mapping[str, Any]) -> Image.Image:
    """A picture with its score and prompt below it."""
    picture = _sized(picture)
    lines = textwrap.wrap(_caption(record), max(picture.width // 7, 1), max_lines=3, placeholder=" ...")
    whole = Image.new("RGB", (picture.width, picture.height + LINE * len(lines) + 4), "white")
    whole.paste(picture)
    write = ImageDraw.Draw(whole)
    for number, line in enumerate(lines):
        write.text((2, picture.height + LINE * number), line, fill="black")
    return whole


def _caption(record: Mapping[str, Any]) -> str:
    return f"{record['reward']:.3f}  {record.get('rewritten', record['prompt'])}"


def _sized(picture: Image.Image) -> Image.Image:
    """Scale a picture that is too small to look at, or too large to keep many of."""
    scale = max(1, -(-LEAST // picture.width)) if picture.width < LEAST else min(1.0, SIDE / max(picture.size))
    size = round(picture.width * scale), round(picture.height * scale)
    return picture.convert("RGB").resize(size, Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS)


def _encoded(frames: Sequence[Image.Image]) -> bytes:
    """Encode a small picture as PNG, a larger one as JPEG, and several as an animated GIF."""
    file = io.BytesIO()
    if len(frames) > 1:
        frames[0].save(file, "gif", save_all=True, append_images=frames[1:], duration=MILLISECONDS, loop=0)
    elif max(frames[0].size) <= 2 * LEAST:
        frames[0].save(file, "png")
    else:
        frames[0].save(file, "jpeg", quality=90)
    return file.getvalue()


def _table(samples: Sequence[tuple[Sample, Mapping[str, Any]]]) -> str:
    """Prompts, scores and texts as a table in Markdown."""
    rows = ["| | reward | scores | prompt | text |", "|---|---|---|---|---|"]
    for number, (sample, record) in enumerate(samples):
        scores = ", ".join(
            f"{name} {value:.3f}"
            for name, value in record.items()
            if isinstance(value, float) and name != "reward" and not name.startswith("statistics/")
        )
        text = sample if isinstance(sample, str) else record.get("rewritten", "")
        cells = [f"{number:02d}", f"{record['reward']:.3f}", scores, record["prompt"], text]
        rows.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
    return "\n".join(rows)


def _cell(text: str) -> str:
    """Escape a text for a cell of a table: no markup, no line breaks."""
    marked = "".join("\\" + character if character in "\\`*_{}[]<>|#" else character for character in text)
    return " ".join(marked.split())
