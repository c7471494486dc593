"""`Transfer`: the awaitable handle of one piece of work with exactly one outcome.

Two moments matter and are kept apart. The *outcome* is what the caller is told: done, failed, cancelled or timed_out;
it is decided once and never changes. A transfer is *settled* when the engine has completed every token of it: from
then on no byte of it moves on either side. A deadline gives the outcome at once and leaves the settling to the
background; `cancel` returns only when settled.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from kvxfer.dataplane.admission import WindowLimit
from kvxfer.errors import KvxferError, Stalled, TransferCancelled, TransferTimeout

# -- noticing that something which runs does not move on: a peer that is frozen, a link that lost its other end --------
# The idea: whoever runs is looked at now and then, and says how far it is; when that number has stayed the same for
# `stall_s` seconds, it is told that it is stalled, and told again when it moves on. Looking costs nothing while
# nothing runs, and one turn looks at a bounded number, so that ten thousand transfers do not hold the loop.


POLLS_PER_STALL = 4
POLLS_PER_TURN_MAX = 500  # in one turn
POLL_S_MIN = 0.01


class Watched(Protocol):
    """What is told that it is stalled, or no longer."""

    def mark_stalled(self, stalled: bool) -> None: ...


Progress = Callable[[], int | None]  # only grows; None: it does not wait for a peer just now


@dataclass(slots=True)
class _Watch:
    progress: Progress
    due: float
    last: int | None
    since: float
    stalled: bool = False


class StallWatch:
    """Watches what runs; ``note`` hears how many are stalled whenever that changes. For one event loop."""

    def __init__(self, stall_s: float, note: Callable[[int], None]) -> None:
        self._stall_s = stall_s
        self._poll_s = stall_s / POLLS_PER_STALL
        self._note = note
        self._watched: OrderedDict[Watched, _Watch] = OrderedDict()  # in the order in which they are due
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self.stalled = 0

    def __len__(self) -> int:
        return len(self._watched)

    def begin(self, item: Watched, progress: Progress) -> None:
        """It runs from now on."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._watched[item] = _Watch(progress, now + self._poll_s, 0, now)
        if self._timer is None and not self._closed:
            self._timer = loop.call_later(self._poll_s, self._poll_due)

    def end(self, item: Watched) -> None:
        """It is over; harmless when it was not watched."""
        watch = self._watched.pop(item, None)
        if watch is not None and watch.stalled:
            self._count(-1)

    def aclose(self) -> None:
        """Stop watching: cancel the timer."""
        self._closed = True
        self._watched.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _poll_due(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        now = loop.time()
        changed = 0
        for _ in range(min(POLLS_PER_TURN_MAX, len(self._watched))):
            item, watch = next(iter(self._watched.items()))
            if watch.due > now:
                break
            self._watched.move_to_end(item)
            watch.due = now + self._poll_s
            changed += self._poll(item, watch, now)
        if changed:
            self._count(changed)
        if self._watched and not self._closed:
            due = next(iter(self._watched.values())).due
            self._timer = loop.call_later(max(POLL_S_MIN, due - now), self._poll_due)

    def _poll(self, item: Watched, watch: _Watch, now: float) -> int:
        """How many more are stalled because of it."""
        progress = watch.progress()
        if progress is None or progress != watch.last:
            watch.last, watch.since = progress, now
        stalled = now - watch.since >= self._stall_s
        if stalled == watch.stalled:
            return 0
        watch.stalled = stalled
        item.mark_stalled(stalled)
        return 1 if stalled else -1

    def _count(self, change: int) -> None:
        self.stalled += change
        self._note(self.stalled)


RUNNING, DONE, FAILED, CANCELLED, TIMED_OUT = "running", "done", "failed", "cancelled", "timed_out"


class Canceller(Protocol):
    """What a transfer needs from the data plane to end early."""

    def cancel_token(self, token: int) -> None: ...

    def cancel_waiting(self, transfer: Transfer) -> None: ...

    def progress(self, token: int) -> int:
        """Bytes that a part in the engine's hands has moved."""

    def blocked_by(self, transfer: Transfer) -> WindowLimit | None:
        """What it waits for before the engine has anything of it; None when it waits for no window."""

    def stage(self, transfer: Transfer) -> str: ...

    def drain(self) -> None: ...

    def late(self) -> None: ...


class Transfer:
    """A put or get (or a group of them) in progress.

    ``await transfer`` waits for the outcome and returns the transfer itself, or raises its error; cancelling that await
    stops the waiting, not the transfer (its own deadline bounds it). ``bytes_done`` counts the bytes that were moved
    so far, also while a part is under way.

    Raises: when awaited `TransferTimeout` or `Stalled`, `TransferCancelled`, `PeerUnreachable`, `PeerLost`,
    `StaleDescriptor`, `WrongKey`, `Revoked`, `AccessDenied`, `IntegrityError`, `PeerBackpressure`, or `TransportError`.
    """

    __slots__ = (
        "_began",
        "_bytes_done",
        "_canceller",
        "_cancelling",
        "_error",
        "_on_decided",
        "_on_settled",
        "_parts_left",
        "_settled",
        "_stalled",
        "_timer",
        "_tokens",
        "_waiters",
        "address",
        "attempt",
        "notify_only",
        "op_id",
        "peer",
        "priority",
        "state",
        "transport",
    )

    def __init__(self, canceller: Canceller, *, op_id: int, peer: str, parts: int, priority: int = 1) -> None:
        self._canceller = canceller
        self._cancelling: KvxferError | None = None
        self._error: KvxferError | None = None
        self._on_decided: Callable[[Transfer], None] | None = None
        self._on_settled: list[Callable[[Transfer], None]] | None = None
        self._settled: asyncio.Future[None] | None = None
        self._parts_left = parts
        self._stalled = False
        self._timer: asyncio.TimerHandle | None = None
        self._tokens: set[int] | None = None
        self._waiters: list[asyncio.Future[None]] | None = None  # one for each await in progress
        self._began = time.monotonic()
        self.address = ""  # of the peer's engine, once a part is on its way there
        self.attempt = 1  # grows when a part goes another way because the first was none
        self._bytes_done = 0
        self.notify_only = False  # it moves no bytes, it only tells
        self.op_id = op_id
        self.peer = peer
        self.priority = priority
        self.transport = ""
        self.state = RUNNING

    # -- for callers -------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """True once there is an outcome (not necessarily success)."""
        return self.state != RUNNING

    @property
    def bytes_done(self) -> int:
        """Bytes that were moved so far; of what ended, those that were confirmed."""
        return self._bytes_done + sum(map(self._canceller.progress, self._tokens or ()))

    @property
    def settled(self) -> bool:
        """True once no byte of this transfer can move any more."""
        return self._parts_left == 0

    @property
    def stalled(self) -> bool:
        """True while it runs and nothing of it has moved for `stall_s`: the other side hangs, or is cut off."""
        return self._stalled and self.state == RUNNING

    @property
    def error(self) -> KvxferError | None:
        """The error that awaiting raises, if any."""
        return self._error

    def __await__(self) -> Generator[Any, None, Transfer]:
        if self.state == RUNNING:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters = [*(self._waiters or ()), waiter]
            try:
                yield from waiter.__await__()
            finally:
                if self._waiters is not None and waiter in self._waiters:  # cancelled
                    self._waiters.remove(waiter)
        if self._error is not None:
            raise self._error
        return self

    async def cancel(self) -> Transfer:
        """End the transfer early and return when it is settled: no byte will move any more on either side.

        Does nothing to an outcome that is already decided. Never raises for the cancelled transfer itself.
        """
        self.request_cancel(TransferCancelled("the transfer was cancelled", op_id=self.op_id, peer=self.peer, by="us"))
        await self.wait_settled()
        return self

    async def wait_settled(self) -> None:
        """Wait until no byte of this transfer can move any more. Never raises for the transfer itself."""
        if self._parts_left:
            if self._settled is None:
                self._settled = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._settled)

    def __repr__(self) -> str:
        return (
            f"<Transfer {self.op_id} {self.state} peer={self.peer} transport={self.transport} bytes={self.bytes_done}>"
        )

    # -- for the data plane --------------------------------------------------------------------------

    def on_settled(self, callback: Callable[[Transfer], None]) -> None:
        """Call back when settled (at once if it already is)."""
        if self._parts_left == 0:
            callback(self)
        elif self._on_settled is None:
            self._on_settled = [callback]
        else:
            self._on_settled.append(callback)

    def on_decided(self, callback: Callable[[Transfer], None]) -> None:
        """Call back, at the earliest in the next turn of the loop, when there is an outcome; for one listener."""
        assert self._on_decided is None
        self._on_decided = callback
        if self.state != RUNNING:
            asyncio.get_running_loop().call_soon(callback, self)

    def arm(self, timeout: float, loop: asyncio.AbstractEventLoop) -> None:
        """Start the deadline."""
        if self.state == RUNNING:
            self._timer = loop.call_later(timeout, self.expire, timeout)

    def mark_stalled(self, stalled: bool) -> None:
        """See `Watched`."""
        self._stalled = stalled

    @property
    def tokens(self) -> frozenset[int]:
        """The parts that are in the engine's hands."""
        return frozenset(self._tokens or ())

    def add_token(self, token: int) -> None:
        """A part is in the engine's hands."""
        if self._tokens is None:
            self._tokens = {token}
        else:
            self._tokens.add(token)
        if self._cancelling is not None:
            self._canceller.cancel_token(token)

    def token_ended(self, token: int | None) -> None:
        """The engine is done with this token, but the part goes another way."""
        if token is not None and self._tokens is not None:
            self._tokens.discard(token)

    def part_ended(self, token: int | None, moved_bytes: int, error: KvxferError | None) -> None:
        """One part completed (``token`` None: it never reached the engine)."""
        if self._tokens is not None and token is not None:
            self._tokens.discard(token)
        self._parts_left -= 1
        self._bytes_done += moved_bytes
        if self.state == TIMED_OUT and error is None and token is not None:
            self._canceller.late()  # it stays what it is
        if error is not None and self.state == RUNNING:
            self._fail(self._cancelling if self._cancelling is not None else self._told(error))
        if self._parts_left == 0:
            if self.state == RUNNING:
                self._decide(DONE, None)
            self._announce_settled()

    def request_cancel(self, reason: KvxferError) -> None:
        """Ask the engine to end every part; parts not yet submitted will not be."""
        if self._cancelling is None and self._parts_left:
            self._cancelling = reason
            for token in tuple(self._tokens or ()):
                self._canceller.cancel_token(token)
            self._canceller.cancel_waiting(self)

    @property
    def cancelling(self) -> KvxferError | None:
        """Why the transfer is being ended early, if it is."""
        return self._cancelling

    def _fail(self, error: KvxferError) -> None:
        state = CANCELLED if isinstance(error, TransferCancelled) else FAILED
        if isinstance(error, TransferTimeout):
            state = TIMED_OUT
        self._decide(state, error)
        # The other parts are of no use any more; they still settle one by one.
        self.request_cancel(error)

    def expire(self, timeout: float) -> None:
        """Its ``timeout`` seconds are over."""
        # Completions that are already in the ring arrived in time even if the loop was late to look.
        self._canceller.drain()
        self._timer = None
        if self.state == RUNNING:
            self._fail(self._told(self._too_late(timeout)))

    def _too_late(self, timeout: float) -> KvxferError:
        kind = Stalled if self._stalled else TransferTimeout
        blocked_by = self._canceller.blocked_by(self)
        if blocked_by is None:
            return kind(
                f"no completion within {timeout:g} s",
                transport=self.transport or None,
                bytes_done=self.bytes_done,
                hint="the memory stays quarantined until the engine is quiet",
            )
        return kind(
            f"no completion within {timeout:g} s: waits for {blocked_by}",
            transport=self.transport or None,
            bytes_done=self.bytes_done,
            option=blocked_by.option,
            in_use=blocked_by.in_use,
            limit=blocked_by.limit,
            hint="what is in flight to this peer takes longer than the timeout: start less at a time, or wait longer",
        )

    def _told(self, error: KvxferError) -> KvxferError:
        """The error with what is known of the transfer."""
        error.op_id = self.op_id if error.op_id is None else error.op_id
        error.peer = error.peer or self.peer or None
        if self.address:
            error.fields.setdefault("address", self.address)
        error.fields.setdefault("attempt", self.attempt)
        if isinstance(error, TransferTimeout):
            error.fields.setdefault("state", self._canceller.stage(self))
        error.fields.setdefault("elapsed_s", round(time.monotonic() - self._began, 3))
        return error

    def _decide(self, state: str, error: KvxferError | None) -> None:
        self.state = state
        self._error = error
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._on_decided is not None:
            asyncio.get_running_loop().call_soon(self._on_decided, self)
        if self._waiters is not None:
            waiters, self._waiters = self._waiters, None
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    def _announce_settled(self) -> None:
        if self._settled is not None and not self._settled.done():
            self._settled.set_result(None)
        callbacks, self._on_settled = self._on_settled, None
        for callback in callbacks or ():
            try:
                callback(self)
            except Exception as error:  # the others still have to hear of it
                context = {"message": "a callback of a settled transfer failed", "exception": error}
                asyncio.get_running_loop().call_exception_handler(context)


