"""The daemon's outgoing links: one per peer node, made on demand, kept, and given up for a while when they keep
failing.

The idea: an entry per peer holds at most one live link and at most one attempt to make it, so any number of callers
that want a peer at once cause one connection. Failures feed a circuit breaker: from the third in a row on, callers are
told at once instead of waiting for another time-out, and one attempt per back-off period finds out when the peer is
back. The number of links is a hard limit; the one that was idle for longest makes room. Dialling one's own node is an
ordinary link.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from kvxfer.config import Config
from kvxfer.errors import (
    ClosedError,
    IdentityMismatch,
    InternalError,
    KvxferError,
    PeerUnreachable,
    ResourceExhausted,
    TransferTimeout,
)
from kvxfer.logs import logger
from kvxfer.net.dial import candidates
from kvxfer.net.link import Link
from kvxfer.rendezvous.postings import Durations
from kvxfer.tasks import CONNECTING, Deadline, TaskOwner

BREAKER_FAILURES = 3  # in a row, before the breaker opens
BACKOFF_S_MAX = 5.0  # an open breaker lets one attempt through at least this often
SWEEP_MAX, SWEEP_S = 10, 0.25  # idle links are closed in small groups: at most 40 per second
LOG_EVERY_S = 1.0  # one line per peer and second, the rest is counted
GIVEN_UP_TOLD_MAX = 16
ENTRIES_PER_LINK = 4  # remembered peers (for their breakers), as a multiple of the link limit

CLOSED, OPEN, HALF_OPEN = "closed", "open", "half_open"

Dial = Callable[[Sequence[str], str], Awaitable[Link]]  # (addresses, expected node id or '') -> a ready link

log = logger("kvxfer.pool")


@dataclass(slots=True, kw_only=True)
class Breaker:
    """Counts failures in a row and says when the next attempt may start. Times in seconds on the caller's clock."""

    backoff_s: float = 0.1
    backoff_s_max: float = BACKOFF_S_MAX
    failures: int = 0
    next_at: float = 0.0

    def state(self, now: float) -> str:
        """`closed`, `open`, or `half_open` when one attempt may find out."""
        if self.failures < BREAKER_FAILURES:
            return CLOSED
        return OPEN if now < self.next_at else HALF_OPEN

    def wait_s(self, now: float) -> float:
        """Seconds until an attempt may start; 0 unless the breaker is open."""
        return max(0.0, self.next_at - now) if self.failures >= BREAKER_FAILURES else 0.0

    def failed(self, now: float, jitter: float) -> float:
        """One more failure; ``jitter`` in [0, 1) spreads what failed together. Returns the back-off in seconds."""
        self.failures += 1
        grown = self.backoff_s * 2.0 ** min(self.failures - 1, 16)
        backoff_s = min(self.backoff_s_max, grown) * (0.5 + jitter / 2)
        self.next_at = now + backoff_s
        return backoff_s

    def succeeded(self) -> None:
        """The peer answered: everything is forgotten."""
        self.failures = 0
        self.next_at = 0.0


@dataclass(slots=True, kw_only=True, eq=False)
class _PoolPeer:
    key: str
    addresses: tuple[str, ...]
    node_id: str
    breaker: Breaker
    link: Link | None = None
    connecting: asyncio.Future[Link] | None = None
    heard: asyncio.Event = field(default_factory=asyncio.Event)  # from the node, since the breaker opened
    dialled: tuple[str, ...] = ()  # where the present or last attempt looked for it
    keep: bool = False
    used_at: float = 0.0
    retry: asyncio.TimerHandle | None = None
    last_error: str = ""
    logged_at: float = field(default=-LOG_EVERY_S)
    suppressed: int = 0

    @property
    def live(self) -> bool:
        return self.link is not None and self.link.usable


