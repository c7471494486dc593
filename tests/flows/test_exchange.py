"""Whole caches: push layer by layer, pull by ticket, adopt; and what either side is told when the other one ends
early.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvxfer
from kvxfer.errors import (
    AccessDenied,
    GeometryMismatch,
    KvxferError,
    LeaseExpired,
    OutOfRange,
    ProtocolError,
    RegionBusy,
    TransferCancelled,
    TransferTimeout,
    UnknownTransfer,
    UsageError,
)
from kvxfer.flows import exchange
from kvxfer.flows.exchange import (
    POSTING_VERSION,
    Joined,
    LayerPart,
    PeerImports,
    TransferOffer,
    negotiate,
    prepared_layer,
)
from kvxfer.geometry import BlockTable
from kvxfer.native.engine import OpKind
from kvxfer.native.status import StatusCode
from kvxfer.tasks import Deadline
from tests.conftest import slack
from tests.support.nodes import make_cache, scattered, small_geometry, tokens_of, two_nodes

TRANSPORTS = ["shm", "tcp"]
POOL = 12
TOKENS = 70


async def prepared(a: kvxfer.Client, b: kvxfer.Client, **target: object):
    """A filled cache on A, an empty one on B, and a block table for each."""
    geometry = small_geometry()
    source, sink = await make_cache(a, geometry, POOL), await make_cache(b, small_geometry(**target), POOL)
    values = np.random.default_rng(5).standard_normal(len(source.regions[0]) // 4).astype(np.float32)
    source.regions[0].array[:] = values.view(np.uint8)
    return source, scattered(1, POOL, TOKENS, 16), sink, scattered(2, POOL, TOKENS, sink.layout.geometry.block_tokens)


def assert_same(source, source_table, sink, sink_table) -> None:
    for layer in range(source.layout.geometry.layers):
        assert np.array_equal(tokens_of(source, source_table, layer), tokens_of(sink, sink_table, layer)), layer


async def gauges_are_clean(client: kvxfer.Client) -> None:
    """After a flow nothing stays pinned, quarantined, granted or in flight."""
    for _ in range(200):
        counters = client.plane.engine.counters()
        left = (
            client.reservations.pinned_blocks,
            client.reservations.quarantined_blocks,
            counters.grants,
            counters.inflight,
        )
        if left == (0, 0, 0, 0):
            return
        await asyncio.sleep(0.01)
    assert left == (0, 0, 0, 0)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("order", ["forward", "backward"])
async def test_push_layer_by_layer(transport: str, order: str) -> None:
    async with two_nodes([transport]) as (a, b):
        source, source_table, sink, sink_table = await prepared(a, b)
        layers = list(range(3)) if order == "forward" else [2, 1, 0]

        async def prefill() -> None:
            async with a.push("r1", to=b.addresses, cache=source, table=source_table) as push:
                for layer in layers:
                    await push.layer(layer)

        async with b.offer("r1", sink, sink_table) as landing:
            pushing = asyncio.ensure_future(prefill())
            seen = []
            async for layer in landing:
                seen.append(layer)
                same = tokens_of(source, source_table, layer) == tokens_of(sink, sink_table, layer)
                assert same.all(), f"layer {layer} was announced before its bytes were there"
            await pushing
        assert sorted(seen) == [0, 1, 2]
        assert landing.committed
        assert_same(source, source_table, sink, sink_table)
        await gauges_are_clean(a)
        await gauges_are_clean(b)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_push_into_another_block_size(transport: str) -> None:
    async with two_nodes([transport]) as (a, b):
        source, source_table, sink, sink_table = await prepared(a, b, block_tokens=32)
        async with b.offer("r1", sink, sink_table) as landing:
            async with a.push("r1", to=b.addresses, cache=source, table=source_table) as push:
                await push.layers()
            await landing.wait()
        assert_same(source, source_table, sink, sink_table)


@pytest.mark.parametrize("side", ["push", "pull"])
@pytest.mark.parametrize("what", ["block", "slot"])
async def test_blocks_of_others_are_out_of_reach(side: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that mixes blocks or slots up, or means to, can neither write nor read a neighbour's over tcp."""
    honest, wrong = exchange.plan, "target" if side == "push" else "source"

    def confused(source: Any, source_table: Any, target: Any, target_table: Any, **more: Any) -> Any:
        tables = {"source": source_table, "target": target_table}
        mixed = tables[wrong].blocks.copy()
        if what == "block":
            mixed[-1] = next(block for block in range(POOL) if block not in mixed)
        tables[wrong] = BlockTable.of(mixed, TOKENS, first_slot=int(what == "slot"))
        return honest(source, tables["source"], target, tables["target"], **more)

    async with two_nodes(["tcp"]) as (a, b):
        source, source_table, sink, sink_table = await prepared(a, b)
        sink.regions[0].array[:] = 0xA5
        monkeypatch.setattr(exchange, "plan", confused)
        if side == "push":
            async with b.offer("r1", sink, sink_table) as landing:
                with pytest.raises(OutOfRange) as caught:
                    async with a.push("r1", to=b.addresses, cache=source, table=source_table) as push:
                        await push.layers()
                with pytest.raises(KvxferError):
                    await landing.wait()
        else:
            async with a.publish("r1", source, source_table, lease_s=1.0) as ticket:  # a failed pull may be repeated
                with pytest.raises(OutOfRange) as caught:
                    await b.pull(ticket.to_json(), sink, sink_table)
        assert caught.value.status == StatusCode.RANGE
        assert (sink.regions[0].array == 0xA5).all()
        await gauges_are_clean(a)
        await gauges_are_clean(b)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_pull_with_a_ticket_that_travelled_as_json(transport: str) -> None:
    async with two_nodes([transport]) as (a, b):
        source, source_table, sink, sink_table = await prepared(a, b)
        async with a.publish("r1", source, source_table) as ticket:
            text = json.dumps(json.loads(ticket.to_json()))
            layers: list[int] = []
            pulled = await b.pull(text, sink, sink_table, on_layer=layers.append)
        assert ticket.outcome == "released"
        assert pulled.transport == transport
        assert pulled.bytes == 3 * 2 * TOKENS * 2 * 8 * 4
        assert layers == [0, 1, 2]
        assert_same(source, source_table, sink, sink_table)
        await gauges_are_clean(a)
        await gauges_are_clean(b)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_pull_of_nothing_releases_the_publisher(transport: str) -> None:
    async with two_nodes([transport]) as (a, b):
        source, _, sink, _ = await prepared(a, b)
        none = kvxfer.BlockTable(blocks=np.zeros(0, dtype=np.int64), tokens=0)
        async with a.publish("r1", source, none) as ticket:
            pulled = await b.pull(ticket.to_dict(), sink, none)
        assert pulled.bytes == 0
        assert ticket.outcome == "released"


