"""The proxy passes everything on unless it is told otherwise, and then does exactly that."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvxfer.wire import messages as m
from kvxfer.wire.framing import PREAMBLE, encode
from tests.conftest import slack
from tests.support.frames import CONTROL
from tests.support.proxy import Proxy, proxy

PINGS = [encode(m.Ping(rid=number)) for number in range(1, 6)]


@asynccontextmanager
async def echoing() -> AsyncIterator[tuple[Proxy, asyncio.StreamReader, asyncio.StreamWriter]]:
    """A target that sends back every frame (without the preamble), the proxy before it, and a connection to that."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readexactly(len(PREAMBLE))
            while data := await reader.read(65536):
                writer.write(data)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
            ended.set()

    ended = asyncio.Event()
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    async with server, proxy(server.sockets[0].getsockname()[:2], CONTROL) as found:
        reader, writer = await asyncio.open_connection(*found.address)
        writer.write(PREAMBLE)
        yield found, reader, writer
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        found.reset_all()
        await asyncio.wait_for(ended.wait(), 5 * slack())


async def answers(reader: asyncio.StreamReader, count: int) -> bytes:
    return await asyncio.wait_for(reader.readexactly(count), 5 * slack())


async def test_it_passes_everything_on() -> None:
    async with echoing() as (found, reader, writer):
        writer.write(b"".join(PINGS))
        assert await answers(reader, len(b"".join(PINGS))) == b"".join(PINGS)
        assert found.frames == {("up", "PREAMBLE"): 1, ("up", "Ping"): 5, ("down", "Ping"): 5}
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), 5 * slack()) == b""


@pytest.mark.parametrize("direction", ["up", "down"])
async def test_it_swallows_the_nth_frame(direction: str) -> None:
    async with echoing() as (found, reader, writer):
        rule = found.rule(direction, "Ping", "swallow", nth=2, times=2)
        for ping in PINGS:
            writer.write(ping)
        left = PINGS[0] + PINGS[3] + PINGS[4]
        assert await answers(reader, len(left)) == left
        assert rule.fired.is_set()


async def test_it_delays_and_pauses() -> None:
    async with echoing() as (found, reader, writer):
        found.delay_s["up"] = 0.1
        began = time.monotonic()
        writer.write(PINGS[0])
        assert await answers(reader, len(PINGS[0])) == PINGS[0]
        assert time.monotonic() - began >= 0.099  # the timers of uvloop count whole milliseconds
        found.pause()
        writer.write(PINGS[1])
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.readexactly(1), 0.15)
        found.resume()
        assert await answers(reader, len(PINGS[1])) == PINGS[1]


@pytest.mark.parametrize("action", ["cut", "reset"])
async def test_it_resets(action: str) -> None:
    async with echoing() as (found, reader, writer):
        found.rule("up", "Ping", action, nth=2)
        writer.write(PINGS[0])
        assert await answers(reader, len(PINGS[0])) == PINGS[0]
        writer.write(PINGS[1])
        with pytest.raises(ConnectionResetError):
            while await asyncio.wait_for(reader.read(100), 5 * slack()):
                pass


async def test_silence_lasts_until_it_heals() -> None:
    async with echoing() as (found, reader, writer):
        found.black_hole()
        writer.write(PINGS[0])
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.readexactly(1), 0.1)
        other, its_writer = await asyncio.open_connection(*found.address)
        its_writer.write(PREAMBLE + PINGS[0])
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(other.readexactly(1), 0.1)
        found.heal()
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(other.readexactly(1), 5 * slack())
        its_writer.close()
        with contextlib.suppress(OSError):
            await its_writer.wait_closed()


async def test_half_close() -> None:
    async with echoing() as (found, reader, writer):
        writer.write(PINGS[0])
        assert await answers(reader, len(PINGS[0])) == PINGS[0]
        found.half_close_all("up")
        assert await asyncio.wait_for(reader.read(), 5 * slack()) == b"", "the target has seen the end and closed"


async def test_bad_rules_are_refused() -> None:
    async with echoing() as (found, _, _):
        with pytest.raises(ValueError, match="no such rule"):
            found.rule("sideways", "Ping", "swallow")
