"""Samples in a notebook, a window or a terminal."""

import base64
import builtins
import html
import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont, ImageOps

from flowalign.runs.previews import Film
from flowalign.runs.samples import Picture, frames_of

SIDE = 192
"""Pixels of a picture in a grid."""
FONT = 16
"""Pixels of a caption's letters."""
LINES = 7
"""Most lines of a caption."""
STATES = 6
"""Pictures in a row of a film."""
GAP = 16
"""Pixels around and between pictures."""
INK = "#1b1d21"


@dataclass(repr=False)
class Grid:
    """Rows of pictures with captions; a video is shown by its middle frame, a sound by a drawing of its loudness. A
    notebook displays the grid itself."""

    rows: Sequence[Sequence[Picture]]
    captions: Sequence[Sequence[str]]
    """Caption of each picture, '' for none."""

    def __repr__(self) -> str:
        return f"Grid({len(self.rows)} rows of {max(map(len, self.rows))} pictures)"

    @property
    def image(self) -> Image.Image:
        """The grid as one picture."""
        font = ImageFont.load_default(FONT)
        # a row is as high as its longest caption
        captions = [["\n".join(_lines(text, font)) for text in texts] for texts in self.captions]
        heights = [(FONT + 5) * max(1 + text.count("\n") if text else 0 for text in texts) for texts in captions]
        width = GAP + (SIDE + GAP) * max(map(len, self.rows))
        whole = Image.new("RGB", (width, GAP + sum(SIDE + 8 + height + GAP for height in heights)), "white")
        write, top = ImageDraw.Draw(whole), GAP
        for row, texts, height in zip(self.rows, captions, heights, strict=True):
            for j, (picture, text) in enumerate(zip(row, texts, strict=True)):
                left = GAP + (SIDE + GAP) * j
                whole.paste(_small(picture), (left, top))
                write.multiline_text((left, top + SIDE + 6), text, fill=INK, font=font, spacing=4)
            top += SIDE + 8 + height + GAP
        return whole

    def save(self, path: str | Path) -> None:
        """Write the grid as one picture."""
        self.image.save(path)

    def show(self) -> None:
        """Show the grid in the cell of a notebook, else in the system's viewer."""
        # IPython adds this builtin
        if hasattr(builtins, "get_ipython"):
            from IPython.display import display

            display(self)
        else:
            self.image.show()

    def _repr_html_(self) -> str:
        cells = [
            "".join(
                f"<td style='text-align:center'>{_tag(picture)}<br><small>{html.escape(text)}</small></td>"
                for picture, text in zip(row, texts, strict=True)
            )
            for row, texts in zip(self.rows, self.captions, strict=True)
        ]
        return "<table>" + "".join(f"<tr>{row}</tr>" for row in cells) + "</table>"


@dataclass(repr=False)
class Texts:
    """Prompts with the texts before training and after. A notebook shows it as a table."""

    prompts: Sequence[str]
    before: Sequence[str]
    after: Sequence[str]

    def __repr__(self) -> str:
        rows = zip(self.prompts, self.before, self.after, strict=True)
        return "\n".join(f"{prompt}\n  before: {before}\n  after:  {after}" for prompt, before, after in rows)

    def _repr_html_(self) -> str:
        rows = zip(self.prompts, self.before, self.after, strict=True)
        cells = ("".join(f"<td>{html.escape(text)}</td>" for text in row) for row in rows)
        head = "<tr><th>prompt</th><th>before</th><th>after</th></tr>"
        return f"<table>{head}" + "".join(f"<tr>{row}</tr>" for row in cells) + "</table>"


def strip(film: Film, metrics: Mapping[str, float]) -> Grid:
    """A film's pictures, each with what the step before it earned.

    Args:
        metrics: metrics of an iteration of training, with `dense/persistence/k` where it was measured.
    """
    captions = ["Start noise" if film.rewards is None else f"Start noise\nreward {film.rewards[0]:.3g}\n{film.prompt}"]
    for k in range(len(film.pictures) - 1):
        lines = [f"Step {k + 1}"]
        if film.noise is not None and film.noise[k]:
            lines.append(f"noise {film.noise[k]:.3g}")
        if film.rewards is not None:
            lines.append(f"reward {film.rewards[k + 1]:.3g}, gain {film.rewards[k + 1] - film.rewards[k]:+.3g}")
        if film.advantages is not None and not math.isnan(film.advantages[k]):
            kind = "advantage" if film.sparse is None else "dense advantage"
            lines.append(f"{kind} {film.advantages[k]:+.3g}")
            lines += [] if film.sparse is None else [f"sparse advantage {film.sparse:+.3g}"]
        if film.ratios is not None and not math.isnan(film.ratios[k]):
            lines.append(f"ratio {film.ratios[k]:.4g}")
        lasts = metrics.get(f"dense/persistence/{k + 1}")
        captions.append("\n".join([*lines, *([] if lasts is None else [f"persistence {lasts:.2f}"])]))
    rows = range(0, len(film.pictures), STATES)
    return Grid([film.pictures[row : row + STATES] for row in rows], [captions[row : row + STATES] for row in rows])


def _lines(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> list[str]:
    """The text in lines that are as wide as a picture at most, and as many as `LINES`."""
    lines: list[str] = []
    for line in text.splitlines():
        begin = len(lines)
        for word in line.split():
            longer = f"{lines[-1]} {word}" if len(lines) > begin else word
            if len(lines) > begin and font.getlength(longer) <= SIDE:
                lines[-1] = longer
            else:
                # a word wider than a picture, as in languages without spaces, goes on in the next line
                lines += textwrap.wrap(word, max(1, int(len(word) * SIDE / max(SIDE, font.getlength(word)))))
    return lines if len(lines) <= LINES else [*lines[: LINES - 1], "..."]


def _small(picture: Picture) -> Image.Image:
    frames = frames_of(picture)
    frame = frames[len(frames) // 2]
    # a tiny model's pixels stay sharp
    way = Image.Resampling.NEAREST if 2 * max(frame.size) < SIDE else Image.Resampling.LANCZOS
    return ImageOps.pad(frame.convert("RGB"), (SIDE, SIDE), way, "white")


def _tag(picture: Picture) -> str:
    file = io.BytesIO()
    _small(picture).save(file, "png")
    return f"<img src='data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}'>"
