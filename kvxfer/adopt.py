"""Taking over a landing: a push that came before its decode worker was chosen lies in the daemon's memory; a local
worker maps that memory and reads it in place. No byte is copied."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvxfer.control import ClaimHandle
from kvxfer.deadline import Deadline
from kvxfer.descriptors import RemoteDescriptor
from kvxfer.errors import ClosedError, PeerLost, ProtocolError
from kvxfer.exchange import unpack_map
from kvxfer.geometry import BlockTable, CacheLayout
from kvxfer.wire.messages import Claim, PostingEvent

if TYPE_CHECKING:
    from kvxfer.client import Client


class Adoption:
    """``async with client.adopt(request_id) as landed``: ``landed.array`` is the memory (uint8, read-only),
    ``layout`` and ``table`` say what lies where. Leaving the block gives the memory back to the daemon."""

    def __init__(self, client: Client, request_id: str, *, wait_s: float, timeout: float) -> None:
        self._client = client
        self._wait_s = wait_s
        self._timeout = timeout
        self._claim: ClaimHandle | None = None
        self._descriptor: RemoteDescriptor | None = None
        self._lost: PeerLost | None = None
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
        deadline = Deadline.after(self._timeout)
        message = Claim(kind="landing", key=self.request_id, wait_s=min(self._wait_s, deadline.remaining()))
        self._claim, body = await self._client.control.claim(message, deadline, self._on_claim)
        try:
            descriptor, raw = _parse(body)
            self.layout = CacheLayout.from_dict(raw["layout"])
            self.table = BlockTable.from_dict(raw["table"])
            view = await asyncio.wait_for(
                self._client.plane.map(descriptor), deadline.require("the landing was mapped")
            )
        except BaseException:
            self._settle()
            raise
        self._descriptor = descriptor
        self._array = np.frombuffer(view, dtype=np.uint8)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._settle()

    def _settle(self) -> None:
        self._array = None
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            self._client.plane.unmap(descriptor)
        if self._claim is not None:
            claim, self._claim = self._claim, None
            self._client.control.settle_in_background(claim, "done", None)

    def _on_claim(self, event: PostingEvent) -> None:
        if event.what in ("lost", "orphaned", "expired", "withdrawn"):
            self._lost = PeerLost(f"the landing of {self.request_id} is gone: {event.what}")


def _parse(body: bytes) -> tuple[RemoteDescriptor, dict[str, Any]]:
    outer = unpack_map(body, "landing")
    inner = outer.get("body")
    if not isinstance(inner, bytes):
        raise ProtocolError("the landing has no body")
    raw = unpack_map(inner, "landing body")
    if "layout" not in raw or "table" not in raw:
        raise ProtocolError("the landing does not say what it holds")
    return RemoteDescriptor.from_dict(outer.get("descriptor", {})), raw
