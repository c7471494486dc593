"""Landings on (simulated) cards: the least loaded one takes them, a worker of the host reads them where they are."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

import kvxfer
from examples.child_processes import python_process
from examples.remote_worker import Remote, serve
from kvxfer.daemon.landing import rounded
from kvxfer.daemon.metrics import Sample
from kvxfer.dataplane.exports import DeviceMemory
from kvxfer.errors import BusyError, ConfigError, PeerLost, UsageError
from kvxfer.flows.adopt import Adoption
from kvxfer.memory.region import KVCache
from kvxfer.native._shim import ffi, lib
from kvxfer.planner import contiguous_layout
from kvxfer.server import Server, embedded_config, samples
from tests.native.simulated import simulated
from tests.nodes import until
from tests.support.nodes import make_cache, scattered, small_geometry

pytestmark = pytest.mark.once

MIB = 1 << 20
SMALL: dict[str, Any] = {"hbm_arena_bytes": 4 * MIB, "pinned_arena_bytes": 2 * MIB}
BLOCKS = 8
TABLE = scattered(1, BLOCKS, 40, 16)


def look(seen: DeviceMemory) -> bytes:
    """What a kernel would see: the driver copies from the address that the adopter was given."""
    why = ffi.new("char[256]")
    api = lib.kvx_ascend_get(why, 256)
    assert api, ffi.string(why)
    target = bytearray(seen.length)
    source = ffi.cast("void *", seen.address)
    assert api.copy(seen.device, ffi.from_buffer(target), source, seen.length, ffi.NULL) == 0
    return bytes(target)


class Adopter:
    """A worker in a process of its own, at the daemon of the test."""

    def __init__(self, client: kvxfer.Client) -> None:
        self.client = client
        self.stack = contextlib.AsyncExitStack()
        self.landed: Adoption | None = None

    async def adopt(self, name: str) -> dict[str, Any]:
        self.landed = await self.stack.enter_async_context(self.client.adopt(name, wait_s=5))
        return {"memory": self.landed.memory, "device": self.landed.device}

    async def see(self) -> dict[str, Any]:
        assert self.landed is not None
        seen = self.landed.on_device
        return {"bytes": look(seen).hex(), "on": seen.device}

    async def keep(self) -> dict[str, Any]:
        """What was given before the landing was lost is still there."""
        assert self.landed is not None
        seen = self.landed._on_device
        assert seen is not None
        return {"bytes": look(seen).hex(), "lost": self.landed._lost is not None}

    async def copy(self) -> dict[str, Any]:
        assert self.landed is not None
        region = await self.client.alloc(MIB)
        await self.landed.copy_to(region)
        return {"bytes": bytes(await region.read()).hex()}

    async def leave(self) -> None:
        with contextlib.suppress(PeerLost):
            await self.stack.aclose()


async def main(socket: str, options: dict[str, Any]) -> None:
    async with kvxfer.Client(socket, config=embedded_config(**SMALL, **options)) as client:
        await serve(Adopter(client))


@asynccontextmanager
async def adopter(server: Server, **options: Any) -> AsyncIterator[Remote]:
    arguments = ["-m", "tests.daemon.test_landing_memory", str(server.socket_path), json.dumps(options)]
    async with python_process(arguments, name="adopter") as process:
        yield Remote(process, 20)


@asynccontextmanager
async def cards(**options: Any) -> AsyncIterator[tuple[Server, kvxfer.Client]]:
    """A daemon whose landings are on cards, and a client at it."""
    config = embedded_config(**(SMALL | {"landing_memory": "hbm"} | options))
    async with Server(config, embedded=True) as server, kvxfer.Client(server.socket_path, config=config) as client:
        yield server, client


async def land(server: Server, client: kvxfer.Client, name: str, value: int = 1) -> KVCache:
    cache = await make_cache(client, small_geometry(), BLOCKS)
    data = np.random.default_rng(value).integers(0, 256, cache.regions[0].length, dtype=np.uint8)
    np.asarray(cache.regions[0].array).view(np.uint8)[:] = data
    push = client.push(name, to=server.addresses, cache=cache, table=TABLE, land=True)
    async with push as under_way:
        await under_way.layers()
    return cache


async def free(server: Server) -> None:
    pool = server.landings
    await until(lambda: (pool.live, pool.quarantined, pool.used_bytes) == (0, 0, 0))


@simulated(HBM="64M")
async def test_the_least_loaded_card_takes_the_next_landing() -> None:
    async with cards(landing_bytes_max="2MiB", landing_devices=["0", "1"]) as (server, client):
        zero, one = server.landings.parts
        await land(server, client, "a")
        assert (zero.used_bytes > 0, one.used_bytes) == (True, 0)
        await land(server, client, "b")
        assert zero.used_bytes == one.used_bytes > 0
        async with client.adopt("a", wait_s=5) as first, client.adopt("b", wait_s=5) as second:
            assert (first.memory, first.device, second.device) == ("hbm", 0, 1)
            assert (first.on_device.device, second.on_device.device) == (0, 1)
        await free(server)
        found = [one for one in samples(server) if isinstance(one, Sample) and one.name == "kvxfer_landing_kept_bytes"]
        assert [tuple((one.labels or {}).values()) for one in found] == [("hbm", "0"), ("hbm", "1")]
        assert all(one.value > 0 for one in found)


@simulated(HBM="64M")
async def test_a_full_pool_says_so_at_once_and_recovers() -> None:
    size = rounded(contiguous_layout(small_geometry(), len(TABLE.blocks))[1])
    async with cards(landing_bytes_max=2 * size, landing_devices=["0", "1"]) as (server, client):
        for name in "abcd":
            await land(server, client, name)
        assert [part.used_bytes for part in server.landings.parts] == [2 * size, 2 * size]
        with pytest.raises(BusyError, match="full") as caught:
            await land(server, client, "e")
        assert (caught.value.retryable, caught.value.fields["limit"]) == (True, 4 * size)
        assert server.landings.refused == 1
        async with client.adopt("b", wait_s=5):
            pass
        await until(lambda: server.landings.parts[1].kept_bytes == size)
        await land(server, client, "e")
        async with client.adopt("e", wait_s=5) as landed:
            assert landed.device == 1


@simulated(HBM="64M")
async def test_a_worker_reads_a_landing_where_it_is() -> None:
    """By the driver's mapping between processes."""
    async with cards(landing_devices=["1"]) as (server, client), adopter(server) as worker:
        await land(server, client, "r", 3)
        assert await worker.do("adopt", name="r") == {"memory": "hbm", "device": 1}
        seen = await worker.do("see")
        assert seen["on"] == 1
        [landing] = server.landings._by_key.values()
        assert landing.region is not None
        held = server.engine.read(landing.region.id, 0, landing.length)
        assert seen["bytes"] == held.hex()
        assert any(held)
        copied = await worker.do("copy")
        assert copied["bytes"][: len(seen["bytes"])] == seen["bytes"]
        await worker.do("leave")
        await free(server)
        [kept] = [part.kept for part in server.landings.parts]
        assert not any(server.engine.read(kept[0].id, 0, kept[0].length)), "nobody reads what an earlier request left"


