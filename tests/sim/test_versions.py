"""Clusters of two versions, ours and a made-up next one, and claims that one side alone knows."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvxfer.errors import VersionMismatch
from kvxfer.rendezvous.postings import Party, RemoteClaims
from kvxfer.tasks import Deadline
from tests.support.sim.grants import UNKNOWN_S
from tests.support.sim.loop import run_in
from tests.support.sim.network import Host
from tests.support.sim.run import Plan, Simulation
from tests.support.sim.versions import NEXT, PRESENT, Speech
from tests.support.sim.world import World

pytestmark = pytest.mark.once
QUIET = Plan(hosts=3, workers=6, flows=40, faults=False, span_s=0.5)
TROUBLE = Plan(hosts=3, workers=6, flows=40, faults=True, span_s=2.0)


def kinds_of(seed: int) -> tuple[Speech, ...]:
    world = World(seed)
    world.loop.close()
    return world.versions.kinds


@pytest.mark.parametrize("plan", [QUIET, TROUBLE], ids=["quiet", "trouble"])
def test_two_versions_in_one_cluster(plan: Plan) -> None:
    """Without faults all is done; with them nothing waits for ever, and no promise is broken."""
    met: set[frozenset[str]] = set()
    for seed in range(2):
        simulation = Simulation(seed, plan=plan, speeches=(PRESENT, NEXT))
        result = simulation.run()
        assert not result.violations, (seed, [str(one) for one in result.violations])
        met |= simulation.world.versions.met
        if plan is QUIET:
            assert result.outcomes == {"done": result.parts}
    assert frozenset({"present", "next"}) in met


def test_each_kind_occurs_in_the_seeds() -> None:
    seen = {kind.name for seed in range(40) for kind in kinds_of(seed)}
    assert seen == {"present", "next"}
    assert NEXT.versions[1] == PRESENT.versions[1] + 1


def test_a_version_that_nobody_else_speaks_is_refused_at_once() -> None:
    future = replace(PRESENT, versions=(9, 9))
    world = World(5)
    said: list[Any] = []

    async def meet() -> None:
        host, other = world.add_host(), world.add_host()
        daemons = [world.start_daemon(one, world.config(one)) for one in (host, other)]
        while not all(one.ready for one in daemons):
            await asyncio.sleep(0.01)
        began = world.loop.now
        daemons[1].process.speech = future
        await run_in(daemons[1].process, world.tasks, reach(daemons[1], host), "reach")
        said.append(world.loop.now - began)
        for one in daemons:
            run_in(one.process, one.stop.set)
            await one.ended

    async def reach(daemon: Any, host: Host) -> None:
        with pytest.raises(VersionMismatch):
            await daemon.server.pool.get([host.place], "", Deadline.after(5))

    with world.replaced():
        world.loop.run_until_complete(meet())
    world.loop.close()
    assert said[0] < 1.0
    assert not world.oracle.violations


def claims_of(world: World, routes: dict[Any, Any], settling: set[Any]) -> Any:
    """An owner with one claim, and the daemon that made it, as far as `Grants` looks at them."""
    key = ("p" * 32, 1)
    claim: Any = SimpleNamespace(node_id="n", incarnation="far", number=1, key=key)
    claim.party = SimpleNamespace(session="s")
    claim.posting = SimpleNamespace(kind="offer", key="r", claims={1: claim})
    book = SimpleNamespace(_postings={"p": claim.posting})

    def daemon(name: str, **parts: Any) -> Any:
        forwarder = SimpleNamespace(settling=lambda: settling)
        server = SimpleNamespace(incarnation=name, forwarder=forwarder, **parts)
        return SimpleNamespace(ready=True, server=server, process=SimpleNamespace(name=name, speech=PRESENT))

    known = RemoteClaims()
    for connection in routes:
        known.add(Party("w", "worker"), "n", connection)
    owner = daemon("near", registry=SimpleNamespace(_book=book, _routes=RemoteClaims()))
    claimant = daemon("far", registry=SimpleNamespace(_book=SimpleNamespace(_postings={}), _routes=known))
    world.daemons = {"near": owner, "far": claimant}
    return owner


def found(world: World) -> list[str]:
    world.loop.close()
    return [one.kind for one in world.oracle.violations]


def test_a_claim_that_nobody_knows_is_seen_in_time() -> None:
    world = World(1)
    owner = claims_of(world, {}, set())
    world.grants.look(owner)
    world.loop._now += UNKNOWN_S - 0.1
    world.grants.look(owner)
    assert not world.oracle.violations
    world.loop._now += 0.2
    world.grants.look(owner)
    world.grants.look(owner)
    assert found(world) == ["lost_claim"]


def test_trouble_gives_it_more_time() -> None:
    world = World(1)
    owner = claims_of(world, {}, set())
    world.grants.look(owner)
    world.loop._now += UNKNOWN_S - 0.1
    world.calm_since = lambda: world.loop.now
    world.grants.look(owner)
    world.loop._now += UNKNOWN_S - 0.1
    world.grants.look(owner)
    world.calm_since = lambda: None
    world.grants.look(owner)
    assert found(world) == []


@pytest.mark.parametrize("routes", [{("p" * 32, 1): "known"}, {}])
def test_a_claim_that_is_known_or_on_its_way_out_is_none(routes: dict[Any, Any]) -> None:
    world = World(1)
    claims_of(world, routes, set() if routes else {("p" * 32, 1)})
    world.grants.check()
    assert found(world) == []
