"""One request in several named caches: one ticket, one pull, one outcome."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

import msgpack
import numpy as np
import pytest

from kvxfer.client import Client
from kvxfer.descriptors import RemoteDescriptor
from kvxfer.errors import (
    GeometryMismatch,
    KvxferError,
    ProtocolError,
    RegionBusy,
    TransferTimeout,
    UnknownRegion,
    UsageError,
)
from kvxfer.flows.caches import CACHES_MAX
from kvxfer.flows.exchange import DESCRIPTORS_MAX, TransferOffer
from kvxfer.geometry import BlockTable
from kvxfer.memory.region import KVCache
from kvxfer.planner import contiguous_layout
from tests.support.nodes import make_cache, small_geometry, two_nodes

FULL, WINDOW, INDEX = "full", "window", "index"
Pair = tuple[KVCache, BlockTable]
SHAPES: Mapping[str, dict[str, Any]] = {
    FULL: {"layers": 3},
    WINDOW: {"layers": 2, "kv_heads": 1, "kv_heads_total": 1, "head_size": 4},
    INDEX: {"layers": 1, "kv_parts": 1, "block_tokens": 8, "dtype": "uint8"},
}
HERE = {FULL: BlockTable.of([7, 2, 4], 40), WINDOW: BlockTable.of([1, 0], 24, 16), INDEX: BlockTable.of(range(5), 40)}
THERE = {
    FULL: BlockTable.of([0, 5, 3], 40),
    WINDOW: BlockTable.of([6, 7], 24, 16),
    INDEX: BlockTable.of([7, 1, 3, 2, 0], 40),
}
SIZE = 3 * 2 * 40 * 2 * 8 * 4 + 2 * 2 * 24 * 1 * 4 * 4 + 1 * 1 * 40 * 2 * 8


async def caches(client: Client, tables: Mapping[str, BlockTable], *names: str, fill: bool = False) -> dict[str, Pair]:
    found = {}
    for name in names:
        cache = await make_cache(client, small_geometry(**SHAPES[name]), 8)
        if fill:
            cache.regions[0].array[:] = np.random.default_rng(len(name)).integers(0, 255, cache.regions[0].length)
        found[name] = (cache, tables[name])
    return found


def blocks(pair: Pair) -> Any:
    """Whole blocks of a table in order; the tests' tables that end inside a block are cut by `used`."""
    cache, table = pair
    shape = cache.layout.geometry
    array = cache.regions[0].array.reshape(shape.layers, shape.kv_parts, 8, shape.block_tokens, -1)
    rows = array[:, :, table.blocks].reshape(shape.layers, shape.kv_parts, -1, array.shape[-1])
    return rows[:, :, : table.tokens]


def assert_equal(source: Mapping[str, Pair], sink: Mapping[str, Pair]) -> None:
    for name, pair in sink.items():
        assert np.array_equal(blocks(source[name]), blocks(pair)), name


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("by_layer", [False, True])
async def test_groups_of_unlike_shape_are_one_request(transport: str, by_layer: bool) -> None:
    async with two_nodes([transport]) as (a, b):
        source = await caches(a, HERE, FULL, WINDOW, INDEX, fill=True)
        sink = await caches(b, THERE, INDEX, FULL, WINDOW)  # the order is each side's own
        layers: list[int] = []
        async with a.publish("r", source) as ticket:
            how: dict[str, Any] = {"on_layer": layers.append} if by_layer else {}
            pulled = await b.pull(ticket.to_json(), sink, **how)
        assert ticket.outcome == "released"
        assert (pulled.layers, pulled.tokens, pulled.bytes) == (6, 40, SIZE)
        assert layers == (list(range(6)) if by_layer else [])
        assert_equal(source, sink)
        assert (b.reservations.pinned_blocks, b.reservations.quarantined_blocks) == (0, 0)


async def test_what_the_target_does_not_have_is_not_read() -> None:
    async with two_nodes(["shm"]) as (a, b):
        source = await caches(a, HERE, FULL, WINDOW, fill=True)
        sink = await caches(b, THERE, WINDOW)
        async with a.publish("r", source) as ticket:
            pulled = await b.pull(ticket, sink)
        assert ticket.outcome == "released"
        assert pulled.bytes == 2 * 2 * 24 * 4 * 4
        assert_equal(source, sink)


async def test_a_cache_that_no_ticket_has_is_named_and_nothing_moves() -> None:
    async with two_nodes(["shm"]) as (a, b):
        source = await caches(a, HERE, FULL, WINDOW, fill=True)
        sink = await caches(b, THERE, FULL, INDEX)
        async with a.publish("r", source, retryable=True) as ticket:
            with pytest.raises(GeometryMismatch, match="'index'") as raised:
                await b.pull(ticket, sink)
            assert raised.value.fields["cache"] == INDEX
            with pytest.raises(GeometryMismatch, match="no cache of this name"):
                await b.pull(ticket, *sink[FULL])  # one without a name
            assert not any(cache.regions[0].array.any() for cache, _ in sink.values())
            other = await make_cache(b, small_geometry(**SHAPES[WINDOW], dtype="float16"), 8)
            with pytest.raises(GeometryMismatch):
                await b.pull(ticket, {FULL: sink[FULL], WINDOW: (other, THERE[WINDOW])})
            assert (b.reservations.pinned_blocks, b.reservations.quarantined_blocks) == (0, 0)
            await b.release(ticket)


