"""Several servers that sample: requests in turn, time limits, further attempts, and the weights that each has."""

import hashlib
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import torch
from torch import Tensor

from flowalign.errors import FlowalignError

T = TypeVar("T")
FIRST_WAIT, LONGEST_WAIT = 0.2, 5.0
"""Seconds between rounds of attempts; doubles from the first to the longest."""
PAUSE = 10.0
"""Seconds for which a server that was lost is asked last, and that one may take to be connected to."""
MOST_BYTES_OF_JSON = 2**20
"""Bytes of an answer without tensors, at most."""
OURS = re.compile(rb"flowalign-[0-9a-f]{16}")
"""Names of adapters."""


class ServerLost(Exception):
    """A server does not answer, or has lost the weights it was given: another attempt may work."""


@dataclass
class Server:
    """A server as this process knows it."""

    url: str
    weights: Any = None
    """Weights that `load` put there; None: unknown, since it is new or was lost."""
    under_way: int = 0
    """Requests that are being answered with these weights."""
    away: float = 0.0
    """Time until which it is asked last, since it was lost; 0: it answers."""
    changed: threading.Condition = field(default_factory=threading.Condition)


class Servers:
    """Asks servers that share requests, from several threads at once.

    Args:
        where: the settings that name them, for messages.
        urls: their addresses, in the order in which this process turns to them.
        timeout: seconds that one attempt may take.
        retries: further attempts of a request that servers answer with an error of theirs.
        patience: seconds to go on trying while no server answers.
        load: puts weights on a server, before requests that are to be answered with them.
    """

    def __init__(
        self,
        where: str,
        urls: Sequence[str],
        timeout: float,
        retries: int,
        patience: float,
        load: Callable[[str, Any], None] = lambda url, weights: None,
    ) -> None:
        self.where, self.timeout, self.retries, self.patience, self.load = where, timeout, retries, patience, load
        self.servers = [Server(url.rstrip("/")) for url in urls]
        self.client = httpx2.Client(limits=httpx2.Limits(max_connections=None, keepalive_expiry=1.0))
        self.limit = httpx2.Timeout(timeout, connect=min(timeout, PAUSE))
        self.lost, self.failed = 0, 0
        """Servers lost, and answers that were errors, since the last `measured`."""
        self.sent, self.got = 0, 0
        """Bytes of requests and of answers since then."""
        self._count = threading.Lock()

    def ask(
        self, first: int, path: str, content: bytes, weights: object, read: Callable[[bytes], T], most: int
    ) -> tuple[str, T]:
        """The address of the server that answered, and its answer to a POST.

        Args:
            first: number of the server that is asked first; after an attempt that failed it is the next one's turn.
            weights: what the server must have, see `load`.
            read: makes something of the body; it raises ValueError where that is garbage.
            most: bytes of an answer, at most.

        Raises:
            FlowalignError: a server refused it, or nothing helped.
        """
        errors, attempt, wait = 0, 0, FIRST_WAIT
        silent: float | None = None
        """Since when no server has answered."""
        while True:
            server = self._in_turn(first + attempt)
            attempt += 1
            try:
                with self.using(server, weights):
                    status, body = self._attempt(server.url + path, content, most)
                server.away = 0.0
                if status == 200:
                    return server.url, read(body)
                silent, errors, trouble = None, errors + 1, f"status {status}: {_excerpt(body)}"
                if 400 <= status < 500 and status not in (408, 425, 429):
                    raise FlowalignError(f"{self.where}: {server.url}{path} refused with {trouble}")
            except ValueError as error:
                silent, errors, trouble = None, errors + 1, f"an answer that cannot be used: {_line(error)}"
            except ServerLost as error:
                silent, trouble = silent or time.monotonic(), _line(error)
                server.away = time.monotonic() + PAUSE
                self.forget(server.url)
            with self._count:
                self.failed += 1
            if errors > self.retries:
                raise FlowalignError(f"{self.where}: {server.url}{path} gave {errors} times {trouble}")
            if silent is not None and time.monotonic() - silent > self.patience:
                raise FlowalignError(
                    f"{self.where}: no answer for {self.patience:g} s from {', '.join(s.url for s in self.servers)} "
                    f"({trouble}); with the server started again, --resume goes on from the run's last checkpoint"
                )
            if attempt % len(self.servers) == 0:
                time.sleep(wait)
                wait = min(2 * wait, LONGEST_WAIT)

    def _in_turn(self, number: int) -> Server:
        """The server whose turn it is; one that was lost is asked last, and now and then by one request alone."""
        now, count = time.monotonic(), len(self.servers)
        with self._count:
            turns = [self.servers[(number + i) % count] for i in range(count)]
            server = min(turns, key=lambda server: max(server.away, now))
            if server.away:
                server.away = now + PAUSE
        return server

    @contextmanager
    def using(self, server: Server, weights: object) -> Iterator[None]:
        """Context in which a server has these weights; others wait for it to end before they change them."""
        with server.changed:
            server.changed.wait_for(lambda: server.weights is weights or not server.under_way)
            if server.weights is not weights:
                self.load(server.url, weights)
                server.weights = weights
            server.under_way += 1
        try:
            yield
        finally:
            with server.changed:
                server.under_way -= 1
                server.changed.notify_all()

    def forget(self, url: str) -> None:
        """Take the weights of a server for lost, so that it gets them again before it is asked for more."""
        [server] = [server for server in self.servers if server.url == url]
        with self._count:
            self.lost += 1
        server.weights = None

    def call(self, url: str, path: str, values: object = None) -> Any:
        """The JSON that one server answers to a POST of JSON, or to a GET where there are no values.

        Raises:
            ServerLost: it does not answer.
            FlowalignError: it refuses, or answers no JSON.
        """
        shown = f"{self.where}: {url}{path}"
        try:
            if values is None:
                response = self.client.get(url + path, timeout=self.limit)
            else:
                response = self.client.post(url + path, json=values, timeout=self.limit)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise ServerLost(f"{url}: {_line(error)}") from error
        if response.status_code != 200 or len(response.content) > MOST_BYTES_OF_JSON:
            raise FlowalignError(f"{shown} answers with status {response.status_code}: {_excerpt(response.content)}")
        try:
            return response.json()
        except ValueError as error:
            raise FlowalignError(f"{shown} answers no JSON: {_excerpt(response.content)}") from error

    def wait_until_warm(self, url: str) -> None:
        """Wait while a server answers that it is not ready yet, at most as long as the patience."""
        end = time.monotonic() + self.patience
        with suppress(httpx2.HTTPError, httpx2.InvalidURL):
            while self.client.get(f"{url}/health", timeout=self.timeout).status_code == 503 and time.monotonic() < end:
                time.sleep(FIRST_WAIT)

    def _attempt(self, address: str, content: bytes, most: int) -> tuple[int, bytes]:
        """Status and body of one answer; the time limit holds for the whole of it."""
        end, chunks, size = time.monotonic() + self.timeout, [], 0
        headers = {"Content-Type": "application/json"}
        try:
            with self.client.stream("POST", address, content=content, headers=headers, timeout=self.limit) as response:
                for chunk in response.iter_bytes():
                    chunks.append(chunk)
                    size += len(chunk)
                    if size > most:
                        raise ValueError(f"it is longer than {most:,} bytes")
                    if time.monotonic() > end:
                        raise ServerLost(f"no whole answer in {self.timeout:g} s")
        except httpx2.HTTPError as error:
            raise ServerLost(_line(error) or type(error).__name__) from error
        with self._count:
            self.sent, self.got = self.sent + len(content), self.got + size
        return response.status_code, b"".join(chunks)

    def measured(self) -> dict[str, float]:
        """Counts since the last call."""
        counts = {"engine/lost": float(self.lost), "engine/failed": float(self.failed)}
        counts |= {"engine/bytes_sent": float(self.sent), "engine/bytes": float(self.got)}
        self.lost = self.failed = self.sent = self.got = 0
        return counts

    def close(self) -> None:
        self.client.close()


