"""Peers that come and go in simulated clusters: each kind of trouble alone, and the clocks of hosts."""

from __future__ import annotations

import asyncio
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.sim import liveness
from tests.support.sim.loop import Process, SimLoop, run_in
from tests.support.sim.network import Host
from tests.support.sim.run import Plan, Simulation
from tests.support.sim.world import World

pytestmark = pytest.mark.once


def troubled(*kinds: str) -> Plan:
    return Plan(hosts=3, workers=4, flows=30, faults=True, span_s=4.0, kinds=kinds)


@pytest.mark.parametrize("kinds", [("move",), ("twin",), ("half_open",), ("move", "twin", "half_open", "partition")])
def test_a_cluster_survives_peers_that_come_and_go(kinds: tuple[str, ...]) -> None:
    happened = 0
    for seed in range(4):
        simulation = Simulation(seed, plan=troubled(*kinds))
        result = simulation.run()
        assert not result.violations, (seed, [str(one) for one in result.violations])
        assert result.outcomes["done"] > 10
        happened += result.faults
    assert happened > 4


def test_a_node_that_moved_is_the_same_node_at_another_address() -> None:
    simulation = Simulation(1, plan=troubled("move"))
    assert not simulation.run().violations
    world = simulation.world
    moved = [daemon for daemon in world.daemons.values() if daemon.host.port != 17800]
    assert moved
    for daemon in moved:
        earlier = [one.server for one in world.former if one.host is daemon.host and one.server]
        assert daemon.server is not None
        assert {server.node_id for server in earlier} == {daemon.server.node_id}
        assert daemon.server.incarnation not in {server.incarnation for server in earlier}


def test_a_twin_has_the_node_id_of_the_first() -> None:
    simulation = Simulation(2, plan=troubled("twin"))
    assert not simulation.run().violations
    ids = {one.server.node_id for one in simulation.world.daemons.values() if one.server}
    twins = [one.server for one in simulation.world.former if one.host.retired and one.server]
    assert twins
    assert {server.node_id for server in twins} <= ids


def test_hosts_have_clocks_of_their_own_and_timers_are_never_early() -> None:
    loop, rng = SimLoop(), Random(3)
    found: list[tuple[float, float]] = []
    for number in range(50):
        host = Host(f"h{number}", "")
        host.clock_s = rng.uniform(-900, 100_000)
        process = Process(loop, host, host.name)

        def wait(seconds: float) -> None:
            due = loop.time() + seconds
            loop.call_at(due, lambda: found.append((due, loop.time())))

        run_in(process, wait, rng.uniform(0, 10))
    loop.run_until_complete(asyncio.sleep(11))
    loop.close()
    assert len(found) == 50
    assert all(due <= at < due + 1e-6 for due, at in found)
    assert max(due for due, _ in found) - min(due for due, _ in found) > 10_000


def test_what_is_asked_when_all_is_quiet_can_fail() -> None:
    claim = SimpleNamespace(key=("p", 1), incarnation="here")
    posting = SimpleNamespace(kind="offer", key="k", claims={1: claim})
    book = SimpleNamespace(_postings={1: posting})
    link = SimpleNamespace(peer=SimpleNamespace(incarnation="gone"), name="a link")
    server: Any = SimpleNamespace(
        incarnation="here",
        registry=SimpleNamespace(_book=book),
        peers=SimpleNamespace(links=[link]),
        pool=SimpleNamespace(links=[]),
    )
    daemon: Any = SimpleNamespace(ready=True, server=server, process=SimpleNamespace(name="d"))

    world = World(1)
    world.daemons = {"d": daemon}
    world.settled[("p", 1)] = "w"
    liveness.nobody_else(world)
    liveness.settled_claims(world)
    world.settled.clear()
    liveness.settled_claims(world)
    world.loop.close()
    assert [one.kind for one in world.oracle.violations] == ["stale_link", "not_settled"]
