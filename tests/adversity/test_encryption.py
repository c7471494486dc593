"""Encryption of the data path as users meet it: through the configuration of nodes and workers, and end to end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvxfer
from kvxfer.client import Client
from kvxfer.config import Config
from kvxfer.descriptors import RemoteDescriptor
from kvxfer.errors import ConfigError, EncryptionMismatch, PeerUnreachable, UsageError
from kvxfer.server import Server
from tests.support.nodes import make_cache, scattered, small_geometry, tokens_of

ROOT = Path(__file__).parents[2]
TCP = {"transports": ("tcp",)}
TABLE = scattered(1, 8, 40, 16)
ON = TCP | {"tcp_encryption": "on"}


async def test_a_cache_is_pushed_and_memory_read_back() -> None:
    async with kvxfer.local(**ON) as prefill, kvxfer.local(**ON) as decode:
        source, sink = [await make_cache(one, small_geometry(), 8) for one in (prefill, decode)]
        source.regions[0].array[:] = np.frombuffer(os.urandom(source.regions[0].length), dtype=np.uint8)
        async with decode.offer("r", sink, TABLE) as landing:
            async with prefill.push("r", to=decode.addresses, cache=source, table=TABLE) as push:
                await push.layers()
            await landing.wait()
        for layer in range(3):
            assert tokens_of(source, TABLE, layer).tobytes() == tokens_of(sink, TABLE, layer).tobytes()
        data = os.urandom(1 << 20)
        mine, theirs = await prefill.alloc(len(data)), await decode.alloc(len(data))
        await mine.write(0, np.frombuffer(data, dtype=np.uint8))
        descriptor = RemoteDescriptor.from_dict(json.loads(json.dumps(theirs.descriptor("rw").to_dict())))
        await prefill.put(mine, descriptor)
        assert bytes(await theirs.read()) == data
        await mine.write(0, np.zeros(len(data), dtype=np.uint8))
        await prefill.get(mine, descriptor)
        assert bytes(await mine.read()) == data
        assert {choice.transport for choice in prefill.plane.choices.values()} == {"tcp"}


@pytest.mark.parametrize(("here", "there"), [("on", "off"), ("off", "on")])
async def test_nodes_that_differ_refuse_each_other(here: str, there: str) -> None:
    async with kvxfer.local(**TCP, tcp_encryption=here) as one, kvxfer.local(**TCP, tcp_encryption=there) as other:
        mine, theirs = await one.alloc(4096), await other.alloc(4096)
        for start in (one.put, one.get):
            with pytest.raises(EncryptionMismatch, match="tcp_encryption") as caught:
                await start(mine, theirs.descriptor("rw"))
            told = caught.value
            assert told.peer == theirs.descriptor("rw").node_id
            assert told.fields.items() >= {"option": "tcp_encryption", "here": here, "there": there}.items()
            assert not told.retryable


async def test_shared_memory_needs_no_agreement() -> None:
    both: dict[str, Any] = {"transports": ("shm", "tcp")}
    async with kvxfer.local(**both, tcp_encryption="on") as one, kvxfer.local(**both) as other:
        mine, theirs = await one.alloc(4096), await other.alloc(4096)
        await one.put(mine, theirs.descriptor("rw"))
        assert {choice.transport for choice in one.plane.choices.values()} == {"shm"}


async def test_a_descriptor_without_its_secret_leads_nowhere() -> None:
    async with kvxfer.local(**ON) as one, kvxfer.local(**ON) as other:
        mine, theirs = await one.alloc(4096), await other.alloc(4096)
        told = theirs.descriptor("rw").to_dict()
        wrong = RemoteDescriptor.from_dict(told | {"secrets": {"tcp": "00" * 32}})
        with pytest.raises(PeerUnreachable, match="does not know the secret"):
            await one.put(mine, wrong)
        with pytest.raises(EncryptionMismatch):
            await one.put(mine, RemoteDescriptor.from_dict({key: told[key] for key in told if key != "secrets"}))
        await one.put(mine, RemoteDescriptor.from_dict(told))
        await one.put(mine, theirs.descriptor("rw"))


@pytest.mark.parametrize(
    "secrets", [{"tcp": "00"}, {"tcp": "zz" * 32}, {"shm": "00" * 32}, {"tcp": 7}, ["tcp"], 7, {"tcp": None}]
)
async def test_secrets_that_make_no_sense(secrets: Any) -> None:
    async with kvxfer.local(**ON) as one:
        told = (await one.alloc(4096)).descriptor("rw").to_dict()
        with pytest.raises(UsageError):
            RemoteDescriptor.from_dict(told | {"secrets": secrets})


async def test_secrets_are_not_shown() -> None:
    async with kvxfer.local(**ON) as one, kvxfer.local(**ON) as other:
        mine, theirs = await one.alloc(4096), await other.alloc(4096)
        descriptor = theirs.descriptor("rw")
        await one.put(mine, descriptor)
        secret = descriptor.secrets["tcp"]
        shown = repr(
            (descriptor, one.plane.choices, other.plane.engine.transports, one.plane._connections._connections.values())
        )
        assert secret.hex() not in shown
        assert repr(secret) not in shown


def test_a_control_plane_that_can_be_read_is_refused() -> None:
    reachable = {"listen": "0.0.0.0:17800", "advertise": "10.0.0.1", "secret": "x" * 32, "tcp_encryption": "on"}
    with pytest.raises(ConfigError, match="tcp_encryption is on, and the control plane") as caught:
        Config(**reachable).check_security()
    assert "tls_cert" in str(caught.value.hint)
    Config(**reachable, tls_cert="c", tls_key="k", tls_ca="a").check_security()
    Config(**reachable | {"tcp_encryption": "off"}).check_security()
    Config(tcp_encryption="on").check_security()


@pytest.mark.parametrize(("here", "there"), [("on", "off"), ("off", "on")])
async def test_a_worker_and_its_daemon_must_agree(tmp_path: Path, here: str, there: str) -> None:
    async with Server(Config.embedded(**TCP, socket_dir=str(tmp_path / "a"), tcp_encryption=there)) as server:
        client = Client(server.socket_path, config=Config.embedded(**TCP, tcp_encryption=here))
        with pytest.raises(ConfigError, match=f"tcp_encryption is {here} here and {there} at this node's daemon"):
            await client.__aenter__()


@pytest.mark.parametrize("value", ["on", "off"])
async def test_it_can_be_seen(value: str) -> None:
    with tempfile.TemporaryDirectory(prefix="kvx-") as directory:
        await is_seen(Config.embedded(**TCP, tcp_encryption=value, socket_dir=directory), value)


async def is_seen(config: Config, value: str) -> None:
    async with Server(config) as server:
        assert f"kvxfer_tcp_encryption {float(value == 'on')}" in server._scrape().body.decode()
        status, out = await pinged(server, value)
        assert (status, ", encrypted, " in out) == (0, value == "on")
        status, out = await pinged(server, "off" if value == "on" else "on")
        assert status == 1
        assert "tcp_encryption is" in out


async def pinged(server: Server, value: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "kvxfer", "ping", server.addresses[0], "--count", "5"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "KVXFER_TCP_ENCRYPTION": value, "KVXFER_TRANSPORTS": "tcp"}
    pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.STDOUT}
    process = await asyncio.create_subprocess_exec(*command, env=environment, **pipes)
    out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode()


# -- without libcrypto ------------------------------------------------------------------------------------------------

TRY = """
import os
from kvxfer.errors import TransportUnavailable
from kvxfer.native.engine import Engine, EngineConfig, encryption_missing
print("MISSING", encryption_missing())
for value in ("off", "on"):
    try:
        Engine(EngineConfig(engine_id=os.urandom(16), transports=("tcp",), tcp_encryption=value)).close()
        print(value, "opens")
    except TransportUnavailable as error:
        print(value, "REFUSED", error.message)
