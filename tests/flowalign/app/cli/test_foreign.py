"""Folders that somebody else made: no code of theirs runs, nothing outside them is touched, nothing is sent."""

import contextlib
import json
import multiprocessing
import os
import shutil
import socket
import sqlite3
import struct
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image
from starlette.testclient import TestClient

from flowalign.app.cli import modules
from flowalign.app.cli.main import main
from flowalign.app.gallery.server import LiveGallery, application
from flowalign.config import recipe
from flowalign.data import shipped
from flowalign.data.votes import Pair, Votes
from flowalign.policies.diffusion import DiffusersPolicy
from flowalign.runs.samples import save_samples

RECIPE = recipe("tiny_sd3/flow_grpo")


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's folder of two samples a moment, with a configuration; the current folder is another."""
    run = tmp_path / "there" / "run"
    for iteration in (0, 1):
        lines = [(Image.new("RGB", (8, 8), "red"), {"prompt": f"p{i}", "seed": i, "reward": 0.5}) for i in (0, 1)]
        save_samples(run, iteration, lines)
    (run / "metrics.jsonl").write_text('{"iteration": 0, "reward/mean": 0.5}\n{"iteration": 1, "reward/mean": 0.6}\n')
    (run / "evaluations.jsonl").write_text('{"iteration": 0, "all/reward": 0}\n{"iteration": 1, "all/reward": 1}\n')
    (run / "config.yaml").write_text(f"extends: {RECIPE}\nevaluation: {{prompts: shapes_heldout, limit: 2}}\n")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return run


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path, code: int = 2) -> str:
    """The one line that a command ends with."""
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in arguments])
    lines = capsys.readouterr().err.strip().splitlines()
    assert left.value.code == code and len(lines) == 1, lines
    return lines[0]


def settle(run: Path, text: str) -> None:
    """Add lines to a run's configuration."""
    with open(run / "config.yaml", "a") as file:
        file.write(text)


