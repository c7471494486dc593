"""`kvxfer ping` against real daemons and against strangers: what is printed, and the exit status."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest

from kvxfer import cli
from kvxfer.cli.ping import PingPath, PingRow, explain, table
from tests.conftest import slack
from tests.native.ascend_sim.simulation import Simulation

pytestmark = pytest.mark.once

SECRET = "a secret that both nodes hold"


def clean_environment(**more: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("KVXFER_")} | more


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


def ping(*words: str, **environment: str) -> Ended:
    """In this process, to be quick; `test_every_way_is_measured` starts one of its own."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, clean_environment(**environment), clear=True),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        status = cli.main(["ping", "--count", "5", *words])
    return Ended(status, out.getvalue(), err.getvalue())


@contextmanager
def daemon(directory: Path, *words: str, **environment: str) -> Iterator[str]:
    """A real daemon; yields its address."""
    where = ["--socket-dir", str(directory), "--listen", "127.0.0.1:0", "--http", ""]
    command = [sys.executable, "-m", "kvxfer", "serve", *where, "--json", *words]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=clean_environment(**environment)
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        yield json.loads(line)["addresses"][0]
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with daemon(tmp_path_factory.mktemp("node") / "run") as address:
        yield address


@contextmanager
def stranger(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that is not kvxfer; each connection is handed to ``answer``."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        kept: list[socket.socket] = []

        def serve() -> None:
            while True:
                try:
                    connection = server.accept()[0]
                except OSError:
                    return
                kept.append(connection)
                answer(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in kept:
                connection.close()


def one_line(ended: Ended, status: int) -> str:
    assert (ended.returncode, ended.stdout) == (status, ""), ended
    assert ended.stderr.count("\n") == 1, ended.stderr
    return ended.stderr


def test_every_way_is_measured(node: str) -> None:
    command = [sys.executable, "-m", "kvxfer", "ping", "--count", "5", node]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=30 * slack(), env=clean_environment(), check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith(f"{node}: node ")
    paths = ["control", "shm put 4 KiB", "shm get 4 KiB", "tcp put 4 KiB", "tcp get 4 KiB"]
    for path in paths:
        (line,) = [line for line in ended.stdout.splitlines() if line.startswith(path)]
        p50, p90, p99, worst = map(float, line.removeprefix(path).split()[:4])
        assert 0 < p50 <= p90 <= p99 <= worst
    assert re.search(r"^shm +chosen .*1 copy per byte", ended.stdout, re.MULTILINE)
    assert re.search(r"^tcp +usable too .*2 copies per byte", ended.stdout, re.MULTILINE)
    assert "loop" not in ended.stdout


def test_one_transport(node: str) -> None:
    shown = ping(node, "--transport", "shm").stdout
    assert "shm put" in shown
    assert "tcp" not in shown


def test_what_cannot_be_used_says_why(tmp_path: Path) -> None:
    with daemon(tmp_path / "run", "--transports", "tcp") as address:
        usual, forced = ping(address), ping(address, "--transport", "shm")
    assert usual.returncode == 0
    assert re.search(r"^shm +not usable +the node offers only tcp$", usual.stdout, re.MULTILINE)
    assert re.search(r"^tcp +chosen", usual.stdout, re.MULTILINE)
    assert forced.returncode == 1
    assert "not usable" in forced.stdout


def test_own_configuration_counts(node: str) -> None:
    shown = ping(node, KVXFER_TRANSPORTS="tcp").stdout
    assert re.search(r"^shm +not usable +not allowed on this side: transports = tcp$", shown, re.MULTILINE)


def test_secrets(tmp_path: Path) -> None:
    with daemon(tmp_path / "run", "--transports", "tcp", KVXFER_SECRET=SECRET) as address:
        assert ping(address, KVXFER_SECRET=SECRET).returncode == 0
        missing, wrong = ping(address), ping(address, KVXFER_SECRET="another secret, not the same")
    assert "secret_file" in one_line(missing, 1)
    assert "secret_file" in one_line(wrong, 1)


def test_each_candidate_has_its_reason() -> None:
    with socket.socket() as bound:  # bound but not listening: refused, and nobody else gets the port
        bound.bind(("127.0.0.1", 0))
        closed = f"127.0.0.1:{bound.getsockname()[1]}"
        shown = one_line(ping(f"{closed},nobody.invalid:17800", "--timeout", "4"), 1)
    assert f"{closed}=Connection refused" in shown
    assert "nobody.invalid:17800=" in shown
    assert "kvxfer serve" in shown


def test_a_second_candidate_is_enough(node: str) -> None:
    assert ping(f"127.0.0.1:1,{node}", "--transport", "tcp").returncode == 0


def test_another_server_is_recognised() -> None:
    with stranger(lambda connection: connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")) as address:
        shown = one_line(ping(address), 1)
    assert "does not speak kvxfer's protocol" in shown
    assert "HTTP" in shown
    assert address in shown


def test_a_silent_server_is_given_up() -> None:
    with stranger(lambda _: None) as address:
        shown = one_line(ping(address, "--timeout", "0.6"), 1)
    assert f"{address}=" in shown


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["127.0.0.1"], "port is missing"),
        (["127.0.0.1:port"], "port must be a number"),
        (["127.0.0.1:0"], "nobody can dial"),
        (["127.0.0.1:1", "--timeout", "0"], "--timeout must be"),
        (["127.0.0.1:1", "--timeout", "nan"], "--timeout must be"),
        (["127.0.0.1:1", "--count", "0"], "--count must be"),
        (["127.0.0.1:1", "--transport", "smh"], "did you mean shm?"),
        (["127.0.0.1:1", "--transport", "loop"], "one of shm, tcp"),
        (["127.0.0.1:1", "--device", "first"], "--device must be a number"),
        (["127.0.0.1:1", "--config", "/nonexistent.toml"], "/nonexistent.toml"),
    ],
)
def test_wrong_usage(words: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ping", *words]) == 2
    shown = capsys.readouterr().err
    assert expected in shown
    assert shown.count("\n") == 1


def test_between_accelerators(tmp_path: Path) -> None:
    """Over the simulated libraries: what each pair of memories takes, and that nobody believes the figures."""
    simulation = Simulation(tmp_path / "sim", settings={"HBM": "64M"}).environment()
    found = {name: simulation[name] for name in simulation if name.startswith(("KVXFER_SIM_", "KVXFER_CANN_"))}
    on_card = ["--transports", "hixl,shm,tcp", "--ping-device", "1", "--hbm-arena-bytes", "2MiB"]
    environment = clean_environment(**found, KVXFER_TRANSPORTS="hixl,shm,tcp", KVXFER_HBM_ARENA_BYTES="2MiB")

    def shown(*words: str) -> Ended:
        command = [sys.executable, "-m", "kvxfer", "ping", "--count", "5", address, *words]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60 * slack(), env=environment, check=False
        )
        return Ended(done.returncode, done.stdout, done.stderr)

    with daemon(tmp_path / "run", *on_card, **found) as address:
        everything, one = shown(), shown("--transport", "hixl", "--device", "0")
    with daemon(tmp_path / "other", "--transports", "hixl,shm,tcp", **found) as address:
        nothing_shared = shown("--transport", "hixl")
    assert (everything.returncode, everything.stderr) == (0, "")
    pairs = {block.partition(":")[0]: block for block in everything.stdout.split("\n\n")}
    assert re.search(r"^hixl +not usable +moves hbm", pairs["dram to dram"], re.MULTILINE)
    assert re.search(r"^shm +chosen", pairs["dram to dram"], re.MULTILINE)
    assert re.search(r"^hixl +chosen +between accelerators", pairs["hbm to hbm"], re.MULTILINE)
    assert re.search(r"^tcp +chosen", pairs["dram to hbm"], re.MULTILINE)
    assert re.search(r"^shm +not usable +moves dram, hbm and pinned dram here", pairs["dram to hbm"], re.MULTILINE)
    assert re.search(r"^shm +chosen", pairs["hbm to dram"], re.MULTILINE)
    assert "KVXSim910 (simulated)" in everything.stdout
    assert "NO FIGURE HERE IS A HARDWARE FIGURE\n" in everything.stdout
    assert (one.returncode, "hixl hbm-hbm put 4 KiB" in one.stdout, "shm" in one.stdout) == (0, True, False)
    assert (nothing_shared.returncode, "moves hbm" in nothing_shared.stdout) == (1, True)


