"""What simulated workers do all day: push, land and adopt, publish and pull, put and get, write to each other.

The idea: each flow is what an inference engine would write with the public client, and checks what it was promised: the
bytes that become visible are the ones that one prefill wrote, all of them; a wait ends by its deadline; an error is one
of ours. A flow's parts run in the processes of their workers, so a killed worker takes its part along and the others
have to notice.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

from kvxfer.client import Client
from kvxfer.coverage import Box
from kvxfer.dataplane.transfer import Transfer
from kvxfer.errors import InternalError, KvxferError, UsageError
from kvxfer.flows.offer import Landing
from kvxfer.flows.push import Push
from kvxfer.geometry import BlockTable, CacheLayout, Geometry
from kvxfer.memory.region import KVCache
from kvxfer.planner import contiguous_layout
from tests.support.sim.data import FLOW
from tests.support.sim.invariants import Cache
from tests.support.sim.loop import run_in
from tests.support.sim.world import Worker, World

BLOCKS = 24
GEOMETRY = Geometry(
    layers=2,
    kv_parts=2,
    kv_heads=1,
    kv_heads_total=1,
    head_start=0,
    head_size=4,
    block_tokens=4,
    dtype="float16",
    layout="PBNHD",
    fingerprint="sim",
)
WHOLE = Box(layers=range(2), parts=range(2), heads=range(1), tokens=range(0))
WIDTH = 8  # bytes of one token in one part of one layer
TIMEOUT_S = 4.0
SLACK_S = 8.0  # beside a flow's own deadline: a daemon to wait for, a cancelled part to settle, both with their limits
SURPLUS_EVERY = 6  # with trouble, a flow whose number it divides has a reader too many
KINDS = ("push", "push", "push", "pull", "pull", "land", "put", "mail")
EVERY = (*sorted(set(KINDS)), "slow")  # what is there besides is played when a plan names it
Bytes = npt.NDArray[np.uint8]


class Stop(Exception):
    """A user's code fails inside a block."""


@dataclass(slots=True)
class Part:
    """One participant of a flow: which worker, and how it ended."""

    flow: Flow
    role: str
    worker: Worker
    began: float
    ends_by: float
    outcome: str = ""
    task: asyncio.Task[None] | None = None


@dataclass(slots=True)
class Flow:
    """One request."""

    number: int
    kind: str
    parts: list[Part] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"r{self.number}"

    @property
    def over(self) -> bool:
        return all(part.outcome or not part.worker.process.alive for part in self.parts)


def content(flow: int, writer: int, tokens: int) -> Bytes:
    """The bytes that a writer puts into a request: shape (layers, parts, tokens, width)."""
    shape = (GEOMETRY.layers, GEOMETRY.kv_parts, tokens, WIDTH)
    raw = Random(flow * 8 + writer).randbytes(int(np.prod(shape)))
    return np.frombuffer(raw, dtype=np.uint8).reshape(shape)


def view(array: Bytes, layout: CacheLayout, layer: int) -> Bytes:
    """One layer of a cache: shape (parts, blocks, tokens of a block, width)."""
    shape = (GEOMETRY.kv_parts, layout.blocks, GEOMETRY.block_tokens, WIDTH)
    offset = layout.placed(layer)[0].offset
    return array[offset : offset + int(np.prod(shape))].reshape(shape)


def read(array: Bytes, layout: CacheLayout, table: BlockTable, layer: int) -> Bytes:
    """A request's bytes in one layer: shape (parts, tokens, width)."""
    blocks = view(array, layout, layer)[:, table.blocks]
    return blocks.reshape(GEOMETRY.kv_parts, -1, WIDTH)[:, : table.tokens].copy()


def fill(array: Bytes, layout: CacheLayout, table: BlockTable, layer: int, data: Bytes) -> None:
    """Put a request's bytes into its blocks."""
    whole = view(array, layout, layer)
    blocks = whole[:, table.blocks].reshape(GEOMETRY.kv_parts, -1, WIDTH)
    blocks[:, : table.tokens] = data
    whole[:, table.blocks] = blocks.reshape(GEOMETRY.kv_parts, -1, GEOMETRY.block_tokens, WIDTH)


