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
    from kvxfer.dataplane.connections import EndpointKey, EngineConnection

PROBE_AFTER_S = 5.0  # nothing heard for so long: it is asked
ANSWER_S = 1.0  # silent for so long: a new connection is made

log = logger("kvxfer.quiet")


class LivenessProbe:
    """Asks the connections of one engine. ``connect`` makes another one in place of it, ``down`` says that it ended,
    ``take_back`` that the new one (second) is not needed after all. All methods belong to the loop's thread.
    """

    def __init__(
        self,
        engine: Engine,
        tasks: TaskOwner,
        *,
        busy: Callable[[EngineConnection], bool],
        connect: Callable[[EndpointKey, TransportInfo], Awaitable[EngineConnection]],
        down: Callable[[int], None],
        discard: Callable[[EngineConnection, EngineConnection], None],
    ) -> None:
        self._engine = engine
        self._tasks = tasks
        self._busy = busy
        self._connect = connect
        self._down = down
        self._discard_replacement = discard
        self._probing: dict[int, asyncio.Task[EngineConnection]] = {}
        self._now = asyncio.get_running_loop().time

    def needs_probe(self, connection: EngineConnection) -> bool:
        """Whether nothing was heard over it for so long that something on the way may have forgotten it."""
        if connection.info.same_host or self._now() - connection.heard <= PROBE_AFTER_S:
            return False
        return connection.peer in self._probing or not self._busy(connection)

    async def probe(self, connection: EngineConnection, descriptor: RemoteDescriptor) -> EngineConnection:
        """This connection, if its other side answers; or a new one, which was made while it was silent.

        When the new one cannot be made either, the old one stays: perhaps its owner only stands still. `PeerLost` when
        it has ended.
        """
        asked = self._probing.get(connection.peer)
        if asked is None:
            asked = self._tasks.run(
                self._probe_once(connection, descriptor), f"ask {connection.info.name} {connection.endpoint}"
            )
            self._probing[connection.peer] = asked
            asked.add_done_callback(lambda done: self._probed(connection.peer, done))
        return await shared(asked)

    def _probed(self, peer: int, done: asyncio.Task[EngineConnection]) -> None:
        del self._probing[peer]
        _retrieve(done)

    async def _probe_once(self, connection: EngineConnection, descriptor: RemoteDescriptor) -> EngineConnection:
        answer = self._tasks.run(self._answer(connection, descriptor), "an answer over a quiet connection")
        await asyncio.wait((answer,), timeout=ANSWER_S)
        if answer.done():
            answer.result()
            return connection
        anew = self._tasks.run(
            self._made_anew(connection), f"connect {connection.info.name} {connection.endpoint} anew"
        )
        await asyncio.wait((answer, anew), return_when=asyncio.FIRST_COMPLETED)
        answer.add_done_callback(_retrieve)
        if not anew.done():
            anew.add_done_callback(lambda done: self._not_needed(connection, done))
            answer.result()
            return connection
        if anew.exception() is not None:
            connection.heard = self._now()
            return connection
        log.info(
            "%s %s: silent for %g s, replaced by a new connection", connection.info.name, connection.endpoint, ANSWER_S
        )
        if not connection.down:
            self._down(connection.peer)
        return anew.result()

    async def _made_anew(self, connection: EngineConnection) -> EngineConnection:
        return await self._connect(connection.endpoint_key, connection.info)

    def _not_needed(self, connection: EngineConnection, done: asyncio.Task[EngineConnection]) -> None:
        _retrieve(done)
        if not done.cancelled() and done.exception() is None:
            self._discard_replacement(connection, done.result())

    async def _answer(self, connection: EngineConnection, descriptor: RemoteDescriptor) -> None:
        """Returns when the owner has answered anything; `PeerLost` when the connection has ended."""
        connection.importing += 1
        try:
            handle, completion = self._engine.import_(
                connection.peer,
                grant=descriptor.grant,
                generation=descriptor.generation,
                length=descriptor.length,
                access=descriptor.access,
                key=descriptor.key,
            )
            event = await asyncio.shield(completion)
            self._engine.release_import(handle)
        except UnknownRegion as gone:
            raise PeerLost(
                "the connection has ended", peer=connection.endpoint, transport=connection.info.name
            ) from gone
        finally:
            connection.importing -= 1
        if event.status == StatusCode.PEER_LOST or connection.down:
            raise PeerLost("the connection ended", peer=connection.endpoint, transport=connection.info.name)
        connection.heard = self._now()


def _retrieve(done: asyncio.Task[EngineConnection] | asyncio.Task[None]) -> None:
    """Everybody who waited may have given up: then nobody is left to hear of a failure."""
    if not done.cancelled():
        done.exception()
