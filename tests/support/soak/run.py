"""Daemons, workers and lanes: each lane plays rounds between two workers until the time is up.

Two lanes (one per transport) have workers that live as long as the soak; in the third the receiver misbehaves by
injected faults and is killed, and with it, now and then, its daemon. Samples are taken between rounds, of processes
that were never restarted.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from examples.child_processes import Daemon, daemon, python_process
from examples.remote_worker import Remote, WorkerFailed
from kvxfer.errors import DaemonUnavailable, KvxferError, TransferTimeout
from tests.support.soak.choices import KINDS, Flow, Trouble, flows, trouble
from tests.support.soak.judge import Series, Verdict, judge_all
from tests.support.soak.ledger import Wrongs
from tests.support.soak.side import REST_S, process_sample

ANSWER_S = 120.0
STARTS = 3  # a process that does not come up on a machine that has other things to do is started again
# What the worker's own comparisons free goes back at once: what stays resident is what somebody holds.
MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
END_S = 30.0  # for a process that was told to end, or killed
LONGER_S = 60.0  # a run goes on for so long at most until each kind of traffic was done once
ROUND, MORTAL_ROUND = 600, 96
PATIENCE_S = {False: 8.0, True: 1.5}  # of a lane where nobody dies, and of the other
SEED_A, SEED_B = 11, 22
OWN_DOING = {"cancelled", "timeout", "stalled", "stuck"}  # a side that gave up, or waited no longer, need not know
FAULTS = "seed=1,fail_rate=0.01,short_rate=0.01,flip_rate=0.01,hang_rate=0.005,delay_ms=0..2"
DAEMON = {
    "drain_s": "0.3",
    "mail_ttl_s": "2",
    "landing_bytes_max": "64MiB",
    "expired_memory_max": "256",
    "hugepages": "false",
}


@dataclass(slots=True, kw_only=True)
class Plan:
    """What to run: for how long, from which seed, and how often the mortal lane's daemon dies."""

    minutes: float
    seed: int
    report_s: float = 10.0
    round_flows: int = ROUND


@dataclass(slots=True)
class Tally:
    """What happened so far, in bounded memory."""

    outcomes: Counter[str] = field(default_factory=Counter)
    transfers: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    rounds: int = 0
    wrongs: Wrongs = field(default_factory=Wrongs)
    table: dict[str, Series] = field(default_factory=dict)
    grown: dict[str, dict[str, int]] = field(default_factory=dict)  # objects by worker and type, since the warm-up
    running: dict[str, list[str]] = field(default_factory=dict)  # names of tasks at rest, by worker

    @property
    def never_done(self) -> list[str]:
        """Kinds of traffic of which not one was done, on neither side."""
        done = {name.split()[0] for name in self.outcomes if name.endswith(" done")}
        return sorted(set(KINDS) - done)

    def sampled(self, who: str, found: dict[str, Any], *, closing: bool = False) -> None:
        """One look at a process at rest."""
        self.grown[who] = found.pop("grown", {})
        self.running[who] = found.pop("running", [])
        for name, value in found.items():
            series = self.table.setdefault(f"{who} {name}", Series())
            series.add(self.transfers, float(value))
            if closing:
                series.closing = float(value)


async def patiently(start: Callable[[], Awaitable[None]]) -> None:
    """Start a process, and again when it did not come up in time."""
    for attempt in range(1, STARTS + 1):
        try:
            await start()
            break
        except (DaemonUnavailable, TransferTimeout, WorkerFailed):
            if attempt == STARTS:
                raise


class Worker:
    """A worker process that can be killed and started again."""

    def __init__(self, name: str, socket: Path, transports: list[str], seed: int, extra: dict[str, Any]) -> None:
        self.name, self.socket, self.transports, self.seed, self.extra = name, socket, transports, seed, extra
        self._stack = AsyncExitStack()
        self.remote: Remote
        self.wrongs_told = 0

    async def start(self) -> None:
        """A new process."""
        await patiently(self._start)

    async def _start(self) -> None:
        await self._stack.aclose()
        self._stack = AsyncExitStack()
        process = await self._stack.enter_async_context(
            python_process(["-m", "tests.support.soak.worker"], name=self.name, environment=MALLOC)
        )
        self.remote = Remote(process, ANSWER_S)
        self.wrongs_told = 0
        await self.remote.do(
            "open", socket=str(self.socket), transports=self.transports, seed=self.seed, extra=self.extra
        )
        await self.remote.do("meet", seed=SEED_B if self.seed == SEED_A else SEED_A)

    async def stop(self) -> None:
        """It ends."""
        await self._stack.aclose()


