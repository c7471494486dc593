"""The data plane as asyncio sees it: transfers over one engine, each with exactly one outcome.

Once a descriptor is resolved (`connections.py`) a transfer is one call into the engine. What stands here is the order
of things: who may go now (`admission.py`), who waits because the engine is full, and who is told when it is over. How
peers reach our own memory is in `exports.py`. Decisions that C has to make (bounds, keys, pins, exactly-once) are made
there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from kvxfer.config import Config
from kvxfer.dataplane.admission import Admission, SubmitQueue, WindowLimit, WindowSlot, rank_of
from kvxfer.dataplane.connections import ConnectionManager, Import, TransportSelection, stale
from kvxfer.dataplane.exports import LocalMemory, UnexpectedCounts
from kvxfer.dataplane.transfer import StallWatch, Transfer, TransferGroup
from kvxfer.descriptors import RemoteDescriptor
from kvxfer.errors import (
    BusyError,
    ClosedError,
    KvxferError,
    PeerLost,
    PeerUnreachable,
    Revoked,
    StaleDescriptor,
    TransferCancelled,
    UnknownRegion,
    UnknownTransfer,
    UsageError,
)
from kvxfer.native.engine import DRAIN_MAX, Engine, Event, EventKind, OpKind, TransportInfo
from kvxfer.native.status import StatusCode, error_for
from kvxfer.native.types import MemoryKind, Priority
from kvxfer.tasks import CONNECTING, NOTIFYING, ROOM, TRANSFERRING, TaskOwner, in_thread

Segments = npt.NDArray[np.uint64]
DRAINS_MAX = 256  # in a row; a flood of notifications must not hold the loop
RESOLVES_MAX = 3
SMALL_BYTES_MAX = 32 << 10


@dataclass(slots=True, kw_only=True)
class WorkRequest:
    """One submit: a local region, a remote descriptor, and segments (n, 3) [local, remote, length] or a single span."""

    kind: OpKind
    region: int
    descriptor: RemoteDescriptor
    segments: Segments | None = None
    span: tuple[int, int, int] | None = None
    notify: tuple[int, int] | None = None
    check: bool = False
    number: int | None = None  # among the several parts of a transfer: named in errors
    moves: int | None = None  # bytes of the segments, where they are known

    @property
    def size(self) -> int:
        """How many bytes this work request moves."""
        if self.span is not None:
            return self.span[2]
        if self.moves is None:
            self.moves = 0 if self.segments is None else int(self.segments[:, 2].sum())
        return self.moves


@dataclass(slots=True, eq=False)
class PendingWork:
    """A part on its way into the engine: the import that it uses, and its place in the peer's window (if any)."""

    plane: DataPlane
    transfer: Transfer
    part: WorkRequest
    ready: Import
    slot: WindowSlot | None = None
    lost: KvxferError | None = None  # the connection of its first attempt ended before anything had moved
    rank: int = 0  # set before it waits anywhere, see `admission.rank_of`

    def __call__(self, event: Event) -> None:
        """The engine has completed it."""
        self.plane.completed(self, event)


def may_retry(part: WorkRequest, error: KvxferError, unsent: bool) -> bool:
    """Whether this part may go once more, over another connection, without anybody being able to tell.

    A get only reads: once its connection has ended nothing of it arrives any more. Of a put nothing may have left: what
    did leave could still be written, after the second attempt and whatever followed it (docs/reliability.md).
    """
    if not isinstance(error, PeerLost) and not (unsent and isinstance(error, UnknownRegion)):
        return False
    return unsent or error.status == StatusCode.NOT_SENT or (part.kind == OpKind.GET and part.notify is None)


