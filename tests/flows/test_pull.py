"""`Pull` from several tickets: ranks, stages and pieces of the context into one cache, with one outcome."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import kvxfer
from kvxfer.client import Client
from kvxfer.coverage import Box, box_of
from kvxfer.errors import ClosedError, GeometryMismatch, TransferCancelled, TransferTimeout, UnknownTransfer, UsageError
from kvxfer.flows.publish import Publication
from kvxfer.flows.pull import divide
from kvxfer.geometry import BlockTable, CacheLayout, Geometry
from kvxfer.memory.region import KVCache
from tests.conftest import slack
from tests.nodes import until
from tests.support.nodes import make_cache, small_geometry, two_nodes

TOKENS = 40


def table(seed: int, first: int = 0, tokens: int = TOKENS) -> BlockTable:
    blocks = np.random.default_rng(seed).permutation(8)[: -(-tokens // 16)]
    return BlockTable(blocks=blocks, tokens=tokens, first_token=first, first_slot=0)


def part(**changes: Any) -> Geometry:
    """Of a model of 4 layers and 4 heads."""
    base = {"layers": 4, "layers_total": 4, "kv_heads": 4, "kv_heads_total": 4}
    return small_geometry(**(base | changes))


def rank(head_start: int, kv_heads: int) -> Geometry:
    return part(head_start=head_start, kv_heads=kv_heads)


def stage(first_layer: int, layers: int) -> Geometry:
    return part(first_layer=first_layer, layers=layers)


def elements(cache: KVCache, held: BlockTable) -> npt.NDArray[np.float32]:
    """A cache by global numbers, shape (layer, part, token, head, element): a view of a copy, the slow way."""
    layout: CacheLayout = cache.layout
    shape = layout.geometry
    memory = cache.regions[0].array.view(np.float32)
    found = np.empty((shape.layers, shape.kv_parts, held.tokens, shape.kv_heads, shape.head_size), np.float32)
    for index in np.ndindex(*found.shape[:4]):
        layer, which, token, head = index
        block, slot = held.blocks[token // shape.block_tokens], token % shape.block_tokens
        steps = layout.strides(layer)
        offset = layout.placements[layer].offset + sum(map(int.__mul__, (which, int(block), slot, head), steps))
        found[index] = memory[offset // 4 : offset // 4 + shape.head_size]
    return found


def expected(geometry: Geometry, held: BlockTable) -> npt.NDArray[np.float32]:
    """A different number for every element of the model's cache."""
    axes = np.ix_(
        np.array(geometry.layer_numbers),
        np.arange(geometry.kv_parts),
        held.first_token + np.arange(held.tokens),
        np.array(geometry.head_numbers),
        np.arange(geometry.head_size),
    )
    layer, which, token, head, element = axes
    return ((((layer * 2 + which) * 64 + token) * 4 + head) * 8 + element + 1).astype(np.float32)


