import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

CODE = "from flowalign.app.cli.gallery import gallery; import typer; typer.run(gallery)"


class Server:
    """A real server process on a free port."""

    def __init__(self, run: Path, output: Path, *options: str) -> None:
        command = [sys.executable, "-c", CODE, str(run), "-o", str(output), "--serve", "--port", "0", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.line = self.process.stdout.readline()
        self.host = self.line.split("//")[1].split("/")[0]

    def ask(
        self, method: str, path: str, body: object = None, **headers: str
    ) -> tuple[int, bytes, http.client.HTTPMessage]:
        connection = http.client.HTTPConnection(self.host, timeout=20)
        headers = {key.replace("_", "-"): value for key, value in headers.items()}
        data = None
        if method == "POST":
            headers = {"Content-Type": "application/json", **headers}
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, path, data, headers)
        reply = connection.getresponse()
        answer = reply.status, reply.read(), reply.headers
        connection.close()
        return answer

    def next(self, rater: str = "Ada") -> dict:
        return json.loads(self.ask("GET", f"/api/next?rater={rater}&a=0&b=3")[1])

    def vote(self, pair: str, verdict: str, rater: str = "Ada", **headers: str) -> tuple[int, dict]:
        body = {"rater": rater, "a": 0, "b": 3, "pair": pair, "verdict": verdict}
        status, answer, _ = self.ask("POST", "/api/vote", body, **headers)
        return status, json.loads(answer)

    def end(self, how: int = signal.SIGTERM) -> None:
        self.process.send_signal(how)
        self.process.wait(20)
        self.process.stdout.close()


@pytest.fixture(scope="module")
def server(maker, tmp_path_factory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("served")
    run = maker.make_run(folder / "run", prompts=12)
    (folder / "secret.txt").write_text("secret")
    (run / "secret.txt").write_text("secret")
    server = Server(run, folder / "out")
    (folder / "out" / "secret.txt").write_text("secret")
    yield server
    server.end()


def test_page_and_pictures_are_served_on_loopback(server):
    assert server.host.startswith("127.0.0.1:")
    status, page, headers = server.ask("GET", "/")
    assert status == 200 and b'id="data"' in page
    assert (
        headers["Content-Security-Policy"] == "frame-ancestors 'none'"
        and headers["X-Content-Type-Options"] == "nosniff"
    )
    for name in ("assets/core.js", "assets/gallery.css"):
        assert server.ask("GET", f"/{name}")[0] == 200
    status, picture, _ = server.ask("GET", "/" + server.next()["left"]["picture"])
    assert status == 200 and picture.startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "path",
    [
        "/../secret.txt",
        "/assets/../secret.txt",
        "/pictures/../../secret.txt",
        "/pictures/..%2f..%2fsecret.txt",
        "/pictures/%2e%2e/%2e%2e/secret.txt",
        "/pictures/..%5c..%5csecret.txt",
        "/pictures//etc/passwd",
        "/pictures/%2fetc%2fpasswd",
        "/assets/%00",
        "/secret.txt",
        "/votes.sqlite",
        "/.pictures.json",
        "/pictures/link.txt",
        "/pictures/",
        "/api/picture/0/3/../left/0",
        "/api/picture/0/99/x/left/0",
        "/api/picture/0/3/x/up/0",
    ],
)
def test_nothing_else_is_served(server, path):
    pictures = Path(server.process.args[5]) / "pictures"
    link = pictures / "link.txt"
    if not link.is_symlink():
        link.symlink_to(pictures.parent / "secret.txt")
    status, answer, _ = server.ask("GET", path)
    assert status in (400, 404) and b"secret" not in answer and b"root:" not in answer


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
        {"Content_Type": "text/plain"},
        {"Content_Type": "application/x-www-form-urlencoded"},
        {"Host": "evil.example"},
    ],
)
def test_posts_of_other_sites_change_nothing(server, headers):
    before = server.next("Eve")
    status, answer = server.vote(before["pair"], "left", "Eve", **headers)
    assert status == 403 and "error" in answer
    assert server.next("Eve") == before


