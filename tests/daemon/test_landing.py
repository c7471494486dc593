"""The landing pool: a push lands in the daemon's memory, a local worker adopts it, every way out frees it."""

from __future__ import annotations

import asyncio
from typing import Any

import msgpack
import numpy as np
import pytest

from kvxfer.daemon import landing as pool_module
from kvxfer.dataplane.plane import WorkRequest
from kvxfer.descriptors import RemoteDescriptor
from kvxfer.errors import (
    AccessDenied,
    BusyError,
    ConfigError,
    GeometryMismatch,
    KvxferError,
    LeaseExpired,
    PeerDraining,
    PeerLost,
    TooLarge,
    TransferCancelled,
    UnknownTransfer,
    UsageError,
)
from kvxfer.native.engine import Event, EventKind, OpKind
from kvxfer.server import Server
from kvxfer.wire import messages as m
from kvxfer.wire import tags
from tests.conftest import slack
from tests.nodes import Worker, node, until, worker

MIB = 1 << 20


def land(key: str = "request", length: int = MIB, **changes: object) -> m.Land:
    return m.Land(**({"key": key, "length": length, "body": b"what lies where", "lease_s": 30.0} | changes))


def adopt(key: str = "request", **changes: object) -> m.Claim:
    return m.Claim(**({"kind": "landing", "key": key} | changes))


def settle(claimed: m.Claimed, outcome: str = "done", code: str = "") -> m.Settle:
    return m.Settle(posting=claimed.posting, claim=claimed.claim, outcome=outcome, code=code)


def descriptor_of(claimed: m.Claimed) -> RemoteDescriptor:
    body: dict[str, Any] = msgpack.unpackb(claimed.body)
    assert body["body"] == b"what lies where"
    return RemoteDescriptor.from_dict(body["descriptor"])


class Pusher:
    """Writes into a landing from the daemon's own engine, by the transport that every engine has."""

    def __init__(self, server: Server, length: int = MIB) -> None:
        self.plane = server.plane
        self.engine = server.engine
        self.region = self.engine.alloc(length)
        self.memory = np.frombuffer(self.engine.buffer(self.region), dtype=np.uint8)
        self.memory[:] = np.random.default_rng(7).integers(0, 256, length, dtype=np.uint8)

    async def write(self, claimed: m.Claimed, kind: int | None = tags.COMMIT) -> None:
        descriptor = descriptor_of(claimed)
        tag = None if kind is None else (tags.pack(kind, claimed.claim), 0)
        part = WorkRequest(
            kind=OpKind.PUT,
            region=self.region.id,
            descriptor=descriptor,
            span=(0, 0, descriptor.length),
            notify=tag,
        )
        await self.plane.start([part], timeout=5, peer="landing")
        self.plane.drop_import(descriptor)


async def free(server: Server) -> None:
    """Wait until the pool has got everything back."""
    pool = server.landings
    await until(lambda: (pool.live, pool.quarantined, pool.used_bytes) == (0, 0, 0))
    server.registry.check()


async def committed(server: Server, asker: Worker, key: str = "request") -> m.Claimed:
    claimed: m.Claimed = await asker.ask(land(key))
    await Pusher(server).write(claimed)
    await asker.ask(settle(claimed))
    return claimed


async def test_push_lands_and_is_adopted_in_place() -> None:
    async with node() as server, worker(server) as pusher, worker(server) as adopter:
        waiting = asyncio.ensure_future(adopter.ask(adopt(wait_s=5.0)))
        claimed = await pusher.ask(land())
        written = descriptor_of(claimed)
        assert (written.length, written.access) == (MIB, 2)
        source = Pusher(server)
        await source.write(claimed)
        await pusher.ask(settle(claimed))
        adopted = await waiting
        readable = descriptor_of(adopted)
        assert (readable.region, readable.access) == (written.region, 1)
        target = server.engine.alloc(MIB)
        get = WorkRequest(kind=OpKind.GET, region=target.id, descriptor=readable, span=(0, 0, MIB))
        await server.plane.start([get], timeout=5, peer="landing")
        assert np.array_equal(np.frombuffer(server.engine.buffer(target), dtype=np.uint8), source.memory)
        with pytest.raises(UnknownTransfer):
            await pusher.ask(adopt())  # one adopter only
        await adopter.ask(settle(adopted))
        await free(server)
        assert server.landings.landed == 1
        assert server.landings.kept_bytes == MIB


