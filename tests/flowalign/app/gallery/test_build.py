import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from flowalign.app.gallery import build, save_samples
from flowalign.app.gallery.build import POINTS, thinned
from flowalign.app.gallery.runs import read_run
from flowalign.errors import ConfigError

HOSTILE = [
    "</script><script>document.title='run'</script>",
    '"><img src=x onerror="document.title=1">',
    "quotes ' \" ` and\nnewlines\r\nand \x00 and \u2028",
    "\u202eright to left \u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627",
    "long " * 400,
    "a lone surrogate \ud800",
]


def page_data(page: Path) -> dict:
    """The page's data as a browser sees it: up to the first end of a script element."""
    text = page.read_text(encoding="utf-8")
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script', text, re.S)[1])


def notes(page: Path) -> str:
    return "\n".join(note for run in page_data(page)["runs"] for note in run["notes"])


def test_page_holds_every_picture_and_works_without_its_run(run, tmp_path):
    page = build([run], tmp_path / "out")
    data = page_data(page)
    assert data["columns"] == [[0, 0], [0, 10], [0, 20], [0, 30]]
    assert len(data["rows"]) == 12 and len(data["pictures"]) == 48
    assert data["scores"] == ["reward", "soft", "strict"]
    assert data["runs"][0]["warnings"] == [[20, "suspect", "the trained reward rises while panel/aesthetic falls"]]
    assert data["runs"][0]["series"]["held-out all/reward"][0] == [0, 0.3]
    for _, _, name, width, height, _, _ in data["pictures"]:
        with Image.open(page.parent / "pictures" / name) as picture:
            assert picture.size == (width, height)
    # nothing is loaded from elsewhere
    assert "://" not in re.sub(r'<script type="application/json".*?</script', "", page.read_text(), flags=re.S)
    addresses = re.findall(r'(?:src|href)="([^"#]+)"', page.read_text())
    assert all(a == "data:," or (page.parent / a).is_file() for a in addresses)
    film = data["previews"][0]["films"][0]
    assert film["dense"] == pytest.approx([0.05, 0.25, -0.05, 0.35, 0.1, 0.05])


def test_same_seed_stands_in_one_row(run, tmp_path):
    data = page_data(build([str(run)], str(tmp_path / "out")))
    for row, column, name, *_ in data["pictures"]:
        record = json.loads(
            (run / "samples" / f"iteration-{10 * column:06d}" / "samples.jsonl").read_text().split("\n")[row]
        )
        assert [data["prompts"][data["rows"][row][0]], data["rows"][row][1]] == [record["prompt"], str(record["seed"])]
        assert name.endswith(f"iteration-{10 * column:06d}/{record['picture']}")


def test_two_runs_of_the_same_name_are_told_apart(maker, tmp_path):
    runs = [maker.make_run(tmp_path / name / "seed0", prompts=3, moments=2) for name in ("one", "two")]
    data = page_data(build(runs, tmp_path / "out"))
    assert [run["name"] for run in data["runs"]] == ["one/seed0", "two/seed0"]
    assert len({name for _, _, name, *_ in data["pictures"]}) == 12 and len(data["rows"]) == 3


def test_large_pictures_get_small_thumbnails_once(maker, tmp_path):
    run = maker.make_run(tmp_path / "run", prompts=2, moments=2, side=300)
    out = tmp_path / "out"
    build([run], out)
    made = {path: path.stat().st_mtime_ns for path in (out / "thumbnails").rglob("*.jpg")}
    assert len(made) == 4 + 2 * 7 + 2 * 6
    assert all(max(Image.open(path).size) == 192 for path in made)
    maker.add_moment(run, 20, ["a red circle"], 0.9, side=300)
    changed = run / "samples" / "iteration-000010" / "00000.png"
    changed.unlink()
    Image.new("RGB", (400, 300)).save(changed)
    (run / "samples" / "iteration-000000" / "00001.png").unlink()
    build([run], out)
    after = {path: path.stat().st_mtime_ns for path in (out / "thumbnails").rglob("*.jpg")}
    remade = {path.name + path.parent.name for path, time in after.items() if made.get(path) != time}
    assert remade == {"00000.png.jpgiteration-000020", "00000.png.jpgiteration-000010"}
    gone = {path.name + path.parent.name for path in made.keys() - after.keys()}
    assert gone == {"00001.png.jpgiteration-000000"}


