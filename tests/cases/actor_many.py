"""More commands of the worker process: many transfers at once, and many owners."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np

import kvxfer
from kvxfer.dataplane.transfer import Transfer
from kvxfer.descriptors import RemoteDescriptor
from kvxfer.errors import KvxferError
from kvxfer.memory.region import Region


def tcp_sockets() -> int:
    """Established TCP connections of this process to others."""
    own = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            own.add(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            continue
    rows = []
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with open(table) as file:
            rows += [line.split() for line in file.readlines()[1:]]
    # The kernel may list one twice when others come and go between two reads.
    return len({row[9] for row in rows if row[3] == "01" and f"socket:[{row[9]}]" in own})


class Many:
    """Commands that start crowds. ``outcomes`` count "done" and error codes."""

    client: kvxfer.Client
    regions: dict[str, Region]
    transfers: dict[str, Transfer]
    last_error = ""

    async def own(self, name: str, length: int) -> dict[str, Any]:
        """A region in ordinary memory of this process."""
        self.regions[name] = await self.client.register(np.zeros(length, dtype=np.uint8))
        return {"id": self.regions[name].id}

    async def describe_many(self, name: str, count: int) -> dict[str, Any]:
        """So many descriptors of one region, each a capability of its own."""
        return {"descriptors": [self.regions[name].descriptor("rw").to_dict() for _ in range(count)]}

    async def puts(
        self, region: str, descriptor: dict[str, Any], count: int, parallel: int, size: int, look: int = 64
    ) -> dict[str, Any]:
        """``count`` puts of ``size`` bytes each, ``parallel`` at a time, to the same offsets round and round."""
        remote = RemoteDescriptor.from_dict(descriptor)
        ours = self.regions[region]
        places = ours.length // size
        outcomes: Counter[str] = Counter()
        numbers = iter(range(count))
        sockets = 0

        async def some() -> None:
            nonlocal sockets
            for number in numbers:
                offset = number % places * size
                outcomes[await self._put(ours, offset, size, remote)] += 1
                if number % look == 0:
                    sockets = max(sockets, tcp_sockets())
                    await asyncio.sleep(0)

        await asyncio.gather(*(some() for _ in range(parallel)))
        return {"outcomes": outcomes, "sockets": sockets}

    async def _put(self, ours: Region, offset: int, size: int, remote: RemoteDescriptor) -> str:
        try:
            await self.client.put(ours[offset : offset + size], remote, target_offset=offset)
        except KvxferError as error:
            self.last_error = str(error)
            return error.code
        return "done"

    async def visit(
        self, region: str, descriptors: list[dict[str, Any]], port: str, hosts: list[str], parallel: int, size: int
    ) -> dict[str, Any]:
        """One put by each descriptor and host, over a connection of its own: ``parallel`` at a time, in their order."""
        remotes = [RemoteDescriptor.from_dict(descriptor) for descriptor in descriptors]
        ours = self.regions[region]
        outcomes: Counter[str] = Counter()
        queue = iter(list(enumerate(hosts)))

        async def some() -> None:
            for number, host in queue:
                there = replace(remotes[number], endpoints={"tcp": (f"{host}:{port}",)})
                offset = number * size % ours.length
                outcomes[await self._put(ours, offset, size, there)] += 1

        await asyncio.gather(*(some() for _ in range(parallel)))
        return {"outcomes": outcomes, "evicted": self.client.plane.connections_evicted}

    async def bursts(
        self,
        region: str,
        descriptors: list[dict[str, Any]],
        port: str,
        hosts: list[str],
        count: int,
        most: int,
        size: int,
        seed: int,
    ) -> dict[str, Any]:
        """Bursts of 0 to ``most`` puts at once to random hosts; the most connections ever seen."""
        rng = random.Random(seed)
        remotes = [RemoteDescriptor.from_dict(descriptor) for descriptor in descriptors]
        ours = self.regions[region]
        outcomes: Counter[str] = Counter()
        sockets = 0

        async def look(stop: asyncio.Event) -> None:
            nonlocal sockets
            while not stop.is_set():
                sockets = max(sockets, tcp_sockets())
                await asyncio.sleep(0.01)

        stop = asyncio.Event()
        looking = asyncio.ensure_future(look(stop))
        for _ in range(count):
            chosen = [rng.randrange(len(hosts)) for _ in range(rng.randrange(most + 1))]
            work = []
            for number in chosen:
                endpoints = {"tcp": (f"{hosts[number]}:{port}",)}
                there = replace(remotes[number], endpoints=endpoints)
                work.append(self._put(ours, 0, size, there))
            outcomes.update(await asyncio.gather(*work))
            await asyncio.sleep(rng.random() * 0.05)
        stop.set()
        await looking
        return {"outcomes": outcomes, "sockets": sockets, "last_error": self.last_error}

    async def connect(self, nodes: list[list[str]], parallel: int, timeout: float = 10.0) -> dict[str, Any]:
        """Reach each node by its daemon, ``parallel`` at a time."""
        outcomes: Counter[str] = Counter()
        queue = iter(nodes)

        async def some() -> None:
            for node in queue:
                try:
                    await self.client.connect(node, timeout=timeout)
                except KvxferError as error:
                    outcomes[error.code] += 1
                else:
                    outcomes["done"] += 1

        await asyncio.gather(*(some() for _ in range(parallel)))
        return {"outcomes": outcomes}

    async def cycle(self, count: int) -> dict[str, Any]:
        """So many registrations of the same memory; how many different ids."""
        memory = np.zeros(4096, dtype=np.uint8)
        ids = set()
        for _ in range(count):
            region = await self.client.register(memory)
            ids.add(region.id)
            await region.release()
        return {"different": len(ids)}

    async def announce(self, to: list[str], first: int, count: int) -> dict[str, Any]:
        """Small messages for channels that nobody will ever listen on; outcomes."""
        outcomes: Counter[str] = Counter()

        async def some(numbers: range) -> None:
            for number in numbers:
                try:
                    await self.client.send(to, f"nobody-{number}", b"x", timeout=20)
                    outcomes["done"] += 1
                except KvxferError as error:
                    outcomes[error.code] += 1

        step = -(-count // 32)
        spans = [range(at, min(at + step, first + count)) for at in range(first, first + count, step)]
        await asyncio.gather(*(some(span) for span in spans))
        return {"outcomes": dict(outcomes)}