class DataPlane:
    """The transfers of one engine. All methods belong to the loop's thread."""

    def __init__(
        self,
        engine: Engine,
        config: Config,
        *,
        node_id: str,
        incarnation: str,
        advertise: Sequence[str],
        allowed: Sequence[str] | None = None,
    ) -> None:
        self.engine = engine
        self.timeout_s = config.timeout_s  # of what belongs to this plane, and names none
        self.engine_id = engine.engine_id.hex()
        self._tasks = TaskOwner("data plane")
        self._connections = ConnectionManager(engine, self._tasks, allowed, config=config)
        self._needs_probe = self._connections.quiet.needs_probe  # asked for each transfer
        self._now = asyncio.get_running_loop().time
        self._queue: SubmitQueue[PendingWork] = SubmitQueue(Admission(config))
        # What is copied at once is never in flight; what a socket takes is, so only a little of it passes the window.
        self._small_bytes = {
            info.name: config.inline_bytes_max if info.same_host else min(config.inline_bytes_max, SMALL_BYTES_MAX)
            for info in engine.transports
        }
        self._window_bytes = min(config.window_bytes_max, config.inflight_bytes_max)
        self._workers: dict[Transfer, set[asyncio.Task[None]]] = {}
        self._by_region: dict[int, set[Transfer]] = {}
        self._next_op = 0
        self._closing = False
        self._closed = False
        self.unexpected = UnexpectedCounts()
        self.memory = LocalMemory(
            engine, node_id=node_id, incarnation=incarnation, advertise=advertise, unexpected=self.unexpected
        )
        self.stalls = StallWatch(config.stall_s, lambda count: None if self._closed else engine.note_stalled(count))
        engine.attach(asyncio.get_running_loop(), self._on_event)

    @property
    def unexpected_notifications(self) -> int:
        """Notices of peers that fitted nothing; `unexpected` has them by type and reason."""
        return self.unexpected.total

    @property
    def choices(self) -> Mapping[tuple[str, str], TransportSelection]:
        """Per engine id and pair of memories: which transport was chosen, and why better ones were passed over."""
        return self._connections.choices

    @property
    def connections_evicted(self) -> int:
        """How many idle connections were given up because descriptors or `peers_max` were used up."""
        return self._connections.idle.evicted

    @property
    def permits(self) -> int:
        """How many places in windows are held or waited for; none when no transfer runs."""
        return self._queue.admission.inflight_ops + len(self._queue)

    def off_loop(self, work: Callable[[Engine], None], what: str) -> asyncio.Task[None]:
        """Run what blocks (copies of memory that only a driver reaches) in a thread."""
        return self._tasks.run(in_thread(work, self.engine), what)

    def region_transfers(self, region: int) -> list[int]:
        """Numbers of the transfers of this process that use a region."""
        return sorted(transfer.op_id for transfer in self._by_region.get(region, ()))

    async def drain_region(self, region: int) -> None:
        """Wait until no transfer of this process uses a region."""
        while users := self._by_region.get(region):
            await next(iter(users)).wait_settled()

    # -- transfers --------------------------------------------------------------------------------------

    def group(self, timeout: float) -> TransferGroup:
        """For transfers of one request, which are over ``timeout`` seconds from now."""
        return TransferGroup(self.stalls, self._progress, timeout)

    def start(
        self,
        parts: Sequence[WorkRequest],
        *,
        timeout: float,
        peer: str,
        priority: int = Priority.NORMAL,
        group: TransferGroup | None = None,
    ) -> Transfer:
        """Begin a transfer of one or more parts. Errors of the call itself raise; all others are the transfer's
        outcome. One of a ``group`` has the deadline of the group.
        """
        if self._closing:
            raise ClosedError("the data plane is closed")
        self._next_op += 1
        transfer = Transfer(self, op_id=self._next_op, peer=peer, parts=len(parts), priority=priority)
        for number, part in enumerate(parts):
            part.number = number if len(parts) > 1 else None
            if part.span is None and part.segments is None:
                transfer.notify_only = True
            descriptor = part.descriptor
            ready = self._connections.ready(descriptor, self.memory.kinds.get(part.region), part.check)
            if ready is not None and (ready.connection.info.same_host or not self._needs_probe(ready.connection)):
                self._admit(PendingWork(self, transfer, part, ready))
            else:
                self._resolve_first(transfer, part)
        if not transfer.settled:
            self._pin(transfer, parts)
            if group is None:
                transfer.arm(timeout, asyncio.get_running_loop())
                self.stalls.begin(transfer, partial(self._progress, transfer))
                transfer.on_settled(self.stalls.end)
            else:
                group.add(transfer)
                transfer.on_settled(group.remove)
        return transfer

    async def prepare(
        self, descriptor: RemoteDescriptor, local: MemoryKind | None = None, *, check: bool = False
    ) -> TransportInfo:
        """Connect and import ahead of the first transfer; tells which transport will carry it.

        ``local``: the kind of our memory in that transfer; ``check``: it will be checksummed. None stands for
        whatever the first transport that reaches the remote memory moves.
        """
        return (await self._connections.resolve(descriptor, local, check)).connection.info

    def drop_import(self, descriptor: RemoteDescriptor) -> None:
        """Let go of an import that will not be used again, once nothing runs over it."""
        if not self._closed:
            self._connections.drop_import(descriptor)

    def late(self) -> None:
        """See `transfer.Canceller`."""
        if not self._closed:
            self.engine.note_late()

    def _progress(self, transfer: Transfer) -> int | None:
        """How far it is, while it is with the engine or on its way to the peer; None while it waits for its turn."""
        if transfer.tokens:
            return transfer.bytes_done
        return 0 if transfer in self._workers else None

    def progress(self, token: int) -> int:
        """See `transfer.Canceller`."""
        return 0 if self._closed else self.engine.progress(token)

    def cancel_token(self, token: int) -> None:
        """See `transfer.Canceller`."""
        if not self._closed:
            self.engine.cancel(token)

    def cancel_waiting(self, transfer: Transfer) -> None:
        """Parts that have not reached the engine end now."""
        for task in tuple(self._workers.get(transfer, ())):
            task.cancel()
        self._give_up(self._queue.of(transfer), transfer.cancelling)
        self._run_queue()

    def _give_up(self, works: Sequence[PendingWork], error: KvxferError | None) -> None:
        """Work that waits will not reach the engine. Whoever may go instead goes afterwards."""
        for work in works:
            if self._queue.leave(work):
                self._release_use(work.ready)
                work.transfer.part_ended(None, 0, error)

    def blocked_by(self, transfer: Transfer) -> WindowLimit | None:
        """See `transfer.Canceller`."""
        return None if transfer.tokens or transfer in self._workers else self._queue.blocked_by(transfer)

    def stage(self, transfer: Transfer) -> str:
        """Where a running transfer is, for the error of its deadline."""
        if transfer.tokens:
            return NOTIFYING if transfer.notify_only else TRANSFERRING
        return CONNECTING if transfer in self._workers else ROOM

    def drain(self) -> None:
        """Take what is in the completion ring now."""
        if not self._closed:
            for _ in range(DRAINS_MAX):
                if self.engine.drain() < DRAIN_MAX:
                    return

    def _resolve_first(self, transfer: Transfer, part: WorkRequest, lost: KvxferError | None = None) -> None:
        work = self._resolve_and_submit(transfer, part, lost)
        task = self._tasks.spawn(work, f"resolve grant {part.descriptor.grant}")
        self._workers.setdefault(transfer, set()).add(task)
        task.add_done_callback(partial(self._worker_ended, transfer))

    def _worker_ended(self, transfer: Transfer, task: asyncio.Task[None]) -> None:
        tasks = self._workers.get(transfer)
        if tasks is not None:
            tasks.discard(task)
            if not tasks:
                del self._workers[transfer]
        if task.cancelled():  # perhaps before its first step: nothing inside it could have noticed
            closing = ClosedError("the data plane was closed", op_id=transfer.op_id)
            transfer.part_ended(None, 0, transfer.cancelling or closing)

    async def _resolve_and_submit(self, transfer: Transfer, part: WorkRequest, lost: KvxferError | None) -> None:
        try:
            ready = await self._resolve(part.descriptor, self.memory.kinds.get(part.region), part.check)
        except KvxferError as error:
            # That nobody answers there any more says less than how the connection ended.
            says_less = lost is not None and isinstance(error, PeerUnreachable | PeerLost)
            transfer.part_ended(None, 0, lost if says_less else error)
        else:
            self._admit(PendingWork(self, transfer, part, ready, lost=lost))

    async def _resolve(
        self, descriptor: RemoteDescriptor, local: MemoryKind | None, check: bool = False, mapped: bool = False
    ) -> Import:
        """An import that is live now: it may have gone again before its waiter had its turn."""
        for _ in range(RESOLVES_MAX):
            found = await self._connections.resolve(descriptor, local, check, mapped)
            if self._connections.is_live(found):
                return found
        raise PeerLost("the connection ends as soon as it is made", peer=descriptor.node_id)

    def _admit(self, work: PendingWork) -> None:
        """Small parts go straight in; larger ones take their place in the peer's window or wait in line for it."""
        size = work.part.size
        if size > self._small_bytes[work.ready.connection.info.name]:
            if work.transfer.cancelling is not None:  # an earlier part failed at once: this one must not wait
                work.transfer.part_ended(None, 0, work.transfer.cancelling)
                return
            peer = work.ready.connection.engine_id
            now = self._now()
            work.rank = rank_of(work.transfer.priority, size)
            try:
                # A part larger than the window has the window for itself.
                admitted = self._queue.enter(work, peer, min(size, self._window_bytes), now)
            except KvxferError as error:
                work.transfer.part_ended(None, 0, error)
                return
            if not admitted:
                work.ready.users += 1
                return
        if self._queue.engine_full and work.transfer.cancelling is None:
            self._wait_for_engine(work)
        else:
            self._submit(work)

    def _wait_for_engine(self, work: PendingWork) -> None:
        work.ready.users += 1
        work.rank = rank_of(work.transfer.priority, work.part.size)
        self._queue.wait_for_engine(work)

    def _submit(self, work: PendingWork) -> None:
        transfer, part, ready = work.transfer, work.part, work.ready
        if transfer.cancelling is not None:
            self._end(work, None, 0, transfer.cancelling)
            return
        transfer.transport, transfer.address = ready.connection.info.name, ready.connection.endpoint
        try:
            if part.span is not None:
                local, remote, length = part.span
                result = self.engine.submit_one(
                    part.kind,
                    part.region,
                    ready.handle,
                    local,
                    remote,
                    length,
                    part.notify,
                    part.check,
                    transfer.priority,
                    work,
                )
            else:
                result = self.engine.submit(
                    *(part.kind, part.region, ready.handle, part.segments, part.notify, part.check),
                    priority=transfer.priority,
                    then=work,
                )
        except BusyError:
            self._wait_for_engine(work)
            return
        except UnknownRegion as error:
            # Either our region is gone, or the import: its connection ended, and the news is still in the ring.
            self._connections.drop(ready)
            self._end(work, None, 0, error, unsent=True)
            return
        except (KvxferError, OverflowError, TypeError) as error:
            wrong = error if isinstance(error, KvxferError) else UsageError(f"an argument does not fit: {error}")
            self._end(work, None, 0, wrong, unsent=True)
            return
        if isinstance(result, Event):
            self._finish(work, None, result)
            return
        ready.users += 1
        transfer.add_token(result[0])

    def completed(self, work: PendingWork, event: Event) -> None:
        """What the engine says of work that it took."""
        ready = work.ready
        if event.status == 0 and not ready.connection.info.same_host:  # those are never asked
            ready.connection.heard = self._now()
        self._release_use(ready)
        self._finish(work, event.token, event)
        self._queue.retry(self._resubmit)

    def _release_use(self, ready: Import) -> None:
        ready.users -= 1
        if ready.users:
            return
        if ready.unwanted and not self._closed:
            self._connections.left(ready)
        if self._connections.idle.has_waiters:
            self._connections.idle.wake_next()

    def _end(
        self, work: PendingWork, token: int | None, moved_bytes: int, error: KvxferError | None, *, unsent: bool = False
    ) -> None:
        """One part is over: its place in the window goes to whoever is next. ``unsent``: the engine did not take it."""
        if work.slot is not None:
            self._queue.ended(work)
        if error is not None and error is not work.transfer.cancelling and work.part.number is not None:
            error.fields.setdefault("part", work.part.number)
        if error is None or not self._retry_elsewhere(work, token, moved_bytes, error, unsent):
            work.transfer.part_ended(token, moved_bytes, error)
        if self._queue.going:
            self._run_queue()

    def _retry_elsewhere(
        self, work: PendingWork, token: int | None, moved_bytes: int, error: KvxferError, unsent: bool
    ) -> bool:
        """A transport that found out only now that it cannot do this, before it moved a byte: the next one is tried.
        A connection that ended before anything of it moved: another one, once.
        """
        if moved_bytes or work.transfer.done or work.transfer.cancelling is not None or self._closing:
            return False
        if error.status == StatusCode.UNSUPPORTED:
            self._connections.reject_transport(work.ready, error.message)
        elif work.lost is None and may_retry(work.part, error, unsent):
            self._connections.lost(work.ready)
            work.lost = error
        else:
            return False
        work.transfer.token_ended(token)
        work.transfer.attempt += 1
        self._resolve_first(work.transfer, work.part, work.lost)
        return True

    def _run_queue(self) -> None:
        """Whoever may go now goes, unless the end of everything has begun."""
        if not self._closed:
            self._queue.run(self._resubmit)

    def _resubmit(self, work: PendingWork) -> None:
        """A part that waited goes on; its import may have gone meanwhile."""
        work.ready.users -= 1
        self._submit(work)
        if work.ready.unwanted and not self._closed:
            self._connections.left(work.ready)

    def _finish(self, work: PendingWork, token: int | None, event: Event) -> None:
        if event.status == 0:
            if work.slot is not None:
                self._queue.ended(work)
            work.transfer.part_ended(token, event.bytes, None)
            if self._queue.going:
                self._run_queue()
            return
        transfer, ready = work.transfer, work.ready
        error = error_for(
            event.status,
            sys_errno=event.sys_errno,
            op_id=transfer.op_id,
            peer=transfer.peer,
            transport=ready.connection.info.name,
            segment=event.segment if event.segment >= 0 else None,
        )
        error = stale(error)
        if isinstance(error, Revoked | UnknownTransfer | StaleDescriptor) and self._connections.is_live(ready):
            self._connections.drop(ready)
        if isinstance(error, TransferCancelled) and transfer.cancelling is not None:
            error = transfer.cancelling
        self._end(work, token, event.bytes, error)

    def _pin(self, transfer: Transfer, parts: Sequence[WorkRequest]) -> None:
        regions = {part.region for part in parts if part.region}
        for region in regions:
            self._by_region.setdefault(region, set()).add(transfer)
        transfer.on_settled(partial(self._unpin, regions))

    def _unpin(self, regions: set[int], transfer: Transfer) -> None:
        for region in regions:
            users = self._by_region.get(region)
            if users is not None:
                users.discard(transfer)
                if not users:
                    del self._by_region[region]

    # -- looking at a peer's memory in place ------------------------------------------------------------------

    async def resolve_mapped(self, descriptor: RemoteDescriptor) -> Import:
        """The import of memory that is to be looked at; stays until `unmap`."""
        found = await self._resolve(descriptor, None, mapped=True)
        found.users += 1
        return found

    def pin_mapped(self, found: Import) -> None:
        """It is a device's: nothing but `unmap` ends what is mapped."""
        self._connections.pin(found)

    def unmap(self, found: Import) -> None:
        """Nobody may look at it any more."""
        if found.pinned and not self._closed:
            self._connections.unpin(found)
        found.unwanted = True
        self._release_use(found)

    # -- events -------------------------------------------------------------------------------------------

    def _on_event(self, event: Event) -> None:
        if event.kind == EventKind.PEER_DOWN:
            self._connections.peer_down(event.id)
        else:
            self.memory.on_event(event)

    async def aclose(self) -> None:
        """Cancel what runs, close the engine: every token completes, every thread and mapping goes.

        Raises `InternalError` when something is still counted as in flight then: that is a bug of ours.
        """
        if self._closed:
            return
        self._closing = True
        self.stalls.aclose()
        try:
            await self._tasks.aclose()
        finally:
            try:
                await self.memory.evacuate()
            finally:
                await self._close_engine()
        await asyncio.sleep(0)  # the completions that closing brought reach their transfers
        self._queue.check_idle()

    async def _close_engine(self) -> None:
        if self._closed:
            return
        self._connections.idle.stop()
        self._closed = True
        for work in self._queue.everybody():
            self._give_up((work,), ClosedError("the data plane was closed", op_id=work.transfer.op_id))
        try:
            await self.engine.aclose()
        finally:
            self.memory.closed()