def test_the_trainers_thumbnails_are_taken_unless_the_picture_is_newer_or_they_are_elsewhere(maker, tmp_path):
    run = maker.make_run(tmp_path / "run", prompts=3, moments=1, side=300)
    folder, secret = run / "samples" / "iteration-000000", tmp_path / "secret.jpg"
    Image.new("RGB", (192, 192), "red").save(secret)
    (folder / "thumbnails" / "00001.png.jpg").unlink()
    (folder / "thumbnails" / "00001.png.jpg").symlink_to(secret)
    newer = (folder / "thumbnails" / "00002.png.jpg").stat().st_mtime_ns + 1
    os.utime(folder / "00002.png", ns=(newer, newer))
    page = build([run], tmp_path / "out")
    made = [page.parent / "thumbnails" / f"{name}.jpg" for _, _, name, *_ in page_data(page)["pictures"]]
    own = [folder / "thumbnails" / f"{i:05d}.png.jpg" for i in range(3)]
    assert made[0].samefile(own[0]) and not made[2].samefile(own[2])
    assert not made[1].is_symlink() and made[1].read_bytes() != secret.read_bytes()
    assert all(max(Image.open(path).size) == 192 for path in made)


def test_transparent_pictures_have_thumbnails_on_white(tmp_path):
    save_samples(tmp_path / "run", 0, [(Image.new("RGBA", (400, 200), (0, 0, 0, 0)), {"prompt": "glass"})])
    page = build([tmp_path / "run"], tmp_path / "out")
    (thumbnail,) = (page.parent / "thumbnails").rglob("*.jpg")
    with Image.open(thumbnail) as small:
        assert small.size == (192, 96) and small.getpixel((5, 5)) == (255, 255, 255)


def test_hostile_texts_are_data_and_come_back_as_they_were(maker, tmp_path):
    run = maker.make_run(tmp_path / "<b>run & 'name'", prompts=6, moments=2, name_prompts=HOSTILE)
    page = build([run], tmp_path / "out")
    text = page.read_text(encoding="utf-8")
    # half a character fits in no file; it is shown as '?'
    assert page_data(page)["prompts"] == [text.replace("\ud800", "?") for text in HOSTILE]
    assert "<img" not in text and "<b>" not in text
    assert text.count("</script") == text.count("<script")


def test_hostile_file_names_get_plain_names(run, tmp_path):
    folder = run / "samples" / "iteration-000030"
    odd = ["<img src=x>.png", "a b?c#d%20.png", 'quote".png', "..\u202egnp.png", ".hidden.png", "x" * 200 + ".png"]
    with open(folder / "samples.jsonl", "a") as lines:
        for name in odd:
            Image.new("RGB", (8, 8)).save(folder / name)
            lines.write(json.dumps({"picture": name, "prompt": "odd", "seed": name, "reward": 0}) + "\n")
    page = build([run], tmp_path / "out")
    names = [name for _, _, name, *_ in page_data(page)["pictures"]]
    assert len(names) == 54 and all(re.fullmatch(r"[A-Za-z0-9_./-]+\.png", name) for name in names)
    assert all((page.parent / "pictures" / name).is_file() for name in names)


@pytest.mark.parametrize(
    "name", ["../../../secret.png", "{absolute}", "link.png", "\x00.png", "x" * 5000, 7, None, "."]
)
def test_nothing_outside_the_run_is_taken(run, tmp_path, name):
    secret = tmp_path / "secret.png"
    Image.new("RGB", (8, 8), "red").save(secret)
    folder = run / "samples" / "iteration-000030"
    (folder / "link.png").symlink_to(secret)
    name = str(secret) if name == "{absolute}" else name
    with open(folder / "samples.jsonl", "a") as lines:
        lines.write(json.dumps({"picture": name, "prompt": "p", "seed": 0, "reward": 0}) + "\n")
    page = build([run], tmp_path / "out")
    assert len(page_data(page)["pictures"]) == 48
    assert re.search("outside the run's folder|missing|not a file name", notes(page))
    assert secret.read_bytes() not in [path.read_bytes() for path in (tmp_path / "out").rglob("*.png")]


