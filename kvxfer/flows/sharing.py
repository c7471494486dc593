"""Regions under a name: `share` posts a descriptor at the own daemon, `lookup` fetches it from another node's."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import TYPE_CHECKING

import msgpack

from kvxfer.deadline import OTHER_SIDE, Deadline, seconds
from kvxfer.descriptors import RemoteDescriptor
from kvxfer.errors import UsageError
from kvxfer.flows.control import PostingHandle
from kvxfer.flows.exchange import from_peer, unpack_map
from kvxfer.wire.messages import Claim, PostingEvent

if TYPE_CHECKING:
    from kvxfer.client import Client
    from kvxfer.memory.region import Region

NAME_CHARS_MAX = 256


class Share:
    """A region under a name; ends with `withdraw`, with its ``async with`` block, with its lease or with the client."""

    def __init__(self, client: Client, region: Region, access: str) -> None:
        self._client = client
        self._region = region
        self._handle: PostingHandle | None = None
        self.ended = ""
        self.descriptor = region.lend(access, self._region_released)

    async def _post(self, name: str, lease_s: float, deadline: Deadline) -> None:
        body: bytes = msgpack.packb(self.descriptor.to_dict())
        try:
            self._handle = await self._client.control.post(
                "region", name, body, lease_s=lease_s, claims_max=0, on_event=self._on_event, deadline=deadline
            )
        except BaseException:
            if not self._client.closed:
                self._region.take_back(self.descriptor.grant)
            raise

    async def withdraw(self, *, timeout: float | None = None) -> None:
        """Remove the name and take the descriptor back; returns when no peer can reach the memory through it.

        A `TransferTimeout` says that one still can, as in `Region.revoke`.
        """
        deadline = self._client.deadline(timeout)
        handle, self._handle = self._handle, None
        if handle is not None:
            if self._client.closed:
                return
            self._client.control.withdraw_in_background(handle, "withdrawn")
            quiet = self._region.take_back(self.descriptor.grant)
            async with deadline.bound("every peer had let go of the shared memory", OTHER_SIDE):
                await asyncio.shield(quiet)

    def _region_released(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            self._client.control.withdraw_in_background(handle, "its memory was released")

    def _on_event(self, event: PostingEvent) -> None:
        """Claims need no answer: the engine enforces what the descriptor allows."""
        if event.what in ("expired", "withdrawn"):
            self.ended = event.what

    async def renew(self, lease_s: float, *, timeout: float | None = None) -> None:
        """Keep the name for another ``lease_s`` seconds; the daemon has to say so within ``timeout``."""
        if self._handle is None:
            raise UsageError("this share was withdrawn")
        deadline = self._client.deadline(timeout)
        await self._client.control.renew(self._handle, seconds(lease_s, "lease_s"), deadline)

    async def __aenter__(self) -> Share:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.withdraw()


async def share_region(
    client: Client, region: Region, name: str, access: str, lease_s: float, deadline: Deadline
) -> Share:
    """See `Client.share`."""
    _check_name(name)
    region.require(client.plane)
    share = Share(client, region, access)
    await share._post(name, lease_s, deadline)
    return share


async def lookup_descriptor(
    client: Client, node: tuple[str, ...], name: str, wait_s: float, deadline: Deadline
) -> RemoteDescriptor:
    """See `Client.lookup`."""
    _check_name(name)
    message = Claim(node=node, kind="region", key=name, wait_s=deadline.wait(wait_s))
    claim, body = await client.control.claim(message, deadline, _ignore_claims)
    # The descriptor stays valid until its owner takes it back; the claim itself is of no further use.
    client.control.settle_in_background(claim, "done", None)
    with from_peer("descriptor"):
        return RemoteDescriptor.from_dict(unpack_map(body, "descriptor"))


def _ignore_claims(_: PostingEvent) -> None:
    """Claims of a name need no answer: the engine enforces what the descriptor allows."""


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not 0 < len(name) <= NAME_CHARS_MAX:
        raise UsageError(f"name must be 1 to {NAME_CHARS_MAX} characters", field="name", value=repr(name)[:40])