async def test_write_access_ends_with_the_commit() -> None:
    async with node() as server, worker(server) as pusher, worker(server) as adopter:
        claimed = await pusher.ask(land())
        source = Pusher(server)
        await source.write(claimed)
        await adopter.ask(adopt(wait_s=5.0))
        with pytest.raises((UnknownTransfer, AccessDenied)):
            await source.write(claimed)


@pytest.mark.parametrize("outcome", ["failed", "cancelled"])
async def test_writer_that_gives_up_frees_the_memory(outcome: str) -> None:
    async with node() as server, worker(server) as pusher:
        claimed = await pusher.ask(land())
        await pusher.ask(settle(claimed, outcome, "timeout"))
        await free(server)
        assert (await pusher.ask(land())).claim == 1  # the key can be used again


async def test_dead_writer_frees_the_memory() -> None:
    async with node() as server, worker(server) as pusher:
        await pusher.ask(land())
        pusher.link.abort()
        await free(server)


async def test_dead_adopter_frees_the_memory() -> None:
    async with node() as server, worker(server) as pusher, worker(server) as adopter:
        await committed(server, pusher)
        await adopter.ask(adopt(wait_s=5.0))
        adopter.link.abort()
        await free(server)


async def test_landing_outlives_its_writer() -> None:
    async with node() as server, worker(server) as adopter:
        async with worker(server) as pusher:
            await Pusher(server).write(await pusher.ask(land()))
            await until(lambda: server.landings.landed == 1)
        assert descriptor_of(await adopter.ask(adopt())).length == MIB


@pytest.mark.parametrize("stage", ["written", "adoptable", "adopted"])
async def test_lease_frees_the_memory_at_every_stage(stage: str) -> None:
    async with node() as server, worker(server) as pusher, worker(server) as adopter:
        # Long enough for a busy machine to get as far as the stage wants before it ends.
        claimed = await pusher.ask(land(lease_s=0.3 if stage == "written" else 1.5))
        if stage != "written":
            await Pusher(server).write(claimed)
        if stage == "adopted":
            await adopter.ask(adopt(wait_s=5.0))
            await adopter.inbox.take(m.PostingEvent, what="expired")
        await free(server)


async def test_full_pool_says_so_at_once_and_recovers() -> None:
    async with node(landing_bytes_max=2 * MIB) as server, worker(server) as pusher:
        first = await pusher.ask(land("a"))
        await pusher.ask(land("b"))
        with pytest.raises(BusyError) as caught:
            await pusher.ask(land("c"), timeout=1)
        assert caught.value.fields["limit"] == 2 * MIB
        assert caught.value.fields["option"] == "landing_bytes_max"
        assert caught.value.retryable
        assert server.landings.refused == 1
        await pusher.ask(settle(first, "cancelled"))
        await until(lambda: server.landings.kept_bytes == MIB)
        await pusher.ask(land("c"))


async def test_kept_memory_makes_room_for_another_size() -> None:
    async with node(landing_bytes_max=2 * MIB) as server, worker(server) as pusher:
        for key in "ab":
            await pusher.ask(settle(await pusher.ask(land(key, MIB)), "cancelled"))
        await free(server)
        claimed = await pusher.ask(land("large", 2 * MIB))
        assert descriptor_of(claimed).length == 2 * MIB
        assert server.landings.kept_bytes + server.landings.used_bytes <= 2 * MIB


async def test_memory_is_used_again() -> None:
    async with node() as server, worker(server) as pusher:
        regions = set()
        for _ in range(5):
            claimed = await pusher.ask(land())
            regions.add(descriptor_of(claimed).region)
            await pusher.ask(settle(claimed, "cancelled"))
            await free(server)
        assert len(regions) == 1


async def test_pieces_are_bounded_and_kept_ones_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "PIECES_MAX", 3)
    async with node() as server, worker(server) as pusher:
        [part] = server.landings.parts
        held = [await pusher.ask(land(f"{number}", 4096)) for number in range(3)]
        with pytest.raises(BusyError):
            await pusher.ask(land("one more", 4096))
        for claimed in held:
            await pusher.ask(settle(claimed, "cancelled"))
        await free(server)
        assert part.count == 3
        await pusher.ask(land("larger", MIB))
        assert part.count == 3
        assert len(part.kept) == 2


