"""What tensorboard and wandb show of a run is what the run made: read back from their files."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image, ImageSequence
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from flowalign.training import Trainer
from flowalign.training.tracking import captioned, show
from tests.flowalign.training.small_run import settings

FRAMES = [Image.new("RGB", (16, 16), colour) for colour in ("red", "green", "blue")]


def events(folder: Path) -> EventAccumulator:
    (file,) = folder.glob("events*")
    read = EventAccumulator(str(file), {"images": 0, "tensors": 0, "scalars": 0})
    return read.Reload()


def text(read: EventAccumulator, title: str) -> list[tuple[int, str]]:
    return [(own.step, own.tensor_proto.string_val[0].decode()) for own in read.Tensors(f"{title}/text_summary")]


def picture(read: EventAccumulator, tag: str, step: int) -> Image.Image:
    (encoded,) = (own.encoded_image_string for own in read.Images(tag) if own.step == step)
    return Image.open(io.BytesIO(encoded))


def test_a_run_shows_fixed_prompts_over_time_and_the_extremes_of_iterations(tmp_path: Path) -> None:
    evaluation = {"prompts": "shapes_heldout", "limit": 3, "every": 1, "save_samples": 2, "steps": 3}
    changes: dict[str, Any] = {"trackers": ["tensorboard"], "show_every": 2, "training.iterations": 3}
    changes |= {"training.previews": 0, "training.checkpoint_every": 0, "evaluation": evaluation}
    run = Trainer(settings(tmp_path, **changes), progress=False)
    collect, seen = run.collect, []
    run.collect = lambda *given: seen.append(collect(*given)) or seen[-1]
    run.train()

    read = events(run.folder / "flowalign")
    # fixed prompts at every evaluation, and the iterations 0 and 2 as the metrics count them at 1 and 3
    extremes = {f"{which} of an iteration/0{n}": [1, 3] for which in ("best", "worst") for n in range(4)}
    expected = extremes | {f"held-out/0{n}": [0, 1, 2, 3] for n in range(2)}
    assert {tag: [own.step for own in read.Images(tag)] for tag in read.Tags()["images"]} == expected
    for step in range(4):
        folder = run.folder / f"samples/iteration-{step:06d}"
        lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
        table = dict(text(read, "held-out"))[step]
        for number, line in enumerate(lines):
            kept = captioned(Image.open(folder / line["picture"]), line)
            assert picture(read, f"held-out/0{number}", step).tobytes() == kept.tobytes()
            assert f"{line['reward']:.3f}" in table and line["prompt"] in table
    for experience, step in ((seen[0], 1), (seen[2], 3)):
        # one of each of the two prompts, then what is left
        groups = experience.scores.value.view(2, 4).sort(1).values
        rest = groups[:, 1:].flatten().sort().values[:2], groups[:, :-1].flatten().sort().values[-2:]
        worst, best = (
            torch.cat([groups[:, 0], rest[0]]).sort().values,
            torch.cat([groups[:, -1], rest[1]]).sort().values,
        )
        for title, values in (("worst", worst.tolist()), ("best", best.tolist()[::-1])):
            lines = dict(text(read, f"{title} of an iteration"))[step].splitlines()[2:]
            assert [line.split(" | ")[1] for line in lines] == [f"{value:.3f}" for value in values]


def test_videos_move_and_texts_stand_as_they_are(tmp_path: Path) -> None:
    writer = SummaryWriter(str(tmp_path))
    tracker = SimpleNamespace(trackers=[SimpleNamespace(name="tensorboard", tracker=writer)])
    show(tracker, "clips", [(FRAMES, {"prompt": "a | *clip*", "reward": 0.5, "soft": 0.25})], 7)
    show(tracker, "words", [("two\nlines <b>", {"prompt": "say it", "reward": -1.0})], 7)
    writer.close()
    read = events(tmp_path)
    clip = picture(read, "clips/00", 7)
    assert clip.format == "GIF" and clip.width == 192
    middles = [frame.convert("RGB").getpixel((96, 96)) for frame in ImageSequence.Iterator(clip)]
    assert middles == [(255, 0, 0), (0, 128, 0), (0, 0, 255)]
    assert r"| 00 | 0.500 | soft 0.250 | a \| \*clip\* |" in text(read, "clips")[0][1]
    assert r"say it | two lines \<b\> |" in text(read, "words")[0][1]
    assert read.Tags()["images"] == ["clips/00"]


@pytest.mark.slow
def test_tensorboard_shows_them_in_a_browser(tmp_path: Path) -> None:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if chromium is None:
        pytest.skip("no chromium on the PATH (apt-get install chromium)")
    writer = SummaryWriter(str(tmp_path / "run"))
    tracker = SimpleNamespace(trackers=[SimpleNamespace(name="tensorboard", tracker=writer)])
    for step in range(2):
        show(tracker, "held-out", [(FRAMES, {"prompt": "a clip", "reward": 0.5})], step)
    writer.close()
    command = [
        sys.executable,
        "-m",
        "tensorboard.main",
        "--logdir",
        str(tmp_path),
        "--port",
        "0",
        "--host",
        "127.0.0.1",
    ]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        address = next(found[0] for line in server.stdout if (found := re.search(r"http://[\d.:]+/", line)))
        with sync_api.sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            page = browser.new_page()
            page.goto(f"{address}#images")
            view = page.locator("tf-image-loader img")
            view.wait_for(timeout=60_000)
            assert view.evaluate("async (own) => { await own.decode(); return own.naturalWidth; }") == 192
            page.goto(f"{address}#text")
            page.locator("tf-text-loader td", has_text="a clip").first.wait_for(timeout=60_000)
            browser.close()
    finally:
        server.terminate()
        server.communicate(timeout=20)


def test_wandb_gets_pictures_videos_and_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is not installed (pip install 'flowalign[track]')")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = wandb.init(project="flowalign", dir=str(tmp_path), mode="offline")
    tracker = SimpleNamespace(trackers=[SimpleNamespace(name="wandb", tracker=run)])
    record = {"prompt": "a thing", "reward": 0.25}
    show(tracker, "held-out", [(FRAMES[0], record), (FRAMES[1], record)], 3)
    show(tracker, "clips", [(FRAMES, record)], 3)
    show(tracker, "words", [("said", record)], 3)
    run.finish()
    # the file that `wandb sync` sends
    logged = next(tmp_path.rglob("*.wandb")).read_bytes()
    assert all(name in logged for name in (b"held-out", b"clips", b"words", b"0.250  a thing"))
    media = next(tmp_path.rglob("media"))
    pictures = {Image.open(file).convert("RGB").getpixel((0, 0)) for file in media.rglob("*.png")}
    assert pictures == {(255, 0, 0), (0, 128, 0)}
    (clip,) = media.rglob("*.gif")
    assert Image.open(clip).n_frames == 3
    (table,) = media.rglob("*.table.json")
    assert json.loads(table.read_text())["data"] == [[0.25, "a thing", "said"]]
