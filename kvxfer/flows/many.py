"""Many puts or gets as one: which of them arrived is told by index, and those that did not can be tried again alone.

The idea: every move is a transfer of its own (own outcome, own settling), and the group only adds them up, so nothing
that holds for one transfer has to be said again for many. What a failed move has written is undefined; what the others
have written is exact and stays usable, unless the caller asked for all or nothing.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvxfer.dataplane.transfer import CANCELLED, DONE, FAILED, RUNNING, TIMED_OUT, Transfer
from kvxfer.descriptors import RemoteDescriptor
from kvxfer.errors import KvxferError, PartialTransfer, TooLarge, TransferCancelled, TransferTimeout, UsageError
from kvxfer.memory.region import Region, Span
from kvxfer.tasks import Deadline

PARTIAL = "partial"
MOVES_MAX = 1 << 20
AT_ONCE = 256  # moves of one group that are under way at the same time; the others are begun as these end
SLICE_S = 0.004  # of the event loop, in one turn
SHOWN_MAX = 32  # indexes in the text of an error


@dataclass(frozen=True, slots=True)
class Move:
    """One put or get of a group: our memory, the other side's, and the offset in it in bytes."""

    local: Region | Span
    remote: RemoteDescriptor
    remote_offset: int = 0


class MoveTable:
    """Moves as arrays: hundreds of thousands of objects would make each full collection of garbage hold the loop for
    tens of milliseconds.
    """

    def __init__(self, moves: Sequence[Move]) -> None:
        self._moves = moves  # those of the caller, until all are in the arrays
        self._count = len(moves)
        self._regions: dict[int, Region] = {}  # by id, which is one for as long as it is here
        self._remotes: dict[int, RemoteDescriptor] = {}
        self._region_ids, self._remote_ids = array("Q"), array("Q")
        self._offsets, self._lengths, self._remote_offsets = array("Q"), array("Q"), array("Q")
        self.taken = 0  # how many are in the arrays

    def __len__(self) -> int:
        return self._count

    def take(self, move: Move) -> None:
        """The next one, which makes sense."""
        local = move.local
        region, offset = (local, 0) if isinstance(local, Region) else (local.region, local.offset)
        remote = move.remote
        self._regions[id(region)] = region
        self._remotes[id(remote)] = remote
        self._offsets.append(offset)
        self._lengths.append(local.length)
        self._remote_offsets.append(move.remote_offset)
        self._region_ids.append(id(region))
        self._remote_ids.append(id(remote))
        self.taken += 1
        if self.taken == self._count:
            self._moves = ()

    def span(self, place: int) -> tuple[Region, int, int, RemoteDescriptor, int]:
        """One that was taken: its region, offset and length in it, its remote memory and the offset in that."""
        region, remote = self._regions[self._region_ids[place]], self._remotes[self._remote_ids[place]]
        return region, self._offsets[place], self._lengths[place], remote, self._remote_offsets[place]

    def __getitem__(self, place: int) -> Move:
        if self._moves:
            return self._moves[place]
        region, offset, length, remote, remote_offset = self.span(place)
        return Move(Span(region, offset, length), remote, remote_offset)


class MoveStarter(Protocol):
    """How the moves of a group go: all in one direction."""

    def check(self, move: Move) -> None:
        """Raise what is wrong with a move that makes no sense."""

    def start(
        self, region: Region, offset: int, length: int, remote: RemoteDescriptor, remote_offset: int, timeout: float
    ) -> Transfer:
        """Begin one; what it needs may have gone since it was checked."""


def check_moves(moves: object) -> tuple[Move, ...]:
    """At least one and at most `MOVES_MAX` moves."""
    if not isinstance(moves, Sequence) or not moves or not isinstance(moves[0], Move):
        raise UsageError("moves must be a sequence of at least one Move", field="moves", got=type(moves).__name__)
    if len(moves) > MOVES_MAX:
        raise TooLarge("too many moves in one group", field="moves", value=len(moves), limit=MOVES_MAX)
    return tuple(moves)


