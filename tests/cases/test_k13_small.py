"""K13: many small blocks cost no more than their bytes, on the loop, on the wire and in messages."""

from __future__ import annotations

import asyncio
import time

import msgpack
import numpy as np
import pytest

import kvxfer
from kvxfer.config import FRAME_OVERHEAD_BYTES, POSTING_BODY_BYTES_MAX, Config
from kvxfer.dataplane.plane import WorkRequest
from kvxfer.descriptors import RemoteDescriptor
from kvxfer.flows.exchange import TransferOffer
from kvxfer.geometry import TABLE_BLOCKS_MAX, BlockTable
from kvxfer.memory.region import Region
from kvxfer.native.engine import OpKind
from tests.cases.facts import limit, pattern
from tests.cases.harness import BOTH, cluster
from tests.cases.heartbeat import heartbeat
from tests.cases.scale import scaled, scaled_s
from tests.support.nodes import make_cache, small_geometry, two_nodes

pytestmark = [pytest.mark.once, pytest.mark.timeout(120)]
KIB, MIB = 1 << 10, 1 << 20
BLOCK = 4 * KIB


async def move(client: kvxfer.Client, region: Region, descriptor: RemoteDescriptor, segments: np.ndarray) -> None:  # type: ignore[type-arg]
    part = WorkRequest(kind=OpKind.PUT, region=region.id, descriptor=descriptor, segments=segments)
    await client.plane.start([part], timeout=limit(30), peer="test")


@BOTH
async def test_c63_16384_scattered_blocks(transport: str) -> None:
    count = 16384
    async with two_nodes([transport]) as (a, b):
        source, target = await a.alloc(count * BLOCK), await b.alloc(count * BLOCK)
        source.array[:] = np.resize(np.frombuffer(pattern(63, 0, MIB), np.uint8), count * BLOCK)
        source.array.reshape(count, BLOCK)[:, :4] = np.arange(count, dtype=np.uint32).view(np.uint8).reshape(count, 4)
        described = target.descriptor("w")
        order = np.random.default_rng(63).permutation(count).astype(np.uint64)
        scattered = np.stack(
            [np.arange(count, dtype=np.uint64) * BLOCK, order * BLOCK, np.full(count, BLOCK, np.uint64)], axis=1
        )
        scattered = np.ascontiguousarray(scattered)
        times = {"scattered": float("inf"), "one": float("inf")}
        gaps = []
        for _ in range(4):
            began = time.perf_counter()
            await a.put(source, described)
            times["one"] = min(times["one"], time.perf_counter() - began)
            async with heartbeat() as beat:
                await asyncio.sleep(0.01)
                began = time.perf_counter()
                await move(a, source, described, scattered)
                times["scattered"] = min(times["scattered"], time.perf_counter() - began)
            gaps.append(beat.longest_s)
        assert np.array_equal(
            target.array.reshape(count, BLOCK)[order.astype(np.int64)], source.array.reshape(count, BLOCK)
        )
        assert min(gaps) <= limit(0.020), f"the loop was held: {gaps}"
        assert times["one"] / times["scattered"] >= 0.4 / limit(1), times


@BOTH
async def test_c63_4096_adjacent_blocks_are_few_operations(transport: str) -> None:
    blocks = 4096
    geometry = small_geometry(layers=1, kv_parts=1, kv_heads=1, kv_heads_total=1, head_size=64, block_tokens=16)
    assert geometry.bytes_per_block == BLOCK
    table = BlockTable.of(range(blocks), tokens=blocks * 16)
    async with two_nodes([transport]) as (a, b):
        source, target = await make_cache(a, geometry, blocks), await make_cache(b, geometry, blocks)
        source.regions[0].array[:] = np.resize(np.frombuffer(pattern(63, 1, MIB), np.uint8), source.regions[0].length)

        async def receive() -> None:
            async with b.offer("r", target, table) as landing:
                await landing.wait()

        async def send() -> None:
            async with a.push("r", to=b.addresses, cache=source, table=table) as sending:
                await sending.layers()

        await asyncio.gather(receive(), send())
        rows = [row for row in a.plane.engine.counters().transports if row.name == transport]
        assert sum(row.segments for row in rows) <= 8
        assert np.array_equal(source.regions[0].array, target.regions[0].array)


# -- C64 --------------------------------------------------------------------------------------------------------


def test_c64_a_table_is_small() -> None:
    rng = np.random.default_rng(64)
    for count in (1, 100, 16384, 100_000):
        irregular = BlockTable.of(rng.integers(0, 2**31, count), tokens=0)
        packed = msgpack.packb(irregular.to_dict())
        assert len(packed) <= 16 * count + 64, (count, len(packed))
        for step in (1, 3, -2):
            start = 10 if step > 0 else 10 + 2 * count
            regular = BlockTable.of(start + step * np.arange(count), tokens=0)
            assert len(msgpack.packb(regular.to_dict())) <= 4096
            assert BlockTable.from_dict(msgpack.unpackb(msgpack.packb(regular.to_dict()))) == regular


