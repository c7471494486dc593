"""What happens to postings and claims, told to the workers of this node, also to one that does not read for a while.

The idea: a worker that computes for seconds is not dead, and others decide how much happens to its postings meanwhile.
So its queue takes events only up to a part of its bound. From then on they are kept here, and merged: a claim of a
shared region that has come and gone is nothing that anybody needs to hear, and of several states of one claim the last
counts. What is kept is bounded by live claims, and when it is much, whoever claims gets the back-pressure.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

from kvxfer.net.link import Link
from kvxfer.wire.messages import PostingEvent

QUEUE_PART = 16  # of a link's bound: so much of it may events fill
KEPT_MAX = 1024  # claims with events that a worker has not taken yet, until new claims on its postings are refused
KEPT_DETAIL_CHARS = 200
RETRY_S = 0.02
ENDS = ("settled", "lost")

Key = tuple[str, int]


class Events:
    """Of all links of one daemon. ``send`` queues an event on a link, which may end it."""

    def __init__(self, send: Callable[[Link, PostingEvent], None], *, queue_bytes_max: int) -> None:
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._queue_bytes_max = queue_bytes_max // QUEUE_PART
        self._kept: dict[Link, OrderedDict[Key, list[PostingEvent]]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.merged = 0

    def kept(self, link: Link) -> int:
        """Claims and postings with events that wait for this link."""
        return len(self._kept.get(link, ()))

    def slow(self, link: object) -> bool:
        """The worker does not keep up with what happens to its postings."""
        return isinstance(link, Link) and self.kept(link) >= KEPT_MAX

    def tell(self, link: Link, event: PostingEvent, kind: str) -> None:
        """Queue an event about a posting of this kind, or keep it until the link has room."""
        if link.closed.done():
            return
        waiting = self._kept.get(link)
        if waiting is None and link.queued_bytes <= self._queue_bytes_max:
            self._send(link, event)
            return
        self._keep(link, replace(event, detail=event.detail[:KEPT_DETAIL_CHARS]), kind)
        if self._timer is None:
            self._timer = self._loop.call_later(RETRY_S, self._retry)

    def forget(self, link: Link) -> None:
        """The connection has ended: its kept events are dropped."""
        self._kept.pop(link, None)

    def close(self) -> None:
        """Nothing is told any more."""
        self._kept.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _keep(self, link: Link, event: PostingEvent, kind: str) -> None:
        waiting = self._kept.setdefault(link, OrderedDict())
        key = (event.posting, event.claim)
        before = waiting.get(key, [])
        if event.claim and kind == "region" and event.what in ENDS and before and before[0].what == "claimed":
            del waiting[key]  # it came and went
            self.merged += 1 + len(before)
            if not waiting:
                del self._kept[link]
            return
        kept = [one for one in before if one.what == "claimed"]  # what was in between has been overtaken
        self.merged += len(before) - len(kept)
        waiting[key] = [*kept, event]

    def _retry(self) -> None:
        self._timer = None
        for link in tuple(self._kept):
            waiting = self._kept[link]
            while waiting and not link.closed.done() and link.queued_bytes <= self._queue_bytes_max:
                _, events = waiting.popitem(last=False)
                for event in events:
                    self._send(link, event)
            if not waiting or link.closed.done():
                self._kept.pop(link, None)
        if self._kept:
            self._timer = self._loop.call_later(RETRY_S, self._retry)
