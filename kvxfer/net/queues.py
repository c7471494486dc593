"""What waits to be sent on all control connections of a process, bounded together.

The idea: each connection has a bound of its own, but a thousand peers that read slowly would add up. A connection is
looked at when something is sent on it, and all of them again only when the sum seems too large, since what was sent
meanwhile is not told.
"""

from __future__ import annotations

from typing import Protocol

from kvxfer.errors import PeerBackpressure


class Queue(Protocol):
    """A connection."""

    name: str

    @property
    def queued_bytes(self) -> int: ...


class Queues:
    """All connections of one daemon; ``bytes_max`` may wait on them together."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._known: dict[Queue, int] = {}
        self._total = 0

    @property
    def total(self) -> int:
        """Bytes that wait now."""
        self._look_again()
        return self._total

    def full(self, size: int, share: float = 1.0) -> bool:
        """Whether ``size`` more bytes would be more than this share of the bound."""
        limit = share * self._bytes_max
        if self._total + size > limit:
            self._look_again()
        return self._total + size > limit

    def require(self, link: Queue, size: int) -> None:
        """Raises `PeerBackpressure` when there is no room for ``size`` more bytes on any connection."""
        if self.full(size):
            why = "too much waits to be sent to all peers together"
            raise PeerBackpressure(why, peer=link.name, bytes=size, limit=self._bytes_max, all_links=True)

    def sent(self, link: Queue) -> None:
        """Something was sent on this connection."""
        waits = link.queued_bytes
        self._total += waits - self._known.pop(link, 0)
        if waits:
            self._known[link] = waits

    def forget(self, link: Queue) -> None:
        """The connection has ended."""
        self._total -= self._known.pop(link, 0)

    def longest(self) -> Queue | None:
        """The connection on which most bytes wait."""
        self._look_again()
        return max(self._known, key=self._known.__getitem__, default=None)

    def _look_again(self) -> None:
        now = {link: link.queued_bytes for link in self._known}
        self._known = {link: waits for link, waits in now.items() if waits}
        self._total = sum(self._known.values())
