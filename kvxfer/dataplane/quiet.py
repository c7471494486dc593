"""Connections over which nothing was heard for a while: asked before they are used again.

The idea: a middlebox may have forgotten a connection that nobody used, and then bytes go nowhere, without a word. Who
sends them finds out by its deadline, and of a put that has begun nobody can say what arrived. So the question comes
before the first byte, when the work can still go anywhere: a quiet connection is asked something that moves nothing
(an import of what is about to be used, given back at once). When there is no answer within a second, a new connection
is made beside it, and whichever comes first is used: an owner that only stood still keeps its connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from kvxfer.descriptors import RemoteDescriptor
from kvxfer.errors import PeerLost, UnknownRegion
from kvxfer.logs import logger
from kvxfer.native.engine import Engine, TransportInfo
from kvxfer.native.status import StatusCode
from kvxfer.tasks import TaskOwner, shared

if TYPE_CHECKING:
    from kvxfer.dataplane.connections import EngineConnection, Place

QUIET_S = 5.0  # nothing heard for so long: it is asked
ANSWER_S = 1.0  # silent for so long: a new connection is made

log = logger("kvxfer.quiet")


class Quiet:
    """Asks the connections of one engine. ``connect`` makes another one in place of it, ``down`` says that it ended,
    ``take_back`` that the new one (second) is not needed after all. All methods belong to the loop's thread.
    """

    def __init__(
        self,
        engine: Engine,
        tasks: TaskOwner,
        *,
        busy: Callable[[EngineConnection], bool],
        connect: Callable[[Place, TransportInfo], Awaitable[EngineConnection]],
        down: Callable[[int], None],
        take_back: Callable[[EngineConnection, EngineConnection], None],
    ) -> None:
        self._engine = engine
        self._tasks = tasks
        self._busy = busy
        self._connect = connect
        self._down = down
        self._take_back = take_back
        self._asking: dict[int, asyncio.Task[EngineConnection]] = {}
        self._now = asyncio.get_running_loop().time

    def is_quiet(self, route: EngineConnection) -> bool:
        """Whether nothing was heard over it for so long that something on the way may have forgotten it."""
        if route.info.same_host or self._now() - route.heard <= QUIET_S:
            return False
        return route.peer in self._asking or not self._busy(route)

    async def alive(self, route: EngineConnection, descriptor: RemoteDescriptor) -> EngineConnection:
        """This connection, if its other side answers; or a new one, which was made while it was silent.

        When the new one cannot be made either, the old one stays: perhaps its owner only stands still. `PeerLost` when
        it has ended.
        """
        asked = self._asking.get(route.peer)
        if asked is None:
            asked = self._tasks.run(self._alive(route, descriptor), f"ask {route.info.name} {route.endpoint}")
            self._asking[route.peer] = asked
            asked.add_done_callback(lambda done: self._asked(route.peer, done))
        return await shared(asked)

    def _asked(self, peer: int, done: asyncio.Task[EngineConnection]) -> None:
        del self._asking[peer]
        _retrieve(done)

    async def _alive(self, route: EngineConnection, descriptor: RemoteDescriptor) -> EngineConnection:
        answer = self._tasks.run(self._answer(route, descriptor), "an answer over a quiet connection")
        await asyncio.wait((answer,), timeout=ANSWER_S)
        if answer.done():
            answer.result()
            return route
        anew = self._tasks.run(self._made_anew(route), f"connect {route.info.name} {route.endpoint} anew")
        await asyncio.wait((answer, anew), return_when=asyncio.FIRST_COMPLETED)
        answer.add_done_callback(_retrieve)
        if not anew.done():
            anew.add_done_callback(lambda done: self._not_needed(route, done))
            answer.result()
            return route
        if anew.exception() is not None:
            route.heard = self._now()
            return route
        log.info("%s %s: silent for %g s, replaced by a new connection", route.info.name, route.endpoint, ANSWER_S)
        if not route.down:
            self._down(route.peer)
        return anew.result()

    async def _made_anew(self, route: EngineConnection) -> EngineConnection:
        return await self._connect(route.place, route.info)

    def _not_needed(self, route: EngineConnection, done: asyncio.Task[EngineConnection]) -> None:
        _retrieve(done)
        if not done.cancelled() and done.exception() is None:
            self._take_back(route, done.result())

    async def _answer(self, route: EngineConnection, descriptor: RemoteDescriptor) -> None:
        """Returns when the owner has answered anything; `PeerLost` when the connection has ended."""
        route.importing += 1
        try:
            handle, completion = self._engine.import_(
                route.peer,
                grant=descriptor.grant,
                generation=descriptor.generation,
                length=descriptor.length,
                access=descriptor.access,
                key=descriptor.key,
            )
            event = await asyncio.shield(completion)
            self._engine.release_import(handle)
        except UnknownRegion as gone:
            raise PeerLost("the connection has ended", peer=route.endpoint, transport=route.info.name) from gone
        finally:
            route.importing -= 1
        if event.status == StatusCode.PEER_LOST or route.down:
            raise PeerLost("the connection ended", peer=route.endpoint, transport=route.info.name)
        route.heard = self._now()


def _retrieve(done: asyncio.Task[EngineConnection] | asyncio.Task[None]) -> None:
    """Everybody who waited may have given up: then nobody is left to hear of a failure."""
    if not done.cancelled():
        done.exception()