def test_reads_under_a_foreign_name_are_refused(server):
    assert server.ask("GET", "/", Host="rebound.example")[0] == 403
    port = server.host.split(":")[1]
    assert server.ask("GET", "/", Host=f"localhost:{port}")[0] == 200


def test_posts_of_the_page_itself_are_taken(server):
    pair = server.next("Own")["pair"]
    status, answer = server.vote(pair, "tie", "Own", Origin=f"http://{server.host}", Sec_Fetch_Site="same-origin")
    assert status == 200 and answer["done"] == 1


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[" * 60000,
        b"[]",
        b"\xff",
        {},
        {"rater": "", "a": 0, "b": 3},
        {"rater": "x" * 81, "a": 0, "b": 3},
        {"rater": 7, "a": 0, "b": 3},
        {"rater": "Ada\ud800", "a": 0, "b": 3},
        {"rater": "Ada\nZoe", "a": 0, "b": 3},
        {"rater": "Ada", "a": 0, "b": 0},
        {"rater": "Ada", "a": True, "b": 0},
        {"rater": "Ada", "a": [], "b": {}},
        {"rater": "Ada", "a": -1, "b": 3},
        {"rater": "Ada", "a": 0, "b": 99},
        {"rater": "Ada", "a": 0, "b": 3, "pair": "none", "verdict": "left"},
        {"rater": "Ada", "a": 0, "b": 3, "pair": [], "verdict": "left"},
        {"rater": "Ada", "a": 0, "b": 3, "pair": None, "verdict": {}},
    ],
)
def test_bad_posts_are_refused_in_words(server, body):
    status, answer, _ = server.ask("POST", "/api/vote", body)
    assert status == 400 and json.loads(answer)["error"]
    assert server.ask("GET", "/api/next?rater=Ada&a=%C2%B2&b=9999999999999999999999")[0] == 400


def test_too_long_posts_are_refused(server):
    assert server.ask("POST", "/api/vote", b"x" * 200_000)[0] == 413
    assert server.ask("GET", "/api/nothing?rater=Ada&a=0&b=3")[0] == 404


def test_a_raters_session(server):
    """Vote until the end, undo, and find the choices in the results and in the export."""
    before = json.loads(server.ask("GET", "/api/results?a=0&b=3")[1])["all"]["wins"]
    seen, sides = set(), []
    first = server.next("Zoe")
    while (ballot := server.next("Zoe"))["pair"] is not None:
        assert set(ballot) == {"done", "total", "pair", "prompt", "left", "right"}
        address = {side: ballot[side]["picture"] for side in ("left", "right")}
        assert "iteration" not in address["left"] + address["right"]
        good = max(address, key=lambda side: _cleanness(server.ask("GET", "/" + address[side])[1]))
        sides.append(good)
        # one pair comes again, with its sides swapped, and one has a broken sample
        seen.add(ballot["pair"].rstrip("~!"))
        assert server.vote(ballot["pair"], good, "Zoe")[1]["done"] == len(seen)
    assert len(seen) == 12 and set(sides) == {"left", "right"}
    _, answer, _ = server.ask("POST", "/api/undo", {"rater": "Zoe", "a": 0, "b": 3})
    again = json.loads(answer)
    assert again["done"] == 11 and again["pair"] in seen
    server.vote(again["pair"], sides[-1], "Zoe")
    table = json.loads(server.ask("GET", "/api/results?a=0&b=3")[1])
    zoe = next(row for row in table["raters"] if row["rater"] == "Zoe")
    assert zoe["wins"] >= 10 and table["all"]["wins"] == before + zoe["wins"]
    lines = [json.loads(line) for line in server.ask("GET", "/api/export")[1].splitlines()]
    own = [line for line in lines if line["rater"] == "Zoe"]
    assert len(own) == 12 and all(Path(line["chosen"]).is_file() for line in own)
    assert sum("iteration-000030" in line["chosen"] for line in own) == zoe["wins"]
    # the order is the rater's own
    assert any(server.next(name)["pair"] != first["pair"] for name in ("a", "b", "c", "d"))


