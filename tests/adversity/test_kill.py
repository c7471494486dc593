"""kill -9 each of the four processes of a transfer at random moments: the survivors get a typed error within two
seconds (or finish), nothing leaks, and the next transfer is exact."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from examples.child_processes import Daemon, Process, daemon, python_process

WORKER = ("-m", "tests.adversity.worker")
SLACK = float(os.environ.get("KVXFER_TEST_SLACK", "1"))
NOTICE_S = 2.0 * SLACK
pytestmark = [pytest.mark.once, pytest.mark.slow]  # the processes under test choose their own loop
VICTIMS = ("worker-a", "worker-b", "daemon-a", "daemon-b")
TYPED = {
    "peer_lost",
    "cancelled",
    "revoked",
    "peer_unreachable",
    "unknown_transfer",
    "stale_descriptor",
    "lease_expired",
    "peer_incarnation",
}


class Cluster:
    """Two daemons and two workers, each of which can be killed and started again."""

    def __init__(self, directory: Path, transport: str) -> None:
        self.directory = directory
        self.transport = transport
        self.daemons: dict[str, tuple[AsyncExitStack, Daemon]] = {}
        self.workers: dict[str, tuple[AsyncExitStack, Process]] = {}

    async def start_daemon(self, side: str) -> None:
        stack = AsyncExitStack()
        found = await stack.enter_async_context(daemon(self.directory / side, name=f"daemon-{side}", drain_s="0.2"))
        self.daemons[side] = (stack, found)

    async def start_worker(self, side: str) -> None:
        stack = AsyncExitStack()
        process = await stack.enter_async_context(python_process(WORKER, name=f"worker-{side}"))
        self.workers[side] = (stack, process)
        socket = str(self.directory / side / "kvxferd.sock")
        await self.ask(side, "open", socket=socket, transport=self.transport, seed=1 if side == "a" else 2)

    async def ask(self, side: str, name: str, **arguments: Any) -> dict[str, Any]:
        """One command to a worker; the answer, whatever it is."""
        process = self.workers[side][1]
        process.write(json.dumps({"do": name, **arguments}) + "\n")
        while True:
            answer: dict[str, Any] = json.loads(await process.readline(20 * SLACK))
            if "started" not in answer:
                return answer

    async def started(self, side: str) -> None:
        """Wait until a worker says that bytes are about to move."""
        assert "started" in json.loads(await self.workers[side][1].readline(20 * SLACK))

    async def kill(self, victim: str) -> None:
        kind, side = victim.split("-")
        _, found = (self.daemons if kind == "daemon" else self.workers)[side]  # type: ignore[index]
        process = found.process if isinstance(found, Daemon) else found
        process.kill()
        await process.wait()

    async def restart(self, victim: str) -> None:
        kind, side = victim.split("-")
        stack, _ = (self.daemons if kind == "daemon" else self.workers)[side]  # type: ignore[index]
        await stack.aclose()
        if kind == "daemon":
            await self.start_daemon(side)
        else:
            await self.start_worker(side)

    async def aclose(self) -> None:
        for stack, _ in [*self.workers.values(), *self.daemons.values()]:
            await stack.aclose()


@asynccontextmanager
async def cluster(directory: Path, transport: str) -> AsyncIterator[Cluster]:
    found = Cluster(directory, transport)
    try:
        for side in "ab":
            await found.start_daemon(side)
        for side in "ab":
            await found.start_worker(side)
        yield found
    finally:
        await found.aclose()


async def transfer(found: Cluster, way: str, request: str) -> list[asyncio.Task[dict[str, Any]]]:
    """Start both sides of one transfer; returns when bytes are about to move, with the two answers as tasks (A, B)."""
    node = (await found.ask("b", "where"))["addresses"]
    await found.ask("a", "where")
    names = {"push": ("push", "offer"), "pull": ("publish", "pull")}[way]
    says_started = "a" if way == "push" else "b"
    for side, name in zip("ab", names, strict=True):
        arguments = {"request": request, **({"to": node} if side == "a" else {})}
        found.workers[side][1].write(json.dumps({"do": name, **arguments}) + "\n")
    await found.started(says_started)

    async def answer(side: str) -> dict[str, Any]:
        result: dict[str, Any] = json.loads(await found.workers[side][1].readline(20 * SLACK))
        return {**result, "at": time.monotonic()}

    return [asyncio.ensure_future(answer(side)) for side in "ab"]


async def exact(found: Cluster, way: str, request: str, seed: int) -> None:
    """A transfer without faults is exact."""
    await found.ask("a", "fill", seed=seed)
    for task in await transfer(found, way, request):
        answer = await task
        assert answer["ok"], answer
    first, second = await found.ask("a", "digest"), await found.ask("b", "digest")
    assert first["digest"] == second["digest"]


async def released(found: Cluster, side: str, killed: float) -> None:
    """Blocks that were held until no byte could move are free again, soon after the end of the other side."""
    while (holds := await found.ask(side, "holds"))["quarantined"]:
        assert time.monotonic() - killed < NOTICE_S + 4, (side, holds)
        await asyncio.sleep(0.02)


@pytest.mark.once
@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_kill_each_process_in_the_middle(tmp_path: Path, transport: str) -> None:
    rng = Random(f"kill-{transport}")
    async with cluster(tmp_path, transport) as found:
        await exact(found, "push", "warm-push", 1)
        await exact(found, "pull", "warm-pull", 2)
        baseline = {side: await found.ask(side, "holds") for side in "ab"}
        for number, victim in enumerate(VICTIMS * 2):
            way = ("push", "pull")[number // len(VICTIMS)]
            request = f"{way}-{victim}-{number}"
            tasks = await transfer(found, way, request)
            await asyncio.sleep(rng.uniform(0, 0.02))
            await found.kill(victim)
            killed = time.monotonic()
            survivors = [side for side in "ab" if victim != f"worker-{side}"]
            for side, task in zip("ab", tasks, strict=True):
                if side not in survivors:
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
                    continue
                answer = await task
                # A publisher to whom no claim came has nobody to hear of: its lease is its deadline.
                limit = NOTICE_S if answer.get("claimed", True) else NOTICE_S + 4
                assert answer["at"] - killed < limit, (victim, way, side, answer)
                assert answer["ok"] or answer["error"] in TYPED, (victim, way, side, answer)
            await found.restart(victim)
            for side in survivors:
                await released(found, side, killed)
            await exact(found, way, f"after-{request}", 100 + number)
            for side in survivors:
                holds = await found.ask(side, "holds")
                for gauge in ("inflight", "grants", "pinned", "quarantined"):
                    assert holds[gauge] == 0, (victim, way, side, holds)
                for count in ("regions", "threads"):
                    assert holds[count] == baseline[side][count], (victim, way, side, count, holds, baseline[side])
                assert holds["fds"] <= baseline[side]["fds"] + 4, (victim, way, side, holds, baseline[side])
                assert holds["tasks"] <= baseline[side]["tasks"] + 1, (victim, way, side, holds, baseline[side])
