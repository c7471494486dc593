"""Our memory as peers see it: regions, the grants that let them in, and what they tell through these.

A grant that nobody watches yet keeps its notices for a while (`early.py`), since peers may be faster than we are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvxfer.block_parts import BlockParts
from kvxfer.dataplane.early import EarlyNotices, Unexpected
from kvxfer.dataplane.offered import endpoints_of, secrets_of
from kvxfer.descriptors import RemoteDescriptor
from kvxfer.native.engine import Engine, Event, EventKind, RegionInfo
from kvxfer.native.facts import MemoryKind

if TYPE_CHECKING:
    from kvxfer.memory.region import Region


class OwnMemory:
    """The regions and grants of one engine; a part of its `DataPlane`."""

    def __init__(
        self, engine: Engine, *, node_id: str, incarnation: str, advertise: Sequence[str], unexpected: Unexpected
    ) -> None:
        self.engine = engine
        self.engine_id = engine.engine_id.hex()
        self.node_id = node_id
        self.incarnation = incarnation
        self.kinds: dict[int, MemoryKind] = {}  # of the regions
        self._endpoints = endpoints_of(engine.transports, advertise)
        self._secrets = secrets_of(engine.transports)
        self._grant_watchers: dict[int, Callable[[Event], None]] = {}
        self._regions: dict[int, set[Region]] = {}
        self._leaving: set[Region] = set()
        self._early: EarlyNotices[Event] = EarlyNotices()
        self._heard: set[int] = set()  # grants that somebody watches or has watched
        self._unexpected = unexpected

    def export(
        self,
        region: RegionInfo,
        offset: int,
        length: int,
        access: int,
        expires_in_s: float | None,
        blocks: BlockParts | None = None,
    ) -> RemoteDescriptor:
        """Make a grant, of some blocks or of all the range, and describe it for peers."""
        grant = self.engine.grant(region.id, offset, length, access, blocks)
        try:
            return RemoteDescriptor(
                node_id=self.node_id,
                incarnation=self.incarnation,
                engine_id=self.engine_id,
                region=region.id,
                grant=grant.id,
                generation=grant.generation,
                length=grant.length,
                access=grant.access,
                key=grant.key,
                kind="hbm" if region.on_device else "dram",
                pinned=region.kind is MemoryKind.PINNED,
                expires_in_s=expires_in_s,
                endpoints=self._endpoints,
                secrets=self._secrets,
            )
        except BaseException:
            self.engine.revoke(grant.id)
            raise

    def identify(self, *, node_id: str, incarnation: str, advertise: Sequence[str]) -> None:
        """The node's daemon has another identity now: descriptors made from now on carry it."""
        self.node_id, self.incarnation = node_id, incarnation
        self._endpoints = endpoints_of(self.engine.transports, advertise)

    def hold(self, region: Region) -> None:
        """A region exists; it is kept until its release is quiet."""
        self._regions.setdefault(region.id, set()).add(region)
        self.kinds[region.id] = region.kind

    def twins(self, region: Region) -> bool:
        """Whether the same memory is also registered as another region object."""
        return len(self._regions.get(region.id, ())) > 1

    def watch(self, grant: int, callback: Callable[[Event], None]) -> None:
        """Call back for notifications through this grant, and when its last peer vanishes.

        What came before anybody watched is told first, in the next turn of the loop.
        """
        self._grant_watchers[grant] = callback
        self._heard.add(grant)
        loop = asyncio.get_running_loop()
        for event in self._early.take(grant, loop.time(), self._given_up):
            loop.call_soon(self.on_event, event)

    def watched(self, grant: int) -> bool:
        """Somebody is called back for this grant."""
        return grant in self._grant_watchers

    def unwatch(self, grant: int) -> None:
        """Stop calling back."""
        self._grant_watchers.pop(grant, None)

    def revoke(self, grant: int) -> asyncio.Future[Event]:
        """Refuse a grant from now on; the future resolves when no peer can move a byte through it."""
        self.hear_no_more(grant)
        return self.engine.revoke(grant)

    def hear_no_more(self, grant: int) -> None:
        """Nobody wants to know what arrives, or has arrived, by this grant."""
        self.unwatch(grant)
        self._heard.discard(grant)
        for event in self._early.take(grant, asyncio.get_running_loop().time(), self._given_up):
            self._given_up("revoked", event)

    def release(self, region: Region) -> asyncio.Future[Event]:
        """Forget a region; resolves when no peer can reach it. Until then it, and its memory, is kept alive."""
        quiet = self.engine.release(region.id)
        known = self._regions[region.id]
        known.discard(region)
        if not known:
            del self._regions[region.id], self.kinds[region.id]
        self._leaving.add(region)
        quiet.add_done_callback(lambda _: self._leaving.discard(region))
        return quiet

    def on_event(self, event: Event) -> None:
        """A notice through one of our grants, or the end of the last peer that used it."""
        watcher = self._grant_watchers.get(event.id)
        if watcher is not None:
            watcher(event)
        elif event.kind == EventKind.GRANT_LOST:
            return  # a peer that was told nothing else has gone: nobody asked to hear of it
        elif event.id in self._heard:
            self._given_up("nobody_listens", event)
        else:
            self._early.keep(event.id, event, asyncio.get_running_loop().time(), self._given_up)

    def _given_up(self, reason: str, event: Event) -> None:
        self._unexpected.add("notice", reason)

    def closed(self) -> None:
        """The engine is closed, and with it all of this is gone."""
        for region in [region for same in self._regions.values() for region in same]:
            region.plane_closed()
        self._regions.clear()
        self.kinds.clear()
