"""Runs of a language model in the gallery: what is read, what a trainer saves, and the page in real Chromium."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flowalign.app.gallery import Group, build, save_previews
from flowalign.config import load, recipe
from flowalign.data import Preferences
from flowalign.errors import ConfigError
from flowalign.reward_training.judge import questions
from flowalign.training import Trainer
from tests.flowalign.app.gallery import test_browser

browser, open_page = test_browser.browser, test_browser.open_page
in_chromium = [mark for mark in test_browser.pytestmark]
LONG = "2,000 characters or so. " * 84
HOSTILE = [
    "</script><script>document.title='run'</script>",
    "\"><img src=x onerror=\"document.title='run'\"> & 'quoted' <b>bold</b>",
    "\u05e9\u05dc\u05d5\u05dd right to left \u0645\u0631\u062d\u0628\u0627 \u202eturned",
    "",
    LONG,
    "two\nlines\ttab",
]


def page_data(page: Path) -> Any:
    text = page.read_text()
    start = text.index('id="data">') + len('id="data">')
    return json.loads(text[start : text.index("</script>", start)])


def make_run(folder: Path) -> Path:
    """Six prompts at three moments, hostile texts among them, and two groups with tokens."""
    for moment, iteration in enumerate((0, 10, 20)):
        place = folder / "samples" / f"iteration-{iteration:06d}"
        place.mkdir(parents=True)
        lines = []
        for i, text in enumerate(HOSTILE):
            own = text if moment == 2 else f"text {i} of moment {moment}"
            record = {"prompt": f"prompt {i}", "seed": i, "metadata": {"category": "even" if i % 2 == 0 else "odd"}}
            lines.append(json.dumps({"text": own, **record, "reward": (i * (moment + 1)) % 4 / 4}))
        (place / "samples.jsonl").write_text("\n".join(lines) + "\n")
        pieces = [("<b>", -0.1, 0.5, 1.0), ("\u05e9", -2.0, 1.5, 1.0), ("", -0.01, 0.05, 1.0)]
        worse = [(piece, chance, entropy, -advantage) for piece, chance, entropy, advantage in pieces]
        groups = [
            Group(
                prompt=f"sum {n}",
                seeds=[5, 6],
                samples=["<b>\u05e9", HOSTILE[n]],
                rewards=[1.0, 0.0],
                advantages=[1.0, -1.0],
                parts={"exact": [1, 0]},
                tokens=[pieces, worse],
            )
            for n in range(2)
        ]
        save_previews(folder, iteration, groups=groups)
    return folder


@pytest.fixture(scope="module")
def text_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    return build([make_run(folder / "run")], folder / "out")


def test_texts_and_their_tokens_are_read_as_they_are(text_page: Path) -> None:
    data = page_data(text_page)
    assert len(data["columns"]) == 3 and len(data["rows"]) == 6 and not data["runs"][0]["notes"]
    assert data["texts"][-6:] == HOSTILE
    member = data["previews"][-1]["groups"][1]["members"][1]
    assert member["text"] == HOSTILE[1] and member["picture"] is None
    assert member["tokens"][1] == ["\u05e9", -2.0, 1.5, -1.0]
    assert 'href="#vote"' not in text_page.read_text() and 'href="#tokens"' in text_page.read_text()


def test_broken_tokens_are_left_out_and_the_text_stays(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    line = {"prompt": "p", "members": [{"text": "kept", "tokens": [["a", 1]]}, {"text": "too", "tokens": "x"}]}
    (run / "previews" / "iteration-000020" / "groups.jsonl").write_text(json.dumps(line))
    members = page_data(build([run], tmp_path / "out"))["previews"][-1]["groups"][0]["members"]
    assert [(m["text"], m["tokens"]) for m in members] == [("kept", []), ("too", [])]


def test_a_run_saves_its_groups_token_by_token(tmp_path: Path) -> None:
    settings = [
        "training.iterations=1",
        "training.prompts_per_iteration=2",
        "training.previews=2",
        "evaluation.limit=6",
        "evaluation.every=1",
        f"output={tmp_path}",
        "name=run",
    ]
    run = Trainer(load(recipe("tiny_lm/chord"), settings), progress=False)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    run.evaluate()
    assert torch.equal(torch.get_rng_state(), state)
    assert run.policy.forwards == 0 and run.scorer.calls == 0
    run.train()
    data = page_data(build([tmp_path / "run"], tmp_path / "out"))
    assert len(data["columns"]) == 2 and len(data["rows"]) == 6
    (group, _) = data["previews"][0]["groups"]
    assert len(group["members"]) == 8
    for member in group["members"]:
        assert "".join(piece for piece, *_ in member["tokens"]) == member["text"]
        made = run.policy.tokenizer(member["text"], add_special_tokens=False).input_ids
        assert len(member["tokens"]) == len(made) + 1 and member["tokens"][-1][0] == ""
        assert all(chance <= 0 and entropy >= 0 for _, chance, entropy, _ in member["tokens"])


class TestInChromium:
    pytestmark = in_chromium

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    @pytest.mark.parametrize("width", [1280, 390])
    @pytest.mark.parametrize("view", ["grid", "compare?row=4", "groups?entry=1", "tokens", "tokens?at=0", "curves"])
    def test_every_view_opens_from_disk(self, open_page, text_page, view, width, scheme):
        page = open_page(f"file://{text_page}#{view}", width, 844, scheme)
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        assert page.evaluate(test_browser.CONTRAST) == []
        assert page.title().startswith("run") and page.evaluate("document.images.length") == 0

    def test_texts_are_shown_as_text(self, open_page, text_page):
        page = open_page(f"file://{text_page}")
        for i, text in enumerate(HOSTILE):
            page.goto(f"file://{text_page}#compare?row={i}&a=0&b=2")
            page.wait_for_selector(f".prompt >> text=prompt {i}")
            shown = page.locator(".pair .written").nth(1)
            assert shown.evaluate("node => node.textContent") == (text or "(empty)")
            assert shown.locator("b, img, script").count() == 0
        page.goto(f"file://{text_page}#compare?row=2&a=0&b=2")
        page.wait_for_selector(".prompt >> text=prompt 2")
        direction = "node => getComputedStyle(node).direction"
        assert page.locator(".pair .written bdi").nth(1).evaluate(direction) == "rtl"
        assert page.locator(".pair .written bdi").nth(0).evaluate(direction) == "ltr"
        assert page.locator("button", has_text="Slider").count() == 0
        page.keyboard.press("2")
        assert page.locator(".pair").count() == 1
        page.goto(f"file://{text_page}#compare?row=4&a=0&b=2")
        page.wait_for_selector(".prompt >> text=prompt 4")
        assert page.locator(".pair .written").nth(1).bounding_box()["height"] <= 0.6 * 800 + 2

    def test_votes_by_keys_are_exported_as_texts(self, open_page, tmp_path):
        run = make_run(tmp_path / "run")
        code = "from flowalign.app.cli.gallery import gallery; import typer; typer.run(gallery)"
        command = [sys.executable, "-c", code, str(run), "-o", str(tmp_path / "out"), "--serve", "--port", "0"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            page = open_page(re.search(r"http://\S+", server.stdout.readline())[0] + "#vote")
            page.get_by_label("Your name").fill("Ada")
            page.keyboard.press("Enter")
            page.get_by_text("0 of 6 judged").wait_for()
            picked = {}
            for done in range(1, 7):
                prompt = page.locator(".ballot h2").inner_text()
                sides = page.locator(".ballot .pair .written")
                assert sides.count() == 2 and page.locator(".ballot img").count() == 0
                left, right = sides.nth(0).inner_text(), sides.nth(1).inner_text()
                # what the last moment wrote, whichever side it is on
                wins = "left" if "of moment 0" in right else "right"
                picked[prompt] = left if wins == "left" else right
                assert "of moment 0" in (right if wins == "left" else left)
                page.keyboard.press("ArrowLeft" if wins == "left" else "ArrowRight")
                page.get_by_text(f"{done} of 6 judged").wait_for()
            assert page.title() != "run"
            page.get_by_role("button", name="Results").click()
            page.wait_for_selector(".results table")
            with page.expect_download() as download:
                page.get_by_role("link", name="Download").click()
            download.value.save_as(tmp_path / "preferences.jsonl")
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(20)
            server.stdout.close()
        lines = [json.loads(line) for line in (tmp_path / "preferences.jsonl").read_text().splitlines()]
        chosen = {line["prompt"]: line["chosen"] for line in lines}
        assert chosen == {f"prompt {i}": text for i, text in enumerate(HOSTILE)}
        assert all(line["rejected"] == f"text {line['seed']} of moment 0" for line in lines)
        pairs = Preferences.read(str(tmp_path / "preferences.jsonl"), where={"rater": ["Ada"]})
        asked = questions(pairs, "text_better")
        assert [record["answer"] for record in asked] == ["A", "B"] * 6
        assert "Answer A: " + lines[0]["chosen"] in asked[0]["prompt"] and "Answer B: text" in asked[0]["prompt"]
        with pytest.raises(ConfigError, match="between texts; text_better asks about those"):
            questions(pairs, "reward_dance_pair")
        with pytest.raises(ConfigError, match="pictures are wanted"):
            pairs.of_pictures()

    def test_sorts_and_filters_like_pictures(self, open_page, text_page):
        page = open_page(f"file://{text_page}")
        status = page.get_by_role("status")
        assert "6 of 6" in status.inner_text()
        page.get_by_role("searchbox").fill("RIGHT TO LEFT")
        assert "1 of 6" in status.inner_text()
        page.get_by_role("searchbox").fill("")
        page.get_by_label("Category").select_option("odd")
        assert "3 of 6" in status.inner_text()
        page.get_by_label("Category").select_option("")
        page.get_by_label("Order").select_option("best")
        assert page.locator(".caption .prompt").first.inner_text() == "prompt 1"
        page.get_by_text("Filter by score").click()
        page.get_by_label("Score from").fill("0.7")
        assert "2 of 6" in status.inner_text()
        page.locator(".cell").first.focus()
        page.keyboard.press("Enter")
        page.wait_for_selector(".pair .written")

    def test_tokens_are_shaded_by_what_is_chosen(self, open_page, text_page):
        page = open_page(f"file://{text_page}#tokens")
        shades = "nodes => nodes.map((node) => node.style.background)"
        tokens = page.locator(".lines li").first.locator(".token")
        assert tokens.evaluate_all("nodes => nodes.map((node) => node.textContent)") == ["<b>", "\u05e9", "▪"]
        surprise = tokens.evaluate_all(shades)
        assert "3%" in surprise[0] and "24%" in surprise[1] and "0%" in surprise[2]
        page.get_by_label("Shade by").select_option("advantage")
        assert all("--up" in shade and "28%" in shade for shade in tokens.evaluate_all(shades))
        worse = page.locator(".lines li").nth(1).locator(".token")
        assert all("--down" in shade for shade in worse.evaluate_all(shades))
        assert "advantage −1" in worse.first.get_attribute("title")
        page.locator(".lines summary").first.click()
        assert page.locator(".lines table").first.locator("tbody tr").nth(1).inner_text().split() == [
            "\u05e9",
            "-2",
            "1.5",
            "1",
        ]
        page.keyboard.press("[")
        assert page.get_by_label("Moment").input_value() == "1"
