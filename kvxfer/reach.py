"""Reaching other engines: which transport leads to a descriptor's owner, connections, and imported grants.

A descriptor is resolved once. The transports are tried in the order of their rank, each with the owner's candidate
endpoints, until one both connects and can import the grant; the reasons of those passed over are kept (`choices`).
Connecting and importing are shared by everybody who waits for the same, and go on when one of them gives up.

An import is known by everything that makes it a capability, the key included: a descriptor that only claims to be of
the same engine and grant never meets the import of the genuine one.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from kvxfer.descriptors import RemoteDescriptor
from kvxfer.errors import PeerError, PeerLost, PeerUnreachable, ProtocolError, TransportError, UnknownRegion, UsageError
from kvxfer.native.engine import Engine, TransportInfo
from kvxfer.native.status import error_for
from kvxfer.tasks import TaskOwner, shared

IMPORTS_IDLE_MAX = 4096
CHOICES_MAX = 1024
DOWN_EARLY_MAX = 1024
ImportKey = tuple[str, int, int, int, int, bytes]
K = TypeVar("K")
T = TypeVar("T")


@dataclass(slots=True)
class Route:
    """A connection to one engine over one transport."""

    engine_id: str
    info: TransportInfo
    endpoint: str
    peer: int
    imports: set[ImportKey] = field(default_factory=set)
    down: bool = False


@dataclass(slots=True, eq=False)
class Import:
    """A remote grant that is ready for use. ``unwanted``: it goes when the last user has gone."""

    key: ImportKey
    route: Route
    handle: int
    length: int
    users: int = 0
    unwanted: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """Why a transport was chosen for an engine, and why better ones were not."""

    engine_id: str
    transport: str
    endpoint: str
    passed_over: tuple[str, ...]


class Reach:
    """The connections and imports of one engine. All methods belong to the loop's thread."""

    def __init__(self, engine: Engine, tasks: TaskOwner, allowed: Sequence[str] | None) -> None:
        self.engine = engine
        self._tasks = tasks
        self._allowed = None if allowed is None else frozenset(allowed)
        self._transports = sorted(engine.transports, key=lambda info: info.rank)
        self._routes: dict[tuple[str, int, str], Route] = {}
        self._routes_by_peer: dict[int, Route] = {}
        self._connecting: dict[tuple[str, int, str], asyncio.Task[Route]] = {}
        self._imports: OrderedDict[ImportKey, Import] = OrderedDict()
        self._resolving: dict[ImportKey, asyncio.Task[Import]] = {}
        self._unwanted: set[ImportKey] = set()  # of those being resolved
        self._down_early: OrderedDict[int, None] = OrderedDict()  # ended before anybody knew that they had begun
        self.choices: OrderedDict[str, Choice] = OrderedDict()

    def ready(self, descriptor: RemoteDescriptor) -> Import | None:
        """The import of a descriptor, if there is one."""
        return self._imports.get(_key_of(descriptor))

    def is_live(self, found: Import) -> bool:
        """False once it was dropped."""
        return self._imports.get(found.key) is found

    async def resolve(self, descriptor: RemoteDescriptor) -> Import:
        """Connect and import unless that was done; `PeerUnreachable` with every reason, or why the owner refused."""
        key = _key_of(descriptor)
        ready = self._imports.get(key)
        if ready is not None:
            ready.unwanted = False
            self._imports.move_to_end(key)
            return ready
        self._unwanted.discard(key)
        pending = self._resolving.get(key)
        if pending is None:
            pending = self._tasks.run(self._resolve_once(key, descriptor), f"import grant {descriptor.grant}")
            self._resolving[key] = pending
            pending.add_done_callback(lambda done: _forget_task(self._resolving, key, done))
        return await shared(pending)

    async def _resolve_once(self, key: ImportKey, descriptor: RemoteDescriptor) -> Import:
        found = await self._try_transports(key, descriptor)
        self._imports[key] = found
        if key in self._unwanted:
            # Whoever still waits for it finds that it is not live, and resolves anew.
            self._unwanted.discard(key)
            self.drop(found)
        self._evict_idle()
        return found

    async def _try_transports(self, key: ImportKey, descriptor: RemoteDescriptor) -> Import:
        reasons: list[str] = []
        for info in self._transports:
            candidates = descriptor.endpoints.get(info.name, ())
            if self._allowed is not None and info.name not in self._allowed:
                candidates = ()
            for endpoint in candidates:
                try:
                    found = await self._by_route(key, info, endpoint, descriptor)
                except (PeerError, ProtocolError, TransportError) as error:
                    reasons.append(f"{info.name} {endpoint}: {error.message}")
                    continue
                self._remember(Choice(descriptor.engine_id, info.name, endpoint, tuple(reasons)))
                return found
        raise PeerUnreachable(
            "no transport reaches the owner of this descriptor" + "".join(f"; {reason}" for reason in reasons),
            peer=descriptor.node_id,
            it_offers=", ".join(descriptor.endpoints),
            we_have=", ".join(info.name for info in self._transports),
        )

    async def _by_route(
        self, key: ImportKey, info: TransportInfo, endpoint: str, descriptor: RemoteDescriptor
    ) -> Import:
        """Import over the connection that there is; over a fresh one when that turns out to be dead."""
        old = self._routes.get((descriptor.engine_id, info.index, endpoint))
        if old is not None:
            try:
                return await self._import(key, old, descriptor)
            except PeerLost:
                if not old.down:
                    self.peer_down(old.peer)
        return await self._import(key, await self._route(descriptor.engine_id, info, endpoint), descriptor)

    def _remember(self, choice: Choice) -> None:
        self.choices[choice.engine_id] = choice
        while len(self.choices) > CHOICES_MAX:
            self.choices.popitem(last=False)

    async def _route(self, engine_id: str, info: TransportInfo, endpoint: str) -> Route:
        key = (engine_id, info.index, endpoint)
        route = self._routes.get(key)
        if route is not None:
            return route
        pending = self._connecting.get(key)
        if pending is None:
            pending = self._tasks.run(self._connect_once(key, info), f"connect {info.name} {endpoint}")
            self._connecting[key] = pending
            pending.add_done_callback(lambda done: _forget_task(self._connecting, key, done))
        return await shared(pending)

    async def _connect_once(self, key: tuple[str, int, str], info: TransportInfo) -> Route:
        engine_id, _, endpoint = key
        try:
            peer, completion = self.engine.connect(info.index, endpoint)
        except (UsageError, ValueError) as wrong:
            # What is wrong with it came from the owner of the descriptor, not from our caller.
            raise PeerUnreachable(f"cannot connect: {wrong}", peer=endpoint[:80], transport=info.name) from wrong
        event = await asyncio.shield(completion)
        if event.status != 0:
            raise error_for(event.status, sys_errno=event.sys_errno, peer=endpoint, transport=info.name)
        if peer in self._down_early:
            del self._down_early[peer]
            self.engine.close_peer(peer)
            raise PeerLost("the connection ended as soon as it was made", peer=endpoint, transport=info.name)
        route = Route(engine_id, info, endpoint, peer)
        self._routes[key] = route
        self._routes_by_peer[peer] = route
        return route

    async def _import(self, key: ImportKey, route: Route, descriptor: RemoteDescriptor) -> Import:
        try:
            handle, completion = self.engine.import_(
                route.peer,
                grant=descriptor.grant,
                generation=descriptor.generation,
                length=descriptor.length,
                access=descriptor.access,
                key=descriptor.key,
            )
        except UnknownRegion as gone:
            raise PeerLost("the connection has ended", peer=route.endpoint, transport=route.info.name) from gone
        event = await asyncio.shield(completion)
        if event.status != 0:
            self.engine.release_import(handle)
            raise error_for(event.status, sys_errno=event.sys_errno, peer=route.endpoint, transport=route.info.name)
        if route.down:
            self.engine.release_import(handle)
            raise PeerLost("the connection ended", peer=route.endpoint, transport=route.info.name)
        route.imports.add(key)
        return Import(key, route, handle, descriptor.length)

    def drop(self, found: Import) -> None:
        """Let go of an import; harmless when that was done."""
        if self._imports.get(found.key) is found:
            del self._imports[found.key]
            found.route.imports.discard(found.key)
            self.engine.release_import(found.handle)

    def forget(self, descriptor: RemoteDescriptor) -> None:
        """This import will not be used again: it goes now, or when its last user goes, or as soon as it is made."""
        key = _key_of(descriptor)
        found = self._imports.get(key)
        if found is not None:
            found.unwanted = True
            self.left(found)
        elif key in self._resolving:
            self._unwanted.add(key)

    def left(self, found: Import) -> None:
        """Somebody stopped using an import (see ``users``)."""
        if found.unwanted and not found.users:
            self.drop(found)

    def _evict_idle(self) -> None:
        while len(self._imports) > IMPORTS_IDLE_MAX:
            idle = next((item for item in self._imports.values() if not item.users), None)
            if idle is None:
                return
            self.drop(idle)

    def peer_down(self, peer: int) -> None:
        """A connection ended: its imports go, the next use connects anew."""
        route = self._routes_by_peer.pop(peer, None)
        if route is None:
            self._down_early[peer] = None
            while len(self._down_early) > DOWN_EARLY_MAX:
                self._down_early.popitem(last=False)
            return
        route.down = True
        self._routes.pop((route.engine_id, route.info.index, route.endpoint), None)
        for key in tuple(route.imports):
            found = self._imports.get(key)
            if found is not None:
                self.drop(found)
        self.engine.close_peer(peer)


def _key_of(descriptor: RemoteDescriptor) -> ImportKey:
    return (
        descriptor.engine_id,
        descriptor.grant,
        descriptor.generation,
        descriptor.length,
        descriptor.access,
        descriptor.key,
    )


def _forget_task(table: dict[K, asyncio.Task[T]], key: K, done: asyncio.Task[T]) -> None:
    del table[key]
    if not done.cancelled():
        done.exception()  # everybody who waited may have given up: then nobody is left to hear of a failure
