"""Asking a server over HTTP, and waiting while it is down."""

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import httpx2

from rewards.base import RewardError

logger = logging.getLogger(__name__)

T = TypeVar("T")
A = TypeVar("A")
PASSING = {408, 425, 429, 500, 502, 503, 504}  # states that a server may come back from
FIRST_WAIT, LONGEST_WAIT = 0.1, 5.0  # seconds between attempts; doubles from the first to the longest
GARBAGE_ATTEMPTS = 3


class Asker:
    """Asks one server, from several threads at once.

    Args:
        name: name of the reward, for messages.
        url: base address.
        timeout: seconds that one attempt may take.
        patience: seconds to go on trying after an attempt failed because the server is down, slow or overloaded.
            A call ends at most `timeout + patience` seconds after it began.
        concurrency: requests in flight.
        token_variable: environment variable that holds the server's token.
        retried: called where an attempt failed and another follows.
    """

    def __init__(
        self,
        name: str,
        url: str,
        timeout: float,
        patience: float,
        concurrency: int,
        token_variable: str | None = None,
        retried: Callable[[], None] = lambda: None,
    ) -> None:
        self.name, self.timeout, self.patience = name, timeout, patience
        self.url, self.shown = url.rstrip("/"), without_secrets(url).rstrip("/")
        if not re.match(r"https?://[^/]", url):
            raise ValueError(f"the url '{self.shown}' must begin with http:// or https://, e.g. http://127.0.0.1:8300")
        headers, self.token = {}, None
        if token_variable is not None:
            self.token = token_in(token_variable)
            headers["Authorization"] = f"Bearer {self.token}"
        limits = httpx2.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        self.client = httpx2.Client(headers=headers, limits=limits)
        self.concurrency, self.retried = concurrency, retried

    def map(self, function: Callable[[A], T], items: Sequence[A]) -> list[T]:
        """Results in the order of the items, up to `concurrency` of them under way at once."""
        if len(items) == 1:  # in this thread, so that Ctrl-C gets through
            return [function(items[0])]
        pool = ThreadPoolExecutor(max(1, min(self.concurrency, len(items))))
        try:
            return [future.result() for future in [pool.submit(function, item) for item in items]]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def get(self, path: str, read: Callable[[httpx2.Response], T]) -> T:
        return self._ask("GET", path, None, {}, read)

    def post(self, path: str, content: bytes, content_type: str, read: Callable[[httpx2.Response], T]) -> T:
        """The answer, read by `read`; it raises ValueError, KeyError or TypeError where that is garbage.

        Raises:
            RewardError: the server refused, was not there for longer than `patience`, or keeps answering garbage.
        """
        return self._ask("POST", path, content, {"Content-Type": content_type}, read)

    def _ask(self, method: str, path: str, content: bytes | None, headers: dict[str, str], read: Callable[..., T]) -> T:
        address, shown = f"{self.url}{path}", f"{self.shown}{path}"
        deadline: float | None = None
        wait, garbage = FIRST_WAIT, 0
        while True:
            left = self.timeout if deadline is None else min(self.timeout, max(deadline - time.monotonic(), 0.05))
            try:
                response = self._attempt(method, address, content, headers, left)
            except httpx2.TimeoutException:
                trouble = f"no answer within {left:.3g} s"
            except httpx2.HTTPError as error:
                trouble = f"{type(error).__name__}: {error}"
            else:
                trouble = f"status {response.status_code}: {self._excerpt(response)}"
                if response.status_code == 200:
                    try:
                        return read(response)
                    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
                        garbage += 1
                        trouble = f"an answer that cannot be read ({error!r}): {self._excerpt(response)}"
                if garbage == GARBAGE_ATTEMPTS:
                    raise RewardError(f"reward '{self.name}': {shown} gave {garbage} times {trouble}")
                if response.status_code not in {200, *PASSING}:
                    raise RewardError(f"reward '{self.name}': {shown} refused with {trouble}")
            now = time.monotonic()
            if deadline is None:
                deadline = now + self.patience
                logger.warning("reward '%s': %s: %s; trying again for %g s", self.name, shown, trouble, self.patience)
            if now + wait > deadline:
                raise RewardError(
                    f"reward '{self.name}': gave up on {shown} after {self.patience:g} s of trying ({trouble})"
                )
            self.retried()
            time.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT)

    def _attempt(
        self, method: str, address: str, content: bytes | None, headers: dict[str, str], seconds: float
    ) -> httpx2.Response:
        """One request; `seconds` hold for the whole of it, so that a server that drips bytes runs out of time too."""
        end, answer = time.monotonic() + seconds, Future[httpx2.Response]()

        def ask() -> None:
            try:
                with self.client.stream(method, address, content=content, headers=headers, timeout=seconds) as response:
                    chunks = []
                    for chunk in response.iter_bytes():
                        chunks.append(chunk)
                        if time.monotonic() > end:
                            raise httpx2.ReadTimeout("too slow")
                answer.set_result(httpx2.Response(response.status_code, content=b"".join(chunks)))
            except BaseException as error:
                answer.set_exception(error)

        # the client's own limit starts again with every byte of the headers
        threading.Thread(target=ask, name="request", daemon=True).start()
        try:
            return answer.result(seconds)
        except TimeoutError as error:
            raise httpx2.ReadTimeout("too slow") from error

    def _excerpt(self, response: httpx2.Response) -> str:
        text = " ".join(response.text.split())
        if self.token:
            text = text.replace(self.token, "***")
        return repr(text[:200] + ("..." if len(text) > 200 else ""))


def without_secrets(url: str) -> str:
    """An address without user, password and query, where secrets stand."""
    scheme, slashes, rest = url.partition("://")
    rest = rest if slashes else scheme
    host, slash, path = rest.partition("?")[0].partition("/")
    return f"{scheme if slashes else ''}{slashes}{host.rpartition('@')[2]}{slash}{path}"


def token_in(variable: str) -> str:
    """The token in an environment variable.

    Raises:
        ValueError: it is not set; what is not the name of one is not repeated, it may be the token itself.
    """
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,63}", variable) or re.match(r"(sk|hf|ghp|pk)[_-]", variable):
        raise ValueError("token_variable must be the name of an environment variable, e.g. JUDGE_TOKEN")
    if not os.environ.get(variable):
        raise ValueError(f"the environment has no '{variable}': the variable that should hold the token is not set")
    return os.environ[variable]
