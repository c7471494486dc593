"""Many puts or gets as one: which of them arrived is told by index, and those that did not can be tried again alone.

The idea: every move is a transfer of its own (own outcome, own settling), and the group only adds them up, so nothing
that holds for one transfer has to be said again for many. What a failed move has written is undefined; what the others
have written is exact and stays usable, unless the caller asked for all or nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvxfer.dataplane.transfer import DONE, FAILED, RUNNING, Transfer
from kvxfer.descriptors import RemoteDescriptor
from kvxfer.errors import KvxferError, PartialTransfer, TooLarge, TransferCancelled, UsageError
from kvxfer.memory.region import Region, Span

PARTIAL = "partial"
MOVES_MAX = 65536
SHOWN_MAX = 32  # indexes in the text of an error


@dataclass(frozen=True, slots=True)
class Move:
    """One put or get of a group: our memory, the other side's, and where in it."""

    local: Region | Span
    remote: RemoteDescriptor
    remote_offset: int = 0


Start = Callable[[Sequence[Move], float | None], list[Transfer]]


def check_moves(moves: object) -> tuple[Move, ...]:
    """At least one and at most `MOVES_MAX` moves."""
    good = isinstance(moves, Sequence) and all(isinstance(move, Move) for move in moves)
    if not good or not moves:
        raise UsageError("moves must be a sequence of at least one Move", field="moves", got=type(moves).__name__)
    assert isinstance(moves, Sequence)
    if len(moves) > MOVES_MAX:
        raise TooLarge("too many moves in one group", field="moves", value=len(moves), limit=MOVES_MAX)
    return tuple(moves)


class Group:
    """Awaiting it returns it when every move is done, and raises `PartialTransfer` (some are: ``error.causes`` maps the
    index of each that is not to its own error) or the first error (none is, or ``atomic``).

    ``state`` is running, done, partial, failed, cancelled or timed_out, and changes once. ``undefined`` names the moves
    whose target must not be used.
    """

    def __init__(self, start: Start, moves: Mapping[int, Move], *, atomic: bool, timeout: float | None) -> None:
        self._start = start
        self._moves = dict(moves)
        self._atomic = atomic
        self._timeout = timeout
        self._first: KvxferError | None = None
        transfers = start(tuple(self._moves.values()), timeout)
        self._transfers = dict(zip(self._moves, transfers, strict=True))
        self.state = RUNNING
        self.bytes_done = 0
        self._left = len(self._transfers)
        self._decided: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for transfer in self._transfers.values():
            transfer.on_decided(self._one_decided)

    @property
    def done(self) -> bool:
        """True once there is an outcome (not necessarily success)."""
        return self.state != RUNNING

    @property
    def settled(self) -> bool:
        """True once no byte of any move can move any more."""
        return all(transfer.settled for transfer in self._transfers.values())

    @property
    def failures(self) -> dict[int, KvxferError]:
        """The error of each move that failed so far, by its index."""
        return {index: one.error for index, one in self._transfers.items() if one.error is not None}

    @property
    def undefined(self) -> tuple[int, ...]:
        """Moves whose target does not hold what it should: all that failed; of an atomic group that failed, all."""
        if self._atomic and self._first is not None:
            return tuple(self._transfers)
        return tuple(self.failures)

    def __await__(self) -> Generator[Any, None, Group]:
        if self.state == RUNNING:
            yield from asyncio.shield(self._decided).__await__()
        if self.state == DONE:
            return self
        raise self.error_now()

    def error_now(self) -> KvxferError:
        """What awaiting raises."""
        assert self._first is not None
        if self.state != PARTIAL:
            return self._first
        return partial_error(self.failures, len(self._transfers), self._first)

    def _one_decided(self, transfer: Transfer) -> None:
        self._left -= 1
        if transfer.error is None:
            self.bytes_done += transfer.bytes_done
        elif self._first is None:
            self._first = transfer.error
            if self._atomic:
                for other in self._transfers.values():
                    other.request_cancel(TransferCancelled("another move of an atomic group failed", by="us"))
        if self._left == 0:
            self.state = self._outcome()
            self._decided.set_result(None)

    def _outcome(self) -> str:
        states = {transfer.state for transfer in self._transfers.values()}
        if states == {DONE}:
            return DONE
        if self._atomic:
            return next(one.state for one in self._transfers.values() if one.error is self._first)
        if DONE in states:
            return PARTIAL
        return states.pop() if len(states) == 1 else FAILED

    async def cancel(self) -> Group:
        """End all that still runs; returns when no byte can move any more. Never raises for the group itself."""
        for transfer in self._transfers.values():
            transfer.request_cancel(TransferCancelled("the group was cancelled", op_id=transfer.op_id, by="us"))
        await self.wait_settled()
        return self

    async def wait_settled(self) -> None:
        """Wait until no byte of any move can move any more."""
        for transfer in self._transfers.values():
            await transfer.wait_settled()

    async def retry_failed(self, *, timeout: float | None = None) -> Group:
        """A new group of the moves whose target is `undefined`, under the same indexes, begun when the old ones are
        quiet.
        """
        if self.state in (RUNNING, DONE):
            raise UsageError("only a group that failed, in part or as a whole, is tried again", state=self.state)
        again = self.undefined
        for index in again:
            await self._transfers[index].wait_settled()
        moves = {index: self._moves[index] for index in again}
        return Group(self._start, moves, atomic=self._atomic, timeout=self._timeout if timeout is None else timeout)

    def __repr__(self) -> str:
        return f"<Group {self.state} moves={len(self._transfers)} failed={len(self.failures)}>"


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
