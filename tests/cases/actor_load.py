"""Commands of the case book's worker that make many transfers at once, or wait for the bad end of some."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
import weakref
from collections import Counter
from random import Random
from typing import Any

import numpy as np

import kvxfer
from kvxfer.descriptors import RemoteDescriptor
from kvxfer.errors import KvxferError
from kvxfer.memory.region import Region


class Load:
    """A part of `actor.Actor`."""

    client: kvxfer.Client
    regions: dict[str, Region]
    transfers: dict[str, kvxfer.Transfer]
    settled: dict[str, int]
    releases: list[asyncio.Task[None]]

    def _count(self, name: str) -> None:
        self.settled[name] += 1

    async def timed_out(self, count: int, length: int, descriptor: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Puts that outlast their deadline, from memory that is then forgotten; when is it really given back?"""
        remote, began = RemoteDescriptor.from_dict(descriptor), time.monotonic()
        gone: list[float] = []
        states: Counter[str] = Counter()

        async def one() -> weakref.ref[Any]:
            memory = np.full(length, 7, dtype=np.uint8)
            weakref.finalize(memory, lambda: gone.append(time.monotonic() - began))
            region = await self.client.register(memory)
            transfer = self.client.put(region, remote, timeout=timeout)
            with contextlib.suppress(KvxferError):
                await transfer
            states[transfer.state] += 1
            self.releases.append(asyncio.ensure_future(region.release(drain=True)))
            return weakref.ref(memory)

        held = await asyncio.gather(*(one() for _ in range(count)))
        decided_s = time.monotonic() - began
        gc.collect()
        kept = sum(reference() is not None for reference in held)
        releases, self.releases = self.releases, []
        await asyncio.gather(*releases)
        del releases
        while len(gone) < count and time.monotonic() - began < timeout + 10:
            await asyncio.sleep(0.01)
            gc.collect()
        returned_s = max(gone) if len(gone) == count else float("inf")
        return {"states": dict(states), "decided_s": decided_s, "kept": kept, "returned_s": returned_s}

    async def storm(
        self, seed: int, count: int, region: str, descriptor: dict[str, Any], within_s: float, timeout: float
    ) -> dict[str, Any]:
        """Many gets and puts, each aborted at a seeded moment from before its start on; their outcomes, counted."""
        rng = Random(seed)
        ours, remote = self.regions[region], RemoteDescriptor.from_dict(descriptor)
        size = len(ours) // count
        outcomes: Counter[str] = Counter()

        async def one(index: int, after_s: float, before: bool) -> None:
            span = ours[index * size : (index + 1) * size]
            start = self.client.put if index % 2 else self.client.get
            offset = {"target_offset" if index % 2 else "source_offset": index * size}
            settled: list[str] = []
            transfer = start(span, remote, timeout=timeout, **offset)
            transfer.on_settled(lambda done: settled.append(done.state))
            if not before:
                await asyncio.sleep(after_s)
            await transfer.cancel()
            assert len(settled) == 1, settled
            assert settled == [transfer.state]
            outcomes[transfer.state] += 1

        plans = [(rng.uniform(0, within_s), rng.random() < 0.1) for _ in range(count)]
        await asyncio.gather(*(one(index, after_s, before) for index, (after_s, before) in enumerate(plans)))
        return {"outcomes": dict(outcomes)}

    async def burst(
        self, count: int, region: str, descriptor: dict[str, Any], size: int, timeout: float, wait: bool = True
    ) -> dict[str, Any]:
        """``count`` puts at once; outcomes by state and error, and how often each was settled."""
        ours, remote = self.regions[region], RemoteDescriptor.from_dict(descriptor)
        room = len(ours) // size
        outcomes: Counter[str] = Counter()

        async def one(index: int) -> None:
            offset = index % room * size
            transfer = self.client.put(ours[offset : offset + size], remote, target_offset=offset, timeout=timeout)
            self.transfers[f"burst {index}"] = transfer
            self.settled[f"burst {index}"] = 0
            transfer.on_settled(lambda _: self._count(f"burst {index}"))
            with contextlib.suppress(KvxferError):
                await transfer
            outcomes[transfer.state] += 1

        await self.client.plane.prepare(remote)
        began = time.monotonic()
        await asyncio.gather(*(one(index) for index in range(count)))
        decided_s = time.monotonic() - began
        if wait:
            await asyncio.gather(*(transfer.wait_settled() for transfer in self.transfers.values()))
        settled = Counter(self.settled.values())
        return {"outcomes": dict(outcomes), "settled": {str(n): c for n, c in settled.items()}, "decided_s": decided_s}

    async def latencies(self, count: int, region: str, descriptor: dict[str, Any], size: int) -> dict[str, Any]:
        """Seconds of ``count`` puts, one after the other, sorted."""
        ours, remote = self.regions[region], RemoteDescriptor.from_dict(descriptor)
        found = []
        for _ in range(count):
            began = time.perf_counter()
            await self.client.put(ours[:size], remote, timeout=10)
            found.append(time.perf_counter() - began)
        return {"seconds": sorted(found)}

    async def blocked(self, region: str, descriptor: dict[str, Any], timeout: float, hold_s: float) -> dict[str, Any]:
        """One put, while this thread holds the loop for ``hold_s`` from its start on."""
        transfer = self.client.put(self.regions[region], RemoteDescriptor.from_dict(descriptor), timeout=timeout)
        end = time.monotonic() + hold_s
        while time.monotonic() < end:
            time.sleep(0.01)  # noqa: ASYNC251 - that is the point
        with contextlib.suppress(KvxferError):
            await transfer
        return {"state": transfer.state}
