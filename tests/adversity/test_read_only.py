"""A host where nothing can be written: findings and typed errors in a line, no traceback; and what still works."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import slack

pytestmark = pytest.mark.once

ROOT = Path(__file__).resolve().parents[2]

# In a mount namespace of its own, so that nothing of this host changes: every mount becomes read-only, the kernel's own
# as well; what comes after that may still be open for writing.
READ_ONLY = """
set -eu
mount --make-rprivate /
{unlike}
while read -r _ _ _ _ place _; do
    case $place in /proc | /proc/* {but}) ;; *) mount -o remount,bind,ro "$place" 2>/dev/null || true ;; esac
done < /proc/self/mountinfo
if touch /tmp/kvxfer-is-writable 2>/dev/null; then rm /tmp/kvxfer-is-writable; exit 99; fi
exec "$@"
"""
SHARED_MEMORY = "mount -t tmpfs tmpfs /dev/shm"
LOCAL = """
import asyncio, kvxfer
async def main():
    async with kvxfer.local(tcp_threads=1) as one, kvxfer.local(tcp_threads=1) as other:
        there, here = await other.alloc(4096), await one.alloc(4096)
        here.array[:] = 7
        await one.connect(list(other.addresses), timeout=10)
        await one.put(here, there.descriptor("w"), timeout=10)
        print("moved", int((there.array == 7).sum()))
try:
    asyncio.run(main())
except kvxfer.KvxferError as error:
    print(f"{type(error).__name__}: {error}")
"""


def read_only(runtime: Path, *words: str, shared_memory: bool = False) -> subprocess.CompletedProcess[str]:
    """What a command says where nothing can be written, or only shared memory."""
    if os.getuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("only root, with the command unshare, can have a mount namespace of its own")
    how = {"unlike": SHARED_MEMORY, "but": "| /dev/shm"} if shared_memory else {"unlike": ":", "but": ""}
    command = ["unshare", "-m", "bash", "-c", READ_ONLY.format(**how), "bash", sys.executable, *words]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVXFER_")}
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60 * slack(),
        env={**environment, "XDG_RUNTIME_DIR": str(runtime), "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        cwd="/",
        check=False,
    )
    if "unshare" in ended.stderr or ended.returncode == 99 or "mount:" in ended.stderr:
        pytest.skip(f"no mount namespace, or not a read-only one: {ended.stderr.strip()}")
    assert "Traceback" not in ended.stderr, ended.stderr
    return ended


def test_doctor_has_findings(tmp_path: Path) -> None:
    ended = read_only(tmp_path, "-m", "kvxfer", "doctor", "--json")
    assert ended.returncode == 1, ended.stderr
    findings = {(one["group"], one["check"]): one for one in json.loads(ended.stdout)["findings"]}
    for key in (("network", "socket directory"), ("network", "secret of this user"), ("transports", "shm")):
        assert findings[key]["state"] == "problem", findings[key]
    assert "cannot be written" in findings["network", "secret of this user"]["found"]
    assert "no place" in findings["transports", "shm"]["found"]


def test_a_daemon_does_not_start_and_says_why(tmp_path: Path) -> None:
    ended = read_only(tmp_path, "-m", "kvxfer", "serve", "--listen", "127.0.0.1:0", "--http", "")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "read-only" in ended.stderr.lower()
    assert ended.stderr.count("\n") == 1, ended.stderr


def test_the_demonstration_says_why(tmp_path: Path) -> None:
    ended = read_only(tmp_path, "-m", "kvxfer", "demo")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "demo failed: there is no place for a socket directory" in ended.stderr
    assert "TMPDIR" in ended.stderr


def test_a_client_with_its_own_daemon_raises_a_typed_error(tmp_path: Path) -> None:
    ended = read_only(tmp_path, "-c", LOCAL)
    assert ended.stdout.startswith("ConfigError: there is no place for a socket directory"), ended
    assert "TMPDIR" in ended.stdout


def test_ping_says_why(tmp_path: Path) -> None:
    ended = read_only(tmp_path, "-m", "kvxfer", "ping", "127.0.0.1:1", "--timeout", "1")
    assert ended.returncode in (1, 2)
    assert "there is no place for a socket directory" in ended.stderr


def test_with_shared_memory_alone_those_of_one_process_work(tmp_path: Path) -> None:
    """As in a container with a read-only root: the socket lies there, the secret in this process."""
    ended = read_only(tmp_path, "-c", LOCAL, shared_memory=True)
    assert ended.stdout == "moved 4096\n", ended
    assert "only this process can connect to its own daemons" in ended.stderr
