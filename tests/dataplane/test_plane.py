"""Routes, imports and windows of the data plane, with real engines and without daemons."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvxfer.config import Config
from kvxfer.dataplane.admission import rank_of
from kvxfer.dataplane.plane import DataPlane, PendingWork, WorkRequest
from kvxfer.dataplane.transfer import Transfer
from kvxfer.descriptors import RemoteDescriptor
from kvxfer.errors import (
    ClosedError,
    InternalError,
    KvxferError,
    PeerUnreachable,
    TransferCancelled,
    TransferTimeout,
    UsageError,
    WrongKey,
)
from kvxfer.memory.region import Region
from kvxfer.native.engine import Engine, EngineConfig, OpKind, Priority

LENGTH = 1 << 20


class Side:
    """One engine, its plane and one region."""

    def __init__(self, transports: tuple[str, ...], directory: Path, **options: object) -> None:
        config = Config.embedded(transports=transports, socket_dir=str(directory), **options)
        engine = Engine(EngineConfig.from_config(config, secrets.token_bytes(16)))
        self.plane = DataPlane(engine, config, node_id="0" * 32, incarnation="0" * 32, advertise=())
        info = engine.alloc(LENGTH)
        view = engine.buffer(info)
        self.region = Region(self.plane, info, np.frombuffer(view, dtype=np.uint8), view)

    def start(self, target: RemoteDescriptor, length: int = LENGTH, kind: OpKind = OpKind.PUT, timeout: float = 5):
        part = WorkRequest(kind=kind, region=self.region.id, descriptor=target, span=(0, 0, length))
        return self.plane.start((part,), timeout=timeout, peer="test")


@asynccontextmanager
async def sides(
    directory: Path, first: tuple[str, ...], second: tuple[str, ...] | None = None, **options: object
) -> AsyncIterator[tuple[Side, Side]]:
    async with AsyncExitStack() as stack:
        a, b = Side(first, directory, **options), Side(second or first, directory, **options)
        stack.push_async_callback(a.plane.aclose)
        stack.push_async_callback(b.plane.aclose)
        yield a, b


async def test_the_best_transport_that_works_is_chosen_and_the_others_reasons_are_kept(tmp_path: Path) -> None:
    async with sides(tmp_path, ("shm", "tcp")) as (a, b):
        described = b.region.descriptor("w")
        broken = {**described.endpoints, "shm": ("0" * 32 + ":/nowhere.sock",)}
        transfer = await a.start(replace(described, endpoints=broken))
        assert transfer.transport == "tcp"
        choice = a.plane.choices[b.plane.engine_id, "dram to dram"]
        assert choice.transport == "tcp"
        assert any("shm" in reason for reason in choice.passed_over)
        transfer = await a.start(b.region.descriptor("w"))
        assert transfer.transport == "shm"


async def test_nothing_else_is_tried_when_it_is_not_allowed(tmp_path: Path) -> None:
    async with sides(tmp_path, ("tcp",), ("shm",)) as (a, b):
        with pytest.raises(PeerUnreachable, match="shm"):
            await a.start(b.region.descriptor("w"))
        assert not b.region.array.any()


async def test_many_first_transfers_share_one_connection(tmp_path: Path) -> None:
    async with sides(tmp_path, ("tcp",), tcp_streams=1) as (a, b):
        described = b.region.descriptor("w")
        await asyncio.gather(*(a.start(described, 4096).wait_settled() for _ in range(50)))
        rows = {row.name: row for row in b.plane.engine.counters().transports}
        assert rows["tcp"].peers_accepted == 1


async def test_a_wrong_key_is_refused_by_the_owner(tmp_path: Path) -> None:
    for transport in ("shm", "tcp"):
        async with sides(tmp_path, (transport,)) as (a, b):
            forged = replace(b.region.descriptor("w"), key=b"k" * 16)
            with pytest.raises(WrongKey):
                await a.start(forged)
            assert not b.region.array.any()
            await a.start(b.region.descriptor("w"))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_after_the_owner_restarted_a_new_descriptor_works(tmp_path: Path, transport: str) -> None:
    async with sides(tmp_path, (transport,)) as (a, b):
        a.region.array[:] = 1
        await a.start(b.region.descriptor("w"))
        stale = b.region.descriptor("w")
        await b.plane.aclose()
        with pytest.raises(KvxferError):
            await a.start(stale)
        reborn = Side((transport,), tmp_path)
        try:
            await a.start(reborn.region.descriptor("w"))
            assert reborn.region.array.all()
        finally:
            await reborn.plane.aclose()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_more_transfers_than_the_window_wait_their_turn(tmp_path: Path, transport: str) -> None:
    async with sides(tmp_path, (transport,), window_ops_max=2, inflight_max=4) as (a, b):
        a.region.array[:] = 3
        described = b.region.descriptor("w")
        transfers = [a.start(described) for _ in range(40)]
        for transfer in transfers:
            await transfer
        assert b.region.array.all()
        assert a.plane.engine.counters().inflight == 0


async def test_cancelling_what_waits_in_line(tmp_path: Path) -> None:
    async with sides(tmp_path, ("tcp",), window_ops_max=1) as (a, b):
        described = b.region.descriptor("w")
        await a.start(described, 4096)
        transfers = [a.start(described) for _ in range(10)]
        async with asyncio.timeout(5):
            for transfer in transfers[1:]:  # without a pause, in which the line would move on
                await transfer.cancel()
                assert transfer.state == "cancelled"
        await transfers[0]
        await a.start(described)


async def test_closing_with_a_line_ends_everybody_in_it(tmp_path: Path) -> None:
    async with sides(tmp_path, ("tcp",), window_ops_max=1) as (a, b):
        described = b.region.descriptor("w")
        await a.start(described, 4096)
        transfers = [a.start(described) for _ in range(10)]
        failures: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
        await a.plane.aclose()
        assert failures == []
        assert all(transfer.done for transfer in transfers)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_after_cancel_no_byte_moves(tmp_path: Path, transport: str) -> None:
    options = {"chunk_bytes": 4096, "frame_bytes": 4096, "inline_bytes_max": 0}
    async with sides(tmp_path, (transport,), **options) as (a, b):
        described = b.region.descriptor("w")
        await a.start(described, 4096)
        for round_number in range(60):
            a.region.array[:] = 1 + round_number % 250
            transfer = a.start(described)
            await asyncio.sleep(0)
            await asyncio.wait_for(transfer.cancel(), 5)
            b.region.array[:] = 255
            await asyncio.sleep(0.001)
            assert (b.region.array == 255).all(), f"bytes moved after cancel, round {round_number}"


async def test_closing_ends_everything(tmp_path: Path) -> None:
    async with sides(tmp_path, ("tcp",)) as (a, b):
        described = b.region.descriptor("w")
        transfers = [a.start(described) for _ in range(20)]
        await a.plane.aclose()
        for transfer in transfers:
            await asyncio.wait_for(transfer.wait_settled(), 5)
            assert transfer.done
        with pytest.raises(ClosedError):
            a.start(described)


async def test_an_unreachable_endpoint_ends_by_the_deadline(tmp_path: Path) -> None:
    async with sides(tmp_path, ("tcp",)) as (a, b):
        silent = await asyncio.start_server(lambda reader, writer: asyncio.sleep(60), "127.0.0.1", 0)
        port = silent.sockets[0].getsockname()[1]
        described = replace(b.region.descriptor("w"), endpoints={"tcp": (f"127.0.0.1:{port}",)})
        with pytest.raises((TransferTimeout, PeerUnreachable)):
            await a.start(described, timeout=0.3)
        silent.close()


async def test_notifications_reach_the_watcher_and_strays_are_counted(tmp_path: Path) -> None:
    async with sides(tmp_path, ("shm",)) as (a, b):
        described, told = b.region.descriptor("w"), []
        b.plane.memory.subscribe(described.grant, told.append)
        for tag in (1, 2, 3):
            part = WorkRequest(kind=OpKind.PUT, region=0, descriptor=described, notify=(tag, tag * 10))
            await a.plane.start((part,), timeout=5, peer="test")
        while len(told) < 3:
            await asyncio.sleep(0.001)
        assert [(event.tag, event.value) for event in told] == [(1, 10), (2, 20), (3, 30)]
        b.plane.memory.unsubscribe(described.grant)
        part = WorkRequest(kind=OpKind.PUT, region=0, descriptor=described, notify=(4, 4))
        await a.plane.start((part,), timeout=5, peer="test")
        while not b.plane.unexpected_notifications:
            await asyncio.sleep(0.001)
        assert b.plane.unexpected_notifications == 1


async def test_a_cancelled_first_transfer_does_not_hurt_the_others(tmp_path: Path) -> None:
    async with sides(tmp_path, ("tcp",)) as (a, b):
        described = b.region.descriptor("w")
        first, second = a.start(described), a.start(described)
        await first.cancel()
        assert first.state in ("cancelled", "done")
        if first.state == "cancelled":
            with pytest.raises(TransferCancelled):
                await first
        assert (await second).state == "done"


async def test_cancelling_a_transfer_whose_parts_wait_in_line_ends_each_part_once(tmp_path: Path) -> None:
    async with sides(tmp_path, ("tcp",), window_ops_max=1) as (a, b):
        described = b.region.descriptor("w")
        await a.start(described, 4096)
        first = a.start(described)
        part = WorkRequest(kind=OpKind.PUT, region=a.region.id, descriptor=described, span=(0, 0, LENGTH))
        for count in (2, 5):
            many = a.plane.start([part] * count, timeout=5, peer="test")
            await asyncio.wait_for(many.cancel(), 5)
            assert many._parts_left == 0
        await first
        assert (await a.start(described)).state == "done"
        [ready] = a.plane._connections._imports.values()
        assert ready.users == 0
        assert a.plane._queue.admission.inflight_ops == 0


async def test_arguments_that_do_not_fit_fail_the_transfer_and_free_its_place(tmp_path: Path) -> None:
    async with sides(tmp_path, ("shm",), window_ops_max=1) as (a, b):
        described = b.region.descriptor("w")
        await a.start(described, 4096)
        for notify in ((2**64, 0), (0, 2**64), (-1, 0), ("1", 0)):
            part = WorkRequest(
                kind=OpKind.PUT,
                region=a.region.id,
                descriptor=described,
                span=(0, 0, LENGTH),
                notify=notify,  # type: ignore[arg-type]
            )
            with pytest.raises(UsageError):
                await a.plane.start([part], timeout=5, peer="test")
        assert a.plane._queue.admission.inflight_ops == 0
        await a.start(described)


async def test_while_it_closes_nothing_begins(tmp_path: Path) -> None:
    async with sides(tmp_path, ("tcp",)) as (a, b):
        described = b.region.descriptor("w")
        pending = a.start(described)
        closing = asyncio.ensure_future(a.plane.aclose())
        await asyncio.sleep(0)
        with pytest.raises(ClosedError):
            a.start(described)
        await closing
        assert pending.settled


async def test_more_notifications_than_a_batch_are_drained_at_once(tmp_path: Path) -> None:
    async with sides(tmp_path, ("shm",), notify_max=4096) as (a, b):
        described, told = b.region.descriptor("w"), []
        b.plane.memory.subscribe(described.grant, told.append)
        engine = b.plane.engine
        drain, engine._drain_once = engine._drain_once, lambda *_: 0  # type: ignore[method-assign]
        for _ in range(600):
            part = WorkRequest(kind=OpKind.PUT, region=0, descriptor=described, notify=(1, 1))
            await a.plane.start((part,), timeout=5, peer="test")
        engine._drain_once = drain  # type: ignore[method-assign]
        b.plane.drain()
        assert len(told) == 600


async def test_a_settled_callback_that_raises_does_not_keep_the_others_from_theirs(tmp_path: Path) -> None:
    async with sides(tmp_path, ("tcp",)) as (a, b):
        complaints: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        described, seen = b.region.descriptor("w"), []

        def bad(_: object) -> None:
            raise ZeroDivisionError

        transfer = a.start(described)
        transfer.on_settled(bad)
        transfer.on_settled(seen.append)
        await transfer
        await transfer.wait_settled()
        assert seen == [transfer]
        assert [type(found["exception"]) for found in complaints] == [ZeroDivisionError]
        assert a.plane.region_transfers(a.region.id) == []


async def test_cancelling_parts_that_the_engine_has_no_room_for_ends_each_once(tmp_path: Path) -> None:
    options = {"window_ops_max": 2, "inflight_max": 2}
    async with sides(tmp_path, ("tcp",), **options) as (a, b), sides(tmp_path, ("tcp",), **options) as (c, _):
        to_b, to_c = b.region.descriptor("w"), c.region.descriptor("w")
        await a.start(to_b, 4096)
        await a.start(to_c, 4096)
        busy = [a.start(to_b) for _ in range(2)]
        part = WorkRequest(kind=OpKind.PUT, region=a.region.id, descriptor=to_c, span=(0, 0, LENGTH))
        many = a.plane.start([part] * 5, timeout=5, peer="test")
        assert a.plane._queue.admission.waiting == 3
        assert len(a.plane._queue) == 5, "or the test shows nothing: two wait for the engine"
        await asyncio.wait_for(many.cancel(), 5)
        assert many._parts_left == 0
        for transfer in busy:
            await transfer
        assert [found.users for found in a.plane._connections._imports.values()] == [0, 0]
        assert a.plane._queue.admission.inflight_ops == 0


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_transfer_larger_than_the_window_that_fails_leaves_the_window_whole(
    tmp_path: Path, transport: str
) -> None:
    options = {"window_bytes_max": 2 * LENGTH, "fault_spec": "chunk_bytes=65536,chunk_ms=2"}
    async with sides(tmp_path, (f"fault+{transport}",), (transport,), **options) as (a, b):
        plane, described = a.plane, b.region.descriptor("w")
        await a.start(described)
        for count in (3, 4, 9):
            going = b.region.descriptor("w")
            part = WorkRequest(kind=OpKind.PUT, region=a.region.id, descriptor=going, span=(0, 0, LENGTH))
            await plane.prepare(going)
            many = plane.start([part] * count, timeout=5, peer="test")
            await b.plane.memory.revoke(going.grant)
            with pytest.raises(KvxferError):
                await many
            await asyncio.wait_for(many.wait_settled(), 5)
            plane._queue.check_idle()
        assert (await a.start(described)).state == "done"


async def test_what_never_left_the_line_says_what_it_waited_for(tmp_path: Path) -> None:
    async with sides(tmp_path, ("tcp",), window_bytes_max=LENGTH, window_ops_max=8) as (a, b):
        plane, described = a.plane, b.region.descriptor("w")
        await a.start(described)
        held = PendingWork(plane, Transfer(plane, op_id=99, peer="test", parts=1), None, None)  # type: ignore[arg-type]
        held.rank = rank_of(Priority.NORMAL, LENGTH)
        assert plane._queue.enter(held, b.plane.engine_id, LENGTH, 0.0)
        with pytest.raises(TransferTimeout, match=f"waits for window_bytes_max, {LENGTH} of {LENGTH} in use") as caught:
            await a.start(described, timeout=0.05)
        fields = caught.value.fields
        assert (fields["option"], fields["in_use"], fields["limit"]) == ("window_bytes_max", LENGTH, LENGTH)
        plane._queue.ended(held)
        await a.start(described)


async def test_a_permit_that_is_left_when_everything_has_ended_is_reported_by_aclose(tmp_path: Path) -> None:
    async with sides(tmp_path, ("tcp",)) as (a, _):
        lost = PendingWork(a.plane, Transfer(a.plane, op_id=99, peer="test", parts=1), None, None)  # type: ignore[arg-type]
        assert a.plane._queue.enter(lost, "peer", 7, 0.0)
        with pytest.raises(InternalError, match="permits are left"):
            await asyncio.wait_for(a.plane.aclose(), 10)
        with pytest.raises(ClosedError):
            a.plane.start([], timeout=1, peer="test")


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_what_is_urgent_does_not_wait_for_a_window_full_of_bulk(tmp_path: Path, transport: str) -> None:
    options = {"window_bytes_max": LENGTH, "fault_spec": "chunk_bytes=65536,chunk_ms=5"}
    async with sides(tmp_path, (f"fault+{transport}",), (transport,), **options) as (a, b):
        described = b.region.descriptor("w")
        await a.start(described, 4096)
        part = WorkRequest(kind=OpKind.PUT, region=a.region.id, descriptor=described, span=(0, 0, LENGTH))
        bulk = [a.plane.start((part,), timeout=60, peer="test", priority=Priority.BULK) for _ in range(8)]
        urgent = a.plane.start((part,), timeout=60, peer="test", priority=Priority.CRITICAL)
        assert (await urgent).state == "done"
        assert not bulk[-1].done
        for transfer in bulk:
            assert (await transfer).state == "done"
        a.plane._queue.check_idle()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_every_priority_and_size_arrives_however_many_there_are(tmp_path: Path, transport: str) -> None:
    async with sides(tmp_path, (transport,), window_bytes_max=LENGTH) as (a, b):
        a.region.array[:] = np.arange(LENGTH, dtype=np.uint32).astype(np.uint8)
        described = b.region.descriptor("w")
        piece = LENGTH // 32
        parts = [
            WorkRequest(kind=OpKind.PUT, region=a.region.id, descriptor=described, span=(at * piece, at * piece, piece))
            for at in range(32)
        ]
        ways = [*Priority, None]
        started = []
        for at, part in enumerate(parts):
            priority = ways[at % 4]
            how = {} if priority is None else {"priority": priority}
            started.append(a.plane.start((part,), timeout=60, peer="test", **how))
        for transfer in started:
            await transfer
        assert np.array_equal(a.region.array, b.region.array)
        a.plane._queue.check()


@pytest.mark.parametrize("word", ["urgent", "", None, 1, "Bulk"])
def test_another_word_for_a_priority_is_refused(word: object) -> None:
    with pytest.raises(UsageError, match="critical, normal, bulk"):
        Priority.of(word)
