"""What the cases share: two (or more) nodes as real processes, proxies in front of them, and what must be as before.

`cluster` starts a daemon and a worker (`actor.py`) per side. A side named in ``proxied`` is reached by the others only
through two frame-aware proxies (control and data), which stand on a loopback address of their own and on the node's own
ports. `slow(...)` makes a worker's transport misbehave (the "slowshim" of the case book).
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from examples.child_processes import Daemon, Process, daemon, python_process
from examples.remote_worker import Remote, WorkerFailed
from kvxfer.errors import DaemonUnavailable
from tests.cases.facts import limit
from tests.support.frames import CONTROL, DATA
from tests.support.proxy import Proxy, proxy

BOTH = pytest.mark.parametrize("transport", ["shm", "tcp"])
ANSWER_S = 30.0
ROOT = str(Path(__file__).resolve().parents[2])
GAUGES = ("inflight", "grants", "pinned", "quarantined", "quarantined_grants")


def slow(transport: str, spec: str) -> dict[str, Any]:
    """Worker options: this transport, with faults of the slowshim (`kvxfer/native/test/fault_plan.h` says which)."""
    return {"transports": [f"fault+{transport}"], "fault_spec": spec}


class Side:
    """One node: its daemon, its worker, and the proxies in front of it (if any)."""

    def __init__(self, name: str, directory: Path, options: dict[str, Any], settings: dict[str, Any]) -> None:
        self.name = name
        self.directory = directory
        self.options = options  # of the worker
        self.settings = settings  # of the daemon
        self.http = ""
        self._out_of_step = False
        self._proxies = AsyncExitStack()
        self.host = ""  # of the proxies; empty: none
        self.control: Proxy
        self.data: Proxy
        self.facts: dict[str, Any] = {}
        self._daemon: tuple[AsyncExitStack, Daemon] | None = None
        self._worker: tuple[AsyncExitStack, Process] | None = None
        self._remote: Remote

    @property
    def process(self) -> Process:
        """The worker's process."""
        assert self._worker is not None
        return self._worker[1]

    @property
    def daemon(self) -> Process:
        """The daemon's process."""
        assert self._daemon is not None
        return self._daemon[1].process

    @property
    def socket(self) -> Path:
        """The daemon's Unix socket."""
        return self.directory / self.name / "kvxferd.sock"

    @property
    def node(self) -> list[str]:
        """Where other nodes reach it."""
        return list(self.facts["addresses"])

    async def do(self, what: str, /, **arguments: Any) -> dict[str, Any]:
        """A command of `actor.Actor`; raises `WorkerFailed` with the error's code."""
        try:
            return await self._remote.do(what, **arguments)
        except WorkerFailed:
            raise
        except BaseException:  # its answer may come later, to the wrong question
            self._out_of_step = True
            raise

    # -- processes ----------------------------------------------------------------------------------

    async def start_daemon(self) -> None:
        stack = AsyncExitStack()
        self.http = f"127.0.0.1:{free_port()}"
        settings = {"drain_s": "0.2", "http": self.http, **self.settings}
        if self.host:
            settings |= {"advertise": self.host, "data_advertise": self.host}
        found = await stack.enter_async_context(
            daemon(self.directory / self.name, name=f"daemon-{self.name}", **settings)
        )
        self._daemon = (stack, found)

    async def start_worker(self) -> None:
        stack = AsyncExitStack()
        arguments = ["-m", "tests.cases.actor"]
        process = await stack.enter_async_context(
            python_process(arguments, name=f"worker-{self.name}", environment={"PYTHONPATH": ROOT})
        )
        self._worker = (stack, process)
        self._out_of_step = False
        self._remote = Remote(process, limit(ANSWER_S))
        self.facts = await self.do("open", socket=str(self.socket), **self.options)
        if self.host:
            await self._put_proxies()

    async def _put_proxies(self) -> None:
        """New ones, since the ports may be new."""
        await self._proxies.aclose()
        stack = self._proxies = AsyncExitStack()
        data = self.facts["endpoints"].get("tcp")
        if data:
            port = int(data.rpartition(":")[2])
            self.data = await stack.enter_async_context(proxy(("127.0.0.1", port), DATA, host=self.host, port=port))
        port = int(self.node[0].rpartition(":")[2])
        self.control = await stack.enter_async_context(proxy(("127.0.0.1", port), CONTROL, host=self.host, port=port))

    async def reopen(self, **options: Any) -> None:
        """Another client in the same worker process, with these options beside (or instead of) the first ones."""
        self.thaw()
        if self.daemon.returncode is not None:
            await self.restart_daemon()
        if self._out_of_step:
            self.process.kill()
            await self.process.wait()
        if self.process.returncode is not None:
            await self.restart_worker()
        try:
            await self.do("close")
        except DaemonUnavailable:  # it was killed, and has not been noticed as dead before
            await self.restart_worker()
            await self.do("close")
        self.facts = await self.do("open", socket=str(self.socket), **(self.options | options))
        if self.host:
            await self._put_proxies()

    async def restart_worker(self) -> None:
        """After its end: another one in its place."""
        assert self._worker is not None
        await self._worker[0].aclose()
        await self.start_worker()

    async def restart_daemon(self) -> None:
        """After its end: another one in its place, on the port that ``settings`` names."""
        assert self._daemon is not None
        await self._daemon[0].aclose()
        await self.start_daemon()

    def freeze(self, *, daemon_too: bool = False) -> None:
        """SIGSTOP."""
        for process in (self.process, *((self.daemon,) if daemon_too else ())):
            process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        for process in (self.process, self.daemon):
            process.send_signal(signal.SIGCONT)

    async def aclose(self) -> None:
        await self._proxies.aclose()
        for held in (self._worker, self._daemon):
            if held is not None:
                await held[0].aclose()

    # -- looking ------------------------------------------------------------------------------------

    async def holds(self) -> dict[str, Any]:
        """Gauges, descriptors, threads and tasks of the worker."""
        return await self.do("holds")

    async def back_to(self, baseline: dict[str, Any], seconds: float, names: Iterable[str] = GAUGES) -> None:
        """Wait until these are again what they were; at most ``seconds``."""
        wanted = {name: baseline[name] for name in names}
        deadline = time.monotonic() + limit(seconds)
        while True:
            now = {name: value for name, value in (await self.holds()).items() if name in wanted}
            if now == wanted:
                return
            assert time.monotonic() < deadline, f"{self.name}: left behind after {seconds} s: {now}, before: {wanted}"
            await asyncio.sleep(0.02)

    def rss_bytes(self, process: Process | None = None) -> int:
        """Resident memory of a process (the worker)."""
        pages = int(Path(f"/proc/{(process or self.process).pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def fds(self, process: Process | None = None) -> int:
        """Open descriptors of a process (the worker)."""
        return len(os.listdir(f"/proc/{(process or self.process).pid}/fd"))


class Cluster(dict[str, Side]):
    """The sides by name; ``transport`` is what their workers use."""

    def __init__(self, transport: str) -> None:
        super().__init__()
        self.transport = transport

    async def fresh(self, **special: dict[str, Any]) -> tuple[Side, ...]:
        """New clients for a test on processes that others have used: all sides, each with its special options."""
        common = {"transports": [self.transport]}
        await asyncio.gather(*(side.reopen(**(common | special.get(name, {}))) for name, side in self.items()))
        return tuple(self.values())


@asynccontextmanager
async def cluster(
    directory: Path,
    transport: str,
    *,
    sides: str = "ab",
    proxied: str = "",
    daemons: dict[str, Any] | None = None,
    workers: dict[str, Any] | None = None,
    special: dict[str, dict[str, Any]] | None = None,
    own_daemons: dict[str, dict[str, Any]] | None = None,
) -> AsyncIterator[Cluster]:
    """A daemon and a worker per letter of ``sides``; ``daemons`` and ``workers`` are options of all, ``special`` and
    ``own_daemons`` of one side's.
    """
    found = Cluster(transport)
    try:
        for number, name in enumerate(sides):
            options = {"transports": [transport], "timeout_s": 20.0, **(workers or {}), **(special or {}).get(name, {})}
            settings = {**(daemons or {}), **(own_daemons or {}).get(name, {})}
            found[name] = Side(name, directory, options, settings)
            if name in proxied:
                found[name].host = f"127.0.0.{2 + number}"
        await asyncio.gather(*(side.start_daemon() for side in found.values()))
        await asyncio.gather(*(side.start_worker() for side in found.values()))
        yield found
    finally:
        for side in found.values():
            await side.aclose()


def free_port() -> int:
    """A port of 127.0.0.1 that nobody has just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def metric(side: Side, name: str, **labels: str) -> float:
    """One number of a daemon's /metrics; 0 when there is no such series (yet)."""
    response = await asyncio.to_thread(urllib.request.urlopen, f"http://{side.http}/metrics", timeout=limit(5))
    with response:
        text = response.read().decode()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name and sample.labels == labels:
                return float(sample.value)
    return 0.0


async def until(condition: Callable[[], object], seconds: float, what: str) -> None:
    """Wait for something that nobody announces."""
    deadline = time.monotonic() + limit(seconds)
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.01)
