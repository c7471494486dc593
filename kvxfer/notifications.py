"""Notifications through one of our own descriptors, in the order in which they arrived."""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING

from kvxfer.deadline import Deadline
from kvxfer.descriptors import RemoteDescriptor
from kvxfer.errors import BusyError, PeerLost, TransferTimeout
from kvxfer.native.engine import Event, EventKind

if TYPE_CHECKING:
    from kvxfer.dataplane import DataPlane

PENDING_MAX = 65536


class Notifications:
    """``async with client.notifications(descriptor) as told: value = await told.next(timeout=5)``.

    Each value comes after the bytes of the put that sent it. When the last peer that used the descriptor vanishes,
    `next` raises `PeerLost` (after the values that arrived before); more than `PENDING_MAX` values not fetched is a
    `BusyError`.
    """

    def __init__(self, plane: DataPlane, descriptor: RemoteDescriptor) -> None:
        self._plane = plane
        self._grant = descriptor.grant
        self._values: deque[int] = deque()
        self._error: BusyError | PeerLost | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Notifications:
        self._plane.watch(self._grant, self._on_event)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._plane.unwatch(self._grant)

    async def next(self, *, timeout: float) -> int:
        """The next value; `TransferTimeout` when none comes in ``timeout`` seconds."""
        deadline = Deadline.after(timeout)
        while not self._values:
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            if self._waiter is None or self._waiter.done():
                self._waiter = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._waiter], timeout=deadline.remaining())
            if not self._values and self._error is None and not deadline.remaining():
                raise TransferTimeout(f"no notification within {timeout:g} s")
        return self._values.popleft()

    def _on_event(self, event: Event) -> None:
        if event.kind == EventKind.GRANT_LOST:
            self._error = PeerLost("the last peer that used this descriptor vanished")
        elif len(self._values) >= PENDING_MAX:
            self._error = BusyError("notifications were not fetched", limit=PENDING_MAX)
        else:
            self._values.append(event.value)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
