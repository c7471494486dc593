"""A very small HTTP/1.1 server for scrapes and probes: GET and HEAD of a fixed set of paths.

The idea that keeps it safe: a connection carries one request, nothing is interpreted beyond the request line, every
connection has one deadline for its whole life, and whatever does not look like a request closes it without an answer.
When all places are taken the connection that has been there longest goes, so that nobody who holds connections open can
keep a probe from being answered.
There is no task per connection, only protocol callbacks and one timer, so an idle or hostile client costs a socket and
nothing else.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

from kvxfer.logs import logger

REQUEST_BYTES_MAX = 8192
CONNECTIONS_MAX = 32
CONNECTION_S = 10.0  # from accept to the last byte of the answer
REQUEST_LINE = re.compile(rb"^([A-Z]{1,16}) (/[\x21-\x7e]{0,1024}) HTTP/1\.[01]$")
REASONS = {
    200: "OK",
    404: "Not Found",
    405: "Method Not Allowed",
    500: "Internal Server Error",
    503: "Service Unavailable",
}

log = logger("kvxfer.http")


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """What a route answers. ``body`` is sent as it is, with its length."""

    status: int = 200
    body: bytes = b""
    content_type: str = "text/plain; charset=utf-8"


Route = Callable[[], Response]


def encode_response(response: Response, *, head_only: bool) -> bytes:
    """The bytes of one answer; the connection closes after it."""
    head = (
        f"HTTP/1.1 {response.status} {REASONS[response.status]}\r\n"
        f"Content-Type: {response.content_type}\r\n"
        f"Content-Length: {len(response.body)}\r\n"
        "Cache-Control: no-store\r\n"
        "Connection: close\r\n\r\n"
    ).encode("ascii")
    return head if head_only else head + response.body


class _Connection(asyncio.Protocol):
    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._answered = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast("asyncio.Transport", transport)  # uvloop's transports do not inherit from it
        self._server.admit(self)
        self._timer = asyncio.get_running_loop().call_later(self._server.connection_s, transport.abort)

    def data_received(self, data: bytes) -> None:
        if self._answered or self._transport is None:
            return  # a second request on the same connection is not read
        self._received += data
        end = self._received.find(b"\r\n\r\n")
        if end > REQUEST_BYTES_MAX or (end < 0 and len(self._received) > REQUEST_BYTES_MAX):
            self._transport.abort()
        elif end >= 0:
            self._answer(self._transport, bytes(self._received[: self._received.find(b"\r\n")]))
        elif not self._plausible():
            self._transport.abort()

    def _plausible(self) -> bool:
        """Whether the bytes so far can become a request: a method begins it. Anything else is dropped at once."""
        return bool(re.match(rb"^[A-Z]{1,16}( |$)", bytes(self._received[:18])))

    def _answer(self, transport: asyncio.Transport, line: bytes) -> None:
        self._answered = True
        self._received.clear()
        found = REQUEST_LINE.match(line)
        if found is None:
            transport.abort()
            return
        method, target = found.group(1).decode(), found.group(2).decode()
        response = self._server.respond(method, target)
        transport.write(encode_response(response, head_only=method == "HEAD"))
        transport.close()

    def eof_received(self) -> bool:
        return self._answered  # keep the write side open only while an answer is on its way

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._server.forget(self)
        self._transport = None

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class HttpServer:
    """Answers ``routes`` on one listening socket."""

    def __init__(
        self,
        routes: Mapping[str, Route],
        *,
        connections_max: int = CONNECTIONS_MAX,
        connection_s: float = CONNECTION_S,
    ) -> None:
        self._routes = dict(routes)
        self._connections: dict[_Connection, None] = {}  # in order of arrival
        self._empty = asyncio.Event()
        self._empty.set()
        self._listener: asyncio.Server | None = None
        self.connections_max = connections_max
        self.connection_s = connection_s
        self.refused = 0

    @property
    def port(self) -> int:
        """The bound port; 0 before `start`."""
        if self._listener is None or not self._listener.sockets:
            return 0
        return int(self._listener.sockets[0].getsockname()[1])

    async def start(self, listener: socket.socket) -> None:
        """Serve on a listening socket, which belongs to the server from here on."""
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(lambda: _Connection(self), sock=listener)

    async def aclose(self) -> None:
        """Stop listening and drop every connection."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for connection in tuple(self._connections):
            connection.abort()
        await self._empty.wait()

    def admit(self, connection: _Connection) -> None:
        if len(self._connections) >= self.connections_max:
            self.refused += 1
            oldest = next(iter(self._connections))
            del self._connections[oldest]
            oldest.abort()
        self._connections[connection] = None
        self._empty.clear()

    def forget(self, connection: _Connection) -> None:
        self._connections.pop(connection, None)
        if not self._connections:
            self._empty.set()

    def respond(self, method: str, target: str) -> Response:
        route = self._routes.get(target.partition("?")[0])
        if route is None:
            return Response(status=404, body=("try " + " ".join(sorted(self._routes)) + "\n").encode())
        if method not in ("GET", "HEAD"):
            return Response(status=405, body=b"only GET and HEAD\n")
        try:
            return route()
        except Exception:  # a broken collector must not take the listener with it
            log.exception("%s failed", target)
            return Response(status=500, body=b"internal error\n")
