"""What "auto" stands for, and that a process without hixl in its list opens no vendor's library."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvxfer
from kvxfer.config import Config
from kvxfer.errors import ConfigError, PeerUnreachable, TransportUnavailable
from kvxfer.native.transports import accelerators_likely, expanded
from kvxfer.native.types import EngineConfig
from tests.native.simulated import simulated

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("given", "without", "with_cards"),
    [
        ("auto", "shm,tcp", "?hixl,shm,tcp"),
        ("tcp,auto", "tcp,shm", "tcp,?hixl,shm"),
        ("auto,shm", "tcp,shm", "?hixl,tcp,shm"),
        ("hixl,auto", "?hixl,shm,tcp", "?hixl,shm,tcp"),
        ("auto,fault+tcp", "shm,fault+tcp", "?hixl,shm,fault+tcp"),
        ("hixl,shm,tcp", "hixl,shm,tcp", "hixl,shm,tcp"),
        ("tcp", "tcp", "tcp"),
    ],
)
def test_auto_is_what_this_machine_has(given: str, without: str, with_cards: str) -> None:
    assert ",".join(expanded(given.split(","), accelerators=False)) == without
    assert ",".join(expanded(given.split(","), accelerators=True)) == with_cards


def test_what_points_to_libraries(tmp_path: Path) -> None:
    assert not accelerators_likely({}, [str(tmp_path / "none")])
    assert not accelerators_likely({"KVXFER_CANN_LIBDIR": ""}, [])
    assert accelerators_likely({"KVXFER_CANN_LIBDIR": "/x"}, [])
    assert accelerators_likely({"ASCEND_HOME_PATH": "/x"}, [])
    assert accelerators_likely({}, [str(tmp_path)])


def test_the_default_is_auto() -> None:
    assert Config.embedded().transports == ("auto",)
    made = EngineConfig.from_config(Config.embedded(), b"e" * 16)
    assert made.transports[-2:] == ("shm", "tcp")
    with pytest.raises(ConfigError, match="fault"):
        Config.embedded(transports=("fault+auto",))


def libraries() -> set[str]:
    """Of the vendor (or its simulation) in this process."""
    names = ("libacl_rt", "libcann_hixl", "libhcomm", "libmetadef")
    return {name for name in names if name in Path("/proc/self/maps").read_text()}


@simulated()
async def test_a_list_without_hixl_opens_nothing() -> None:
    for transports in (("tcp",), ("shm", "tcp")):
        async with kvxfer.local(transports=transports) as a, kvxfer.local(transports=transports) as b:
            source, target = await a.alloc(4096), await b.alloc(4096)
            source.array[:] = 7
            await a.put(source, target.descriptor("w"))
            assert target.array.all()
            assert a.plane.engine.unavailable == {}
    assert libraries() == set()
    async with kvxfer.local() as client:
        assert [info.name for info in client.plane.engine.transports] == ["loop", "hixl", "shm", "tcp"]
    assert libraries() == {"libacl_rt", "libcann_hixl", "libhcomm", "libmetadef"}


async def checksums_are_made_by_who_can() -> None:
    async with kvxfer.local(integrity=True) as a, kvxfer.local() as b:
        near, far = await a.alloc(4096, memory="hbm", device=0), await b.alloc(4096, memory="hbm", device=1)
        assert (await a.put(near, far.descriptor("w"))).transport == "tcp"
        [choice] = a.plane.choices.values()
        assert choice.passed_over[0] == "hixl: it makes no checksums, and they were asked for"


@simulated()
async def test_hixl_alone_never_falls_back() -> None:
    await checksums_are_made_by_who_can()
    async with kvxfer.local(transports=("hixl",)) as a, kvxfer.local() as b:
        theirs, far = await b.alloc(4096), await b.alloc(4096, memory="hbm", device=1)
        ours = await a.alloc(4096)
        with pytest.raises(PeerUnreachable, match="hixl: it moves hbm and pinned dram only, not dram to dram"):
            await a.put(ours, theirs.descriptor("w"))
        near = await a.alloc(4096, memory="hbm", device=0)
        with pytest.raises(PeerUnreachable, match="hixl: it moves hbm and pinned dram only, not hbm to dram"):
            await a.put(near, theirs.descriptor("w"))
        assert (await a.put(near, far.descriptor("w"))).transport == "hixl"
        assert not theirs.array.any()


async def without_hixl(directory: str) -> None:
    for named in (("hixl",), ("hixl", "shm", "tcp")):
        with pytest.raises(TransportUnavailable, match=r"hixl|CANN|libacl"):
            async with kvxfer.local(transports=named):
                pass
    for transports in (("auto",), ("hixl", "auto")):
        async with kvxfer.local(transports=transports) as client:
            assert [info.name for info in client.plane.engine.transports] == ["loop", "shm", "tcp"]
            assert directory in client.plane.engine.unavailable["hixl"]


def test_hixl_that_is_not_there(tmp_path: Path) -> None:
    """Named alone or beside others it is an error that says so; with "auto" beside it, a reason. A process looks for
    the libraries once, so this one is a fresh one.
    """
    call = f"import asyncio; from {__name__} import without_hixl; asyncio.run(without_hixl({str(tmp_path)!r}))"
    environment = {**os.environ, "KVXFER_CANN_LIBDIR": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", call], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
