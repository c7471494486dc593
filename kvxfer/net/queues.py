"""What lies on all control connections of a process, bounded together: what waits to be sent, and what has been
received of messages that are not complete.

The idea: each connection has a bound of its own, but a thousand peers that read slowly, or that never finish what they
began to say, would add up. So there is one sum for all, and less than that for one node, however many connections it
has. A connection is looked at when something is sent on it, and all of them again only when the sum seems too large,
since what was sent meanwhile is not told. The connections of one node also share one turn of the event loop: a node
does not get more of it by having more of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Protocol

from kvxfer.errors import PeerBackpressure
from kvxfer.rendezvous.shares import Shares, is_greedy

UNFINISHED_BYTES_MAX = 64 << 20  # of all connections; a frame's own limit is higher only where it is configured so
UNFINISHED_BYTES_MIN = 64 << 10  # less on one connection is not counted
NODE_QUEUES = 2  # one node's connections may hold as much as so many full ones: one in each direction


class Queue(Protocol):
    """A connection. ``account`` is for whom it counts: the node at its other end."""

    name: str

    @property
    def account(self) -> Hashable: ...

    @property
    def queued_bytes(self) -> int: ...


class Queues:
    """All connections of one daemon; ``bytes_max`` may wait on them together, ``link_bytes_max`` on each."""

    def __init__(self, bytes_max: int, link_bytes_max: int = 0, frame_bytes_max: int = 0) -> None:
        self._bytes_max = bytes_max
        self._node_bytes_max = NODE_QUEUES * link_bytes_max or bytes_max
        self._known: dict[Queue, int] = {}
        self._total = 0
        self._unfinished: dict[Queue, int] = {}
        self._turns: dict[Hashable, deque[Queue]] = {}
        self._receiving = Shares(max(UNFINISHED_BYTES_MAX, NODE_QUEUES * frame_bytes_max))

    # -- to be sent ------------------------------------------------------------------------------------------

    @property
    def total(self) -> int:
        """Bytes that wait to be sent now."""
        self._look_again()
        return self._total

    def full(self, size: int, share: float = 1.0) -> bool:
        """Whether ``size`` more bytes would be more than this share of the bound."""
        limit = share * self._bytes_max
        if self._total + size > limit:
            self._look_again()
        return self._total + size > limit

    def require(self, link: Queue, size: int) -> None:
        """Raises `PeerBackpressure` when there is no room for ``size`` more bytes on any connection, or on those of
        this node.
        """
        if self.full(size):
            why = "too much waits to be sent to all peers together"
            raise PeerBackpressure(why, peer=link.name, bytes=size, limit=self._bytes_max, all_links=True)
        if self._total + size > self._node_bytes_max and self._waits_for(link) + size > self._node_bytes_max:
            why = "too much waits to be sent to this node over all its connections"
            raise PeerBackpressure(why, peer=link.name, bytes=size, limit=self._node_bytes_max)

    def sent(self, link: Queue) -> None:
        """Something was sent on this connection."""
        waits = link.queued_bytes
        self._total += waits - self._known.pop(link, 0)
        if waits:
            self._known[link] = waits

    def forget(self, link: Queue) -> None:
        """The connection has ended."""
        self._total -= self._known.pop(link, 0)
        self._receiving.give(link.account, self._unfinished.pop(link, 0))

    def longest(self) -> Queue | None:
        """The connection on which most bytes wait."""
        self._look_again()
        return max(self._known, key=self._known.__getitem__, default=None)

    def _waits_for(self, link: Queue) -> int:
        """What waits for the node of this connection, and is known to."""
        account = link.account
        return sum(waits for other, waits in self._known.items() if other.account == account)

    def _look_again(self) -> None:
        now = {link: link.queued_bytes for link in self._known}
        self._known = {link: waits for link, waits in now.items() if waits}
        self._total = sum(self._known.values())

    # -- turns -----------------------------------------------------------------------------------------------

    def taken(self, link: Queue) -> bool:
        """Other connections of this node wait for their turn."""
        return link.account in self._turns

    def line_up(self, link: Queue) -> bool:
        """This connection has more to say. Whether it is the first of its node: then somebody has to see to `turn`."""
        line = self._turns.setdefault(link.account, deque())
        line.append(link)
        return len(line) == 1

    def turn(self, account: Hashable) -> tuple[Queue, bool]:
        """Whose turn it is of a node's connections, and whether more of them wait."""
        line = self._turns[account]
        link = line.popleft()
        if not line:
            del self._turns[account]
        return link, bool(line)

    # -- received --------------------------------------------------------------------------------------------

    @property
    def unfinished(self) -> int:
        """Bytes that have been received of messages that are not complete."""
        return self._receiving.total

    def received(self, link: Queue, size: int) -> Queue | None:
        """So much of an unfinished message lies on this connection. Returns the one that has to go for it when all hold
        too much, or this node more than its share: the longest one of the node that holds most.
        """
        counted = size if size >= UNFINISHED_BYTES_MIN else 0
        if counted == self._unfinished.get(link, 0):
            return None
        receiving, account = self._receiving, link.account
        receiving.give(account, self._unfinished.pop(link, 0))
        receiving.take(account, counted)
        if not counted:
            return None
        self._unfinished[link] = counted
        if not is_greedy(receiving.held(account), receiving.total, receiving.limit):
            return None
        most = receiving.most()
        return max(
            (other for other in self._unfinished if other.account == most),
            key=self._unfinished.__getitem__,
        )
