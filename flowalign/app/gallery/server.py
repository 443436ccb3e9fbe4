"""Serving a gallery with voting, by default only to this machine.

It serves the page, its assets, the pictures and thumbnails of the gallery's folder, and the interface for votes under
api/. It refuses requests whose Host is a foreign name (the name of another site could point here), and posts from
other sites.
"""

import hashlib
import itertools
import json
import socket
import threading
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flowalign.app.gallery.build import Gallery, Placed, lay_out
from flowalign.app.gallery.votes import commands, enough, results
from flowalign.data.votes import REPEAT, WORTH, Pair, Votes, json_lines
from flowalign.errors import ConfigError
from flowalign.evaluation.voting import BradleyTerry
from flowalign.runs.previews import FOLDER as PREVIEWS
from flowalign.runs.samples import FOLDER as SAMPLES
from rewards.connections import Punctual, is_own_host

BODY = 65536
"""Most bytes of a post."""
EVERY = 10
"""Every tenth ballot shows a pair again, for the rater's own agreement; another one a pair that others have judged."""
LOOKED_AT = 300
"""Pairs among which the next one is chosen, and newest votes that choose it."""


class Refused(Exception):
    """A request for something that is not there; the person gets the text."""


class Guard:
    """Refuses foreign hosts and cross-site posts, and forbids other sites to frame or read the answers."""

    def __init__(self, app: ASGIApp, host: str) -> None:
        self.app, self.host = app, host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        refusal = self._refusal(scope["method"], Headers(scope=scope))

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["X-Content-Type-Options"] = "nosniff"
                headers["Content-Security-Policy"] = "frame-ancestors 'none'"
                headers["Cross-Origin-Resource-Policy"] = "same-origin"
                headers["Referrer-Policy"] = "no-referrer"
            await send(message)

        app = self.app if refusal is None else JSONResponse({"error": refusal}, 403)
        await app(scope, receive, with_headers)

    def _refusal(self, method: str, headers: Headers) -> str | None:
        host = headers.get("host", "")
        if not is_own_host(host, self.host):
            return "this server does not go by that name"
        if method in ("GET", "HEAD"):
            return None
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if origin not in (None, f"http://{host}", f"https://{host}") or site not in (None, "same-origin"):
            return "posts from other sites are refused"
        if headers.get("content-type", "").split(";")[0].strip() != "application/json":
            return "posts must be application/json"
        return None


