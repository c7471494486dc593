"""Who ends, in which way, and who waits: everybody concerned hears within two seconds, with an error of its kind.

The parts of each flow are played by real processes with their own daemons. What goes on without a daemon that has gone
(bytes on their way between two workers) ends as it would have; nobody waits longer than that.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from examples.child_processes import Daemon, Process, daemon, python_process
from examples.remote_worker import Remote
from tests.adversity.party import LAYERS, PAUSE_S

PARTY = Path(__file__).with_name("party.py")
ROOT = str(Path(__file__).resolve().parents[2])
SLACK = float(os.environ.get("KVXFER_TEST_SLACK", "1"))
NOTICE_S = 2.0 * SLACK
pytestmark = [pytest.mark.once, pytest.mark.slow, pytest.mark.timeout(400)]


@dataclass(frozen=True, slots=True)
class Flow:
    """What side a and side b do, and on which side it shows that both are in the middle of it."""

    a: str
    b: str
    shows: str


FLOWS = {
    "push": Flow("pusher", "offerer", "b"),
    "pull": Flow("publisher", "puller", "a"),
    "land": Flow("lander", "adopter", "b"),
    "held": Flow("", "holder", "b"),
    "wait": Flow("waiter", "", "a"),
}
LEFT = {"cancelled", "revoked", "stale_descriptor"}  # of one that left: its word and the end of the access race
GONE = {"peer_lost", "peer_unreachable", "peer_draining", "cancelled"}  # of a daemon without which nothing goes on
ANYHOW = GONE | {"done", "revoked", "daemon_unavailable", "unknown_transfer", "stale_descriptor"}
ABANDONED = {"abandoned cancelled", "abandoned peer_lost"}  # the claim may not have arrived, or nothing been reached
ORDERLY, KILLS = ("cancel", "exception", "aclose"), ("SIGKILL", "SIGTERM")
# (flow, who ends, how) -> what each side that waits is told.
TABLE: dict[tuple[str, str, str], dict[str, set[str]]] = {
    **{("push", "a", how): {"b": {"cancelled"}} for how in ORDERLY},
    **{("push", "a", how): {"b": {"peer_lost"}} for how in KILLS},
    **{("push", "b", how): {"a": LEFT} for how in ("cancel", "exception")},
    ("push", "b", "aclose"): {"a": LEFT | {"peer_lost"}},
    **{("push", "b", how): {"a": {"peer_lost"}} for how in KILLS},
    **{("pull", "b", how): {"a": {"abandoned cancelled"}} for how in ORDERLY},
    **{("pull", "b", how): {"a": {"abandoned peer_lost"}} for how in KILLS},
    **{("pull", "a", how): {"b": LEFT} for how in ("cancel", "exception")},
    ("pull", "a", "aclose"): {"b": LEFT | {"peer_lost"}},  # what ends first is its connection
    **{("pull", "a", how): {"b": {"peer_lost", "peer_unreachable"}} for how in KILLS},  # it was just being reached
    **{("land", "a", how): {"b": {"cancelled"}} for how in ORDERLY},
    **{("land", "a", how): {"b": {"peer_lost"}} for how in KILLS},
    **{("push", f"daemon-{side}", how): {"a": ANYHOW, "b": ANYHOW} for side in "ab" for how in KILLS},
    **{("pull", f"daemon-{side}", how): {"a": ANYHOW | ABANDONED, "b": ANYHOW} for side in "ab" for how in KILLS},
    **{("land", "daemon-b", how): {"a": GONE | {"revoked", "stale_descriptor"}, "b": GONE} for how in KILLS},
    **{("land", "daemon-a", how): {"a": ANYHOW, "b": ANYHOW} for how in KILLS},
    **{("held", "daemon-b", how): {"b": GONE} for how in KILLS},
    **{("wait", "daemon-a", how): {"a": GONE | {"daemon_unavailable"}} for how in KILLS},
    **{("wait", "daemon-b", how): {"a": GONE} for how in KILLS},
}


class Stage:
    """Two daemons and two workers; what has ended is started again for the next one."""

    def __init__(self, directory: Path, transport: str) -> None:
        self.directory = directory
        self.transport = transport
        self.daemons: dict[str, tuple[AsyncExitStack, Daemon]] = {}
        self.workers: dict[str, tuple[AsyncExitStack, Process]] = {}
        self.remote: dict[str, Remote] = {}
        self.node: dict[str, list[str]] = {}

    async def start_daemon(self, side: str) -> None:
        stack = AsyncExitStack()
        found = await stack.enter_async_context(daemon(self.directory / side, name=f"daemon-{side}", drain_s="0.2"))
        self.daemons[side] = (stack, found)

    async def start_worker(self, side: str) -> None:
        stack = AsyncExitStack()
        process = await stack.enter_async_context(
            python_process([str(PARTY)], name=f"worker-{side}", environment={"PYTHONPATH": ROOT})
        )
        self.workers[side] = (stack, process)
        self.remote[side] = Remote(process, 30 * SLACK)
        socket = str(self.directory / side / "kvxferd.sock")
        opened = await self.remote[side].do("open", socket=socket, transport=self.transport)
        self.node[side] = opened["addresses"]

    def process(self, who: str) -> Process:
        return self.daemons[who[-1]][1].process if who.startswith("daemon") else self.workers[who][1]

    async def fresh(self) -> None:
        """Every process runs, and each worker has a new client."""
        for side in "ab":
            if side not in self.daemons or self.process(f"daemon-{side}").returncode is not None:
                if side in self.daemons:
                    await self.daemons[side][0].aclose()
                await self.start_daemon(side)
        for side in "ab":
            if side not in self.workers or self.process(side).returncode is not None:
                if side in self.workers:
                    await self.workers[side][0].aclose()
                await self.start_worker(side)
            else:
                self.node[side] = (await self.remote[side].do("reopen"))["addresses"]

    async def aclose(self) -> None:
        for stack, _ in [*self.workers.values(), *self.daemons.values()]:
            await stack.aclose()

    async def play(self, flow: str, name: str) -> None:
        """Both sides take their parts; returns in the middle of it."""
        a, b, parts = self.remote["a"], self.remote["b"], FLOWS[flow]
        if flow == "push":
            await b.do("begin", part="offerer", name=name)
            await a.do("begin", part="pusher", name=name, to=self.node["b"])
        elif flow == "pull":
            ticket = (await a.do("begin", part="publisher", name=name))["ticket"]
            await b.do("begin", part="puller", name=name, ticket=ticket)
        elif flow == "land":
            await a.do("begin", part="pusher", name=name, to=self.node["b"], land=True)
            await a.do("ready")
            await b.do("begin", part="adopter", name=name)
        elif flow == "held":
            await a.do("begin", part="pusher", name=name, to=self.node["b"], land=True)
            await a.do("outcome")
            await b.do("begin", part="holder", name=name)
        else:
            await a.do("begin", part="waiter", name=name, to=self.node["b"])
        await self.remote[parts.shows].do("ready")

    async def end(self, who: str, how: str) -> float:
        """End a part or a process; when that was."""
        if how in ORDERLY:
            return float((await self.remote[who].do("end", how=how))["at"])
        ended = time.monotonic()
        self.process(who).send_signal(getattr(signal, how))
        await self.process(who).wait()
        return ended


@asynccontextmanager
async def stage(directory: Path, transport: str) -> AsyncIterator[Stage]:
    made = Stage(directory, transport)
    try:
        yield made
    finally:
        await made.aclose()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_everybody_concerned_hears_of_an_end(tmp_path: Path, transport: str) -> None:
    wrong: list[str] = []
    async with stage(tmp_path, transport) as on:
        for number, ((flow, who, how), waiting) in enumerate(TABLE.items()):
            await on.fresh()
            await on.play(flow, f"{flow}-{number}")
            ended = await on.end(who, how)
            answers = await asyncio.gather(*(on.remote[side].do("outcome") for side in waiting))
            for (side, wanted), answer in zip(waiting.items(), answers, strict=True):
                took_s = answer["at"] - ended
                # What goes on without the daemon ends when its bytes are there.
                limit_s = NOTICE_S + (LAYERS * PAUSE_S + 15 if answer["told"] == "done" else 0)
                if answer["told"] not in wanted or took_s > limit_s:
                    wrong.append(f"{flow}: {who} {how}: {side} is told {answer['told']} after {took_s:.2f} s")
    assert not wrong, "\n".join(wrong)
