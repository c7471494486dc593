"""What goes wrong in a simulated cluster: crashes between any two steps, frozen processes, partitions, resets.

The idea: a fault is chosen when its step has come, out of what there is at that moment, so it hits the middle of
things. Whatever it breaks is mended after a while: a daemon starts again, a worker is replaced, a partition ends.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from kvxfer.config import Config
from tests.support.sim import peers
from tests.support.sim.loop import RUNNING
from tests.support.sim.network import Host
from tests.support.sim.world import Worker, World

STEPS_BETWEEN = (10, 900)
TOLD_S = 0.4  # nothing in the way: within this time everybody knows that a worker was killed
# A version without `GiveUp` can end a claim that it asked for only when the answer is there: two trips more.
LOCAL = ("kill_worker", "break_data")  # what does not keep news from arriving


class Faults:
    """Breaks things until `stop`, and mends them. ``kinds`` restricts what may happen."""

    def __init__(self, world: World, configs: dict[str, Config], kinds: tuple[str, ...] = ()) -> None:
        self.world = world
        self.rng = Random(f"faults {world.seed}")
        self.configs = configs
        every = tuple(name for name in KINDS for _ in range(KINDS[name]))
        # Often everything at once; else one kind of trouble, and what follows from nothing else.
        self.kinds = kinds or self.rng.choice((every, every, (self.rng.choice(every),), LOCAL))
        self.happened = 0
        self._trouble_at = self._silent_at = 0.0
        self._stopped = False
        self._frozen: list[Any] = []
        self._twins: list[peers.Twin] = []
        world.loop.on_step = self._look
        world.calm_since = self._calm_since
        self._next()
        if self.rng.random() < 0.5:
            self._bad_weather()

    def _next(self) -> None:
        self.world.loop.next_look = self.world.loop.steps + self.rng.randrange(*STEPS_BETWEEN)

    def _look(self) -> None:
        if self._stopped:
            self.world.loop.next_look = 1 << 62
            return
        self._next()
        kind = self.rng.choice(self.kinds)
        self.happened += 1
        if kind == "reset":
            self._trouble_at = self.world.loop.now  # who is asked about it is asked over another connection
        elif kind not in LOCAL:
            self._trouble()
        getattr(self, f"_{kind}")()

    def _trouble(self) -> None:
        """Something that may keep news from arriving begins or ends."""
        self._trouble_at = self._silent_at = self.world.loop.now

    def _news_travel(self) -> bool:
        """Nothing keeps a message from arriving."""
        network = self.world.network
        well = all(daemon.ready and daemon.process.state is RUNNING for daemon in self.world.daemons.values())
        twins = any(not twin.host.retired for twin in self._twins)
        return well and not twins and not (network.partitions or network.silent or network.weather.loss)

    def _calm_since(self) -> float | None:
        """Since when nothing kept news back for longer than a connection takes to make; None: something does."""
        return self._silent_at if self._news_travel() else None

    def _later(self, low_s: float, high_s: float, call: Callable[..., Any], *args: Any) -> None:
        self.world.loop.call_later(self.rng.uniform(low_s, high_s), call, *args)

    def stop(self) -> None:
        """No more of it, and everything is mended now."""
        self._stopped = True
        self._trouble()
        self.world.network.partitions.clear()
        self.world.network.heal()
        weather = self.world.network.weather
        weather.loss = weather.split = 0.0
        self.world.full_rate = 0.0
        for process in self._frozen:
            process.thaw()
        for twin in self._twins:
            twin.end(silent=False)

    # -- kinds --------------------------------------------------------------------------------------------------

    def _bad_weather(self) -> None:
        weather = self.world.network.weather
        weather.loss = self.rng.choice((0.0, 0.005, 0.03))
        weather.split = self.rng.choice((0.0, 0.1, 0.5))
        low = self.rng.choice((0.00005, 0.001, 0.01))
        weather.latency_s = (low, low * self.rng.choice((1.5, 4.0, 10.0)))
        self.world.full_rate = self.rng.choice((0.0, 0.0, 0.2))

    def _kill_worker(self) -> None:
        alive = [worker for worker in self.world.workers if worker.process.alive]
        if len(alive) > 2:
            worker = self.rng.choice(alive)
            self._kill(worker)
            self._later(0.0, 0.5, self._replace, worker)

    def _kill(self, worker: Worker) -> None:
        self.world.trace.note(f"kill {worker.process.name}")
        client = worker.client
        worker.process.kill()
        if client is None or not self._news_travel():
            return
        before, now, engine_id = self._trouble_at, self.world.loop.now, client.plane.engine_id

        def told() -> None:
            if self._trouble_at == before < now - TOLD_S and self._news_travel():
                self.world.oracle.mourned(engine_id, worker.process.name, before)

        self.world.loop.call_later(TOLD_S, told)

    def _replace(self, worker: Worker) -> None:
        if worker.host.up and not worker.host.retired:
            self.world.start_worker(worker.host, self.configs[worker.host.name])

    def _kill_daemon(self) -> None:
        daemon = self.rng.choice(list(self.world.daemons.values()))
        if daemon.process.alive:
            self.world.trace.note(f"kill {daemon.process.name}")
            daemon.process.kill()
            self._later(0.001, 1.5, self._restart, daemon.host)

    def _restart(self, host: Host) -> None:
        if host.up and not host.retired and not self.world.daemons[host.name].process.alive:
            self._trouble()
            self.world.start_daemon(host, self.configs[host.name])

    def _stop_daemon(self) -> None:
        """SIGTERM, in order."""
        daemon = self.rng.choice(list(self.world.daemons.values()))
        if daemon.ready:
            self.world.trace.note(f"stop {daemon.process.name}")
            daemon.stop.set()
            daemon.ended.add_done_callback(lambda _: daemon.process.kill())
            self._later(2.5, 4.0, self._restart, daemon.host)

    def _power_off(self) -> None:
        """A whole machine is gone, without a word, and comes back."""
        host = self.rng.choice([daemon.host for daemon in self.world.daemons.values()])
        if not host.up:
            return
        self.world.trace.note(f"power off {host.name}")
        host.up = False
        self.world.daemons[host.name].process.kill(silent=True)
        gone = [worker for worker in self.world.workers if worker.host is host and worker.process.alive]
        for worker in gone:
            worker.process.kill(silent=True)

        def boot() -> None:
            self._trouble()
            if host.retired:
                return
            self.world.trace.note(f"boot {host.name}")
            self.world.boot(host)
            self.world.start_daemon(host, self.configs[host.name])
            for worker in gone:
                self._later(0.05, 0.5, self._replace, worker)

        self._later(0.2, 4.0, boot)

    def _freeze(self) -> None:
        processes = [daemon.process for daemon in self.world.daemons.values()]
        processes += [worker.process for worker in self.world.workers if worker.client is not None]
        process = self.rng.choice([found for found in processes if found.alive] or processes)
        self.world.trace.note(f"freeze {process.name}")
        for worker in self.world.workers:
            if worker.process.host is process.host:
                worker.extra["frozen"] = True  # waits for somebody who does nothing
        process.freeze()
        self._frozen.append(process)

        def thaw() -> None:
            self._trouble()
            process.thaw()

        self._later(0.01, 3.0, thaw)

    def _partition(self) -> None:
        hosts = list(self.world.network.hosts.values())
        if len(hosts) < 2:
            return
        one, two = (host.name for host in self.rng.sample(hosts, 2))
        pairs = {(one, two), (two, one)} if self.rng.random() < 0.7 else {(one, two)}
        self.world.trace.note(f"partition {sorted(pairs)}")
        self.world.network.partitions |= pairs

        def heal() -> None:
            self._trouble()
            self.world.trace.note(f"heal {sorted(pairs)}")
            self.world.network.partitions -= pairs
            self.world.network.heal()

        self._later(0.05, 4.0, heal)

    def _reset(self) -> None:
        found = list(self.world.network.connections)
        if found:
            end = self.rng.choice(found)
            self.world.trace.note(f"reset {end.process.name} to {end.other.process.name}")
            self.world.network.reset(end)

    def _break_data(self) -> None:
        links = [link for engine in self.world.engines.values() for link in engine.links.values()]
        if links:
            link = self.rng.choice(links)
            self.world.trace.note(f"reset data {link.initiator.process.name} to {link.owner.process.name}")
            link.initiator.reset(link)

    def _weather(self) -> None:
        self._bad_weather()

    def _move(self) -> None:
        peers.move(self)

    def _twin(self) -> None:
        if all(twin.host.retired for twin in self._twins) and (found := peers.twin(self)) is not None:
            self._twins.append(found)

    def _half_open(self) -> None:
        peers.half_open(self)


KINDS = {
    "kill_worker": 4,
    "kill_daemon": 2,
    "stop_daemon": 1,
    "power_off": 1,
    "freeze": 2,
    "partition": 3,
    "reset": 3,
    "break_data": 3,
    "weather": 1,
    "move": 1,
    "twin": 1,
    "half_open": 2,
}
