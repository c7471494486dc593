"""Which operation may start now: windows of operations and bytes per peer, and one limit for all peers together.

The idea: an operation asks once for everything it needs and gets all of it or waits in line, so nobody holds one part
while waiting for another and no cycle of waiters can form. It has a rank, from its priority (critical, normal, bulk)
and its size (short ones first), and a line per peer and rank, first in first out. What is less urgent takes no room
from what is more urgent: an operation counts what is in flight of its own rank and of those before it, and a rank that
has nothing in flight may always start one, so that nothing starves. Within a rank the limit for all is handed round the
peers in turn, and a large operation at the head of the turn cannot be overtaken for ever by small ones of other peers.
What can never be admitted is refused at once.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

from kvxfer.config import Config
from kvxfer.errors import InternalError, InvalidLength, PeerBackpressure, TooLarge

# -- where a piece of work stands on its way into the engine: in line for the peer's window, about to go, or waiting
# because the engine had no room.
#
# The idea: one table holds the admission and everybody who waits, so the two cannot disagree. A permit that starts to
# run takes its work out of the line in the same step, before anybody else is told anything; whoever leaves, from
# wherever it stands, gives back exactly what it holds. Work goes into the engine from one loop that is never entered
# twice: what a submit ends at once makes room, and the next one goes when the loop comes to it.


class Submission(Protocol):
    """What may stand here: hashed by identity, part of ``transfer``; ``permit`` is set by the line alone. ``rank``: see
    `admission.rank_of`.
    """

    slot: WindowSlot | None
    rank: int

    @property
    def transfer(self) -> Hashable: ...


W = TypeVar("W", bound=Submission)


class SubmitQueue(Generic[W]):
    """All that has not reached the engine. Work that holds a permit and stands nowhere here is with the engine."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self._queued: dict[WindowSlot, W] = {}  # exactly the permits that wait
        self.going: OrderedDict[W, None] = OrderedDict()  # admitted, its turn comes in `run`
        self.engine_full: dict[
            int, OrderedDict[W, None]
        ] = {}  # by rank: admitted or small; waits until the engine has room
        self._turns = RankScheduler()
        self._by_transfer: dict[Hashable, OrderedDict[W, None]] = {}
        self._runs = False

    def __len__(self) -> int:
        return len(self._queued) + len(self.going) + sum(map(len, self.engine_full.values()))

    def enter(self, work: W, peer: Hashable, size: int, now: float) -> bool:
        """Take a place in the peer's window; False: it waits for one. Raises what `Admission.admit` raises."""
        work.slot, verdict = self.admission.admit(peer, size, now, rank=work.rank)
        if verdict == "admitted":
            return True
        self._queued[work.slot] = work
        self._index(work)
        return False

    def wait_for_engine(self, work: W) -> None:
        """The engine has no room for it now."""
        self.engine_full.setdefault(work.rank, OrderedDict())[work] = None
        self._index(work)

    def ended(self, work: W) -> None:
        """Work that the engine had, or that could not reach it, is over: its place in the window is free."""
        slot, work.slot = work.slot, None
        if slot is not None:
            self._started(self.admission.done(slot))

    def leave(self, work: W) -> bool:
        """Give up work that waits here; False when it does not (any more)."""
        slot = work.slot
        if slot is not None and self._queued.pop(slot, None) is not None:
            work.slot = None
            self._forget(work)
            self._started(self.admission.abandon(slot))
            return True
        if work in self.going:
            del self.going[work]
        elif work in self.engine_full.get(work.rank, ()):
            self._unqueue(work)
        else:
            return False
        self._forget(work)
        self.ended(work)
        return True

    def of(self, transfer: Hashable) -> tuple[W, ...]:
        """The work of one transfer that waits here, in the order in which it came."""
        return tuple(self._by_transfer.get(transfer, ()))

    def everybody(self) -> tuple[W, ...]:
        """All work of this queue: queued, under way to the engine, and waiting because the engine is full."""
        return (*self._queued.values(), *self.going, *(work for line in self.engine_full.values() for work in line))

    def run(self, submit: Callable[[W], None]) -> None:
        """Submit all that may go. A call from inside ``submit`` does nothing: the outer one goes on."""
        if self._runs:
            return
        self._runs = True
        try:
            while self.going:
                work, _ = self.going.popitem(last=False)
                self._forget(work)
                submit(work)
        finally:
            self._runs = False

    def retry(self, submit: Callable[[W], None]) -> None:
        """The engine may have room again: by rank, and within a rank first come, first served, until one meets a full
        engine again.
        """
        for _ in range(sum(map(len, self.engine_full.values()))):
            if not self.engine_full:  # what completed inside the engine's call made room, and others were faster
                return
            work = next(iter(self.engine_full[self._turns.take(self.engine_full)]))
            self._unqueue(work)
            self._forget(work)
            submit(work)
            if work in self.engine_full.get(work.rank, ()):  # still no room: back to its place
                self.engine_full[work.rank].move_to_end(work, last=False)
                return

    def blocked_by(self, transfer: Hashable) -> WindowLimit | None:
        """Which limit the work of a transfer waits for; None when none of it waits for a window."""
        for work in self.of(transfer):
            if work.slot is not None and work.slot in self._queued:
                return self.admission.blocked_by(work.slot)
        return None

    def check_idle(self) -> None:
        """Raise `InternalError` when something is still counted although everything has ended."""
        admission = self.admission
        if admission.inflight_ops or admission.inflight_bytes or admission.waiting or len(self):
            raise InternalError(
                "permits are left although every transfer has ended",
                inflight_ops=admission.inflight_ops,
                inflight_bytes=admission.inflight_bytes,
                waiting=admission.waiting,
                in_line=len(self),
            )

    def check(self) -> None:
        """Assert that the admission and those who wait agree."""
        self.admission.check()
        assert len(self._queued) == self.admission.waiting
        assert all(work.slot is slot for slot, work in self._queued.items())
        standing = self.everybody()
        assert len(standing) == len(set(standing)), "each stands in one place"
        indexed = [work for works in self._by_transfer.values() for work in works]
        assert len(indexed) == len(standing)
        assert set(indexed) == set(standing)
        assert all(self._by_transfer.values())

    def _started(self, permits: Iterable[WindowSlot]) -> None:
        for slot in permits:
            self.going[self._queued.pop(slot)] = None

    def _unqueue(self, work: W) -> None:
        line = self.engine_full[work.rank]
        del line[work]
        if not line:
            del self.engine_full[work.rank]

    def _index(self, work: W) -> None:
        self._by_transfer.setdefault(work.transfer, OrderedDict())[work] = None

    def _forget(self, work: W) -> None:
        mine = self._by_transfer[work.transfer]
        del mine[work]
        if not mine:
            del self._by_transfer[work.transfer]