async def test_reused_memory_holds_nothing_of_an_earlier_request() -> None:
    async with node() as server, worker(server) as pusher, worker(server) as adopter:
        claimed = await committed(server, pusher)
        adopted = await adopter.ask(adopt(wait_s=5.0))
        (landing,) = server.landings._by_key.values()
        assert landing.region is not None
        memory = np.frombuffer(server.engine.buffer(landing.region), dtype=np.uint8)
        assert memory.any()
        await adopter.ask(settle(adopted))
        await free(server)
        assert not memory.any()
        again = await pusher.ask(land("second", MIB // 2))
        assert descriptor_of(again).region == descriptor_of(claimed).region


async def test_what_can_never_fit_and_a_key_in_use_are_refused() -> None:
    async with node(landing_bytes_max=MIB) as server, worker(server) as pusher:
        with pytest.raises(TooLarge):
            await pusher.ask(land(length=MIB + 1))
        await pusher.ask(land())
        with pytest.raises(UsageError, match="key"):
            await pusher.ask(land(length=4096))


async def test_no_pool_at_all() -> None:
    async with node(landing_bytes_max=0) as server, worker(server) as pusher:
        with pytest.raises(TooLarge):
            await pusher.ask(land(length=1))


async def test_landing_at_another_node() -> None:
    async with node() as here, node() as there, worker(here) as pusher, worker(there) as adopter:
        claimed = await pusher.ask(land(node=there.addresses))
        assert claimed.node_id == there.node_id
        await Pusher(there).write(claimed)
        await pusher.ask(m.Settle(node=there.addresses, posting=claimed.posting, claim=claimed.claim, outcome="done"))
        assert descriptor_of(await adopter.ask(adopt(wait_s=5.0))).length == MIB


async def test_lost_link_lets_the_data_path_go_on() -> None:
    async with node() as here, node() as there, worker(here) as pusher, worker(there) as adopter:
        claimed = await pusher.ask(land(node=there.addresses))
        here.pool.links[0].abort()
        await pusher.inbox.take(m.PostingEvent, what="orphaned")
        await Pusher(there).write(claimed)
        assert descriptor_of(await adopter.ask(adopt(wait_s=5.0))).length == MIB


async def test_cards_for_landings_that_are_not_there_are_told_at_the_start() -> None:
    with pytest.raises(ConfigError, match="landing_memory"):
        async with node(landing_memory="hbm"):
            pass


async def test_draining_node_takes_no_landing() -> None:
    async with node(drain_s=0) as server, worker(server) as pusher:
        await server.drain()
        with pytest.raises(PeerDraining):
            await pusher.ask(land())


async def test_prewarmed_memory_is_there_and_used() -> None:
    async with node(landing_prewarm_bytes=3 * MIB, landing_bytes_max=8 * MIB) as server, worker(server) as pusher:
        await until(lambda: server.landings.kept_bytes >= 3 * MIB)
        await pusher.ask(land(length=2 * MIB))
        assert server.landings.kept_bytes == 0


async def test_what_would_be_too_large_once_rounded_up_fails_at_once() -> None:
    """The pool gives memory in pieces of 2 MiB: 2.5 MiB would never find room in one of 3 MiB."""
    async with node(landing_bytes_max=3 * MIB) as server, worker(server) as pusher:
        with pytest.raises(TooLarge) as caught:
            await pusher.ask(land(length=5 * MIB // 2))
        assert (caught.value.fields["limit"], caught.value.fields["bytes"]) == (3 * MIB, 4 * MIB)
        await pusher.ask(land(length=2 * MIB))


async def test_more_prewarmed_memory_than_the_host_has_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="landing_prewarm_bytes"):
        async with node(landing_prewarm_bytes="3TiB", landing_bytes_max="4TiB"):
            pass


async def test_what_is_given_up_while_its_memory_is_allocated_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    async with node() as server, worker(server) as asker:
        allocate, allocating, go_on = pool_module.BufferCache.allocate, asyncio.Event(), asyncio.Event()

        async def slowly(part: Any, size: int) -> Any:
            allocating.set()
            await go_on.wait()
            return await allocate(part, size)

        monkeypatch.setattr(pool_module.BufferCache, "allocate", slowly)
        asked = asyncio.ensure_future(asker.ask(land()))
        await allocating.wait()
        asked.cancel()
        await asker.ask(m.Echo(data=b"it was heard before this"))
        go_on.set()
        await free(server)
        assert not server.registry.tally.ended, "nobody was given a claim"
        await asker.ask(land())
        assert not server.landings._allocating


async def adopting(local: Worker, key: str = "request") -> asyncio.Future[Any]:
    """A worker that waits for a landing which is being written."""
    waiting = asyncio.ensure_future(local.link.request(adopt(key, wait_s=30.0), timeout=40))
    await local.ask(m.Echo())  # the claim has been read
    return waiting


ENDS: dict[str, type[KvxferError]] = {
    "settled cancelled": TransferCancelled,
    "settled failed": GeometryMismatch,
    "closed": TransferCancelled,
    "died": PeerLost,
    "expired": LeaseExpired,
    "vanished": PeerLost,
    "drained": TransferCancelled,
}


@pytest.mark.parametrize("end", ENDS)
async def test_who_waits_to_adopt_hears_at_once_that_the_landing_died(end: str) -> None:
    async with node() as server, worker(server) as local, worker(server) as asker:
        found = await asker.ask(land(lease_s=0.3 if end == "expired" else 30.0))
        waiting = await adopting(local)
        match end:
            case "settled cancelled":
                await asker.ask(settle(found, "cancelled"))
            case "settled failed":
                await asker.ask(settle(found, "failed", "geometry"))
            case "closed":
                await asker.ask(settle(found, "failed", "closed"))
            case "died":
                asker.link.abort()
            case "vanished":
                [landing] = server.landings._by_key.values()
                server.landings._on_engine(landing, Event(EventKind.GRANT_LOST, 0, 0, 1, 0, 0, 0, 0, -1))
            case "drained":
                server.dispatcher.run(server.registry.abort_claimed(server.dispatcher._clock()))
        with pytest.raises(KvxferError) as told:
            await asyncio.wait_for(waiting, 2 * slack())
        assert isinstance(told.value, PeerDraining if end == "drained" else ENDS[end])
        await free(server)


async def test_why_a_landing_died_is_told_although_its_connection_ended_first() -> None:
    async with node() as server, worker(server) as asker, worker(server) as local:
        found = await asker.ask(land())
        waiting = await adopting(local)
        [landing] = server.landings._by_key.values()
        server.landings._on_engine(landing, Event(EventKind.GRANT_LOST, 0, 0, 1, 0, 0, 0, 0, -1))
        await asker.ask(settle(found, "cancelled"))
        with pytest.raises(TransferCancelled):
            await asyncio.wait_for(waiting, 2 * slack())


@pytest.mark.parametrize("end", ["given up", "died"])
async def test_who_waits_to_adopt_hears_that_a_push_left_the_line(end: str) -> None:
    async with (
        node(landing_bytes_max=MIB) as server,
        worker(server) as holder,
        worker(server) as local,
        worker(server) as asker,
    ):
        await holder.ask(land("other"))
        pushing = asyncio.ensure_future(asker.link.request(land(wait_s=30.0), timeout=40))
        await asker.ask(m.Echo())
        waiting = await adopting(local)
        if end == "died":
            asker.link.abort()
        else:
            pushing.cancel()
        with pytest.raises(PeerLost if end == "died" else TransferCancelled):
            await asyncio.wait_for(waiting, 2 * slack())
        await asyncio.gather(pushing, return_exceptions=True)


async def test_who_adopts_later_waits_for_the_next_push() -> None:
    async with node() as server, worker(server) as asker, worker(server) as local:
        await asker.ask(settle(await asker.ask(land()), "cancelled"))
        await free(server)
        waiting = await adopting(local)
        await committed(server, asker)
        assert isinstance(await asyncio.wait_for(waiting, 5 * slack()), m.Claimed)


async def test_a_push_that_was_refused_leaves_its_adopter_waiting_for_the_next_try() -> None:
    async with node(landing_bytes_max=MIB) as server, worker(server) as asker, worker(server) as local:
        held = await asker.ask(land("other"))
        waiting = await adopting(local)
        with pytest.raises(BusyError):
            await asker.ask(land())
        await asker.ask(settle(held, "cancelled"))
        await free(server)
        await committed(server, asker)
        assert isinstance(await asyncio.wait_for(waiting, 5 * slack()), m.Claimed)