async def test_a_ticket_for_several_consumers_ends_with_the_last() -> None:
    async with two_nodes(["shm"]) as (a, b):
        source, source_table, sink, sink_table = await prepared(a, b)
        async with a.publish("r1", source, source_table, consumers=3) as ticket:
            for _ in range(3):
                assert ticket.outcome == ""
                await b.pull(ticket.to_dict(), sink, sink_table)
        assert ticket.outcome == "released"


async def test_a_used_ticket_is_unknown() -> None:
    async with two_nodes(["shm"]) as (a, b):
        source, source_table, sink, sink_table = await prepared(a, b)
        async with a.publish("r1", source, source_table) as ticket:
            kept = ticket.to_dict()
            await b.pull(kept, sink, sink_table)
        with pytest.raises((UnknownTransfer, LeaseExpired)):
            await b.pull(kept, sink, sink_table, timeout=5)
        assert_same(source, source_table, sink, sink_table)


async def test_an_expired_ticket_says_so_and_moves_nothing() -> None:
    async with two_nodes(["shm"]) as (a, b):
        source, source_table, sink, sink_table = await prepared(a, b)
        async with a.publish("r1", source, source_table, lease_s=0.2) as ticket:
            kept = ticket.to_dict()
        assert ticket.outcome == "expired"
        with pytest.raises(LeaseExpired):
            await b.pull(kept, sink, sink_table, timeout=5)
        assert not sink.regions[0].array.any()
        await gauges_are_clean(b)


