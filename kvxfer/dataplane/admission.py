"""Which operation may start now: windows of operations and bytes per peer, and one limit for all peers together.

The idea: an operation asks once for everything it needs and gets all of it or waits in line, so nobody holds one part
while waiting for another and no cycle of waiters can form. Lines are FIFO per peer; the global limit is handed round
the peers in turn, and a large operation at the head of the turn cannot be overtaken for ever by small ones of other
peers. The receiver leads: it may grant credits, and then nothing starts without one. What can never be admitted is
refused at once.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

from kvxfer.config import Config
from kvxfer.errors import InternalError, InvalidLength, PeerBackpressure, TooLarge, UsageError

Verdict = Literal["admitted", "queued"]
CREDITS_MAX = 1 << 30


@dataclass(slots=True, eq=False)
class Permit:
    """One operation's place. Compared by identity, never changed (not frozen: that costs a microsecond per transfer).
    `bytes` is what it counts against the windows.
    """

    peer: Hashable
    bytes: int
    queued_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Obstacle:
    """Why something waits: the option that is used up, how much of it is in use, and its value."""

    option: str
    in_use: int
    limit: int

    def __str__(self) -> str:
        return f"{self.option}, {self.in_use} of {self.limit} in use"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerWindow:
    """One peer now: what is in flight, what waits, and the credits left (None: the receiver sets no limit)."""

    ops: int
    bytes: int
    waiting: int
    credits: int | None


class _Peer:
    __slots__ = ("bytes", "credits", "ops", "waiting")

    def __init__(self) -> None:
        self.ops = 0
        self.bytes = 0
        self.credits: int | None = None
        self.waiting: OrderedDict[Permit, None] = OrderedDict()


class Admission:
    """The windows of one process. Methods that free something return the permits that may start now, in order."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._peers: dict[Hashable, _Peer] = {}
        self._running: set[Permit] = set()
        self._bytes = 0
        self._waiting = 0  # for all peers
        # Peers whose head waits for nothing but the global limit, in the order in which that became true.
        self._turn: deque[Hashable] = deque()

    @property
    def inflight_ops(self) -> int:
        return len(self._running)

    @property
    def inflight_bytes(self) -> int:
        return self._bytes

    @property
    def waiting(self) -> int:
        """How many wait, for all peers together."""
        return self._waiting

    def window(self, peer: Hashable) -> PeerWindow:
        """What one peer uses now."""
        state = self._peers.get(peer) or _Peer()
        return PeerWindow(ops=state.ops, bytes=state.bytes, waiting=len(state.waiting), credits=state.credits)

    def admit(self, peer: Hashable, size: int, now: float) -> tuple[Permit, Verdict]:
        """Ask for one operation of `size` bytes.

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
        if state is not None and len(state.waiting) >= config.window_waiters_max:
            raise PeerBackpressure(
                "too many operations wait for this peer",
                peer=_name(peer),
                waiting=len(state.waiting),
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
            state = self._peers[peer] = _Peer()
        permit = Permit(peer, size, now)
        if not state.waiting and not self._turn and self._has_room(state, size):
            self._begin(permit, state)  # the usual case: nobody is overtaken
            return permit, "admitted"
        state.waiting[permit] = None
        self._waiting += 1
        started = self._start(peer)
        return permit, "admitted" if permit in started else "queued"

    def done(self, permit: Permit) -> list[Permit]:
        """An admitted operation ended, however it ended. Raises `InternalError` for a permit that is not in flight."""
        if permit not in self._running:
            raise InternalError("a permit that is not in flight is given back", peer=_name(permit.peer))
        self._running.remove(permit)
        state = self._peers[permit.peer]
        state.ops -= 1
        state.bytes -= permit.bytes
        self._bytes -= permit.bytes
        started = self._start(permit.peer) if state.waiting or self._turn else []
        self._tidy(permit.peer)
        return started

    def abandon(self, permit: Permit) -> list[Permit]:
        """The asker stopped waiting. Raises `InternalError` for a permit that does not wait: one in flight ends by
        `done`, and given up it would count for ever.
        """
        state = self._peers.get(permit.peer)
        if state is None or permit not in state.waiting:
            how = "in flight" if permit in self._running else "not known"
            raise InternalError(f"a permit that is {how} is given up as if it waited", peer=_name(permit.peer))
        del state.waiting[permit]
        self._waiting -= 1
        started = self._start(permit.peer)
        self._tidy(permit.peer)
        return started

    def obstacle(self, permit: Permit) -> Obstacle:
        """What one that waits is waiting for: the limit that keeps the head of its line from starting, or all lines."""
        config, state = self._config, self._peers[permit.peer]
        head = next(iter(state.waiting))
        if state.credits == 0:
            return Obstacle(option="credits", in_use=0, limit=0)
        if state.ops >= config.window_ops_max:
            return Obstacle(option="window_ops_max", in_use=state.ops, limit=config.window_ops_max)
        if state.bytes + head.bytes > config.window_bytes_max:
            return Obstacle(option="window_bytes_max", in_use=state.bytes, limit=config.window_bytes_max)
        return Obstacle(option="inflight_bytes_max", in_use=self._bytes, limit=config.inflight_bytes_max)

    def set_credits(self, peer: Hashable, count: int | None) -> list[Permit]:
        """The receiver begins to lead with `count` credits, or stops (None). Replaces what was left."""
        if count is not None and not 0 <= count <= CREDITS_MAX:
            raise UsageError(f"credits are 0 to {CREDITS_MAX}", count=count)
        state = self._peers.setdefault(peer, _Peer())
        state.credits = count
        started = self._start(peer)
        self._tidy(peer)
        return started

    def grant_credit(self, peer: Hashable, count: int = 1) -> list[Permit]:
        """The receiver allows `count` more operations. Each admission uses one up; its end does not return it."""
        if not 1 <= count <= CREDITS_MAX:
            raise UsageError(f"credits are 1 to {CREDITS_MAX}", count=count)
        state = self._peers.get(peer)
        left = state.credits or 0 if state is not None else 0
        if left + count > CREDITS_MAX:
            raise UsageError("the peer grants more credits than can be used", credits=left, count=count)
        return self.set_credits(peer, left + count)

    def remove_peer(self, peer: Hashable) -> tuple[list[Permit], list[Permit]]:
        """The peer is gone: returns its waiters, to be failed, and the permits of others that may start now.

        Its running operations still end by `done`.
        """
        state = self._peers.get(peer)
        if state is None:
            return [], []
        waiting = list(state.waiting)
        state.waiting.clear()
        self._waiting -= len(waiting)
        state.credits = None
        self._drop_turn(peer)
        self._tidy(peer)
        return waiting, self._serve_turn()

    def check(self) -> None:
        """Assert internal consistency, and that nothing waits without a reason."""
        config = self._config
        assert self._bytes == sum(permit.bytes for permit in self._running) <= config.inflight_bytes_max
        assert self._waiting == sum(len(state.waiting) for state in self._peers.values()) <= config.waiters_max
        assert len(self._turn) == len(set(self._turn))
        for peer, state in self._peers.items():
            mine = [permit for permit in self._running if permit.peer == peer]
            assert state.ops == len(mine) <= config.window_ops_max
            assert state.bytes == sum(permit.bytes for permit in mine) <= config.window_bytes_max
            assert state.credits is None or state.credits >= 0
            assert len(state.waiting) <= config.window_waiters_max
            ready = bool(state.waiting) and self._fits_window(state)
            assert ready == (peer in self._turn), "a peer is in the turn exactly while its head fits its own window"
            assert mine or state.waiting or state.credits is not None, "a peer without use was kept"
        if self._turn:
            head = next(iter(self._peers[self._turn[0]].waiting))
            assert self._bytes + head.bytes > config.inflight_bytes_max, "the head of the turn could start"
        assert all(permit.peer in self._peers for permit in self._running)

    def _begin(self, permit: Permit, state: _Peer) -> None:
        state.ops += 1
        state.bytes += permit.bytes
        self._bytes += permit.bytes
        if state.credits is not None:
            state.credits -= 1
        self._running.add(permit)

    def _has_room(self, state: _Peer, size: int) -> bool:
        """In the peer's window and in the limit of all."""
        return self._fits(state, size) and self._bytes + size <= self._config.inflight_bytes_max

    def _fits(self, state: _Peer, size: int) -> bool:
        config = self._config
        return (
            state.ops < config.window_ops_max and state.bytes + size <= config.window_bytes_max and state.credits != 0
        )

    def _fits_window(self, state: _Peer) -> bool:
        return self._fits(state, next(iter(state.waiting)).bytes)

    def _start(self, peer: Hashable) -> list[Permit]:
        """Something changed for this peer: bring its membership of the turn up to date, then serve the turn."""
        state = self._peers[peer]
        ready = bool(state.waiting) and self._fits_window(state)
        if not ready:
            self._drop_turn(peer)
        elif peer not in self._turn:
            self._turn.append(peer)
        return self._serve_turn()

    def _serve_turn(self) -> list[Permit]:
        started = []
        while self._turn:
            peer = self._turn[0]
            state = self._peers[peer]
            head = next(iter(state.waiting))
            # The head of the turn keeps its place while it does not fit: those behind must not starve it.
            if self._bytes + head.bytes > self._config.inflight_bytes_max:
                break
            self._turn.popleft()
            del state.waiting[head]
            self._waiting -= 1
            self._begin(head, state)
            started.append(head)
            if state.waiting and self._fits_window(state):
                self._turn.append(peer)
        return started

    def _drop_turn(self, peer: Hashable) -> None:
        if peer in self._turn:
            self._turn.remove(peer)

    def _tidy(self, peer: Hashable) -> None:
        state = self._peers[peer]
        if not state.ops and not state.waiting and state.credits is None:
            del self._peers[peer]


def _name(peer: Hashable) -> str:
    return str(peer)[:80]
