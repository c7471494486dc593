"""The counters file read from Python: the layout is C's, other files are refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvxfer.errors import ProtocolError
from kvxfer.native import types as module
from kvxfer.native._shim import ffi
from kvxfer.native.engine import Engine, EngineConfig
from kvxfer.native.types import CORE_FIELDS, ROW_FIELDS, parse_counters, read_counters


def test_the_layout_is_that_of_c() -> None:
    assert ffi.sizeof("kvx_counters") == module.COUNTERS_BYTES
    core = [name for name, _ in ffi.typeof("kvx_counters").fields]
    assert tuple(core) == ("magic", "version", "transports", *CORE_FIELDS, "names", "row")
    assert tuple(name for name, _ in ffi.typeof("kvx_transport_counters").fields) == ROW_FIELDS


def test_every_number_lands_in_its_field() -> None:
    native = ffi.new("kvx_counters *")
    native.magic, native.version, native.transports = module.MAGIC, module.VERSION, 2
    for number, name in enumerate(CORE_FIELDS):
        setattr(native, name, 100 + number)
    for row in range(2):
        native.names[row][0:2] = b"tx"
        for number, name in enumerate(ROW_FIELDS):
            setattr(native.row[row], name, 1000 * (row + 1) + number)
    read = parse_counters(bytes(ffi.buffer(native)))
    assert [getattr(read, name) for name in CORE_FIELDS] == [100 + number for number in range(len(CORE_FIELDS))]
    assert [transport.name for transport in read.transports] == ["tx", "tx"]
    for row, transport in enumerate(read.transports):
        values = [getattr(transport, name) for name in ROW_FIELDS]
        assert values == [1000 * (row + 1) + number for number in range(len(ROW_FIELDS))]


def test_another_process_can_read_them(tmp_path: Path) -> None:
    path = tmp_path / "counters"
    engine = Engine(EngineConfig(engine_id=os.urandom(16), transports=(), copy_threads=1, counters_path=str(path)))
    engine.alloc(1000)
    read = read_counters(path)
    assert (read.pid, read.regions, read.registered_bytes) == (os.getpid(), 1, 1000)
    assert read.threads == 2
    assert [row.name for row in read.transports] == ["loop"]
    assert read == engine.counters()
    engine.close()
    with pytest.raises(FileNotFoundError):
        read_counters(path)


@pytest.mark.parametrize("raw", [b"", b"short", bytes(module.COUNTERS_BYTES), b"\xff" * module.COUNTERS_BYTES])
def test_other_files_are_refused(raw: bytes, tmp_path: Path) -> None:
    path = tmp_path / "other"
    path.write_bytes(raw)
    with pytest.raises(ProtocolError):
        read_counters(path)
