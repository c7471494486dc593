"""With nothing configured: all that one user runs on a host meets, another user of the host gets in nowhere."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import kvxfer
from examples.child_processes import Daemon, daemon
from kvxfer.config import Config, user_secret
from kvxfer.config.paths import ensure_socket_dir
from kvxfer.errors import AuthenticationError, ConfigError
from kvxfer.net.credentials import Credentials
from kvxfer.net.link import Link, LocalIdentity
from kvxfer.server import Server
from kvxfer.tasks import Deadline
from tests.conftest import slack
from tests.nodes import node, small, until

pytestmark = pytest.mark.once

SOMEBODY = 65534  # the user that has nothing
ROOT = Path(__file__).resolve().parents[2]
FACTS = LocalIdentity(role="peer", node_id="0c" * 16, incarnation="0d" * 16)

# Becomes another user when everything is loaded: that user may not even read the interpreter.
STRANGER = """
import asyncio, concurrent.futures.thread, json, os, socket, sys
import numpy, kvxfer
from kvxfer.config import Config
from kvxfer.descriptors import RemoteDescriptor
from kvxfer.net.credentials import Credentials
from kvxfer.net.link import Link, LocalIdentity
import kvxfer.server
told = json.load(sys.stdin)

async def once():
    async with kvxfer.local(transports=["tcp"], tcp_threads=1) as client:
        await client.alloc(4096)

asyncio.run(once())
os.setgroups([]); os.setgid(told["uid"]); os.setuid(told["uid"])
os.environ.pop("XDG_RUNTIME_DIR", None)

async def outcome(work):
    try:
        return f"got in: {await work!r}"
    except Exception as error:
        return f"{getattr(error, 'code', type(error).__name__)}: {error}"

async def dial(unconfigured):
    facts = LocalIdentity(role="peer", node_id="0c" * 16, incarnation="0d" * 16)
    known = Credentials(Config(), unconfigured=unconfigured)
    return await Link.dial(told["addresses"], facts, Config(connect_s=5), credentials=known)

async def read(path):
    with open(path, "rb") as file:
        return file.read()

async def worker(path):
    async with kvxfer.Client(path, config=Config(transports=["tcp"], tcp_threads=1, socket_uids=["0"])) as client:
        return client

async def connect(path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
        raw.connect(path)

async def main():
    forged = RemoteDescriptor.from_dict(told["descriptor"])
    found = {
        "no secret": await outcome(dial("none")),
        "own secret": await outcome(dial("make or remember")),
        "the file": await outcome(read(told["secret"])),
        "the engine's socket": await outcome(connect(told["engine"])),
        "the socket": await outcome(worker(told["socket"])),
    }
    async with kvxfer.local(transports=["tcp"], tcp_threads=1) as client:
        mine = await client.alloc(4096)
        mine.array[:] = 0xEE
        found["named region"] = await outcome(client.lookup("kvxfer.ping", node=told["addresses"], timeout=5))
        found["get"] = await outcome(client.get(mine, forged, timeout=5))
        found["put"] = await outcome(client.put(mine, forged, timeout=5))
    print(json.dumps(found))
asyncio.run(main())
"""


async def run(*words: str, said: str = "", **environment: str) -> tuple[int, str, str]:
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, *words),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )
    try:
        out, wrong = await asyncio.wait_for(child.communicate(said.encode()), 60 * slack())
    except TimeoutError:
        child.kill()
        await child.wait()
        raise
    return child.returncode or 0, out.decode(), wrong.decode()


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runtime directory that no other test has used."""
    made = tmp_path / "run"
    made.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(made))
    return made


@asynccontextmanager
async def address_of(running: Daemon) -> AsyncIterator[str]:
    yield re.findall(r"peers (\S+),", await running.process.readline(10 * slack()))[0]