class TransferGroup:
    """Transfers of one request: one deadline and one entry in the stall watch for all of them.

    They are stalled when nothing of any of them moves.
    """

    def __init__(self, stalls: StallWatch, progress: Callable[[Transfer], int | None], timeout: float) -> None:
        self._stalls = stalls
        self._progress = progress
        self._timeout = timeout
        self._timer = asyncio.get_running_loop().call_later(timeout, self._expire)
        self._ended = 0  # grows with each that ends
        self._stalled = False
        self._closed = False
        self.running: dict[Transfer, None] = {}  # not settled
        stalls.begin(self, self._moved)

    def add(self, transfer: Transfer) -> None:
        """It is one of them until it is settled."""
        self.running[transfer] = None
        if self._stalled:
            transfer.mark_stalled(True)

    def remove(self, transfer: Transfer) -> None:
        """A transfer of the group is settled."""
        del self.running[transfer]
        self._ended += 1 + transfer.bytes_done
        if self._closed:
            self.close()

    def mark_stalled(self, stalled: bool) -> None:
        """See `Watched`."""
        self._stalled = stalled
        for transfer in self.running:
            transfer.mark_stalled(stalled)

    def close(self) -> None:
        """Nothing is added any more. What has not settled still has its deadline."""
        self._closed = True
        if not self.running:
            self._timer.cancel()
            self._stalls.end(self)

    def _moved(self) -> int | None:
        moved = [found for transfer in self.running if (found := self._progress(transfer)) is not None]
        return self._ended + sum(moved) if moved else None

    def _expire(self) -> None:
        for transfer in tuple(self.running):
            transfer.expire(self._timeout)


def nothing_to_move(canceller: Canceller, peer: str) -> Transfer:
    """A transfer that is done: of something that others move, or that the other side does not want."""
    made = Transfer(canceller, op_id=0, peer=peer, parts=1)
    made.part_ended(None, 0, None)
    return made


async def gather_settled(transfers: Iterable[Transfer]) -> None:
    """Wait until all of them are settled."""
    for transfer in tuple(transfers):
        await transfer.wait_settled()


async def settle_within(limit_s: float, transfers: Iterable[Transfer]) -> bool:
    """The same for at most ``limit_s``; False when some are not settled by then (they stay pinned and settle later)."""
    try:
        async with asyncio.timeout(limit_s):
            await gather_settled(transfers)
    except TimeoutError:
        return False
    return True
