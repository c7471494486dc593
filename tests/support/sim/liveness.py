"""What has to be true again after trouble: who lives is reached where it is now, and nobody else is believed in.

The idea: safety is checked at every step (`invariants.py`); this is the other half. Each check has a limit that follows
from the options of the cluster, and asks the same objects that serve real requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvxfer.errors import KvxferError
from kvxfer.tasks import Deadline
from tests.support.sim.loop import RUNNING, run_in

if TYPE_CHECKING:
    from tests.support.sim.network import SimTransport
    from tests.support.sim.world import Daemon, World

AGAIN_S = 0.2
REACH_S = 6.0  # a breaker lets one attempt through at least every five seconds
NOTICE_SLACK_S = 0.5


def notices_silence(world: World, end: SimTransport, noticed: Callable[[], None]) -> None:
    """Both ends of a connection that carries nothing any more give it up in time. Keepalive is for that."""
    config = next(iter(world.daemons.values())).config
    began = world.loop.now
    limit_s = max(config.handshake_s, config.keepalive_s + config.dead_s) + config.dead_s + NOTICE_SLACK_S

    def look() -> None:
        noticed()
        for side in (end, end.other):
            process = side.process
            if process.state is RUNNING and process.thawed_at <= began and not side.gone:
                text = f"{process.name} still believes in its silent connection to {side.other.process.name}"
                world.oracle.wrong("half_open", f"{text} after {limit_s:g} s")

    world.loop.call_later(limit_s, look)


def nobody_else(world: World) -> None:
    """Every link between daemons is one to a process that lives."""
    alive = {daemon.server.incarnation for daemon in world.daemons.values() if daemon.ready and daemon.server}
    for daemon in world.daemons.values():
        if not daemon.ready or daemon.server is None:
            continue
        links: list[Any] = [*daemon.server.peers.links, *daemon.server.pool.links]
        for link in links:
            if link.peer.incarnation not in alive:
                world.oracle.wrong("stale_link", f"{daemon.process.name} has a link to one who is gone: {link.name}")


def settled_claims(world: World) -> None:
    """A worker that said how its claim ended has been heard, however often it had to be said.

    It says so again to the next daemon when that of before has ended. Only when both have ended nobody can say it any
    more: then the lease ends the claim.
    """
    alive = {daemon.server.incarnation for daemon in world.daemons.values() if daemon.ready and daemon.server}
    working = {worker.process.name for worker in world.workers if worker.ready}
    for daemon in world.daemons.values():
        if not daemon.ready or daemon.server is None:
            continue
        book: Any = daemon.server.registry._book
        for posting in book._postings.values():
            for claim in posting.claims.values():
                who = world.settled.get(claim.key, "")
                if who and (claim.incarnation in alive or who in working):
                    text = f"{daemon.process.name} was not told that {who} is done with {posting.kind} {posting.key}"
                    world.oracle.wrong("not_settled", text)


async def everybody_is_reached(world: World) -> None:
    """Each daemon reaches the next one, by the address that it has now, as the process that it is now."""
    daemons = [daemon for daemon in world.daemons.values() if daemon.ready]
    if len(daemons) < 2:
        return
    tries = [
        run_in(near.process, world.tasks, _reach(world, near, far), f"{near.process.name} reaches the next")
        for near, far in zip(daemons, [*daemons[1:], daemons[0]], strict=True)
    ]
    await asyncio.wait(tries)


async def _reach(world: World, near: Daemon, far: Daemon) -> None:
    assert near.server is not None
    assert far.server is not None
    loop, why = world.loop, ""
    ends_at = loop.now + REACH_S
    while loop.now < ends_at:
        try:
            link = await near.server.pool.get([far.host.place], far.server.node_id, Deadline.after(AGAIN_S * 5))
        except KvxferError as error:
            why = repr(error)
        else:
            if link.peer.incarnation == far.server.incarnation:
                return
            why = f"it has a link to {link.peer.incarnation[:8]}"
        await asyncio.sleep(AGAIN_S)
    world.oracle.wrong("unreachable", f"{near.process.name} does not reach {far.process.name}: {why}")
