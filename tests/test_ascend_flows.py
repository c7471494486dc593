"""Whole flows between two processes, each with a daemon, whose caches are on (simulated) cards or in host memory.

One side runs in the test's child, the other in a process of its own; both take the transports that "auto" stands for.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvxfer
from examples.child_processes import python_process
from examples.remote_worker import Remote, serve
from kvxfer.dataplane.plane import WorkRequest
from kvxfer.descriptors import RemoteDescriptor, Ticket
from kvxfer.geometry import CacheLayout, LayerPlacement
from kvxfer.memory.region import KVCache
from kvxfer.native.engine import OpKind
from kvxfer.planner import contiguous_layout
from tests.native.ascend_sim.simulation import Simulation
from tests.native.simulated import simulated
from tests.nodes import until
from tests.support.nodes import make_cache, read_tokens, scattered, small_geometry

pytestmark = pytest.mark.once

MIB = 1 << 20
SMALL: dict[str, Any] = {"hbm_arena_bytes": 4 * MIB, "pinned_arena_bytes": 2 * MIB}
BLOCKS, TOKENS = 8, 40
WHERE: dict[str, dict[str, Any]] = {"dram": {}, "pinned": {"device": 0}, "hbm": {"memory": "hbm", "device": 0}}


async def filled_cache(client: kvxfer.Client, memory: str, seed: int, device: int = 0) -> KVCache:
    how = WHERE[memory] and {**WHERE[memory], "device": device}
    cache = await make_cache(client, small_geometry(), BLOCKS, **how)
    data = np.random.default_rng(seed).standard_normal(cache.regions[0].length // 4).astype(np.float32)
    await cache.regions[0].write(0, data)
    return cache


async def digest(cache: KVCache, seed: int) -> list[float]:
    """What identifies the request's tokens in every layer."""
    table = scattered(seed, BLOCKS, TOKENS, 16)
    found = [await read_tokens(cache, table, layer) for layer in range(cache.layout.geometry.layers)]
    return [float(np.dot(layer.ravel(), np.arange(layer.size))) for layer in found]


class Other:
    """The other process: what it is told to do, it does with its own client."""

    def __init__(self, client: kvxfer.Client) -> None:
        self.client = client
        self.landings: dict[str, asyncio.Task[None]] = {}
        self.publications: dict[str, Any] = {}
        self.caches: dict[str, KVCache] = {}

    async def hello(self) -> dict[str, Any]:
        return {"addresses": list(self.client.addresses), "pid": os.getpid()}

    async def cache(self, name: str, memory: str) -> None:
        self.caches[name] = await filled_cache(self.client, memory, 99, device=1)

    async def offer(self, name: str) -> None:
        async def landed() -> None:
            async with self.client.offer(name, self.caches[name], scattered(2, BLOCKS, TOKENS, 16)) as landing:
                await landing.wait()

        self.landings[name] = asyncio.ensure_future(landed())

    async def landed(self, name: str) -> dict[str, Any]:
        await self.landings.pop(name)
        return {"digest": await digest(self.caches[name], 2)}

    async def publish(self, name: str) -> dict[str, Any]:
        publication = self.client.publish(name, self.caches[name], scattered(2, BLOCKS, TOKENS, 16))
        self.publications[name] = publication
        ticket = await publication.__aenter__()
        return {"ticket": getattr(ticket, "ticket", ticket).to_dict(), "digest": await digest(self.caches[name], 2)}

    async def withdraw(self, name: str) -> None:
        await self.publications.pop(name).__aexit__(None, None, None)

    async def describe(self, name: str) -> dict[str, Any]:
        return {"descriptor": self.caches[name].regions[0].descriptor("rw").to_dict()}


async def main(options: dict[str, Any]) -> None:
    async with kvxfer.local(**SMALL, **options) as client:
        await serve(Other(client))


@asynccontextmanager
async def both(**options: Any) -> AsyncIterator[tuple[kvxfer.Client, Remote, list[str]]]:
    arguments = ["-m", "tests.test_ascend_flows", json.dumps(options)]
    async with python_process(arguments, name="other") as process, kvxfer.local(**SMALL, **options) as client:
        other = Remote(process, 20)
        yield client, other, (await other.do("hello"))["addresses"]


async def push_pull_put_get(
    client: kvxfer.Client, other: Remote, address: list[str], ours: str, theirs: str
) -> dict[str, str]:
    """All flows between our memory and theirs; which transport each took."""
    name = f"{ours}-{theirs}"
    table = scattered(1, BLOCKS, TOKENS, 16)
    await other.do("cache", name=name, memory=theirs)
    mine = await filled_cache(client, ours, 5)
    taken = {}
    await other.do("offer", name=name)
    async with client.push(name, to=address, cache=mine, table=table) as push:
        await push.layers()
        taken["push"] = push.transport
    assert (await other.do("landed", name=name))["digest"] == await digest(mine, 1)

    told = await other.do("publish", name=name)
    await mine.regions[0].write(0, bytes(mine.regions[0].length))
    pulled = await client.pull(Ticket.from_dict(told["ticket"]), mine, table)
    taken["pull"] = pulled.transport
    assert await digest(mine, 1) == told["digest"]
    await other.do("withdraw", name=name)

    theirs_described = RemoteDescriptor.from_dict((await other.do("describe", name=name))["descriptor"])
    written = np.random.default_rng(8).integers(0, 256, mine.regions[0].length, dtype=np.uint8)
    await mine.regions[0].write(0, written)
    taken["put"] = (await client.put(mine.regions[0], theirs_described)).transport
    await mine.regions[0].write(0, bytes(len(written)))
    taken["get"] = (await client.get(mine.regions[0], theirs_described)).transport
    assert (await mine.regions[0].read() == written).all()
    return taken


