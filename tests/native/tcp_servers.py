"""Servers that only look like an owner, for the tests of the tcp transport."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from tests.native import kvxd
from tests.native.kvxd import Frame, Speaker, Type
from tests.native.tcp_owner import KEY


@asynccontextmanager
async def server(serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> AsyncIterator[str]:
    """A server of our own on loopback; ends its connections at the end."""
    writers: list[asyncio.StreamWriter] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with suppress(kvxd.Refused, ConnectionError):
            await serve(reader, writer)

    made = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{made.sockets[0].getsockname()[1]}"
    finally:
        made.close()
        for writer in writers:
            writer.close()


def taken(asked: Frame) -> tuple[Frame, bytes]:
    """An import as it should be answered."""
    return Frame(type=Type.ACK, op=asked.op, segment=kvxd.SEGMENT_UNKNOWN), KEY


@asynccontextmanager
async def lying_owner(
    act: Callable[[Speaker, Frame], Awaitable[None]], *, attach: Callable[[Frame], tuple[Frame, bytes]] = taken
) -> AsyncIterator[str]:
    """Greets and accepts an import as it should; what follows is up to the test."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        speaker = Speaker(reader, writer, kvxd.ACCEPTOR)
        await speaker.greet()
        while True:
            frame = await speaker.frame(KEY)
            assert frame.proved
            if frame.type == Type.ATTACH:
                speaker.send(*attach(frame))
            elif frame.type != Type.DETACH:
                await act(speaker, frame)

    async with server(serve) as endpoint:
        yield endpoint
