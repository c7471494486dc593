"""Peers that come and go: another address with the same node id, two of one node id at once, connections that carry
nothing any more.

The idea: none of these is a crash. Everybody is alive and believes something that is no longer true, so what counts is
how soon they find out; `liveness.py` asks that, here and when all is quiet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any, Protocol

from tests.support.sim import liveness

if TYPE_CHECKING:
    from kvxfer.config import Config
    from tests.support.sim.network import Host
    from tests.support.sim.world import World


class Breaker(Protocol):
    """What `Faults` offers to these."""

    world: World
    rng: Random
    configs: dict[str, Config]

    def _later(self, low_s: float, high_s: float, call: Callable[..., Any], *args: Any) -> None: ...
    def _restart(self, host: Host) -> None: ...
    def _trouble(self) -> None: ...


class Twin:
    """A second daemon with the node id of a first one, and a worker of its own: a cloned machine, say."""

    def __init__(self, world: World, configs: dict[str, Config], first: Host) -> None:
        self.world = world
        self.host = world.add_host()
        configs[self.host.name] = replace(world.config(self.host), node_name=configs[first.name].node_name)
        world.trace.note(f"{self.host.name} is a twin of {first.name}")
        world.start_daemon(self.host, configs[self.host.name])
        world.start_worker(self.host, configs[self.host.name])

    def end(self, *, silent: bool) -> None:
        """It is gone for good."""
        if self.host.retired:
            return
        world, host = self.world, self.host
        world.trace.note(f"the twin {host.name} is gone")
        host.retired = True
        host.up = not silent
        daemon = world.daemons.pop(host.name)
        world.former.append(daemon)
        workers = [worker.process for worker in world.workers if worker.host is host]
        for process in (daemon.process, *workers):
            process.kill(silent=silent)


def move(faults: Breaker) -> None:
    """A daemon ends, and starts again on another port: same node, other address."""
    world = faults.world
    daemon = faults.rng.choice(list(world.daemons.values()))
    host = daemon.host
    if not daemon.ready or host.retired:
        return
    host.port += 1
    world.trace.note(f"{daemon.process.name} moves to {host.place}")
    faults.configs[host.name] = replace(faults.configs[host.name], listen=host.place)
    if faults.rng.random() < 0.5:
        daemon.process.kill()
    else:
        daemon.stop.set()
        daemon.ended.add_done_callback(lambda _: daemon.process.kill())
    faults._later(2.5, 3.5, faults._restart, host)


def twin(faults: Breaker) -> Twin | None:
    """Somebody starts a second daemon with the identity of one that runs."""
    firsts = [daemon.host for daemon in faults.world.daemons.values() if daemon.ready and not daemon.host.retired]
    if not firsts:
        return None
    found = Twin(faults.world, faults.configs, faults.rng.choice(firsts))
    silent = faults.rng.random() < 0.5

    def end() -> None:
        faults._trouble()
        found.end(silent=silent)

    faults._later(0.5, 4.0, end)
    return found


def half_open(faults: Breaker) -> None:
    """A middlebox forgets a connection and drops what it carries: nobody is told, on neither side."""
    network = faults.world.network
    between = [end for end in network.connections if end.process.host is not end.other.process.host]
    if not between:
        return
    end = faults.rng.choice(between)
    faults.world.trace.note(f"silence between {end.process.name} and {end.other.process.name}")
    network.silence(end)
    liveness.notices_silence(faults.world, end, faults._trouble)