def test_a_card_that_a_daemon_does_not_have_is_a_warning(tmp_path: Path) -> None:
    with daemon(tmp_path / "run", "--ping-device", "7") as address:
        assert ping(address, "--transport", "tcp").returncode == 0


def test_each_pair_of_memories_has_its_choice() -> None:
    ways = [
        PingPath("hixl", False, "moves hbm only", "dram to dram"),
        PingPath("tcp", True, "network", "dram to dram"),
        PingPath("hixl", True, "direct", "hbm to hbm"),
        PingPath("tcp", True, "staged", "hbm to hbm"),
    ]
    assert explain(ways).splitlines() == [
        "dram to dram:",
        "hixl  not usable  moves hbm only",
        "tcp   chosen      network",
        "",
        "hbm to hbm:",
        "hixl  chosen      direct",
        "tcp   usable too  staged",
    ]


def test_table_is_aligned() -> None:
    rows = [PingRow("control", 1, 22.25, 333, 4444), PingRow("shm put 4 KiB", 99999.9, 99999.9, 99999.9, 99999.9, 12.5)]
    lines = table(rows, 1 << 20).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[0].endswith("1 MiB GB/s")


def test_the_first_usable_way_is_the_chosen_one() -> None:
    ways = [PingPath("shm", False, "another host"), PingPath("tcp", True, "network"), PingPath("ucx", True, "network")]
    assert [line.split("  ")[0] for line in explain(ways).splitlines()] == ["shm", "tcp", "ucx"]
    assert "shm   not usable  another host" in explain(ways)
    assert "tcp   chosen      network" in explain(ways)
    assert "ucx   usable too  network" in explain(ways)
