"""The parts of the simulated world: time, processes that die or freeze, and streams that behave like TCP."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

import pytest

from kvxfer.native.engine import Engine
from tests.support.sim.engine import SimEngine
from tests.support.sim.loop import Process, SimLoop, Stuck, run_in
from tests.support.sim.network import Host, Network, SimTransport

pytestmark = pytest.mark.once


class Peer(asyncio.Protocol):
    """Keeps what it got."""

    def __init__(self) -> None:
        self.got = bytearray()
        self.ended: list[Exception | None] = []
        self.transport: SimTransport

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.got += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.append(exc)


class Pair:
    """Two hosts with a process each, and a connection between them."""

    def __init__(self, seed: int = 1) -> None:
        self.loop = SimLoop()
        self.network = self.loop.network = Network(self.loop, Random(seed))
        self.hosts = [self.network.host("a", "10.0.0.1"), self.network.host("b", "10.0.0.2")]
        self.client = Process(self.loop, self.hosts[0], "client")
        self.server = Process(self.loop, self.hosts[1], "server")
        self.accepted: list[Peer] = []

    def _accept(self) -> Peer:
        self.accepted.append(Peer())
        return self.accepted[-1]

    def serve(self) -> None:
        self.network.listen(("10.0.0.2", 1)).serve(self._accept)

    async def connect(self) -> Peer:
        run_in(self.server, self.serve)
        _, near = await self.network.connect(Peer, ("10.0.0.2", 1))
        await asyncio.sleep(0.01)
        return near  # type: ignore[no-any-return]

    def run(self, work: Callable[[Pair], Coroutine[Any, Any, None]]) -> None:
        try:
            run_in(self.client, self.loop.run_until_complete, work(self))
        finally:
            self.loop.close()


def test_time_jumps() -> None:
    async def work(pair: Pair) -> None:
        before = pair.loop.time()
        await asyncio.sleep(3600)
        assert pair.loop.time() == before + 3600

    Pair().run(work)


def test_waiting_for_nothing_is_an_error() -> None:
    loop = SimLoop()
    with pytest.raises(Stuck):
        loop.run_until_complete(loop.create_future())
    loop.close()


@pytest.mark.parametrize("seed", range(5))
def test_a_stream_keeps_every_byte_in_order(seed: int) -> None:
    async def work(pair: Pair) -> None:
        weather = pair.network.weather
        weather.loss, weather.split = 0.2, 0.5
        near = await pair.connect()
        sent = bytearray()
        for number in range(200):
            piece = Random(number).randbytes(1 + number % 7)
            near.transport.write(piece)
            sent += piece
            if number % 3:
                await asyncio.sleep(0.001)
        near.transport.close()
        await asyncio.sleep(500)
        assert pair.accepted[0].got == sent
        assert pair.accepted[0].ended == near.ended == [None]

    Pair(seed).run(work)


def test_a_partition_is_silence_and_then_retransmission() -> None:
    async def work(pair: Pair) -> None:
        near = await pair.connect()
        pair.network.partitions = {("a", "b")}
        near.transport.write(b"held")
        await asyncio.sleep(10)
        assert not pair.accepted[0].got
        pair.network.partitions.clear()
        pair.network.heal()
        await asyncio.sleep(1)
        assert pair.accepted[0].got == b"held"
        assert not near.ended

    Pair().run(work)


def test_a_killed_process_runs_no_more_and_its_kernel_tells_the_others() -> None:
    async def work(pair: Pair) -> None:
        near = await pair.connect()
        ran: list[str] = []

        async def forever() -> None:
            try:
                await asyncio.sleep(1)
            finally:
                ran.append("finally")

        run_in(pair.server, pair.loop.create_task, forever())
        run_in(pair.server, pair.loop.call_later, 0.5, ran.append, "timer")
        pair.server.kill()
        await asyncio.sleep(5)
        assert not ran
        assert len(near.ended) == 1
        with pytest.raises(ConnectionRefusedError):
            await pair.network.connect(Peer, ("10.0.0.2", 1))
        pair.server.raise_from_the_dead()
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    Pair().run(work)


def test_a_machine_that_is_gone_says_nothing() -> None:
    async def work(pair: Pair) -> None:
        near = await pair.connect()
        pair.hosts[1].up = False
        pair.server.kill(silent=True)
        near.transport.write(b"hello?")
        await asyncio.sleep(60)
        assert not near.ended
        pair.hosts[1].up = True  # it booted, and knows nothing of the connection
        near.transport.write(b"hello?")
        await asyncio.sleep(1)
        assert [type(error) for error in near.ended] == [ConnectionResetError]

    Pair().run(work)


def test_a_frozen_process_goes_on_where_it_was() -> None:
    async def work(pair: Pair) -> None:
        near = await pair.connect()
        pair.server.freeze()
        near.transport.write(b"later")
        await asyncio.sleep(5)
        assert not pair.accepted[0].got
        pair.server.thaw()
        await asyncio.sleep(0.01)
        assert pair.accepted[0].got == b"later"

    Pair().run(work)


def test_a_reader_that_pauses_fills_the_writers_buffer() -> None:
    async def work(pair: Pair) -> None:
        near = await pair.connect()
        far = pair.accepted[0]
        far.transport.pause_reading()
        for _ in range(4):
            near.transport.write(bytes(32 << 10))
            await asyncio.sleep(0.01)
        assert near.transport.get_write_buffer_size() == 64 << 10
        far.transport.resume_reading()
        await asyncio.sleep(0.01)
        assert near.transport.get_write_buffer_size() == 0
        assert len(far.got) == 128 << 10

    Pair().run(work)


def test_nobody_listens_on_an_unknown_host() -> None:
    async def work(pair: Pair) -> None:
        with pytest.raises(OSError, match="No route"):
            await pair.network.connect(Peer, ("10.9.9.9", 1))
        assert isinstance(pair.hosts[0], Host)

    Pair().run(work)


def test_the_simulated_engine_has_the_methods_of_the_engine() -> None:
    """Whoever adds a method to the engine, or changes one, finds out here that the simulator needs it too."""
    elsewhere = {"closed", "step", "register", "device", "device_count", "read", "read_into", "write"}  # not simulated
    names = {name for name in vars(Engine) if not name.startswith("_")} - elsewhere
    assert {name for name in names if not hasattr(SimEngine, name)} == set()
    for name in names:
        wanted, found = (list(inspect.signature(getattr(kind, name)).parameters) for kind in (Engine, SimEngine))
        assert found == wanted, name
