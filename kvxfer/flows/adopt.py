"""Taking over a landing: a push that came before its decode worker was chosen lies in the daemon's memory; a local
worker maps that memory and reads it in place. No byte is copied. On an accelerator it is mapped for kernels."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvxfer.dataplane.connections import Import
from kvxfer.dataplane.exports import DeviceMemory, map_device, map_host
from kvxfer.descriptors import RemoteDescriptor
from kvxfer.errors import (
    ClosedError,
    KvxferError,
    PeerLost,
    PeerUnreachable,
    ProtocolError,
    TransportError,
    UsageError,
)
from kvxfer.flows.control import ClaimHandle
from kvxfer.flows.exchange import from_peer, unpack_map
from kvxfer.geometry import BlockTable, CacheLayout
from kvxfer.memory.region import Region
from kvxfer.tasks import CONNECTING, Deadline
from kvxfer.wire.messages import Claim, PostingEvent

if TYPE_CHECKING:
    from kvxfer.client import Client


class Adoption:
    """``async with client.adopt(request_id) as landed``: ``landed.array`` is the memory (uint8, read-only),
    ``layout`` and ``table`` say what lies where. Leaving the block gives the memory back to the daemon.

    ``memory`` is "hbm" when the daemon's pool is on accelerators, and ``device`` the number of the one that took this
    landing, as the daemon knows it. Then `on_device` has the address for kernels, and `copy_to` takes it elsewhere.

    When the daemon takes it back earlier, or dies, `array` and `on_device` raise `PeerLost`, and so does leaving the
    block: what was read lately may have been zeros. What is on a device stays mapped, and its memory in quarantine,
    until the block is left.

    Raises: on entering `UnknownTransfer` (nothing landed in time), `TransferTimeout`, `TransportError` or
    `PeerUnreachable` (this process cannot map host memory of the daemon), `DaemonUnavailable`, `ProtocolError`;
    `UsageError` when it is entered twice.
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
        self._on_device: DeviceMemory | None = None
        self._no_device: TransportError | None = None
        self._descriptor: RemoteDescriptor | None = None
        self.request_id = request_id
        self.memory = "dram"
        self.device: int | None = None
        self.layout: CacheLayout
        self.table: BlockTable

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """The landed bytes, mapped read-only: uint8, shape (length,). Valid inside the block.

        Raises: `PeerLost`, `ClosedError` outside the block, `UsageError` when they are on an accelerator.
        """
        if self._lost is not None:
            raise self._lost
        if self._descriptor is None:
            raise ClosedError(f"the landing of {self.request_id} is not adopted (any more)")
        if self._array is None:
            raise UsageError("this landing is on an accelerator", device=self.device, hint="see on_device and copy_to")
        return self._array

    @property
    def on_device(self) -> DeviceMemory:
        """The landed bytes where they are, for kernels that only read them. Valid inside the block.

        Raises: `TransportError` when this process cannot reach them there (it does not see that accelerator, or mapping
        is turned off), `PeerLost`, `ClosedError` outside the block, `UsageError` when they are in host memory.
        """
        if self._lost is not None:
            raise self._lost
        if self._descriptor is None:
            raise ClosedError(f"the landing of {self.request_id} is not adopted (any more)")
        if self._on_device is None:
            raise self._no_device or UsageError("this landing is in host memory", hint="see array")
        return self._on_device

    async def copy_to(self, region: Region, *, timeout: float | None = None) -> None:
        """Copy all of the landing to the beginning of a region of this client, of whatever memory.

        Raises: `PeerLost`, `ClosedError` outside the block, `OutOfRange` (the region is too short), and what
        `Client.get` raises; ``timeout`` is in seconds (None: `timeout_s`).
        """
        if self._descriptor is None:
            raise self._lost or ClosedError(f"the landing of {self.request_id} is not adopted (any more)")
        size = self._descriptor.length
        await self._client.get(region[0:size], self._descriptor, timeout=timeout)

    async def __aenter__(self) -> Adoption:
        if self._entered:
            raise UsageError("an adoption is entered once", hint="make another one")
        self._entered = True
        deadline = Deadline.after(self._timeout)
        message = Claim(kind="landing", key=self.request_id, wait_s=deadline.wait(self._wait_s))
        self._claim, body = await self._client.control.claim(message, deadline, self._on_claim)
        self._client.register_flow(self, self._end)
        descriptor: RemoteDescriptor | None = None
        try:
            descriptor, self.device, self.layout, self.table = _parse(body)
            async with deadline.bound("the landing was mapped", CONNECTING):
                await self._map(descriptor)
            self._descriptor = descriptor
            if self._lost is not None:
                raise self._lost
        except BaseException:
            self._settle()
            if descriptor is not None and not self._client.closed:
                self._client.plane.drop_import(descriptor)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._settle()
        if error is None and self._lost is not None:
            raise self._lost

    async def _map(self, descriptor: RemoteDescriptor) -> None:
        self.memory = descriptor.kind
        if descriptor.kind == "dram":
            view, self._mapped = await map_host(self._client.plane, descriptor)
            self._array = np.frombuffer(view, dtype=np.uint8)
            return
        try:
            self._on_device, self._mapped = await map_device(self._client.plane, descriptor)
        except (TransportError, PeerUnreachable) as error:  # it can still be copied
            self._no_device = error if isinstance(error, TransportError) else _unmapped(error)

    def _settle(self) -> None:
        self._client.unregister_flow(self)
        self._array = self._on_device = None
        mapped, self._mapped = self._mapped, None
        descriptor, self._descriptor = self._descriptor, None
        claim, self._claim = self._claim, None
        if self._client.closed:
            return
        if mapped is not None:
            self._client.plane.unmap(mapped)
        if descriptor is not None:
            self._client.plane.drop_import(descriptor)
        if claim is not None:
            self._client.control.report_in_background(claim, "done", None)

    def _end(self, error: KvxferError) -> None:
        self._lost = self._lost or error

    def _on_claim(self, event: PostingEvent) -> None:
        if event.what in ("lost", "orphaned", "expired", "withdrawn"):
            self._end(PeerLost(f"the landing of {self.request_id} is gone: {event.what}"))


def _unmapped(error: KvxferError) -> TransportError:
    return TransportError(f"this landing cannot be mapped from here: {error.message}", hint="use copy_to instead")


def _parse(body: bytes) -> tuple[RemoteDescriptor, int | None, CacheLayout, BlockTable]:
    outer = unpack_map(body, "landing")
    inner = outer.get("body")
    if not isinstance(inner, bytes):
        raise ProtocolError("the landing has no body")
    raw = unpack_map(inner, "landing body")
    device = outer.get("device")  # a daemon that has no cards for landings says nothing
    if not isinstance(device, int | None) or isinstance(device, bool):
        raise ProtocolError("the landing is on no device that could be")
    with from_peer("landing"):
        descriptor = RemoteDescriptor.from_dict(outer.get("descriptor", {}))
        layout, table = CacheLayout.from_dict(raw["layout"]), BlockTable.from_dict(raw["table"])
    # Whoever pushed it chose the layout, and the pool only the length.
    needed = layout.region_bytes()
    if set(needed) != {0} or needed[0] > descriptor.length:
        raise ProtocolError("the landing's layout leaves its memory", length=descriptor.length)
    with from_peer("landing"):
        table.used(layout.geometry.block_tokens, layout.blocks)
    return descriptor, device, layout, table
