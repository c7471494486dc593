"""Rivals of the measurements, with fake scripts: what is missing is named, time is bounded, bad output has a type."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from benchmarks import rivals
from benchmarks.rivals import RIVALS, Places, available, measure, parse, run
from kvxfer.bench.rows import Row, RunOptions
from kvxfer.bench.work import FULL, Sizes
from kvxfer.errors import IntegrityError, ProtocolError, TransferTimeout, TransportError, UsageError

SLACK = float(os.environ.get("KVXFER_TEST_SLACK", "1"))
REPOSITORY = Path(__file__).resolve().parent.parent.parent
GOOD = {"verified": 3, "results": {"write": {"GBps": 2.0, "ms": 50.0, "cpu_s_per_GiB": 0.25}}}
BOTH = {**GOOD, "results": {"read": {"GBps": 1.0}, "write": {"GBps": 2.0}}}
# A script that does what its settings say and remembers how it was called.
FAKE = """
import json, os, sys, time
from pathlib import Path
settings = json.loads(Path(__file__).with_suffix(".json").read_text())
given = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
with open(settings["calls"], "a") as file:
    file.write(json.dumps({**given, "pid": os.getpid(), "path": os.environ.get("PYTHONPATH")}) + chr(10))
if settings.get("hang"):
    if os.fork() == 0:
        Path(settings["grandchild"]).write_text(str(os.getpid()))
        time.sleep(600)
    time.sleep(600)
if settings.get("result") is not None:
    Path(given["--json"]).write_text(settings["result"])
