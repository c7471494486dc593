"""The side link of hixl, as somebody else speaks it who read docs/wire-format.md: LOCATIONs, and owners that lie."""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from tests.native import kvxd
from tests.native.kvxd import Frame, Speaker, Type

LAYOUT = struct.Struct("<QQIiQQQ16sQQ80s64sQ24x")
UNITS = LAYOUT.size // 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """Where a grant lies."""

    address: int
    length: int
    kind: int = 1
    device: int = 0
    epoch: int = 1
    process: int = 0
    version: int = 1
    boot_id: bytes = bytes(16)
    arena_offset: int = 0
    arena_length: int = 0
    key: bytes = b""
    engine: bytes = b"127.0.0.1:1"
    known: int = 1

    def units(self) -> tuple[tuple[int, int], ...]:
        values = (self.address, self.length, self.kind, self.device, self.epoch, self.process, self.version)
        values += (self.boot_id, self.arena_offset, self.arena_length, self.key, self.engine, self.known)  # type: ignore[assignment]
        return tuple(struct.iter_unpack("<QQ", LAYOUT.pack(*values)))

    @classmethod
    def read(cls, frame: Frame) -> Location:
        names = ("address", "length", "kind", "device", "epoch", "process", "version", "boot_id", "arena_offset")
        values = LAYOUT.unpack(b"".join(struct.pack("<QQ", *one) for one in frame.segments))
        made = dict(zip((*names, "arena_length", "key", "engine", "known"), values, strict=True))
        made |= {name: made[name].rstrip(b"\0") for name in ("key", "engine")}
        return cls(**made)


async def located(endpoint: str, grant: dict[str, Any], boot_id: bytes = bytes(16)) -> Location:
    """What an owner tells whoever has the key."""
    key = bytes.fromhex(grant["key"])
    async with await kvxd.dial(endpoint, kvxd.SIDE_DIALLER) as speaker:
        assert await speaker.greet(frame_bytes=64 << 20) == 0
        more = {"generation": grant["generation"], "tag": grant["access"], "value": grant["length"]}
        unit = struct.unpack("<QQ", boot_id)
        speaker.send(Frame(type=Type.ATTACH, op=1, grant=grant["grant"], segments=(unit,), **more), key)
        answer = await speaker.frame(key)
        assert (answer.type, answer.proved) == (Type.LOCATION, True)
        return Location.read(answer)


class Liar:
    """An owner that answers every ATTACH with what it was told to say."""

    def __init__(self, says: Location) -> None:
        self.says = says
        self.answer: Callable[[Frame], tuple[Frame, bytes]] | None = None  # to a NOTIFY
        self.pong: Callable[[Frame], tuple[Frame, bytes]] = lambda asked: (
            Frame(type=Type.PONG, op=asked.op),
            bytes(16),
        )
        self.endpoint = ""
        self.key = os.urandom(16)

    @property
    def grant(self) -> dict[str, Any]:
        return {"grant": 1, "generation": 1, "length": self.says.length, "access": 3, "key": self.key.hex()}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with Speaker(reader, writer, kvxd.SIDE_ACCEPTOR) as speaker:
            assert await speaker.greet(frame_bytes=64 << 20) == 0
            try:
                while True:
                    asked = await speaker.frame(self.key)
                    if asked.type == Type.ATTACH:
                        answer = Frame(type=Type.LOCATION, op=asked.op, segments=self.says.units())
                        speaker.send(answer, self.key)
                    elif asked.type == Type.PING:
                        speaker.send(*self.pong(asked))
                    elif asked.type == Type.NOTIFY and self.answer is not None:
                        speaker.send(*self.answer(asked))
            except (kvxd.Refused, TimeoutError):
                return


@asynccontextmanager
async def liar(says: Location, **changes: Any) -> AsyncIterator[Liar]:
    made = Liar(replace(says, **changes))
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    made.endpoint = f"{host}:{port}"
    async with server:
        yield made
