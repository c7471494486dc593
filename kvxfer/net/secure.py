"""A transport with TLS on it, for links: what is written goes out encrypted, what came in is given back in the clear.

The idea: a link sees the same few methods as those of a plain transport, so it need not know which one it has; the
decisions are those of `tls.Channel`, and this file only carries its output to the socket.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from kvxfer.errors import KvxferError
from kvxfer.net.tls import Channel


class Wire(Protocol):
    """What a link asks of its transport; an `asyncio.Transport` has it."""

    def write(self, data: bytes) -> None: ...
    def close(self) -> None: ...
    def abort(self) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def get_write_buffer_size(self) -> int: ...
    def get_extra_info(self, name: str, default: Any = None) -> Any: ...


class SecureTransport:
    """One connection with TLS. Errors of `write` end the connection; those of `receive` are raised."""

    def __init__(self, wire: asyncio.Transport, channel: Channel) -> None:
        self._wire = wire
        self._channel = channel

    def start(self) -> None:
        """Begin the handshake."""
        self._channel.start()
        self._carry()

    def receive(self, data: bytes) -> bytes:
        """What the other side said. Raises as `Channel.receive` does, when its alert is on the way."""
        try:
            return self._channel.receive(data)
        finally:
            self._carry()

    def write(self, data: bytes) -> None:
        """Send; dropped while the other side has not yet proved itself."""
        try:
            self._channel.send(data)
        except KvxferError:
            self._wire.abort()
            return
        self._carry()

    def write_plain(self, data: bytes) -> None:
        """Send without TLS, to a side that speaks none: it shall know why it is refused."""
        self._wire.write(data)

    def close(self) -> None:
        """Say so, send what is queued, close."""
        self._channel.end()
        self._carry()
        self._wire.close()

    def abort(self) -> None:
        """Drop the connection."""
        self._wire.abort()

    def pause_reading(self) -> None:
        self._wire.pause_reading()

    def resume_reading(self) -> None:
        self._wire.resume_reading()

    def get_write_buffer_size(self) -> int:
        return self._wire.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._wire.get_extra_info(name, default)

    def _carry(self) -> None:
        if data := self._channel.output():
            self._wire.write(data)