print(settings.get("said", ""), file=sys.stderr)
sys.exit(settings.get("status", 0))
"""


class Fakes:
    """Scripts and environments in a temporary folder."""

    def __init__(self, folder: Path) -> None:
        self.places = Places(scripts=folder / "scripts", environments=folder / "environments")
        self.calls = folder / "calls"
        self.grandchild = folder / "grandchild"
        (self.places.scripts / "requirements").mkdir(parents=True)

    def install(self, name: str, **settings: Any) -> None:
        """A rival whose script does as the settings say, in this interpreter's environment."""
        environment = RIVALS[name].environment
        script = self.places.scripts / f"{RIVALS[name].script or name}_peer.py"
        script.write_text(FAKE)
        told = {"calls": str(self.calls), "grandchild": str(self.grandchild), **settings}
        script.with_suffix(".json").write_text(json.dumps(told))
        (self.places.scripts / "requirements" / f"{environment}.txt").write_text("some==1\n")
        python = self.places.environments / environment / "bin" / "python"
        python.parent.mkdir(parents=True, exist_ok=True)
        python.symlink_to(sys.executable)
        self.stamp(environment)

    def stamp(self, environment: str, requirements: str = "some==1\n", error: str | None = None) -> None:
        """What an installation leaves behind."""
        path = self.places.environments / f"{environment}.json"
        path.write_text(json.dumps({"requirements": requirements, "made": True, "error": error}))

    def called(self) -> list[dict[str, Any]]:
        """How scripts were called."""
        return [json.loads(line) for line in self.calls.read_text().splitlines()]

    def reason(self, name: str) -> str | None:
        """What `available` says."""
        return available(self.places)[name]


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    """With fakes also of the programs that rivals want: whether this machine has them does not matter."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for rival in RIVALS.values():
        for name in rival.programs:
            (programs / name).write_text("#!/bin/sh\n")
            (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    return Fakes(tmp_path)


# -- what is there ----------------------------------------------------------------------------------------------------


def test_every_rival_has_a_script_and_pinned_requirements() -> None:
    places = Places(environments=REPOSITORY / "no such folder")
    for name, rival in RIVALS.items():
        assert rivals.missing(name, places) is not None
        assert (places.scripts / f"{rival.script or name}_peer.py").is_file(), name
        pins = (places.scripts / "requirements" / f"{rival.environment}.txt").read_text().split()
        assert pins, name
        assert all("==" in pin for pin in pins), name


def test_what_is_installed_is_available(fakes: Fakes) -> None:
    fakes.install("nixl")
    assert fakes.reason("nixl") is None


def test_missing_rivals_are_named_with_what_to_do(fakes: Fakes) -> None:
    assert "checkout" in str(fakes.reason("nixl"))
    fakes.install("nixl")
    (fakes.places.environments / "nixl.json").unlink()
    assert "make bench-peers" in str(fakes.reason("nixl"))
    fakes.stamp("nixl", requirements="some==2\n")
    assert "other versions" in str(fakes.reason("nixl"))
    fakes.stamp("nixl", error="libfast.so: cannot open shared object file")
    assert "libfast.so" in str(fakes.reason("nixl"))
    fakes.stamp("nixl")
    assert fakes.reason("nixl") is None
    (fakes.places.environments / "nixl" / "bin" / "python").unlink()
    assert "make bench-peers" in str(fakes.reason("nixl"))


@pytest.mark.parametrize("stamp", ["", "[]", "{", "7", '{"requirements": 3}'])
def test_a_damaged_stamp_is_not_installed(fakes: Fakes, stamp: str) -> None:
    fakes.install("nixl")
    (fakes.places.environments / "nixl.json").write_text(stamp)
    assert "make bench-peers" in str(fakes.reason("nixl"))


def test_missing_programs_are_named(fakes: Fakes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fakes.install("redis")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing here"))
    assert "redis-server is not on the PATH" in str(fakes.reason("redis"))


def test_the_folder_of_environments_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVXFER_BENCH_PEERS", str(tmp_path))
    assert Places().environments == tmp_path


# -- one round --------------------------------------------------------------------------------------------------------


def test_rows_of_a_round(fakes: Fakes) -> None:
    fakes.install("redis", result=json.dumps(GOOD))
    found = run("redis", "W2", RunOptions(timeout_s=30 * SLACK), fakes.places)
    assert found == [
        Row("Redis SET+GET", "tcp", "W2", "put_GBps", "GB/s", 2.0, 2.0, 2.0, 1),
        Row("Redis SET+GET", "tcp", "W2", "put_ms", "ms", 50.0, 50.0, 50.0, 1),
        Row("Redis SET+GET", "tcp", "W5", "put_cpu_s_per_GiB", "s/GiB", 0.25, 0.25, 0.25, 1),
    ]


async def test_how_a_script_is_called(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    fakes.install("nixl", result=json.dumps(BOTH))
    options = RunOptions(quick=True, timeout_s=30 * SLACK)
    found = await measure("nixl", "W3b", options, fakes.places)
    assert [(row.peer, row.metric) for row in found] == [
        ("NIXL default(cma) READ", "get_GBps"),
        ("NIXL default(cma) WRITE", "put_GBps"),
        ("NIXL tcp READ", "get_GBps"),
        ("NIXL tcp WRITE", "put_GBps"),
    ]
    first, second = fakes.called()
    assert (first["--variant"], second["--variant"]) == ("default", "tcp")
    assert (first["--workload"], first["--op"], first["path"]) == ("w3b", "read,write", None)
    assert json.loads(first["--sizes"])["small_blocks"] == rivals.SIZES["quick"].small_blocks


async def test_only_the_transports_that_were_asked_for(fakes: Fakes) -> None:
    fakes.install("nixl", result=json.dumps(BOTH))
    found = await measure("nixl", "W2", RunOptions(timeout_s=30 * SLACK, transports=("tcp",)), fakes.places)
    assert {row.transport for row in found} == {"tcp"}
    assert len(fakes.called()) == 1


async def test_a_workload_that_it_does_not_have(fakes: Fakes) -> None:
    assert await measure("iperf3", "W1", None, fakes.places) == []


async def test_unknown_and_missing(fakes: Fakes) -> None:
    with pytest.raises(UsageError, match="unknown rival"):
        await measure("nobody", "W1", None, fakes.places)
    with pytest.raises(UsageError, match="cannot run here"):
        await measure("nixl", "W1", None, fakes.places)


async def test_damaged_bytes_are_an_error(fakes: Fakes) -> None:
    fakes.install("redis", result=json.dumps(GOOD), status=rivals.MISMATCH)
    with pytest.raises(IntegrityError):
        await measure("redis", "W2", RunOptions(timeout_s=30 * SLACK), fakes.places)


async def test_a_script_that_fails_says_why(fakes: Fakes) -> None:
    fakes.install("redis", status=1, said="many lines\nRuntimeError: queue full")
    with pytest.raises(TransportError, match="status 1: RuntimeError: queue full"):
        await measure("redis", "W2", RunOptions(timeout_s=30 * SLACK), fakes.places)


async def test_a_script_that_leaves_nothing(fakes: Fakes) -> None:
    fakes.install("redis")
    with pytest.raises(ProtocolError, match="left no result"):
        await measure("redis", "W2", RunOptions(timeout_s=30 * SLACK), fakes.places)


def gone(pid: int) -> bool:
    """Whether a process has ended; a zombie whose parent is not us has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


async def wait_until_gone(*pids: int) -> None:
    async with asyncio.timeout(10 * SLACK):
        while not all(gone(pid) for pid in pids):
            await asyncio.sleep(0.01)


async def test_time_is_bounded_and_nothing_is_left(fakes: Fakes) -> None:
    fakes.install("redis", hang=True)
    begun = time.monotonic()
    with pytest.raises(TransferTimeout, match="not done in"):
        await measure("redis", "W2", RunOptions(timeout_s=2 * SLACK), fakes.places)
    assert time.monotonic() - begun < 10 * SLACK
    await wait_until_gone(fakes.called()[0]["pid"], int(fakes.grandchild.read_text()))


async def test_a_cancelled_round_leaves_nothing(fakes: Fakes) -> None:
    fakes.install("redis", hang=True)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(measure("redis", "W2", RunOptions(timeout_s=60 * SLACK), fakes.places))
        async with asyncio.timeout(20 * SLACK):
            while not (fakes.grandchild.exists() and fakes.grandchild.read_text()):
                await asyncio.sleep(0.01)
        task.cancel()
    assert task.cancelled()
    await wait_until_gone(fakes.called()[0]["pid"], int(fakes.grandchild.read_text()))


