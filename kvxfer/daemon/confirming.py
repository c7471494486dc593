"""After a lost connection the owner of claims asks the other node which of them it knows.

The idea: an answer that grants a claim can be lost with its connection, and then the owner alone knows of it. Nobody
else would ever end it before its lease. The node that made the claim, still the same process, can say so for certain,
once nothing can arrive over the old connection any more: it waits for that end, or makes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace

from kvxfer.config import Config
from kvxfer.daemon.dispatch import Dispatcher
from kvxfer.errors import ClosedError, KvxferError, ProtocolError
from kvxfer.net.link import Link
from kvxfer.rendezvous import actions as act
from kvxfer.rendezvous.postings import ClaimKey
from kvxfer.tasks import TaskOwner
from kvxfer.wire import claims
from kvxfer.wire import messages as m

log = logging.getLogger("kvxfer.confirming")


class Confirmations:
    """Both sides of the question. ``settling`` says of which claims the owners will hear from us anyway."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        owner: TaskOwner,
        config: Config,
        clock: Callable[[], float],
        settling: Callable[[], set[ClaimKey]],
    ) -> None:
        self._dispatcher = dispatcher
        self._owner = owner
        self._config = config
        self._clock = clock
        self._settling = settling

    def ask(self, action: act.Confirm) -> None:
        """Find out, and end what the other side does not know. An older peer cannot be asked: leases end it."""
        link = action.link
        if not isinstance(link, Link) or not link.speaks(m.Confirm):
            return
        for some in claims.in_messages(action.claims):
            with contextlib.suppress(ClosedError):  # this daemon ends, and its postings with it
                self._owner.spawn(self._ask(link, replace(action, claims=tuple(some))), "confirm claims")

    async def _ask(self, link: Link, action: act.Confirm) -> None:
        message = m.Confirm(session=action.session, claims=claims.pack(action.claims))
        try:
            reply = await link.request(message, timeout=self._config.lease_s)
            if not isinstance(reply, m.Done):
                raise ProtocolError("a question about claims was answered with something else")
            unknown = set(claims.unpack(reply.value)).intersection(action.claims)
        except KvxferError as failure:  # asked again when the claims change hands the next time
            log.debug("%s: %d claims are not confirmed: %s", link.name, len(action.claims), failure)
            return
        if unknown:
            log.info("%s does not know %d of %d claims", link.name, len(unknown), len(action.claims))
        self._dispatcher.run(self._dispatcher.registry.never_arrived(self._clock(), action.session, sorted(unknown)))

    def answer(self, link: Link, message: m.Confirm) -> asyncio.Task[None]:
        """The task that answers. Raises `ProtocolError` for a question that makes no sense."""
        asked = claims.unpack(message.claims)
        if message.session == link.session:
            raise ProtocolError("the connection that is asked about has not ended: the question came over it")
        return self._owner.spawn(self._answer(link, message, asked), "answer about claims")

    async def _answer(self, link: Link, message: m.Confirm, asked: list[ClaimKey]) -> None:
        """What came over the old connection has been handled before this task runs: their wake-ups are older."""
        await self._end_of(message.session, link.peer.node_id)
        unknown = self._dispatcher.registry.unknown_to_us(link.peer.node_id, asked)
        settling = self._settling()
        never = claims.pack(claim for claim in unknown if claim not in settling)
        self._dispatcher.reply(link, m.Done(rid=message.rid, value=never))

    async def _end_of(self, session: str, node_id: str) -> None:
        """The other side has ended this connection; what it sent before may still arrive here, for a moment. Nobody
        ends a connection of another node by its name.
        """
        links = self._dispatcher.links
        old = [link for link in links if link.session == session and link.peer.node_id == node_id]
        if not old:
            return
        await asyncio.wait([link.closed for link in old], timeout=self._config.dead_s)
        for link in old:
            link.abort("the other side has ended it")
        await asyncio.sleep(0)  # whoever waited for an answer over it hears of its end first