class Polls:
    """The votes on a gallery: the pairs of two columns, and the raters' verdicts on them.

    Args:
        folder: the gallery's folder, with the file of votes.
    """

    def __init__(self, gallery: Gallery, folder: Path) -> None:
        self.gallery, self.folder, self.votes = gallery, folder, Votes(folder / "votes.sqlite")
        self.at: dict[tuple[int, int], Placed] = {(p.row, p.column): p for p in gallery.placed}
        self.pairs: dict[tuple[int, int], dict[str, tuple[Placed, Placed]]] = {}

    def contest(self, a: object, b: object) -> dict[str, tuple[Placed, Placed]]:
        """Pairs {key: (sample of column a, sample of column b)}; raises Refused for columns that are not there.

        A pair is two pictures, or two different texts, of one prompt and seed; if both columns are the same, any two
        samples of one prompt.
        """
        columns = range(len(self.gallery.columns))
        if type(a) is not int or type(b) is not int or a not in columns or b not in columns:
            raise Refused("choose a moment for either side")
        if (a, b) not in self.pairs:
            both = self._of_one_prompt(a) if a == b else self._of_one_row(a, b)
            self.pairs[a, b] = {_key(x, y): (x, y) for x, y in both if _differ(x, y)}
        return self.pairs[a, b]

    def _of_one_row(self, a: int, b: int) -> list[tuple[Placed, Placed]]:
        sides = [(self.at.get((row, a)), self.at.get((row, b))) for row in range(len(self.gallery.rows))]
        return [(x, y) for x, y in sides if x is not None and y is not None]

    def _of_one_prompt(self, column: int) -> list[tuple[Placed, Placed]]:
        by_prompt: dict[str, list[Placed]] = {}
        for placed in self.gallery.placed:
            if placed.column == column:
                by_prompt.setdefault(placed.sample.prompt, []).append(placed)
        return [pair for samples in by_prompt.values() for pair in itertools.combinations(samples, 2)]

    def next(self, rater: str, a: object, b: object) -> dict[str, Any]:
        """The next pair for the rater.

        Between two moments it is the next one in the rater's own random order, since a win rate is of random pairs.
        Within one moment, whose votes are for training, it is the one that all votes so far leave most open. Now and
        then a pair comes again, with its sides swapped.
        """
        contest = self.contest(a, b)
        verdicts = self.votes.verdicts(contest)
        done = [key for key in verdicts.get(rater, {}) if not key.endswith(REPEAT)]
        left = sorted(contest.keys() - set(done), key=lambda k: _draw(rater, k, "order"))
        progress = {"done": len(done), "total": len(contest)}
        if not left:
            return {**progress, "pair": None}
        repeated = len(verdicts.get(rater, {})) - len(done)
        if repeated < len(done) // EVERY:
            key = done[repeated * EVERY] + REPEAT
        elif a == b:
            key = self._most_open(contest, verdicts, done, left)
        else:
            key = left[0]
        # the ending tells the page whether to show a clip
        token = _token(rater, key)
        sides = contest[key.removesuffix(REPEAT)]
        ballot = {**progress, "pair": key, "prompt": sides[0].sample.prompt}
        for side in ("left", "right"):
            shown = sides[_index(side, token)]
            address = f"api/picture/{a}/{b}/{key}/{side}/{token}{Path(shown.picture).suffix}"
            ballot[side] = {"text": shown.sample.text} if shown.sample.text is not None else {"picture": address}
        return ballot

    def _most_open(
        self,
        contest: dict[str, tuple[Placed, Placed]],
        verdicts: dict[str, dict[str, str]],
        done: list[str],
        left: list[str],
    ) -> str:
        """The pair, of those left to a rater in random order, that the votes leave most open."""
        others = {key for votes in verdicts.values() for key in votes}
        if len(done) % EVERY == EVERY // 2 and (judged := [key for key in left if key in others]):
            return judged[0]
        votes = [(key, WORTH[v]) for given in verdicts.values() for key, v in given.items() if v in WORTH]
        votes = [(key.removesuffix(REPEAT), worth) for key, worth in votes[-LOOKED_AT:]]
        keys = list(dict.fromkeys([*left[:LOOKED_AT], *(key for key, _ in votes)]))
        samples = list({id(placed): placed for key in keys for placed in contest[key]}.values())
        row = {id(placed): i for i, placed in enumerate(samples)}
        shared = set.intersection(*(set(placed.sample.scores) for placed in samples))
        features = np.array([[placed.sample.scores[name] for name in sorted(shared)] for placed in samples], float)
        first, second = np.array([[row[id(placed)] for placed in contest[key]] for key in keys]).T
        model = BradleyTerry(np.nan_to_num(features), first, second)
        model.fit(np.array([keys.index(key) for key, _ in votes], int), np.array([worth for _, worth in votes]))
        return keys[int(model.openness(np.arange(min(len(left), LOOKED_AT))).argmax())]

    def picture(self, a: int, b: int, key: str, side: str, token: str) -> str:
        """Name in the gallery of a ballot's picture; the picture's address does not reveal its column."""
        contest = self.contest(a, b)
        key = key.removesuffix(REPEAT)
        if key not in contest or side not in ("left", "right") or contest[key][0].sample.text is not None:
            raise Refused("there is no such pair of pictures")
        return contest[key][_index(side, token)].picture

    def vote(self, rater: str, a: object, b: object, key: object, verdict: object) -> None:
        contest = self.contest(a, b)
        if type(key) is not str or key.removesuffix(REPEAT) not in contest:
            raise Refused("there is no such pair or verdict")
        if not isinstance(verdict, str) or verdict not in ("left", "right", "tie", "skip"):
            raise Refused("there is no such pair or verdict")
        first, second = contest[key.removesuffix(REPEAT)]
        if verdict in ("left", "right"):
            verdict = ("first", "second")[_index(verdict, _token(rater, key))]
        shown = [p.sample.path if p.sample.text is None else p.sample.text for p in (first, second)]
        # both, if the seeds differ
        seed = " and ".join(dict.fromkeys([first.sample.seed, second.sample.seed]))
        self.votes.add(rater, Pair(key, first.sample.prompt, seed, *shown), verdict)

    def preferences(self) -> list[dict[str, str]]:
        """The choices; raises ConfigError where one is on a picture of no run that is shown."""
        return self.votes.preferences(within=[run.folder for run in self.gallery.runs])

    def results(self, a: object, b: object) -> dict[str, Any]:
        """Summary of the votes on two columns, with the commands that train on them."""
        contest = self.contest(a, b)
        scores = {key: (x.sample.scores, y.sample.scores) for key, (x, y) in contest.items()}
        next_steps = commands([run.folder for run in self.gallery.runs], self.folder, self.gallery.texts)
        table = results(self.votes.verdicts(contest), scores)
        choices = table["all"]["wins"] + table["all"]["losses"]
        return table | {"commands": next_steps, "enough": enough(choices)}


