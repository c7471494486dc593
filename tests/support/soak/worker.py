"""The worker process of a soak: plays one side (a sends, b receives) of many flows at once, checks every byte."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from examples.remote_worker import serve
from kvxfer.client import Client
from kvxfer.dataplane.transfer import RUNNING, Transfer
from kvxfer.descriptors import RemoteDescriptor
from kvxfer.errors import KvxferError, UnknownRegion
from kvxfer.memory.region import Region
from kvxfer.tasks import TaskOwner
from tests.support.soak.choices import Flow
from tests.support.soak.ledger import FREE_BYTE
from tests.support.soak.side import BLOCKS, REST_S, SOURCE_BYTES, SPAN_BYTES, Side, noise, request_bytes, table_of

AT_ONCE = 32
LEASE_S = 1.5  # of what nobody may come for
GRACE_S = 0.3  # in which a side notices by itself that the other one has given up
STEPS_MAX = 4  # waits of a flow one after the other, each of them at most as long as the lane's patience
SCRIBBLE = 0x5A
Play = Callable[[Flow], Awaitable[str | None]]


class Worker(Side):
    """One side of a lane."""

    def __init__(self) -> None:
        super().__init__()
        self._tasks = TaskOwner("soak")
        self._to: list[str] = []
        self._patience = 1.0
        self._ends: list[asyncio.Task[None]] = []
        self._decided: list[tuple[Transfer, str, str]] = []

    async def play(self, side: str, to: list[str], flows: list[dict[str, Any]], patience: float) -> dict[str, Any]:
        """One round; the outcome of every flow, in order, and whatever was wrong so far."""
        self._to, self._patience = to, patience
        room = asyncio.Semaphore(AT_ONCE)
        outcomes: dict[str, list[str]] = {}
        running = []
        for flow in (Flow(**one) for one in flows):
            await room.acquire()
            running.append(self._tasks.run(self._bounded(side, flow, room, outcomes), flow.name))
        await asyncio.gather(*running)
        await asyncio.gather(*self._ends, return_exceptions=True)
        self._ends.clear()
        for name, ended in outcomes.items():
            if len(ended) != 1:
                self.wrongs.add(f"{name}: {len(ended)} outcomes: {ended}")
        for transfer, state, name in self._decided:
            if transfer.state != state or not transfer.settled:
                self.wrongs.add(f"{name}: its outcome was {state} and is {transfer.state}")
        self._decided.clear()
        found = [outcomes.get(flow["name"], ["none"])[0] for flow in flows]
        return {"outcomes": found, "wrong": self.wrongs.count, "first": self.wrongs.first}

    async def _bounded(self, side: str, flow: Flow, room: asyncio.Semaphore, outcomes: dict[str, list[str]]) -> None:
        play: Play = getattr(self, f"{flow.kind}_{side}")
        task = self._tasks.run(self._named(play, flow), f"{flow.name} inner")
        end = None
        if flow.cancel_s is not None and flow.kind not in ("put", "get", "churn"):
            work = self._give_up(flow, task) if flow.by == side else self._other_gave_up(flow, task)
            end = self._tasks.run(work, f"{flow.name} end")
            self._ends.append(end)
        stuck_s = STEPS_MAX * self._patience + 2 * REST_S
        done, _ = await asyncio.wait([task], timeout=stuck_s)
        if not done:
            self.wrongs.add(f"{flow.name} {flow.kind} {side}: stuck")
            task.cancel()
            await asyncio.wait([task], timeout=stuck_s)
            outcomes.setdefault(flow.name, []).append("stuck")
        else:
            outcomes.setdefault(flow.name, []).append("cancelled" if task.cancelled() else task.result())
        if end is not None and flow.by != side:
            end.cancel()
        room.release()

    async def _give_up(self, flow: Flow, task: asyncio.Task[str]) -> None:
        await asyncio.sleep(flow.cancel_s or 0.0)
        task.cancel()
        await asyncio.wait([task])
        with contextlib.suppress(KvxferError):
            await self._tell(f"{flow.name}-x", {})

    async def _other_gave_up(self, flow: Flow, task: asyncio.Task[str]) -> None:
        """Spares the long wait for somebody who gave up before the two had met."""
        with contextlib.suppress(KvxferError):
            await self._hear(f"{flow.name}-x")
            await asyncio.sleep(GRACE_S)
            task.cancel()

    async def _named(self, play: Play, flow: Flow) -> str:
        """How it ended for this side: what the other one told, for a side that only lends memory."""
        try:
            return await play(flow) or "done"
        except KvxferError as error:
            return error.code
        except asyncio.CancelledError:
            return "cancelled"
        except Exception as bug:
            self.wrongs.add(f"{flow.name} {flow.kind}: {bug!r}")
            return "bug"

    # -- telling each other -----------------------------------------------------------------------------------

    async def _tell(self, channel: str, what: dict[str, Any]) -> None:
        await self.client.send(self._to, channel, json.dumps(what).encode(), timeout=self._patience)

    async def _hear(self, channel: str) -> dict[str, Any]:
        heard: dict[str, Any] = json.loads(await self.client.recv(channel, timeout=self._patience))
        return heard

    # -- one-sided --------------------------------------------------------------------------------------------

    async def _ended(self, flow: Flow, transfer: Transfer, side: str) -> str:
        """Wait for it, or give it up at the moment that the flow says; its one outcome."""
        if flow.cancel_s is not None and flow.by == side:
            if flow.cancel_s:
                await asyncio.sleep(flow.cancel_s)
            await transfer.cancel()
        else:
            await transfer.wait_settled()
        if transfer.state == RUNNING:
            self.wrongs.add(f"{flow.name}: settled without an outcome")
        self._decided.append((transfer, transfer.state, flow.name))
        return transfer.state

    async def _take_back(self, region: Region, descriptor: RemoteDescriptor) -> None:
        with contextlib.suppress(UnknownRegion):  # the flow has done that already
            await region.revoke(descriptor)

    def _offset(self, flow: Flow) -> int:
        return flow.seed % (SOURCE_BYTES - flow.length)

    async def put_a(self, flow: Flow) -> None:
        """Write into what b describes, and say how it ended when no byte moves any more."""
        descriptor = RemoteDescriptor.from_dict(await self._hear(f"{flow.name}-d"))
        begin = self._offset(flow)
        try:
            span = self.source[begin : begin + flow.length]
            transfer = self.client.put(span, descriptor, timeout=flow.limit_s, visible=True, notify=flow.seed)
            state = await self._ended(flow, transfer, "a")
        finally:
            self.client.plane.drop_import(descriptor)
        await self._tell(f"{flow.name}-o", {"state": state})
        if transfer.error is not None:
            raise transfer.error

    async def put_b(self, flow: Flow) -> str:
        """Lend a span; when it was not written to its end, the pattern written at once must stay."""
        taken = self.spans.take(1, flow.name)
        begin = taken[0] * SPAN_BYTES
        mine = self.sink.array[begin : begin + flow.length]
        descriptor = self.sink.descriptor("w", offset=begin, length=flow.length)
        try:
            async with self.client.notifications(descriptor) as told:
                await self._tell(f"{flow.name}-d", descriptor.to_dict())
                if flow.cancel_s is not None and flow.by == "b":
                    await asyncio.sleep(flow.cancel_s)
                    await self.sink.revoke(descriptor)
                    await self._stays(flow, mine)
                state = (await self._hear(f"{flow.name}-o"))["state"]
                if state == "done":
                    if flow.cancel_s is None or flow.by == "a":
                        if await told.next(timeout=2) != flow.seed:
                            self.wrongs.add(f"{flow.name}: another number was told")
                        self._same(flow, mine)
                elif flow.cancel_s is None or flow.by == "a":
                    await self._stays(flow, mine)
                return str(state)
        finally:
            await self._take_back(self.sink, descriptor)
            self.spans.give(taken)

    async def get_a(self, flow: Flow) -> str:
        """Lend a part of the source."""
        descriptor = self.source.descriptor("r", offset=self._offset(flow), length=flow.length)
        try:
            await self._tell(f"{flow.name}-d", descriptor.to_dict())
            if flow.cancel_s is not None and flow.by == "a":
                await asyncio.sleep(flow.cancel_s)
                await self.source.revoke(descriptor)
            return str((await self._hear(f"{flow.name}-o"))["state"])
        finally:
            await self._take_back(self.source, descriptor)

    async def get_b(self, flow: Flow) -> None:
        """Read it."""
        descriptor = RemoteDescriptor.from_dict(await self._hear(f"{flow.name}-d"))
        taken = self.spans.take(1, flow.name)
        begin = taken[0] * SPAN_BYTES
        mine = self.sink.array[begin : begin + flow.length]
        try:
            span = self.sink[begin : begin + flow.length]
            transfer = self.client.get(span, descriptor, timeout=flow.limit_s)
            if await self._ended(flow, transfer, "b") == "done":
                self._same(flow, mine)
            else:
                await self._stays(flow, mine)
        finally:
            self.client.plane.drop_import(descriptor)
            self.spans.give(taken)
        await self._tell(f"{flow.name}-o", {"state": transfer.state})
        if transfer.error is not None:
            raise transfer.error

    def _same(self, flow: Flow, mine: Any) -> None:
        begin = self._offset(flow)
        if not np.array_equal(mine, self.peer_source[begin : begin + flow.length]):
            self.wrongs.add(f"{flow.name} {flow.kind}: wrong bytes")

    async def _stays(self, flow: Flow, mine: Any) -> None:
        """Nothing moves: what is written now is still there a moment later."""
        mine[:] = SCRIBBLE
        await asyncio.sleep((flow.seed % 5) / 1000)
        if not (mine == SCRIBBLE).all():
            self.wrongs.add(f"{flow.name} {flow.kind}: a byte moved after the end")

    # -- whole requests ----------------------------------------------------------------------------------------

    def _source_blocks(self, flow: Flow) -> list[int]:
        ids: list[int] = np.random.default_rng(flow.seed).permutation(BLOCKS)[: flow.blocks].tolist()
        return ids

    def _same_request(self, flow: Flow, found: Any) -> None:
        if not np.array_equal(found, request_bytes(self.peer_cache, self.source_cache, self._source_blocks(flow))):
            self.wrongs.add(f"{flow.name} {flow.kind}: wrong bytes")

    async def push_a(self, flow: Flow, land: bool = False) -> None:
        """Prefill."""
        table = table_of(self._source_blocks(flow))
        push = self.client.push(
            flow.name, to=self._to, cache=self.source_cache, table=table, timeout=flow.limit_s, land=land
        )
        async with push:
            await push.layers()

    async def push_b(self, flow: Flow) -> None:
        """Decode."""
        blocks = self.blocks.take(flow.blocks, flow.name)
        try:
            async with self.client.offer(flow.name, self.sink_cache, table_of(blocks), timeout=flow.limit_s) as landing:
                await landing.wait()
                self._same_request(flow, request_bytes(self.sink_cache.regions[0].array, self.sink_cache, blocks))
        finally:
            await self._give_back(flow, blocks)

    async def _give_back(self, flow: Flow, blocks: list[int]) -> None:
        if await asyncio.shield(self._tasks.run(self.blocks_are_quiet(blocks, flow.name), "quiet")):
            self.blocks.give(blocks)

    async def pull_a(self, flow: Flow) -> None:
        """Prefill publishes, and the router's part."""
        table = table_of(self._source_blocks(flow))
        async with self.client.publish(
            flow.name, self.source_cache, table, lease_s=min(max(0.5, flow.limit_s), LEASE_S)
        ) as ticket:
            await self._tell(f"{flow.name}-t", ticket.to_dict())

    async def pull_b(self, flow: Flow) -> None:
        """Decode fetches."""
        ticket = await self._hear(f"{flow.name}-t")
        blocks = self.blocks.take(flow.blocks, flow.name)
        try:
            await self.client.pull(ticket, self.sink_cache, table_of(blocks), timeout=flow.limit_s)
            self._same_request(flow, request_bytes(self.sink_cache.regions[0].array, self.sink_cache, blocks))
        finally:
            await self._give_back(flow, blocks)

    async def land_a(self, flow: Flow) -> None:
        """Prefill, before its decode worker is chosen."""
        await self.push_a(flow, land=True)

    async def land_b(self, flow: Flow) -> None:
        """Take it over."""
        async with self.client.adopt(flow.name, wait_s=LEASE_S, timeout=self._patience) as landed:
            layout, geometry = landed.layout, landed.layout.geometry
            size = geometry.kv_parts * layout.blocks * self._block_bytes()
            found = [
                landed.array[placed.offset :][:size].reshape(geometry.kv_parts, -1, self._block_bytes())
                for (placed,) in map(layout.placed, range(geometry.layers))
            ]
            wanted = landed.table.blocks
            self._same_request(flow, np.concatenate([layer[:, wanted].reshape(-1) for layer in found]))

    def _block_bytes(self) -> int:
        geometry = self.source_cache.layout.geometry
        return geometry.block_tokens * geometry.kv_heads * geometry.head_size * 4

    # -- coming and going ---------------------------------------------------------------------------------------

    async def churn_a(self, flow: Flow) -> None:
        """A client that comes, allocates, registers, shares, reads its own memory through a descriptor, and goes."""
        async with Client(self.socket, config=self.config) as other:
            theirs, ours = await other.alloc(65_536), await other.register(np.zeros(65_536, dtype=np.uint8))
            theirs.array[:] = flow.seed & 0xFF
            async with await other.share(theirs, f"{flow.name}-{flow.by}-{id(other)}", "r"):
                await other.get(ours, theirs.descriptor("r"), timeout=2)
            if not (ours.array == flow.seed & 0xFF).all():
                self.wrongs.add(f"{flow.name} churn: wrong bytes")
            await ours.release(drain=True)

    churn_b = churn_a

    async def meet(self, seed: int) -> dict[str, Any]:
        """What the other side sends follows from its seed."""
        self.peer_cache = noise(seed, len(self.source_cache.regions[0]))
        self.peer_source = noise(seed + 1, SOURCE_BYTES)
        return {}


assert FREE_BYTE != SCRIBBLE

if __name__ == "__main__":
    sys.exit(asyncio.run(serve(Worker())))
