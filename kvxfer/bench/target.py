"""The other process of a measurement: owns memory, shares it, and says what arrived in it.

`python -m kvxfer.bench.target SETTINGS` (JSON: options, bytes, user) prints one line when it is ready and then answers
one JSON object per line on stdin with one on stdout. It ends with its stdin, so it never outlives who started it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import uvloop

from kvxfer.bench.work import Layout, checksum, fill
from kvxfer.embedded import local
from kvxfer.errors import UsageError
from kvxfer.native.engine import Event, EventKind

POOL_NAME, USER_NAME = "bench.pool", "bench.user"
LEASE_S = 3600.0


class Target:
    """The commands. ``told`` counts the notifications since it was asked for last."""

    def __init__(self, arrays: dict[str, npt.NDArray[np.uint8]]) -> None:
        self._arrays = arrays
        self._told = 0
        self._enough = asyncio.Event()
        self._expected = 0

    def on_event(self, event: Event) -> None:
        """A peer told of a layer."""
        if event.kind == EventKind.NOTIFY:
            self._told += 1
            if self._told >= self._expected:
                self._enough.set()

    async def fill(self, name: str, seed: int) -> dict[str, Any]:
        """Fill an array with random bytes of a seed."""
        await asyncio.to_thread(fill, self._arrays[name], seed)
        return {}

    async def clear(self, name: str, length: int) -> dict[str, Any]:
        """Zeros in the first ``length`` bytes."""
        await asyncio.to_thread(self._arrays[name][:length].fill, 0)
        return {}

    async def crc(self, name: str, layout: list[int]) -> dict[str, Any]:
        """The checksum of our side of a request."""
        found = await asyncio.to_thread(checksum, self._arrays[name], Layout(*layout), remote=True)
        return {"crc": found}

    async def told(self, expected: int, within_s: float) -> dict[str, Any]:
        """How many notifications came, waiting until they are as many as expected."""
        self._expected = expected
        self._enough.clear()
        if self._told < expected:
            with suppress(TimeoutError):  # the number tells
                await asyncio.wait_for(self._enough.wait(), within_s)
        found, self._told, self._expected = self._told, 0, 0
        return {"told": found}

    async def resident(self) -> dict[str, Any]:
        """Anonymous memory of this process in bytes: what its peers cost it, not what they share with it."""
        return {"bytes": await asyncio.to_thread(status_bytes, "RssAnon")}


def status_bytes(name: str) -> int:
    """A number of /proc/self/status (RssAnon, VmHWM, ...) in bytes."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        for line in status:
            key, _, value = line.partition(":")
            if key == name:
                return int(value.split()[0]) * 1024
    raise UsageError("the kernel does not tell how much memory a process has", value=name)


async def answer(handler: object) -> None:
    """Answer commands until stdin ends. A command that fails ends the process: its stderr tells."""
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        command = json.loads(line)
        method = getattr(handler, command.pop("do"))
        print(json.dumps(await method(**command)), flush=True)


async def serve(settings: dict[str, Any]) -> None:
    """Allocate and share the memory of the benchmark, then answer commands until the input ends."""
    async with local(**settings["options"]) as client:
        pool = await client.alloc(settings["bytes"])
        arrays = {POOL_NAME: pool.array}
        await client.share(pool, POOL_NAME, lease_s=LEASE_S)
        granted = pool.descriptor()
        described = {POOL_NAME: granted.to_dict()}
        if settings["user"]:
            mine = np.ones(settings["bytes"], np.uint8)
            described[USER_NAME] = (await client.register(mine)).descriptor().to_dict()
            arrays[USER_NAME] = mine
        target = Target(arrays)
        client.plane.memory.subscribe(granted.grant, target.on_event)
        hello = {"address": client.addresses[0], "pid": os.getpid(), "descriptors": described}
        print(json.dumps(hello), flush=True)
        await answer(target)


if __name__ == "__main__":
    uvloop.run(serve(json.loads(sys.argv[1])))
