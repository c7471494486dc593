"""K16: a full pool makes its users wait their turn, never for each other, and what can never fit is said at once."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AsyncExitStack

import numpy as np
import pytest

import kvxfer
from kvxfer.errors import BusyError, TooLarge, TransferTimeout
from tests.cases.facts import limit, pattern, within
from tests.cases.harness import BOTH
from tests.support.nodes import make_cache, small_geometry, two_nodes

pytestmark = [pytest.mark.once, pytest.mark.timeout(120)]
MIB = 1 << 20
SMALL = {"window_bytes_max": 8 * MIB, "inflight_bytes_max": 8 * MIB, "tcp_threads": 1, "copy_threads": 1}
ONE = SMALL | {"window_bytes_max": 2 * MIB}


@BOTH
async def test_c72_three_nodes_fifty_transfers_eight_mib(transport: str, caplog: pytest.LogCaptureFixture) -> None:
    began = time.monotonic()
    with caplog.at_level(logging.INFO, "kvxfer"):
        async with (
            kvxfer.local(transports=(transport,), **SMALL) as a,
            kvxfer.local(transports=(transport,), **SMALL) as b,
            kvxfer.local(transports=(transport,), **SMALL) as c,
        ):
            nodes = (a, b, c)
            sources = [await node.alloc(2 * MIB) for node in nodes]
            for number, source in enumerate(sources):
                source.array[:] = np.frombuffer(pattern(72, number, 2 * MIB), np.uint8)
            work = []
            for number in range(50):
                ours, theirs = number % 3, (number + 1 + number // 3 % 2) % 3
                target = await nodes[theirs].alloc(2 * MIB)
                work.append((ours, target, nodes[ours].put(sources[ours], target.descriptor("w"))))
            with within(20, "fifty transfers"):
                await asyncio.gather(*(transfer.wait_settled() for _, _, transfer in work))
            for ours, target, transfer in work:
                assert transfer.state == "done"
                assert np.array_equal(target.array, sources[ours].array)
            # More than there is room for streams through.
            large, landing = await a.alloc(20 * MIB), await b.alloc(20 * MIB)
            large.array[:] = np.resize(np.frombuffer(pattern(72, 9, MIB), np.uint8), 20 * MIB)
            await a.put(large, landing.descriptor("w"))
            assert np.array_equal(large.array, landing.array)
    assert len(caplog.records) <= 10 * max(1.0, time.monotonic() - began), [
        one.getMessage() for one in caplog.records[:20]
    ]


@BOTH
async def test_c72_first_come_first_served_and_by_the_deadline(transport: str) -> None:
    async with two_nodes([f"fault+{transport}"], fault_spec="hang_op=1", timeout_s=30, **ONE) as (a, b):
        source, target = await a.alloc(2 * MIB), await b.alloc(2 * MIB)
        described, order = target.descriptor("w"), []
        first = a.put(source, described)  # has the whole window, and hangs
        await asyncio.sleep(0.2)
        waiting = [a.put(source, described) for _ in range(8)]
        for number, transfer in enumerate(waiting):
            transfer.on_settled(lambda _, number=number: order.append(number))  # type: ignore[misc]
        late = a.put(source, described, timeout=0.3)
        with within(1.3, "the deadline of one that waits"), pytest.raises(TransferTimeout):
            await late
        assert not order
        await first.cancel()
        await asyncio.gather(*waiting)
        assert order == sorted(order), "in the order in which they came"


async def test_c72_a_landing_that_can_never_fit_fails_at_once() -> None:
    async with two_nodes(["shm"], landing_bytes_max=8 * MIB) as (a, b):
        geometry = small_geometry(layers=1, head_size=512)
        blocks = 20 * MIB // geometry.bytes_per_block
        source = await make_cache(a, geometry, blocks)
        table = kvxfer.BlockTable.of(range(blocks), tokens=16 * blocks)
        with within(1, "the refusal"), pytest.raises(TooLarge) as refused:
            async with a.push("r", to=b.addresses, cache=source, table=table, land=True, timeout=limit(10)):
                pass
        assert refused.value.fields["limit"] == 8 * MIB, "it names the limit"


@BOTH
async def test_c72_fifty_landings_take_turns_in_a_pool_for_four(transport: str) -> None:
    """Three daemons' pools as the staging, a ring of pushers: nobody holds one landing while it waits for another."""
    geometry = small_geometry(layers=1, head_size=512)
    blocks = 2 * MIB // geometry.bytes_per_block
    table, options = kvxfer.BlockTable.of(range(blocks), tokens=16 * blocks), SMALL | {"landing_bytes_max": 8 * MIB}
    async with AsyncExitStack() as stack:
        both = ("shm",) if transport == "shm" else ("tcp", "shm")  # adopting maps
        nodes = [await stack.enter_async_context(kvxfer.local(transports=both, **options)) for _ in range(3)]
        caches = [await make_cache(node, geometry, blocks) for node in nodes]
        for number, cache in enumerate(caches):
            cache.regions[0].array[:] = np.resize(np.frombuffer(pattern(72, number, MIB), np.uint8), 2 * MIB)

        async def push(number: int) -> None:
            ours, theirs = number % 3, (number + 1 + number // 3 % 2) % 3
            to = nodes[theirs].addresses
            async with nodes[ours].push(
                f"r{number}", to=to, cache=caches[ours], table=table, land=True, wait_s=limit(60), timeout=limit(60)
            ) as sending:
                await sending.layers()

        async def adopt(number: int) -> None:
            ours, theirs = number % 3, (number + 1 + number // 3 % 2) % 3
            async with nodes[theirs].adopt(f"r{number}", wait_s=limit(60), timeout=limit(60)) as landed:
                assert np.array_equal(landed.array, caches[ours].regions[0].array)

        with within(30, "fifty landings"):
            await asyncio.gather(*(step(number) for number in range(50) for step in (push, adopt)))


async def test_c72_who_waits_for_a_landing_ends_by_its_time() -> None:
    async with two_nodes(["shm"], landing_bytes_max=2 * MIB) as (a, b):
        geometry = small_geometry(layers=1, head_size=512)
        blocks = 2 * MIB // geometry.bytes_per_block
        source = await make_cache(a, geometry, blocks)
        how = {"to": b.addresses, "cache": source, "table": kvxfer.BlockTable.of(range(blocks), tokens=16 * blocks)}
        async with a.push("first", land=True, **how) as sending:
            await sending.layers()
        for wait_s in (None, 0.2):
            began = time.monotonic()
            with pytest.raises(BusyError):
                async with a.push("second", land=True, wait_s=wait_s, **how):
                    pass
            assert (wait_s or 0) <= time.monotonic() - began <= limit((wait_s or 0) + 1)


async def test_c105_pushes_that_wait_for_a_full_node_keep_nobody_from_another() -> None:
    """More of them than there may be unanswered requests: waiting is none, and each waits as long as it said."""
    geometry = small_geometry()
    async with (
        kvxfer.local(transports=("shm",)) as prefill,
        kvxfer.local(transports=("shm",)) as full,
        kvxfer.local(transports=("shm",)) as free,
    ):
        (source, table), (target, to) = [
            (await make_cache(node, geometry, 16), kvxfer.BlockTable.of([0], 16)) for node in (prefill, free)
        ]

        async def push(request: str, node: kvxfer.Client, wait_s: float) -> None:
            timeout = limit(30)
            async with prefill.push(
                request, to=list(node.addresses), cache=source, table=table, timeout=timeout, wait_s=wait_s
            ) as sending:
                await sending.layers()

        waiting = [asyncio.ensure_future(push(f"w{number}", full, limit(25))) for number in range(1100)]
        await asyncio.sleep(0)
        for number in range(3):
            receiving = asyncio.ensure_future(_receive(free, f"f{number}", target, to))
            with within(10, "a push to a node that is free"):
                await asyncio.gather(push(f"f{number}", free, 5.0), receiving)
        early = [one for one in waiting if one.done()]
        assert not early, [one.exception() for one in early[:3]]
        for one in waiting:
            one.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def _receive(node: kvxfer.Client, request: str, cache: kvxfer.KVCache, table: kvxfer.BlockTable) -> None:
    async with node.offer(request, cache, table, timeout=limit(30)) as landing:
        await landing.wait()
