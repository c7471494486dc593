"""`kvxfer serve` as a process: up within a second, drained on SIGTERM, refused with one clear line."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import slack

LIGHT = ("--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--transports", "loop", "--json")


def command(directory: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "kvxfer", "serve", *LIGHT, "--socket-dir", str(directory), *words]


@contextmanager
def daemon(directory: Path, *words: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    directory.chmod(0o700)
    process = subprocess.Popen(command(directory, *words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        yield process, json.loads(line)
    finally:
        process.kill()
        process.communicate()


def refused(directory: Path, *words: str) -> str:
    ended = subprocess.run(command(directory, *words), capture_output=True, text=True, timeout=20 * slack())
    assert ended.returncode == 2, ended
    assert ended.stdout == ""
    assert ended.stderr.count("\n") == 1, ended.stderr
    return ended.stderr


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_life_of_a_daemon(tmp_path: Path) -> None:
    started = time.monotonic()
    with daemon(tmp_path) as (process, facts):
        assert time.monotonic() - started < 3 * slack()  # under a second on an idle machine
        assert facts["pid"] == process.pid
        assert Path(facts["socket"]).is_socket()
        ready = urllib.request.urlopen(f"{facts['http']}/readyz", timeout=5)
        assert ready.read() == b"ready\n"
        before = cpu_s(process.pid)
        time.sleep(1)
        assert cpu_s(process.pid) - before <= 0.02  # idle means idle; the clock ticks in hundredths
        process.send_signal(signal.SIGTERM)
        assert process.wait(3 * slack()) == 0
        assert not Path(facts["socket"]).exists()


def test_ctrl_c_counts_in_a_job_that_ignores_it(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    words = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", *command(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("{")
        process.send_signal(signal.SIGINT)
        assert process.wait(5 * slack()) == 0
        assert process.stderr is not None
        assert "SIGINT: draining" in process.stderr.read()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_second_signal_ends_at_once(tmp_path: Path, number: signal.Signals) -> None:
    script = (
        "import asyncio, sys\n"
        "from kvxfer.config import Config\n"
        "from kvxfer.net.link import Link, LocalIdentity\n"
        "from kvxfer.wire import messages as m\n"
        "async def main():\n"
        "    link = await Link.dial_unix(sys.argv[1], LocalIdentity(role='worker'), Config.embedded())\n"
        "    await link.request(m.Post(kind='offer', key='k', lease_s=60.0, claims_max=1), timeout=5)\n"
        "    await link.request(m.Claim(kind='offer', key='k'), timeout=5)\n"
        "    print('claimed', flush=True)\n"
        "    await link.wait_closed()\n"
        "asyncio.run(main())\n"
    )
    with daemon(tmp_path, "--drain-s", "60") as (process, facts):
        worker = subprocess.Popen([sys.executable, "-c", script, facts["socket"]], stdout=subprocess.PIPE, text=True)
        assert worker.stdout is not None
        assert worker.stdout.readline() == "claimed\n"
        process.send_signal(number)
        time.sleep(0.3)
        assert process.poll() is None  # it waits for the live claim
        process.send_signal(number)
        assert process.wait(1 * slack()) == 128 + number
        assert worker.wait(5 * slack()) == 0
        worker.stdout.close()


def test_sighup_reads_secrets_again(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text("the shared secret of all\n")
    with daemon(tmp_path, "--secret-file", str(secret), "--reload-s", "3600") as (process, _):
        assert process.stderr is not None
        for text, words in (("the next secret of all\n", "was read again"), ("short\n", "the old ones stay in force")):
            secret.write_text(text)
            process.send_signal(signal.SIGHUP)
            line = process.stderr.readline()
            assert words in line
            assert text.strip() not in line
        assert process.poll() is None


def test_killed_daemon_can_start_again(tmp_path: Path) -> None:
    with daemon(tmp_path) as (process, first):
        process.kill()
        process.wait()
    with daemon(tmp_path) as (_, second):
        assert second["incarnation"] != first["incarnation"]
        assert second["socket"] == first["socket"]


def test_port_in_use_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        shown = refused(tmp_path, "--listen", f"127.0.0.1:{port}")
    assert f"127.0.0.1:{port}" in shown
    assert "in use" in shown


def test_second_daemon_is_told_who_runs(tmp_path: Path) -> None:
    with daemon(tmp_path) as (process, facts):
        shown = refused(tmp_path)
        assert facts["socket"] in shown
        assert f"pid {process.pid}" in shown


def test_other_hosts_without_a_secret(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    assert "secret_file" in refused(tmp_path, "--listen", "0.0.0.0:0")


def test_bad_directory(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    assert f"chmod 700 {tmp_path}" in refused(tmp_path)
    assert "does not exist" in refused(tmp_path / "a" / "b")


def test_what_this_host_was_thought_to_have_is_missed_aloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Something points to libraries of accelerators that cannot be used: "auto" goes on without, and says so."""
    monkeypatch.setenv("KVXFER_CANN_LIBDIR", str(tmp_path / "nowhere"))
    with daemon(tmp_path, "--transports", "auto") as (process, facts):
        assert "hixl" not in facts["transports"]
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=5 * slack())
    assert f"hixl is not used: {tmp_path}/nowhere/libcann_hixl.so: not there" in said


def test_peers_are_connected_at_the_start(tmp_path: Path) -> None:
    first, second = tmp_path / "1", tmp_path / "2"
    first.mkdir(mode=0o700)
    second.mkdir(mode=0o700)
    with daemon(first) as (_, there), daemon(second, "--peer", there["addresses"][0]) as (_, here):
        deadline = time.monotonic() + 5 * slack()
        while time.monotonic() < deadline:
            with urllib.request.urlopen(f"{here['http']}/metrics", timeout=5) as page:
                if b'kvxfer_links{kind="peer_out"} 1.0' in page.read():
                    return
            time.sleep(0.05)
        raise AssertionError("the daemons did not connect")


def test_silent_peer_does_not_delay_the_end(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        peer = f"127.0.0.1:{silent.getsockname()[1]}"
        with daemon(tmp_path, "--peer", peer, "--handshake-s", "60") as (process, _):
            connection, _ = silent.accept()
            assert connection.recv(4) == b"KVXC"
            process.send_signal(signal.SIGTERM)
            assert process.wait(2 * slack()) == 0
            connection.close()


CRASH = """
import os, resource, signal, sys
from kvxfer.cli.serve import forbid_core_dumps
_, hard = resource.getrlimit(resource.RLIMIT_CORE)
resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
forbid_core_dumps()
assert resource.getrlimit(resource.RLIMIT_CORE)[1] == hard
os.kill(os.getpid(), signal.SIGSEGV)
"""


def test_a_crash_leaves_no_secrets_behind(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", CRASH], cwd=tmp_path, env=os.environ | {"PYTHONPATH": os.getcwd()})
    _, status = os.waitpid(child.pid, 0)
    child.returncode = status  # waited for here, since Popen does not tell the bit
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGSEGV
    assert not os.WCOREDUMP(status)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [(), ("--core-dumps", "true")], ids=["as it is", "asked for"])
def test_core_dumps_of_a_daemon_have_to_be_asked_for(tmp_path: Path, words: tuple[str, ...]) -> None:
    before = resource.getrlimit(resource.RLIMIT_CORE)
    with daemon(tmp_path, *words) as (process, _):
        soft, hard = resource.prlimit(process.pid, resource.RLIMIT_CORE)
        assert hard == before[1]
        assert soft == (before[0] if words else 0 if hard == 0 else 1)
