"""A second implementation of the data path's wire format, written from docs/wire-format.md: hostile on request.

Nothing here knows the C code. What both agree on is the specification.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from types import TracebackType

MAGIC = b"KVXD"
VERSION = 1
HELLO_BYTES, HEADER_BYTES, TRAILER_BYTES = 64, 88, 32
HELLO = struct.Struct("<4sBBBBB3xiI8s16s16s4x")
HEADER = struct.Struct("<4sBBHIiQIIQQQQQ")
TRAILER = struct.Struct("<iI8x")
DIALLER, ACCEPTOR = 1, 2
SIDE_DIALLER, SIDE_ACCEPTOR = 3, 4
F_NOTIFY, F_CHECK, F_BARE = 1, 2, 4
SEGMENT_UNKNOWN = 0xFFFFFFFF
MASK = (1 << 64) - 1


class Type(IntEnum):
    """Frame types."""

    HELLO = 1
    ATTACH = 2
    DETACH = 3
    PUT = 4
    GET = 5
    NOTIFY = 6
    ACK = 7
    DATA = 8
    BYE = 9
    LOCATION = 10
    REVOKE = 11
    QUIET = 12
    PING = 13
    PONG = 14


def siphash128(key: bytes, data: bytes) -> bytes:
    """SipHash-2-4 with 128 bits of output."""
    k0, k1 = struct.unpack("<QQ", key)
    v = [k0 ^ 0x736F6D6570736575, k1 ^ 0x646F72616E646F6D ^ 0xEE, k0 ^ 0x6C7967656E657261, k1 ^ 0x7465646279746573]

    def turn(value: int, by: int) -> int:
        return ((value << by) | (value >> (64 - by))) & MASK

    def rounds(count: int) -> None:
        for _ in range(count):
            v[0] = (v[0] + v[1]) & MASK
            v[1] = turn(v[1], 13) ^ v[0]
            v[0] = turn(v[0], 32)
            v[2] = (v[2] + v[3]) & MASK
            v[3] = turn(v[3], 16) ^ v[2]
            v[0] = (v[0] + v[3]) & MASK
            v[3] = turn(v[3], 21) ^ v[0]
            v[2] = (v[2] + v[1]) & MASK
            v[1] = turn(v[1], 17) ^ v[2]
            v[2] = turn(v[2], 32)

    whole = len(data) // 8 * 8
    last = data[whole:] + bytes(7 - len(data) % 8) + bytes([len(data) & 0xFF])
    for (word,) in struct.iter_unpack("<Q", data[:whole] + last):
        v[3] ^= word
        rounds(2)
        v[0] ^= word
    v[2] ^= 0xEE
    rounds(4)
    first = v[0] ^ v[1] ^ v[2] ^ v[3]
    v[1] ^= 0xDD
    rounds(4)
    return struct.pack("<QQ", first, v[0] ^ v[1] ^ v[2] ^ v[3])


def hello(
    role: int, nonce: bytes, *, status: int = 0, version: int = VERSION, frame_bytes: int = 1 << 20, stream: int = 0
) -> bytes:
    """An encoded hello."""
    values = (MAGIC, version, Type.HELLO, role, stream, stream + 1, status, frame_bytes, bytes(8), nonce, bytes(16))
    return HELLO.pack(*values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A frame without its authenticator; segments are (owner offset, length)."""

    type: int
    flags: int = 0
    status: int = 0
    op: int = 0
    index: int = 0
    segment: int = 0
    grant: int = 0
    generation: int = 0
    length: int = 0
    tag: int = 0
    value: int = 0
    segments: tuple[tuple[int, int], ...] = ()
    payload: bytes = b""
    trailer_status: int = 0
    proved: bool = field(default=False, compare=False)

    def header(self) -> bytes:
        return HEADER.pack(
            *(MAGIC, VERSION, self.type, self.flags, len(self.segments), self.status, self.op, self.index),
            *(self.segment, self.grant, self.generation, self.length, self.tag, self.value),
        )

    def list(self) -> bytes:
        return b"".join(struct.pack("<QQ", *one) for one in self.segments)


class Refused(Exception):
    """The other side closed the connection."""


