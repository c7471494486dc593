"""Taking over a landing: a push that came before its decode worker was chosen lies in the daemon's memory; a local
worker maps that memory and reads it in place. No byte is copied."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvxfer.dataplane.reach import Import
from kvxfer.deadline import Deadline
from kvxfer.descriptors import RemoteDescriptor
from kvxfer.errors import ClosedError, KvxferError, PeerLost, ProtocolError, UsageError
from kvxfer.geometry import BlockTable, CacheLayout
from kvxfer.wire.messages import Claim, PostingEvent
from kvxfer.worker.control import ClaimHandle
from kvxfer.worker.exchange import from_peer, unpack_map

if TYPE_CHECKING:
    from kvxfer.worker.client import Client


class Adoption:
    """``async with client.adopt(request_id) as landed``: ``landed.array`` is the memory (uint8, read-only),
    ``layout`` and ``table`` say what lies where. Leaving the block gives the memory back to the daemon.

    When the daemon takes it back earlier, or dies, `array` raises `PeerLost`, and so does leaving the block: what was
    read lately may have been zeros.
    """

    def __init__(self, client: Client, request_id: str, *, wait_s: float, timeout: float) -> None:
        self._client = client
        self._wait_s = wait_s
        self._timeout = timeout
        self._claim: ClaimHandle | None = None
        self._mapped: Import | None = None
        self._entered = False
        self._lost: KvxferError | None = None
        self._array: npt.NDArray[np.uint8] | None = None
        self.request_id = request_id
        self.layout: CacheLayout
        self.table: BlockTable

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """The landed bytes, mapped read-only; shape (length,). Valid inside the block."""
        if self._lost is not None:
            raise self._lost
        if self._array is None:
            raise ClosedError(f"the landing of {self.request_id} is not adopted (any more)")
        return self._array

    async def __aenter__(self) -> Adoption:
        if self._entered:
            raise UsageError("an adoption is entered once", hint="make another one")
        self._entered = True
        deadline = Deadline.after(self._timeout)
        message = Claim(kind="landing", key=self.request_id, wait_s=deadline.wait(self._wait_s))
        self._claim, body = await self._client.control.claim(message, deadline, self._on_claim)
        self._client.enter(self, self._end)
        descriptor: RemoteDescriptor | None = None
        try:
            descriptor, self.layout, self.table = _parse(body)
            async with deadline.bound("the landing was mapped"):
                view, self._mapped = await self._client.plane.map(descriptor)
            self._array = np.frombuffer(view, dtype=np.uint8)
            if self._lost is not None:
                raise self._lost
        except BaseException:
            self._settle()
            if descriptor is not None and not self._client.closed:
                self._client.plane.forget(descriptor)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._settle()
        if error is None and self._lost is not None:
            raise self._lost

    def _settle(self) -> None:
        self._client.leave(self)
        self._array = None
        mapped, self._mapped = self._mapped, None
        claim, self._claim = self._claim, None
        if self._client.closed:
            return
        if mapped is not None:
            self._client.plane.unmap(mapped)
        if claim is not None:
            self._client.control.settle_in_background(claim, "done", None)

    def _end(self, error: KvxferError) -> None:
        self._lost = self._lost or error

    def _on_claim(self, event: PostingEvent) -> None:
        if event.what in ("lost", "orphaned", "expired", "withdrawn"):
            self._end(PeerLost(f"the landing of {self.request_id} is gone: {event.what}"))


def _parse(body: bytes) -> tuple[RemoteDescriptor, CacheLayout, BlockTable]:
    outer = unpack_map(body, "landing")
    inner = outer.get("body")
    if not isinstance(inner, bytes):
        raise ProtocolError("the landing has no body")
    raw = unpack_map(inner, "landing body")
    with from_peer("landing"):
        descriptor = RemoteDescriptor.from_dict(outer.get("descriptor", {}))
        layout, table = CacheLayout.from_dict(raw["layout"]), BlockTable.from_dict(raw["table"])
    # Whoever pushed it chose the layout, and the pool only the length.
    needed = layout.region_bytes()
    if set(needed) != {0} or needed[0] > descriptor.length:
        raise ProtocolError("the landing's layout leaves its memory", length=descriptor.length)
    held = len(table.blocks) * layout.geometry.block_tokens
    if table.tokens > held or (len(table.blocks) and int(table.blocks.max()) >= layout.blocks):
        raise ProtocolError("the landing's table names blocks that its layout does not have")
    return descriptor, layout, table
