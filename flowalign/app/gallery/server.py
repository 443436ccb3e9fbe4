"""Serving a gallery with voting, by default only to this machine.

It serves the page, its assets, the pictures and thumbnails of the gallery's folder, and the interface for votes under
api/. It refuses requests whose Host is a foreign name (the name of another site could point here), and posts from
other sites.
"""

import json
import socket
import threading
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flowalign.app.gallery.build import NEWEST, lay_out, newest, reached
from flowalign.app.gallery.polls import Polls, Refused
from flowalign.data.votes import json_lines
from flowalign.errors import ConfigError
from flowalign.runs.previews import FOLDER as PREVIEWS
from flowalign.runs.samples import FOLDER as SAMPLES
from rewards.connections import Punctual, is_own_host

BODY = 65536
"""Most bytes of a post."""


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
    handlers, folders = Handlers(shown), []
    for name in ("assets", "pictures", "thumbnails"):
        (shown.output / name).mkdir(exist_ok=True)
        folders.append(Mount(f"/{name}", StaticFiles(directory=shown.output / name)))
    routes = [
        Route("/", handlers.page),
        Route("/index.html", handlers.page),
        Route(f"/assets/{NEWEST}", handlers.newest),
        Route("/api/export", handlers.export),
        Route("/api/moments", handlers.moments),
        Route("/api/picture/{a:int}/{b:int}/{key}/{side}/{token}", handlers.picture),
        Route("/api/next", handlers.next_pair),
        Route("/api/results", handlers.results),
        Route("/api/vote", handlers.post, methods=["POST"]),
        Route("/api/undo", handlers.post, methods=["POST"]),
        *folders,
    ]
    return Guard(Starlette(routes=routes), host)


class Handlers:
    """Answers requests for the page, pairs and votes; work on files is done in threads."""

    def __init__(self, shown: LiveGallery) -> None:
        self.shown = shown

    async def page(self, request: Request) -> Response:
        await run_in_threadpool(self.shown.refresh)
        return FileResponse(self.shown.output / "index.html", headers={"Cache-Control": "no-cache"})

    async def newest(self, request: Request) -> Response:
        script = newest(await run_in_threadpool(reached, self.shown.runs))
        return Response(script, media_type="text/javascript", headers={"Cache-Control": "no-store"})

    async def moments(self, request: Request) -> Response:
        return await _answer(lambda: {"moments": self.shown.moments()})

    async def next_pair(self, request: Request) -> Response:
        rater = request.query_params.get("rater")
        return await _answer(lambda: self.shown.polls.next(_rater(rater), *_columns(request)))

    async def results(self, request: Request) -> Response:
        return await _answer(lambda: self.shown.polls.results(*_columns(request)))

    async def post(self, request: Request) -> Response:
        """A vote, or the last one taken back."""
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > BODY:
                return JSONResponse({"error": "the post is too long"}, 413)
        return await _answer(lambda: self._posted(body, undo=request.url.path == "/api/undo"))

    def _posted(self, body: bytes, undo: bool) -> dict[str, Any]:
        try:
            values = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise Refused("the post is not JSON") from error
        if not isinstance(values, dict):
            raise Refused("the post is not a JSON object")
        rater, a, b = _rater(values.get("rater")), values.get("a"), values.get("b")
        polls = self.shown.polls
        if undo:
            polls.votes.undo(rater, polls.contest(a, b))
        else:
            polls.vote(rater, a, b, values.get("pair"), values.get("verdict"))
        return polls.next(rater, a, b)

    async def picture(self, request: Request) -> Response:
        try:
            content = await run_in_threadpool(self.shown.polls.picture, **request.path_params)
        except Refused as error:
            return PlainTextResponse(str(error), 404)
        if isinstance(content, bytes):
            return Response(content, media_type="image/png", headers={"Cache-Control": "no-store"})
        return FileResponse(self.shown.output / "pictures" / content, headers={"Cache-Control": "no-store"})

    async def export(self, request: Request) -> Response:
        try:
            lines = await run_in_threadpool(self.shown.polls.preferences)
        except ConfigError as error:
            return JSONResponse({"error": str(error)}, 400)
        headers = {"Content-Disposition": 'attachment; filename="preferences.jsonl"'}
        return Response(json_lines(lines), media_type="application/jsonl", headers=headers)


async def _answer(work: Callable[[], object]) -> Response:
    try:
        return JSONResponse(await run_in_threadpool(work), headers={"Cache-Control": "no-store"})
    except Refused as error:
        return JSONResponse({"error": str(error)}, 400)


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
