"""One-sided transfers, registration and names through the public client, on each transport of this machine."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

import kvxfer
from kvxfer.errors import (
    AccessDenied,
    ClosedError,
    DaemonUnavailable,
    InvalidLength,
    OutOfRange,
    OverlapError,
    PeerUnreachable,
    TransferTimeout,
    UnknownRegion,
    UnknownTransfer,
    UsageError,
)
from tests.nodes import node
from tests.support.nodes import two_nodes

TRANSPORTS = ["shm", "tcp"]


def pattern(seed: int, length: int) -> np.ndarray:
    return np.frombuffer(np.random.default_rng(seed).bytes(length), dtype=np.uint8)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("length", [1, 4096, 100_003, 5 << 20])
async def test_put_and_get_are_exact(transport: str, length: int) -> None:
    async with two_nodes([transport]) as (a, b):
        source, target, back = await a.alloc(length), await b.alloc(length), await a.alloc(length)
        source.array[:] = pattern(1, length)
        described = target.descriptor("rw")
        put = await a.put(source, described)
        assert put.transport == transport
        assert put.bytes_done == length
        assert np.array_equal(target.array, source.array)
        await a.get(back, described)
        assert np.array_equal(back.array, source.array)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_memory_of_the_user_is_reached_where_it_is(transport: str) -> None:
    async with two_nodes([transport]) as (a, b):
        ours = pattern(2, 300_000).copy()
        theirs = np.zeros((3, 100_000), dtype=np.uint8)
        source, target = await a.register(ours), await b.register(theirs)
        await a.put(source, target.descriptor("w"))
        assert np.array_equal(theirs.reshape(-1), ours)


async def test_a_client_reaches_its_own_memory() -> None:
    async with kvxfer.local() as client:
        source, target = await client.alloc(1 << 20), await client.register(bytearray(1 << 20))
        source.array[:] = pattern(3, 1 << 20)
        transfer = await client.put(source, target.descriptor("w"))
        assert np.array_equal(target.array, source.array)
        assert transfer.transport == "loop"


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_visible_put_tells_the_owner_after_the_bytes(transport: str) -> None:
    async with two_nodes([transport]) as (a, b):
        source, target = await a.alloc(4096), await b.alloc(4096)
        described = target.descriptor("w")
        async with b.notifications(described) as told:
            for value in range(1, 20):
                source.array[:] = value
                await a.put(source, described, visible=True, notify=value)
                assert await told.next(timeout=5) == value
                assert target.array[0] == value == target.array[-1]


async def test_bad_spans_change_nothing_and_name_the_field() -> None:
    async with two_nodes(["shm"]) as (a, b):
        source, target = await a.alloc(4096), await b.alloc(4096)
        described = target.descriptor("w")
        for bad in (-1, 4097, 2**64, "0", None, True):
            with pytest.raises((InvalidLength, OutOfRange)):
                a.put(source, described, target_offset=bad)  # type: ignore[arg-type]
        with pytest.raises(OutOfRange):
            a.put(source, described, target_offset=1)
        with pytest.raises(InvalidLength):
            source[5:5]
        with pytest.raises(OutOfRange):
            source[0:4097]
        with pytest.raises(InvalidLength):
            await a.alloc(0)
        with pytest.raises(UsageError):
            a.put(b"raw bytes", described)  # type: ignore[arg-type]
        assert not target.array.any()


async def test_directions_that_a_descriptor_does_not_allow_are_refused() -> None:
    async with two_nodes(["shm"]) as (a, b):
        source, target = await a.alloc(4096), await b.alloc(4096)
        source.array[:] = 9
        with pytest.raises(AccessDenied):
            a.put(source, target.descriptor("r"))
        with pytest.raises(AccessDenied):
            a.get(source, target.descriptor("w"))
        assert not target.array.any()
        assert source.array.all()


async def test_registration_rules() -> None:
    async with kvxfer.local() as client:
        memory = bytearray(8192)
        view = memoryview(memory)
        first, again = await client.register(memory), await client.register(memory)
        assert first.id == again.id
        with pytest.raises(OverlapError) as overlap:
            await client.register(view[4096:])
        assert str(first.id) in str(overlap.value)
        with pytest.raises(InvalidLength):
            await client.register(b"")
        with pytest.raises(UsageError):
            await client.register(object())
        with pytest.raises(UsageError):
            await client.register(np.zeros((4, 4))[:, ::2])


async def test_a_released_region_is_refused_on_both_sides() -> None:
    async with two_nodes(["tcp"]) as (a, b):
        source, target = await a.alloc(4096), await b.alloc(4096)
        described = target.descriptor("w")
        await a.put(source, described)
        await target.release()
        with pytest.raises(UnknownRegion):
            target.descriptor("w")
        with pytest.raises(kvxfer.KvxferError) as refused:
            await a.put(source, described)
        assert refused.value.code in ("unknown_transfer", "revoked", "stale_descriptor", "peer_unreachable")


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_revoking_a_descriptor_ends_its_use(transport: str) -> None:
    async with two_nodes([transport]) as (a, b):
        source, target = await a.alloc(1 << 20), await b.alloc(1 << 20)
        described = target.descriptor("w")
        await a.put(source, described)
        await target.revoke(described)
        target.array[:] = 0
        source.array[:] = 1
        with pytest.raises(kvxfer.KvxferError):
            await a.put(source, described)
        assert not target.array.any()
        await a.put(source, target.descriptor("w"))
        assert target.array.all()


async def test_a_descriptor_survives_json() -> None:
    import json

    async with two_nodes(["shm"]) as (a, b):
        source, target = await a.alloc(64), await b.alloc(64)
        source.array[:] = 5
        text = json.dumps(target.descriptor("w").to_dict())
        await a.put(source, kvxfer.RemoteDescriptor.from_dict(json.loads(text)))
        assert target.array.all()


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_many_transfers_at_once_all_finish(transport: str) -> None:
    async with two_nodes([transport], inflight_max=256, window_ops_max=64) as (a, b):
        source, target = await a.alloc(200 * 65536), await b.alloc(200 * 65536)
        source.array[:] = pattern(4, len(source))
        described = target.descriptor("w")
        work = [a.put(source[i * 65536 : (i + 1) * 65536], described, target_offset=i * 65536) for i in range(200)]
        await asyncio.gather(*(one.wait_settled() for one in work))
        assert [one.state for one in work] == ["done"] * 200
        assert np.array_equal(source.array, target.array)


async def test_an_unreachable_owner_is_named_with_each_reason() -> None:
    async with two_nodes(["tcp"]) as (a, b):
        target = await b.alloc(64)
        described = target.descriptor("w").to_dict()
        described["endpoints"] = {"tcp": ["127.0.0.1:1"]}
        described["engine_id"] = "0" * 32
        with pytest.raises(PeerUnreachable, match=r"127\.0\.0\.1:1"):
            await a.put(await a.alloc(64), kvxfer.RemoteDescriptor.from_dict(described))


async def test_names_are_found_on_other_nodes() -> None:
    async with two_nodes(["shm"]) as (a, b):
        target = await b.alloc(64)
        async with await b.share(target, "weights"):
            described = await a.lookup("weights", node=b.addresses)
            source = await a.alloc(64)
            source.array[:] = 3
            await a.put(source, described)
            assert target.array.all()
        with pytest.raises(UnknownTransfer):
            await a.lookup("weights", node=b.addresses)


async def test_messages_between_nodes() -> None:
    async with two_nodes(["shm"]) as (a, b):
        for index in range(5):
            await a.send(b.addresses, "tokens", f"{index}".encode())
        assert [await b.recv("tokens", timeout=5) for _ in range(5)] == [b"0", b"1", b"2", b"3", b"4"]
        with pytest.raises(TransferTimeout):
            await b.recv("tokens", timeout=0.05)
        peer = await b.connect(a.addresses)
        receiving = asyncio.ensure_future(a.recv("back", timeout=5))
        await peer.send("back", b"x")
        assert await receiving == b"x"
        assert await peer.ping() > 0
        assert peer.address == a.addresses[0]


@pytest.mark.parametrize("bad", [0, -1, float("nan"), float("inf"), "1", 1e12])
async def test_endless_and_senseless_timeouts_are_refused(bad: object) -> None:
    async with kvxfer.local() as client:
        region = await client.alloc(64)
        with pytest.raises(UsageError):
            client.put(region, region.descriptor("w"), timeout=bad)  # type: ignore[arg-type]


async def test_mistyped_addresses_are_refused_before_anything_is_sent() -> None:
    async with kvxfer.local() as client:
        for bad in ("nowhere", "2001:db8::1:9000", "host:port", "127.0.0.1:99999", ""):
            with pytest.raises(UsageError):
                await client.connect(bad)


async def test_without_a_daemon_the_error_says_what_to_do(tmp_path: object) -> None:
    with pytest.raises(DaemonUnavailable, match=r"kvxferd\.sock"):
        await kvxfer.Client(f"{tmp_path}/kvxferd.sock").__aenter__()


async def test_a_closed_client_says_so() -> None:
    async with kvxfer.local() as client:
        region = await client.alloc(64)
        described = region.descriptor("w")
    with pytest.raises(ClosedError):
        client.put(region, described)
    assert region.array.sum() == 0  # looking at the memory after the end must not crash


async def test_alloc_cancelled_leaves_nothing_behind() -> None:
    async with kvxfer.local() as client:
        before = client.plane.engine.counters().regions
        task = asyncio.ensure_future(client.alloc(64 << 20))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for _ in range(500):
            await asyncio.sleep(0.01)
            if client.plane.engine.counters().regions == before:
                break
        assert client.plane.engine.counters().regions == before


@pytest.mark.once
async def test_a_client_ends_also_where_no_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_threads(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async with node() as server:
        async with kvxfer.Client(server.socket_path, config=server.config) as client:
            region = await client.alloc(4096)
            await client.put(region, region.descriptor("w"))
            engine = client.plane.engine
            monkeypatch.setattr(threading.Thread, "start", no_threads)
            await client.aclose()
            monkeypatch.undo()
        assert engine.closed
        assert "the loop waits for the close of the engine" in caplog.text
