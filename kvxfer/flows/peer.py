"""`Peer`: a node that a client talks to, as a handle; everything it does the client can do with an address."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvxfer.addresses import parse_address
from kvxfer.deadline import Deadline
from kvxfer.descriptors import CANDIDATES_MAX, RemoteDescriptor
from kvxfer.errors import UsageError
from kvxfer.wire.messages import Echo, EchoReply

if TYPE_CHECKING:
    from kvxfer.client import Client
    from kvxfer.dataplane.transfer import Transfer
    from kvxfer.memory.region import Region, Span


class Peer:
    """One node under its candidate addresses. Made by `Client.connect`."""

    def __init__(self, client: Client, node: tuple[str, ...]) -> None:
        self._client = client
        self.node = node
        self.address = (
            ""  # of its daemon, over which ours reached it last: one of the candidates, or where it came from
        )

    def put(self, source: Region | Span, target: RemoteDescriptor, **options: Any) -> Transfer:
        """See `Client.put`."""
        return self._client.put(source, target, **options)

    def get(self, target: Region | Span, source: RemoteDescriptor, **options: Any) -> Transfer:
        """See `Client.get`."""
        return self._client.get(target, source, **options)

    async def send(self, channel: str, data: bytes, *, timeout: float | None = None) -> None:
        """See `Client.send`."""
        await self._client.send(self.node, channel, data, timeout=timeout)

    async def recv(self, channel: str, *, timeout: float | None = None) -> bytes:
        """See `Client.recv`: channels belong to our own node, whoever sends to them."""
        return await self._client.recv(channel, timeout=timeout)

    async def lookup(self, name: str, *, wait_s: float = 0.0, timeout: float | None = None) -> RemoteDescriptor:
        """See `Client.lookup`."""
        return await self._client.lookup(name, node=self.node, wait_s=wait_s, timeout=timeout)

    async def ping(self, *, timeout: float | None = None) -> float:
        """Seconds for one message to the node's daemon and back, through our own."""
        limit = self._client.config.timeout_s if timeout is None else timeout
        started = time.perf_counter()
        reply = await self._client.control.request(Echo(node=self.node, data=b"ping"), Deadline.after(limit))
        took = time.perf_counter() - started
        if isinstance(reply, EchoReply):
            self.address = reply.via
        return took


def as_node(node: str | Sequence[str]) -> tuple[str, ...]:
    """Candidate addresses as a tuple; () means this node. A mistyped address is refused here, before anything is
    sent.
    """
    candidates = (node,) if isinstance(node, str) else tuple(node)
    if len(candidates) > CANDIDATES_MAX:
        raise UsageError("too many candidate addresses", field="node", value=len(candidates), limit=CANDIDATES_MAX)
    for text in candidates:
        parse_address(text)
    return candidates
