"""One process of the protocol server for all tests of this folder; `POST /be` makes it faulty and sound again."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.flowalign.training.processes import free_port

FOLDER = Path(__file__).parent


class Served:
    """A server process, which can be started again at the same address."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(FOLDER.parents[3])}
        program = [sys.executable, str(FOLDER / "protocol_server.py"), str(self.port)]
        self.process = subprocess.Popen(program, env=environment, stderr=subprocess.DEVNULL)

    def wait(self) -> None:
        for _ in range(1200):
            try:
                httpx2.get(f"{self.url}/health", timeout=5)
                return
            except httpx2.HTTPError:
                time.sleep(0.1)
        raise AssertionError("the server did not start")

    def be(self, **settings: Any) -> None:
        """Make it so; without settings it is sound."""
        httpx2.post(f"{self.url}/be", json=settings, timeout=60).raise_for_status()


@pytest.fixture(scope="session")
def running() -> Iterator[Served]:
    pytest.importorskip("msgpack", reason="msgpack is not installed (pip install 'flowalign[sglang]')")
    served = Served()
    served.wait()
    yield served
    served.process.kill()
    served.process.wait()


@pytest.fixture
def served(running: Served) -> Iterator[Served]:
    running.be()
    yield running
    running.be()