@pytest.mark.parametrize("change", [{"dtype": "float16"}, {"head_size": 16}, {"layers": 4}, {"fingerprint": "other"}])
async def test_caches_that_do_not_match_are_refused_on_both_sides(change: dict[str, object]) -> None:
    async with two_nodes(["shm"]) as (a, b):
        source, source_table, sink, sink_table = await prepared(a, b, **change)
        async with b.offer("r1", sink, sink_table) as landing:
            with pytest.raises(GeometryMismatch) as here:
                async with a.push("r1", to=b.addresses, cache=source, table=source_table):
                    raise AssertionError("the push must not open")
            assert next(iter(change)) in str(here.value)
            with pytest.raises(GeometryMismatch):
                await landing.wait()
        assert not sink.regions[0].array.any()


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_an_aborted_push_is_told_to_the_receiver(transport: str) -> None:
    async with two_nodes([transport]) as (a, b):
        source, source_table, sink, sink_table = await prepared(a, b)
        async with b.offer("r1", sink, sink_table) as landing:

            async def prefill_that_breaks() -> None:
                async with a.push("r1", to=b.addresses, cache=source, table=source_table) as push:
                    await push.layer(0)
                    raise ZeroDivisionError

            with pytest.raises(ZeroDivisionError):
                await prefill_that_breaks()
            with pytest.raises(TransferCancelled):
                await asyncio.wait_for(landing.wait(), 2)
        await gauges_are_clean(a)
        await gauges_are_clean(b)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_receiver_that_leaves_ends_the_push(transport: str) -> None:
    async with two_nodes([transport]) as (a, b):
        source, source_table, sink, sink_table = await prepared(a, b)
        offered = b.offer("r1", sink, sink_table)
        await offered.__aenter__()
        before = None

        async def prefill() -> None:
            nonlocal before
            async with a.push("r1", to=b.addresses, cache=source, table=source_table) as push:
                await push.layer(0)
                await offered.__aexit__(None, None, None)
                before = sink.regions[0].array.copy()
                for layer in (1, 2):
                    await push.layer(layer)

        with pytest.raises(KvxferError) as told:
            await prefill()
        assert told.value.code in ("cancelled", "revoked", "unknown_transfer", "stale_descriptor")
        assert np.array_equal(before, sink.regions[0].array), "bytes moved after the landing was left"
        await gauges_are_clean(b)


async def test_a_pull_from_a_source_that_lacks_tokens_is_refused_before_a_byte_moves() -> None:
    async with two_nodes(["shm"]) as (a, b):
        source, source_table, sink, _ = await prepared(a, b)
        longer = scattered(2, POOL, TOKENS + 20, 16)
        async with a.publish("r2", source, source_table, lease_s=0.3) as ticket:
            with pytest.raises(GeometryMismatch, match="tokens"):
                await b.pull(ticket.to_dict(), sink, longer)
        assert not sink.regions[0].array.any()


async def test_a_layout_larger_than_its_region_is_refused() -> None:
    async with kvxfer.local() as client:
        layout, length = kvxfer.contiguous_layout(small_geometry(), POOL)
        with pytest.raises(GeometryMismatch, match="region"):
            kvxfer.KVCache(layout, await client.alloc(length - 1))


async def test_blocks_cannot_be_offered_twice() -> None:
    async with two_nodes(["shm"]) as (a, b):
        _, _, sink, sink_table = await prepared(a, b)
        async with b.offer("r1", sink, sink_table):
            with pytest.raises(RegionBusy, match="r1"):
                await b.offer("r2", sink, sink_table).__aenter__()
        async with b.offer("r3", sink, sink_table):
            pass


