"""One process of the protocol server for all tests of this folder; `POST /be` makes it faulty and sound again."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest

from tests.flowalign.training.processes import FORKS, free_port


class Served:
    """A server process, which can be started again at the same address."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self, **settings: Any) -> None:
        from tests.flowalign.training.engines.protocol_server import serve

        self.process = FORKS.Process(target=serve, args=(self.port, settings), daemon=True)
        self.process.start()

    def wait(self) -> None:
        for _ in range(1200):
            try:
                httpx2.get(f"{self.url}/health", timeout=5)
                return
            except httpx2.HTTPError:
                time.sleep(0.1)
        raise AssertionError("the server did not start")

    def end(self) -> None:
        self.process.kill()
        self.process.join()

    def be(self, **settings: Any) -> None:
        """Make it so; without settings it is sound."""
        httpx2.post(f"{self.url}/be", json=settings, timeout=60).raise_for_status()


@contextmanager
def started() -> Iterator[Served]:
    served = Served()
    try:
        served.wait()
        yield served
    finally:
        served.end()


@pytest.fixture
def other() -> Iterator[Served]:
    """A second one, for one test."""
    with started() as served:
        yield served


@pytest.fixture(scope="session")
def running() -> Iterator[Served]:
    pytest.importorskip("msgpack", reason="msgpack is not installed (pip install 'flowalign[sglang]')")
    with started() as served:
        yield served


@pytest.fixture
def served(running: Served) -> Iterator[Served]:
    running.be()
    yield running
    running.be()
