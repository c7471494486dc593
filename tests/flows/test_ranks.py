"""Pushes from unlike ranks into unlike ranks, all at the same time: every byte is right, and no other byte changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import numpy as np
import pytest

import kvxfer
from kvxfer.geometry import BlockTable
from kvxfer.memory.region import KVCache
from tests import ranks
from tests.ranks import CASES, Case, Rank
from tests.support.nodes import two_nodes

UNTOUCHED = 0  # no value of the model


@dataclass
class Held:
    rank: Rank
    cache: KVCache
    table: BlockTable


async def held(client: kvxfer.Client, case: Case, rank: Rank, seed: int) -> Held:
    layout, length, table = case.cache(rank, seed)
    cache = KVCache(layout, await client.alloc(length))
    cache.regions[0].array[:] = UNTOUCHED
    return Held(rank, cache, table)


async def push(client: kvxfer.Client, source: Held, ticket: kvxfer.Ticket) -> bool:
    async with client.push(ticket, cache=source.cache, table=source.table, timeout=20) as tx:
        await tx.layers()
    return tx.covered


async def land(
    client: kvxfer.Client, target: Held, pushes: asyncio.Event, request: str
) -> AsyncIterator[kvxfer.Ticket]:
    async with client.offer(request, target.cache, target.table, private=True, timeout=20) as landing:
        yield landing.ticket
        layers = [layer async for layer in landing]
        assert sorted(layers) == list(range(len(target.rank.layers)))
        assert landing.committed
        await pushes.wait()  # the copies of a head come late, and find their part done


async def moved(a: kvxfer.Client, b: kvxfer.Client, case: Case) -> None:
    values = case.values()
    sources = [await held(a, case, rank, seed) for seed, rank in enumerate(case.sources)]
    targets = [await held(b, case, rank, 100 + seed) for seed, rank in enumerate(case.targets)]
    for source in sources:
        ranks.fill(source.cache.regions[0].array, source.cache.layout, source.table, values)
    done = asyncio.Event()
    landings = [land(b, target, done, "r") for target in targets]
    tickets = [await anext(landing) for landing in landings]
    pairs = [
        (source, target, ticket)
        for target, ticket in zip(targets, tickets, strict=True)
        for source in sources
        if source.rank.has_in_common(target.rank)
    ]
    pushes = asyncio.gather(*(push(a, source, ticket) for source, _, ticket in pairs))
    ends = [asyncio.ensure_future(anext(landing, None)) for landing in landings]
    covered = await pushes
    done.set()
    await asyncio.gather(*ends)
    for target in targets:
        memory = target.cache.regions[0].array
        expected = np.full_like(memory, UNTOUCHED)
        ranks.fill(expected, target.cache.layout, target.table, values)
        assert np.array_equal(memory, expected), (case.name, target.rank)
    copies = len({(source.rank, target.rank, ticket.posting) for source, target, ticket in pairs})
    assert covered.count(False) == copies, "what others write is not written again"
    for one in (*sources, *targets):
        for region in one.cache.regions:
            await region.release(drain=True)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_every_case_byte_by_byte(transport: str) -> None:
    async with two_nodes([transport]) as (a, b):
        for case in CASES:
            await moved(a, b, case)