async def test_a_push_without_an_offer_waits_a_bounded_time() -> None:
    async with two_nodes(["shm"]) as (a, b):
        source, source_table, *_ = await prepared(a, b)
        with pytest.raises((UnknownTransfer, TransferTimeout)):
            await a.push("nobody", to=b.addresses, cache=source, table=source_table, wait_s=0.2).__aenter__()


async def test_a_push_that_comes_first_waits_for_the_offer() -> None:
    async with two_nodes(["shm"]) as (a, b):
        source, source_table, sink, sink_table = await prepared(a, b)

        async def prefill() -> None:
            async with a.push("r1", to=b.addresses, cache=source, table=source_table) as push:
                await push.layers()

        pushing = asyncio.ensure_future(prefill())
        await asyncio.sleep(0.05)
        async with b.offer("r1", sink, sink_table) as landing:
            await landing.wait()
        await pushing
        assert_same(source, source_table, sink, sink_table)


async def test_an_offer_without_a_push_ends_by_its_deadline() -> None:
    async with two_nodes(["shm"]) as (a, b):
        _, _, sink, sink_table = await prepared(a, b)
        async with b.offer("r1", sink, sink_table, timeout=0.1) as landing:
            with pytest.raises(TransferTimeout):
                await landing.wait()
        async with b.offer("r2", sink, sink_table, lease_s=0.1) as landing:
            with pytest.raises(LeaseExpired):
                await landing.wait()
        await gauges_are_clean(b)


async def test_layers_are_pushed_once_and_exist() -> None:
    async with two_nodes(["shm"]) as (a, b):
        source, source_table, sink, sink_table = await prepared(a, b)
        async with b.offer("r1", sink, sink_table) as landing:
            async with a.push("r1", to=b.addresses, cache=source, table=source_table) as push:
                await push.layer(0)
                for bad in (0, -1, 3, "1"):
                    with pytest.raises(UsageError):
                        await push.layer(bad)  # type: ignore[arg-type]
                await push.layer(2)
                await push.layer(1)
            await landing.wait()


async def test_a_push_without_all_layers_is_never_committed() -> None:
    async with two_nodes(["shm"]) as (a, b):
        source, source_table, sink, sink_table = await prepared(a, b)
        async with b.offer("r1", sink, sink_table) as landing:
            with pytest.raises(UsageError, match="before all its layers"):
                async with a.push("r1", to=b.addresses, cache=source, table=source_table) as push:
                    await push.layer(0)
            with pytest.raises(KvxferError):
                await landing.wait()
            assert not landing.committed
        with pytest.raises(UsageError, match="before all its layers"):
            async with a.push("r2", to=b.addresses, cache=source, table=source_table, land=True) as push:
                await push.layer(1)
        with pytest.raises(TransferCancelled):
            async with b.adopt("r2", wait_s=0.05):
                pass
        await gauges_are_clean(b)


async def test_a_landing_is_adopted_without_a_copy() -> None:
    async with two_nodes(["shm"]) as (a, b):
        source, source_table, *_ = await prepared(a, b)
        async with a.push("r1", to=b.addresses, cache=source, table=source_table, land=True) as push:
            await push.layers()
        before = sum(row.copied_bytes for row in b.plane.engine.counters().transports)
        async with b.adopt("r1") as landed:
            copied = sum(row.copied_bytes for row in b.plane.engine.counters().transports) - before
            assert copied == 0
            with pytest.raises(ValueError, match="read-only"):
                landed.array[0] = 1
            geometry = landed.layout.geometry
            values = landed.array.view(np.float32)
            for layer in range(geometry.layers):
                offset = landed.layout.placements[layer].offset // 4
                shape = (2, landed.layout.blocks, geometry.block_tokens, geometry.kv_heads, geometry.head_size)
                found = values[offset : offset + int(np.prod(shape))].reshape(shape)[:, landed.table.blocks]
                found = found.reshape(2, -1, geometry.kv_heads, geometry.head_size)[:, : landed.table.tokens]
                assert np.array_equal(found, tokens_of(source, source_table, layer))
        with pytest.raises((UnknownTransfer, LeaseExpired, AccessDenied)):
            await b.adopt("r1", wait_s=0.05).__aenter__()


