"""The table of ascend.h driven from Python in a process of its own: ``python -m tests.native.ascend_table <scenario>``.

Each scenario is a function that asserts; it runs over whatever libraries ``KVXFER_CANN_LIBDIR`` names, in these tests
the simulator. `test_ascend_table.py` chooses variants and faults.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvxfer.native import ascend
from kvxfer.native._shim import ffi, lib
from kvxfer.native.status import StatusCode

MIB = 1 << 20
WAIT_S = 20.0
FOREIGN, HOST, DEVICE = lib.KVX_ASCEND_FOREIGN, lib.KVX_ASCEND_HOST, lib.KVX_ASCEND_DEVICE
OUTPUTS = {"mem_alloc": "void **", "stream_open": "void **", "ipc_import": "void **", "process_id": "int32_t *"}
OUTPUTS |= {"mem_register": "void **", "submit": "void **", "capability": "int32_t *", "device_physical": "int32_t *"}
OUTPUTS |= {"device_peer": "int32_t *"}


class Refused(Exception):
    """A call answered something else than OK."""

    def __init__(self, name: str, status: int, raw: int, said: str) -> None:
        super().__init__(f"{name}: {StatusCode(status).name}, the library says {raw} {said!r}")
        self.status, self.raw, self.said = StatusCode(status), raw, said


class Table:
    """Calls by name; one output is returned, anything but OK is raised."""

    def __init__(self) -> None:
        why = ffi.new("char[]", 4096)
        self.table = lib.kvx_ascend_get(why, 4096)
        assert self.table != ffi.NULL, ffi.string(why)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self.table, name)

        def call(*args: Any) -> Any:
            raw = ffi.new("uint32_t *", 77)
            out = [ffi.new(OUTPUTS[name])] if name in OUTPUTS else []
            status = function(*args, *out, raw)
            if status != 0:
                raise Refused(name, status, raw[0], ffi.string(self.table.last_error()).decode())
            assert raw[0] == 0, name
            return out[0][0] if out else None

        return call

    def query(self, memory: Any) -> tuple[int, int, int, int]:
        where, device = ffi.new("kvx_ascend_where *"), ffi.new("int32_t *")
        base, length, raw = ffi.new("uint64_t *"), ffi.new("uint64_t *"), ffi.new("uint32_t *")
        status = self.table.mem_query(memory, where, device, base, length, raw)
        assert status == 0, (status, raw[0])
        return where[0], device[0], base[0], length[0]

    def open(self, device: int, local: str, **options: str) -> Any:
        engine, raw, why = ffi.new("void **"), ffi.new("uint32_t *"), ffi.new("char[512]")
        keep = [(ffi.new("char[]", key.encode()), ffi.new("char[]", text.encode())) for key, text in options.items()]
        given = ffi.new("kvx_ascend_option[]", [{"key": key, "value": text} for key, text in keep])
        status = self.table.engine_open(device, local.encode(), given, len(keep), engine, raw, why, 512)
        if status != 0:
            raise Refused("engine_open", status, raw[0], ffi.string(why).decode())
        return engine[0]

    def submit_ops(self, engine: Any, remote: str, write: bool, *ops: tuple[int, int, int]) -> Any:
        given = ffi.new("kvx_ascend_op[]", [{"local": a, "remote": b, "length": n} for a, b, n in ops])
        return self.submit(engine, remote.encode(), write, given, len(ops))

    def finish(self, engine: Any, request: Any) -> StatusCode:
        raw = ffi.new("uint32_t *")
        return wait_for(lambda: self.table.poll(engine, request, raw))

    def copies(self, device: int, stream: Any, entries: list[tuple[Any, Any, int]]) -> None:
        given = ffi.new("kvx_ascend_copy[]", [{"target": a, "source": b, "length": n} for a, b, n in entries])
        self.copy_batch(device, stream, given, len(entries))

    def rest(self, device: int, stream: Any) -> StatusCode:
        raw = ffi.new("uint32_t *")
        return wait_for(lambda: self.table.stream_poll(device, stream, raw))


def wait_for(ask: Callable[[], int]) -> StatusCode:
    """Ask until it is no longer PENDING."""
    end = time.monotonic() + WAIT_S
    while (status := StatusCode(ask())) is StatusCode.PENDING:
        assert time.monotonic() < end, "no end"
        time.sleep(0.0005)
    return status


@contextmanager
def refuses(status: StatusCode, *raws: int) -> Iterator[None]:
    try:
        yield
    except Refused as refused:
        assert refused.status is status, refused
        assert not raws or refused.raw in raws, refused
    else:
        raise AssertionError(f"{status.name} expected")


def control(**settings: str) -> None:
    """Faults of the simulator from now on. It looks at most once a millisecond, and at changes only."""
    path = Path(os.environ["KVXFER_SIM_DIR"]) / "control"
    fresh = path.with_name("control.new")
    fresh.write_text("".join(f"KVXFER_SIM_{name}={value}\n" for name, value in settings.items()))
    fresh.rename(path)
    time.sleep(0.003)


def at(memory: Any, offset: int = 0) -> Any:
    return ffi.cast("char *", memory) + offset


def number(memory: Any) -> int:
    return int(ffi.cast("uintptr_t", memory))


def address() -> str:
    """Of an engine that listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def pattern(length: int, seed: int = 1) -> bytes:
    return bytes((index * 31 + seed * 7) % 251 for index in range(4096)) * (length // 4096 + 1)


def write_device(table: Table, memory: Any, data: bytes) -> None:
    table.copy(0, memory, ffi.from_buffer(data), len(data))


def read_device(table: Table, memory: Any, length: int) -> bytes:
    out = bytearray(length)
    table.copy(0, ffi.from_buffer(out), memory, length)
    return bytes(out)


# -- scenarios --------------------------------------------------------------------------------------------------------


def facts() -> None:
    found = ascend.probe()
    assert isinstance(found, ascend.AscendInfo), found
    expected = os.environ["EXPECTED_TOOLKIT"]
    assert found.toolkit == expected, found
    assert found.soc == "KVXSim910"
    assert found.simulated
    assert "simulated" in str(found)
    assert found.devices == 2
    newest = expected == "9.1+"
    assert (found.async_connect, found.bulk_status, found.capability, found.address_range) == (newest,) * 4
    assert found.batch_copy
    assert "KVXSim" in found.reported
    device = ascend.device_info(1)
    assert device.healthy
    assert device.physical == 1
    assert 0 < device.hbm_free_bytes <= device.hbm_total_bytes == 64 * MIB
    table = Table()
    if newest:
        assert table.capability(0) == 1
        with refuses(StatusCode.INVALID, 103900):
            table.capability(99)
    else:
        with refuses(StatusCode.UNSUPPORTED, 0):
            table.capability(0)
    control(DEVICE_LOST="1")
    assert ascend.device_info(0).healthy
    raw = ffi.new("uint32_t *")
    assert table.table.device_healthy(1, raw) == StatusCode.SYSTEM


def memory() -> None:
    table = Table()
    newest = bool(table.table.facts.optional & lib.KVX_ASCEND_HAS_ADDRESS_RANGE)
    whole = ascend.device_info(0)
    hbm = table.mem_alloc(0, DEVICE, 3 * MIB)
    assert number(hbm) % (2 * MIB) == 0
    assert ascend.device_info(0).hbm_free_bytes == whole.hbm_free_bytes - 4 * MIB
    pinned = table.mem_alloc(1, HOST, 10000)
    plain = ffi.new("char[]", 10000)
    assert table.query(at(hbm, 5000)) == (DEVICE, 0, number(hbm), 4 * MIB)
    vendor = ctypes.CDLL(ffi.string(table.table.facts.acl_path).decode())
    theirs = ctypes.c_void_p()
    assert vendor.aclrtMalloc(ctypes.byref(theirs), ctypes.c_size_t(2 * MIB), 1) == 0
    base = (theirs.value, 2 * MIB) if newest else (0, 0)
    assert table.query(ffi.cast("void *", theirs.value + 4096)) == (DEVICE, 0, *base), "a framework's"
    assert vendor.aclrtFree(theirs) == 0
    assert table.query(pinned)[:2] == (HOST, -1)
    assert table.query(plain) == (FOREIGN, -1, 0, 0)
    data = pattern(3 * MIB)[: 3 * MIB]
    write_device(table, hbm, data)
    other = table.mem_alloc(1, DEVICE, 2 * MIB)
    assert table.query(other)[:2] == (DEVICE, 1)
    assert table.device_peer(0, 1) == 1
    assert table.device_peer(0, 1) == 1, "enabled once, asked twice"
    assert table.device_peer(1, 1) == 1
    table.copy(0, other, at(hbm, MIB), 2 * MIB)
    assert read_device(table, other, 2 * MIB) == data[MIB:]
    table.copy(0, pinned, other, 10000)
    assert bytes(ffi.buffer(ffi.cast("char *", pinned), 10000)) == data[MIB : MIB + 10000]
    table.copy(0, plain, pinned, 10000)
    assert bytes(ffi.buffer(plain, 10000)) == data[MIB : MIB + 10000]
    table.copy(0, plain, pinned, 0)
    with refuses(StatusCode.DEVICE_MEMORY, 207001):
        table.mem_alloc(0, DEVICE, 65 * MIB)
    with refuses(StatusCode.LENGTH, 0):
        table.mem_alloc(0, DEVICE, 0)
    with refuses(StatusCode.LENGTH, 0):
        table.mem_alloc(0, DEVICE, (1 << 64) - 1)
    with refuses(StatusCode.INVALID, 0):
        table.mem_alloc(0, FOREIGN, 4096)
    for device in (-1, 2, 64, 1 << 30):
        with refuses(StatusCode.NO_DEVICE, 0):
            table.mem_alloc(device, DEVICE, 4096)
    table.mem_free(1, HOST, pinned)
    table.mem_free(0, DEVICE, hbm)
    table.mem_free(1, DEVICE, other)
    assert ascend.device_info(0) == whole
    try:
        table.mem_free(0, DEVICE, hbm)
    except Refused as refused:
        assert refused.said, "the library's own words"
    else:
        raise AssertionError("freed twice")


def contexts() -> None:
    """A thread that never set a device works; one that set another device keeps it."""
    table = Table()
    vendor = ctypes.CDLL(ffi.string(table.table.facts.acl_path).decode())
    found: list[object] = []

    def current() -> int:
        card = ctypes.c_int32(-1)
        return card.value if vendor.aclrtGetDevice(ctypes.byref(card)) == 0 else -1

    def bare() -> None:
        memory = table.mem_alloc(0, DEVICE, 4096)
        write_device(table, memory, b"x" * 4096)
        found.append(read_device(table, memory, 4096) == b"x" * 4096)
        table.mem_free(0, DEVICE, memory)

    def framework() -> None:
        assert current() == -1
        assert vendor.aclrtSetDevice(1) == 0
        memory = table.mem_alloc(0, DEVICE, 4096)
        found.append(table.query(memory)[1] == 0)
        found.append(current() == 1)
        ascend.device_info(0)
        found.append(current() == 1)
        table.mem_free(0, DEVICE, memory)
        table.device_use(0)
        found.append(current() == 0)

    def asks_first() -> None:
        found.append(table.query(ffi.new("char[]", 10))[0] == FOREIGN)

    for work in (asks_first, bare, framework):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert found == [True] * 6, found


def streams() -> None:
    table = Table()
    stream = table.stream_open(0)
    assert table.rest(0, stream) is StatusCode.OK
    count, piece = 5000, 512
    hbm, pinned = table.mem_alloc(0, DEVICE, count * piece), table.mem_alloc(0, HOST, count * piece)
    data = pattern(count * piece)[: count * piece]
    ffi.memmove(pinned, data, len(data))
    scattered = [(at(hbm, (count - 1 - n) * piece), at(pinned, n * piece), piece) for n in range(count)]
    for fault in ("", "memcpybatch:*:207000", "memcpybatch:*:107000"):
        write_device(table, hbm, bytes(count * piece))
        control(FAIL=fault)
        table.copies(0, stream, scattered)
        assert table.rest(0, stream) is StatusCode.OK, fault
        expected = b"".join(data[n * piece : (n + 1) * piece] for n in reversed(range(count)))
        assert read_device(table, hbm, count * piece) == expected, fault
    control()
    back = ffi.new("char[]", 4096)
    mixed = [(back, hbm, 1024), (at(hbm, MIB), pinned, 1024), (at(back, 1024), pinned, 1024), (back, back, 0)]
    mixed += [(at(hbm, 3 * 512 * 1024), hbm, 1024)]
    expected_back = read_device(table, hbm, 1024) + data[:1024]
    table.copies(0, stream, mixed)
    assert table.rest(0, stream) is StatusCode.OK
    assert bytes(ffi.buffer(back, 2048)) == expected_back
    assert read_device(table, at(hbm, MIB), 1024) == data[:1024]
    table.copies(0, stream, [])
    # An abort ends what waits, and the stream works afterwards.
    before = read_device(table, hbm, 1024)
    control(STALL="1")
    table.copies(0, stream, [(hbm, pinned, 1024), (at(hbm, 8192), pinned, 1024)])
    raw = ffi.new("uint32_t *")
    assert table.table.stream_poll(0, stream, raw) == StatusCode.PENDING
    table.stream_abort(0, stream)
    control()
    assert table.rest(0, stream) is StatusCode.OK
    assert read_device(table, hbm, 1024) == before
    table.copies(0, stream, [(hbm, pinned, 1024)])
    assert table.rest(0, stream) is StatusCode.OK
    assert read_device(table, hbm, 1024) == data[:1024]
    with refuses(StatusCode.INVALID):
        table.copies(0, stream, [(ffi.NULL, hbm, 16)])
    lost(table, stream, hbm, pinned)
    table.stream_close(0, stream, False)


def lost(table: Table, stream: Any, hbm: Any, pinned: Any) -> None:
    """A card that is lost, or a library that cannot be asked, has not said that nothing moves."""
    raw = ffi.new("uint32_t *")
    control(STALL="1")
    table.copies(0, stream, [(hbm, pinned, 1024)])
    for fault, status in (
        ({"DEVICE_LOST": "0"}, StatusCode.DEVICE),
        ({"FAIL": "syncstream:*:107002,streamquery:*:107002"}, StatusCode.NO_CONTEXT),
    ):
        control(STALL="1", **fault)
        assert StatusCode(table.table.stream_poll(0, stream, raw)) is status
        with refuses(status):
            table.stream_abort(0, stream)
    control()
    table.stream_abort(0, stream)  # now it can: the stream is as new
    table.copies(0, stream, [(hbm, pinned, 1024)])
    assert table.rest(0, stream) is StatusCode.OK
    # The error of a task says that the task is over, with the library's word that the stream is idle.
    control(FAIL="syncstream:*:507053")
    table.stream_abort(0, stream)
    control()


def ipc() -> None:
    """Another process copies out of and into this one's device memory, by a key."""
    table = Table()
    hbm = table.mem_alloc(0, DEVICE, 2 * MIB)
    data = pattern(2 * MIB)[: 2 * MIB]
    write_device(table, hbm, data)
    key = ffi.new("char[65]")
    assert table.process_id() == os.getpid()
    table.ipc_export(0, hbm, 2 * MIB, 0, key)
    peer = [sys.executable, "-m", "tests.native.ascend_table", "ipc_peer", ffi.string(key).decode()]
    done = subprocess.run(peer, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert read_device(table, hbm, 8) == b"from far"
    table.ipc_close(0, key)
    # For one process only: this one is named, so another one is refused.
    other = table.mem_alloc(0, DEVICE, 2 * MIB)
    table.ipc_export(0, other, 2 * MIB, os.getpid(), key)
    peer[-1] = ffi.string(key).decode()
    done = subprocess.run(peer, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "ipc_import: INVALID" in done.stderr


def ipc_peer() -> None:
    table, key = Table(), sys.argv[2].encode()
    memory = table.ipc_import(1, key)
    data = pattern(2 * MIB)[: 2 * MIB]
    assert read_device(table, memory, 2 * MIB) == data
    table.copy(1, memory, ffi.from_buffer(b"from far"), 8)
    table.ipc_close(1, key)


def engines() -> None:
    """Two engines of one process, on two cards: the life of a link."""
    table = Table()
    names = [address(), address()]
    opened = [table.open(device, name) for device, name in enumerate(names)]
    one, two = opened
    memory = [table.mem_alloc(device, DEVICE, 4 * MIB) for device in (0, 1)]
    pinned = table.mem_alloc(0, HOST, 2 * MIB)
    handles = [table.mem_register(opened[n], memory[n], 4 * MIB, DEVICE) for n in (0, 1)]
    handles.append(table.mem_register(one, pinned, 2 * MIB, HOST))
    remote = names[1].encode()
    with refuses(StatusCode.PEER_LOST, 103902):
        table.submit_ops(one, names[1], True, (number(memory[0]), number(memory[1]), 4096))
    with refuses(StatusCode.PEER_LOST, 103902):
        table.disconnect(one, remote, 1000)
    with refuses(StatusCode.LINK, 503900):
        table.connect(one, address().encode(), 1000)
    table.connect(one, remote, 5000)
    with refuses(StatusCode.BUSY, 103903):
        table.connect(one, remote, 5000)
    data = pattern(4 * MIB)[: 4 * MIB]
    write_device(table, memory[0], data)
    pieces = [(number(memory[0]) + n * 4096, number(memory[1]) + (1023 - n) * 4096, 4096) for n in range(1024)]
    assert table.finish(one, table.submit_ops(one, names[1], True, *pieces)) is StatusCode.OK
    assert read_device(table, memory[1], 4096) == data[1023 * 4096 :]
    table.copy(1, memory[1], ffi.from_buffer(b"read me!"), 8)
    get = table.submit_ops(one, names[1], False, (number(pinned), number(memory[1]), 8))
    assert table.finish(one, get) is StatusCode.OK
    assert bytes(ffi.buffer(ffi.cast("char *", pinned), 8)) == b"read me!"
    raw = ffi.new("uint32_t *")
    assert table.table.poll(one, get, raw) == StatusCode.INVALID, "a finished request is forgotten"
    assert raw[0] == 103900
    table.disconnect(one, remote, 5000)
    for engine, handle in ((one, handles[0]), (one, handles[2]), (two, handles[1])):
        wait_deregistered(table, engine, handle)
    for engine in opened:
        table.engine_close(engine)
    for device in (0, 1):
        table.mem_free(device, DEVICE, memory[device])
    table.mem_free(0, HOST, pinned)


def wait_deregistered(table: Table, engine: Any, handle: Any) -> None:
    """The serving side notices the end of a link a little later."""
    end = time.monotonic() + WAIT_S
    while True:
        try:
            return table.mem_deregister(engine, handle)
        except Refused as refused:
            assert refused.raw == 503900, refused
            assert time.monotonic() < end, refused
            time.sleep(0.01)


def faults() -> None:
    """Out of slots, a latched link, and calls that never return."""
    table = Table()
    names = [address(), address()]
    one, two = (table.open(device, name) for device, name in enumerate(names))
    remote = names[1].encode()
    memory = [table.mem_alloc(device, DEVICE, 2 * MIB) for device in (0, 1)]
    for engine, own in ((one, memory[0]), (two, memory[1])):
        table.mem_register(engine, own, 2 * MIB, DEVICE)
    op = (number(memory[0]), number(memory[1]), 4096)
    table.connect(one, remote, 5000)
    control(SLOTS="2", STALL="1")
    running = [table.submit_ops(one, names[1], True, op) for _ in range(2)]
    with refuses(StatusCode.AGAIN, 203900):
        table.submit_ops(one, names[1], True, op)
    raw = ffi.new("uint32_t *")
    assert table.table.poll(one, running[0], raw) == StatusCode.PENDING
    control()
    assert [table.finish(one, request) for request in running] == [StatusCode.OK] * 2
    control(FAIL="transfer:1:507899", RAW_STATUS="507899")
    assert table.finish(one, table.submit_ops(one, names[1], True, op)) in (StatusCode.DEVICE, StatusCode.LINK)
    control()
    if os.environ["EXPECTED_TOOLKIT"] != "8.5":
        with refuses(StatusCode.LINK, 503900):
            table.submit_ops(one, names[1], True, op)
    table.disconnect(one, remote, 5000)
    table.connect(one, remote, 5000)
    assert table.finish(one, table.submit_ops(one, names[1], True, op)) is StatusCode.OK
    hanging(table, one, remote)


def hanging(table: Table, engine: Any, remote: bytes) -> None:
    """A call that hangs keeps the engine from being closed under it, and nothing else."""
    control(HANG="disconnect")
    ended = threading.Event()

    def hang() -> None:
        table.disconnect(engine, remote, 100)
        ended.set()

    thread = threading.Thread(target=hang)
    thread.start()
    assert not ended.wait(0.3), "the simulator did not hang"
    with refuses(StatusCode.BUSY, 0):
        table.engine_close(engine)
    control()
    assert ended.wait(WAIT_S)
    thread.join()
    table.engine_close(engine)


def options() -> None:
    table = Table()
    newest = os.environ["EXPECTED_TOOLKIT"] != "8.5"
    engine = table.open(0, "127.0.0.1", BufferPool="0:0", RdmaTrafficClass="132", RdmaServiceLevel="4")
    table.engine_close(engine)
    if newest:
        table.engine_close(table.open(0, "127.0.0.1", AutoConnect="0"))
    else:
        with refuses(StatusCode.INVALID, 0):
            table.open(0, "127.0.0.1", AutoConnect="0")
    with refuses(StatusCode.INVALID, 103900):
        table.open(0, "127.0.0.1", RdmaTrafficClass="133")
    taken = address()
    engine = table.open(0, taken)
    with refuses(StatusCode.LINK, 503900):
        table.open(1, taken)
    table.engine_close(engine)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    print("well")