class Lane:
    """Two workers that play with each other."""

    def __init__(self, name: str, a: Worker, b: Worker, *, maps: bool, mortal: bool) -> None:
        self.name, self.a, self.b, self.maps, self.mortal = name, a, b, maps, mortal
        self.number = 0

    @property
    def survivors(self) -> list[Worker]:
        """Those that live as long as the run."""
        return [self.a] if self.mortal else [self.a, self.b]


class Soak:
    """One run."""

    def __init__(self, plan: Plan, directory: Path) -> None:
        self.plan = plan
        self.directory = directory
        self.tally = Tally()
        self.daemons: dict[str, tuple[AsyncExitStack, Daemon]] = {}
        self.began = time.monotonic()
        self._shown = 0

    @property
    def left_s(self) -> float:
        """Until the end."""
        return self.began + self.plan.minutes * 60 - time.monotonic()

    @property
    def goes_on(self) -> bool:
        """There is time left, or something that has not yet been seen to work."""
        return self.left_s > 0 or (self.left_s > -LONGER_S and bool(self.tally.never_done))

    async def start_daemon(self, side: str) -> None:
        """A new process on the same socket."""

        async def start() -> None:
            stack = AsyncExitStack()
            found = await stack.enter_async_context(daemon(self.directory / side, name=f"daemon-{side}", **DAEMON))
            self.daemons[side] = (stack, found)

        await patiently(start)

    @asynccontextmanager
    async def lanes(self) -> AsyncIterator[list[Lane]]:
        """Everything up; gone at the end."""
        sockets = {side: self.directory / side / "kvxferd.sock" for side in ("a", "b", "m")}
        both = ["shm", "tcp"]
        found = []
        async with AsyncExitStack() as stack:
            for side in sockets:
                await self.start_daemon(side)
                stack.push_async_callback(self.stop_daemon, side)
            for transport in both:
                a = Worker(f"{transport}-a", sockets["a"], [transport], SEED_A, {})
                b = Worker(f"{transport}-b", sockets["b"], [transport], SEED_B, {})
                found.append(Lane(transport, a, b, maps=transport == "shm", mortal=False))
            faults = {"integrity": True, "fault_spec": FAULTS}
            a = Worker("mortal-a", sockets["a"], both, SEED_A, {"integrity": True})
            b = Worker("mortal-b", sockets["m"], ["fault+shm"], SEED_B, faults)
            found.append(Lane("mortal", a, b, maps=False, mortal=True))
            for lane in found:
                for worker in (lane.a, lane.b):
                    stack.push_async_callback(worker.stop)
                    await worker.start()
            yield found

    async def stop_daemon(self, side: str) -> None:
        """It ends."""
        await self.daemons[side][0].aclose()

    async def run(self) -> list[Verdict]:
        """Play until the time is up; the verdicts."""
        async with self.lanes() as lanes:
            self.began = time.monotonic()
            async with asyncio.TaskGroup() as group:
                for lane in lanes:
                    group.create_task(self.play(lane))
                group.create_task(self.watch())
            await self.close(lanes)
        for kind in self.tally.never_done:
            self.tally.wrongs.add(f"no {kind} was ever done")
        return judge_all(self.tally.table)

    async def close(self, lanes: list[Lane]) -> None:
        """The last look at who lives on, when all that ends by itself has ended."""
        for lane in lanes:
            closing_s = PATIENCE_S[lane.mortal] + REST_S
            for worker in lane.survivors:
                found = await worker.remote.do("sample", closing_s=closing_s)
                self.tally.sampled(worker.name, found, closing=True)

    async def watch(self) -> None:
        """A line every few seconds."""
        while self.goes_on:
            await asyncio.sleep(min(self.plan.report_s, max(1.0, self.left_s)))
            self.look_at_daemons()
            print(self.progress(), flush=True)
            for text in self.tally.wrongs.first[self._shown :]:
                print(f"WRONG: {text}", flush=True)
            self._shown = len(self.tally.wrongs.first)

    def look_at_daemons(self) -> None:
        """Those that were never restarted."""
        for side in ("a", "b"):
            self.tally.sampled(f"daemon-{side}", process_sample(self.daemons[side][1].process.pid))

    def progress(self) -> str:
        """One line."""
        tally, passed = self.tally, time.monotonic() - self.began
        done = sum(count for name, count in tally.outcomes.items() if name.endswith(" done"))
        kills = " ".join(f"{name} {count}" for name, count in sorted(tally.kills.items())) or "none"
        rate = tally.transfers / max(passed, 0.001)
        return (
            f"{passed:7.1f} s  {tally.transfers} transfers ({rate:.0f}/s), {done} sides done, "
            f"killed: {kills}, wrong: {tally.wrongs.count}"
        )

    async def play(self, lane: Lane) -> None:
        """Rounds until the time is up."""
        while self.goes_on:
            count = MORTAL_ROUND if lane.mortal else self.plan.round_flows
            chosen = flows(
                self.plan.seed, lane.name, lane.number, count, maps=lane.maps, patience=PATIENCE_S[lane.mortal]
            )
            what = trouble(self.plan.seed, lane.number) if lane.mortal else None
            lane.number += 1
            self.tally.rounds += 1
            await self.round(lane, chosen, what)

    async def round(self, lane: Lane, chosen: list[Flow], what: Trouble | None) -> None:
        """Both sides play; somebody may die meanwhile. Then who lives on is looked at."""
        to_b, to_a = [(await worker.remote.do("where"))["addresses"] for worker in (lane.b, lane.a)]
        listed = [flow.to_dict() for flow in chosen]
        patience = PATIENCE_S[lane.mortal]
        sides = [("a", lane.a, to_b, patience), ("b", lane.b, to_a, patience)]
        async with asyncio.TaskGroup() as group:
            playing = [group.create_task(self.side(*one, listed)) for one in sides]
            if what is not None and what.victim:
                group.create_task(self.befall(lane, what))
        outcomes = [task.result() for task in playing]
        self.tally.transfers += len(chosen)
        self.compare(lane, chosen, outcomes)
        if what is not None and what.victim:
            await self.mend(lane, what)
        for worker in lane.survivors:
            self.tally.sampled(worker.name, await worker.remote.do("sample"))

    async def side(
        self, side: str, worker: Worker, to: list[str], patience: float, listed: list[dict[str, Any]]
    ) -> list[str]:
        """One worker's part; nothing when it dies."""
        try:
            answer = await worker.remote.do("play", side=side, to=to, flows=listed, patience=patience)
        except (DaemonUnavailable, TransferTimeout, WorkerFailed, ConnectionError) as error:
            if worker.name != "mortal-b" or not isinstance(error, DaemonUnavailable | ConnectionError):
                self.tally.wrongs.add(f"{worker.name}: {error}")
            return []
        new = answer["wrong"] - worker.wrongs_told
        worker.wrongs_told = answer["wrong"]
        for text in answer["first"][-new:] if new else ():
            self.tally.wrongs.add(f"{worker.name}: {text}")
        return list(answer["outcomes"])

    def compare(self, lane: Lane, chosen: list[Flow], outcomes: list[list[str]]) -> None:
        """Count them; where nobody gave up, both sides agree about what was done."""
        for side, found in zip("ab", outcomes, strict=True):
            for flow, outcome in zip(chosen, found, strict=False):
                self.tally.outcomes[f"{flow.kind} {side} {outcome}"] += 1
                if outcome in ("bug", "none", "stuck"):
                    self.tally.wrongs.add(f"{lane.name} {flow.name} {flow.kind} {side}: {outcome}")
        if lane.mortal or not all(outcomes):
            return
        for flow, first, second in zip(chosen, *outcomes, strict=True):
            both = {first, second}
            agreed = len(both) == 1 or "done" not in both or both & OWN_DOING
            if flow.kind in ("push", "put", "get") and flow.cancel_s is None and not agreed:
                self.tally.wrongs.add(f"{flow.name} {flow.kind}: a says {first}, b says {second}")

    async def befall(self, lane: Lane, what: Trouble) -> None:
        """The victim dies in the middle."""
        await asyncio.sleep(what.after_s)
        process = lane.b.remote.process if what.victim == "worker" else self.daemons["m"][1].process
        process.send_signal(9 if what.signal == "KILL" else 15)
        await process.wait(END_S)
        self.tally.kills[what.victim] += 1
        if what.victim == "daemon":
            await self.mend_daemon()

    async def mend_daemon(self) -> None:
        """A new daemon in the victim's place."""
        await self.stop_daemon("m")
        await self.start_daemon("m")

    async def mend(self, lane: Lane, what: Trouble) -> None:
        """A new process in the victim's place."""
        if what.victim == "worker":
            lane.b.transports = [f"fault+{what.transport}"]
            await lane.b.start()


async def soak(plan: Plan, directory: Path) -> tuple[Soak, list[Verdict]]:
    """Run one; an error of the harness itself is a broken promise too."""
    found = Soak(plan, directory)
    try:
        verdicts = await found.run()
    except* (KvxferError, WorkerFailed, OSError) as group:
        for error in group.exceptions:
            found.tally.wrongs.add(f"the soak itself: {error!r}"[:500])
        verdicts = judge_all(found.tally.table)
    return found, verdicts