async def test_daemons_that_start_at_once_meet(runtime: Path, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        places = [tmp_path / str(number) for number in range(6)]
        starting = [stack.enter_async_context(daemon(place, transports="tcp", landing_bytes_max=0)) for place in places]
        running = await asyncio.gather(*starting)
        addresses = [await stack.enter_async_context(address_of(one)) for one in running]
        assert os.listdir(runtime / "kvxfer") == ["secret"]
        config = Config(transports=("tcp",), tcp_threads=1)
        async with kvxfer.Client(str(running[0].socket), config=config) as client:
            for address in addresses[1:]:
                await client.connect(address, timeout=10 * slack())


async def test_tools_need_no_flag(runtime: Path, tmp_path: Path) -> None:
    async with daemon(tmp_path / "d", transports="tcp") as running, address_of(running) as address:
        status, said, wrong = await run("-m", "kvxfer", "ping", address, "--count", "2", "--transport", "tcp")
        assert (status, wrong) == (0, ""), said
        _, report, _ = await run("-m", "kvxfer", "doctor", "--peer", address, "--json")
        findings = {(one["group"], one["check"]): one for one in json.loads(report)["findings"]}
        assert findings["peers", f"{address} version"]["state"] == "ok"
        assert str(runtime / "kvxfer" / "secret") in findings["network", "secret of this user"]["found"]
        async with kvxfer.local(transports=("tcp",), tcp_threads=1) as client:
            await client.connect(address, timeout=10 * slack())


async def test_another_user_gets_in_nowhere(runtime: Path) -> None:
    """Not at the control port, not with a secret of its own, not at the sockets, not at the data port."""
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    config = small(transports=("tcp", "shm"))
    try:
        async with (
            Server(config, embedded=True) as server,
            kvxfer.Client(server.socket_path, config=config) as client,
        ):
            region = await client.alloc(4096)
            region.array[:] = 7
            own = region.descriptor("r").engine_id
            [engine] = [path for path in server.socket_path.parent.glob("e-*.sock") if path.stem[2:] in own]
            told: dict[str, Any] = {
                "uid": SOMEBODY,
                "addresses": server.addresses,
                "socket": str(server.socket_path),
                "engine": str(engine),
                "secret": str(runtime / "kvxfer" / "secret"),
                "descriptor": {**region.descriptor("rw").to_dict(), "key": bytes(16).hex()},  # all but the key
            }
            status, said, wrong = await run("-c", STRANGER, said=json.dumps(told))
            assert status == 0, wrong
            found = json.loads(said)
            assert "requires a secret, and this side has none" in found["no secret"]
            assert found["own secret"].startswith("authentication: the peer's shared secret is not the same")
            assert found["named region"].startswith("authentication: the peer's shared secret is not the same")
            assert "Permission denied" in found["the file"]
            assert "Permission denied" in found["the socket"]
            assert "Permission denied" in found["the engine's socket"]
            assert found["get"].startswith("wrong_key"), found
            assert found["put"].startswith("wrong_key"), found
            assert (region.array == 7).all()
            assert server.peers.links == set()
    finally:
        shutil.rmtree(f"/tmp/kvxfer-{SOMEBODY}", ignore_errors=True)


async def test_two_users_meet_by_a_secret_that_both_were_given(runtime: Path, tmp_path: Path) -> None:
    """What docs/security.md says of it: the same content in a file of each. The user's secret is no longer enough."""
    files = []
    for user in "ab":
        files.append(tmp_path / user)
        files[-1].touch(mode=0o600)
        files[-1].write_text("what both were given\n")
    async with node(secret_file=str(files[0])) as here, node(secret_file=str(files[1])) as there, node() as alone:
        known = Credentials(there.config)
        link = await Link.dial(here.addresses, FACTS, there.config, credentials=known)
        await link.aclose("done")
        with pytest.raises(AuthenticationError, match="not the same") as refused:
            await Link.dial(here.addresses, FACTS, alone.config, credentials=alone.credentials)
        assert "secret of its user" in str(refused.value.hint)


async def test_a_file_that_is_gone_is_put_back_and_another_one_is_taken(runtime: Path) -> None:
    """As after a logout, which removes the runtime directory, and by who clears /tmp."""
    file = runtime / "kvxfer" / "secret"
    async with node(reload_s=0.05, reload_grace_s=0.1) as here, node(reload_s=0.05) as there:
        before = file.read_bytes()
        link = await there.pool.get(here.addresses, "", Deadline.after(5 * slack()))
        shutil.rmtree(file.parent)
        await until(file.exists)
        assert file.read_bytes() == before
        assert link.usable
        fresh = file.with_suffix(".new")
        fresh.touch(mode=0o600)
        fresh.write_text("another secret of this user\n")
        fresh.replace(file)
        await until(lambda: here.credentials.secrets == there.credentials.secrets == (b"another secret of this user",))
        await link.wait_closed()
        assert (await there.pool.get(here.addresses, "", Deadline.after(5 * slack()))).usable
        file.chmod(0o644)
        fresh.write_text("others may know this one\n")
        fresh.chmod(0o644)
        fresh.replace(file)
        await until(lambda: here.credentials.failures["secret"])
        assert here.credentials.secret == b"another secret of this user", "the old one stays in force"


async def test_what_others_could_have_prepared_stops_the_daemon(runtime: Path, tmp_path: Path) -> None:
    (runtime / "kvxfer").mkdir()
    (runtime / "kvxfer").chmod(0o777)
    place = {"socket_dir": str(tmp_path / "s")}
    for embedded in (True, False):
        with pytest.raises(ConfigError, match=r"run/kvxfer: others may read or change it \(mode 0777\)"):
            await Server(small(**place), embedded=embedded).__aenter__()
    assert os.listdir(runtime / "kvxfer") == []
    status, said, wrong = await run("-m", "kvxfer", "serve", "--listen", "127.0.0.1:0", "--http", "")
    assert (status, said) == (2, "")
    assert "others may" in wrong
    assert "Traceback" not in wrong


async def test_where_it_cannot_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A daemon of its own does not start; those inside one process meet, and no other process comes in."""
    monkeypatch.setattr(user_secret, "secret_dirs", lambda *_: (tmp_path / "gone" / "kvxfer",))
    with pytest.raises(ConfigError, match="no place for the secret of this user"):
        await Server(small(socket_dir=str(tmp_path / "s"))).__aenter__()
    async with node() as here, node() as there:
        assert "only this process can connect to its own daemons" in caplog.text
        link = await there.pool.get(here.addresses, "", Deadline.after(5 * slack()))
        assert link.usable
        with pytest.raises(AuthenticationError):
            await Link.dial(here.addresses, FACTS, here.config, credentials=Credentials(small(), unconfigured="none"))


async def test_a_socket_for_others_opens_the_directory_that_the_secret_made(tmp_path: Path) -> None:
    place = tmp_path / "s"
    ensure_socket_dir(place)
    async with Server(small(socket_dir=str(place), socket_uids=("12345",))):
        assert place.stat().st_mode & 0o777 == 0o711
