"""Toolkit and driver by files alone, against what loading finds; and a daemon that uses neither tells of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvxfer.config import Config
from kvxfer.doctor.network import ask_status, probe_peers
from kvxfer.native.ascend import AscendInfo, probe
from kvxfer.native.engine import MemoryKind
from kvxfer.native.installed import LIBRARY, installed
from tests.native.ascend_sim.build import build
from tests.native.simulated import simulated
from tests.nodes import node


@pytest.mark.parametrize(("variant", "toolkit"), [("8.5", "8.5"), ("9.0", "9.0"), ("9.1", "9.1+")])
def test_the_library_tells_what_it_is(variant: str, toolkit: str) -> None:
    found = installed(env={"KVXFER_CANN_LIBDIR": str(build(variant))})
    assert found["toolkit"] == toolkit


@pytest.mark.once
@simulated(variant="9.0")
def test_files_and_loading_agree() -> None:
    loaded = probe()
    assert isinstance(loaded, AscendInfo)
    assert installed()["toolkit"] == loaded.toolkit


def test_what_a_toolkit_says_of_itself(tmp_path: Path) -> None:
    home, driver = tmp_path / "opt/cann", tmp_path / "usr/local/Ascend/driver"
    for place in (home / "lib64", driver):
        place.mkdir(parents=True)
    assert installed(tmp_path, {"ASCEND_HOME_PATH": "/opt/cann"}) == {}
    (home / "lib64" / LIBRARY).write_bytes(b"")
    assert installed(tmp_path, {"ASCEND_HOME_PATH": "/opt/cann"}) == {}, "an empty file is no library"
    (home / "lib64" / LIBRARY).write_bytes(b"\x7fELF\x02 HixlCSServerCreate ")
    assert installed(tmp_path, {"ASCEND_HOME_PATH": "/opt/cann"}) == {}, "nor is this"
    (home / "lib64" / LIBRARY).write_bytes((build("9.0") / LIBRARY).read_bytes())
    assert installed(tmp_path, {"ASCEND_HOME_PATH": "/opt/cann"}) == {"toolkit": "9.0"}
    (home / "ascend_toolkit_install.info").write_text("package_name=toolkit\nversion=9.0.1\narch=x86_64\n")
    (driver / "version.info").write_text("Version=25.5.0\nascendhal_version=7.35\n")
    expected = {"toolkit": "9.0", "reported": "9.0.1", "driver": "25.5.0"}
    assert installed(tmp_path, {"ASCEND_HOME_PATH": "/opt/cann"}) == expected
    assert installed(tmp_path, {}) == {}


async def test_a_daemon_that_uses_none_tells_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "KVXFER_CANN_LIBDIR", str(build("8.5")))
    async with node(transports=("loop", "tcp")) as server:
        assert not any(info.moves(MemoryKind.HBM) and info.name == "hixl" for info in server.engine.transports)
        status = await ask_status(server.addresses, Config(), 5)
        assert status["accelerator"]["toolkit"] == "8.5"
        [seen] = await probe_peers([",".join(server.addresses)], Config(), 5)
        assert seen.accelerator["toolkit"] == "8.5"