def _cleanness(png: bytes) -> int:
    """The fewer spots, the better the picture packs."""
    return -len(png)


def test_votes_outlive_a_kill(maker, tmp_path):
    run = maker.make_run(tmp_path / "run", prompts=12)
    server = Server(run, tmp_path / "out")
    for _ in range(5):
        assert server.vote(server.next()["pair"], "left")[0] == 200
    ballot = server.next()
    server.end(signal.SIGKILL)
    server = Server(run, tmp_path / "out")
    try:
        assert server.next() == ballot and ballot["done"] == 5
    finally:
        server.end()
    command = [sys.executable, "-c", CODE, str(run), "-o", str(tmp_path / "out"), "--export", str(tmp_path / "p.jsonl")]
    subprocess.run(command, check=True, capture_output=True)
    from flowalign.data import Preferences

    assert len(Preferences.read(str(tmp_path / "p.jsonl"))) == 5


def test_a_taken_port_is_one_line(server, run, tmp_path):
    from flowalign.app.gallery.server import serve
    from flowalign.errors import ConfigError

    with pytest.raises(ConfigError, match="choose another --port"):
        serve([run], tmp_path / "out", port=int(server.host.split(":")[1]))


def test_serving_without_the_extra_is_one_line(run, tmp_path):
    code = f"import sys; sys.modules['starlette'] = None; {CODE}"
    environment = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(run), "--serve"], capture_output=True, text=True, env=environment
    )
    assert done.returncode != 0 and "pip install 'flowalign[serve]'" in done.stderr


def test_sides_are_random(server):
    """Over 24 raters' first pairs the base stands on either side (all on one: once in 8 million)."""
    samples = Path(server.process.args[3]) / "samples" / "iteration-000000"
    base = {path.read_bytes() for path in samples.glob("*.png")}
    ballots = [server.next(f"rater+{n}") for n in range(24)]
    left = [server.ask("GET", "/" + ballot["left"]["picture"])[1] in base for ballot in ballots]
    assert set(left) == {True, False}


def test_an_empty_host_is_loopback(run, tmp_path):
    """Not all interfaces, as it is to the socket."""
    server = Server(run, tmp_path / "out", "--host", "")
    try:
        assert server.host.startswith("127.0.0.1:") and server.ask("GET", "/")[0] == 200
        for name in ("[::1].evil.com", "localhost:80@evil"):
            assert server.ask("GET", "/", Host=name)[0] == 403
    finally:
        server.end()


def test_a_name_is_one_person_however_it_is_typed(server):
    """An umlaut as one character, and as a letter and its dots."""
    pair = server.next("J%C3%B6rg")["pair"]
    assert server.vote(pair, "left", rater="J\u00f6rg")[0] == 200
    assert server.next("Jo%CC%88rg")["done"] == 1


def test_half_a_surrogate_in_a_run_jams_nothing(maker, tmp_path):
    """Prompts of a stranger's run are shown with a question mark, and voted on."""
    run = maker.make_run(tmp_path / "run", prompts=2)
    for file in run.glob("samples/*/samples.jsonl"):
        file.write_text(file.read_text().replace("number 0", "number \\ud83d"))
    server = Server(run, tmp_path / "out")
    try:
        for _ in range(2):
            ballot = server.next()
            assert "\ud83d" not in ballot["prompt"]
            assert server.vote(ballot["pair"], "left", "Ada\ud83d")[0] == 400
            assert server.vote(ballot["pair"], "left")[0] == 200
        assert server.ask("GET", "/")[0] == server.ask("GET", "/api/results?a=0&b=3")[0] == 200
        assert "number ?" in server.ask("GET", "/api/export")[1].decode()
    finally:
        server.end()