def stage(cache: KVCache, layers: range) -> KVCache:
    """Some layers of a cache, as the cache of a pipeline stage."""
    geometry = replace(GEOMETRY, layers=len(layers), first_layer=layers.start)
    placements = cache.layout.placements[layers.start : layers.stop]
    return KVCache(CacheLayout(geometry=geometry, blocks=BLOCKS, placements=placements), cache.regions)


async def write_layer(push: Push, layer: int, table: BlockTable, flow: Flow) -> None:
    """Write a layer, that of some requests in two ranges of positions, the later one first. Which ones is told by their
    number, so that nothing else of a seed changes.
    """
    positions = range(table.first_token, table.first_token + table.tokens)
    if flow.number % 3 or len(positions) < 2:
        await push.layer(layer)
        return
    middle = positions[len(positions) // 2]
    await push.layer(layer, range(middle, positions.stop))
    await push.layer(layer, range(positions.start, middle))


async def equip(worker: Worker, client: Client) -> None:
    """A cache and a scratch region for a new worker."""
    layout, length = contiguous_layout(GEOMETRY, BLOCKS)
    region = await client.alloc(length)
    step = layout.placed(1)[0].offset
    block = GEOMETRY.block_tokens * WIDTH
    cache = KVCache(layout, region)
    worker.extra.update(
        cache=cache,
        free=deque(range(BLOCKS)),
        scratch=await client.alloc(512),
    )
    engine: Any = client.plane.engine
    worker.world.oracle.caches[engine] = Cache(client, cache, step, BLOCKS * block, block)


class Work:
    """Starts flows and judges them. ``trouble``: users cancel, fail and compete; ``kinds``: only such flows."""

    def __init__(self, world: World, *, trouble: bool, kinds: tuple[str, ...] = ()) -> None:
        self.world = world
        self.kinds = kinds or KINDS
        self.trouble = trouble
        self.rng = Random(f"work {world.seed}")
        self.flows: list[Flow] = []
        self.done = 0
        world.equip = equip

    # -- starting ------------------------------------------------------------------------------------------

    def begin(self) -> Flow | None:
        """One more request between workers that are there; None when there are too few."""
        ready = [worker for worker in self.world.workers if worker.ready]
        if len(ready) < 2:
            return None
        rng = self.rng
        flow = Flow(len(self.flows) + 1, rng.choice(self.kinds))
        self.flows.append(flow)
        near, far = rng.sample(ready, 2)
        tokens = rng.randrange(1, 4 * GEOMETRY.block_tokens)
        start = getattr(self, f"_begin_{flow.kind}")
        start(flow, near, far, tokens, ready)
        return flow

    def _part(
        self, flow: Flow, role: str, worker: Worker, work: Callable[[Worker, Flow], Awaitable[None]], limit_s: float
    ) -> Part:
        now = self.world.loop.now
        delay_s = self.rng.random() * 0.05
        part = Part(flow, role, worker, now, now + delay_s + limit_s + SLACK_S)
        flow.parts.append(part)
        part.task = run_in(worker.process, self._start, part, work, delay_s)
        if self.trouble and self.rng.random() < 0.12:
            at = self.rng.random() * self.rng.choice((0.003, 0.02, 1.0))
            self.world.loop.call_later(delay_s + at, part.task.cancel, context=worker.process.context)
        return part

    def _start(self, part: Part, work: Callable[[Worker, Flow], Awaitable[None]], delay_s: float) -> Any:
        FLOW.set(part.flow.name)
        return self.world.tasks(self._run(part, work, delay_s), f"{part.flow.name} {part.role}")

    async def _run(self, part: Part, work: Callable[[Worker, Flow], Awaitable[None]], delay_s: float) -> None:
        try:
            await asyncio.sleep(delay_s)
            await work(part.worker, part.flow)
            part.outcome = "done"
            self.done += 1
        except asyncio.CancelledError:
            part.outcome = "cancelled"
            raise
        except Stop:
            part.outcome = "stopped"
        except KvxferError as error:
            part.outcome = error.code
            self._judge(part, error)
        except AssertionError as wrong:
            part.outcome = "wrong"
            self.world.oracle.wrong("promise", f"{part.flow.kind} {part.flow.name} {part.role}: {wrong}")
        except Exception as wrong:
            part.outcome = "wrong"
            self.world.oracle.wrong("untyped", f"{part.flow.kind} {part.flow.name} {part.role}: {wrong!r}")
        finally:
            self.world.oracle.worker(part.worker)
            late_s = self.world.loop.now - part.ends_by
            self.world.trace.note(f"{part.flow.kind} {part.flow.name} {part.role}: {part.outcome or 'ended'}")
            if late_s > 0 and "frozen" not in part.worker.extra:
                self.world.oracle.wrong("deadline", f"{part.flow.name} {part.role} ended {late_s:.3f} s too late")

    def _judge(self, part: Part, error: KvxferError) -> None:
        text = f"{part.flow.kind} {part.flow.name} {part.role}: {error!r}"
        self.world.trace.detail(text)
        if isinstance(error, InternalError):
            self.world.oracle.wrong("internal", text)
        if not self.trouble:
            self.world.oracle.wrong("not_done", text)

    def _maybe_fail(self) -> None:
        if self.trouble and self.rng.random() < 0.04:
            raise Stop

    # -- blocks ------------------------------------------------------------------------------------------

    async def _take(self, worker: Worker, tokens: int) -> BlockTable:
        """Blocks for so many tokens; waits for them like an engine's scheduler does."""
        free: deque[int] = worker.extra["free"]
        count = -(-tokens // GEOMETRY.block_tokens)
        while len(free) < count:
            await asyncio.sleep(0.01)
        return BlockTable(blocks=np.array([free.popleft() for _ in range(count)], dtype=np.int64), tokens=tokens)

    @staticmethod
    def _give(worker: Worker, table: BlockTable) -> None:
        """The next request gets these blocks first: what comes late would hit it."""
        worker.extra["free"].extendleft(int(block) for block in table.blocks)

    # -- push ------------------------------------------------------------------------------------------

    def _begin_push(self, flow: Flow, near: Worker, far: Worker, tokens: int, ready: list[Worker]) -> None:
        if self.rng.random() < 0.35:
            self._begin_parts(flow, far, tokens, ready)
            return
        writers = [near]
        if self.trouble and self.rng.random() < 0.15:
            writers.append(self.rng.choice(ready))

        async def decode(worker: Worker, flow: Flow) -> None:
            await self._decode(worker, flow, tokens, len(writers))

        self._part(flow, "decode", far, decode, TIMEOUT_S)
        for index, writer in enumerate(writers):
            self._part(flow, f"prefill{index}", writer, self._prefill(far, tokens, index, land=False), TIMEOUT_S)

    def _begin_parts(self, flow: Flow, far: Worker, tokens: int, ready: list[Worker]) -> None:
        """Pipeline stages and context-parallel pieces of one request, at the same time. With trouble one may be
        missing, twice there, or larger than it should be.
        """
        cuts = sorted({0, tokens, *(self.rng.randrange(tokens + 1) for _ in range(2))})
        pieces = [range(*pair) for pair in pairwise(cuts)]
        layers = [range(1), range(1, 2)] if self.rng.random() < 0.5 else [range(2)]
        boxes = [replace(WHOLE, layers=some, tokens=piece) for some in layers for piece in pieces]
        if self.trouble and self.rng.random() < 0.3:
            box = self.rng.choice(boxes)
            wider = replace(box, tokens=range(max(0, box.tokens.start - 2), box.tokens.stop))
            boxes += self.rng.choice(([box], [wider], []))
            self.rng.shuffle(boxes)
            del boxes[len(boxes) - self.rng.randrange(2) :]

        async def decode(worker: Worker, flow: Flow) -> None:
            await self._decode(worker, flow, tokens, 1)

        self._part(flow, "decode", far, decode, TIMEOUT_S)
        for index, box in enumerate(boxes):
            writer = self.rng.choice(ready)
            self._part(flow, f"prefill{index}", writer, self._prefill_part(far, tokens, box), TIMEOUT_S)

    def _prefill_part(self, far: Worker, tokens: int, box: Box) -> Callable[..., Awaitable[None]]:
        address = (far.host.place,)

        async def prefill(worker: Worker, flow: Flow) -> None:
            table = await self._take(worker, len(box.tokens))
            try:
                assert worker.client is not None
                cache: KVCache = worker.extra["cache"]
                data = content(flow.number, 0, tokens)[:, :, box.tokens.start : box.tokens.stop]
                for layer in box.layers:
                    fill(cache.regions[0].array, cache.layout, table, layer, data[layer])
                held = replace(table, first_token=box.tokens.start, first_slot=0)
                pushing = worker.client.push(
                    flow.name, to=address, cache=stage(cache, box.layers), table=held, timeout=TIMEOUT_S
                )
                async with pushing as tx:
                    for index in range(len(box.layers)):
                        self._maybe_fail()
                        await write_layer(tx, index, held, flow)
                        if self.rng.random() < 0.15:
                            await asyncio.sleep(self.rng.random())  # the next layer is computed
            finally:
                self._give(worker, table)

        return prefill

    async def _decode(self, worker: Worker, flow: Flow, tokens: int, writers: int) -> None:
        table = await self._take(worker, tokens)
        try:
            assert worker.client is not None
            cache: KVCache = worker.extra["cache"]
            array = cache.regions[0].array
            seen: list[int] = []
            async with worker.client.offer(flow.name, cache, table, timeout=TIMEOUT_S) as landing:
                async for layer in landing:
                    self._maybe_fail()
                    seen.append(layer)
                    self._expect(array, cache.layout, table, [layer], flow, writers, "a layer that arrived")
                assert landing.committed, "the landing ended without commit and without error"
                assert sorted(seen) == list(range(GEOMETRY.layers)), f"layers {seen} of a committed landing"
                self._covered(landing)
            self._expect(array, cache.layout, table, seen, flow, writers, "a committed landing")
        finally:
            self._give(worker, table)

    @staticmethod
    def _covered(landing: Landing) -> None:
        """The claims that are committed write every element of a committed landing, each of them once."""
        incoming: Any = landing._incoming
        want = incoming.want
        marks = np.zeros((GEOMETRY.layers, len(want.tokens)), np.int64)
        for writer in incoming.writers.values():
            for box in writer.boxes if writer.committed else ():
                marks[box.layers.start : box.layers.stop, box.tokens.start : box.tokens.stop] += 1
        assert marks.min() >= 1, "a landing was committed before every part of it was"
        assert marks.max() <= 1, "two pushes were let into the same part of a landing"

    def _expect(
        self,
        array: Bytes,
        layout: CacheLayout,
        table: BlockTable,
        layers: list[int],
        flow: Flow,
        writers: int,
        what: str,
    ) -> None:
        whole = self._is_content(array, layout, table, layers, flow, writers)
        assert whole, f"{what} does not hold what one writer wrote"

    @staticmethod
    def _is_content(
        array: Bytes, layout: CacheLayout, table: BlockTable, layers: Iterable[int], flow: Flow, writers: int
    ) -> bool:
        """These layers hold what one of the writers wrote, all of it."""
        found = {layer: read(array, layout, table, layer) for layer in layers}
        for writer in range(writers):
            wanted = content(flow.number, writer, table.tokens)
            if all(np.array_equal(data, wanted[layer]) for layer, data in found.items()):
                return True
        return False

    def _prefill(
        self, far: Worker, tokens: int, index: int, *, land: bool, slow: bool = False
    ) -> Callable[..., Awaitable[None]]:
        address = (far.host.place,)

        async def prefill(worker: Worker, flow: Flow) -> None:
            table = await self._take(worker, tokens)
            try:
                assert worker.client is not None
                cache: KVCache = worker.extra["cache"]
                data = content(flow.number, index, tokens)
                for layer in range(GEOMETRY.layers):
                    fill(cache.regions[0].array, cache.layout, table, layer, data[layer])
                pushing = worker.client.push(
                    flow.name, to=address, cache=cache, table=table, timeout=TIMEOUT_S, land=land
                )
                async with pushing as tx:
                    for layer in range(GEOMETRY.layers):
                        self._maybe_fail()
                        await write_layer(tx, layer, table, flow)
                        if slow or self.rng.random() < 0.15:
                            await asyncio.sleep(self.rng.random() * 1.5)  # the next layer is computed
            finally:
                self._give(worker, table)

        return prefill

    # -- land and adopt --------------------------------------------------------------------------------------

    def _begin_land(self, flow: Flow, near: Worker, far: Worker, tokens: int, ready: list[Worker]) -> None:
        async def adopt(worker: Worker, flow: Flow) -> None:
            assert worker.client is not None
            async with worker.client.adopt(flow.name, timeout=TIMEOUT_S) as landed:
                first = self._is_content(landed.array, landed.layout, landed.table, range(GEOMETRY.layers), flow, 1)
                await asyncio.sleep(self.rng.random() * 0.01)
                self._maybe_fail()
                later = self._is_content(landed.array, landed.layout, landed.table, range(GEOMETRY.layers), flow, 1)
            # Had the daemon taken it back, leaving the block would have said so.
            assert first, "an adopted landing does not hold what was pushed"
            assert later, "an adopted landing changed while it was adopted"

        self._part(flow, "prefill0", near, self._prefill(far, tokens, 0, land=True), TIMEOUT_S)
        self._part(flow, "adopt", far, adopt, TIMEOUT_S)

    def _begin_slow(self, flow: Flow, near: Worker, far: Worker, tokens: int, ready: list[Worker]) -> None:
        """Layers that are computed while they are pushed into a landing: what happens meanwhile happens to a claim, and
        no data path of a worker finds that out. Nobody adopts it, so the pool may become full: with trouble only.
        """
        self._part(flow, "prefill0", near, self._prefill(far, tokens, 0, land=True, slow=True), TIMEOUT_S)

    # -- publish and pull ------------------------------------------------------------------------------------

    def _begin_pull(self, flow: Flow, near: Worker, far: Worker, tokens: int, ready: list[Worker]) -> None:
        readers = [far]
        if self.rng.random() < 0.3:
            readers.append(self.rng.choice(ready))
        ticket: asyncio.Future[dict[str, Any]] = self.world.loop.create_future()

        async def publish(worker: Worker, flow: Flow) -> None:
            table = await self._take(worker, tokens)
            try:
                assert worker.client is not None
                cache: KVCache = worker.extra["cache"]
                data = content(flow.number, 0, tokens)
                for layer in range(GEOMETRY.layers):
                    fill(cache.regions[0].array, cache.layout, table, layer, data[layer])
                publishing = worker.client.publish(flow.name, cache, table, consumers=len(readers), lease_s=TIMEOUT_S)
                async with publishing as published:
                    ticket.set_result(published.to_dict())
                    self._maybe_fail()
                assert published.outcome, "a publication ended without an outcome"
                assert self.trouble or published.outcome == "released", published.outcome
            finally:
                self._give(worker, table)

        async def pull(worker: Worker, flow: Flow) -> None:
            await self._routed(ticket)
            table = await self._take(worker, tokens)
            try:
                assert worker.client is not None
                cache: KVCache = worker.extra["cache"]
                pulled = await worker.client.pull(ticket.result(), cache, table, timeout=TIMEOUT_S)
                assert pulled.tokens == tokens, f"{pulled.tokens} of {tokens} tokens"
                layers = list(range(GEOMETRY.layers))
                self._expect(cache.regions[0].array, cache.layout, table, layers, flow, 1, "a pull")
            finally:
                self._give(worker, table)

        self._part(flow, "publish", near, publish, 2 * TIMEOUT_S)
        for index, reader in enumerate(readers):
            self._part(flow, f"pull{index}", reader, pull, 3 * TIMEOUT_S)
        if self.trouble and self.rng.random() < 0.2:
            self._part(flow, "forge", far, self._forge(ticket), 3 * TIMEOUT_S)
        if self.trouble and flow.number % SURPLUS_EVERY == 0:  # more readers than the ticket has places
            self._part(flow, "surplus", near, pull, 3 * TIMEOUT_S)

    @staticmethod
    async def _routed(ticket: asyncio.Future[dict[str, Any]]) -> None:
        """A router brings the ticket, if there ever is one."""
        if not (await asyncio.wait([ticket], timeout=TIMEOUT_S))[0]:
            raise Stop

    def _forge(self, ticket: asyncio.Future[dict[str, Any]]) -> Callable[..., Awaitable[None]]:
        """Somebody without the secret tries the ticket."""

        async def forge(worker: Worker, flow: Flow) -> None:
            await self._routed(ticket)
            table = await self._take(worker, 1)
            try:
                assert worker.client is not None
                false = {**ticket.result(), "secret": "00" * 16}
                try:
                    await worker.client.pull(false, worker.extra["cache"], table, timeout=TIMEOUT_S)
                except KvxferError:
                    return
                raise AssertionError("a ticket with a wrong secret was served")
            finally:
                self._give(worker, table)

        return forge

    # -- put and get -----------------------------------------------------------------------------------------

    def _begin_put(self, flow: Flow, near: Worker, far: Worker, tokens: int, ready: list[Worker]) -> None:
        written = asyncio.Event()

        async def target(worker: Worker, flow: Flow) -> None:
            assert worker.client is not None
            region = await worker.client.alloc(512)
            try:
                async with await worker.client.share(region, flow.name, lease_s=TIMEOUT_S):
                    async with asyncio.timeout(TIMEOUT_S):
                        await written.wait()
                before = region.array.tobytes()
                await asyncio.sleep(0.05)
                assert region.array.tobytes() == before, "bytes moved after the descriptor was taken back"
            except TimeoutError:
                raise Stop from None
            finally:
                await region.release(drain=True)

        async def writer(worker: Worker, flow: Flow) -> None:
            try:
                await self._write(worker, flow, far)
            finally:
                written.set()

        self._part(flow, "target", far, target, 2 * TIMEOUT_S)
        self._part(flow, "writer", near, writer, 3 * TIMEOUT_S)

    async def _write(self, worker: Worker, flow: Flow, far: Worker) -> None:
        client = worker.client
        assert client is not None
        source = await client.alloc(512)
        back = await client.alloc(512)
        try:
            node = far.host.place
            found = await client.lookup(flow.name, node=node, wait_s=TIMEOUT_S, timeout=TIMEOUT_S)
            source.array[:] = np.frombuffer(Random(flow.number).randbytes(512), dtype=np.uint8)
            if self.trouble and self.rng.random() < 0.4:
                going = client.put(source, found, timeout=TIMEOUT_S)
                await asyncio.sleep(self.rng.random() * 0.001)
                await going.cancel()
                engine: Any = client.plane.engine
                live = [op for op in engine.ops.values() if op.region is not None and op.region.info.id == source.id]
                assert not live, "a transfer is still live after its cancel returned"
                assert going.done, "a transfer has no outcome after its cancel returned"
                return
            await client.put(source, found, timeout=TIMEOUT_S, visible=True)
            await self._refused(client.get(back, replace(found, generation=found.generation ^ 1), timeout=TIMEOUT_S))
            await client.get(back, found, timeout=TIMEOUT_S)
            assert back.array.tobytes() == source.array.tobytes(), "what was put is not what was got"
        finally:
            await source.release(drain=True)
            await back.release(drain=True)

    @staticmethod
    async def _refused(going: Transfer) -> None:
        """A descriptor of another generation of the region moves nothing."""
        try:
            await going
        except KvxferError:
            return
        raise AssertionError("a descriptor of another generation was served")

    # -- mail ------------------------------------------------------------------------------------------

    def _begin_mail(self, flow: Flow, near: Worker, far: Worker, tokens: int, ready: list[Worker]) -> None:
        count = self.rng.randrange(1, 4)

        async def send(worker: Worker, flow: Flow) -> None:
            assert worker.client is not None
            for index in range(count):
                await worker.client.send(far.host.place, flow.name, bytes([index]), timeout=TIMEOUT_S)

        async def receive(worker: Worker, flow: Flow) -> None:
            assert worker.client is not None
            got = [await worker.client.recv(flow.name, timeout=TIMEOUT_S) for _ in range(count)]
            wanted = [bytes([index]) for index in range(count)]
            assert got == wanted, f"mail came as {got}"

        self._part(flow, "send", near, send, count * TIMEOUT_S)
        self._part(flow, "receive", far, receive, count * TIMEOUT_S)

    # -- judging ------------------------------------------------------------------------------------------

    def unfinished(self) -> list[Part]:
        """Parts that still run in living processes."""
        parts = (part for flow in self.flows for part in flow.parts)
        return [part for part in parts if not part.outcome and part.worker.process.alive]


__all__ = ["Flow", "Part", "UsageError", "Work", "equip"]