# -- reading ----------------------------------------------------------------------------------------------------------

NIXL_SHM = RIVALS["nixl"].variants[0]


def result(**results: Any) -> str:
    return json.dumps({"verified": 1, "results": results})


def places_of(text: str, workload: str) -> list[tuple[str, str, str]]:
    return [(row.peer, row.workload, row.metric) for row in parse(text, "nixl", NIXL_SHM, workload)]


def test_where_numbers_go() -> None:
    write = {"GBps": 1.0, "cpu_s_per_GiB": 2.0}
    label = "NIXL default(cma) WRITE"
    assert places_of(result(write=write), "W3") == [(label, "W3", "put_GBps")]
    assert places_of(result(write=write), "W2u") == [(label, "W2u", "put_GBps")]
    assert places_of(result(write=write), "W5") == [(label, "W5", "put_cpu_s_per_GiB")]
    assert places_of(result(write={"4k_p50_us": 1.0}), "W1") == [(label, "W1", "put_4k_p50_us")]
    setup = {"total_ms": 1.0, "cores": 0.5}
    expected = [("NIXL default(cma) READ", "setup", "total_ms"), ("NIXL default(cma) READ", "idle", "cores")]
    assert places_of(result(read=setup), "setup") == expected


@pytest.mark.parametrize("verified", [0, -1, None, True, "3", 1.5])
def test_nothing_verified(verified: Any) -> None:
    text = json.dumps({"verified": verified, "results": {"read": {"GBps": 1.0}}})
    with pytest.raises(IntegrityError):
        parse(text, "nixl", NIXL_SHM, "W2")


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "null", "7", "{}", '{"verified": 1}', '{"results": {}}'),
        *('{"verified": 1, "results": []}', '{"verified": 1, "results": {"write": 3}}'),
        '{"verified": 1, "results": {"write": {"GBps": NaN}}}',
        result(),
        result(write={}),
        result(sideways={"GBps": 1.0}),
        result(write={"furlongs": 1.0}),
        result(write={"GBps": "fast"}),
        result(write={"GBps": True}),
        result(write={"GBps": -1.0}),
        result(write={"GBps": None}),
    ],
)
def test_output_that_makes_no_sense(text: str) -> None:
    with pytest.raises(ProtocolError):
        parse(text, "nixl", NIXL_SHM, "W2")


# -- the scripts ------------------------------------------------------------------------------------------------------


def test_the_full_sizes_of_the_scripts_are_ours() -> None:
    path = REPOSITORY / "benchmarks" / "peers" / "common.py"
    spec = importlib.util.spec_from_file_location("peers_common", path)
    assert spec is not None
    assert spec.loader is not None
    common = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = common
    try:
        spec.loader.exec_module(common)
    finally:
        del sys.modules[spec.name]
    theirs = vars(common.Sizes())
    ours = {field.name: getattr(FULL, field.name) for field in fields(Sizes)}
    assert set(theirs) <= set(ours)
    theirs["repeats"] = ours["repeats"]
    assert theirs == {name: ours[name] for name in theirs}
    assert common.Sizes().region_bytes == FULL.region_bytes
    assert common.MISMATCH == rivals.MISMATCH
    assert set(rivals.SCRIPTS_FOR.values()) == set(common.WORKLOADS)


# A peer that sends 4096 bytes and gets one byte back; its target may damage what it got.
SMALL_PEER = """
import socket, sys, threading
sys.path.insert(0, sys.argv.pop())
from common import Initiator, Target, main

class SmallTarget(Target):
    def start(self, meta):
        self.listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self.run, daemon=True).start()
        return {"port": self.listener.getsockname()[1]}

    def run(self):
        sock, _ = self.listener.accept()
        while sock.recv_into(self.region.mv, 4096, socket.MSG_WAITALL):
            self.region.mv[7] ^= self.opts.variant == "damaging"
            sock.sendall(b"k")

class SmallInitiator(Initiator):
    def setup(self, meta):
        self.sock = socket.create_connection(("127.0.0.1", meta["port"]))
        return {"connect_s": 0.5}

    def transfer(self, segs):
        self.sock.sendall(self.region.mv[:4096])
        self.sock.recv(1)

if __name__ == "__main__":
    main("small", SmallInitiator, SmallTarget, variants=("honest", "damaging"))
"""


@pytest.mark.parametrize("variant", ["honest", "damaging"])
def test_a_script_verifies_what_its_receiver_got(tmp_path: Path, variant: str) -> None:
    script = tmp_path / "small_peer.py"
    script.write_text(SMALL_PEER)
    common = REPOSITORY / "benchmarks" / "peers"
    command = [sys.executable, script, "--workload", "setup", "--variant", variant]
    command += ["--sizes", json.dumps({"setup_bytes": 1 << 20}), common]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60 * SLACK)
    if variant == "damaging":
        assert done.returncode == rivals.MISMATCH, done.stderr
        assert "CHECKSUM MISMATCH" in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["verified"] == 1
        assert found["results"]["write"]["connect_ms"] == 500.0
