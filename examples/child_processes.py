"""Real processes for tests and demonstrations: daemons and workers that can be killed, stopped and waited for.

Every process belongs to an ``async with`` block and is gone when the block is left, however it is left. Its stderr is
kept (bounded) and shown when something went wrong.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from kvxfer.errors import DaemonUnavailable, TransferTimeout
from kvxfer.tasks import TaskOwner

STDERR_LINES_MAX = 200
LINE_BYTES_MAX = 1 << 22
READY_S = 10.0
STOP_S = 8.0


def has_ended(pid: int) -> bool:
    """Whether a child of this process has ended. Its status stays for whoever waits for it."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True  # somebody has its status already


class Process:
    """One child process with lines on stdin and stdout."""

    def __init__(self, name: str, child: asyncio.subprocess.Process) -> None:
        self.name = name
        self._child = child
        self.stderr: deque[str] = deque(maxlen=STDERR_LINES_MAX)
        self._tasks = TaskOwner(name)
        self._reader = self._tasks.spawn(self._keep_stderr(), "stderr")

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._child.pid

    @property
    def returncode(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return self._child.returncode

    async def _keep_stderr(self) -> None:
        assert self._child.stderr is not None
        while line := await self._child.stderr.readline():
            self.stderr.append(line.decode(errors="replace").rstrip())

    def write(self, text: str) -> None:
        """Send text to its stdin."""
        assert self._child.stdin is not None
        self._child.stdin.write(text.encode())

    async def readline(self, timeout: float) -> str:
        """The next line of its stdout; an error with the end of its stderr when it ended or kept silent."""
        assert self._child.stdout is not None
        try:
            line = await asyncio.wait_for(self._child.stdout.readline(), timeout)
        except TimeoutError as late:
            raise TransferTimeout(f"{self.name} said nothing for {timeout:g} s; its stderr: {self.tail()}") from late
        if not line:
            await self._child.wait()
            raise DaemonUnavailable(f"{self.name} ended with status {self.returncode}; its stderr: {self.tail()}")
        return line.decode()

    def tail(self) -> str:
        """The end of its stderr."""
        return " | ".join(list(self.stderr)[-15:]) or "(empty)"

    def send_signal(self, number: int) -> None:
        """Send a signal, if it still runs."""
        if self._child.returncode is None:
            self._child.send_signal(number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    async def wait(self, timeout: float = STOP_S) -> int:
        """Wait for its end; its exit status."""
        return await asyncio.wait_for(self._child.wait(), timeout)

    async def ended_within(self, seconds: float) -> bool:
        """Whether it has ended, given a moment: one that dies closes its sockets before its parent can see that."""
        try:
            await self.wait(seconds)
        except TimeoutError:
            return has_ended(self.pid)
        return True

    async def stop(self) -> None:
        """End it: politely, then not."""
        if self._child.stdin is not None:
            self._child.stdin.close()
        self.send_signal(signal.SIGCONT)
        self.send_signal(signal.SIGTERM)
        try:
            await self.wait()
        except TimeoutError:
            self.kill()
            await self._child.wait()
        await self._reader


@asynccontextmanager
async def python_process(
    arguments: Sequence[str], *, name: str, environment: Mapping[str, str] | None = None
) -> AsyncIterator[Process]:
    """A Python process that runs ``arguments``, with this interpreter."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
        limit=LINE_BYTES_MAX,
    )
    process = Process(name, child)
    try:
        yield process
    finally:
        await process.stop()


class Daemon:
    """A running `kvxfer serve`."""

    def __init__(self, process: Process, socket: Path) -> None:
        self.process = process
        self.socket = socket

    async def wait_ready(self, timeout: float = READY_S) -> None:
        """Wait until its socket accepts connections."""
        deadline = asyncio.get_running_loop().time() + timeout
        while True:
            try:
                _, writer = await asyncio.open_unix_connection(str(self.socket))
            except OSError as refused:
                if self.process.returncode is not None or asyncio.get_running_loop().time() > deadline:
                    what = f"{self.process.name} does not serve {self.socket}: {refused}"
                    raise DaemonUnavailable(f"{what}; its stderr: {self.process.tail()}") from refused
                await asyncio.sleep(0.02)
            else:
                writer.close()
                return


@asynccontextmanager
async def daemon(
    directory: Path, *, name: str = "daemon", program: Sequence[str] = ("-m", "kvxfer"), **options: object
) -> AsyncIterator[Daemon]:
    """A daemon with its socket in ``directory``, on a loopback port of its own choosing, without HTTP by default.

    ``program``: what Python runs, with `serve` behind it (see `tests.support.older`).
    """
    await asyncio.to_thread(directory.mkdir, mode=0o700, exist_ok=True)
    settings = {"socket_dir": directory, "listen": "127.0.0.1:0", "http": "", **options}
    environment = {f"KVXFER_{key.upper()}": str(value) for key, value in settings.items()}
    async with python_process([*program, "serve"], name=name, environment=environment) as process:
        found = Daemon(process, directory / "kvxferd.sock")
        await found.wait_ready()
        yield found
