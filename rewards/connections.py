"""Who may talk to a server of ours, and for how long it waits for what they have to say."""

import asyncio
import ipaddress
import re
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

CONNECTIONS = 512
"""Largest number of open connections of one server."""
UNASKED = 128
"""Connections that may be without a whole request; beyond them the oldest is closed."""
HEADERS = 10.0
"""Seconds that a request's headers may take to arrive."""
HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]:@/\\\s]+))(?::[0-9]{1,5})?")


def loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_own_host(header: str, name: str = "localhost") -> bool:
    """Whether a Host header is localhost, an address, or `name`: no page of another site can claim these.

    A page elsewhere can point its own name at this machine, but not a plain address.
    """
    match = HOST.fullmatch(header)
    if match is None:
        return False
    address, plain = match.groups()
    try:
        ipaddress.ip_address(address or plain)
    except ValueError:
        return plain is not None and plain.lower() in ("localhost", name.lower())
    return address is None or ":" in address


class Punctual(H11Protocol):
    """HTTP with punctual clients: a connection without a whole request, whatever it trickles, is closed in time.

    Half-sent requests take no room from whole ones: there are at most `UNASKED` of them.
    """

    deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._waited()

    def on_response_complete(self) -> None:
        # of a request that was answered before its end the rest is waited for no longer than for another
        self._wait()
        super().on_response_complete()
        if self.cycle is not None and not self.cycle.response_complete:
            self._waited()

    def connection_lost(self, exc: Exception | None) -> None:
        self._waited()
        super().connection_lost(exc)

    def _wait(self) -> None:
        """Count the seconds from now."""
        self._waited()
        self.deadline = self.loop.call_later(HEADERS, self._close)
        unasked = [each for each in self.connections if isinstance(each, Punctual) and each.deadline is not None]
        if len(unasked) > UNASKED:
            min(unasked, key=lambda each: each.deadline.when() if each.deadline else 0.0)._close()

    def _waited(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None

    def _close(self) -> None:
        self._waited()
        self.connections.discard(self)
        self.transport.abort()
