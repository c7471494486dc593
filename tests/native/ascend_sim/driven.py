"""Processes that use the simulated libraries as a program linked to the vendor's would: `driver.cc`, told line by line.

Each answer begins with the vendor's raw status.
"""

from __future__ import annotations

import os
import select
import shlex
import signal
import socket
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

from tests.conftest import slack
from tests.native.ascend_sim.build import build, build_driver
from tests.native.ascend_sim.simulation import Simulation

MIB = 1 << 20
PAGE = 2 * MIB
LIMIT_S = 10.0 * slack()
# What runs the driver when CXX is a cross compiler (`make check-aarch64`).
EMULATOR = shlex.split(os.environ.get("KVXFER_TEST_EMULATOR", ""))
OK, INVALID, TIMEOUT, NOT_CONNECTED, ALREADY, UNSUPPORTED, EXHAUSTED, FAILED = (
    *("0", "103900", "103901", "103902", "103903", "103905"),
    *("203900", "503900"),
)
NO_CONTEXT, NO_MEMORY, MEMORY_ERROR, PARAM, LOST = "107002", "207001", "507053", "107000", "507055"
WAITING, COMPLETED, ENDED = "0", "1", "3"  # of a transfer


class Driver:
    def __init__(self, sim: Simulation, abi: int = 1, **settings: str) -> None:
        environment = sim.environment(**settings)
        program = build_driver(build("9.1", 1), abi)
        environment["LD_LIBRARY_PATH"] = environment["KVXFER_CANN_LIBDIR"]
        self.process = subprocess.Popen(
            [*EMULATOR, str(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
        )
        self.pending = b""

    @property
    def pid(self) -> int:
        return self.process.pid

    def line(self, command: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(command.encode() + b"\n")
        self.process.stdin.flush()
        until = time.monotonic() + LIMIT_S
        while b"\n" not in self.pending:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"{command}: no answer in {LIMIT_S:g} s"
            got = os.read(self.process.stdout.fileno(), 65536)
            if not got:
                raise EOFError(f"{command}: the process ended with {self.process.wait(LIMIT_S)}")
            self.pending += got
        answer, _, self.pending = self.pending.partition(b"\n")
        return answer.decode()

    def __call__(self, command: str) -> list[str]:
        return self.line(command).split()

    def status(self, command: str) -> str:
        return self(command)[0]

    def good(self, *commands: str) -> None:
        for command in commands:
            answer = self(command)
            assert answer[0] == OK, f"{command}: {answer}: {self.line('message')}"

    def signal(self, number: signal.Signals) -> None:
        """A stopped process is one whose threads have all stopped, which takes the kernel a moment."""
        self.process.send_signal(number)
        until = time.monotonic() + LIMIT_S
        while number == signal.SIGSTOP and not self._stopped():
            assert time.monotonic() < until, "it does not stop"

    def _stopped(self) -> bool:
        tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
        try:
            return all((task / "stat").read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)
        except (FileNotFoundError, ProcessLookupError):
            return False  # a thread ended meanwhile: look again

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(LIMIT_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.kill()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Engine(Driver):
    """A process with the engine `e` on a card, `m` of 4 MiB device memory and `h` of 64 KiB pinned, both registered."""

    def __init__(
        self, sim: Simulation, card: int, *, abi: int = 1, port: int = 0, options: str = "", fail: str = ""
    ) -> None:
        super().__init__(sim, abi, FAIL=fail)
        self.name = f"127.0.0.1:{port or free_port()}"
        self.good("init", f"device {card}", f"open e {self.name} BufferPool=0:0 {options}")
        self.memory = int(self(f"malloc m {2 * PAGE}")[1])
        self.host = int(self("mallochost h 65536")[1])
        self.good(f"register e rm m {2 * PAGE} 0", "register e rh h 65536 1")
        self.good(f"fill m {2 * PAGE} {10 + card}", f"fill h 65536 {20 + card}")


class Pair:
    """Two engines on two cards of one simulation, `a` connected to `b`."""

    def __init__(self, stack: ExitStack, sim: Simulation, abi: int = 1, fail: str = "") -> None:
        self.sim = sim
        self.b = Engine(sim, 1, abi=abi)
        stack.callback(self.b.close)
        self.a = Engine(sim, 0, abi=abi, fail=fail)
        stack.callback(self.a.close)
        self.a.good(f"connect e {self.b.name} 1000")

    def sync(self, way: str = "w", length: int = PAGE, timeout_ms: int = 5000) -> str:
        return self.a.status(f"sync e {self.b.name} {way} {timeout_ms} m {self.b.memory} {length}")

    def submit(self, request: str, length: int = PAGE, way: str = "w") -> str:
        return self.a.status(f"async e {request} {self.b.name} {way} m {self.b.memory} {length}")

    def finish(self, request: str) -> list[str]:
        return self.a(f"finish e {request} 5000")

    def again(self) -> None:
        self.a.good(f"disconnect e {self.b.name}", f"connect e {self.b.name}")