def test_no_module_in_a_runs_folder_is_imported(foreign: Path) -> None:
    for name in ("torch_xla", "torch_mlu", "gptqmodel", "wandb", "bitsandbytes"):
        (foreign / f"{name}.py").write_text(f"open({str(foreign / 'ran')!r}, 'a').write('{name} ')\n")
    settle(foreign, "rewards: [{name: shaps}]\n")
    words = [sys.executable, "-m", "flowalign", "eval", "."]
    # from within, where Python itself would look; from elsewhere the folder is never put where it looks (below)
    done = subprocess.run(words, cwd=foreign, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "did you mean 'shapes'" in done.stderr
    assert not (foreign / "ran").exists()


def test_a_trusted_run_may_name_modules_beside_it(foreign: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(foreign), *sys.path])
    with modules.opened(foreign, trust=False):
        assert str(foreign) not in sys.path
    with modules.opened(foreign, trust=True):
        assert str(foreign) in sys.path


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (
            "rewards: [{name: remote, url: 'https://evil.example/x', token_variable: AWS_SECRET_ACCESS_KEY}]",
            ["the address https://evil.example/x", "the environment's AWS_SECRET_ACCESS_KEY"],
        ),
        ("rewards: [{name: gate, passes: {name: remote, url: 'http://127.0.0.1:1'}, then: {name: shapes}}]", ["127"]),
        ("model: {path: tiny_sd3, embeddings: cached}", ["model.embeddings: the place cached to write to"]),
        ("model: {path: /etc}", ["model.path: the path /etc"]),
        ("model: {path: ../secret}", ["model.path: the path ../secret"]),
        ("algorithm: {name: flow_grpo, x: ['~/']}", ["the path ~/"]),
        ("evaluation: {prompts: ../secret/prompts.txt}", ["evaluation.prompts: the path ../secret/prompts.txt"]),
    ],
)
def test_what_a_configuration_reaches_outside_is_listed_and_needs_trust(
    foreign: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, text: str, named: list[str]
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    (foreign.parents[1] / "secret").mkdir()
    (foreign.parents[1] / "secret" / "prompts.txt").write_text("private\n")
    (foreign / "config.yaml").write_text(f"extends: {RECIPE}\n{text}\n")
    line = refused(capsys, "eval", foreign)
    assert all(word in line for word in named) and "--trust allows it" in line and "hush" not in line
    assert list(Path.cwd().iterdir()) == []


def test_a_foreign_configuration_extends_no_file_elsewhere(foreign: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (foreign.parents[1] / "mine.yaml").write_text("secret: value\n")
    (foreign / "config.yaml").write_text("extends: ../../mine.yaml\n")
    assert "extends the file ../../mine.yaml; --trust" in refused(capsys, "export", foreign)


def test_private_pictures_that_foreign_prompts_name_are_not_taken(
    foreign: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.new("RGB", (8, 8)).save(foreign.parents[1] / "private.png")
    line = json.dumps({"prompt": "a cat", "image": str(foreign.parents[1] / "private.png")})
    (foreign / "prompts.jsonl").write_text(line + "\n")
    (foreign / "config.yaml").write_text(f"extends: {RECIPE}\nevaluation: {{prompts: '{foreign}/prompts.jsonl'}}\n")
    assert "private.png; --trust allows it" in refused(capsys, "eval", foreign)


@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
@pytest.mark.parametrize("command", ["eval", "export", "sample", "watch", "compare", "bench", "search"])
def test_links_and_pipes_in_a_runs_folder_are_refused(
    foreign: Path, capsys: pytest.CaptureFixture[str], kind: str, command: str
) -> None:
    (foreign / "model").mkdir()
    if kind == "pipe":
        os.mkfifo(foreign / "model" / "x")
    else:
        (foreign / "model" / "x").symlink_to("/etc/passwd" if kind == "link" else "/etc")
    more = {"sample": ["a"], "search": ["a", "--reward", "shapes"], "bench": ["--suite", "shapes"]}
    line = refused(capsys, command, foreign, *more.get(command, [foreign] if command == "compare" else []))
    assert f"{foreign / 'model' / 'x'} is a" in line and "a run's folder must not hold" in line
    assert not (foreign / "export").exists()


def test_an_export_takes_no_picture_from_elsewhere(foreign: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (foreign.parents[1] / "id_rsa").write_text("private")
    (foreign / "model").mkdir()
    lines = foreign / "samples" / "iteration-000001" / "samples.jsonl"
    lines.write_text(lines.read_text().replace('"00000.png"', '"../../../../id_rsa"'))
    assert "leads out of the folder" in refused(capsys, "export", foreign)
    assert list((foreign / "export").iterdir()) == []


def test_a_gallery_removes_and_overwrites_nothing_outside(foreign: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outside = foreign.parents[1] / "outside"
    outside.mkdir()
    (outside / "x").write_text("mine")
    (outside / "x.jpg").write_text("mine")
    gallery = foreign / "gallery"
    gallery.mkdir()
    entry = [0, 0, 8, 8]
    known = {"../../../../outside/x": entry, str(outside / "x"): entry, "run/..": entry, "a/b": "odd", "a": entry}
    (gallery / ".pictures.json").write_text(json.dumps(known))
    main_ok("gallery", foreign)
    assert (outside / "x").read_text() == "mine" and (gallery / "index.html").is_file()
    places = [".partial-index.html", "assets/gallery.css", "pictures", "votes.sqlite", ".pictures.json", "index.html"]
    for place in places:
        shutil.rmtree(gallery)
        (gallery / place).parent.mkdir(parents=True)
        (gallery / place).symlink_to(outside if place == "pictures" else outside / "x")
        assert f"gallery/{place} is a symbolic link" in refused(capsys, "gallery", foreign)
    shutil.rmtree(gallery)
    gallery.symlink_to(outside)
    assert "gallery is a symbolic link" in refused(capsys, "gallery", foreign)
    assert sorted(path.name for path in outside.iterdir()) == ["x", "x.jpg"]
    assert (outside / "x").read_text() == "mine"


@pytest.fixture
def altered(trained_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A trained run that somebody may have altered; the current folder is another."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return Path(shutil.copytree(trained_run, tmp_path / "there" / "run"))


def on_trained(run: Path) -> dict[str, list[str | Path]]:
    """Arguments of each command that works on a trained run, short ones."""
    good = Path(shutil.copytree(run, run.with_name("good")))
    return {
        "watch": ["watch", run, "--panel", "shapes", "--pictures", "1"],
        "compare": ["compare", good, run],
        "again": ["compare", good, run, "--again", "--pictures", "1"],
        "bench": ["bench", run, "--suite", "shapes", "--limit", "1", "--steps", "1"],
        "export": ["export", run],
        "gallery": ["gallery", run],
    }


def change(run: Path, **sections: Any) -> None:
    """Put other sections into a run's configuration."""
    values = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump(values | sections))


def run_command(arguments: list[str | Path]) -> int:
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in arguments])
    return int(left.value.code or 0)


@pytest.mark.parametrize("command", ["watch", "compare", "again", "bench", "export", "gallery"])
def test_no_command_imports_what_an_altered_configuration_names(
    altered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Of a module that could be imported."""
    (tmp_path / "named_there.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "named_there", raising=False)
    words = on_trained(altered)[command]
    values, own = yaml.safe_load((altered / "config.yaml").read_text()), {"name": "named_there:Own"}
    for sections in (
        {"algorithm": own},
        {"rewards": [own], "data": values["data"] | {"selection": own}},
        {"rollout": values["rollout"] | {"kernel": own["name"]}},
        {"evaluation": values["evaluation"] | {"panel": [own], "rewards": [own]}},
    ):
        change(altered, **values | sections)
        code = run_command(words)
        assert code in (0, 1, 2) and not (tmp_path / "ran").exists(), sections


@pytest.mark.parametrize("command", ["watch", "compare", "again", "bench", "export", "gallery"])
def test_nothing_is_sent_where_an_altered_configuration_says(
    altered: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("FLOWALIGN_TEST_SECRET", "hush")
    words = on_trained(altered)[command]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.2)
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        remote = {"name": "remote", "url": address, "token_variable": "FLOWALIGN_TEST_SECRET"}
        evaluation = yaml.safe_load((altered / "config.yaml").read_text())["evaluation"]
        change(altered, rewards=[remote], evaluation=evaluation | {"panel": [remote]})
        assert run_command(words) in (0, 2)
        with pytest.raises(TimeoutError):
            listener.accept()


def test_a_watch_lists_the_addresses_that_it_would_use(altered: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(altered, rewards=[{"name": "remote", "url": "https://evil.example/x", "token_variable": "HOME"}])
    line = refused(capsys, "watch", altered, "--panel", "shapes")
    assert (
        "rewards.0.url: the address https://evil.example/x" in line and "token_variable: the environment's HOME" in line
    )


@pytest.mark.parametrize("place", ["votes.sqlite", "votes.sqlite-wal"])
def test_votes_are_exported_from_no_link(foreign: Path, capsys: pytest.CaptureFixture[str], place: str) -> None:
    """For the file that it leads to would be changed: a table is made in it."""
    outside = foreign.parents[1] / "cookies.sqlite"
    with closing(sqlite3.connect(outside)) as file, file:
        file.execute("CREATE TABLE cookies (x)")
    before = outside.read_bytes()
    (foreign / "gallery").mkdir()
    if place != "votes.sqlite":
        shutil.copy(outside, foreign / "gallery" / "votes.sqlite")
    (foreign / "gallery" / place).symlink_to(outside)
    line = refused(capsys, "gallery", foreign, "--export", "votes.jsonl")
    assert f"gallery/{place} is a symbolic link" in line
    assert outside.read_bytes() == before and list(Path.cwd().iterdir()) == []


def voted(run: Path, changes: str = "") -> Path:
    """The gallery's file of votes of a run, with one choice, and changed by SQL."""
    (run / "gallery").mkdir()
    votes = run / "gallery" / "votes.sqlite"
    sides = [sorted((run / "samples" / f"iteration-00000{i}").glob("*.png"))[0] for i in (0, 1)]
    Votes(votes).add("Ada", Pair("key", "p0", "0", *sides), "second")
    with closing(sqlite3.connect(votes)) as file, file:
        file.executescript(changes)
    return votes


def test_votes_name_pictures_of_the_runs_alone(foreign: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What else they named would be read by whoever trains on the export, and shown."""
    votes = voted(foreign)
    with pytest.raises(SystemExit, match="0"):
        main(["gallery", str(foreign), "--export", "votes.jsonl"])
    [line] = [json.loads(line) for line in Path("votes.jsonl").read_text().splitlines()]
    assert Path(line["chosen"]).is_file() and "iteration-000001" in line["chosen"]
    Path("votes.jsonl").unlink()
    secret = foreign.parents[1] / "passport.png"
    Image.new("RGB", (8, 8)).save(secret)
    (foreign / "samples" / "link.png").symlink_to(secret)
    names = [
        str(secret),
        f"{foreign}/../../passport.png",
        "passport.png",
        str(foreign / "samples" / "link.png"),
        "",
        "\0",
    ]
    whole = votes.read_bytes()
    for column in ("first", "second"):
        for name in names:
            votes.write_bytes(whole)
            with closing(sqlite3.connect(votes)) as file, file:
                file.execute(f"UPDATE votes SET {column} = ?", [name])
            assert "is in none of the runs" in refused(capsys, "gallery", foreign, "--export", "votes.jsonl")
    assert list(Path.cwd().iterdir()) == []


def test_a_served_gallery_exports_no_picture_from_elsewhere(foreign: Path) -> None:
    voted(foreign, "UPDATE votes SET first = '/home/me/passport.png'")
    answer = TestClient(application(LiveGallery([foreign], foreign / "gallery")), "http://localhost").get("/api/export")
    assert answer.status_code == 400 and "is in none of the runs; it is not there any more" in answer.json()["error"]


@pytest.mark.parametrize(
    "changes",
    [
        "ALTER TABLE votes RENAME TO others; CREATE VIEW votes AS WITH RECURSIVE x(n) AS (SELECT 1 UNION ALL"
        " SELECT n + 1 FROM x) SELECT n AS number, 'a' AS rater, n AS pair, 'p' AS prompt, '0' AS seed, 'x' AS first,"
        " 'y' AS second, 'first' AS verdict, 0.0 AS time, 'picture' AS medium FROM x",
        "CREATE TRIGGER more AFTER INSERT ON votes BEGIN DELETE FROM votes; END",
        "UPDATE votes SET prompt = x'ff00'",
        "UPDATE votes SET first = x'2f'",
        "PRAGMA ignore_check_constraints = ON; UPDATE votes SET verdict = 'both'",
        "DROP TABLE votes; CREATE TABLE votes (x)",
        "UPDATE votes SET prompt = CAST(x'ff' AS TEXT)",
    ],
)
def test_what_is_no_votes_is_a_line(foreign: Path, capsys: pytest.CaptureFixture[str], changes: str) -> None:
    voted(foreign, changes)
    line = refused(capsys, "gallery", foreign, "--export", "votes.jsonl")
    assert "votes.sqlite is no file of votes" in line and list(Path.cwd().iterdir()) == []


def test_a_journal_beside_votes_removes_no_file(foreign: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """SQLite takes a journal for that of a write over several files, and removes the list of them that it names."""
    outside = foreign.parents[1] / "diary.txt"
    outside.write_text("private\n")
    votes = voted(foreign, "PRAGMA journal_mode = DELETE")
    with closing(sqlite3.connect(votes)) as file:
        [size], [pages] = file.execute("PRAGMA page_size").fetchone(), file.execute("PRAGMA page_count").fetchone()
    name, mark = str(outside).encode(), bytes.fromhex("d9d505f920a163d7")
    head = (mark + struct.pack(">5I", 0, 1, pages, 512, size)).ljust(512, b"\0")
    end = struct.pack(">I", 2**30 // size + 1) + name + struct.pack(">2I", len(name), sum(name)) + mark
    (foreign / "gallery" / "votes.sqlite-journal").write_bytes(head + end)
    for words in (["--export", "votes.jsonl"], ["--serve", "--port", "0"]):
        assert "votes.sqlite-journal is no part" in refused(capsys, "gallery", foreign, *words)
    assert outside.read_text() == "private\n"
    # which it does when nobody looks
    with closing(sqlite3.connect(votes)) as file:
        file.execute("SELECT count(*) FROM votes").fetchall()
    assert not outside.exists()


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_a_gallery_is_not_served_from_a_folder_with_links(
    foreign: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    place = foreign / "gallery" / ("pictures" if kind == "folder" else "assets/x.css")
    place.parent.mkdir(parents=True)
    if kind == "pipe":
        os.mkfifo(place)
    else:
        place.symlink_to("/etc/passwd" if kind == "link" else "/etc")
    assert f"{place.relative_to(foreign)} is a" in refused(capsys, "gallery", foreign, "--serve", "--port", "0")


def test_a_served_gallery_gives_nothing_from_outside(foreign: Path) -> None:
    """By names in the run's lists, by addresses, and by links that are made while it is served."""
    secret = foreign.parents[1] / "id_rsa"
    secret.write_text("private")
    lines = foreign / "samples" / "iteration-000001" / "samples.jsonl"
    lines.write_text(lines.read_text().replace('"00000.png"', '"../../../../id_rsa"'))
    (foreign / "samples" / "iteration-000001" / "00001.png").unlink()
    (foreign / "samples" / "iteration-000001" / "00001.png").symlink_to(secret)
    shown = LiveGallery([foreign], foreign / "gallery")
    assert [own.column for own in shown.polls.gallery.placed] == [0, 0]
    ask = TestClient(application(shown), base_url="http://127.0.0.1")
    (foreign / "gallery" / "pictures" / "x").symlink_to(secret)
    (foreign / "gallery" / "thumbnails" / "up").symlink_to(foreign.parents[1])
    paths = [
        "pictures/x",
        "thumbnails/up/id_rsa",
        "pictures/../../../../id_rsa",
        "pictures/%2e%2e/%2e%2e/%2e%2e/id_rsa",
    ]
    for path in [*paths, f"pictures/{secret}", "votes.sqlite", "../config.yaml", "assets/..%2f..%2fconfig.yaml"]:
        answer = ask.get(f"/{path}")
        assert answer.status_code == 404 and "private" not in answer.text, path
    page = ask.get("/").text
    assert "outside the run\\u0027s folder, left out" in page and "is a link, which may lead" in page


@pytest.mark.parametrize("kind", ["outside", "link", "pipe", "junk", "page"])
def test_a_comparison_takes_no_picture_from_elsewhere(
    altered: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    words = on_trained(altered)["compare"]
    folder = altered / "samples" / "iteration-000002"
    (altered.parents[1] / "id_rsa").write_text("private")
    first = sorted(folder.glob("*.png"))[0]
    lines = folder / "samples.jsonl"
    if kind in ("outside", "page"):
        name = "../../../../id_rsa" if kind == "outside" else "x.html"
        shutil.copy(first, folder / "x.html")
        lines.write_text(lines.read_text().replace(f'"{first.name}"', f'"{name}"'))
    elif kind == "junk":
        first.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n")
    else:
        first.unlink()
        first.symlink_to(altered.parents[1] / "id_rsa") if kind == "link" else os.mkfifo(first)
    code = run_command(words)
    said = capsys.readouterr().err
    assert (code, len(said.strip().splitlines())) in [(0, 0), (2, 1)], said
    shown = [path for path in Path("compared", "pictures").glob("*") if path.is_file()]
    assert not any(b"private" in path.read_bytes() or path.suffix == ".html" for path in shown)


def main_ok(*arguments: str | Path) -> None:
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in arguments])
    assert not left.value.code


def test_a_gallery_waits_for_no_pipe_and_reads_nothing_endless(foreign: Path) -> None:
    for place in ("metrics.jsonl", "samples/iteration-000001/samples.jsonl"):
        (foreign / place).unlink()
    os.mkfifo(foreign / "metrics.jsonl")
    (foreign / "samples" / "iteration-000001" / "samples.jsonl").symlink_to("/dev/zero")
    with open(foreign / "evaluations.jsonl", "wb") as file:
        file.truncate(2**40)
    main_ok("gallery", foreign)
    page = (foreign / "gallery" / "index.html").read_text()
    assert "metrics.jsonl: is a pipe, a socket or a device, left out" in page
    assert "samples.jsonl: is a symbolic link, left out" in page and "evaluations.jsonl: has more than" in page


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        ({"text_encoder": ["antigravity", "Thing"]}, "its text_encoder is ['antigravity', 'Thing'], which is no class"),
        ({"text_encoder": ["transformers", "NoSuchModel"]}, "which is no class of diffusers or transformers"),
        ({"text_encoder": [0, "antigravity"]}, "which is no class of diffusers or transformers"),
        ({"text_encoder": ["transformers", "pipeline"]}, "which is no class of diffusers or transformers"),
        ({"_class_name": "NoSuchPipeline"}, "names the class 'NoSuchPipeline', which diffusers"),
        ({"_class_name": ["evil", "Pipeline"]}, "names the class"),
        ({"transformer": None}, "model_index.json has no transformer"),
    ],
)
def test_a_pipelines_folder_names_only_classes_of_diffusers_and_transformers(
    foreign: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, change: dict, hint: str
) -> None:
    monkeypatch.delitem(sys.modules, "antigravity", raising=False)
    folder = foreign / "pipeline"
    folder.mkdir()
    index = json.loads(Path(shipped("tiny_sd3"), "model_index.json").read_text()) | change
    (folder / "model_index.json").write_text(json.dumps({k: v for k, v in index.items() if v is not None}))
    (foreign / "config.yaml").write_text(f"extends: {RECIPE}\nmodel: {{path: '{folder}'}}\n")
    assert hint in refused(capsys, "eval", foreign)
    for words in (
        ["sample", folder, "a"],
        ["search", folder, "a", "--reward", "shapes"],
        ["export", foreign, "--merge"],
        ["watch", foreign, "--panel", "shapes"],
        ["compare", foreign, foreign, "--again"],
        ["bench", folder, "--suite", "shapes"],
        ["bench", foreign, "--suite", "shapes"],
    ):
        assert hint in refused(capsys, *words)
    assert "antigravity" not in sys.modules


def sample_each(folders: list[Path], told: Path) -> None:
    with open(told, "w") as file, contextlib.redirect_stderr(file):
        for folder in folders:
            with pytest.raises(SystemExit, match="2"):
                main(["sample", str(folder), "a"])


def test_a_pipe_in_a_pipelines_folder_is_refused(foreign: Path) -> None:
    """In a fork, which waits for ever where it opens the pipe."""
    places = ["model_index.json", "scheduler/scheduler_config.json", "transformer/diffusion_pytorch_model.safetensors"]
    folders = [foreign / f"pipeline{i}" for i in range(len(places))]
    for folder, place in zip(folders, places, strict=True):
        shutil.copytree(shipped("tiny_sd3"), folder)
        (folder / place).unlink()
        os.mkfifo(folder / place)
    fork = multiprocessing.get_context("fork").Process(target=sample_each, args=(folders, foreign / "told"))
    fork.start()
    fork.join(60)
    ended = fork.exitcode
    fork.kill()
    told = (foreign / "told").read_text()
    assert ended == 0, told
    for folder, place in zip(folders, places, strict=True):
        assert f"{folder / place} is a pipe, a socket or a device" in told


def test_damaged_files_of_a_pipeline_are_one_line(foreign: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = foreign / "pipeline"
    shutil.copytree(shipped("tiny_sd3"), folder)
    (folder / "transformer" / "config.json").write_text('{"_class_name": 3}')
    with pytest.raises(SystemExit):
        main(["sample", str(folder), "a"])
    # below the bars of what was loaded before
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"the pipeline at '{folder}' cannot be loaded: " in line


def test_shipped_models_load(tmp_path: Path) -> None:
    assert DiffusersPolicy.from_pretrained(shipped("tiny_sd3"), embeddings=tmp_path / "kept").family is not None
