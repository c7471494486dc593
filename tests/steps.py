"""Cancelling a coroutine at each place where it waits, one after the other, and looking at what it left.

The idea: a coroutine can only be interrupted where it is suspended, so its suspensions are counted and the n-th one is
cancelled; n grows until the coroutine ends first. Each place is tried twice: at once, and at the moment when what it
waits for has just come true but it has not yet been told.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Generator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from kvxfer.client import Client
from kvxfer.server import Server, embedded_config
from tests.conftest import slack
from tests.nodes import until

STEPS_MAX = 200


class CancelAt:
    """Awaits ``work`` and has its task cancelled at the suspension number ``step`` (from 1); ``reached`` tells whether
    there was one.
    """

    def __init__(self, work: Coroutine[Any, Any, Any], step: int, late: bool) -> None:
        self._inner = work.__await__()
        self._step = step
        self._late = late
        self.reached = False

    def __await__(self) -> Generator[Any, Any, Any]:
        count = 0
        error: BaseException | None = None
        while True:
            try:
                waits_for = self._inner.send(None) if error is None else self._inner.throw(error)
            except StopIteration as done:
                return done.value
            error = None
            count += 1
            if count == self._step:
                self._cancel(waits_for)
            try:
                yield waits_for
            except BaseException as thrown:
                error = thrown

    def _cancel(self, waits_for: Any) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.reached = True
        if self._late and waits_for is not None:
            waits_for.add_done_callback(lambda _: task.cancel())
        else:
            asyncio.get_running_loop().call_soon(task.cancel)


async def cancelled_at(work: Coroutine[Any, Any, Any], step: int, late: bool) -> tuple[bool, Any]:
    """Whether the step was reached, and how the work ended: a value or an exception."""
    place = CancelAt(work, step, late)

    async def run() -> Any:
        return await place

    task = asyncio.ensure_future(run())
    done, _ = await asyncio.wait([task], timeout=5 * slack())
    assert done, f"still waiting after it was cancelled at step {step}"
    if task.cancelled():
        return place.reached, asyncio.CancelledError()
    return place.reached, task.exception() or task.result()


@dataclass(slots=True)
class Pair:
    """Two nodes with a client each, and what they hold when nothing goes on."""

    a: Client
    b: Client
    servers: tuple[Server, Server]

    def held(self) -> dict[str, Any]:
        """Everything that a finished piece of work must have given back."""
        found: dict[str, Any] = {}
        for name, client in (("a", self.a), ("b", self.b)):
            counters = client.plane.engine.counters()
            found[f"{name} grants"] = counters.grants
            found[f"{name} inflight"] = counters.inflight
            found[f"{name} imports"] = counters.imports
            found[f"{name} regions"] = counters.regions
            found[f"{name} blocks"] = (client.reservations.pinned_blocks, client.reservations.quarantined_blocks)
            found[f"{name} claims"] = dict(client.control._claims)
            found[f"{name} postings"] = list(client.control._postings)
            found[f"{name} flows"] = list(client._flows)
            found[f"{name} tasks"] = (len(client.control._tasks), len(client.plane._tasks), len(client._tasks))
            found[f"{name} watchers"] = len(client.plane.memory._subscribers)
            found[f"{name} region grants"] = sum(
                len(region._grants) for same in client.plane.memory._regions.values() for region in same
            )
        for name, server in zip("ab", self.servers, strict=True):
            counts = server.registry.counts()
            found[f"daemon {name}"] = (counts.postings, counts.claims, counts.waiting, counts.routes)
        return found

    async def at_rest(self) -> dict[str, Any]:
        """What both nodes hold once that has not changed for a moment."""
        found, since = self.held(), 0
        while since < 5:
            await asyncio.sleep(0.01)
            now = self.held()
            found, since = now, since + 1 if now == found else 0
        return found

    async def is_as(self, before: dict[str, Any]) -> None:
        """Wait until both nodes hold what they held before."""
        try:
            await until(lambda: self.held() == before, 3)
        except TimeoutError:
            now = self.held()
            left = {name: (before[name], now[name]) for name in now if now[name] != before[name]}
            raise AssertionError(f"left behind (before, now): {left}") from None


@asynccontextmanager
async def pair(*transports: str, **options: Any) -> AsyncIterator[Pair]:
    """Two nodes whose daemons can be looked at."""
    async with AsyncExitStack() as stack:
        servers, clients = [], []
        for _ in range(2):
            config = embedded_config(transports=transports, **options)
            servers.append(await stack.enter_async_context(Server(config, embedded=True)))
            clients.append(await stack.enter_async_context(Client(servers[-1].socket_path, config=config)))
        yield Pair(clients[0], clients[1], (servers[0], servers[1]))