@simulated(HBM="64M")
async def test_each_pair_of_memories_takes_the_best_way_of_this_host() -> None:
    expected = {
        ("hbm", "hbm"): "hixl",
        ("hbm", "dram"): "shm",  # the driver copies between the card and the mapping
        ("dram", "hbm"): "tcp",  # the owner stages
        ("dram", "dram"): "shm",
        ("pinned", "hbm"): "hixl",
        ("hbm", "pinned"): "shm",
    }
    async with both() as (client, other, address):
        for (ours, theirs), transport in expected.items():
            taken = await push_pull_put_get(client, other, address, ours, theirs)
            assert taken == dict.fromkeys(("push", "pull", "put", "get"), transport), (ours, theirs)
        assert {choice.pair for choice in client.plane.choices.values()} >= {"hbm to dram", "dram to hbm", "hbm to hbm"}


@simulated(HBM="64M")
async def test_between_hosts_one_sided_pairs_are_staged() -> None:
    async with both(transports=["hixl", "tcp"]) as (client, other, address):
        for (ours, theirs), transport in {
            ("hbm", "dram"): "tcp",
            ("dram", "hbm"): "tcp",
            ("hbm", "pinned"): "hixl",
        }.items():
            taken = await push_pull_put_get(client, other, address, ours, theirs)
            assert set(taken.values()) == {transport}, (ours, theirs, taken)
        staged = {row.name: row.staged_bytes for row in client.plane.engine.counters().transports}
        assert staged["tcp"] > 0
        assert staged["hixl"] == 0


@simulated(HBM="64M")
async def test_what_hixl_cannot_do_after_all_goes_by_tcp() -> None:
    """A card is not connected to itself: without copies between processes hixl finds out at the transfer."""
    async with both(device_ipc=False) as (client, other, _):
        await other.do("cache", name="far", memory="hbm")  # on card 1
        near = await filled_cache(client, "hbm", 5, device=1)
        far = RemoteDescriptor.from_dict((await other.do("describe", name="far"))["descriptor"])
        for _ in range(2):
            assert (await client.put(near.regions[0], far)).transport == "tcp"
        [choice] = client.plane.choices.values()
        assert choice.passed_over[0].startswith("hixl ")
        before = await near.regions[0].read()
        await near.regions[0].write(0, bytes(len(before)))
        await client.get(near.regions[0], far)
        assert (await near.regions[0].read() == before).all()


@simulated(HBM="64M")
async def test_parts_on_several_cards_run_side_by_side() -> None:
    simulation = Simulation(Path(os.environ["KVXFER_SIM_DIR"]))
    async with kvxfer.local(**SMALL) as client:
        sources = [await client.alloc(MIB, memory="hbm", device=device) for device in (0, 1)]
        async with kvxfer.local(**SMALL) as peer:
            far = [await peer.alloc(MIB, memory="hbm", device=device) for device in (1, 0)]
            for number, region in enumerate(sources):
                await region.write(0, np.full(MIB, number + 1, dtype=np.uint8))
            parts = [
                WorkRequest(kind=OpKind.PUT, region=source.id, descriptor=target.descriptor("w"), span=(0, 0, MIB))
                for source, target in zip(sources, far, strict=True)
            ]
            for part in parts:
                await client.plane.prepare(part.descriptor, sources[0].kind)
            simulation.control(STALL=1)
            transfer = client.plane.start(parts, timeout=20, peer="two cards")
            engine = client.plane.engine
            # Neither waits for the other: with everything standing still, both are under way.
            await until(lambda: all(engine.device(number).live_tokens == 1 for number in (0, 1)))
            simulation.control()
            assert (await transfer).bytes_done == 2 * MIB
            assert [int((await region.read()).min()) for region in far] == [1, 2]


@simulated(HBM="64M")
async def test_a_cache_on_two_cards_is_pushed_from_both() -> None:
    geometry = small_geometry()
    layout, length = contiguous_layout(geometry, BLOCKS)
    split = CacheLayout(
        geometry=geometry,
        blocks=BLOCKS,
        placements=tuple(
            LayerPlacement(region=layer % 2, offset=place.offset) for layer, place in enumerate(layout.placements)
        ),
    )
    async with kvxfer.local(**SMALL) as a, kvxfer.local(**SMALL) as b:
        caches = [
            KVCache(split, [await client.alloc(length, memory="hbm", device=device) for device in (0, 1)])
            for client in (a, b)
        ]
        for number, region in enumerate(caches[0].regions):
            await region.write(0, np.random.default_rng(number).integers(0, 256, length, dtype=np.uint8))
        table = scattered(1, BLOCKS, BLOCKS * 16, 16)
        async with b.offer("r", caches[1], table) as landing:
            async with a.push("r", to=b.addresses, cache=caches[0], table=table) as push:
                await push.layers()
                assert push.transport == "hixl"
            await landing.wait()
        landings = [await b.alloc(length, memory="hbm", device="auto", group=[0, 1]) for _ in range(2)]
        assert {region.device for region in landings} == {0, 1}  # the least loaded card of the group
        for layer, place in enumerate(split.placements):
            end = layout.placements[layer + 1].offset if layer + 1 < geometry.layers else length
            source, target = [
                await cache.regions[place.region].read(place.offset, end - place.offset) for cache in caches
            ]
            assert (source == target).all()


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
