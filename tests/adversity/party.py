"""A worker process of the table of ends: takes one part in one flow at a time, and ends it in the way it is told."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import kvxfer
from examples.remote_worker import serve
from kvxfer.config import load
from kvxfer.errors import KvxferError
from kvxfer.geometry import BlockTable
from tests.support.nodes import make_cache, small_geometry

LAYERS, PAUSE_S = 4, 0.3
GEOMETRY = small_geometry(layers=LAYERS, kv_heads=8, kv_heads_total=8, head_size=128)  # 1 MiB a layer
TABLE = BlockTable.of(range(8), tokens=128)
T = TypeVar("T")


class Failed(Exception):
    """What the user's code inside a block raises."""


class Party:
    """One client; `begin` takes a part, `ready` returns when it is in the middle of it, `end` ends it."""

    client: kvxfer.Client

    async def open(self, socket: str, transport: str) -> dict[str, Any]:
        # Reads come in small pieces with pauses, so that a pull lasts for seconds. Landings are adopted by shm.
        transports = [f"fault+{transport}", *({"shm"} - {transport})]
        slow = {"transports": transports, "fault_spec": "chunk_bytes=65536,chunk_ms=40"}
        config = load(flags={**slow, "timeout_s": 20.0}).config
        self.socket, self.transport = socket, transport
        self.client = await kvxfer.Client(socket, config=config).__aenter__()
        self.cache = await make_cache(self.client, GEOMETRY, 8)
        return {"addresses": list(self.client.addresses), "pid": os.getpid()}

    async def reopen(self) -> dict[str, Any]:
        """Another client, whatever became of the first one."""
        await self.client.aclose()
        return await self.open(self.socket, self.transport)

    async def begin(self, part: str, name: str, **how: Any) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        self.middle, self.bomb, self.ticket = asyncio.Event(), loop.create_future(), loop.create_future()
        work: Callable[..., Awaitable[str]] = getattr(self, f"_{part}")

        async def run() -> dict[str, Any]:
            try:
                told = await work(name, **how)
            except KvxferError as error:
                told = error.code
            except (asyncio.CancelledError, Failed) as error:
                told = type(error).__name__
            return {"told": told, "at": time.monotonic()}

        self.task = asyncio.ensure_future(run())
        if part != "publisher":
            return {}
        await asyncio.wait([self.ticket, self.task], return_when=asyncio.FIRST_COMPLETED)
        return {"ticket": self.ticket.result()}

    async def ready(self) -> None:
        async with asyncio.timeout(10):
            await self.middle.wait()

    async def end(self, how: str) -> dict[str, Any]:
        at = time.monotonic()
        if how == "cancel":
            self.task.cancel()
        elif how == "exception":
            self.bomb.set_result(None)
        else:
            await self.client.aclose()
        return {"at": at}

    async def outcome(self) -> dict[str, Any]:
        return await asyncio.shield(self.task)

    async def _or_failed(self, work: Awaitable[T]) -> T:
        """Wait for something inside a block, in which the user's code may fail."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self.bomb}, return_when=asyncio.FIRST_COMPLETED)
            if self.bomb.done():
                raise Failed
            return await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    # -- the parts --------------------------------------------------------------------------------------------

    async def _pusher(self, name: str, to: list[str], land: bool = False) -> str:
        async with self.client.push(name, to=to, cache=self.cache, table=TABLE, land=land) as push:
            for layer in range(LAYERS):
                await push.layer(layer)
                self.middle.set()
                await self._or_failed(asyncio.sleep(PAUSE_S))
        return "done"

    async def _offerer(self, name: str) -> str:
        async with self.client.offer(name, self.cache, TABLE) as landing:
            await self._or_failed(landing.layer(0))
            self.middle.set()
            await self._or_failed(landing.wait())
        return "done"

    async def _publisher(self, name: str) -> str:
        async with self.client.publish(name, self.cache, TABLE, lease_s=20) as ticket:
            self.ticket.set_result(ticket.to_dict())
            while not ticket._claims:
                await asyncio.sleep(0.01)
            self.middle.set()
            await self._or_failed(ticket.wait_released())
        return "done" if ticket.error is None else f"{ticket.outcome} {ticket.error.code}"

    async def _puller(self, name: str, ticket: dict[str, Any]) -> str:
        def each(_: int) -> None:
            if self.bomb.done():
                raise Failed

        self.middle.set()
        await self.client.pull(ticket, self.cache, TABLE, on_layer=each)
        return "done"

    async def _adopter(self, name: str) -> str:
        entering = asyncio.ensure_future(self._adopted(name))
        await asyncio.sleep(0)
        await self.client.connect(())  # behind the claim: it is known to the daemon now
        self.middle.set()
        return await entering

    async def _adopted(self, name: str) -> str:
        async with self.client.adopt(name, wait_s=19):
            return "done"

    async def _holder(self, name: str) -> str:
        """Adopts, and looks at what it has until it is told that it has it no more."""
        async with self.client.adopt(name) as landed:
            self.middle.set()
            while landed.array is not None:
                await self._or_failed(asyncio.sleep(0.02))
        return "done"

    async def _waiter(self, name: str, to: list[str]) -> str:
        """A push for which there will be no offer."""
        entering = asyncio.ensure_future(self._pusher(name, to))
        await asyncio.sleep(0)
        await self.client.connect(to)
        self.middle.set()
        return await entering


if __name__ == "__main__":
    sys.exit(asyncio.run(serve(Party())))