class Pool:
    """Outgoing links by peer. `peers_max` bounds them; ``dial`` makes one, within its own time limit."""

    def __init__(
        self,
        dial: Dial,
        owner: TaskOwner,
        config: Config,
        *,
        clock: Callable[[], float],
        rng: random.Random,
        needed: Callable[[Link], bool],
    ) -> None:
        self._dial = dial
        self._needed = needed
        self._owner = owner
        self._clock = clock
        self._rng = rng
        self._links_max = config.peers_max
        self._idle_s = config.peer_idle_s
        self._backoff_s = config.reconnect_min_s
        self._backoff_s_max = min(config.reconnect_max_s, BACKOFF_S_MAX)
        self._sweeper: asyncio.TimerHandle | None = None
        self._peers: dict[str, _PoolPeer] = {}
        self._aliases: dict[str, str] = {}
        self._closed = False
        self._closing: list[Link] = []
        self.evicted = 0
        self.connects = 0
        self.connect_failures = 0
        self.connect_times = Durations()  # of the attempts that succeeded

    # -- looking -------------------------------------------------------------------------------------

    @property
    def links(self) -> tuple[Link, ...]:
        """The connections to peers that are alive."""
        return tuple(peer.link for peer in self._peers.values() if peer.link is not None and peer.live)

    def states(self) -> dict[str, int]:
        """How many known peers are in each breaker state."""
        now = self._clock()
        counts = {CLOSED: 0, OPEN: 0, HALF_OPEN: 0}
        for peer in self._peers.values():
            counts[peer.breaker.state(now)] += 1
        return counts

    def given_up(self) -> list[str]:
        """Some of the peers whose breaker is not closed, and what failed last."""
        now = self._clock()
        found = (peer for peer in self._peers.values() if peer.breaker.state(now) != CLOSED)
        return [
            f"{peer.key} ({peer.breaker.state(now)}): {peer.last_error}"
            for peer in itertools.islice(found, GIVEN_UP_TOLD_MAX)
        ]

    def unreached(self) -> list[str]:
        """Of the peers to stay connected to: those without a live link, and why."""
        return sorted(
            f"{peer.key}: {peer.last_error or 'connecting'}"
            for peer in self._peers.values()
            if peer.keep and not peer.live
        )

    # -- using ---------------------------------------------------------------------------------------

    async def get(
        self,
        addresses: Sequence[str],
        node_id: str,
        deadline: Deadline,
        *,
        newest: bool = True,
        patience_s: float = 0.0,
    ) -> Link:
        """A ready link to the node. Raises `PeerUnreachable` (with each candidate's reason), what the peer refused
        with, `ResourceExhausted` when every link is in use, or `TransferTimeout`.

        ``newest`` False: the addresses were learnt long ago, and count only when no others are known. A breaker that is
        open, but lets an attempt through within ``patience_s``, is waited for.
        """
        if self._closed:
            raise ClosedError("the peer pool is closed")
        if addresses:
            candidates(addresses)
        peer = self._peer(tuple(addresses), node_id, newest)
        peer.used_at = self._clock()
        try:
            async with asyncio.timeout_at(deadline.at):
                if peer.connecting is not None and peer.dialled != peer.addresses:
                    with suppress(KvxferError):  # that was about the addresses before these
                        return await asyncio.shield(peer.connecting)
                await self._wait_for_breaker(peer, patience_s)
                if peer.link is not None and peer.live:
                    return peer.link
                return await asyncio.shield(peer.connecting or self._connect(peer))
        except TimeoutError:
            raise TransferTimeout(
                "the deadline passed while connecting to the peer", peer=peer.key, state=CONNECTING
            ) from None

    async def _wait_for_breaker(self, peer: _PoolPeer, patience_s: float) -> None:
        until = self._clock() + patience_s
        while not self._closed and not peer.live and peer.connecting is None:
            now = self._clock()
            pause_s = peer.breaker.wait_s(now)
            if not 0 < pause_s <= until - now:
                return
            peer.heard.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await peer.heard.wait()

    def preconnect(self, addresses: Sequence[str], node_id: str = "") -> None:
        """Connect now and stay connected: a lost link is made again with growing back-off. Raises `UsageError`."""
        candidates(addresses)
        peer = self._peer(tuple(addresses), node_id)
        peer.keep = True
        self._reconnect(peer)

    def heard_from(self, node_id: str) -> None:
        """The node dialled us: it is back, whatever the breaker believed."""
        for peer in tuple(self._peers.values()):
            if node_id and node_id in (peer.node_id, peer.key) and not peer.live:  # tools have no id
                peer.breaker.succeeded()
                peer.heard.set()
                if peer.keep:
                    self._reconnect(peer)

    def start_close(self, reason: str) -> None:
        """Say goodbye on every link and make no new one."""
        self._closed = True
        self._closing += self.links
        for link in self._closing:
            link.start_close(reason)

    async def aclose(self, reason: str) -> None:
        """The same, wait until the links are gone, and forget all peers."""
        self.start_close(reason)
        if self._sweeper is not None:
            self._sweeper.cancel()
        for peer in self._peers.values():
            if peer.retry is not None:
                peer.retry.cancel()
            peer.heard.set()
            if peer.connecting is not None and not peer.connecting.done():
                peer.connecting.set_exception(ClosedError("the peer pool is closed"))
        self._peers.clear()
        self._aliases.clear()
        for link in self._closing:
            await link.wait_closed()

    # -- connecting ----------------------------------------------------------------------------------

    def _connect(self, peer: _PoolPeer) -> asyncio.Future[Link]:
        if self._closed:
            raise ClosedError("the peer pool is closed")
        now = self._clock()
        wait_s = peer.breaker.wait_s(now)
        if wait_s > 0:
            raise PeerUnreachable(
                f"the peer failed {peer.breaker.failures} times in a row; last: {peer.last_error}",
                peer=peer.key,
                breaker=OPEN,
                retry_in_s=round(wait_s, 3),
            )
        self._make_room(peer)
        peer.connecting = asyncio.get_running_loop().create_future()
        peer.dialled = peer.addresses
        peer.connecting.add_done_callback(_retrieve)
        self._owner.spawn(self._attempt(peer, peer.connecting), f"connect {peer.key}")
        return peer.connecting

    async def _attempt(self, peer: _PoolPeer, result: asyncio.Future[Link]) -> None:
        self.connects += 1
        began = self._clock()
        try:
            link = await self._dial_making_room(peer)
        except KvxferError as failure:
            self._failed(peer, failure)
            if not result.done():
                result.set_exception(failure)
            return
        except BaseException as unexpected:  # cancelled by the end of the daemon, or a bug: nobody may wait for ever
            peer.connecting = None
            if not result.done():
                ending = isinstance(unexpected, asyncio.CancelledError)
                result.set_exception(ClosedError("the peer pool is closed") if ending else InternalError("dial failed"))
            raise
        peer.connecting = None
        if result.done():  # the pool was closed meanwhile
            link.start_close("not needed")
            return
        self.connect_times.add(max(0.0, self._clock() - began))
        peer.breaker.succeeded()
        result.set_result(self._settle(peer, link))

    async def _dial_making_room(self, peer: _PoolPeer) -> Link:
        """When this process is out of descriptors, idle links are given up for it, one at a time."""
        while True:
            try:
                return await self._dial(peer.addresses, peer.node_id)
            except ResourceExhausted:
                evicted = self._evict(peer)
                if evicted is None:
                    raise
                await evicted.wait_closed()

    def _settle(self, peer: _PoolPeer, link: Link) -> Link:
        """Make ``link`` the peer's one link, unless another entry turned out to be the same process."""
        identity = link.peer
        other = self._peers.get(identity.node_id)
        if other is not None and other is not peer and other.link is not None and other.live:
            if other.link.peer.incarnation == identity.incarnation:
                self._alias(peer, other)
                link.start_close("another link to this node exists")
                return other.link
            other.link.abort(f"the peer restarted as {identity.incarnation}")
        if peer.key != identity.node_id:
            self._rename(peer, identity.node_id)
        peer.link = link
        peer.used_at = self._clock()
        link.closed.add_done_callback(lambda _: self._lost(peer, link))
        self._sweep_at(self._idle_s)
        return link

    def _failed(self, peer: _PoolPeer, failure: KvxferError) -> None:
        peer.connecting = None
        self.connect_failures += 1
        now = self._clock()
        if isinstance(failure, ResourceExhausted):
            self._retry_later(peer, self._backoff_s)
            return  # this process's trouble, not the peer's
        if peer.dialled != peer.addresses:
            self._retry_later(peer, 0)
            return  # it says nothing of where the peer is by now
        if isinstance(failure, IdentityMismatch):  # whatever was known by these addresses is somebody else now
            self._aliases = {alias: key for alias, key in self._aliases.items() if key != peer.key}
        peer.last_error = str(failure)
        backoff_s = peer.breaker.failed(now, self._rng.random())
        if now - peer.logged_at >= LOG_EVERY_S:
            more = f" ({peer.suppressed} more like it suppressed)" if peer.suppressed else ""
            log.warning("cannot connect to %s: %s%s", peer.key, failure, more)
            peer.logged_at, peer.suppressed = now, 0
        else:
            peer.suppressed += 1
        self._retry_later(peer, backoff_s)

    def _lost(self, peer: _PoolPeer, link: Link) -> None:
        if peer.link is link:
            peer.link = None
            self._retry_later(peer, peer.breaker.backoff_s * self._rng.random())

    def _retry_later(self, peer: _PoolPeer, delay_s: float) -> None:
        if peer.keep and not self._closed:
            if peer.retry is not None:
                peer.retry.cancel()
            peer.retry = asyncio.get_running_loop().call_later(delay_s, self._reconnect, peer)

    def _reconnect(self, peer: _PoolPeer) -> None:
        if self._closed or peer.live or peer.connecting is not None:
            return
        try:
            self._connect(peer)
        except KvxferError:  # breaker still open, or no room: both pass
            self._retry_later(peer, max(peer.breaker.wait_s(self._clock()), peer.breaker.backoff_s))

    # -- the table -----------------------------------------------------------------------------------

    def _peer(self, addresses: tuple[str, ...], node_id: str, newest: bool = True) -> _PoolPeer:
        key = node_id or ",".join(addresses)
        key = self._aliases.get(key, key)
        peer = self._peers.get(key)
        if peer is None:
            if not addresses:
                raise PeerUnreachable("no address of this node is known", peer=node_id)
            self._forget_oldest()
            breaker = Breaker(backoff_s=self._backoff_s, backoff_s_max=self._backoff_s_max)
            peer = _PoolPeer(key=key, addresses=addresses, node_id=node_id, breaker=breaker, used_at=self._clock())
            self._peers[key] = peer
        elif node_id and addresses and newest and peer.addresses != addresses:
            peer.addresses = addresses
            peer.breaker.next_at = 0.0  # it has opened for other ones
        return peer

    def _rename(self, peer: _PoolPeer, node_id: str) -> None:
        """Found out by connecting who it is: later callers may come by node id or by these addresses."""
        self._peers.pop(peer.key, None)
        self._aliases[peer.key] = node_id
        replaced = self._peers.pop(node_id, None)
        if replaced is not None:
            peer.keep, replaced.keep = peer.keep or replaced.keep, False
        peer.key = node_id
        self._peers[node_id] = peer

    def _alias(self, peer: _PoolPeer, other: _PoolPeer) -> None:
        if self._peers.get(peer.key) is peer:
            del self._peers[peer.key]
        if peer.key != other.key:
            self._aliases[peer.key] = other.key
        other.keep, peer.keep = other.keep or peer.keep, False

    def _make_room(self, wanted: _PoolPeer) -> None:
        holding = [peer for peer in self._peers.values() if peer.live or peer.connecting is not None]
        if len(holding) >= self._links_max and self._evict(wanted) is None:
            raise ResourceExhausted("every peer link is in use", peer=wanted.key, limit=self._links_max, retryable=True)

    def _evict(self, wanted: _PoolPeer) -> Link | None:
        """Close the link that was idle for longest; None when all are in use."""
        idle = [peer for peer in self._peers.values() if peer.live and not self._busy(peer) and peer is not wanted]
        if not idle:
            return None
        oldest = min(idle, key=lambda peer: peer.used_at)
        assert oldest.link is not None
        link, oldest.link = oldest.link, None
        self.evicted += 1
        link.start_close("idle, made room for another peer")
        return link

    def _forget_oldest(self) -> None:
        limit = self._links_max * ENTRIES_PER_LINK
        if len(self._peers) >= limit:
            dead = [peer for peer in self._peers.values() if not peer.live and not self._busy(peer)]
            if not dead:
                raise ResourceExhausted("too many peers", limit=limit, retryable=True)
            del self._peers[min(dead, key=lambda peer: peer.used_at).key]
        if len(self._aliases) >= limit:
            self._aliases.clear()  # only a shortcut: the next connect finds the node again

    def _busy(self, peer: _PoolPeer) -> bool:
        """Must not be closed to make room: being made, to be kept, or somebody depends on it."""
        if peer.connecting is not None or peer.keep:
            return True
        return peer.link is not None and (peer.link.pending > 0 or self._needed(peer.link))

    # -- idle links ----------------------------------------------------------------------------------

    def _sweep_at(self, delay_s: float) -> None:
        if self._sweeper is None and not self._closed:
            self._sweeper = asyncio.get_running_loop().call_later(delay_s, self._sweep)

    def _sweep(self) -> None:
        """Close links that nobody used for `peer_idle_s`, a few at a time; look again when the next one is due."""
        self._sweeper = None
        now = self._clock()
        waiting = []
        closed = 0
        for peer in tuple(self._peers.values()):
            if peer.link is None or not peer.live:
                continue
            left_s = peer.used_at + self._idle_s - now
            if self._busy(peer):
                left_s = max(left_s, self._idle_s / 4)
            if left_s <= 0 and closed < SWEEP_MAX:
                closed += 1
                link, peer.link = peer.link, None
                link.start_close("idle")
            else:
                waiting.append(max(left_s, SWEEP_S))
        if waiting:
            self._sweep_at(min(waiting))


def _retrieve(future: asyncio.Future[Link]) -> None:
    if not future.cancelled():
        future.exception()
