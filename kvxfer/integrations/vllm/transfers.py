"""What a worker does with its orders, on the event loop of kvxfer's client: keeps, pulls, pushes, offers, and tells.

A worker reads a mailbox of its node (its channel). There workers of decode engines ask for the tickets of a request,
say where they offered blocks, or that they do not want a request. A message and the order about the same request may
come in either order.

Every task here ends: pulls and landings at their deadline, kept blocks at the end of their lease. Only when the client
says that no byte can move any more are blocks given back.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvxfer import logs
from kvxfer.client import Client
from kvxfer.errors import (
    DaemonUnavailable,
    GeometryMismatch,
    KvxferError,
    LeaseExpired,
    RegionBusy,
    TransferCancelled,
    TransferTimeout,
    UsageError,
)
from kvxfer.geometry import BlockTable
from kvxfer.integrations.vllm.caches import Part
from kvxfer.integrations.vllm.orders import Orders, Receive, SendOrder, Stream, Table
from kvxfer.integrations.vllm.params import Rank, Remote, addresses
from kvxfer.integrations.vllm.results import RECEIVED, SENT, Moved, Results
from kvxfer.integrations.vllm.settings import PUSH, Settings
from kvxfer.memory.region import KVCache
from kvxfer.tasks import TaskOwner

logger = logs.logger("vllm.kvxfer")  # below vllm's own, so that its handler prints it

PAGE = 4096
EARLY_MAX = 4096  # requests of which others speak before the order about them is here
PROBE_AFTER_S = 0.02  # between two looks at blocks into which a transfer that failed may still write
MAIL_S = 5.0


@dataclass(slots=True, eq=False)
class Kept:
    """A request whose blocks others may fetch: what they were told, or will be, and where they offered memory."""

    tickets: asyncio.Future[list[str]]
    offers: asyncio.Future[list[str]]
    dropped: bool = False
    task: asyncio.Task[None] | None = None


@dataclass(slots=True, eq=False)
class Receiving:
    """Blocks that are being filled: by which task, and the tickets that it got, a list from each worker."""

    task: asyncio.Task[bool]
    tickets: list[list[str]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Streaming:
    """A prompt whose layers are written while they are computed: the layers that are ready, by number."""

    ready: asyncio.Queue[tuple[int, int]] = field(default_factory=asyncio.Queue)
    silent: bool = False  # its blocks were taken away: nobody waits for a word about them
    task: asyncio.Task[None] | None = None


class Transfers:
    """All transfers of one worker. Everything but `Results` belongs to the loop."""

    def __init__(
        self,
        client: Client,
        settings: Settings,
        parts: Sequence[Part],
        *,
        channel: str,
        rank: int,
        results: Results,
    ) -> None:
        self._client = client
        self._settings = settings
        self._parts = tuple(parts)
        self._places = {
            name: (number, layer) for number, part in enumerate(parts) for layer, name in enumerate(part.layers)
        }
        self._channel = channel
        self._rank = rank
        self._results = results
        self._tasks = TaskOwner(f"transfers of {channel}")
        self._kept: dict[str, Kept] = {}
        self._streams: dict[str, Streaming] = {}
        self._receiving: dict[str, Receiving] = {}

    @property
    def rank(self) -> Rank:
        """Where this worker is, for others."""
        return Rank(node=self._client.addresses, channel=self._channel)

    async def start(self) -> None:
        """Read the mailbox from now on, and show that this worker lives."""
        live = await self._client.alloc(PAGE)
        share = await self._client.share(live, self._channel, "r", lease_s=self._settings.lease_s)
        self._tasks.spawn(self._read_mail(share), "read the mailbox")

    async def aclose(self) -> None:
        """End everything, and wait for it."""
        await self._tasks.aclose()

    # -- orders ----------------------------------------------------------------------------------------------------

    def follow(self, orders: Orders) -> None:
        """Begin what the scheduler's orders say."""
        for request_id, send in orders.send.items():
            kept = self._about(request_id)
            kept.task = self._tasks.spawn(self._keep(request_id, send, kept), f"keep {request_id}")
            kept.task.add_done_callback(partial(self._kept_over, request_id, kept))
        for request_id, receive in orders.receive.items():
            task = self._tasks.run(self._receive(request_id, receive), f"get {request_id}")
            task.add_done_callback(partial(self._receive_over, request_id, receive))
            self._receiving[request_id] = Receiving(task)
        for request_id, stream in orders.stream.items():
            streaming = self._streams[request_id] = Streaming()
            streaming.task = self._tasks.spawn(self._stream(request_id, stream, streaming), f"stream {request_id}")
            streaming.task.add_done_callback(partial(self._stream_over, request_id, streaming))
        for request_id in orders.cancelled:
            if (running := self._streams.get(request_id)) and running.task:
                running.task.cancel()
        for remote in orders.dropped:
            self._tasks.spawn(self._drop(remote), f"drop {remote.request_id}")

    def stop(self, request_ids: set[str]) -> None:
        """These requests are over here: what is received for them ends now. Their end is reported as any other."""
        for request_id in request_ids:
            if found := self._receiving.get(request_id):
                found.task.cancel()

    async def stop_streams(self, request_ids: set[str]) -> None:
        """The blocks of these requests are about to be written anew: returns when nobody reads them."""
        tasks = []
        for request_id in request_ids:
            if (stream := self._streams.get(request_id)) and stream.task:
                stream.silent = True
                stream.task.cancel()
                tasks.append(stream.task)
        if tasks:
            await asyncio.wait(tasks)

    def layer_ready(self, name: str) -> None:
        """The step that runs has written this layer, for every request that it computes."""
        if name not in self._places:
            return
        group, layer = self._places[name]
        for stream in self._streams.values():
            stream.ready.put_nowait((group, layer))

    def _about(self, request_id: str) -> Kept:
        found = self._kept.get(request_id)
        if found is None:
            loop = asyncio.get_running_loop()
            found = self._kept[request_id] = Kept(loop.create_future(), loop.create_future())
        return found

    # -- prefill: blocks are kept until they were fetched ------------------------------------------------------------

    async def _keep(self, request_id: str, send: SendOrder, kept: Kept) -> None:
        started = asyncio.get_running_loop().time()
        try:
            if kept.dropped:
                return
            if send.mode == PUSH:
                await self._push_kept(send, kept)
            else:
                await self._publish(request_id, send, kept)
            seconds = asyncio.get_running_loop().time() - started
            self._results.moved(
                Moved(way=SENT, bytes=self._bytes(send.tables), tokens=_tokens(send.tables), seconds=seconds)
            )
        except asyncio.CancelledError:
            if not kept.dropped:
                raise
        except LeaseExpired as error:
            logger.warning("request %s: nobody fetched its blocks within %g s", request_id, self._settings.lease_s)
            self._results.expired()
            self._results.failure(error.code)
        except KvxferError as error:
            self._failed("handing over", request_id, error)

    # A task that is cancelled before its first step never runs: what must happen in any case hangs on its end.
    def _kept_over(self, request_id: str, kept: Kept, task: asyncio.Task[None]) -> None:
        self._kept.pop(request_id, None)
        kept.tickets.cancel()
        kept.offers.cancel()
        self._results.sent(request_id)

    async def _publish(self, request_id: str, send: SendOrder, kept: Kept) -> None:
        publications, tickets = [], [""] * len(self._parts)
        async with AsyncExitStack() as stack:
            for group, cache, table in self._shares(send.tables):
                made = self._client.publish(f"{request_id}/{group}", cache, table, lease_s=self._settings.lease_s)
                publications.append(await stack.enter_async_context(made))
                tickets[group] = made.to_json()
            kept.tickets.set_result(tickets)
        for one in publications:
            if one.outcome == "expired":
                raise LeaseExpired(f"nobody fetched {request_id}")
            if one.error is not None:
                raise one.error

    async def _push_kept(self, send: SendOrder, kept: Kept) -> None:
        try:
            async with asyncio.timeout(self._settings.lease_s):
                offers = await kept.offers
        except TimeoutError:
            raise LeaseExpired("nobody said where the blocks are wanted") from None
        parts = list(self._shares(send.tables))
        if len(offers) != len(parts):
            raise UsageError("as many offers as groups of layers are needed", value=len(offers), limit=len(parts))
        for ticket, (_, cache, table) in zip(offers, parts, strict=True):
            async with self._client.push(ticket, cache=cache, table=table, timeout=self._settings.timeout_s) as push:
                await push.layers()

    async def _stream(self, request_id: str, stream: Stream, streaming: Streaming) -> None:
        started = asyncio.get_running_loop().time()
        meeting, limit = stream.meeting, self._settings.timeout_s
        try:
            async with AsyncExitStack() as stack:
                pushes: dict[int, list[Any]] = {}
                for rank in self._ranks_in_common(meeting.ranks):
                    for group, cache, table in self._shares(stream.tables):
                        push = self._client.push(
                            f"{meeting.transfer_id}/{rank}/{group}",
                            to=meeting.node,
                            cache=cache,
                            table=table,
                            wait_s=limit,
                            timeout=limit,
                        )
                        pushes.setdefault(group, []).append(await stack.enter_async_context(push))
                for _ in range(sum(self._parts[group].cache.layout.geometry.layers for group in pushes)):
                    group, layer = await self._next_layer(streaming, pushes)
                    for push in pushes[group]:
                        await push.layer(layer)
            seconds = asyncio.get_running_loop().time() - started
            size = sum(push.bytes_done for several in pushes.values() for push in several)
            self._results.moved(Moved(way=SENT, bytes=size, tokens=_tokens(stream.tables), seconds=seconds))
        except KvxferError as error:
            self._failed("streaming", request_id, error)

    def _stream_over(self, request_id: str, streaming: Streaming, task: asyncio.Task[None]) -> None:
        self._streams.pop(request_id, None)
        if not streaming.silent:
            self._results.sent(request_id)

    async def _next_layer(self, streaming: Streaming, pushes: dict[int, list[Any]]) -> tuple[int, int]:
        while True:
            group, layer = await streaming.ready.get()
            if group in pushes:
                return group, layer

    def _ranks_in_common(self, ranks: int) -> range:
        """The decode workers that hold heads which this worker has, when they share the heads evenly."""
        geometry = self._parts[0].cache.layout.geometry
        held, total = geometry.head_numbers, geometry.kv_heads_total
        return range(held.start * ranks // total, (held.stop * ranks - 1) // total + 1)

    # -- decode ------------------------------------------------------------------------------------------------------

    async def _receive(self, request_id: str, receive: Receive) -> bool:
        """Whether all blocks are filled."""
        started = asyncio.get_running_loop().time()
        try:
            if receive.refused:
                raise UsageError(receive.refused)
            if self._client.unready:
                raise DaemonUnavailable(f"this worker cannot receive: {self._client.unready}")
            async with asyncio.timeout(self._settings.timeout_s):
                size = await self._fetch(request_id, receive)
        except TimeoutError as late:
            told = late if isinstance(late, KvxferError) else TransferTimeout("the blocks did not come in time")
            self._failed("receiving", request_id, told)
            return False
        except KvxferError as error:
            self._failed("receiving", request_id, error)
            return False
        seconds = asyncio.get_running_loop().time() - started
        self._results.moved(Moved(way=RECEIVED, bytes=size, tokens=_tokens(receive.tables), seconds=seconds))
        return True

    def _receive_over(self, request_id: str, receive: Receive, task: asyncio.Task[bool]) -> None:
        found = self._receiving.pop(request_id)
        if task.cancelled():
            self._failed("receiving", request_id, TransferCancelled("the request was aborted"))
        elif task.exception() is None and task.result():
            self._results.received(request_id)
            return
        self._report_when_quiet(request_id, list(self._shares(receive.tables)))
        if receive.remote is not None and not self._client.closed:
            self._tasks.spawn(self._give_up(receive.remote, found.tickets), f"give up {request_id}")

    async def _fetch(self, request_id: str, receive: Receive) -> int:
        """Have the blocks filled; how many bytes that took."""
        if receive.meeting is not None:
            return await self._land(f"{receive.meeting.transfer_id}/{self._rank}", receive, None)
        assert receive.remote is not None
        if receive.remote.mode == PUSH:
            return await self._land(f"{request_id}/{self._rank}", receive, receive.remote)
        return await self._pull(receive, receive.remote, self._receiving[request_id].tickets)

    async def _pull(self, receive: Receive, remote: Remote, tickets: list[list[str]]) -> int:
        size = 0
        for rank in remote.ranks:
            await self._require_alive(rank)
            tickets.append(await self._ask_for_tickets(rank, remote.request_id))
        for group, cache, table in self._shares(receive.tables):
            found = [several[group] for several in tickets if several[group]]
            if not found:
                raise GeometryMismatch(
                    "prefill holds nothing of some layers that are wanted", field="cache", value=group
                )
            pulled = await self._client.pull(found, cache, table, timeout=self._settings.timeout_s)
            size += pulled.bytes
        return size

    async def _give_up(self, remote: Remote, tickets: Sequence[Sequence[str]]) -> None:
        """Prefill must not keep the blocks until its lease ends."""
        for several in tickets:
            for ticket in filter(None, several):
                await self._said(self._client.release(ticket, timeout=MAIL_S), f"release {remote.request_id}")
        await self._drop(remote)

    async def _require_alive(self, rank: Rank) -> None:
        """Raises at once when the worker that should answer has died."""
        await self._client.lookup(rank.channel, node=rank.node, timeout=MAIL_S)

    async def _ask_for_tickets(self, rank: Rank, request_id: str) -> list[str]:
        reply = f"vllm/{uuid.uuid4().hex}"
        await self._tell(rank, do="tickets", request=request_id, node=list(self._client.addresses), reply=reply)
        answer = json.loads(await self._client.recv(reply, timeout=self._settings.timeout_s))
        found = answer.get("tickets") if isinstance(answer, dict) else None
        groups = len(self._parts)
        if not isinstance(found, list) or len(found) != groups or not all(isinstance(one, str) for one in found):
            raise UsageError("prefill answered with other tickets than one for each group of layers", limit=groups)
        return found

    async def _land(self, name: str, receive: Receive, remote: Remote | None) -> int:
        """Offer the blocks, tell prefill of it unless it knows, and wait until they are filled."""
        limit, landings = self._settings.timeout_s, []
        async with AsyncExitStack() as stack:
            for group, cache, table in self._shares(receive.tables):
                landing = self._client.offer(
                    f"{name}/{group}",
                    cache,
                    table,
                    lease_s=limit,
                    timeout=limit,
                    sources=None if remote is None else len(remote.ranks),
                    private=remote is not None,
                )
                landings.append(await stack.enter_async_context(landing))
            if remote is not None:
                offers = [landing.ticket.to_json() for landing in landings]
                for rank in remote.ranks:
                    await self._require_alive(rank)
                    await self._tell(rank, do="offers", request=remote.request_id, offers=offers)
            for landing in landings:
                await landing.wait()
        return self._bytes(receive.tables)

    def _report_when_quiet(self, request_id: str, parts: Sequence[tuple[int, KVCache, BlockTable]]) -> None:
        """The engine may use the blocks for something else as soon as it hears of the failure."""
        if self._client.closed:
            return
        if not all(self._needs_probe(cache, table) for _, cache, table in parts):
            asyncio.get_running_loop().call_later(PROBE_AFTER_S, self._report_when_quiet, request_id, parts)
            return
        blocks = {int(block) for _, _, table in parts for block in table.blocks}
        self._results.received(request_id, failed=True, blocks=blocks)

    def _needs_probe(self, cache: KVCache, table: BlockTable) -> bool:
        try:
            taken = self._client.reservations.acquire([(cache.footprint, table)], "a look")
        except RegionBusy:
            return False
        except KvxferError:
            return True  # a table that makes no sense was never written to
        self._client.reservations.release(taken)
        return True

    async def _drop(self, remote: Remote) -> None:
        for rank in remote.ranks:
            await self._said(self._tell(rank, do="drop", request=remote.request_id), f"drop {remote.request_id}")

    # -- mail --------------------------------------------------------------------------------------------------------

    async def _tell(self, rank: Rank, **what: Any) -> None:
        await self._client.send(rank.node, rank.channel, json.dumps(what).encode(), timeout=MAIL_S)

    async def _said(self, telling: Awaitable[None], what: str) -> None:
        """Something that the other side would also find out by itself, later."""
        try:
            await telling
        except KvxferError as error:
            logger.debug("not told (%s): %s", what, error)

    async def _read_mail(self, share: Any) -> None:
        lease = self._settings.lease_s
        renew_at = asyncio.get_running_loop().time() + lease / 3
        while True:
            try:
                if asyncio.get_running_loop().time() > renew_at:
                    await share.renew(lease)
                    renew_at = asyncio.get_running_loop().time() + lease / 3
                message = await self._client.recv(self._channel, timeout=lease / 6)
            except TransferTimeout:
                continue
            except KvxferError as error:
                if self._client.closed:
                    return
                logger.warning("the mailbox %s cannot be read now: %s", self._channel, error)
                await asyncio.sleep(MAIL_S / 5)
                continue
            try:
                self._take(message)
            except (KvxferError, ValueError, RecursionError) as error:
                logger.warning("a message that makes no sense was ignored: %s", error)

    def _take(self, message: bytes) -> None:
        said = json.loads(message)
        if not isinstance(said, dict) or not isinstance(said.get("request"), str):
            raise UsageError("a message names a request")
        request_id = said["request"]
        if request_id not in self._kept:
            if len(self._kept) >= EARLY_MAX:
                raise UsageError("too many requests that are not known here", limit=EARLY_MAX)
            asyncio.get_running_loop().call_later(self._settings.timeout_s, self._forget_early, self._about(request_id))
        kept = self._about(request_id)
        _ANSWERS.get(str(said.get("do")), Transfers._unknown)(self, request_id, kept, said)

    def _forget_early(self, kept: Kept) -> None:
        """Somebody spoke of a request that never came."""
        for request_id, found in tuple(self._kept.items()):
            if found is kept and kept.task is None:
                del self._kept[request_id]
                kept.tickets.cancel()
                kept.offers.cancel()

    def _unknown(self, request_id: str, kept: Kept, said: dict[str, Any]) -> None:
        raise UsageError(f"nobody knows how to {str(said.get('do'))[:20]} a request")

    def _dropped(self, request_id: str, kept: Kept, said: dict[str, Any]) -> None:
        kept.dropped = True
        if kept.task is not None:
            kept.task.cancel()

    def _offered(self, request_id: str, kept: Kept, said: dict[str, Any]) -> None:
        offers = said.get("offers")
        if not isinstance(offers, list) or not all(isinstance(one, str) for one in offers):
            raise UsageError("offers are a list of tickets")
        if not kept.offers.done():
            kept.offers.set_result(offers)

    def _asked(self, request_id: str, kept: Kept, said: dict[str, Any]) -> None:
        reply = said.get("reply")
        if not isinstance(reply, str):
            raise UsageError("who asks for tickets says where the answer goes")
        node = addresses(said.get("node"))
        self._tasks.spawn(self._answer(kept, node, reply), f"answer about {request_id}")

    async def _answer(self, kept: Kept, node: tuple[str, ...], reply: str) -> None:
        try:
            tickets = await asyncio.shield(kept.tickets)
        except asyncio.CancelledError:
            if kept.tickets.cancelled():
                return  # the request is over, or was never here: who asked has a deadline
            raise
        telling = self._client.send(node, reply, json.dumps({"tickets": tickets}).encode(), timeout=MAIL_S)
        await self._said(telling, f"answer to {reply}")

    # -- helpers -----------------------------------------------------------------------------------------------------

    def _shares(self, tables: Sequence[Table]) -> list[tuple[int, KVCache, BlockTable]]:
        """What an order is about, in each cache that holds some of it: the cache's number, itself, and the table."""
        found = [(number, part.cache, part.table(tables)) for number, part in enumerate(self._parts)]
        return [share for share in found if share[2].tokens]

    def _bytes(self, tables: Sequence[Table]) -> int:
        geometries = ((cache.layout.geometry, table.tokens) for _, cache, table in self._shares(tables))
        return sum(tokens * geometry.bytes_per_token * geometry.layers for geometry, tokens in geometries)

    def _failed(self, what: str, request_id: str, error: KvxferError) -> None:
        logger.warning("%s of request %s failed: %s: %s", what, request_id, error.code, error)
        self._results.failure(error.code)


def _tokens(tables: Sequence[Table]) -> int:
    return max((table.tokens for table in tables), default=0)


_ANSWERS: dict[str, Callable[[Transfers, str, Kept, dict[str, Any]], None]] = {
    "tickets": Transfers._asked,
    "offers": Transfers._offered,
    "drop": Transfers._dropped,
}