def _key(first: Placed, second: Placed) -> str:
    """Key of a pair, the same after a restart; texts add prompt and seed, since those of a moment share a file."""
    named = [str(p.sample.path) for p in (first, second)]
    if first.sample.text is not None:
        named += [first.sample.prompt, first.sample.seed]
    return hashlib.sha256("\n".join(named).encode(errors="surrogateescape")).hexdigest()[:24]


def _differ(first: Placed, second: Placed) -> bool:
    """True if there is a choice: two pictures, or two different texts."""
    one, other = first.sample.text, second.sample.text
    return (one is None and other is None) or (one is not None and other is not None and one != other)


def _draw(rater: str, key: str, purpose: str) -> str:
    """A rater's own random number for a pair, the same after a restart."""
    return hashlib.sha256(f"{purpose}\n{key}\n{rater}".encode(errors="replace")).hexdigest()


def _token(rater: str, key: str) -> str:
    """Which side of a rater's ballot shows which sample; the sides of a repeated pair are swapped."""
    token = _draw(rater, key.removesuffix(REPEAT), "side")[:16]
    return f"{int(token[0], 16) ^ 1:x}{token[1:]}" if key.endswith(REPEAT) else token


def _index(side: str, token: str) -> int:
    """Index in the pair of the sample on this side."""
    flipped = int(token[0], 16) % 2
    return flipped if side == "left" else 1 - flipped


class LiveGallery:
    """A gallery of runs that may still train: when the page is opened, it is laid out again if they have written more.

    Args:
        output: the gallery's folder; votes go to its votes.sqlite.
    """

    def __init__(self, runs: list[Path], output: Path) -> None:
        self.runs, self.output = runs, output
        self.lock = threading.Lock()
        self.state = self.now()
        self.polls = Polls(lay_out(runs, output), output)

    def now(self) -> list[tuple[str, int]]:
        """Files and folders that the runs have written so far, with their times."""
        folders = [
            path for run in self.runs for name in (SAMPLES, PREVIEWS) for path in (run / name).glob("iteration-*")
        ]
        files = [run / name for run in self.runs for name in ("metrics.jsonl", "evaluations.jsonl")]
        return sorted((str(path), path.stat().st_mtime_ns) for path in (*folders, *files) if path.exists())

    def moments(self) -> int:
        """Number of moments with samples so far."""
        return sum(len(list((run / SAMPLES).glob("iteration-*/samples.jsonl"))) for run in self.runs)

    def refresh(self) -> None:
        """Lay the gallery out again if the runs have written more."""
        with self.lock:
            state = self.now()
            if state != self.state:
                self.polls, self.state = Polls(lay_out(self.runs, self.output), self.output), state