async def test_a_full_landing_pool_says_so_at_once() -> None:
    async with two_nodes(["shm"], landing_bytes_max=4096) as (a, b):
        source, source_table, *_ = await prepared(a, b)
        with pytest.raises((kvxfer.BusyError, UsageError)):
            await a.push("r1", to=b.addresses, cache=source, table=source_table, land=True).__aenter__()


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_cancelling_at_any_moment_leaves_nothing(transport: str) -> None:
    async with two_nodes([transport]) as (a, b):
        source, source_table, sink, sink_table = await prepared(a, b)

        async def decode(request: str) -> None:
            async with b.offer(request, sink, sink_table, timeout=5) as landing:
                await landing.wait()

        async def prefill(request: str) -> None:
            async with a.push(request, to=b.addresses, cache=source, table=source_table, timeout=5) as push:
                await push.layers()

        rng = np.random.default_rng(3)
        for index in range(20):
            victim = int(rng.integers(2))
            tasks = [asyncio.ensure_future(decode(f"c{index}")), asyncio.ensure_future(prefill(f"c{index}"))]
            await asyncio.sleep(float(rng.uniform(0, 0.008)))
            tasks[victim].cancel()
            results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 8)
            for result in results:
                assert result is None or isinstance(result, asyncio.CancelledError | KvxferError), result
        await gauges_are_clean(a)
        await gauges_are_clean(b)
        await asyncio.gather(decode("last"), prefill("last"))
        assert_same(source, source_table, sink, sink_table)


# -- what the other side says -----------------------------------------------------------------------------------------


def posting_map(layout: Any = None, table: Any = None, descriptors: Any = None, **changes: Any) -> dict[str, Any]:
    """A posting as it travels, with some of it replaced."""
    good, length = kvxfer.contiguous_layout(small_geometry(), 4)
    described = {
        "v": 1, "node_id": "0" * 32, "incarnation": "0" * 32, "engine_id": "0" * 32, "region": 1, "grant": 1,
        "generation": 1, "length": length, "access": "rw", "key": "0" * 32, "kind": "dram", "expires_in_s": None,
        "endpoints": {"tcp": ["127.0.0.1:1"]},
    }  # fmt: skip
    found = {
        "v": POSTING_VERSION,
        "layout": good.to_dict() if layout is None else layout,
        "table": kvxfer.BlockTable.of([0, 1], 20).to_dict() if table is None else table,
        "descriptors": [described] if descriptors is None else descriptors,
        "check": False,
    }
    return {**found, **changes}


HOSTILE = [
    {"v": 2}, {"v": None}, {"layout": 5}, {"layout": {}}, {"table": []}, {"table": {"runs": 1}}, {"descriptors": []},
    {"descriptors": {}}, {"descriptors": [5]}, {"descriptors": [{}]}, {"descriptors": [{}] * 5000},
    {"table": {"runs": [[0, 1, 2**40]], "tokens": 1, "first_token": 0}},
    {"table": {"runs": [[0, 1, -1]], "tokens": 1, "first_token": 0}},
    {"table": {"runs": [[-1, 1, 1]], "tokens": 1, "first_token": 0}},
    {"table": {"runs": [[0, 1, 1]], "tokens": 2**63, "first_token": 0}},
    {"table": {"runs": [[0.5, 1, 1]], "tokens": 1, "first_token": 0}},
    {"table": {"runs": [[0, 1, 1]], "tokens": "1", "first_token": 0}},
    {"table": {"runs": [[0, 1, 2**63]], "tokens": 1, "first_token": 0}},
    {"table": {"runs": [[0, 1, 2]], "tokens": 1, "first_token": 5}},
    {"table": {"runs": [[0, 1, 2]], "tokens": 1, "first_token": 5, "first_slot": 1 << 19}},
    {"table": {"runs": [[0, 1, 2]], "tokens": 1, "first_token": 5, "first_slot": "5"}},
    {"table": {"runs": [[0, 1, 2]], "tokens": 33, "first_token": 0}},
    {"table": {"runs": [[4, 1, 1]], "tokens": 1, "first_token": 0}},
]  # fmt: skip