async def test_c64_16384_entries_are_read_quickly_and_off_the_loop() -> None:
    ids = np.random.default_rng(64).permutation(16384)
    async with two_nodes(["shm"]) as (a, _):
        cache = await make_cache(a, small_geometry(layers=1, kv_parts=1, kv_heads=1, kv_heads_total=1), 16384)
        described = cache.regions[0].descriptor("r")
        table = BlockTable.of(ids, tokens=16384 * 16)
        body = TransferOffer(layout=cache.layout, table=table, descriptors=(described,), check=False).pack()
        times = []
        for _ in range(5):
            async with heartbeat() as beat:
                began = time.perf_counter()
                found = await TransferOffer.receive(body)
                times.append(time.perf_counter() - began)
            assert np.array_equal(found.table.blocks, ids), "the order stays"
        assert min(times) <= limit(0.020), times
        assert beat.longest_s <= limit(0.050)


async def test_c64_the_longest_table_in_any_order_crosses() -> None:
    """Nothing has to be cut: a frame has room for the longest message, and a body for any table that there can be."""
    assert Config().frame_control_bytes_max >= POSTING_BODY_BYTES_MAX + FRAME_OVERHEAD_BYTES
    geometry = small_geometry(layers=1, kv_parts=1, kv_heads=1, kv_heads_total=1, head_size=1, block_tokens=1)
    order = np.random.default_rng(64).permutation(TABLE_BLOCKS_MAX)
    async with two_nodes(["shm"]) as (a, b):
        source, target = await make_cache(b, geometry, TABLE_BLOCKS_MAX), await make_cache(a, geometry, 4)
        source.regions[0].array.view(np.float32)[:] = np.arange(TABLE_BLOCKS_MAX)
        async with b.publish("r", source, BlockTable.of(order, tokens=TABLE_BLOCKS_MAX)) as ticket:
            last = BlockTable.of(range(4), tokens=4, first_token=TABLE_BLOCKS_MAX - 4)
            await a.pull(ticket.to_dict(), target, last, timeout=limit(30))
        assert target.regions[0].array.view(np.float32).tolist() == order[-4:].tolist(), "in the order of the table"


def test_c64_the_longest_posting_fits_a_body() -> None:
    """The table leaves two MiB of it for the layout and the descriptors."""
    order = np.random.default_rng(64).permutation(TABLE_BLOCKS_MAX)
    wire = msgpack.packb(BlockTable.of(order, tokens=TABLE_BLOCKS_MAX).to_wire())
    assert len(wire) <= 4 * TABLE_BLOCKS_MAX + 64 <= POSTING_BODY_BYTES_MAX - 2 * MIB + 64
    assert np.array_equal(BlockTable.from_dict(msgpack.unpackb(wire)).blocks, order)
    for broken in (b"123", "1234", [1]):
        with pytest.raises(kvxfer.errors.UsageError, match="ids"):
            BlockTable.from_dict({"ids": broken, "tokens": 0, "first_token": 0})
    with pytest.raises(kvxfer.errors.TooLarge):
        BlockTable.from_dict({"ids": bytes(4 * TABLE_BLOCKS_MAX + 4), "tokens": 0, "first_token": 0})


# -- C65 --------------------------------------------------------------------------------------------------------


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize(
    "streams", [4, pytest.param(1, marks=pytest.mark.full), pytest.param(8, marks=pytest.mark.full)]
)
async def test_c65_a_long_way_is_filled(tmp_path: object, streams: int) -> None:
    length, piece = scaled(16, 64) * MIB, 128 * KIB
    async with cluster(tmp_path, "tcp", proxied="b", workers={"tcp_streams": streams, "tcp_threads": 1}) as found:  # type: ignore[arg-type]
        a, b = found["a"], found["b"]
        for side in (a, b):
            await side.do("alloc", name="m", length=length)
        await a.do("fill", name="m", seed=65, block=MIB)
        described = (await b.do("describe", name="m"))["descriptor"]
        await a.do("start", name="warm", way="put", region="m", descriptor=described, span=(0, 4096))
        await a.do("outcome", name="warm")
        b.data.delay_s = dict.fromkeys(b.data.delay_s, 0.020)
        began = time.monotonic()
        await a.do("many", name="t", way="put", region="m", descriptor=described, piece=piece)
        answer = await a.do("many_ended", name="t")
        took_s = time.monotonic() - began
        assert answer["state"] == "done", answer
        b.data.delay_s = dict.fromkeys(b.data.delay_s, 0.0)
        assert (await b.do("digest", name="m"))["sha"] == (await a.do("digest", name="m"))["sha"]
        allowed_s = scaled_s(1.0, 3.0)  # a quarter of the bytes in a third of the time: the beginning is a larger part
        assert took_s <= limit(allowed_s), f"{took_s:.2f} s; one slice at a time takes {length / piece * 0.04:.0f} s"
