"""Any reward over HTTP: batched, one scoring thread, nothing kept between requests.

    POST /score      rewards.wire request -> {"value": [...], "parts": {name: [...]}, "steps": ..., "weight": ...}
    GET  /health     {"status": "ok"}; open to all, for load balancers
    GET  /version    versions, the reward's name and its spec
    GET  /metrics    queue and work in Prometheus' text format

A request that cannot be scored gets 422 with {"error": why}, malformed bytes 400, one that takes too much memory 413, a
full queue or memory 503 (clients wait and come back). The server is stateless: several may run behind one address.
Pictures come in the request; it opens no files, and answers no web page.
"""

import asyncio
import contextlib
import hmac
import logging
import math
import platform
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from rewards.base import Reward, RewardError, Scores, score, spec_of
from rewards.connections import CONNECTIONS, Punctual, is_own_host, loopback
from rewards.wire import FILES, MemoryBudget, TooLarge, decode

logger = logging.getLogger(__name__)
LOST = 3  # calls that may hang before the server says that it cannot go on


class Worker:
    """A thread that makes one call after the other; one that hangs does not keep the process from ending."""

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="reward", daemon=True).start()

    def submit(self, function: Callable[..., Any], *arguments: object) -> "Future[Any]":
        future: Future[Any] = Future()
        self.calls.put((future, function, arguments))
        return future

    def _run(self) -> None:
        while True:
            future, function, arguments = self.calls.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(*arguments))
                except BaseException as error:
                    future.set_exception(error)
            del future, function, arguments  # and the pictures with them


@dataclass(eq=False, kw_only=True)
class Job:
    """A request that waits for its scores."""

    samples: list[Any]
    prompts: list[str]
    metadata: list[dict[str, Any]]
    done: asyncio.Future[Scores]