@pytest.mark.parametrize("change", HOSTILE, ids=[str(change)[:50] for change in HOSTILE])
async def test_hostile_postings_are_the_peers_fault(change: dict[str, Any]) -> None:
    body = msgpack.packb(posting_map(**change))
    with pytest.raises(ProtocolError):
        TransferOffer.unpack(body)
    with pytest.raises(ProtocolError):
        await TransferOffer.receive(body)


async def test_a_layout_that_leaves_its_memory_is_refused_before_anything_is_planned() -> None:
    TransferOffer.unpack(msgpack.packb(posting_map()))
    for change in ({"length": 100}, {"length": 1}):
        raw = posting_map()
        raw["descriptors"] = [{**raw["descriptors"][0], **change}]
        with pytest.raises(GeometryMismatch):
            TransferOffer.unpack(msgpack.packb(raw))
    raw = posting_map()
    raw["layout"]["placements"] = [[7, offset, None] for _, offset, _ in raw["layout"]["placements"]]
    with pytest.raises(GeometryMismatch):
        TransferOffer.unpack(msgpack.packb(raw))


@given(st.binary(max_size=200))
def test_bytes_that_are_no_posting_are_a_typed_error(body: bytes) -> None:
    with pytest.raises(KvxferError):
        TransferOffer.unpack(body)


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**64 - 1)
        | st.floats()
        | st.text(max_size=5)
        | st.binary(max_size=5),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
        max_leaves=8,
    ),
    st.sampled_from(["layout", "table", "descriptors", "check", "v"]),
    st.integers(0, 12),
)
def test_a_posting_with_anything_in_it_is_taken_or_a_typed_error(value: Any, name: str, deep: int) -> None:
    raw = posting_map()
    place: Any = raw
    inner = raw[name]
    if deep and name == "descriptors":
        place, inner = inner, inner[0]
        name = 0  # type: ignore[assignment]
    if deep > 1 and isinstance(inner, dict):
        keys = sorted(inner)
        place, name = inner, keys[deep % len(keys)]
    place[name] = value
    with contextlib.suppress(KvxferError):
        TransferOffer.unpack(msgpack.packb(raw))


async def slowest_turn(work: Awaitable[Any]) -> float:
    """The longest time for which the loop did nothing else."""
    task = asyncio.ensure_future(work)
    longest, before = 0.0, time.perf_counter()
    while not task.done():
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        longest, before = max(longest, now - before), now
    await asyncio.gather(task, return_exceptions=True)
    return longest


