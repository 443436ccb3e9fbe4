"""The pictures of docs/gallery.md: the served gallery of runs in Chromium, light and dark, wide and narrow.

With --axe, also the violations of accessibility that axe-core finds in each view (npm install axe-core).

python tests/flowalign/app/gallery/screenshots.py RUN [RUN ...] [--views grid "film?at=0" ...]
    [--widths 1440 768 390] [--votes votes.sqlite] [--axe node_modules/axe-core/axe.min.js] [--output docs/images]
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
    page.goto(f"{address}#{view.replace('results', 'vote')}")
    page.wait_for_selector("main > *")
    if view.startswith("results"):
        page.get_by_role("button", name="Results").click()
        page.wait_for_selector(".results table")
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
    parser.add_argument("--widths", type=int, nargs="+", default=[1280, 390])
    parser.add_argument("--votes", type=Path, help="a votes.sqlite to show the results of")
    parser.add_argument("--axe", type=Path)
    parser.add_argument("--output", type=Path, default=Path("docs/images"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        if arguments.votes:
            shutil.copy(arguments.votes, Path(folder) / "votes.sqlite")
        command = [sys.executable, "-c", CODE, *map(str, arguments.runs), "-o", folder, "--serve", "--port", "0"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        address = re.search(r"http://\S+", server.stdout.readline())[0]
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for width in arguments.widths:
            height = 720 if width > 1000 else 780
            for scheme in ("light", "dark"):
                size = {"width": width, "height": height}
                page = browser.new_page(viewport=size, color_scheme=scheme, bypass_csp=arguments.axe is not None)
                for view in arguments.views:
                    # tall enough for what stands below the pictures
                    tall = view.startswith(("groups", "search", "film", "slider", "results"))
                    page.set_viewport_size({"width": width, "height": 1060 if tall else height})
                    name = f"gallery-{view.split('?')[0]}-{width}-{scheme}.png"
                    shoot(page, address, view, arguments.output / name)
                    if arguments.axe:
                        page.evaluate(arguments.axe.read_text())
                        found = page.evaluate("axe.run()")["violations"]
                        print(name, len(found), *(violation["id"] for violation in found))
                page.close()
        browser.close()
        server.send_signal(signal.SIGTERM)
        server.wait()


if __name__ == "__main__":
    main()
