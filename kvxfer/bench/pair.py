"""Two processes connected by one transport: the initiator here, the target in a child. Every request is verified once.

Verifying means: random bytes on the side that is read, zeros on the side that is written, one transfer, then both
sides' checksums over the blocks in the order of the request. A difference is an `IntegrityError` that names the work.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from kvxfer.bench.child import Child, child, cpu_s, module
from kvxfer.bench.target import POOL_NAME, USER_NAME
from kvxfer.bench.work import Layout, Segments, Sizes, checksum, fill
from kvxfer.client import Client
from kvxfer.dataplane.plane import WorkRequest
from kvxfer.dataplane.transfer import Transfer
from kvxfer.descriptors import RemoteDescriptor
from kvxfer.embedded import local
from kvxfer.errors import IntegrityError, TransportError
from kvxfer.memory.region import Region
from kvxfer.native.engine import OpKind, TransportInfo

TIMEOUT_S = 60.0
KINDS = {"put": OpKind.PUT, "get": OpKind.GET}
Once = Callable[[], Awaitable[object]]


class Side:
    """One of our regions with the remote one that belongs to it: from the pool, or memory of the user."""

    def __init__(self, pair: Pair, name: str, region: Region, remote: RemoteDescriptor) -> None:
        self._pair = pair
        self.name = name
        self.region = region
        self.remote = remote

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """The bytes of our region: uint8, shape (length,)."""
        return self.region.array

    def span(
        self, direction: str, offset: int, length: int, *, tell: int | None = None, priority: str = "normal"
    ) -> Transfer:
        """One contiguous transfer through the public calls of the client; ``tell`` makes a put visible."""
        client, ours = self._pair.client, self.region[offset : offset + length]
        if direction == "get":
            return client.get(ours, self.remote, source_offset=offset, priority=priority)
        told = tell is not None
        return client.put(ours, self.remote, target_offset=offset, visible=told, notify=tell or 0, priority=priority)

    def first(self, direction: str, length: int) -> Once:
        """A call that moves the first ``length`` bytes again and again; what can be made once is made here."""
        client, ours, remote = self._pair.client, self.region[0:length], self.remote
        if direction == "get":
            return lambda: client.get(ours, remote)
        return lambda: client.put(ours, remote)

    def parts(self, direction: str, segments: Segments, *, at_once: int) -> Transfer:
        """One transfer of scattered blocks, at most ``at_once`` of them in one submit."""
        parts = [
            WorkRequest(
                kind=KINDS[direction],
                region=self.region.id,
                descriptor=self.remote,
                segments=segments[begin : begin + at_once],
            )
            for begin in range(0, len(segments), at_once)
        ]
        return self._pair.client.plane.start(parts, timeout=TIMEOUT_S, peer=self.remote.node_id)


class Pair:
    """The initiator's view of both processes."""

    def __init__(self, client: Client, target: Child, hello: dict[str, Any], sizes: Sizes) -> None:
        self.client = client
        self.target = target
        self.sizes = sizes
        self.address: str = hello["address"]
        self.descriptors = {name: RemoteDescriptor.from_dict(facts) for name, facts in hello["descriptors"].items()}
        self.sides: dict[str, Side] = {}
        self._transport: TransportInfo | None = None

    @property
    def transport(self) -> TransportInfo:
        """The transport that carries the transfers of this pair."""
        assert self._transport is not None
        return self._transport

    @property
    def pool(self) -> Side:
        """The side of memory from our pool."""
        return self.sides[POOL_NAME]

    async def open(self) -> None:
        """Memory on this side, connections, imports."""
        size = self.sizes.region_bytes
        regions = {POOL_NAME: await self.client.alloc(size)}
        if USER_NAME in self.descriptors:
            regions[USER_NAME] = await self.client.register(np.ones(size, np.uint8))
        for name, region in regions.items():
            self._transport = await self.client.plane.prepare(self.descriptors[name])
            self.sides[name] = Side(self, name, region, self.descriptors[name])

    def cpu_s(self) -> float:
        """CPU seconds of both processes so far."""
        return cpu_s(os.getpid()) + self.target.cpu_s()

    async def prepare(self, side: Side, direction: str) -> None:
        """Random bytes on the side that is read from, before `verify`."""
        seed = int.from_bytes(os.urandom(8), "little")
        if direction == "put":
            await asyncio.to_thread(fill, side.array, seed)
        else:
            await self.target.ask("fill", name=side.name, seed=seed)

    async def verify(self, side: Side, direction: str, layout: Layout, once: Once, what: str) -> None:
        """Run ``once`` into cleared memory and compare; needs `prepare` before."""
        if direction == "put":
            await self.target.ask("clear", name=side.name, length=layout.reach_bytes)
        else:
            side.array[: layout.reach_bytes] = 0
        await once()
        shape = [layout.count, layout.block_bytes, layout.pool_bytes, layout.first]
        ours, theirs = await asyncio.gather(
            asyncio.to_thread(checksum, side.array, layout, remote=False),
            self.target.ask("crc", name=side.name, layout=shape),
        )
        if ours != theirs["crc"]:
            raise IntegrityError(
                f"what the receiver has is not what was sent: {what}",
                transport=self.transport.name,
                direction=direction,
                expected=f"{ours:08x}",
                found=f"{theirs['crc']:08x}",
            )


def settings_for(transport: str, options: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a process that may use only one transport."""
    return {**options, "transports": [transport]}


@asynccontextmanager
async def connected(transport: str, sizes: Sizes, options: dict[str, Any], *, user: bool) -> AsyncIterator[Pair]:
    """A fresh target process and a client here. Raises what stops the transport, with its reason."""
    chosen = settings_for(transport, options)
    settings = {"options": chosen, "bytes": sizes.region_bytes, "user": user}
    async with (
        child(module("kvxfer.bench.target", settings), f"target of {transport}") as target,
        local(**chosen) as client,
    ):
        pair = Pair(client, target, json.loads(await target.line()), sizes)
        await pair.open()
        if pair.transport.name != transport:
            raise TransportError("another transport was chosen", wanted=transport, got=pair.transport.name)
        yield pair
