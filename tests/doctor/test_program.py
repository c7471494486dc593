"""Looking at this copy of kvxfer."""

from __future__ import annotations

import importlib
import socket
import sys

import pytest

from kvxfer.config import Config
from kvxfer.doctor.program import probe_program, probe_transports


def test_this_copy() -> None:
    program = probe_program()
    assert program.native_error == ""
    assert program.native_path.endswith(".so")
    assert program.python == sys.version_info[:3]
    assert all(program.packages.values())


def test_an_engine_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> object:
        raise ImportError(f"{name}: wrong ELF class")

    monkeypatch.setattr(importlib, "import_module", broken)
    assert "wrong ELF class" in probe_program().native_error


def test_transports_of_this_host() -> None:
    seen = {found.name: found for found in probe_transports(Config(transports=("tcp",)), {"transports": "file x"})}
    assert set(seen) >= {"shm", "tcp", "hixl"}
    assert (seen["tcp"].error, seen["tcp"].listed, seen["tcp"].wanted) == ("", True, True)
    assert (seen["shm"].error, seen["shm"].listed, seen["shm"].wanted) == ("", False, False)
    assert "dram" in seen["shm"].memory
    assert seen["ucx"].error


def test_a_port_that_the_daemon_holds_is_no_obstacle() -> None:
    with socket.create_server(("127.0.0.1", 0)) as daemon:
        seen = probe_transports(Config(data_port=daemon.getsockname()[1]), {})
    assert not {found.name: found for found in seen}["tcp"].error


def test_a_transport_that_cannot_open_says_why() -> None:
    config = Config(data_bind="192.0.2.1", secret="0123456789abcdef")
    seen = {found.name: found for found in probe_transports(config, {})}
    assert seen["tcp"].error
    assert not seen["shm"].error
