"""One seed from the first host to the last check.

The idea: the seed decides everything, the size of the cluster and whether there are faults included. A run has four
parts: the cluster comes up; work (and faults); quiet, until every lease and limit has run out; the end, in order. Each
has its promises.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from kvxfer.config import Config
from tests.support.sim import liveness
from tests.support.sim.faults import Faults
from tests.support.sim.invariants import Violation
from tests.support.sim.loop import Process, Stuck, run_in
from tests.support.sim.mutations import MUTATIONS
from tests.support.sim.versions import Speech
from tests.support.sim.work import SLACK_S, TIMEOUT_S, Work
from tests.support.sim.world import Daemon, Worker, World

PROBE_AFTER_S = 12.0  # longer than any time-to-live or limit of the simulated configuration, but for long leases
UP_S, DOWN_S = 30.0, 20.0
BURY_ROUNDS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a seed means, unless told otherwise."""

    hosts: int
    workers: int
    flows: int
    faults: bool
    span_s: float
    kinds: tuple[str, ...] = ()  # of faults; empty: the seed decides
    work: tuple[str, ...] = ()  # kinds of flows; empty: all of them

    @classmethod
    def of(cls, seed: int) -> Plan:
        rng = Random(f"plan {seed}")
        hosts = rng.choice((1, 2, 2, 3, 3, 4))
        return cls(
            hosts=hosts,
            workers=max(3, hosts * rng.choice((1, 2))),
            flows=rng.randrange(16, 40),
            faults=rng.random() < 0.7,
            span_s=rng.choice((0.05, 0.5, 4.0)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How one seed went."""

    seed: int
    mutation: str
    plan: Plan
    digest: str
    transfers: int
    parts: int
    steps: int
    messages: int
    faults: int
    virtual_s: float
    cpu_s: float
    outcomes: dict[str, int]
    violations: tuple[Violation, ...]
    last: tuple[str, ...]


class Simulation:
    """Runs one seed. ``show`` gets every event as a line."""

    def __init__(
        self,
        seed: int,
        *,
        plan: Plan | None = None,
        mutation: str = "",
        show: Callable[[str], None] | None = None,
        speeches: tuple[Speech, ...] = (),
        **options: Any,
    ) -> None:
        self.seed = seed
        self.mutation = mutation
        self.plan = plan or Plan.of(seed)
        self.world = World(seed, show=show, speeches=speeches, **options)
        self.work = Work(self.world, trouble=self.plan.faults, kinds=self.plan.work)
        self.faults: Faults | None = None
        self.configs: dict[str, Config] = {}

    def run(self) -> Result:
        """Play it; never raises for what goes wrong inside."""
        began = time.process_time()
        world = self.world
        collecting = gc.isenabled()
        gc.disable()  # a collection in the middle would run finalizers of killed processes at times of its own
        try:
            with world.replaced(MUTATIONS[self.mutation]() if self.mutation else ()):
                try:
                    world.loop.run_until_complete(self._main())
                except Stuck as stuck:
                    world.oracle.wrong("stuck", str(stuck))
                self._bury()
        finally:
            if collecting:
                gc.enable()
        return self._result(time.process_time() - began)

    async def _main(self) -> None:
        await self._come_up()
        await self._work()
        await self._quiet()
        await self._end()

    # -- parts --------------------------------------------------------------------------------------------------

    async def _come_up(self) -> None:
        world, plan = self.world, self.plan
        hosts = [world.add_host() for _ in range(plan.hosts)]
        for host in hosts:
            self.configs[host.name] = world.config(host)
            world.start_daemon(host, self.configs[host.name])
        await self._until(lambda: all(daemon.ready for daemon in world.daemons.values()), UP_S, "daemons start")
        for daemon in world.daemons.values():
            if daemon.ended.done() and daemon.ended.exception() is not None:
                world.oracle.wrong("start", f"{daemon.process.name}: {daemon.ended.exception()!r}")
        for number in range(plan.workers):
            host = hosts[number % len(hosts)]
            world.start_worker(host, self.configs[host.name])
        await self._until(lambda: all(worker.ready for worker in world.workers), UP_S, "workers start")

    async def _work(self) -> None:
        world, plan = self.world, self.plan
        if plan.faults:
            self.faults = Faults(world, self.configs, plan.kinds)
        for _ in range(plan.flows):
            self.work.begin()
            await asyncio.sleep(self.work.rng.random() * 2 * plan.span_s / plan.flows)
        limit_s = 3 * TIMEOUT_S + SLACK_S
        if self.faults is not None:
            await self._until(lambda: not self.work.unfinished(), TIMEOUT_S, "")
            self.faults.stop()
        await self._until(lambda: not self.work.unfinished(), limit_s + TIMEOUT_S, "")
        for part in self.work.unfinished():
            world.oracle.wrong("stuck", f"{part.flow.kind} {part.flow.name} {part.role} never ended")

    async def _quiet(self) -> None:
        await asyncio.sleep(PROBE_AFTER_S)
        liveness.settled_claims(self.world)
        self.world.grants.check()
        await asyncio.sleep(max(0.0, self.world.lease_s + SLACK_S - PROBE_AFTER_S))
        self.world.oracle.settled()
        liveness.nobody_else(self.world)
        await liveness.everybody_is_reached(self.world)

    async def _end(self) -> None:
        for group in (self.world.workers, list(self.world.daemons.values())):
            await self._end_all([member for member in group if member.process.alive])

    async def _end_all(self, living: Sequence[Worker | Daemon]) -> None:
        oracle = self.world.oracle
        for member in living:
            run_in(member.process, member.stop.set)
        await self._until(lambda: all(member.ended.done() for member in living), DOWN_S, "the end")
        await asyncio.sleep(1.0)
        for member in living:
            if member.ended.done() and not member.ended.cancelled() and member.ended.exception() is not None:
                oracle.wrong("ending", f"{member.process.name} ended with {member.ended.exception()!r}")
            oracle.closed(member.process)

    async def _until(self, done: Callable[[], bool], limit_s: float, what: str) -> None:
        loop = self.world.loop
        ends_at = loop.now + limit_s
        while not done():
            if loop.now >= ends_at:
                if what:
                    self.world.oracle.wrong("stuck", f"{what}: not within {limit_s:g} s")
                return
            await asyncio.sleep(0.05)

    # -- after it -------------------------------------------------------------------------------------------------

    def _bury(self) -> None:
        """Let the killed processes' coroutines end, now that nobody listens any more."""
        loop = self.world.loop
        loop.on_step = None
        loop.set_exception_handler(lambda *_: None)
        self.world.trace.close()
        self.world.oracle.close()
        members: list[Worker | Daemon] = [*self.world.workers, *self.world.daemons.values(), *self.world.former]
        processes = [member.process for member in members]
        for process in processes:
            process.kill(silent=True)
            process.raise_from_the_dead()
        loop.run_until_complete(self._wake_the_dead(processes))
        loop.close()

    async def _wake_the_dead(self, processes: list[Process]) -> None:
        for _ in range(BURY_ROUNDS):
            tasks = [task for process in processes for task in process.tasks if not task.done()]
            if not tasks:
                return
            for task in tasks:
                task.cancel()
            await asyncio.sleep(0.2)

    def _result(self, cpu_s: float) -> Result:
        outcomes: dict[str, int] = {}
        parts = [part for flow in self.work.flows for part in flow.parts]
        for part in parts:
            outcome = part.outcome or "killed"
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
        world = self.world
        return Result(
            seed=self.seed,
            mutation=self.mutation,
            plan=self.plan,
            digest=world.trace.digest,
            transfers=len(self.work.flows),
            parts=len(parts),
            steps=world.loop.steps,
            messages=world.network.messages,
            faults=0 if self.faults is None else self.faults.happened,
            virtual_s=world.loop.now - 1000.0,
            cpu_s=cpu_s,
            outcomes=dict(sorted(outcomes.items())),
            violations=tuple(world.oracle.violations),
            last=tuple(world.trace.last),
        )


def simulate(seed: int, **options: Any) -> Result:
    """Run one seed."""
    return Simulation(seed, **options).run()


def play(job: tuple[int, Plan, str]) -> Result:
    """One seed with its plan and mutation, in whatever process."""
    seed, plan, mutation = job
    return Simulation(seed, plan=plan, mutation=mutation).run()