def application(shown: LiveGallery, host: str = "127.0.0.1") -> ASGIApp:
    """The gallery in a folder as a web application.

    Args:
        host: name of the server, besides localhost and plain addresses.
    """
    output = shown.output

    async def page(request: Request) -> Response:
        await run_in_threadpool(shown.refresh)
        return FileResponse(output / "index.html", headers={"Cache-Control": "no-cache"})

    async def answer(work: Callable[[], Any]) -> Response:
        try:
            return JSONResponse(await run_in_threadpool(work), headers={"Cache-Control": "no-store"})
        except Refused as error:
            return JSONResponse({"error": str(error)}, 400)

    async def moments(request: Request) -> Response:
        return await answer(lambda: {"moments": shown.moments()})

    async def next_pair(request: Request) -> Response:
        return await answer(lambda: shown.polls.next(_rater(request.query_params.get("rater")), *_columns(request)))

    async def tally(request: Request) -> Response:
        return await answer(lambda: shown.polls.results(*_columns(request)))

    async def post(request: Request) -> Response:
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > BODY:
                return JSONResponse({"error": "the post is too long"}, 413)

        def work() -> dict[str, Any]:
            try:
                values = json.loads(body)
            except (ValueError, RecursionError) as error:
                raise Refused("the post is not JSON") from error
            if not isinstance(values, dict):
                raise Refused("the post is not a JSON object")
            rater, a, b = _rater(values.get("rater")), values.get("a"), values.get("b")
            polls = shown.polls
            if request.url.path == "/api/undo":
                polls.votes.undo(rater, polls.contest(a, b))
            else:
                polls.vote(rater, a, b, values.get("pair"), values.get("verdict"))
            return polls.next(rater, a, b)

        return await answer(work)

    async def picture(request: Request) -> Response:
        try:
            name = shown.polls.picture(**request.path_params)
        except Refused as error:
            return PlainTextResponse(str(error), 404)
        return FileResponse(output / "pictures" / name, headers={"Cache-Control": "no-store"})

    async def export(request: Request) -> Response:
        try:
            lines = await run_in_threadpool(shown.polls.preferences)
        except ConfigError as error:
            return JSONResponse({"error": str(error)}, 400)
        headers = {"Content-Disposition": 'attachment; filename="preferences.jsonl"'}
        return Response(json_lines(lines), media_type="application/jsonl", headers=headers)

    folders = []
    for name in ("assets", "pictures", "thumbnails"):
        (output / name).mkdir(exist_ok=True)
        folders.append(Mount(f"/{name}", StaticFiles(directory=output / name)))
    routes = [
        Route("/", page),
        Route("/index.html", page),
        Route("/api/export", export),
        Route("/api/moments", moments),
        Route("/api/picture/{a:int}/{b:int}/{key}/{side}/{token}", picture),
        Route("/api/next", next_pair),
        Route("/api/results", tally),
        Route("/api/vote", post, methods=["POST"]),
        Route("/api/undo", post, methods=["POST"]),
        *folders,
    ]
    return Guard(Starlette(routes=routes), host)


def _columns(request: Request) -> tuple[int | None, int | None]:
    """The columns a and b of a request; None for a value that is no number."""
    a, b = (request.query_params.get(name, "") for name in ("a", "b"))
    return _integer(a), _integer(b)


def _integer(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def _rater(name: object) -> str:
    if not isinstance(name, str) or not name.strip() or len(name) > 80:
        raise Refused("give a name of at most 80 characters")
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in name.strip()):
        raise Refused("the name holds a control character, or half of a surrogate pair")
    # the same name from another keyboard is the same person
    return unicodedata.normalize("NFC", name.strip())


def serve(runs: list[Path], output: Path, host: str = "127.0.0.1", port: int = 8765) -> None:
    """Build the gallery, print its address, and serve it until it is interrupted; the runs may still train.

    Args:
        runs: run folders.
        output: the gallery's folder.
        host: address to listen on, empty for loopback; on others everybody who reaches it can look and vote.
        port: 0 takes a free one.
    """
    host = host or "127.0.0.1"
    shown = LiveGallery(runs, output)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}; choose another --port") from error
    address = f"[{host}]" if ":" in host else host
    print(f"gallery: http://{address}:{listener.getsockname()[1]}/  (Ctrl-C ends it)", flush=True)
    config = uvicorn.Config(application(shown, host), log_level="warning", server_header=False, http=Punctual)
    uvicorn.Server(config).run(sockets=[listener])