class Speaker:
    """One end of a connection: counts frames, makes and checks authenticators."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, role: int) -> None:
        self.reader, self.writer, self.role = reader, writer, role
        self.other = {DIALLER: ACCEPTOR, ACCEPTOR: DIALLER, SIDE_DIALLER: SIDE_ACCEPTOR, SIDE_ACCEPTOR: SIDE_DIALLER}[
            role
        ]
        self.nonce = os.urandom(16)
        self.nonces = b""
        self.sent = self.received = 0

    async def __aenter__(self) -> Speaker:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.writer.close()

    def mac(self, key: bytes, counter: int, role: int, kind: int, message: bytes) -> bytes:
        return siphash128(key, self.nonces + struct.pack("<QII", counter, role, kind) + message)

    async def greet(self, **changes: int) -> int:
        """Send our hello and read theirs; returns its status."""
        self.writer.write(hello(self.role, self.nonce, **changes))
        data = await self.exactly(HELLO_BYTES)
        magic, version, kind, role, _, _, status, _, _, nonce, _ = HELLO.unpack(data)
        assert (magic, version, kind, role) == (MAGIC, VERSION, Type.HELLO, self.other)
        self.nonces = self.nonce + nonce if self.role in (DIALLER, SIDE_DIALLER) else nonce + self.nonce
        return int(status)

    async def exactly(self, count: int) -> bytes:
        try:
            return await asyncio.wait_for(self.reader.readexactly(count), 10)
        except (asyncio.IncompleteReadError, OSError) as error:  # uvloop: also ENOTCONN, of a socket that was reset
            raise Refused from error

    def encode(self, frame: Frame, key: bytes, *, crc: int = 0) -> bytes:
        """The bytes of a frame that is sent next."""
        self.sent += 1
        header, listed = frame.header(), frame.list()
        data = header + self.mac(key, self.sent, self.role, 1, header + listed) + listed
        if frame.type in (Type.PUT, Type.DATA):
            self.sent += 1
            trailer = TRAILER.pack(frame.trailer_status, crc)
            data += frame.payload + trailer + self.mac(key, self.sent, self.role, 2, trailer)
        return data

    def send(self, frame: Frame, key: bytes, *, crc: int = 0) -> bytes:
        data = self.encode(frame, key, crc=crc)
        self.writer.write(data)
        return data

    async def frame(self, key: bytes) -> Frame:
        """The next frame; `proved` says whether its authenticators are right."""
        data = await self.exactly(HEADER_BYTES)
        self.received += 1
        magic, version, kind, flags, count, status, op, index, segment, grant, generation, length, tag, value = (
            HEADER.unpack_from(data)
        )
        assert (magic, version) == (MAGIC, VERSION)
        listed = await self.exactly(count * 16) if count else b""
        other = self.other
        proved = data[72:] == self.mac(key, self.received, other, 1, data[:72] + listed)
        payload, trailer_status = b"", 0
        if kind in (Type.PUT, Type.DATA):
            payload = await self.exactly(length)
            trailer = await self.exactly(TRAILER_BYTES)
            self.received += 1
            proved = proved and trailer[16:] == self.mac(key, self.received, other, 2, trailer[:16])
            trailer_status = TRAILER.unpack_from(trailer)[0]
        return Frame(
            type=kind,
            flags=flags,
            status=status,
            op=op,
            index=index,
            segment=segment,
            grant=grant,
            generation=generation,
            length=length,
            tag=tag,
            value=value,
            segments=tuple(struct.iter_unpack("<QQ", listed)),
            payload=payload,
            trailer_status=trailer_status,
            proved=proved,
        )

    def end(self) -> None:
        """Nothing more comes from us; the other side may be gone already."""
        with contextlib.suppress(OSError):
            self.writer.write_eof()

    async def closed(self) -> bytes:
        """What still comes until the other side closes."""
        try:
            return await asyncio.wait_for(self.reader.read(), 10)
        except ConnectionError:
            return b""


async def dial(endpoint: str, role: int = DIALLER) -> Speaker:
    """A connection to an engine, before the hellos."""
    host, _, port = endpoint.rpartition(":")
    reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    return Speaker(reader, writer, role)


def segments_of(rows: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    return tuple((offset, length) for offset, length in rows)
