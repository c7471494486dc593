"""Settlements that another node could not be told yet: repeated until it answers.

The idea: the owner of a posting keeps an orphaned claim alive, because the data path may still work; only its claimant
knows that it has ended. So a settlement that found nobody is kept, and each node has one task that tries again with
growing pauses, and at once when the node is heard from. Whatever the node answers ends it, a refusal as well, and
``told`` is called: a worker remembers what it said until then, for this daemon may end before it has passed it on.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from kvxfer.config import Config
from kvxfer.daemon.dispatch import Dispatcher
from kvxfer.errors import NOT_TOLD, ClosedError, KvxferError, ProtocolError, TooManyPending
from kvxfer.logs import logger
from kvxfer.net.link import Link
from kvxfer.rendezvous.actions import SettleElsewhere
from kvxfer.rendezvous.postings import ClaimKey
from kvxfer.rendezvous.shares import FairShares
from kvxfer.tasks import TaskOwner
from kvxfer.wire import messages as m

RETRY_S_MIN, RETRY_S_MAX = 0.1, 5.0

log = logger("kvxfer.settling")


@dataclass(slots=True, eq=False)
class _Node:
    waiting: OrderedDict[ClaimKey, tuple[SettleElsewhere, float]] = field(default_factory=OrderedDict)
    heard: asyncio.Event = field(default_factory=asyncio.Event)


class CompletionOutbox:
    """At most ``limit`` of them, each for ``keep_s`` seconds. ``tell`` raises `KvxferError` when it could not."""

    def __init__(
        self,
        tell: Callable[[SettleElsewhere], Awaitable[None]],
        owner: TaskOwner,
        *,
        clock: Callable[[], float],
        rng: random.Random,
        limit: int,
        keep_s: float,
        told: Callable[[SettleElsewhere], None] = lambda _: None,
    ) -> None:
        self._tell = tell
        self._owner = owner
        self._clock = clock
        self._rng = rng
        self._limit = limit
        self._keep_s = keep_s
        self._told = told
        self._nodes: dict[str, _Node] = {}
        self._kept: Counter[ClaimKey] = Counter()
        self.given_up = 0

    def __len__(self) -> int:
        return sum(len(node.waiting) for node in self._nodes.values())

    @property
    def claims(self) -> set[ClaimKey]:
        """The claims that unacknowledged reports are about."""
        return {claim for node in self._nodes.values() for claim in node.waiting}

    def about(self, claim: ClaimKey) -> bool:
        """One of them is about this claim."""
        return claim in self._kept

    def keep(self, action: SettleElsewhere) -> None:
        """Keep a completion report until its peer can be reached and has acknowledged it."""
        if len(self) >= self._limit:
            self._give_up(action, "too many wait already")
            return
        name = action.node_id or ",".join(action.message.node)
        node = self._nodes.get(name)
        known = node or _Node()
        claim = (action.message.posting, action.message.claim)
        if claim not in known.waiting:
            self._kept[claim] += 1
        known.waiting[claim] = (action, self._clock() + self._keep_s)
        if node is None:
            self._nodes[name] = known
            self._owner.spawn(self._repeat(name, known), f"settle at {name}")

    def heard_from(self, node_id: str) -> None:
        """The node can be reached again, or so it seems."""
        node = self._nodes.get(node_id)
        if node is not None:
            node.heard.set()

    async def _repeat(self, name: str, node: _Node) -> None:
        pause_s = RETRY_S_MIN
        while node.waiting:
            try:
                async with asyncio.timeout(pause_s * self._rng.uniform(0.5, 1.0)):
                    await node.heard.wait()
                pause_s = RETRY_S_MIN
            except TimeoutError:
                pause_s = min(RETRY_S_MAX, 2 * pause_s)
            node.heard.clear()
            await self._tell_waiting(node)
        del self._nodes[name]

    async def _tell_waiting(self, node: _Node) -> None:
        """In order, until one fails: the next would as well."""
        while node.waiting:
            key, (action, until) = next(iter(node.waiting.items()))
            try:
                await self._tell(action)
            except NOT_TOLD as error:
                if self._clock() < until:
                    return
                self._give_up(action, str(error))
            except KvxferError as refused:  # it knows nothing of the claim: there is nothing left to end
                log.debug("claim %d of %s was settled late: %s", action.message.claim, action.message.posting, refused)
            if node.waiting.pop(key, None) is not None:
                self._kept[key] -= 1
                if not self._kept[key]:
                    del self._kept[key]
            self._told(action)

    def _give_up(self, action: SettleElsewhere, why: str) -> None:
        self.given_up += 1
        log.warning("node %s was never told that claim %d ended: %s", action.node_id, action.message.claim, why)


# -- after a lost connection the owner of claims asks the other node which of them it knows ----------------------------
# The idea: an answer that grants a claim can be lost with its connection, and then the owner alone knows of it.
# Nobody else would ever end it before its lease. The node that made the claim, still the same process, can say so for
# certain, once nothing can arrive over the old connection any more: it waits for that end, or makes it. A question
# may be long, so it is answered in slices, one question at a time; and about claims that were never ours there is
# nothing to look up: over each connection only so many were asked for.


SLICE = 256  # claims that are looked up in one go
ASKED_MAX = 4096  # connections of which is known how many claims were asked for over them
QUESTIONS_BYTES_MAX = 8 << 20  # of all questions that wait for their answer; all claims of a node are 1.3 MB


class Confirmations:
    """Both sides of the question. ``settling`` says of which claims the owners will hear from us anyway."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        owner: TaskOwner,
        config: Config,
        clock: Callable[[], float],
        settling: Callable[[ClaimKey], bool],
    ) -> None:
        self._dispatcher = dispatcher
        self._owner = owner
        self._config = config
        self._clock = clock
        self._settling = settling
        self._asked: OrderedDict[str, tuple[str, int]] = OrderedDict()  # by session: the node, and how many claims
        self._questions = FairShares(QUESTIONS_BYTES_MAX)
        self._one = asyncio.Lock()

    def asks(self, link: Link) -> None:
        """A claim is asked for over this connection."""
        _, count = self._asked.pop(link.session, ("", 0))
        self._asked[link.session] = (link.peer.node_id, count + 1)
        while len(self._asked) > ASKED_MAX:
            self._asked.popitem(last=False)

    def ask(self, link: Link, message: m.Confirm) -> None:
        """Find out, and end what the other side does not know."""
        with contextlib.suppress(ClosedError):  # this daemon ends, and its postings with it
            self._owner.spawn(self._ask(link, message), "confirm claims")

    async def _ask(self, link: Link, message: m.Confirm) -> None:
        claims = m.unpack_claims(message.claims)
        try:
            reply = await link.request(message, timeout=self._config.lease_s)
            if not isinstance(reply, m.Done):
                raise ProtocolError("a question about claims was answered with something else")
            unknown = set(m.unpack_claims(reply.value)).intersection(claims)
        except KvxferError as failure:  # asked again when the claims change hands the next time
            log.debug("%s: %d claims are not confirmed: %s", link.name, len(claims), failure)
            return
        if unknown:
            log.info("%s does not know %d of %d claims", link.name, len(unknown), len(claims))
        self._dispatcher.run(self._dispatcher.registry.never_arrived(self._clock(), message.session, sorted(unknown)))

    def answer(self, link: Link, message: m.Confirm) -> asyncio.Task[None]:
        """The task that answers. Raises `ProtocolError` for a question that makes no sense, `TooManyPending`."""
        count, node_id = m.count_claims(message.claims), link.peer.node_id
        if message.session == link.session:
            raise ProtocolError("the connection that is asked about has not ended: the question came over it")
        node, asked = self._asked.get(message.session, ("", 0))
        if count and (node != node_id or count > asked):
            why = "this node has not asked for so many claims over that connection"
            raise ProtocolError(why, claims=count, asked=asked if node == node_id else 0)
        size = len(message.claims)
        if not self._questions.room(node_id, size):
            raise TooManyPending("too many questions about claims wait", limit=self._questions.limit, bytes=size)
        task = self._owner.spawn(self._answer(link, message), "answer about claims")
        self._questions.take(node_id, size)
        task.add_done_callback(lambda _: self._questions.give(node_id, size))
        return task

    async def _answer(self, link: Link, message: m.Confirm) -> None:
        """What came over the old connection has been handled before this task runs: their wake-ups are older."""
        node_id, never = link.peer.node_id, bytearray()
        await self._end_of(message.session, node_id)
        try:
            async with self._one:
                for some in m.claims_in_slices(message.claims, SLICE):
                    unknown = self._dispatcher.registry.unknown_to_us(node_id, m.unpack_claims(some))
                    never += m.pack_claims(claim for claim in unknown if not self._settling(claim))
                    await asyncio.sleep(0)  # others have their turn
        except ProtocolError as wrong:
            self._dispatcher.refuse(link, message.rid, wrong)
            return
        self._dispatcher.reply(link, m.Done(rid=message.rid, value=bytes(never)))

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
