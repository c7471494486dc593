"""Where one frame ends and the next begins, for whoever stands between two nodes: no I/O, no key, no decision.

Both protocols of kvxfer can be cut into frames by somebody who knows no secret: the control plane (`CONTROL`: a
preamble from the dialler, then a length and a msgpack array that begins with the message's number) and the data path
(`DATA`: a hello each way, then fixed headers that tell what follows). docs/wire-format.md specifies both.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from kvxfer.errors import ProtocolError
from kvxfer.wire import messages  # declares every message
from kvxfer.wire.codec import MESSAGES
from kvxfer.wire.framing import FRAME_CEILING_BYTES, PREAMBLE

__all__ = ["CONTROL", "DATA", "Frame", "Protocol", "Splitter", "messages"]

HELLO_BYTES, HEADER_BYTES, SEGMENT_BYTES, TRAILER_BYTES = 64, 88, 16, 32
SEGMENTS_MAX = 1024
TYPES = ("HELLO", "ATTACH", "DETACH", "PUT", "GET", "NOTIFY", "ACK", "DATA", "BYE")
WITH_PAYLOAD = ("PUT", "DATA")
OTHER = "OTHER"


class Protocol(Enum):
    """What the connection speaks."""

    CONTROL = "KVXC"
    DATA = "KVXD"


CONTROL, DATA = Protocol.CONTROL, Protocol.DATA


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame as it travels. ``name`` is the message's class name, or the frame's type in capitals."""

    name: str
    raw: bytes


class Splitter:
    """Takes the bytes of one direction of one connection, gives whole frames; what is no frame is a `ProtocolError`."""

    def __init__(self, protocol: Protocol, *, dialler: bool) -> None:
        self._protocol = protocol
        self._first = protocol is DATA or dialler
        self._buffer = bytearray()

    @property
    def buffered(self) -> int:
        """Bytes of a frame that is not complete."""
        return len(self._buffer)

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Take bytes; iterate the frames that are complete."""
        self._buffer += data
        while (found := self._next()) is not None:
            name, length = found
            raw = bytes(memoryview(self._buffer)[:length])
            del self._buffer[:length]
            self._first = False
            yield Frame(name, raw)

    def _next(self) -> tuple[str, int] | None:
        found = self._control() if self._protocol is CONTROL else self._data()
        return found if found is not None and found[1] <= len(self._buffer) else None

    def _control(self) -> tuple[str, int] | None:
        if self._first:
            return "PREAMBLE", len(PREAMBLE)
        if len(self._buffer) < 4:
            return None
        length = 4 + int.from_bytes(self._buffer[:4], "big")
        if length > FRAME_CEILING_BYTES:
            raise ProtocolError("this is no control frame", begins_with=self._buffer[:8].hex())
        return _message_name(self._buffer[4:8]), length

    def _data(self) -> tuple[str, int] | None:
        if self._first:
            return "HELLO", HELLO_BYTES
        if len(self._buffer) < HEADER_BYTES:
            return None
        kind = self._buffer[5]
        [segments] = struct.unpack_from("<I", self._buffer, 8)
        [payload] = struct.unpack_from("<Q", self._buffer, 48)
        if self._buffer[:4] != b"KVXD" or segments > SEGMENTS_MAX or payload > FRAME_CEILING_BYTES:
            raise ProtocolError("this is no data frame", begins_with=self._buffer[:8].hex())
        name = TYPES[kind - 1] if 1 <= kind <= len(TYPES) else OTHER
        length = HEADER_BYTES + segments * SEGMENT_BYTES
        if name in WITH_PAYLOAD:
            length += payload + TRAILER_BYTES
        return name, length


def _message_name(head: bytes | bytearray) -> str:
    """The class of a message by the first bytes of its payload: an array of two, and its number."""
    if len(head) < 2 or head[0] != 0x92:
        return OTHER
    number = head[1]
    if number >= 0x80:
        number = head[2] if head[1] == 0xCC and len(head) > 2 else -1
    declared = MESSAGES.get(number)
    return OTHER if declared is None else declared.__name__