class RewardServer:
    """Queues requests and scores them one after the other, in a thread of its own.

    Args:
        merge: join waiting requests up to this many samples into one call; only for pointwise rewards.
        queue: requests that may wait; more are told to come back.
        token: if given, every request but /health must carry it as `Authorization: Bearer <token>`. Without one the
            server answers only under its address and as localhost, which no web page can claim to be.
        memory: megabytes that the requests in hand may take, with the copies of the pictures that rewards get.
        timeout: seconds a call of the reward may take, and the arrival of a request.
    """

    def __init__(
        self,
        reward: Reward,
        merge: int = 0,
        queue: int = 64,
        token: str | None = None,
        memory: int = 384,
        timeout: float = 600.0,
    ) -> None:
        if merge and spec_of(reward).kind != "pointwise":
            raise ValueError(f"merge: reward '{reward.name}' looks at whole groups, so requests cannot be joined")
        if spec_of(reward).scheduled:
            raise ValueError(
                f"reward '{reward.name}' changes over training, which a server knows nothing of; serve its parts, and "
                "put `remote` rewards into the schedule of the training's configuration"
            )
        self.reward, self.merge, self.queue, self.token = reward, merge, queue, token
        self.memory, self.timeout = memory * 2**20, timeout
        self.held = self.lost = 0
        self.decoding = asyncio.Lock()
        self.waiting: deque[Job] = deque()
        self.arrived = asyncio.Event()
        self.counts = {"requests": 0, "samples": 0, "errors": 0, "calls": 0}
        self.busy_seconds = 0.0
        self.app = Starlette(
            routes=[
                Route("/score", self.score, methods=["POST"]),
                Route("/health", self.health),
                Route("/version", self.version),
                Route("/metrics", self.metrics),
            ],
            lifespan=self.lifespan,
        )

    @contextlib.asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        # one thread, so that what it frees is there for the next request
        self.decoder = Worker()
        work = asyncio.create_task(self._work())
        yield
        work.cancel()

    async def _work(self) -> None:
        worker = Worker()
        while True:
            await self.arrived.wait()
            self.arrived.clear()
            while jobs := self._take():
                begin = time.perf_counter()
                call = worker.submit(self._score, jobs)
                try:
                    answers = await asyncio.wait_for(asyncio.wrap_future(call), self.timeout)
                except TimeoutError:
                    error = RewardError(f"reward '{self.reward.name}' has not answered within {self.timeout:g} s")
                    logger.warning("%s; going on without that call", error)
                    answers, worker = [error] * len(jobs), Worker()
                    self._lose(call)
                except Exception as error:
                    answers = [error] * len(jobs)
                self.busy_seconds += time.perf_counter() - begin
                for job, answer in zip(jobs, answers, strict=True):
                    if job.done.cancelled():
                        continue
                    if isinstance(answer, Scores):
                        job.done.set_result(answer)
                    else:
                        job.done.set_exception(answer)

    def _lose(self, call: "Future[Any]") -> None:
        """Count a call that hangs until it ends after all."""
        self.lost += 1
        loop = asyncio.get_running_loop()

        def found() -> None:
            self.lost -= 1

        def ended(_: "Future[Any]") -> None:
            with contextlib.suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(found)

        call.add_done_callback(ended)

    def _take(self) -> list[Job]:
        """The next requests to score together; those whose client has gone are dropped."""
        jobs: list[Job] = []
        size = 0
        while self.waiting:
            job = self.waiting[0]
            if not job.done.cancelled():
                if jobs and size + len(job.samples) > self.merge:
                    break
                jobs.append(job)
                size += len(job.samples)
            self.waiting.popleft()
        return jobs

    def _score(self, jobs: list[Job]) -> list[Scores | Exception]:
        self.counts["calls"] += 1
        samples = [sample for job in jobs for sample in job.samples]
        prompts = [prompt for job in jobs for prompt in job.prompts]
        metadata = [record for job in jobs for record in job.metadata]
        try:
            scores = score(self.reward, samples, prompts, metadata)
            rows = torch.arange(len(samples)).split([len(job.samples) for job in jobs])
            return [scores[members] for members in rows]
        except Exception as error:
            if len(jobs) > 1:  # find out whose fault it is
                return [answer for job in jobs for answer in self._score([job])]
            logger.warning("%s: %s", type(error).__name__, error)
            return [_alone(error)]

    async def score(self, request: Request) -> Response:
        refusal = self._refusal(request)
        if refusal is not None:
            return refusal
        self.counts["requests"] += 1
        if len(self.waiting) >= self.queue:
            return self._queue_is_full()
        if self.lost >= LOST:
            return _error(503, f"{self.lost} calls of reward '{self.reward.name}' hang")
        if int(request.headers.get("content-length", 0)) > self.memory // 2:
            return self._too_large()
        taken = [0]
        try:
            return await self._answer(request, taken)
        finally:
            self.held -= taken[0]

    async def _answer(self, request: Request, taken: list[int]) -> Response:
        """The answer to a request; `taken` holds the bytes that it takes, of all that are held."""

        def take(amount: int) -> None:
            self.held += amount - taken[0]
            taken[0] = amount

        body = bytearray()
        try:
            async with asyncio.timeout(self.timeout):
                async for chunk in request.stream():
                    if len(body) + len(chunk) > self.memory // 2:
                        return self._too_large()
                    if self.held + len(chunk) > self.memory:
                        return _error(503, "other requests take all memory")
                    body += chunk
                    take(len(body))
        except TimeoutError:
            return _error(408, f"the request has not arrived within {self.timeout:g} s")
        async with self.decoding:
            others = self.held - len(body)
            # the pictures beside the body, then beside the copies that rewards get
            budget = MemoryBudget(min(self.memory - self.held, (self.memory - others) // 2))
            try:
                kind = request.headers.get("content-type", "")
                decoded = self.decoder.submit(decode, body, kind, budget)
                samples, prompts, metadata = await asyncio.wrap_future(decoded)
                _check_files(metadata)
            except TooLarge:
                return self._too_large() if others == 0 else _error(503, "other requests take the memory")
            except ValueError as error:
                self.counts["errors"] += 1
                return _error(400, str(error))
            body = bytearray()
            take(2 * budget.taken)
        if not samples:
            return JSONResponse({"value": [], "parts": {}})
        if len(self.waiting) >= self.queue:
            # others came while this one was arriving
            return self._queue_is_full()
        done = asyncio.get_running_loop().create_future()
        return await self._scored(request, Job(samples=samples, prompts=prompts, metadata=metadata, done=done))

    async def _scored(self, request: Request, job: Job) -> Response:
        """The scores of a job, unless whoever asked has left meanwhile."""
        self.waiting.append(job)
        self.arrived.set()
        while not job.done.done():
            await asyncio.wait({job.done}, timeout=1.0)
            if not job.done.done() and await request.is_disconnected():
                job.done.cancel()
                return Response(status_code=499)
        failure = job.done.exception()
        if failure is not None:
            self.counts["errors"] += 1
            return _error(422, f"{type(failure).__name__}: {failure}")
        scores = job.done.result()
        self.counts["samples"] += len(job.samples)
        return JSONResponse(
            {
                "value": _numbers(scores.value),
                "parts": {name: _numbers(values) for name, values in scores.parts.items()},
                "steps": scores.steps,
                "weight": None if scores.weight is None else _numbers(scores.weight),
            }
        )

    def _queue_is_full(self) -> Response:
        return _error(503, f"{self.queue} requests are waiting already")

    def _too_large(self) -> Response:
        return _error(
            413,
            f"the request takes more than its share of {self.memory / 2**20:.0f} MB; send fewer samples at once "
            "(`batch_size` of the reward 'remote'), or raise the server's `memory`",
        )

    async def health(self, request: Request) -> Response:
        if self.lost >= LOST:
            return JSONResponse({"status": f"{self.lost} calls of reward '{self.reward.name}' hang"}, 503)
        return JSONResponse({"status": "ok"})

    async def version(self, request: Request) -> Response:
        refusal = self._refusal(request)
        if refusal is not None:
            return refusal
        spec = spec_of(self.reward)
        versions = {"python": platform.python_version()}
        for package in ("flowalign", "torch", "transformers"):
            with contextlib.suppress(PackageNotFoundError):
                versions[package] = version(package)
        about = {"needs": sorted(spec.needs), "kind": spec.kind, "deterministic": spec.deterministic}
        return JSONResponse({"reward": self.reward.name, "spec": about, "versions": versions})

    async def metrics(self, request: Request) -> Response:
        refusal = self._refusal(request)
        if refusal is not None:
            return refusal
        values = {f"{name}_total": value for name, value in self.counts.items()} | {
            "busy_seconds_total": self.busy_seconds,
            "queue_requests": len(self.waiting),
            "queue_samples": sum(len(job.samples) for job in self.waiting),
        }
        return PlainTextResponse("".join(f"flowalign_reward_{name} {value}\n" for name, value in values.items()))

    def _refusal(self, request: Request) -> Response | None:
        """Answer to a request without the token, or from a web page, which a browser sends for somebody else."""
        headers = request.headers
        host, origin = headers.get("host", ""), headers.get("origin")
        if origin not in (None, f"http://{host}", f"https://{host}"):
            return _error(403, "requests of other sites are refused")
        if self.token is None:
            return None if is_own_host(host) else _error(403, "without a token this server goes by its address only")
        given = headers.get("authorization", "")
        if hmac.compare_digest(given.encode(), f"Bearer {self.token}".encode()):
            return None
        return _error(401, "wrong or missing token")


def _error(status: int, why: str) -> Response:
    return JSONResponse({"error": why}, status)


def _check_files(metadata: list[dict[str, Any]]) -> None:
    """Raises ValueError where metadata names a file: nobody else reads this machine's files."""
    for record in metadata:
        for key in FILES:
            value = record.get(key)
            if any(isinstance(item, str) for item in (value if isinstance(value, list) else [value])):
                raise ValueError(f"metadata['{key}'] must be a picture, not the name of a file")


def _numbers(values: torch.Tensor) -> list[float | None]:
    """Floats for JSON, which has no NaN (a part may hold one)."""
    return [value if math.isfinite(value) else None for value in values.tolist()]


def _alone(error: Exception) -> Exception:
    """An error without its frames, which keep samples in memory until the garbage collector comes by."""
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return error


def serve(
    reward: Reward,
    host: str = "127.0.0.1",
    port: int = 8300,
    merge: int = 0,
    queue: int = 64,
    token: str | None = None,
    memory: int = 384,
    timeout: float = 600.0,
) -> None:
    """Serve a reward until the process is stopped; settings as of `RewardServer`.

    Args:
        host: address to listen on; empty is loopback.

    Raises:
        ValueError: an address that others reach, without a token.
    """
    host = host or "127.0.0.1"
    if token is None and not loopback(host):
        raise ValueError(f"{host} is open to the network without a token; set token_variable")
    server = RewardServer(reward, merge, queue, token, memory, timeout)
    uvicorn.run(server.app, host=host, port=port, log_level="warning", limit_concurrency=CONNECTIONS, http=Punctual)