Verdict = Literal["admitted", "queued"]
SHORT_BYTES = 4 << 20  # an operation of at most so many bytes is short; as KVX_SHORT_BYTES in native/turns.h
PASSES = 8
RANKS = 6  # critical, normal, bulk: the short ones and the others of each


def rank_of(priority: int, size: int) -> int:
    """How urgent an operation is, 0 before all others. ``priority``: 0 critical, 1 normal, 2 bulk."""
    return 2 * priority + (size > SHORT_BYTES)


@dataclass(slots=True, eq=False)
class WindowSlot:
    """One operation's place. Compared by identity, never changed (not frozen: that costs a microsecond per transfer).
    `bytes` is what it counts against the windows.
    """

    peer: Hashable
    bytes: int
    queued_at: float
    rank: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowLimit:
    """Why something waits: the option that is used up, how much of it is in use, and its value."""

    option: str
    in_use: int
    limit: int

    def __str__(self) -> str:
        return f"{self.option}, {self.in_use} of {self.limit} in use"


class RankScheduler:
    """Whose turn it is among ranks of which each has somebody who waits; as `native/turns.h` does it."""

    def __init__(self) -> None:
        self._passed = [0] * RANKS

    def take(self, waiting: Collection[int]) -> int:
        """The lowest rank, but for one that was passed over `PASSES` times in a row."""
        due = [rank for rank in waiting if self._passed[rank] >= PASSES]
        taken = max(due) if due else min(waiting)
        self._passed[taken] = 0
        for rank in waiting:
            if rank > taken:
                self._passed[rank] += 1
        return taken


class _PeerState:
    __slots__ = ("bytes", "lines", "ops", "waiting")

    def __init__(self) -> None:
        self.ops = [0] * RANKS
        self.bytes = [0] * RANKS
        self.lines: dict[int, OrderedDict[WindowSlot, None]] = {}  # by rank; only those in which somebody waits
        self.waiting = 0

    def head(self, rank: int) -> WindowSlot:
        return next(iter(self.lines[rank]))


