"""Who may talk to a server, and how long it waits: real connections to a real server in a thread."""

import socket
import threading
import time
from collections.abc import Iterator

import httpx2
import pytest
import uvicorn

from rewards import FunctionReward, connections
from rewards.connections import CONNECTIONS, Punctual, is_own_host
from rewards.server import RewardServer
from rewards.wire import encode
from tests.rewards.test_server import samples


@pytest.mark.parametrize("host", ["localhost", "LocalHost:80", "127.0.0.1", "10.0.0.7:8300", "[::1]", "[::1]:8300"])
def test_own_hosts(host: str) -> None:
    assert is_own_host(host)
    assert is_own_host("judge:80", name="Judge")


@pytest.mark.parametrize(
    "host",
    [
        "evil.com",
        "[::1].evil.com",
        "[::1]evil.com:80",
        "localhost:80@evil",
        "localhost@evil.com",
        "localhost:evil.com",
        "127.0.0.1:80:80",
        "127.0.0.1.evil.com",
        "[127.0.0.1]",
        "[localhost]",
        "[fe80::1%evil.com]",
        "::1",
        "localhost/evil",
        "localhost ",
        "[::1",
        "",
    ],
)
def test_foreign_hosts(host: str) -> None:
    assert not is_own_host(host) and not is_own_host(host, name="judge")


@pytest.fixture
def address(monkeypatch) -> Iterator[tuple[str, int]]:
    """Of a server with a token, whose clients have a second for their headers."""
    monkeypatch.setattr(connections, "HEADERS", 1.0)
    reward = FunctionReward(lambda samples, prompts: [1.0] * len(samples), "one")
    app = RewardServer(reward, token="secret").app
    config = uvicorn.Config(app, port=0, log_level="critical", limit_concurrency=CONNECTIONS, http=Punctual)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()
    server.should_exit = True
    thread.join()


def test_half_sent_requests_take_no_room(address: tuple[str, int]) -> None:
    """600 of them, and a whole request is answered at once."""
    held = []
    for _ in range(600):
        held.append(socket.create_connection(address))
        held[-1].sendall(b"POST /score HTTP/1.1\r\nHost: 127.0.0.1\r\n")
    begin = time.monotonic()
    assert httpx2.get(f"http://127.0.0.1:{address[1]}/health", timeout=5).status_code == 200
    assert time.monotonic() - begin < 1
    for one in held:
        one.close()


@pytest.mark.parametrize("begun", ["GET /health HT", "", "GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"])
def test_a_connection_that_trickles_is_closed(address: tuple[str, int], begun: str) -> None:
    """Before its first request, and after one."""
    with socket.create_connection(address) as held:
        held.sendall(begun.encode())
        begin = time.monotonic()
        with pytest.raises(OSError):
            for _ in range(100):
                held.sendall(b"X" if "\n" not in begun else b"GET"[:1])
                time.sleep(0.1)
    assert 0.5 < time.monotonic() - begin < 5


def test_the_body_of_a_refused_request_is_not_waited_for(address: tuple[str, int]) -> None:
    """Without the token: the answer comes before the body, whose trickling keeps nothing open."""
    with socket.create_connection(address) as held:
        held.sendall(b"POST /score HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\n")
        assert b"401" in held.recv(100)
        with pytest.raises(OSError):
            for _ in range(100):
                held.sendall(b"x")
                time.sleep(0.1)


def test_a_slow_body_with_the_token_has_its_time(address: tuple[str, int]) -> None:
    """Longer than the headers' time."""
    body, kind = encode(*samples(1), "safetensors")
    head = f"POST /score HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer secret\r\nContent-Type: {kind}\r\n"
    with socket.create_connection(address) as held:
        held.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:10])
        time.sleep(1.5)
        held.sendall(body[10:])
        assert b"200 OK" in held.recv(1000)


def test_the_queue_is_as_long_as_it_says() -> None:
    """Twelve at once on a queue of four: one is scored, four wait, seven are told to come back."""
    begun, go = threading.Event(), threading.Event()

    def slow(samples, prompts):
        begun.set()
        go.wait(20)
        return [1.0] * len(samples)

    from starlette.testclient import TestClient

    body, kind = encode(*samples(1), "safetensors")
    server = RewardServer(FunctionReward(slow, "slow"), queue=4)
    answers: list[int] = []
    with TestClient(server.app, base_url="http://127.0.0.1:8300") as client:

        def ask() -> None:
            answers.append(client.post("/score", content=body, headers={"Content-Type": kind}).status_code)

        threads = [threading.Thread(target=ask) for _ in range(12)]
        threads[0].start()
        begun.wait(20)
        for thread in threads[1:]:
            thread.start()
        for _ in range(200):
            if len(answers) == 7:
                break
            time.sleep(0.05)
        go.set()
        for thread in threads:
            thread.join()
    assert sorted(answers) == [200] * 5 + [503] * 7
