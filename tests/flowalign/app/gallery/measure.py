"""How long the gallery of a large run takes to build, to rebuild after one more checkpoint, and to open.

python tests/flowalign/app/gallery/measure.py [--prompts 500] [--moments 20] [--side 512] [--foreign]

The pictures are noise of every scale, as hard to compress as photographs: 64 different ones, which stand under all the
names. `--foreign` leaves out the thumbnails that flowalign's trainer saves, as in runs that something else wrote.
"""

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from flowalign.app.gallery import build, save_samples

DIFFERENT = 64


def photo(side: int, rng: np.random.Generator) -> Image.Image:
    """Noise whose amplitude falls with its frequency."""
    total = np.zeros((side, side, 3))
    for size in (2**k for k in range(2, side.bit_length())):
        layer = (rng.normal(size=(size, size, 3)) * size**-0.9).astype(np.float32)
        channels = [Image.fromarray(layer[..., c]).resize((side, side), Image.Resampling.BICUBIC) for c in range(3)]
        total += np.stack([np.asarray(channel) for channel in channels], -1)
    total = (total - total.min()) / (total.max() - total.min())
    return Image.fromarray((255 * total).astype(np.uint8))


def add_moment(run: Path, iteration: int, prompts: int, source: Path, foreign: bool) -> None:
    """A moment whose pictures are links to those of `source`."""
    folder = run / "samples" / f"iteration-{iteration:06d}"
    (folder / "thumbnails").mkdir(parents=True)
    lines = []
    for i in range(prompts):
        number, name = (i * 7 + iteration) % DIFFERENT, f"{i:05d}.png"
        os.link(source / f"{number:05d}.png", folder / name)
        if not foreign:
            os.link(source / "thumbnails" / f"{number:05d}.png.jpg", folder / "thumbnails" / f"{name}.jpg")
        record = {"picture": name, "prompt": f"prompt {i} of a photograph", "seed": i, "reward": number / DIFFERENT}
        lines.append(json.dumps(record) + "\n")
    (folder / "samples.jsonl").write_text("".join(lines))


def report(name: str, work: Callable[[], object], processor: Callable[[], float] = time.process_time) -> None:
    """Seconds of the clock, and of the processor, which other programs on the machine disturb less."""
    wall, cpu = time.perf_counter(), processor()
    work()
    print(f"{name:<40} {processor() - cpu:6.1f} CPU s {time.perf_counter() - wall:6.1f} s")


def open_page(page: Path) -> None:
    """From opening the page until every picture in the window is there, and scrolling, slowly and a screen a frame."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        session = browser.new_browser_cdp_session()

        def processor() -> float:
            return sum(process["cpuTime"] for process in session.send("SystemInfo.getProcessInfo")["processInfo"])

        tab = browser.new_page(viewport={"width": 1280, "height": 800})

        def first_view() -> None:
            tab.goto(f"file://{page}")
            tab.wait_for_selector(".cell img")
            while not tab.evaluate("[...document.images].every((image) => image.complete)"):
                tab.wait_for_timeout(10)

        def scroll(step: int, frames: int) -> None:
            tab.evaluate(
                """async ([step, frames]) => { scrollTo(0, 0); for (let i = 0; i < frames; i++) {
                  scrollBy(0, step); await new Promise(requestAnimationFrame); } }""",
                [step, frames],
            )

        report("first view", first_view, processor)
        tab.goto("about:blank")
        report("first view, again", first_view, processor)
        report("60 screens, half a screen a frame", lambda: scroll(400, 120), processor)
        report("120 screens, a screen a frame", lambda: scroll(800, 120), processor)
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("prompts", 500), ("moments", 20), ("side", 512)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--foreign", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rng, root = np.random.default_rng(0), Path(folder)
        source = save_samples(root / "source", 0, ((photo(arguments.side, rng), {}) for _ in range(DIFFERENT)))
        size = np.mean([path.stat().st_size for path in source.glob("*.png")])
        count = arguments.prompts * arguments.moments
        print(f"{count} pictures of {arguments.side} pixels, {size / 1000:.0f} kB each")
        for moment in range(arguments.moments):
            add_moment(root / "run", 10 * moment, arguments.prompts, source, arguments.foreign)
        report("build", lambda: build([root / "run"], root / "gallery"))
        add_moment(root / "run", 10 * arguments.moments, arguments.prompts, source, arguments.foreign)
        report("build after one more checkpoint", lambda: build([root / "run"], root / "gallery"))
        open_page(root / "gallery" / "index.html")


if __name__ == "__main__":
    main()
