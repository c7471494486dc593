"""Many clients in one process, each with an engine of its own, all connected to the same target: what peers cost.

`python -m kvxfer.bench.crowd SETTINGS` (JSON: options, address), driven like `target.py`.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import uvloop

from kvxfer.bench.target import POOL_NAME, answer
from kvxfer.client import Client
from kvxfer.config import Config
from kvxfer.descriptors import RemoteDescriptor
from kvxfer.memory.region import Region
from kvxfer.server import Server, embedded_config

PUT_BYTES = 4096


class Crowd:
    """What the process of the crowd does for each command that it reads."""

    def __init__(self, stack: AsyncExitStack, socket: Path, config: Config, address: str) -> None:
        self._stack = stack
        self._socket = socket
        self._config = config
        self._address = address
        self._connected: list[tuple[Client, Region, RemoteDescriptor]] = []

    async def grow(self, count: int) -> dict[str, Any]:
        """Until ``count`` are connected and have moved something; milliseconds each for those that came."""
        loop = asyncio.get_running_loop()
        before, begun = len(self._connected), loop.time()
        while len(self._connected) < count:
            client = await self._stack.enter_async_context(Client(self._socket, config=self._config))
            region = await client.alloc(PUT_BYTES)
            descriptor = await client.lookup(POOL_NAME, node=self._address)
            await client.put(region, descriptor)
            self._connected.append((client, region, descriptor))
        return {"ms": (loop.time() - begun) * 1e3 / max(count - before, 1)}

    async def describe(self) -> dict[str, Any]:
        """A descriptor of each one's memory, for whoever wants to reach all of them."""
        return {"descriptors": [region.descriptor().to_dict() for _, region, _ in self._connected]}

    async def pass_round(self, rounds: int) -> dict[str, Any]:
        """One 4 KiB put by each in turn, several rounds; the median in microseconds."""
        taken = []
        for _ in range(rounds):
            for client, region, descriptor in self._connected:
                begun = time.perf_counter()
                await client.put(region, descriptor)
                taken.append(time.perf_counter() - begun)
        return {"us": statistics.median(taken) * 1e6}


async def run(settings: dict[str, Any]) -> None:
    """One daemon, no clients yet."""
    config = embedded_config(**settings["options"])
    async with Server(config, embedded=True) as server, AsyncExitStack() as stack:
        print(json.dumps({"pid": os.getpid()}), flush=True)
        await answer(Crowd(stack, server.socket_path, config, settings["address"]))


if __name__ == "__main__":
    uvloop.run(run(json.loads(sys.argv[1])))
