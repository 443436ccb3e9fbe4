"""Votes on a run that goes on: the served gallery shows what is new, and the next iterations learn what was chosen."""

import http.client
import io
import json
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvicorn
from PIL import Image

from flowalign.algorithms.matching.dpo import DPO
from flowalign.app.gallery.server import LiveGallery, application
from flowalign.data.votes import Votes
from flowalign.training import Trainer
from tests.flowalign.training.small_run import settings

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium")
Serve = Callable[[Path], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serves the gallery of a run in a thread; returns host and port."""
    servers = []

    def serve(run: Path) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(application(LiveGallery([run], run / "gallery")), log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        servers.append((server, thread))
        return f"127.0.0.1:{listener.getsockname()[1]}"

    yield serve
    for server, thread in servers:
        server.should_exit = True
        thread.join(20)


def ask(host: str, path: str, body: dict[str, Any] | None = None) -> bytes:
    connection = http.client.HTTPConnection(host, timeout=20)
    headers = {} if body is None else {"Content-Type": "application/json"}
    connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body), headers)
    answer = connection.getresponse().read()
    connection.close()
    return answer


def vote_for_the_darker(host: str, moment: int) -> int:
    """Judge every pair of the samples of one moment; returns how many there were."""
    judged = 0
    while (ballot := json.loads(ask(host, f"/api/next?rater=Ada&a={moment}&b={moment}")))["pair"] is not None:
        light = {
            side: np.asarray(Image.open(io.BytesIO(ask(host, "/" + ballot[side]["picture"])))).mean()
            for side in ("left", "right")
        }
        choice = {"pair": ballot["pair"], "verdict": min(light, key=light.get)}
        ask(host, "/api/vote", {"rater": "Ada", "a": moment, "b": moment, **choice})
        judged += 1
    return judged


def test_votes_reach_the_next_iteration_of_a_running_training(tmp_path: Path, serve: Serve) -> None:
    sampling = {"steps": 3, "sigmas": [1.0, 0.6, 0.3]}
    evaluation = {"prompts": "shapes_heldout", "limit": 2, "samples_per_prompt": 3, "every": 1, "save_samples": 6}
    changes: dict[str, Any] = {"training.iterations": 3, "training.previews": 0, "evaluation": evaluation | sampling}
    changes["rewards"] = [{"name": "votes", "votes": str(tmp_path / "run/gallery/votes.sqlite"), "model": "tiny_clip"}]
    trainer = Trainer(settings(tmp_path, **changes), progress=False)
    run, judged, iterate = trainer.folder, [], trainer.iterate

    def voting() -> None:
        # people look while the run waits for nobody; here it waits, so that the test knows when they have voted
        host = serve(run)
        assert json.loads(ask(host, "/api/moments"))["moments"] == 2
        judged.append(vote_for_the_darker(host, moment=1))

    def iterated() -> dict[str, float]:
        if trainer.iteration == 1:
            people = threading.Thread(target=voting)
            people.start()
            people.join(60)
        return iterate()

    trainer.iterate = iterated  # type: ignore[method-assign]
    trainer.train()
    assert judged == [6], "every two of the three samples of two prompts"
    before, *after = trainer.metrics.read()
    assert before["reward/choices"] == 0 and before["reward/mean"] == before["reward/model"]
    for line in after:
        assert line["reward/choices"] == 6 and line["reward/mean"] != line["reward/model"]
    # and what it learned is what was chosen: the votes speak for dark pictures
    reward = trainer.scorer.reward
    shades = [Image.new("RGB", (32, 32), (level, level, level)) for level in (20, 235)]
    prompt = Votes(run / "gallery/votes.sqlite").of_pictures()[0][0]
    scores = reward(shades, [prompt] * 2, [{}] * 2)
    dark, light = (scores.value - scores.parts["model"]).tolist()
    assert dark > light


def test_votes_are_pairs_of_the_next_iterations(tmp_path: Path, serve: Serve) -> None:
    shades = {"light": 235, "dark": 20}
    for name, level in shades.items():
        Image.new("RGB", (32, 32), (level, level, level)).save(tmp_path / f"{name}.png")
    line = {"prompt": "a red circle", "chosen": "light.png", "rejected": "dark.png", "rater": "nobody"}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(line) + "\n")
    sampling = {"steps": 3, "sigmas": [1.0, 0.6, 0.3]}
    evaluation = {"prompts": "shapes_heldout", "limit": 2, "samples_per_prompt": 3, "every": 1, "save_samples": 6}
    votes = tmp_path / "run/gallery/votes.sqlite"
    changes: dict[str, Any] = {"training.iterations": 3, "training.previews": 0, "evaluation": evaluation | sampling}
    changes |= {"data": {"prompts": str(tmp_path / "pairs.jsonl")}, "training.prompts_per_iteration": 4}
    changes["algorithm"] = {"name": "dpo", "votes": str(votes), "votes_share": 1.0, "min_pairs": 1}
    trainer = Trainer(settings(tmp_path, **changes), progress=False)
    judged, iterate = [], trainer.iterate

    def iterated() -> dict[str, float]:
        if trainer.iteration == 1:
            people = threading.Thread(
                target=lambda: judged.append(vote_for_the_darker(serve(trainer.folder), moment=1))
            )
            people.start()
            people.join(60)
        return iterate()

    trainer.iterate = iterated  # type: ignore[method-assign]
    trainer.train()
    assert judged == [6]
    before, *after = trainer.metrics.read()
    assert before["preference/votes"] == before["preference/votes_share"] == 0
    assert [(line["preference/votes"], line["preference/votes_share"]) for line in after] == [(6, 1), (6, 1)]
    # what it learned from is what was chosen among the run's own samples
    algorithm, drawn = trainer.algorithm, trainer.groups.draw(2).batch
    assert isinstance(algorithm, DPO)
    learned, _ = algorithm.with_votes(drawn, 0)
    assert not set(learned.prompts) & set(drawn.prompts)
    for record in learned.metadata:
        chosen, rejected = (np.asarray(Image.open(record[key])).mean() for key in ("chosen", "rejected"))
        assert chosen < rejected and record["chosen"].startswith(str(trainer.folder))
    half = DPO(DPO.Settings(votes=str(votes), min_pairs=6))
    few = DPO(DPO.Settings(votes=str(votes), min_pairs=7))
    assert few.with_votes(drawn, 0) == (drawn, {"preference/votes": 6, "preference/votes_share": 0})
    shares = [half.with_votes(replace(drawn, iteration=i), 0)[1]["preference/votes_share"] for i in range(200)]
    assert 0.4 < np.mean(shares) < 0.6


def test_an_open_page_is_laid_out_again_where_the_run_has_more(maker, run: Path, serve: Serve) -> None:
    host = serve(run)

    def opened() -> tuple[list[list[int]], bytes]:
        page = ask(host, "/")
        return json.loads(re.search(rb'"columns":(\[\[.*?\]\])', page)[1]), re.search(rb'"reached":"(.*?)"', page)[1]

    columns, reached = opened()
    assert len(columns) == 4 and reached in ask(host, "/assets/newest.js")
    with open(run / "evaluations.jsonl", "a") as lines:
        lines.write(json.dumps({"iteration": 45, "all": {"reward": 0.8}}) + "\n")
    assert reached not in ask(host, "/assets/newest.js"), "of an evaluation without samples it is told too"
    _, reached = opened()
    maker.add_moment(run, 50, ["a red circle number 0"], 0.9)
    assert json.loads(ask(host, "/api/moments"))["moments"] == 5
    assert reached not in ask(host, "/assets/newest.js"), "so the open page knows that it is old"
    columns, reached = opened()
    assert columns[-1] == [0, 50] and reached in ask(host, "/assets/newest.js")
    ballot = json.loads(ask(host, "/api/next?rater=Ada&a=0&b=4"))
    assert ballot["total"] == 1 and ballot["prompt"] == "a red circle number 0"


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH (apt-get install chromium)")
def test_a_browser_is_told_of_new_samples_and_votes_on_them(maker, run: Path, serve: Serve) -> None:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")
    host, texts = serve(run), ["a red circle number 0", "a green circle number 1"]
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(f"http://{host}/#vote?a=0&b=3")
        maker.add_moment(run, 50, texts, 0.9)
        page.get_by_role("button", name="Vote on them").click(timeout=20_000)
        page.get_by_label("Your name").fill("Ada")
        page.get_by_role("button", name="Start").click()
        page.get_by_text("0 of 2 judged").wait_for()
        page.keyboard.press("ArrowLeft")
        page.get_by_text("1 of 2 judged").wait_for()
        browser.close()
    assert not problems
    deadline = time.monotonic() + 10
    while len(Votes(run / "gallery/votes.sqlite").of_pictures()) != 1:
        assert time.monotonic() < deadline