@pytest.mark.once
async def test_large_plans_do_not_hold_the_loop() -> None:
    tokens = 1 << 17
    rows, columns = (small_geometry(layout=layout, block_tokens=size) for layout, size in (("PBNHD", 1), ("PBHND", 16)))
    scattered_ids = np.random.default_rng(1).permutation(tokens)
    source, _ = kvxfer.contiguous_layout(rows, tokens)
    target, length = kvxfer.contiguous_layout(columns, tokens // 16)
    ours = kvxfer.BlockTable(blocks=scattered_ids, tokens=tokens)
    theirs = kvxfer.BlockTable(blocks=np.arange(tokens // 16), tokens=tokens)
    raw = posting_map(layout=target.to_dict(), table=theirs.to_dict())
    raw["descriptors"][0]["length"] = length
    huge = {"runs": [[0, 1, 1 << 20]], "tokens": 1, "first_token": 0}
    irregular = {"runs": [[i * 7 % 99991, 1, 1] for i in range(30_000)], "tokens": 1, "first_token": 0}

    good, *hostile = [msgpack.packb({**raw, "table": table}) for table in (raw["table"], huge, irregular)]

    async def negotiate_and_write_out() -> None:
        for body in hostile:
            await TransferOffer.receive(body)
        peer = await TransferOffer.receive(good)
        made = await negotiate(source, ours, peer.layout, peer.table)
        cache = SimpleNamespace(regions=[SimpleNamespace(id=1)])
        for layer in range(3):
            parts = await prepared_layer(made, layer, OpKind.PUT, cache, peer, 65536)  # type: ignore[arg-type]
            assert sum(len(part.segments) for part in parts) > 100_000
            assert max(len(part.segments) for part in parts) <= 65536

    # Best of three: the machine is shared, and a thread that computes takes its turns of the interpreter as well.
    turns = [await slowest_turn(negotiate_and_write_out()) for _ in range(3)]
    assert min(turns) < 0.06 * slack(), turns


async def test_a_table_that_covers_too_little_is_refused_without_planning() -> None:
    layout, _ = kvxfer.contiguous_layout(small_geometry(block_tokens=1), 1 << 20)
    everything = kvxfer.BlockTable(blocks=np.arange(1 << 20), tokens=1 << 20)
    little = kvxfer.BlockTable.of([0], 1)
    before = time.thread_time()
    with pytest.raises(GeometryMismatch):
        await negotiate(layout, little, layout, everything)
    assert time.thread_time() - before < 0.02 * slack()


async def test_a_flow_may_fail_at_the_moment_of_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline has fired, and before whoever waited runs again, the other side says that it failed."""
    reaching = PeerImports()

    monkeypatch.setattr(exchange, "_pairs", lambda *_: {})

    class Silent:
        async def prepare(self, _: Any) -> Any:
            await asyncio.Event().wait()

    plane, cache, peer = Silent(), SimpleNamespace(), SimpleNamespace(descriptors=[None])
    reached = asyncio.ensure_future(reaching.reach(plane, cache, peer, Deadline.after(10)))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    bound = reaching._limit
    assert bound is not None
    bound.reschedule(None)
    bound._on_timeout()  # type: ignore[attr-defined]
    reaching.end()
    with pytest.raises(TransferTimeout):
        await reached


def test_layers_are_joined_within_the_limits() -> None:
    def one(region: int, descriptor: int, count: int, length: int) -> LayerPart:
        segments = np.full((count, 3), length, np.uint64)
        return LayerPart(region=region, descriptor=descriptor, segments=segments, bytes=count * length)

    joined = Joined(segments_max=5, bytes_max=1000)
    for layer, part in enumerate((one(1, 0, 2, 10), one(1, 0, 2, 20), one(2, 0, 1, 10), one(1, 0, 2, 30))):
        joined.add(layer, part)
    joined.add(4, one(1, 0, 1, 2000))
    assert joined.bytes == 20 + 40 + 10 + 60 + 2000
    found = joined.take()
    assert [(each.part.region, each.layers, each.starts) for each in found] == [
        (1, (0, 1), (0, 2)),
        (1, (3,), (0,)),
        (1, (4,), (0,)),
        (2, (2,), (0,)),
    ]
    assert found[0].part.segments[:, 2].tolist() == [10, 10, 20, 20]
    assert [each.part.bytes for each in found] == [20 + 40, 60, 2000, 10]
    assert [found[0].layer_of(segment) for segment in range(4)] == [0, 0, 1, 1]
    assert joined.take() == []


@pytest.mark.parametrize("kind", [OpKind.PUT, OpKind.GET])
async def test_a_layer_ends_where_the_memory_of_the_peer_ends(kind: OpKind) -> None:
    geometry = small_geometry()
    layout, length = kvxfer.contiguous_layout(geometry, 2)
    table = kvxfer.BlockTable(blocks=np.arange(2), tokens=32)
    made = await negotiate(layout, table, layout, table)
    cache = SimpleNamespace(layout=layout, regions=[SimpleNamespace(id=1)])
    layers = range(geometry.layers)

    async def prepare(limit: int) -> int:
        peer = SimpleNamespace(descriptors=[SimpleNamespace(length=limit)])
        found = [await prepared_layer(made, layer, kind, cache, peer, 65536) for layer in layers]  # type: ignore[arg-type]
        return sum(part.bytes for parts in found for part in parts)

    assert await prepare(length) == made.bytes == length
    with pytest.raises(OutOfRange):
        await prepare(length - 1)