@simulated(HBM="64M")
async def test_what_a_worker_looks_at_stays_until_it_leaves() -> None:
    """Its kernels may run: when the daemon takes the landing back, the memory waits for the worker."""
    async with cards(landing_devices=["0"]) as (server, client), adopter(server) as worker:
        await land(server, client, "r", 5)
        await worker.do("adopt", name="r")
        seen = await worker.do("see")
        pool = server.landings
        [landing] = pool._by_key.values()
        pool._end(landing, "taken back")
        assert (pool.quarantined, pool.used_bytes > 0) == (1, True)
        async with asyncio.timeout(10):
            while not (after := await worker.do("keep"))["lost"]:
                await asyncio.sleep(0.01)
        assert after["bytes"] == seen["bytes"]
        assert pool.quarantined == 1
        await worker.do("leave")
        await free(server)


@simulated(HBM="64M")
async def test_a_worker_that_dies_gives_its_landing_back() -> None:
    async with cards(landing_devices=["0"]) as (server, client), adopter(server) as worker:
        await land(server, client, "r")
        await worker.do("adopt", name="r")
        os.kill(worker.process.pid, signal.SIGKILL)
        await free(server)


@simulated(HBM="64M")
async def test_a_daemon_that_ends_takes_nothing_from_running_kernels() -> None:
    async with cards(landing_devices=["0"]) as (server, client), adopter(server) as worker:
        await land(server, client, "r", 7)
        await worker.do("adopt", name="r")
        seen = await worker.do("see")
        await client.aclose()
        await server.aclose()
        async with asyncio.timeout(10):
            while not (after := await worker.do("keep"))["lost"]:
                await asyncio.sleep(0.01)
        assert after["bytes"] == seen["bytes"]
        await worker.do("leave")


@simulated(HBM="64M")
async def test_without_mapping_it_is_copied() -> None:
    async with cards(landing_devices=["0"]) as (server, client), adopter(server, device_ipc=False) as worker:
        await land(server, client, "r", 9)
        await worker.do("adopt", name="r")
        with pytest.raises(Exception, match="cannot be mapped"):
            await worker.do("see")
        [landing] = server.landings._by_key.values()
        assert landing.region is not None
        held = server.engine.read(landing.region.id, 0, landing.length).hex()
        assert (await worker.do("copy"))["bytes"][: len(held)] == held
        await worker.do("leave")
        await free(server)


@simulated(HBM="64M")
async def test_a_card_that_others_filled_is_passed_over() -> None:
    async with kvxfer.local(**SMALL) as other:
        hog = await other.alloc(64 * MIB, memory="hbm", device=0)
        async with cards(landing_devices=["0", "1"]) as (server, client):
            await land(server, client, "r")
            async with client.adopt("r", wait_s=5) as landed:
                assert landed.device == 1
            await free(server)
            assert [part.count for part in server.landings.parts] == [0, 1]
        assert hog.device == 0


@simulated(HBM="64M")
async def test_inside_one_process_and_what_is_refused() -> None:
    async with cards(landing_prewarm_bytes="2MiB") as (server, client):
        await until(lambda: all(part.kept_bytes == 2 * MIB for part in server.landings.parts))
        await land(server, client, "r", 11)
        async with client.adopt("r", wait_s=5) as landed:
            with pytest.raises(UsageError, match="on_device"):
                _ = landed.array
            first = look(landed.on_device)
            region = await client.alloc(MIB, memory="hbm", device=1)
            await landed.copy_to(region)
            assert bytes(await region.read())[: len(first)] == first
        with pytest.raises(kvxfer.KvxferError):
            _ = landed.on_device
    with pytest.raises(ConfigError, match="landing_devices"):
        async with cards(landing_devices=["99"]):
            pass


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], json.loads(sys.argv[2])))
