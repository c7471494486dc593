"""Notifications through one of our own descriptors, in the order in which they arrived."""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING

from kvxfer.deadline import OTHER_SIDE, Deadline
from kvxfer.descriptors import RemoteDescriptor
from kvxfer.errors import BusyError, ClosedError, KvxferError, PeerLost, TransferTimeout, UsageError
from kvxfer.native.engine import Event, EventKind

if TYPE_CHECKING:
    from kvxfer.client import Client

PENDING_MAX = 65536


class Notifications:
    """``async with client.notifications(descriptor) as told: value = await told.next(timeout=5)``.

    Each value comes after the bytes of the put that sent it. When the last peer that used the descriptor vanishes,
    `next` raises `PeerLost` (after the values that arrived before); more than `PENDING_MAX` values not fetched is a
    `BusyError`.
    """

    def __init__(self, client: Client, descriptor: RemoteDescriptor) -> None:
        if not isinstance(descriptor, RemoteDescriptor) or descriptor.engine_id != client.plane.engine_id:
            raise UsageError("notifications come through a descriptor that this client made", field="descriptor")
        self._client = client
        self._grant = descriptor.grant
        self._values: deque[int] = deque()
        self._error: KvxferError | None = None
        self._watching = False
        self._waiter: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Notifications:
        plane = self._client.plane
        if plane.memory.watched(self._grant):
            raise UsageError("somebody listens to this descriptor already", grant=self._grant)
        plane.memory.watch(self._grant, self._on_event)
        self._client.enter(self, self._end)
        self._watching = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watching = False
        self._client.leave(self)
        if not self._client.closed:
            self._client.plane.memory.unwatch(self._grant)

    async def next(self, *, timeout: float) -> int:
        """The next value; `TransferTimeout` when none comes in ``timeout`` seconds."""
        deadline = Deadline.after(timeout)
        while not self._values:
            if self._error is not None:
                error = self._error
                if not isinstance(error, ClosedError):
                    self._error = None
                raise error
            if not self._watching:
                raise ClosedError("notifications are taken inside the block only")
            if self._waiter is None or self._waiter.done():
                self._waiter = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._waiter], timeout=deadline.remaining())
            if not self._values and self._error is None and not deadline.remaining():
                raise TransferTimeout(f"no notification within {timeout:g} s", state=OTHER_SIDE)
        return self._values.popleft()

    def _on_event(self, event: Event) -> None:
        if event.kind == EventKind.GRANT_LOST:
            self._error = PeerLost("the last peer that used this descriptor vanished")
        elif len(self._values) >= PENDING_MAX:
            self._error = BusyError("notifications were not fetched", limit=PENDING_MAX)
        else:
            self._values.append(event.value)
        self._wake()

    def _end(self, error: KvxferError) -> None:
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
