"""The worker process of the case book: regions, transfers and flows by name, on command, many at a time.

Commands are answered at once: what takes time is started under a name, and its outcome is asked for by that name. Each
transfer's settling is counted, so that a second terminal outcome would be seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import mmap
import os
import sys
import time
from collections.abc import Coroutine
from random import Random
from typing import Any

import numpy as np

import kvxfer
from examples.remote_worker import serve
from kvxfer.config import load
from kvxfer.dataplane.plane import WorkRequest
from kvxfer.descriptors import RemoteDescriptor
from kvxfer.errors import KvxferError
from kvxfer.flows.many import Group, Move
from kvxfer.geometry import BlockTable
from kvxfer.memory.region import KVCache, Region
from kvxfer.native.engine import OpKind
from tests.cases.actor_load import Load
from tests.cases.actor_mail import Mail
from tests.cases.actor_many import Many
from tests.cases.facts import pattern
from tests.support.nodes import make_cache, small_geometry


def told(error: BaseException) -> dict[str, Any]:
    """An error as a dict."""
    if isinstance(error, KvxferError):
        known = {"op": error.op_id, "peer": error.peer, "retryable": error.retryable}
        return {"error": error.code, "message": str(error), "fields": error.fields, **known}
    return {"error": type(error).__name__, "message": str(error), "fields": {}}


class Actor(Many, Mail, Load):
    """Holds a client and everything that a test has named."""

    def __init__(self) -> None:
        self.client: kvxfer.Client
        self.regions: dict[str, Region] = {}
        self.caches: dict[str, KVCache] = {}
        self.transfers: dict[str, kvxfer.Transfer] = {}
        self.groups: dict[str, Group] = {}
        self.settled: dict[str, int] = {}
        self.tasks: dict[str, asyncio.Task[dict[str, Any]]] = {}
        self.tickets: dict[str, Any] = {}
        self.landings: dict[str, kvxfer.Landing] = {}
        self.kept: list[Any] = []
        self.releases: list[asyncio.Task[None]] = []
        self.watched: dict[str, asyncio.Task[int]] = {}

    # -- life ---------------------------------------------------------------------------------------

    async def open(self, socket: str, **options: Any) -> dict[str, Any]:
        config = load(flags=options).config
        self.client = await kvxfer.Client(socket, config=config).__aenter__()
        endpoints = {info.name: info.endpoint for info in self.client.plane.engine.transports}
        return {"addresses": list(self.client.addresses), "endpoints": endpoints, "pid": os.getpid()}

    async def close(self) -> None:
        """End the client and whatever it still does; forget every name."""
        await self.client.aclose()
        for task in (*self.tasks.values(), *self.watched.values()):
            task.cancel()
        for table in (
            self.regions,
            self.caches,
            self.transfers,
            self.groups,
            self.settled,
            self.tasks,
            self.tickets,
            self.watched,
        ):
            table.clear()
        gc.collect()

    async def reopen_slow(self, transport: str, spec: str, socket: str) -> dict[str, Any]:
        """The same worker with a slow transport, while others go on."""
        await self.close()
        return await self.open(socket, transports=[f"fault+{transport}"], fault_spec=spec)

    async def where(self) -> dict[str, Any]:
        """The node's addresses, waiting for the link to its daemon."""
        for _ in range(500):
            if self.client.control.connected:
                return {"addresses": list(self.client.addresses)}
            await asyncio.sleep(0.01)
        raise kvxfer.errors.DaemonUnavailable("no link to the daemon")

    # -- memory -------------------------------------------------------------------------------------

    async def alloc(self, name: str, length: int) -> dict[str, Any]:
        self.regions[name] = await self.client.alloc(length)
        return {"id": self.regions[name].id}

    async def fill(self, name: str, seed: int, block: int, first: int = 0, count: int | None = None) -> None:
        """``pattern(seed, i)`` into blocks of ``block`` bytes."""
        array = self.regions[name].array
        for index in range(first, len(array) // block if count is None else first + count):
            array[index * block : (index + 1) * block] = np.frombuffer(pattern(seed, index, block), dtype=np.uint8)

    async def digest(self, name: str, offset: int = 0, length: int | None = None) -> dict[str, Any]:
        array = self.regions[name].array
        end = len(array) if length is None else offset + length
        return {"sha": hashlib.sha256(array[offset:end]).hexdigest()}

    async def claim_blocks(self, cache: str, blocks: list[int]) -> None:
        """What the next request would do: take the blocks, and give them back at once."""
        layout = self.caches[cache].layout
        table = BlockTable.of(blocks, len(blocks) * layout.geometry.block_tokens)
        reservations = self.client.reservations
        reservations.release(reservations.acquire([(self.caches[cache].footprint, table)], "the next request"))

    async def watch(self, name: str, every_s: float, for_s: float, offset: int = 0, length: int | None = None) -> None:
        """Look at the bytes again and again; `watched` says how often they had changed."""
        self.watched[name] = asyncio.ensure_future(self._watch(name, offset, length, every_s, for_s))

    async def _watch(self, name: str, offset: int, length: int | None, every_s: float, for_s: float) -> int:
        view = self.regions[name].array[offset : None if length is None else offset + length]
        before, changed = view.copy(), 0
        end = time.monotonic() + for_s
        while time.monotonic() < end:
            await asyncio.sleep(every_s)
            changed += int(not np.array_equal(before, view))
        return changed

    async def unchanged(self, name: str) -> dict[str, Any]:
        return {"changed": await self.watched.pop(name)}

    async def describe(self, name: str, access: str = "rw", expires_in_s: float | None = None) -> dict[str, Any]:
        return {"descriptor": self.regions[name].descriptor(access, expires_in_s=expires_in_s).to_dict()}

    async def release(self, name: str, drain: bool = False) -> None:
        await self.regions[name].release(drain=drain)
        del self.regions[name]

    # -- one-sided ----------------------------------------------------------------------------------

    async def start(
        self,
        name: str,
        way: str,
        region: str,
        descriptor: dict[str, Any],
        span: tuple[int, int] | None = None,
        remote_offset: int = 0,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """Begin a put or get. ``span``: offset and length of our side."""
        ours = self.regions[region]
        local = ours if span is None else ours[span[0] : span[0] + span[1]]
        remote = RemoteDescriptor.from_dict(descriptor)
        if way == "put":
            transfer = self.client.put(local, remote, target_offset=remote_offset, timeout=timeout)
        else:
            transfer = self.client.get(local, remote, source_offset=remote_offset, timeout=timeout)
        self.transfers[name] = transfer
        self.settled[name] = 0
        transfer.on_settled(lambda _: self._count(name))
        return {"op": transfer.op_id, "state": transfer.state}

    async def state(self, name: str) -> dict[str, Any]:
        """How it stands, without waiting."""
        return self._state(name)

    def _state(self, name: str) -> dict[str, Any]:
        transfer = self.transfers[name]
        error = {} if transfer.error is None else told(transfer.error)
        known = {"state": transfer.state, "bytes": transfer.bytes_done, "settled": self.settled[name]}
        return {**error, **known, "op": transfer.op_id, "stalled": getattr(transfer, "stalled", False)}

    async def outcome(self, name: str, settle: bool = True) -> dict[str, Any]:
        """Wait for the end of a transfer."""
        began = time.monotonic()
        transfer = self.transfers[name]
        with contextlib.suppress(KvxferError):  # `_state` tells it
            await transfer
        decided_s = time.monotonic() - began
        if settle:
            await transfer.wait_settled()
        return {**self._state(name), "decided_s": decided_s, "settled_s": time.monotonic() - began}

    async def cancel(self, name: str) -> dict[str, Any]:
        began = time.monotonic()
        await self.transfers[name].cancel()
        return {**self._state(name), "took_s": time.monotonic() - began}

    async def forget(self, name: str) -> None:
        """Drop every reference that this process's user holds."""
        del self.transfers[name]
        gc.collect()

    async def many(self, name: str, way: str, region: str, descriptor: dict[str, Any], piece: int) -> None:
        """All of a region in pieces, as one group."""
        ours, remote = self.regions[region], RemoteDescriptor.from_dict(descriptor)
        moves = [Move(ours[at : min(at + piece, len(ours))], remote, at) for at in range(0, len(ours), piece)]
        self.groups[name] = self.client.put_many(moves) if way == "put" else self.client.get_many(moves)

    async def many_ended(self, name: str) -> dict[str, Any]:
        """How a group ended."""
        group = self.groups[name]
        with contextlib.suppress(KvxferError):
            await group
        return {"state": group.state, "bytes": group.bytes_done, "failed": sorted(group.failures)}

    # -- flows --------------------------------------------------------------------------------------

    async def cache(self, name: str, blocks: int, layers: int = 3, **geometry: Any) -> dict[str, Any]:
        """A cache in one region, which has the same name."""
        self.caches[name] = await make_cache(self.client, small_geometry(layers=layers, **geometry), blocks)
        [self.regions[name]] = self.caches[name].regions
        return {"bytes": len(self.regions[name])}

    def _table(self, blocks: list[int]) -> BlockTable:
        return BlockTable(blocks=np.array(blocks, dtype=np.int64), tokens=16 * len(blocks))

    def _flow(self, name: str, work: Coroutine[Any, Any, dict[str, Any]]) -> None:
        async def run() -> dict[str, Any]:
            began = time.monotonic()
            try:
                answer = {"outcome": "done", **await work}
            except KvxferError as error:
                answer = {"outcome": "failed", **told(error)}
            except asyncio.CancelledError:
                answer = {"outcome": "cancelled"}
            return {**answer, "took_s": time.monotonic() - began, "at": time.monotonic()}

        self.tasks[name] = asyncio.ensure_future(run())

    async def push(
        self, name: str, to: list[str], cache: str, blocks: list[int], pause_s: float | None = 0, **how: Any
    ) -> None:
        """``pause_s`` between layers; None: all layers at once, as one transfer."""
        self._flow(name, self._push(name, to, cache, blocks, pause_s, **how))

    async def _push(
        self, name: str, to: list[str], cache: str, blocks: list[int], pause_s: float | None, **how: Any
    ) -> dict[str, Any]:
        async with self.client.push(name, to=to, cache=self.caches[cache], table=self._table(blocks), **how) as push:
            if pause_s is None:
                await push.layers()
                return {"bytes": push.bytes_done, "transport": push.transport}
            for layer in range(self.caches[cache].layout.geometry.layers):
                await push.layer(layer)
                await asyncio.sleep(pause_s)
        return {"bytes": push.bytes_done, "transport": push.transport}

    async def offer(self, name: str, cache: str, blocks: list[int], **how: Any) -> None:
        self._flow(name, self._offer(name, cache, blocks, **how))

    async def _offer(self, name: str, cache: str, blocks: list[int], **how: Any) -> dict[str, Any]:
        async with self.client.offer(name, self.caches[cache], self._table(blocks), **how) as landing:
            self.landings[name] = landing
            await landing.wait()
        return {}

    async def publish(self, name: str, cache: str, blocks: list[int], **how: Any) -> dict[str, Any]:
        """Publish; answers with the ticket, the flow ends with the publication."""
        ticket: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._flow(name, self._publish(name, cache, blocks, ticket, **how))
        await asyncio.wait([ticket, self.tasks[name]], return_when=asyncio.FIRST_COMPLETED)
        return {"ticket": ticket.result()} if ticket.done() else await self.tasks[name]

    async def _publish(
        self, name: str, cache: str, blocks: list[int], made: asyncio.Future[dict[str, Any]], **how: Any
    ) -> dict[str, Any]:
        async with self.client.publish(name, self.caches[cache], self._table(blocks), **how) as ticket:
            self.tickets[name] = ticket
            made.set_result(ticket.to_dict())
        return {"how": ticket.outcome, "why": ticket.error.code if ticket.error else ""}

    async def renew(self, name: str, lease_s: float) -> None:
        await self.tickets[name].renew(lease_s)

    async def pull(self, name: str, ticket: dict[str, Any], cache: str, blocks: list[int], **how: Any) -> None:
        self._flow(name, self._pull(ticket, cache, blocks, **how))

    async def _pull(self, ticket: dict[str, Any], cache: str, blocks: list[int], **how: Any) -> dict[str, Any]:
        pulled = await self.client.pull(ticket, self.caches[cache], self._table(blocks), **how)
        return {"bytes": pulled.bytes, "transport": pulled.transport}

    async def ended(self, name: str) -> dict[str, Any]:
        """Wait for the end of a flow."""
        return await asyncio.shield(self.tasks[name])

    async def abort(self, name: str) -> None:
        """Cancel a flow, as a client that hung up would; `ended` tells the outcome."""
        self.tasks[name].cancel()

    async def layer_digests(self, cache: str, blocks: list[int]) -> dict[str, Any]:
        """One SHA-256 per layer over the given blocks, in that order."""
        found = self.caches[cache]
        geometry = found.layout.geometry
        shape = (geometry.kv_parts, found.layout.blocks, -1)
        size = found.layout.blocks * geometry.kv_parts * geometry.block_tokens * geometry.kv_heads
        size *= geometry.head_size * 4
        digests = []
        for placement in found.layout.placements:
            layer = found.regions[placement.region].array[placement.offset : placement.offset + size].reshape(shape)
            digests.append(hashlib.sha256(np.ascontiguousarray(layer[:, blocks])).hexdigest())
        return {"layers": digests}

    async def free(self, ticket: dict[str, Any]) -> dict[str, Any]:
        """`Client.release`."""
        await self.client.release(ticket)
        return {"at": time.monotonic()}

    async def landing(self, name: str, cache: str, blocks: list[int], **how: Any) -> None:
        """An offer whose layers are waited for one by one, each by a task of its own (`layers` tells the outcomes)."""
        self._flow(name, self._landing(name, cache, blocks, **how))

    async def group(self, region: str, descriptor: dict[str, Any], parts: int, timeout: float) -> dict[str, Any]:
        """One transfer of several writes."""
        ours, remote = self.regions[region], RemoteDescriptor.from_dict(descriptor)
        size = len(ours) // parts
        await self.client.plane.prepare(remote)
        work = [
            WorkRequest(kind=OpKind.PUT, region=ours.id, descriptor=remote, span=(index * size, index * size, size))
            for index in range(parts)
        ]
        transfer = self.transfers["group"] = self.client.plane.start(work, timeout=timeout, peer="group")
        self.settled["group"] = 0
        transfer.on_settled(lambda _: self._count("group"))
        return await self.outcome("group")

    async def _landing(self, name: str, cache: str, blocks: list[int], **how: Any) -> dict[str, Any]:
        layers = self.caches[cache].layout.geometry.layers
        order: list[int] = []

        async def one(landing: kvxfer.Landing, layer: int) -> str:
            try:
                await landing.layer(layer)
            except KvxferError as error:
                return error.code
            order.append(layer)
            found = (await self.layer_digests(cache, blocks))["layers"][layer]
            return str(found)

        async with self.client.offer(name, self.caches[cache], self._table(blocks), **how) as landing:
            waits = [asyncio.ensure_future(one(landing, layer)) for layer in range(layers)]
            digests = await asyncio.gather(*waits)
            final = ""
            try:
                await landing.wait()
            except KvxferError as error:
                final = error.code
        return {"layers": digests, "order": order, "final": final}

    async def shuffled(
        self, name: str, to: list[str], cache: str, blocks: list[int], seed: int, hold: int = -1, fail: int = -1
    ) -> None:
        """A push of the layers in a seeded order with seeded pauses; ``hold`` comes last and late, ``fail`` never."""
        self._flow(name, self._shuffled(name, to, cache, blocks, seed, hold, fail))

    async def _shuffled(
        self, name: str, to: list[str], cache: str, blocks: list[int], seed: int, hold: int, fail: int
    ) -> dict[str, Any]:
        rng = Random(seed)
        layers = [layer for layer in range(self.caches[cache].layout.geometry.layers) if layer not in (hold, fail)]
        rng.shuffle(layers)
        async with self.client.push(name, to=to, cache=self.caches[cache], table=self._table(blocks)) as push:
            for layer in layers:
                await push.layer(layer)
                await asyncio.sleep(rng.choice((0, 0, 0.001, 0.004)))
            if fail >= 0:
                await asyncio.sleep(0.05)
                raise kvxfer.errors.InjectedFault(f"layer {fail} cannot be written")
            if hold >= 0:
                await asyncio.sleep(0.05)
                await push.layer(hold)
        return {}

    async def lookup(self, name: str, node: list[str], wait_s: float = 0) -> dict[str, Any]:
        """The descriptor that a node shares."""
        return {"descriptor": (await self.client.lookup(name, node=node, wait_s=wait_s, timeout=5)).to_dict()}

    async def send(self, to: list[str], count: int = 1) -> dict[str, Any]:
        """Small messages through both daemons; the outcome of each."""
        found = []
        for index in range(count):
            try:
                await self.client.send(to, f"channel-{index}", b"x", timeout=5)
                found.append("done")
            except KvxferError as error:
                found.append(error.code)
        return {"outcomes": found}

    async def counters(self) -> dict[str, Any]:
        """Of the engine's core."""
        found = self.client.plane.engine.counters()
        return {"late": found.late, "stalled": found.stalled, "inflight": found.inflight}

    async def landing_stalled(self, name: str) -> dict[str, Any]:
        """The API of a flow that waits."""
        return {"stalled": self.landings[name].stalled}

    async def reregister(self, length: int, access: str = "r") -> dict[str, Any]:
        """A region at an address, and after its end another one at the same address: both descriptors."""
        memory = mmap.mmap(-1, length)
        array = np.frombuffer(memory, dtype=np.uint8)
        address = array.ctypes.data
        first = await self.client.register(address=address, length=length)
        old = first.descriptor(access)
        await first.release()
        array[:] = 9  # another meaning
        self.regions["again"] = await self.client.register(address=address, length=length)
        self.kept.append(memory)
        new = self.regions["again"].descriptor(access)
        return {"old": old.to_dict(), "new": new.to_dict(), "ids": [first.id, self.regions["again"].id]}

    async def cycle(self, count: int) -> dict[str, Any]:
        """So many registrations of the same memory; how many different ids."""
        memory = np.zeros(4096, dtype=np.uint8)
        ids = set()
        for _ in range(count):
            region = await self.client.register(memory)
            ids.add(region.id)
            await region.release()
        return {"different": len(ids)}

    # -- looking ------------------------------------------------------------------------------------

    async def holds(self) -> dict[str, Any]:
        """What must come back to where it was."""
        counters = self.client.plane.engine.counters()
        return {
            "inflight": counters.inflight,
            "permits": self.client.plane.permits,
            "grants": counters.grants,
            "imports": counters.imports,
            "regions": counters.regions,
            "quarantined_grants": counters.quarantined_grants,
            "pinned": self.client.reservations.pinned_blocks,
            "quarantined": self.client.reservations.quarantined_blocks,
            "threads": int(counters.threads),
            "fds": len(os.listdir("/proc/self/fd")),
            "tasks": len([task for task in asyncio.all_tasks() if not task.done()]),
        }

    async def fork(self) -> dict[str, Any]:
        """A child that does nothing, and holds whatever it got."""
        child = os.fork()
        if child == 0:
            os.closerange(0, 3)  # those of the harness
            time.sleep(120)  # noqa: ASYNC251 - there is no loop in here
            os._exit(0)
        return {"pid": child}

    async def sockets(self) -> dict[str, Any]:
        """Open sockets of this process."""
        count = 0
        for name in os.listdir("/proc/self/fd"):
            try:
                count += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
            except FileNotFoundError:
                continue
        return {"sockets": count}


if __name__ == "__main__":
    sys.exit(asyncio.run(serve(Actor())))
