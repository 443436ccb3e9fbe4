"""Any reward over HTTP: batched, one scoring thread, nothing kept between requests.

    POST /score      rewards.wire request -> {"value": [...], "parts": {name: [...]}, "steps": ..., "weight": ...}
    GET  /health     {"status": "ok"}; open to all, for load balancers
    GET  /version    versions, the reward's name and its spec
    GET  /metrics    queue and work in Prometheus' text format

A request that cannot be scored gets 422 with {"error": why}, malformed bytes 400, a full queue 503 (clients wait and
come back). The server is stateless: several may run behind one address.
"""

import asyncio
import contextlib
import hmac
import logging
import math
import platform
import time
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from rewards.base import Reward, Scores, score, spec_of
from rewards.wire import decode

logger = logging.getLogger(__name__)
LARGEST_BODY = 2**31  # bytes


@dataclass(eq=False)
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
        token: if given, every request but /health must carry it as `Authorization: Bearer <token>`.
    """

    def __init__(self, reward: Reward, merge: int = 0, queue: int = 64, token: str | None = None) -> None:
        if merge and spec_of(reward).kind != "pointwise":
            raise ValueError(f"merge: reward '{reward.name}' looks at whole groups, so requests cannot be joined")
        if spec_of(reward).scheduled:
            raise ValueError(
                f"reward '{reward.name}' changes over training, which a server knows nothing of; serve its parts, and "
                "put `remote` rewards into the schedule of the training's configuration"
            )
        self.reward, self.merge, self.queue, self.token = reward, merge, queue, token
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
        with ThreadPoolExecutor(1, thread_name_prefix="reward") as thread:
            work = asyncio.create_task(self._work(thread))
            yield
            work.cancel()

    async def _work(self, thread: ThreadPoolExecutor) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self.arrived.wait()
            self.arrived.clear()
            while jobs := self._take():
                begin = time.perf_counter()
                answers = await loop.run_in_executor(thread, self._score, jobs)
                self.busy_seconds += time.perf_counter() - begin
                for job, answer in zip(jobs, answers, strict=True):
                    if job.done.cancelled():
                        continue
                    if isinstance(answer, Scores):
                        job.done.set_result(answer)
                    else:
                        job.done.set_exception(answer)

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
        except Exception as error:
            if len(jobs) > 1:  # find out whose fault it is
                return [answer for job in jobs for answer in self._score([job])]
            logger.warning("%s: %s", type(error).__name__, error)
            return [error]
        rows = torch.arange(len(samples)).split([len(job.samples) for job in jobs])
        return [scores[own] for own in rows]

    async def score(self, request: Request) -> Response:
        if not self._allowed(request):
            return JSONResponse({"error": "wrong or missing token"}, 401)
        self.counts["requests"] += 1
        if len(self.waiting) >= self.queue:
            return JSONResponse({"error": f"{self.queue} requests are waiting already"}, 503)
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > LARGEST_BODY:
                return JSONResponse({"error": f"more than {LARGEST_BODY} bytes"}, 413)
        try:
            kind = request.headers.get("content-type", "")
            decoded = await asyncio.to_thread(decode, bytes(body), kind)
        except ValueError as error:
            self.counts["errors"] += 1
            return JSONResponse({"error": str(error)}, 400)
        if not decoded[0]:
            return JSONResponse({"value": [], "parts": {}})
        job = Job(*decoded, asyncio.get_running_loop().create_future())
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
            return JSONResponse({"error": f"{type(failure).__name__}: {failure}"}, 422)
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

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def version(self, request: Request) -> Response:
        if not self._allowed(request):
            return JSONResponse({"error": "wrong or missing token"}, 401)
        spec = spec_of(self.reward)
        versions = {"python": platform.python_version()}
        for package in ("flowalign", "torch", "transformers"):
            with contextlib.suppress(PackageNotFoundError):
                versions[package] = version(package)
        about = {"needs": sorted(spec.needs), "kind": spec.kind, "deterministic": spec.deterministic}
        return JSONResponse({"reward": self.reward.name, "spec": about, "versions": versions})

    async def metrics(self, request: Request) -> Response:
        if not self._allowed(request):
            return JSONResponse({"error": "wrong or missing token"}, 401)
        values = {f"{name}_total": value for name, value in self.counts.items()} | {
            "busy_seconds_total": self.busy_seconds,
            "queue_requests": len(self.waiting),
            "queue_samples": sum(len(job.samples) for job in self.waiting),
        }
        return PlainTextResponse("".join(f"flowalign_reward_{name} {value}\n" for name, value in values.items()))

    def _allowed(self, request: Request) -> bool:
        given = request.headers.get("authorization", "")
        return self.token is None or hmac.compare_digest(given.encode(), f"Bearer {self.token}".encode())


def _numbers(values: torch.Tensor) -> list[float | None]:
    """Floats for JSON, which has no NaN (a part may hold one)."""
    return [value if math.isfinite(value) else None for value in values.tolist()]


def serve(
    reward: Reward,
    host: str = "127.0.0.1",
    port: int = 8300,
    merge: int = 0,
    queue: int = 64,
    token: str | None = None,
) -> None:
    """Serve a reward until the process is stopped."""
    server = RewardServer(reward, merge, queue, token)
    uvicorn.run(server.app, host=host, port=port, log_level="warning")
