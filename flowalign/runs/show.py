"""Pictures in a notebook or a window."""

import base64
import builtins
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageOps

from flowalign.runs.samples import Picture

SIDE = 192
"""pixels of a picture in a grid"""
CAPTION = 14
"""pixels of a line of text"""


@dataclass(repr=False)
class Grid:
    """Rows of pictures with a caption each; of a video the middle frame. A notebook shows it as it is."""

    rows: Sequence[Sequence[Picture]]
    captions: Sequence[Sequence[str]]
    """one a picture, '' for none"""

    def __repr__(self) -> str:
        return f"Grid({len(self.rows)} rows of {max(map(len, self.rows))} pictures)"

    @property
    def image(self) -> Image.Image:
        """All in one picture."""
        width, height = SIDE * max(map(len, self.rows)), (SIDE + CAPTION) * len(self.rows)
        whole = Image.new("RGB", (width, height), "white")
        write = ImageDraw.Draw(whole)
        for i, (row, texts) in enumerate(zip(self.rows, self.captions, strict=True)):
            for j, (picture, text) in enumerate(zip(row, texts, strict=True)):
                corner = SIDE * j, (SIDE + CAPTION) * i
                whole.paste(_small(picture), corner)
                write.text((corner[0] + 2, corner[1] + SIDE), text[: SIDE // 6], fill="black")
        return whole

    def save(self, path: str | Path) -> None:
        """Write the picture of all."""
        self.image.save(path)

    def show(self) -> None:
        """Show them: in the cell of a notebook, else in the system's viewer."""
        # which IPython puts there
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


def _small(picture: Picture) -> Image.Image:
    frame = picture if isinstance(picture, Image.Image) else picture[len(picture) // 2]
    return ImageOps.pad(frame.convert("RGB"), (SIDE, SIDE), Image.Resampling.LANCZOS, "white")


def _tag(picture: Picture) -> str:
    file = io.BytesIO()
    _small(picture).save(file, "png")
    return f"<img src='data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}'>"
