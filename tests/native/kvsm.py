"""A second implementation of what engines of one host say to each other (`native/shm/shm.h`): hostile on request.

Blocking sockets with a time limit: the engine under test answers from a thread of its own.
"""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass, replace
from enum import IntEnum
from types import TracebackType
from typing import Any

from tests.native.conformance import LIMIT_S
from tests.native.kvxd import siphash128

MAGIC = 0x4D53564B
VERSION = 1
HEAD = struct.Struct("<IBBHQiiQ")
BODY_BYTES, MAC_BYTES = 32, 16
MESSAGE_BYTES = HEAD.size + BODY_BYTES + MAC_BYTES
BY_MAPPING, BY_ATTACH = 1, 2


class Type(IntEnum):
    """Message types."""

    HELLO = 1
    IMPORT = 2
    IMPORTED = 3
    REVOKE = 4
    REVOKED = 5
    DROP = 6
    NOTIFY = 7
    NOTIFIED = 8
    FORGET = 9
    BYE = 10


class Hung(Exception):
    """The other side closed the connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A message, and the descriptors that came with it. ``proved``: its code was made with the right key."""

    type: int
    how: int = 0
    status: int = 0
    sys_errno: int = 0
    handle: int = 0
    body: bytes = bytes(BODY_BYTES)
    magic: int = MAGIC
    version: int = VERSION
    counter: int = 0
    proved: bool = False
    fds: tuple[int, ...] = ()

    def encode(self) -> bytes:
        """Without the code."""
        head = HEAD.pack(
            self.magic, self.version, self.type, self.how, self.counter, self.status, self.sys_errno, self.handle
        )
        return head + self.body


class Speaker:
    """One end of a connection: counts messages, makes and checks codes."""

    def __init__(self, connection: socket.socket, *, dialler: bool) -> None:
        self.socket = connection
        self.socket.settimeout(LIMIT_S)
        self.dialler = dialler
        self.nonce, self.other = os.urandom(16), b""
        self.sent = self.received = 0

    def __enter__(self) -> Speaker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.socket.close()

    def code(self, key: bytes, encoded: bytes, *, from_dialler: bool) -> bytes:
        nonces = self.nonce + self.other if self.dialler else self.other + self.nonce
        return siphash128(key, nonces + struct.pack("<Q", from_dialler) + encoded)

    def encode(self, message: Message, key: bytes | None) -> bytes:
        """The next message as it goes out, unless it says a counter of its own."""
        self.sent += 1
        message = message if message.counter else replace(message, counter=self.sent)
        encoded = message.encode()
        return encoded + (self.code(key, encoded, from_dialler=self.dialler) if key else bytes(MAC_BYTES))

    def send(self, message: Message, key: bytes | None = None, *, fds: tuple[int, ...] = ()) -> None:
        data = self.encode(message, key)
        if fds:
            socket.send_fds(self.socket, [data], list(fds))
        else:
            self.socket.send(data)

    def receive(self, key: bytes | None = None) -> Message:
        """The next message; `Hung` at the end."""
        try:
            data, fds, _, _ = socket.recv_fds(self.socket, MESSAGE_BYTES + 1, 8)
        except ConnectionResetError:
            data, fds = b"", []
        if not data:
            raise Hung
        self.received += 1
        assert len(data) == MESSAGE_BYTES
        magic, version, kind, how, counter, status, sys_errno, handle = HEAD.unpack(data[: HEAD.size])
        assert counter == self.received
        proved = key is not None and data[-MAC_BYTES:] == self.code(
            key, data[:-MAC_BYTES], from_dialler=not self.dialler
        )
        return Message(
            type=kind, how=how, status=status, sys_errno=sys_errno, handle=handle, body=data[HEAD.size : -MAC_BYTES],
            magic=magic, version=version, counter=counter, proved=proved, fds=tuple(fds),
        )  # fmt: skip

    def greet(self, **changes: Any) -> Message:
        """Say HELLO; the other side's."""
        self.send(replace(Message(type=Type.HELLO, body=self.nonce + bytes(16)), **changes))
        answer = self.receive()
        assert answer.type == Type.HELLO
        self.other = answer.body[:16]
        return answer

    def closed(self) -> bool:
        """Whether the other side hangs up, whatever it says before."""
        try:
            while True:
                for fd in self.receive().fds:
                    os.close(fd)
        except Hung:
            return True
        except TimeoutError:
            return False


def dial(endpoint: str) -> Speaker:
    """Connect to an engine."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(endpoint.partition(":")[2])
    return Speaker(connection, dialler=True)


def import_body(grant: int, generation: int, length: int, access: int) -> bytes:
    return struct.pack("<QQQII", grant, generation, length, access, 0)


def imported_body(at: int, second: int = 0, probe: bytes = bytes(16)) -> bytes:
    """``at`` and the region, or the address, that of the probe, and the probe."""
    return struct.pack("<QQ16s", at, second, probe)


def notify_body(token: int, tag: int, value: int) -> bytes:
    return struct.pack("<QQQQ", token, tag, value, 0)
