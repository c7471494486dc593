"""The Unix socket and the users of the host: who gets in is what the kernel says, not what the other side says."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvxfer.errors import ConfigError, DaemonUnavailable
from kvxfer.net.link import Link, LocalIdentity
from kvxfer.server import Server
from tests.conftest import slack
from tests.nodes import fast, small

pytestmark = pytest.mark.once

SOMEBODY = 54321  # no user of this host
ROOT = Path(__file__).resolve().parents[2]

# Becomes another user when everything is loaded: that user may not even read the interpreter.
CHILD = """
import asyncio, concurrent.futures.thread, json, os, sys
from kvxfer.client import Client
from kvxfer.config import Config
path, uid, options = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
os.setgroups([]); os.setgid(uid); os.setuid(uid)

async def main():
    try:
        async with Client(path, config=Config(transports=["tcp"], tcp_threads=1, **options)) as client:
            region = await client.alloc(4096)
            names = os.access(os.path.dirname(path), os.R_OK | os.W_OK)
            print(json.dumps({"node": client.control.node_id, "names": names}))
    except Exception as error:
        print(json.dumps({"code": getattr(error, "code", ""), "text": str(error), "kind": type(error).__name__}))
asyncio.run(main())
"""


@pytest.fixture
def directory() -> Iterator[Path]:
    """A socket directory that other users can reach."""
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    made = Path(tempfile.mkdtemp(prefix="kvxfer-users-", dir="/tmp"))
    made.chmod(0o711)
    yield made / "s"
    shutil.rmtree(made)
    shutil.rmtree(f"/tmp/kvxfer-{SOMEBODY}", ignore_errors=True)


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


async def as_somebody(server: Server, **options: Any) -> dict[str, Any]:
    words = (str(server.socket_path), str(SOMEBODY), json.dumps(options))
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", CHILD, *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    said, wrong = await asyncio.wait_for(child.communicate(), 20 * slack())
    assert said, wrong.decode()
    found: dict[str, Any] = json.loads(said)
    return found


async def test_another_user_cannot_even_reach_the_socket(directory: Path) -> None:
    async with Server(small(socket_dir=str(directory))) as server:
        assert mode_of(directory) == 0o700
        assert mode_of(server.socket_path) == 0o600
        told = await as_somebody(server, socket_uids=["0"])
        assert told["code"] == "daemon_unavailable"
        assert "Permission denied" in told["text"]
        os.chmod(directory, 0o755)  # an operator's mistake: the socket's own mode still holds
        assert "Permission denied" in (await as_somebody(server, socket_uids=["0"]))["text"]
        os.chmod(server.socket_path, 0o666)  # and the kernel's word after that
        assert (await as_somebody(server, socket_uids=["0"]))["code"] == "daemon_unavailable"
        assert server.workers.refused == {"user": 1}
        assert server.registry.counts().workers == 1  # the daemon itself


async def test_listed_users_get_in_and_may_make_nothing_there(directory: Path) -> None:
    async with Server(small(socket_dir=str(directory), socket_uids=(str(SOMEBODY),))) as server:
        assert mode_of(directory) == 0o711
        told = await as_somebody(server, socket_uids=["0"])
        assert told == {"node": server.node_id, "names": False}
        assert server.workers.refused == {}


async def test_users_that_are_not_listed_are_refused_by_the_kernel_s_word(directory: Path) -> None:
    async with Server(small(socket_dir=str(directory), socket_uids=("12345",))) as server:
        assert (await as_somebody(server, socket_uids=["0"]))["code"] == "daemon_unavailable"
        assert server.workers.refused == {"user": 1}


async def test_a_client_takes_a_daemon_of_another_user_only_if_it_lists_them(directory: Path) -> None:
    os.mkdir(directory)
    os.chown(directory, SOMEBODY, SOMEBODY)
    path = directory / "kvxferd.sock"
    code = "import os, socket, sys; s = socket.socket(socket.AF_UNIX); os.setuid(int(sys.argv[2])); s.bind(sys.argv[1])"
    words = (sys.executable, "-c", f"{code}; s.listen(); print(flush=True); input()", str(path), str(SOMEBODY))
    pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
    child = await asyncio.create_subprocess_exec(*words, **pipes)  # type: ignore[arg-type]
    assert child.stdout is not None
    await asyncio.wait_for(child.stdout.readline(), 10 * slack())
    for listed, why in (((), "another user"), ((str(SOMEBODY),), "took too long")):
        with pytest.raises(DaemonUnavailable, match=why):
            await Link.dial_unix(str(path), LocalIdentity(role="worker"), small(**fast(), socket_uids=listed))
    await child.communicate(b"\n")


async def test_a_directory_that_others_may_write_to_is_refused_for_listed_users_too(directory: Path) -> None:
    os.mkdir(directory)
    for mode in (0o733, 0o777, 0o755):
        os.chmod(directory, mode)
        with pytest.raises(ConfigError, match="others may enter"):
            await Server(small(socket_dir=str(directory), socket_uids=(str(SOMEBODY),))).__aenter__()