def test_what_is_broken_is_left_out_with_a_note(run, tmp_path):
    with open(run / "metrics.jsonl", "ab") as lines:
        lines.write(
            b'{"iteration": 30, "reward/mean": NaN}\n\xff\xfe\n[1]\n{"reward/mean": 1}\n' + b"[" * 100000 + b"\n"
        )
        lines.write(b'{"iteration": 31, "reward/mean": 1' + b"0" * 400 + b'}\n{"iteration": 31, "rew')
    samples = run / "samples"
    (samples / "iteration-000030" / "00000.png").unlink()
    (samples / "iteration-000030" / "00001.png").write_bytes(b"not a picture")
    whole = (samples / "iteration-000020" / "00002.png").read_bytes()
    (samples / "iteration-000020" / "00002.png").write_bytes(whole[: len(whole) // 2])
    (samples / "iteration-000040").mkdir()
    (samples / "notes.txt").write_text("")
    (run / "previews" / "iteration-000030" / "groups.jsonl").write_text(
        '{"members": [{"picture": 3}, 4], "wins": [[1]]}\n{}'
    )
    page = build([run], tmp_path / "out")
    data, text = page_data(page), notes(page)
    assert len(data["pictures"]) == 45
    for note in (
        "metrics.jsonl, line 32: not a JSON object",
        "reward/mean is nan",
        "without an iteration",
        "(is the run still being written?)",
        "00000.png is missing",
        "00001.png: unreadable as a picture",
        "00002.png: unreadable as a picture",
        "iteration-000040: no samples.jsonl yet",
        "a group without members",
    ):
        assert note in text
    assert data["previews"][0]["groups"][0]["wins"] is None


def test_empty_run_still_has_a_page(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("")
    page = build([tmp_path / "run"], tmp_path / "out")
    assert "no pictures yet" in notes(page)


def test_clips_rewritten_prompts_and_what_judges_wrote(run, tmp_path):
    folder = run / "samples" / "iteration-000030"
    (folder / "clip.mp4").write_bytes(b"\0\0\0\x18ftypmp42")
    with open(folder / "samples.jsonl", "a") as lines:
        record = {"picture": "clip.mp4", "prompt": "loose", "rewritten": "a red circle", "seed": 0, "reward": 1}
        lines.write(json.dumps(record | {"replies": {"quality": "Final Score: 4"}}) + "\n")
    data = page_data(build([run], tmp_path / "out"))
    assert data["replies"] == {str(len(data["pictures"]) - 1): {"quality": "Final Score: 4"}}
    *_, name, width, _, rewritten, _ = data["pictures"][-1]
    assert name.endswith("clip.mp4") and width == 0 and data["rewritten"][rewritten] == "a red circle"


@pytest.mark.parametrize("name", ["nowhere", "file", "empty"])
def test_no_run_is_one_line(tmp_path, name):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="run"):
        build([tmp_path / name], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_search_is_shown_with_all_that_it_tried(maker, run, tmp_path):
    folder = maker.make_search(tmp_path / "search", HOSTILE, side=120)
    with open(folder / "tried.jsonl", "a") as lines:
        broken = {"parent": 0, "step": 1, "score": 1, "forwards": 1}
        lines.write(json.dumps({"prompt": "its own parent", "nodes": [broken], "best": {"node": 0}}) + "\n[\n")
    page = build([folder], tmp_path / "out")
    data, text = page_data(page), page.read_text(encoding="utf-8")
    assert 'href="#search"' in text and 'href="#grid"' not in text
    assert f"search of {len(HOSTILE)} prompts by best_of_n, ttsnap" in text
    assert [(found["number"], found["method"]) for found in data["searches"]] == [
        (number, method) for number in range(len(HOSTILE)) for method in ("best_of_n", "ttsnap")
    ]
    pruned = data["searches"][3]
    assert pruned["prompt"] == HOSTILE[1] and pruned["forwards"] == 18 and pruned["calls"] == 9
    assert [node[0] for node in pruned["nodes"]] == [-1] * 6 + [0, 2, 5]
    assert [node[4] for node in pruned["nodes"][:6]] == [True, False, True, False, False, True]
    # one sheet of small pictures: 3 rows of 3
    assert pruned["places"] == list(range(9)) and pruned["tile"] == [96, 96]
    with Image.open(page.parent / "pictures" / pruned["sheet"]) as sheet:
        assert sheet.size == (288, 288)
    assert "a search whose nodes cannot be read" in notes(page) and "line 14: not a JSON object" in notes(page)
    both = build([run, folder], tmp_path / "both").read_text(encoding="utf-8")
    assert 'href="#search"' in both and 'href="#grid"' in both


def test_long_curves_keep_their_extremes():
    points = [(i, float(i % 97)) for i in range(50_000)]
    points[31_234] = (31_234, 1e6)
    thin = thinned(points)
    assert len(thin) <= POINTS and (31_234, 1e6) in thin and thin[0] == points[0] and thin[-1] == points[-1]


def test_page_needs_no_model_library():
    modules = "sys, flowalign.app.cli.gallery, flowalign.app.gallery.build"
    code = f"import {modules}; print({{'torch', 'starlette'}} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_trainers_run_is_read(run):
    """The keys that flowalign.training writes are the keys that are read here."""
    read = read_run(run, "run")
    assert [moment.iteration for moment in read.moments] == [0, 10, 20, 30]
    assert read.moments[0].samples[0].metadata == {"category": "counting"} and not read.notes
