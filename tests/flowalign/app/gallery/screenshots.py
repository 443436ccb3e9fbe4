"""The pictures of docs/gallery.md: the served gallery of runs in Chromium, light and dark, wide and narrow.

python tests/flowalign/app/gallery/screenshots.py RUN [RUN ...] [--views grid "film?at=0" ...] [--output docs/images]
"""

import argparse
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from io import BytesIO
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

VIEWS = ["grid?sort=improved", "compare?mode=slider", "film", "groups", "curves", "vote"]
CODE = "from flowalign.app.cli.gallery import gallery; import typer; typer.run(gallery)"


def shoot(page: Page, address: str, view: str, path: Path) -> None:
    page.goto("about:blank")
    page.goto(f"{address}#{view}")
    page.wait_for_selector("main > *")
    if view == "vote":
        page.get_by_label("Your name").fill("Ada")
        page.keyboard.press("Enter")
        page.wait_for_selector(".ballot img")
    page.wait_for_timeout(500)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.open(BytesIO(page.screenshot())).convert("RGB").quantize(192, dither=Image.Dither.NONE).save(
        path, optimize=True
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--views", nargs="+", default=VIEWS)
    parser.add_argument("--output", type=Path, default=Path("docs/images"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        command = [sys.executable, "-c", CODE, *map(str, arguments.runs), "-o", folder, "--serve", "--port", "0"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        address = re.search(r"http://\S+", server.stdout.readline())[0]
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for width, height in ((1280, 720), (390, 780)):
            for scheme in ("light", "dark"):
                page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
                for view in arguments.views:
                    # tall enough for the verdicts below the members
                    page.set_viewport_size({"width": width, "height": 1000 if view.startswith("groups") else height})
                    name = f"gallery-{view.split('?')[0]}-{width}-{scheme}.png"
                    shoot(page, address, view, arguments.output / name)
                page.close()
        browser.close()
        server.send_signal(signal.SIGTERM)
        server.wait()


if __name__ == "__main__":
    main()
