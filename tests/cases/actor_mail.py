"""The part of the actor that sends messages, and measures the pace of transfers beside them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import numpy as np

import kvxfer
from kvxfer.descriptors import RemoteDescriptor
from kvxfer.errors import KvxferError
from kvxfer.memory.region import Region


class Mail:
    """Mixed into the actor."""

    client: kvxfer.Client
    regions: dict[str, Region]

    def _flow(self, name: str, work: Coroutine[Any, Any, dict[str, Any]]) -> None:
        raise AssertionError("the actor has its own")

    async def mail(self, to: list[str], count: int, size: int) -> None:
        for _ in range(count):
            await self.client.send(to, "flood", bytes(size), timeout=3)

    async def mail_background(self, name: str, to: list[str], count: int, size: int) -> None:
        """So many messages at once; the flow ends with how many ended how."""
        self._flow(name, self._mail_all(to, count, size))

    async def _mail_all(self, to: list[str], count: int, size: int) -> dict[str, Any]:
        ended: Counter[str] = Counter()

        async def one() -> None:
            try:
                await self.client.send(to, "flood", bytes(size), timeout=2)
                ended["done"] += 1
            except KvxferError as error:
                ended[error.code] += 1

        sending: list[asyncio.Task[None]] = []
        for number in range(count):
            sending.append(asyncio.ensure_future(one()))
            if number % 16 == 15:
                await asyncio.sleep(0.0005)  # the measure beside it is of the daemon, not of this loop
        await asyncio.gather(*sending)
        return {"told": dict(ended)}

    async def paced(self, region: str, descriptor: dict[str, Any], count: int) -> dict[str, Any]:
        """One small put after the other; the 99th percentile of what each took."""
        remote, took = RemoteDescriptor.from_dict(descriptor), []
        for _ in range(count):
            began = time.perf_counter()
            await self.client.put(self.regions[region], remote)
            took.append(time.perf_counter() - began)
            await asyncio.sleep(0.002)
        return {"p99_s": float(np.percentile(took, 99))}