"""


@pytest.mark.once
def test_without_libcrypto_the_engine_says_so(tmp_path: Path) -> None:
    """Libraries of its names that lack the functions are found first."""
    (tmp_path / "empty.c").write_text("int nothing;\n")
    for name in ("libcrypto.so.3", "libcrypto.so.1.1"):
        made = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", str(tmp_path / name), str(tmp_path / "empty.c")]
        subprocess.run(made, check=True)
    environment = os.environ | {"LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", TRY], env=environment, capture_output=True, text=True, check=False)
    assert "off opens" in done.stdout, done.stdout + done.stderr
    assert re.search(
        r"on REFUSED .*tcp_encryption is on, but the system's libcrypto.*libcrypto\.so\.3: EVP_", done.stdout
    )
    assert re.search(r"MISSING .*libcrypto\.so\.1\.1: EVP_", done.stdout)


EXIT = """
import asyncio, os, sys
from kvxfer.native.engine import Engine, EngineConfig, OpKind
async def main():
    more = {"transports": ("tcp",), "tcp_encryption": "on"}
    one, other = [Engine(EngineConfig(engine_id=os.urandom(16), **more)) for _ in "ab"]
    for engine in (one, other):
        engine.attach(asyncio.get_running_loop(), lambda event: None)
    mine, theirs = one.alloc(64 << 20), other.alloc(64 << 20)
    grant = other.grant(theirs.id, 0, theirs.length, 3)
    info = other.transports[1]
    peer, done = one.connect(1, info.endpoint, info.secret)
    assert (await done).status == 0
    given = {"grant": grant.id, "generation": grant.generation, "length": grant.length, "access": 3, "key": grant.key}
    handle, done = one.import_(peer, **given)
    assert (await done).status == 0
    for _ in range(4):
        one.submit_one(OpKind.PUT, mine.id, handle, 0, 0, mine.length)
    await asyncio.sleep(0.01)
    print("leaves", flush=True)
    sys.modules["kept"] = (one, other)  # nobody closes them
asyncio.run(main())
"""


@pytest.mark.once
def test_a_process_that_ends_in_the_middle_ends_well() -> None:
    """libcrypto clears up at the end of a process, while our threads still seal and open."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for _ in range(5):
        done = subprocess.run(
            [sys.executable, "-c", EXIT], env=environment, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout) == (0, "leaves\n"), done.stderr