def in_turn(urls: Sequence[str], row: int, rows: int) -> list[str]:
    """Addresses in the order in which a process turns to them: processes begin at equal distances, so that all servers
    get as many requests.

    Args:
        row, rows: number of the process, and how many there are.
    """
    first = row * len(urls) // rows
    return [*urls[first:], *urls[:first]]


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _excerpt(body: bytes) -> str:
    return repr(" ".join(body[:400].decode(errors="replace").split())[:200])


class AdapterServers(Servers):
    """Servers that may lose an adapter that they were given."""

    def _attempt(self, address: str, content: bytes, most: int) -> tuple[int, bytes]:
        status, body = super()._attempt(address, content, most)
        if status in (400, 404) and OURS.search(body):
            # it was started again, or made room for others
            raise ServerLost(f"{address} has lost the adapter")
        return status, body

    def tell(self, url: str, path: str, values: object = None) -> tuple[int, str]:
        """The status of a server's answer, and what it says, to a POST of JSON or a GET where there are no values.

        Raises:
            ServerLost: it does not answer.
        """
        client, timeout = self.client, self.limit
        try:
            if values is None:
                response = client.get(url + path, timeout=timeout)
            else:
                response = client.post(url + path, json=values, timeout=timeout)
        except httpx2.HTTPError as error:
            raise ServerLost(f"{url}: {' '.join(str(error).split())[:200]}") from error
        return response.status_code, " ".join(response.text[:1000].split())


def fingerprint(folder: Path, tensors: Mapping[str, Tensor]) -> str:
    """Sixteen characters of a hash of weights and of the folder that gets them."""
    digest = hashlib.sha256(str(folder).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