async def filled(client: Client, geometry: Geometry, held: BlockTable) -> KVCache:
    cache = await make_cache(client, geometry, 8)
    memory, values = cache.regions[0].array.view(np.float32), expected(geometry, held)
    for index in np.ndindex(*values.shape[:4]):
        layer, which, token, head = index
        block, slot = held.blocks[token // 16], token % 16
        steps = cache.layout.strides(layer)
        offset = cache.layout.placements[layer].offset + sum(map(int.__mul__, (which, int(block), slot, head), steps))
        memory[offset // 4 : offset // 4 + geometry.head_size] = values[index]
    return cache


@asynccontextmanager
async def published(
    client: Client, sources: Sequence[tuple[Geometry, BlockTable]], **how: Any
) -> AsyncIterator[list[Publication]]:
    """A ticket for each; they are withdrawn in the end, whatever became of them."""
    tickets = []
    try:
        async with AsyncExitStack() as stack:
            for number, (geometry, held) in enumerate(sources):
                cache = await filled(client, geometry, held)
                tickets.append(await client.publish(f"r-{number}", cache, held, **how).__aenter__())
                stack.push_async_exit(tickets[-1].__aexit__)
            yield tickets
            raise ClosedError("the test is over")
    except ClosedError:
        assert tickets


GATHERED = {
    "two ranks": [(rank(0, 2), table(1)), (rank(2, 2), table(2))],
    "four ranks": [(rank(head, 1), table(head)) for head in range(4)],
    "uneven ranks": [(rank(0, 3), table(1)), (rank(3, 1), table(2))],
    "replicated heads": [(rank(head // 2 * 2, 2), table(head)) for head in range(4)],
    "more than is needed": [(rank(0, 3), table(1)), (rank(1, 3), table(2)), (rank(0, 4), table(3))],
    "stages": [(stage(0, 1), table(1)), (stage(1, 3), table(2))],
    "pieces of the context": [(part(), table(1, 0, 16)), (part(), table(2, 16, 20)), (part(), table(3, 36, 4))],
    "stages of ranks": [
        (part(first_layer=layer, layers=2, head_start=head, kv_heads=2), table(layer + head))
        for layer in (0, 2)
        for head in (0, 2)
    ],
    "heads of pieces": [(rank(0, 2), table(1)), (rank(2, 2), table(2, 0, 32)), (part(), table(3, 32, 8))],
}


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("name", GATHERED)
async def test_each_element_is_read_once_and_is_right(name: str, transport: str) -> None:
    async with two_nodes([transport]) as (a, b):
        target, held, layers = await make_cache(b, part(), 8), table(9), []
        async with published(a, GATHERED[name]) as tickets:
            pulled = await b.pull([ticket.to_json() for ticket in tickets], target, held, on_layer=layers.append)
            for ticket in tickets:
                assert await asyncio.wait_for(ticket.wait_released(), 5 * slack()) == "released"
        assert np.array_equal(elements(target, held), expected(part(), held))
        assert layers == [0, 1, 2, 3]
        assert pulled.bytes == sum(pulled.bytes_by_source) == 4 * 2 * TOKENS * 4 * 8 * 4, "some were read twice"
        assert (pulled.tokens, pulled.layers, pulled.transport) == (TOKENS, 4, transport)
        if name == "more than is needed":
            assert pulled.bytes_by_source[2] == 0
        assert (b.reservations.pinned_blocks, b.reservations.quarantined_blocks) == (0, 0)


async def test_a_narrower_target_reads_what_it_holds() -> None:
    async with two_nodes(["shm"]) as (a, b):
        held = table(9, 4, 30)
        narrow = part(first_layer=1, layers=2, head_start=1, kv_heads=2)
        target = await make_cache(b, narrow, 8)
        async with published(a, GATHERED["four ranks"]) as tickets:
            pulled = await b.pull(tickets, target, held)
            assert [bool(count) for count in pulled.bytes_by_source] == [False, True, True, False]
            for ticket in tickets:  # also the two that were not read from
                assert await asyncio.wait_for(ticket.wait_released(), 5 * slack()) == "released"
        assert np.array_equal(elements(target, held), expected(narrow, held))


MISSING = {
    "head 3": [(rank(0, 2), table(1)), (rank(2, 1), table(2))],
    "tokens 16-17": [(part(), table(1, 0, 16)), (part(), table(2, 18, 22))],
    "layer 2": [(stage(0, 2), table(1)), (stage(3, 1), table(2))],
    "head 0, tokens 32-39 of layers 0-1": [
        (rank(1, 3), table(1)), (part(), table(2, 0, 32)), (stage(2, 2), table(3)),
    ],
    "heads 2-3": [(rank(0, 2), table(1))],
}  # fmt: skip


@pytest.mark.parametrize("what", MISSING)
async def test_what_nobody_holds_is_refused_before_a_byte_moves(what: str) -> None:
    async with two_nodes(["shm"]) as (a, b):
        target = await make_cache(b, part(), 8)
        target.regions[0].array[:] = 7
        async with published(a, MISSING[what], lease_s=60) as tickets:
            with pytest.raises(GeometryMismatch, match=what):
                await b.pull(tickets, target, table(9))
            for ticket in tickets:  # told at once
                assert await asyncio.wait_for(ticket.wait_released(), 5 * slack()) == "abandoned"
                assert isinstance(ticket.error, GeometryMismatch)
        assert (target.regions[0].array == 7).all()
        assert (b.reservations.pinned_blocks, b.reservations.quarantined_blocks) == (0, 0)


async def test_another_model_among_the_sources_is_named() -> None:
    async with two_nodes(["shm"]) as (a, b):
        target = await make_cache(b, part(), 8)
        sources = [(rank(0, 2), table(1)), (part(head_start=2, kv_heads=2, fingerprint="other"), table(2))]
        async with published(a, sources, lease_s=60) as tickets:
            with pytest.raises(GeometryMismatch, match="source 2 of 2: fingerprint") as refused:
                await b.pull(tickets, target, table(9))
            assert (refused.value.fields["ticket"], refused.value.fields["request_id"]) == (1, "r-1")
            assert await asyncio.wait_for(tickets[1].wait_released(), 5 * slack()) == "abandoned"
            assert isinstance(tickets[1].error, GeometryMismatch)
            assert await asyncio.wait_for(tickets[0].wait_released(), 5 * slack()) == "abandoned"
            assert isinstance(tickets[0].error, TransferCancelled), "it did nothing wrong"


async def test_a_ticket_that_is_over_ends_the_claims_of_the_others() -> None:
    async with two_nodes(["shm"]) as (a, b):
        target = await make_cache(b, part(), 8)
        async with published(a, GATHERED["four ranks"], lease_s=60) as tickets:
            given = [ticket.to_dict() for ticket in tickets]
            tickets[2]._end("withdrawn")
            with pytest.raises(UnknownTransfer, match="source 3 of 4") as refused:
                await b.pull(given, target, table(9))
            assert refused.value.fields["ticket"] == 2
            # The others may have been claimed or not; who was claimed hears of its end, and none stays claimed.
            await until(lambda: not any(ticket._claims - ticket._released_by for ticket in tickets))
        assert (b.reservations.pinned_blocks, b.reservations.quarantined_blocks) == (0, 0)


@pytest.mark.parametrize("end", ["source", "cancel", "close"])
async def test_an_end_in_the_middle_is_one_outcome_and_all_are_told(end: str) -> None:
    async with two_nodes(["shm"]) as (a, b):
        target = await make_cache(b, part(), 8)
        async with published(a, GATHERED["four ranks"], lease_s=60) as tickets:
            b.plane._connections._resolve_once = lambda *_: asyncio.Event().wait()  # type: ignore[assignment]
            pulling = asyncio.ensure_future(b.pull([ticket.to_dict() for ticket in tickets], target, table(9)))
            await until(lambda: b.plane._connections._resolving)
            if end == "source":
                tickets[1]._end("withdrawn")
                with pytest.raises(TransferCancelled, match="source 2 of 4"):
                    await asyncio.wait_for(pulling, 5 * slack())
            elif end == "cancel":
                pulling.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await pulling
            else:
                await b.aclose()
                with pytest.raises(ClosedError):
                    await asyncio.wait_for(pulling, 5 * slack())
            for number, ticket in enumerate(tickets):
                if end != "source" or number != 1:
                    assert await asyncio.wait_for(ticket.wait_released(), 5 * slack()) == "abandoned"
                    assert isinstance(ticket.error, TransferCancelled)
        await until(lambda: (b.reservations.pinned_blocks, b.reservations.quarantined_blocks) == (0, 0))
        assert a.plane.engine.counters().grants == 0


async def test_a_pull_of_no_tokens_releases_all() -> None:
    async with two_nodes(["shm"]) as (a, b):
        target = await make_cache(b, part(), 8)
        async with published(a, GATHERED["two ranks"]) as tickets:
            pulled = await b.pull(tickets, target, BlockTable(blocks=np.empty(0, np.int64), tokens=0))
            assert (pulled.bytes, pulled.tokens, pulled.bytes_by_source) == (0, 0, (0, 0))
            for ticket in tickets:
                assert await asyncio.wait_for(ticket.wait_released(), 5 * slack()) == "released"


async def test_a_list_of_tickets_makes_sense() -> None:
    async with kvxfer.local() as client:
        cache = await make_cache(client, part(), 8)
        async with published(client, [(part(), table(1))]) as [ticket]:
            with pytest.raises(UsageError, match="needs a ticket"):
                await client.pull([], cache, table(9))
            with pytest.raises(UsageError, match="twice"):
                await client.pull([ticket, ticket.to_json()], cache, table(9))
            with pytest.raises(UsageError):
                await client.pull([ticket, None], cache, table(9))  # type: ignore[list-item]
            assert not ticket._claims, "nothing was claimed"


def test_every_element_comes_from_the_first_that_holds_it() -> None:
    """Against single elements, on boxes of all kinds."""
    rng = np.random.default_rng(5)

    def some(most: int) -> range:
        start, stop = sorted(rng.integers(0, most + 1, 2).tolist())
        return range(start, stop)

    def drawn() -> Box:
        return Box(layers=some(3), parts=some(2), heads=some(4), tokens=some(5))

    def numbers(box: Box) -> set[tuple[int, ...]]:
        return {
            (layer, which, head, token)
            for layer in box.layers for which in box.parts for head in box.heads for token in box.tokens
        }  # fmt: skip

    for _ in range(300):
        want, held = drawn(), [drawn() for _ in range(rng.integers(0, 5))]
        shares, missing = divide(want, held)
        left = numbers(want)
        for share, box in zip(shares, held, strict=True):
            found = [numbers(one) for one in share]
            assert sum(map(len, found)) == len(set().union(*found)), "two boxes of a share overlap"
            assert set().union(*found) == left & numbers(box)
            left -= numbers(box)
        assert set().union(*map(numbers, missing)) == left


def test_a_box_of_a_table_is_what_it_names() -> None:
    held = table(1, 4, 30)
    layout, _ = kvxfer.contiguous_layout(part(first_layer=1, layers=2, head_start=1, kv_heads=2), 8)
    assert box_of(layout, held) == Box(layers=range(1, 3), parts=range(2), heads=range(1, 3), tokens=range(4, 34))


# -- one piece or layer by layer -----------------------------------------------------------------------------------


async def whole(a: Client, b: Client) -> tuple[KVCache, KVCache, BlockTable]:
    """The same cache on both sides, filled and empty, and a table."""
    source, sink = await make_cache(a, small_geometry(), 8), await make_cache(b, small_geometry(), 8)
    source.regions[0].array[:] = np.arange(source.regions[0].length, dtype=np.uint64).astype(np.uint8)
    return source, sink, table(3)


async def test_a_pull_that_names_no_callback_is_one_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    async with two_nodes(["shm"]) as (a, b):
        source, sink, held = await whole(a, b)
        started: list[int] = []
        start = b.plane.start

        def counted(parts: Any, **options: Any) -> Any:
            started.append(len([part for part in parts if part.segments is not None]))
            return start(parts, **options)

        monkeypatch.setattr(b.plane, "start", counted)
        async with a.publish("r", source, held) as ticket:
            pulled = await b.pull(ticket, sink, held)
        assert started == [1, 0]  # all three layers, and the release
        assert pulled.segments == 3 * 2 * 2  # two of the three blocks are neighbours on both sides
        assert 0 < pulled.waited_s < pulled.seconds < 30 * slack()
        layers: list[int] = []
        async with a.publish("r", source, held) as ticket:
            again = await b.pull(ticket, sink, held, on_layer=layers.append)
        assert (layers, started[2:]) == ([0, 1, 2], [1, 1, 1, 0])
        assert (again.segments, again.bytes) == (pulled.segments, pulled.bytes)


@pytest.mark.parametrize("limit", [1, 7, 65536])
async def test_one_operation_keeps_to_its_limits(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvxfer.flows.pull.AT_ONCE_BYTES", 3000)
    monkeypatch.setattr("kvxfer.flows.pull.FIRST_BYTES", 1)
    async with two_nodes(["shm", "tcp"], segments_max=limit) as (a, b):
        source, sink, held = await whole(a, b)
        async with a.publish("r", source, held) as ticket:
            pulled = await b.pull(ticket, sink, held)
        assert pulled.bytes == 3 * 2 * TOKENS * 2 * 8 * 4
        assert np.array_equal(elements(source, held), elements(sink, held), equal_nan=True)


async def test_an_error_of_the_one_operation_names_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    async with two_nodes(["shm"]) as (a, b):
        source, sink, held = await whole(a, b)
        submit = b.plane.engine.submit

        def wrong(kind: Any, region: Any, handle: Any, segments: Any, *rest: Any) -> Any:
            if segments is not None and len(segments):
                segments = segments.copy()
                segments[-1, 0] = sink.regions[0].length  # of the last layer
            return submit(kind, region, handle, segments, *rest)

        monkeypatch.setattr(b.plane.engine, "submit", wrong)
        async with a.publish("r", source, held, retryable=True) as ticket:
            with pytest.raises(kvxfer.KvxferError) as raised:
                await b.pull(ticket, sink, held)
            monkeypatch.setattr(b.plane.engine, "submit", submit)
            await b.pull(ticket, sink, held)
        if "segment" in raised.value.fields:
            assert raised.value.fields["layer"] == 2


# -- what a callback may do ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("last", [0, 2])
async def test_a_callback_that_raises_is_the_outcome_and_the_publisher_hears_of_it(last: int) -> None:
    async with two_nodes(["shm"]) as (a, b):
        source, sink, held = await whole(a, b)
        seen: list[int] = []

        def bad(layer: int) -> None:
            seen.append(layer)
            if layer == last:
                raise LookupError("of the caller")

        async with a.publish("r", source, held) as ticket:
            with pytest.raises(LookupError, match="of the caller"):
                await b.pull(ticket, sink, held, on_layer=bad)
            assert seen == list(range(last + 1))  # it is not called again
            assert (b.reservations.pinned_blocks, b.reservations.quarantined_blocks) == (0, 0)
        assert ticket.outcome == "abandoned"
        assert isinstance(ticket.error, TransferCancelled)


@pytest.mark.parametrize("last", [0, 2])
async def test_a_callback_that_cancels_ends_the_pull(last: int) -> None:
    async with two_nodes(["shm"]) as (a, b):
        source, sink, held = await whole(a, b)
        async with a.publish("r", source, held) as ticket:

            def cancels(layer: int) -> None:
                if layer == last:
                    pulling.cancel()

            pulling = asyncio.ensure_future(b.pull(ticket, sink, held, on_layer=cancels))
            with pytest.raises(asyncio.CancelledError):
                await pulling
            assert (b.reservations.pinned_blocks, b.reservations.quarantined_blocks) == (0, 0)
        assert ticket.outcome in ("abandoned", "released")  # all of it may be read by then


async def test_the_time_of_a_callback_counts() -> None:
    async with two_nodes(["shm"]) as (a, b):
        source, sink, held = await whole(a, b)
        async with a.publish("r", source, held, retryable=True) as ticket:
            with pytest.raises(TransferTimeout):
                await b.pull(ticket, sink, held, on_layer=lambda _: time.sleep(0.6), timeout=0.5 * slack())
            pulled = await b.pull(ticket, sink, held)  # and nothing is left behind
        assert pulled.layers == 3


async def test_a_callback_that_closes_the_client_in_the_background_ends_the_pull() -> None:
    async with two_nodes(["shm"]) as (a, b):
        source, sink, held = await whole(a, b)
        closing: list[asyncio.Future[None]] = []

        def closes(_: int) -> None:
            if not closing:
                closing.append(asyncio.ensure_future(b.aclose()))

        async with a.publish("r", source, held) as ticket:
            pulling = asyncio.ensure_future(b.pull(ticket, sink, held, on_layer=closes))
            await asyncio.wait([pulling])
            await closing[0]
        assert pulling.exception() is None or isinstance(pulling.exception(), ClosedError)  # it may have been quicker
        assert ticket.outcome in ("abandoned", "released")
