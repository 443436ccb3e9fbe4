"""The page that a demo ends on: pictures before and after with their prompts, seeds and rewards, and the curves."""

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from jinja2 import Environment, PackageLoader
from PIL.Image import Image, Resampling
from PIL.Image import new as new_image

from flowalign.files import write_atomically
from flowalign.training.evaluation import Evaluated

matplotlib.use("Agg")
from matplotlib import pyplot

CURVES = {"reward/mean": "reward", "policy/clip_fraction": "clip fraction", "policy/gradient_norm": "gradient norm"}


def _embed(data: bytes, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def _picture(image: Image, side: int = 128) -> str:
    buffer = io.BytesIO()
    image.resize((side, side), Resampling.NEAREST).save(buffer, "PNG")
    return _embed(buffer.getvalue(), "png")


def plot_curves(records: Sequence[dict[str, Any]], curves: dict[str, str]) -> str:
    """An SVG of metrics over iterations, as a data address."""
    figure, axes = pyplot.subplots(1, len(curves), figsize=(4 * len(curves), 2.6), layout="constrained")
    for axis, (key, title) in zip(axes, curves.items(), strict=True):
        axis.plot([r["iteration"] for r in records], [r[key] for r in records], linewidth=1)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("iteration", fontsize=8)
        axis.tick_params(labelsize=7)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg")
    pyplot.close(figure)
    return _embed(buffer.getvalue(), "svg+xml")


def contact_sheet(before: Evaluated, after: Evaluated, columns: int = 6, rows: int = 2, side: int = 96) -> Image:
    """Pairs of pictures, before left of after, spread over the evaluation."""
    gap, count = 8, columns * rows
    sheet = new_image("RGB", (columns * (2 * side + 3 * gap), rows * (side + 2 * gap)), "white")
    step = max(1, len(before.samples) // count)
    for n, i in enumerate(range(0, step * count, step)):
        x, y = (n % columns) * (2 * side + 3 * gap) + gap, (n // columns) * (side + 2 * gap) + gap
        for k, image in enumerate((before.samples[i], after.samples[i])):
            sheet.paste(image.resize((side, side), Resampling.NEAREST), (x + k * (side + gap // 2), y))
    return sheet


def write_report(
    folder: Path, before: Evaluated, after: Evaluated, records: Sequence[dict[str, Any]], pairs: int = 48
) -> Path:
    """Write index.html and before_after.png into the run's folder, pictures spread over the evaluation."""
    step = max(1, len(before.prompts) // pairs)
    rows = [
        {
            "prompt": before.prompts[i],
            "seed": before.seeds[i],
            "before": _picture(before.samples[i]),
            "after": _picture(after.samples[i]),
            "reward_before": before.value[i],
            "reward_after": after.value[i],
        }
        for i in range(0, len(before.prompts), step)
    ]
    page = Environment(loader=PackageLoader("flowalign"), autoescape=True).get_template("report.html")
    path = folder / "index.html"
    text = page.render(
        name=folder.name,
        rows=rows,
        before=before.means()["all"],
        after=after.means()["all"],
        curves=plot_curves(records, CURVES),
    )
    write_atomically(path, text)
    contact_sheet(before, after).save(folder / "before_after.png")
    return path