class Admission:
    """The windows of one process. Methods that free something return the permits that may start now, in order."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._peers: dict[Hashable, _PeerState] = {}
        self._running: set[WindowSlot] = set()
        self._ops = [0] * RANKS  # for all peers, by rank
        self._bytes = [0] * RANKS
        self._waiting = 0  # for all peers
        # Peers whose head waits for nothing but the global limit, in the order in which that became true; by rank.
        self._turns: tuple[deque[Hashable], ...] = tuple(deque() for _ in range(RANKS))

    @property
    def inflight_ops(self) -> int:
        return len(self._running)

    @property
    def inflight_bytes(self) -> int:
        return sum(self._bytes)

    @property
    def waiting(self) -> int:
        """How many wait, for all peers together."""
        return self._waiting

    def admit(self, peer: Hashable, size: int, now: float, *, rank: int = 2) -> tuple[WindowSlot, Verdict]:
        """Ask for one operation of `size` bytes. ``rank``: see `rank_of`.

        Raises `TooLarge` when it can never be admitted, `PeerBackpressure` when the line is full, `InvalidLength`.
        """
        config = self._config
        if not isinstance(size, int) or size < 0:
            raise InvalidLength("an operation's size is zero or more bytes", bytes=str(size)[:40])
        limit = config.window_bytes_max  # never larger than inflight_bytes_max
        if size > limit:
            why = "the operation is larger than the window"
            raise TooLarge(why, peer=_name(peer), bytes=size, limit=limit, option="window_bytes_max")
        state = self._peers.get(peer)
        if state is not None and state.waiting >= config.window_waiters_max:
            raise PeerBackpressure(
                "too many operations wait for this peer",
                peer=_name(peer),
                waiting=state.waiting,
                limit=config.window_waiters_max,
                option="window_waiters_max",
            )
        if self._waiting >= config.waiters_max:
            raise PeerBackpressure(
                "too many operations wait for all peers together",
                peer=_name(peer),
                waiting=self._waiting,
                limit=config.waiters_max,
                option="waiters_max",
            )
        if state is None:
            state = self._peers[peer] = _PeerState()
        slot = WindowSlot(peer, size, now, rank)
        if rank not in state.lines and not self._turns[rank] and self._has_room(state, rank, size):
            self._begin(slot, state)  # the usual case: nobody is overtaken
            if state.lines:
                self._follow(peer, state, rank)
            return slot, "admitted"
        state.lines.setdefault(rank, OrderedDict())[slot] = None
        state.waiting += 1
        self._waiting += 1
        started = self._start(peer, rank, rank)
        return slot, "admitted" if slot in started else "queued"

    def done(self, slot: WindowSlot) -> list[WindowSlot]:
        """An admitted operation ended, however it ended. Raises `InternalError` for a permit that is not in flight."""
        if slot not in self._running:
            raise InternalError("a permit that is not in flight is given back", peer=_name(slot.peer))
        self._running.remove(slot)
        state, rank = self._peers[slot.peer], slot.rank
        state.ops[rank] -= 1
        state.bytes[rank] -= slot.bytes
        self._ops[rank] -= 1
        self._bytes[rank] -= slot.bytes
        started = self._start(slot.peer, rank) if self._waiting else []
        self._tidy(slot.peer)
        return started

    def abandon(self, slot: WindowSlot) -> list[WindowSlot]:
        """The asker stopped waiting. Raises `InternalError` for a permit that does not wait: one in flight ends by
        `done`, and given up it would count for ever.
        """
        state = self._peers.get(slot.peer)
        if state is None or slot not in state.lines.get(slot.rank, ()):
            how = "in flight" if slot in self._running else "not known"
            raise InternalError(f"a permit that is {how} is given up as if it waited", peer=_name(slot.peer))
        self._leave(slot, state)
        started = self._start(slot.peer, slot.rank, slot.rank)
        self._tidy(slot.peer)
        return started

    def blocked_by(self, slot: WindowSlot) -> WindowLimit:
        """What one that waits is waiting for: the limit that keeps the head of its line from starting."""
        config, state, rank = self._config, self._peers[slot.peer], slot.rank
        ops, inflight = sum(state.ops[: rank + 1]), sum(state.bytes[: rank + 1])
        if ops >= config.window_ops_max:
            return WindowLimit(option="window_ops_max", in_use=ops, limit=config.window_ops_max)
        if inflight + state.head(rank).bytes > config.window_bytes_max:
            return WindowLimit(option="window_bytes_max", in_use=inflight, limit=config.window_bytes_max)
        inflight = sum(self._bytes[: rank + 1])
        return WindowLimit(option="inflight_bytes_max", in_use=inflight, limit=config.inflight_bytes_max)

    def check(self) -> None:
        """Assert internal consistency, and that nothing waits without a reason."""
        config = self._config
        for rank in range(RANKS):
            assert self._ops[rank] == sum(state.ops[rank] for state in self._peers.values())
            assert self._bytes[rank] == sum(state.bytes[rank] for state in self._peers.values())
            assert self._bytes[rank] <= config.inflight_bytes_max
            turn = self._turns[rank]
            assert len(turn) == len(set(turn))
            if turn:
                head = self._peers[turn[0]].head(rank)
                assert not self._fits_all(rank, head.bytes), "the head of the turn could start"
        assert len(self._running) == sum(self._ops)
        assert self._waiting == sum(state.waiting for state in self._peers.values()) <= config.waiters_max
        for peer, state in self._peers.items():
            self._check_peer(peer, state)
        assert all(slot.peer in self._peers for slot in self._running)

    def _check_peer(self, peer: Hashable, state: _PeerState) -> None:
        config = self._config
        mine = [slot for slot in self._running if slot.peer == peer]
        assert state.waiting == sum(map(len, state.lines.values())) <= config.window_waiters_max
        assert mine or state.waiting, "a peer without use was kept"
        assert all(state.lines.values())
        for rank in range(RANKS):
            ranked = [slot for slot in mine if slot.rank == rank]
            assert state.ops[rank] == len(ranked) <= config.window_ops_max
            assert state.bytes[rank] == sum(slot.bytes for slot in ranked) <= config.window_bytes_max
            ready = rank in state.lines and self._fits(state, rank, state.head(rank).bytes)
            assert ready == (peer in self._turns[rank]), "a peer is in the turn while its head fits its own window"

    def _begin(self, slot: WindowSlot, state: _PeerState) -> None:
        rank = slot.rank
        state.ops[rank] += 1
        state.bytes[rank] += slot.bytes
        self._ops[rank] += 1
        self._bytes[rank] += slot.bytes
        self._running.add(slot)

    def _has_room(self, state: _PeerState, rank: int, size: int) -> bool:
        """In the peer's window and in the limit of all."""
        return self._fits(state, rank, size) and self._fits_all(rank, size)

    def _fits(self, state: _PeerState, rank: int, size: int) -> bool:
        if not state.ops[rank]:
            return True
        config, until = self._config, rank + 1
        ops, inflight = sum(state.ops[:until]), sum(state.bytes[:until])
        return ops < config.window_ops_max and inflight + size <= config.window_bytes_max

    def _fits_all(self, rank: int, size: int) -> bool:
        return not self._ops[rank] or sum(self._bytes[: rank + 1]) + size <= self._config.inflight_bytes_max

    def _start(self, peer: Hashable, first: int = 0, last: int = RANKS - 1) -> list[WindowSlot]:
        """Something changed for these ranks of a peer: bring its places in the turns up to date, then serve them."""
        state = self._peers[peer]
        for rank in range(first, last + 1):
            self._take_turn(peer, state, rank)
        return self._serve_turns(first, last)

    def _take_turn(self, peer: Hashable, state: _PeerState, rank: int) -> None:
        ready = rank in state.lines and self._fits(state, rank, state.head(rank).bytes)
        if not ready:
            self._drop_turn(peer, rank)
        elif peer not in self._turns[rank]:
            self._turns[rank].append(peer)

    def _serve_turns(self, first: int, last: int) -> list[WindowSlot]:
        started: list[WindowSlot] = []
        for rank in range(first, last + 1):
            turn = self._turns[rank]
            while turn:
                peer = turn[0]
                state = self._peers[peer]
                head = state.head(rank)
                # The head of the turn keeps its place while it does not fit: those behind must not starve it.
                if not self._fits_all(rank, head.bytes):
                    break
                turn.popleft()
                self._leave(head, state)
                self._begin(head, state)
                started.append(head)
                self._follow(peer, state, rank)
        return started

    def _follow(self, peer: Hashable, state: _PeerState, rank: int) -> None:
        """One of this rank began: what is less urgent may have lost its room."""
        for other in range(rank, RANKS):
            self._take_turn(peer, state, other)

    def _leave(self, slot: WindowSlot, state: _PeerState) -> None:
        line = state.lines[slot.rank]
        del line[slot]
        if not line:
            del state.lines[slot.rank]
        state.waiting -= 1
        self._waiting -= 1

    def _drop_turn(self, peer: Hashable, rank: int) -> None:
        if peer in self._turns[rank]:
            self._turns[rank].remove(peer)

    def _tidy(self, peer: Hashable) -> None:
        state = self._peers[peer]
        if not any(state.ops) and not state.waiting:
            del self._peers[peer]


def _name(peer: Hashable) -> str:
    return str(peer)[:80]