class Group:
    """Many puts or gets as one; awaiting it returns it when every move is done.

    Raises: when awaited `PartialTransfer` (some are done: ``error.causes`` maps the index of each that is not to its
    own error) or the first error (none is, or ``atomic``).

    ``state`` is running, done, partial, failed, cancelled or timed_out, and changes once. ``undefined`` names the moves
    whose target must not be used. Of more than `AT_ONCE` moves the rest is looked at and begun in later turns of the
    loop, all of them looked at before the first one begins.
    """

    def __init__(
        self, way: MoveStarter, moves: Sequence[Move], *, indexes: Sequence[int], atomic: bool, timeout: float
    ) -> None:
        self._way = way
        self._moves = MoveTable(moves)
        self._indexes = indexes  # of each move in the caller's list
        self._atomic = atomic
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._ends_at = self._loop.time() + timeout
        self._first: tuple[KvxferError, str] | None = None  # the first error, and the state that goes with it
        self._begun = 0
        self._turn_due = False
        self._running: dict[Transfer, int] = {}
        self._unsettled: dict[Transfer, None] = {}  # decided, but bytes may still move
        self._errors: dict[int, KvxferError] = {}  # by place
        self._never: tuple[int, KvxferError] | None = None  # from this place on none was begun, and why
        self._states: set[str] = set()
        self._left = len(moves)
        self._bytes_done = 0
        self.state = RUNNING
        self._decided: asyncio.Future[None] = self._loop.create_future()
        for move in moves[:AT_ONCE]:
            self._check(move)
        if self._moves.taken < len(moves):
            self._continue()
        else:
            self._begin_some(self._loop.time() + timeout)

    @property
    def done(self) -> bool:
        """True once there is an outcome (not necessarily success)."""
        return self.state != RUNNING

    @property
    def settled(self) -> bool:
        """True once no byte of any move can move any more."""
        return self.done and not self._unsettled

    @property
    def bytes_done(self) -> int:
        """Bytes that were moved so far."""
        return self._bytes_done + sum(transfer.bytes_done for transfer in self._running)

    @property
    def failures(self) -> dict[int, KvxferError]:
        """The error of each move that failed so far, by its index."""
        found = {self._indexes[place]: self._errors[place] for place in sorted(self._errors)}
        if self._never is not None:
            first, error = self._never
            found.update((index, error) for index in self._indexes[first:])
        return found

    @property
    def undefined(self) -> tuple[int, ...]:
        """Moves whose target does not hold what it should: all that failed; of an atomic group that failed, all."""
        if self._atomic and self._first is not None:
            return tuple(self._indexes)
        return tuple(self.failures)

    def __await__(self) -> Generator[Any, None, Group]:
        if self.state == RUNNING:
            yield from asyncio.shield(self._decided).__await__()
        if self.state == DONE:
            return self
        raise self.error_now()

    def error_now(self) -> KvxferError:
        """The error that awaiting raises; only for a group that failed. Never raises."""
        assert self._first is not None
        if self.state != PARTIAL:
            return self._first[0]
        return partial_error(self.failures, len(self._moves), self._first[0])

    # -- beginning ------------------------------------------------------------------------------------------------

    def _check(self, move: Move) -> None:
        if not isinstance(move, Move):
            raise UsageError("moves must be a sequence of Moves", field="moves", got=type(move).__name__)
        self._way.check(move)
        try:
            self._moves.take(move)
        except (OverflowError, TypeError) as wrong:
            raise UsageError(f"a move has a number that does not fit: {wrong}", field="moves") from wrong

    def _continue(self) -> None:
        if not self._turn_due:
            self._turn_due = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Look at some more, or begin some more; no longer than others can wait."""
        self._turn_due = False
        until = self._loop.time() + SLICE_S
        try:
            while self._moves.taken < len(self._moves) and self._never is None:
                if self._loop.time() >= until:
                    self._continue()
                    return
                self._check(self._moves[self._moves.taken])
        except KvxferError as error:
            self._stop_starting(error, FAILED)
            return
        self._begin_some(until)

    def _begin_some(self, until: float) -> None:
        while self._begun < len(self._moves) and self._never is None and len(self._running) < AT_ONCE:
            now = self._loop.time()
            if now >= self._ends_at:
                late = TransferTimeout(f"not begun within {self._timeout:g} s", hint="move fewer, or wait longer")
                self._stop_starting(late, TIMED_OUT)
                return
            if now >= until:
                self._continue()
                return
            place = self._begun
            try:
                transfer = self._way.start(*self._moves.span(place), self._ends_at - now)
            except KvxferError as error:
                if place == 0:
                    raise
                self._stop_starting(error, FAILED)
                return
            self._begun += 1
            self._running[transfer] = place
            transfer.on_decided(self._one_decided)

    def _stop_starting(self, error: KvxferError, state: str) -> None:
        """What has not been begun fails with this."""
        if self._never is not None or self._begun == len(self._moves):
            return
        self._never = self._begun, error
        self._left -= len(self._moves) - self._begun
        self._failed(error, state)
        self._states.add(state)
        self._maybe_over()

    # -- ending ---------------------------------------------------------------------------------------------------

    def _one_decided(self, transfer: Transfer) -> None:
        place = self._running.pop(transfer)
        if not transfer.settled:
            self._unsettled[transfer] = None
            transfer.on_settled(lambda one: self._unsettled.pop(one, None))
        self._left -= 1
        self._states.add(transfer.state)
        if transfer.error is None:
            self._bytes_done += transfer.bytes_done
        else:
            self._errors[place] = transfer.error
            self._failed(transfer.error, transfer.state)
        self._maybe_over()
        if self._left and self._begun < len(self._moves):
            self._continue()

    def _failed(self, error: KvxferError, state: str) -> None:
        if self._first is not None:
            return
        self._first = error, state
        if self._atomic:
            self._end_all("another move of an atomic group failed")

    def _end_all(self, why: str) -> None:
        self._stop_starting(TransferCancelled(why, by="us"), CANCELLED)
        for other in tuple(self._running):
            other.request_cancel(TransferCancelled(why, op_id=other.op_id, by="us"))

    def _maybe_over(self) -> None:
        if self._left == 0 and self.state == RUNNING:
            self.state = self._outcome()
            self._decided.set_result(None)

    def _outcome(self) -> str:
        if self._states == {DONE}:
            return DONE
        assert self._first is not None
        if self._atomic:
            return self._first[1]
        if DONE in self._states:
            return PARTIAL
        return next(iter(self._states)) if len(self._states) == 1 else FAILED

    async def cancel(self) -> Group:
        """End all that still runs; returns when no byte can move any more. Never raises for the group itself."""
        self._end_all("the group was cancelled")
        await self.wait_settled()
        return self

    async def wait_settled(self) -> None:
        """Wait until no byte of any move can move any more. Never raises for the group itself."""
        await asyncio.shield(self._decided)
        while self._unsettled:
            await next(iter(self._unsettled)).wait_settled()

    async def retry_failed(self, *, timeout: float | None = None) -> Group:
        """Begin a new group of the moves whose target is `undefined`, under the same indexes, when the old ones are
        settled. ``timeout`` is in seconds (None: as long as the first time).

        Raises: `UsageError` for a group that runs or has succeeded; `ClosedError`.
        """
        if self.state in (RUNNING, DONE):
            raise UsageError("only a group that failed, in part or as a whole, is tried again", state=self.state)
        await self.wait_settled()
        again = self.undefined
        wanted = set(again)
        moves = [self._moves[place] for place, index in enumerate(self._indexes) if index in wanted]
        limit = self._timeout if timeout is None else Deadline.after(timeout).remaining()
        return Group(self._way, moves, indexes=again, atomic=self._atomic, timeout=limit)

    def __repr__(self) -> str:
        failed = len(self._errors) + (0 if self._never is None else len(self._moves) - self._never[0])
        return f"<Group {self.state} moves={len(self._moves)} failed={failed}>"


def partial_error(failures: Mapping[int, KvxferError], moves: int, first: KvxferError) -> PartialTransfer:
    """Which moves failed, and why each did."""
    shown = " ".join(map(str, list(failures)[:SHOWN_MAX])) + (" ..." if len(failures) > SHOWN_MAX else "")
    error = PartialTransfer(
        f"{len(failures)} of {moves} moves failed, the first one: {first}",
        peer=first.peer,
        transport=first.transport,
        retryable=True,
        hint="the targets of these alone are undefined; retry_failed() moves them again",
        failed=shown,
        moves=moves,
    )
    error.causes = dict(failures)
    return error