async def test_several_tickets_bring_several_caches_together() -> None:
    """One rank has one half of the heads of the one cache, and all of the other; another rank the other half."""
    async with two_nodes(["shm"]) as (a, b), AsyncExitStack() as stack:
        window = await caches(a, HERE, WINDOW, fill=True)
        sink = await caches(b, THERE, FULL, WINDOW)
        tickets = []
        for head in range(2):
            half = await make_cache(a, small_geometry(kv_heads=1, head_start=head), 8)
            half.regions[0].array.view(np.float32)[:] = head + 1
            held = {FULL: (half, HERE[FULL])} | (window if head else {})
            tickets.append(await stack.enter_async_context(a.publish(f"r{head}", held)))
        pulled = await b.pull(tickets, sink)
        assert pulled.bytes_by_source == (3 * 2 * 40 * 8 * 4, 3 * 2 * 40 * 8 * 4 + 2 * 2 * 24 * 4 * 4)
        got = blocks(sink[FULL]).reshape(3, 2, 40, -1).view(np.float32).reshape(3, 2, 40, 2, 8)
        assert (got[:, :, :, 0] == 1).all()
        assert (got[:, :, :, 1] == 2).all()
        assert np.array_equal(blocks(window[WINDOW]), blocks(sink[WINDOW]))


async def test_what_makes_no_sense_is_refused_before_anything_happens() -> None:
    async with two_nodes(["shm"]) as (a, b):
        source = await caches(a, HERE, FULL, WINDOW)
        cache, table = source[FULL]
        wrong: tuple[tuple[Any, Any], ...] = (
            (source, table),
            (cache, None),
            ({}, None),
            ({FULL: cache}, None),
            ({FULL: (cache, [1])}, None),
            ({FULL: (table, cache)}, None),
            ({7: (cache, table)}, None),
            ({"n" * 65: (cache, table)}, None),
            ({str(n): (cache, table) for n in range(CACHES_MAX + 1)}, None),
            ([cache, table], None),
            (None, None),
        )
        for these, beside in wrong:
            with pytest.raises(UsageError):
                a.publish("r", these, beside)
            with pytest.raises(UsageError):
                await a.pull("no ticket", these, beside)
        for these in (source, None):
            with pytest.raises(UsageError, match="must be a KVCache"):
                a.push("r", to=b.addresses, cache=these, table=table)  # type: ignore[arg-type]
            with pytest.raises(UsageError, match="must be a KVCache"):
                a.offer("r", these, table)  # type: ignore[arg-type]
        async with a.publish("r", source) as ticket:
            sink = (await caches(b, THERE, FULL))[FULL]
            with pytest.raises((UsageError, RegionBusy)):  # one byte cannot be two things
                await b.pull(ticket, {FULL: sink, WINDOW: sink})
            assert (b.reservations.pinned_blocks, b.reservations.quarantined_blocks) == (0, 0)
            foreign = await caches(a, THERE, FULL)
            with pytest.raises(UnknownRegion):
                await b.pull(ticket, foreign)
            await b.release(ticket)


async def test_a_publication_of_several_ends_with_any_of_their_regions() -> None:
    async with two_nodes(["shm"]) as (a, b):
        source = await caches(a, HERE, FULL, WINDOW)
        sink = await caches(b, THERE, FULL, WINDOW)
        async with a.publish("r", source) as ticket:
            await source[WINDOW][0].regions[0].release()
            with pytest.raises((KvxferError, TransferTimeout)):
                await b.pull(ticket, sink)
        assert ticket.outcome == "withdrawn"


def body(**changes: Any) -> dict[str, Any]:
    """What a posting says of one cache."""
    layout, length = contiguous_layout(small_geometry(), 8)
    number = "0" * 32
    descriptor = RemoteDescriptor.from_dict(
        {
            "v": 1,
            "node_id": number,
            "incarnation": number,
            "engine_id": number,
            "region": 1,
            "grant": 1,
            "generation": 1,
            "length": length,
            "access": "rw",
            "key": number,
            "kind": "dram",
            "expires_in_s": None,
            "endpoints": {"tcp": ["127.0.0.1:1"]},
        }
    )
    offer = TransferOffer(layout=layout, table=HERE[FULL], descriptors=(descriptor,), check=False)
    found: dict[str, Any] = msgpack.unpackb(offer.pack())
    return found | changes


def test_a_posting_of_several_survives_its_journey() -> None:
    raw = body(name="a", more=[body(name="b"), body(name="")])
    found = TransferOffer.unpack(msgpack.packb(raw))
    assert list(found.named) == ["a", "b", ""]
    assert len(found.all_descriptors) == 3
    assert TransferOffer.unpack(found.pack()) == found


@pytest.mark.parametrize(
    "wrong",
    [
        {"more": 7},
        {"more": {"name": "b"}},
        {"more": [7]},
        {"more": [{}]},
        {"more": [{"name": "b"}]},
        {"name": 7},
        {"name": "n" * 65},
        {"more": "two of one name"},
        {"more": "too many"},
        {"more": "too many descriptors"},
        {"more": "nonsense"},
    ],
)
def test_a_hostile_posting_of_several_is_a_protocol_error(wrong: dict[str, Any]) -> None:
    many = body()["descriptors"] * (DESCRIPTORS_MAX // 2 + 1)
    made: dict[str, Any] = {
        "two of one name": [body(name="b"), body(name="b")],
        "too many": [body(name=str(number)) for number in range(CACHES_MAX)],
        "too many descriptors": [body(name="b", descriptors=many), body(name="c", descriptors=many)],
        "nonsense": [body(name="b", layout=[])],
    }
    changes = {key: made.get(value, value) if isinstance(value, str) else value for key, value in wrong.items()}
    with pytest.raises(ProtocolError):
        TransferOffer.unpack(msgpack.packb(body() | changes))
