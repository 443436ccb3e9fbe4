"""The tiny VLM, in this process and behind a real OpenAI-compatible server on loopback."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from PIL import Image

from rewards.shapes import draw, heldout_requests, sample_requests

TINY_VLM = Path(__file__).parents[3] / "flowalign" / "data" / "assets" / "tiny_vlm"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="session")
def tiny_vlm() -> str:
    return str(TINY_VLM)


@pytest.fixture(scope="session")
def openai_url(tiny_vlm: str) -> Iterator[str]:
    """Address of a server with the same weights, in a process of its own."""
    port = free_port()
    script = Path(__file__).parent / "openai_server.py"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[3])}
    process = subprocess.Popen([sys.executable, str(script), tiny_vlm, str(port)], env=environment)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                httpx2.get(f"{address}/v1/models", timeout=1)
                break
            except httpx2.HTTPError:
                assert process.poll() is None, "the server ended"
                time.sleep(0.1)
        yield f"{address}/v1"
    finally:
        process.terminate()
        process.wait()


@pytest.fixture
def pictures() -> tuple[list[Image.Image], list[str], list[dict[str, Any]]]:
    """Eight held-out pictures, their prompts and empty metadata."""
    rng = np.random.default_rng(0)
    requests = sample_requests(heldout_requests(), 8, rng)
    images = [Image.fromarray(draw(request, rng)) for request in requests]
    return images, [request.prompt for request in requests], [{} for _ in requests]
