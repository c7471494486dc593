"""What wishes for memory mean, and whole flows of a client over memory of (simulated) accelerators."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import mmap
import os
import platform
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvxfer
from kvxfer.dataplane.exports import map_host
from kvxfer.errors import (
    AlignmentError,
    KvxferError,
    RegionBusy,
    RegistrationError,
    TransferTimeout,
    TransportError,
    UsageError,
)
from kvxfer.memory import allocation, numa
from kvxfer.memory.allocation import kind_of, wish
from kvxfer.native.engine import MemoryKind
from tests.native.simulated import ROOT, simulated
from tests.nodes import until
from tests.support.nodes import make_cache, read_tokens, scattered, small_geometry

MIB = 1 << 20
SMALL: dict[str, Any] = {"hbm_arena_bytes": 4 * MIB, "pinned_arena_bytes": 2 * MIB}


# -- arguments -------------------------------------------------------------------------------------------------------


def test_what_memory_and_device_mean_together() -> None:
    assert kind_of("dram", None) is MemoryKind.DRAM
    assert kind_of("dram", 3) is MemoryKind.PINNED
    assert kind_of("hbm", 0) is MemoryKind.HBM
    assert wish(9, "hbm", "auto", None, None, "dram").group == ()
    assert wish(9, "hbm", "auto", [2, 0], None, None).group == (2, 0)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"memory": "vram"}, "memory"),
        ({"memory": None}, "memory"),
        ({"memory": "hbm"}, "device"),
        ({"device": -1}, "device"),
        ({"device": True}, "device"),
        ({"device": "0"}, "device"),
        ({"device": 1 << 31}, "device"),
        ({"memory": "hbm", "device": 0, "spill": "disk"}, "spill"),
        ({"spill": "dram"}, "spill"),
        ({"memory": "hbm", "device": 0, "group": [0]}, "group"),
        ({"memory": "hbm", "device": "auto", "group": []}, "group"),
        ({"numa_node": "near"}, "numa_node"),
        ({"numa_node": -1}, "numa_node"),
        ({"numa_node": 1023}, "numa_node"),
    ],
)
async def test_wishes_that_make_no_sense(changes: dict[str, Any], field: str) -> None:
    async with kvxfer.local() as client:
        with pytest.raises(UsageError, match=field):
            await client.alloc(4096, **changes)
        assert client.plane.engine.counters().regions == 0
        with pytest.raises(UsageError, match="an object, or an address"):
            await client.register(bytearray(9), address=4096)
        with pytest.raises(UsageError, match="in other memory"):
            await client.register(bytearray(9), memory="hbm")


# -- host memory -----------------------------------------------------------------------------------------------------


def may_bind(node: int) -> bool:
    """Containers often may not: asked of the kernel directly."""
    number = {"x86_64": 237, "aarch64": 235}[platform.machine()]
    memory = mmap.mmap(-1, 4096)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    mask = (ctypes.c_ulong * 16)(1 << node)
    return ctypes.CDLL(None).syscall(number, ctypes.c_void_p(address), ctypes.c_ulong(4096), 2, mask, 1024, 0) == 0


async def test_a_numa_node_is_applied_and_told() -> None:
    node = [0, *numa.nodes()][-1]
    expected = ("bound", node) if may_bind(node) else ("not applied", -1)
    async with kvxfer.local() as client:
        region = await client.alloc(MIB, numa_node=node)
        assert (region.info.numa, region.info.numa_node) == expected
        assert (await client.alloc(MIB, numa_node="auto")).info.numa in (expected[0], "none")
        assert (await client.alloc(MIB)).info.numa == "none"


DENIED = """
import asyncio, ctypes, logging, struct, sys

libc = ctypes.CDLL(None, use_errno=True)
number = {"x86_64": 237, "aarch64": 235}[__import__("platform").machine()]
# seccomp: mbind answers EPERM, as in a container; all other calls go through
program = b"".join(
    struct.pack("HBBI", *step)
    for step in ((0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | 1), (0x06, 0, 0, 0x7FFF0000))
)
buffer = ctypes.create_string_buffer(program)
fprog = struct.pack("HxxxxxxQ", 4, ctypes.addressof(buffer))
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, fprog, 0, 0) == 0
logging.basicConfig(stream=sys.stdout, format="%(name)s %(message)s")

import kvxfer
from kvxfer.dataplane.exports import map_host

async def main():
    async with kvxfer.local() as client:
        for _ in range(3):
            region = await client.alloc(1 << 20, numa_node=0)
            assert (region.info.numa, region.info.numa_node) == ("not applied", -1), region.info
            region.array[:] = 1

asyncio.run(main())
"""


def test_a_numa_node_that_is_denied_is_said_once() -> None:
    done = subprocess.run(
        [sys.executable, "-c", DENIED],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("kvxfer.memory") == 1
    assert "NUMA node" in done.stdout


async def test_the_engines_threads_stay_on_a_node() -> None:
    before = os.sched_getaffinity(0)
    async with kvxfer.local(numa_node="auto") as client:
        assert client.plane.engine.numa == "bound"
        assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("what", ["alloc", "register"])
async def test_a_driver_that_hangs_costs_no_more_than_the_timeout(what: str) -> None:
    async with kvxfer.local() as client:
        engine, goes_on = client.plane.engine, threading.Event()
        work = getattr(engine, what)

        def hang(*arguments: Any, **options: Any) -> Any:
            assert goes_on.wait(10)
            return work(*arguments, **options)

        setattr(engine, what, hang)
        regions = engine.counters().regions
        with pytest.raises(TransferTimeout) as found:
            if what == "alloc":
                await client.alloc(4096, timeout=0.05)
            else:
                await client.register(bytearray(4096), timeout=0.05)
        assert found.value.fields["state"] == "working on memory"
        assert client._allocator is not None
        working = tuple(client._allocator._working)
        goes_on.set()
        await asyncio.wait(working)
        await until(lambda: engine.counters().regions == regions)  # what came too late was given back


async def test_reading_and_writing_host_memory() -> None:
    async with kvxfer.local() as client:
        for region in (await client.alloc(3 * MIB), await client.register(np.zeros(3 * MIB, dtype=np.uint8))):
            data = np.random.default_rng(3).integers(0, 1 << 16, MIB, np.uint16)
            await region.write(5, data)
            assert (
                (await region.read(5, 2 * MIB)).tobytes() == data.tobytes() == region.array[5 : 5 + 2 * MIB].tobytes()
            )
            await region.write(0, b"head")
            assert bytes(await region.read(0, 4)) == b"head"
            assert len(await region.read()) == 3 * MIB
            assert len(await region.read(3 * MIB - 1)) == 1
            await region.write(3 * MIB, b"")
            for offset, length in ((0, 3 * MIB + 1), (3 * MIB, 1), (-1, 1), (0, 0)):
                with pytest.raises(UsageError):
                    await region.read(offset, length)
            with pytest.raises(UsageError, match="not contiguous"):
                await region.write(0, np.zeros((4, 4), dtype=np.uint8)[:, ::2])
            with pytest.raises(UsageError, match="cannot write a str"):
                await region.write(0, "text")
            await region.release()
            with pytest.raises(KvxferError, match="released"):
                await region.read(0, 1)


async def test_a_region_that_is_being_read_is_not_released(monkeypatch: pytest.MonkeyPatch) -> None:
    async with kvxfer.local() as client:
        region = await client.alloc(MIB)
        go_on, inside = threading.Event(), threading.Event()
        engine = client.plane.engine
        original = engine.read_into

        def slow(*arguments: Any) -> None:
            inside.set()
            assert go_on.wait(10)
            original(*arguments)

        monkeypatch.setattr(engine, "read_into", slow)
        reading = asyncio.ensure_future(region.read())
        await asyncio.to_thread(inside.wait, 10)
        with pytest.raises(RegionBusy, match="read or written"):
            await region.release()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        with pytest.raises(RegionBusy):
            await region.release()  # the copy goes on, whoever waits for it
        releasing = asyncio.ensure_future(region.release(drain=True))
        await asyncio.sleep(0)
        assert not releasing.done()
        go_on.set()
        await releasing


# -- devices ---------------------------------------------------------------------------------------------------------


@simulated(HBM="32M")
async def test_memory_of_a_device_for_a_client() -> None:
    async with kvxfer.local(**SMALL) as client:
        region = await client.alloc(3 * MIB, memory="hbm", device=1)
        assert (region.kind, region.device, region.info.on_device) == (MemoryKind.HBM, 1, True)
        with pytest.raises(UsageError, match=r"cannot touch.*await region.write"):
            _ = region.array
        data = np.random.default_rng(3).integers(0, 256, 3 * MIB, np.uint8)
        await region.write(0, data)
        assert (await region.read()).tobytes() == data.tobytes()
        host = await client.alloc(3 * MIB, memory="dram", device=1)
        assert (host.kind, host.device) == (MemoryKind.PINNED, 1)
        plain = await client.alloc(3 * MIB)
        assert (region.descriptor("w").kind, host.descriptor("w").kind) == ("hbm", "dram")
        await client.put(region, host.descriptor("w"))
        await client.get(plain, host.descriptor("r"))
        assert plain.array.tobytes() == host.array.tobytes() == data.tobytes()
        for held in (region, host, plain):
            await held.release()
        assert client.plane.engine.counters().arena_bytes == 0


@simulated(HBM="32M")
async def test_integrity_is_checked_on_devices_too() -> None:
    async with kvxfer.local(integrity=True, **SMALL) as client:
        source, target = [await client.alloc(MIB, memory="hbm", device=device) for device in (0, 1)]
        await source.write(0, bytes(range(256)) * 4096)
        await client.put(source, target.descriptor("w"))
        assert (await target.read(0, 256)).tobytes() == bytes(range(256))


@simulated(HBM="16M")
async def test_the_least_loaded_card_and_a_full_one() -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("kvxfer.memory").addHandler(handler)
    async with kvxfer.local(**SMALL) as client:
        burst = [client.alloc(4 * MIB, memory="hbm", device="auto") for _ in range(4)]
        regions = await asyncio.gather(*burst)
        assert sorted(region.device for region in regions) == [0, 0, 1, 1]
        await regions[0].release()
        freed = regions[0].device
        assert (await client.alloc(MIB, memory="hbm", device="auto")).device == freed
        assert (await client.alloc(MIB, memory="hbm", device="auto", group=[1 - (freed or 0)])).device != freed
        with pytest.raises(RegistrationError, match="free_bytes"):
            await client.alloc(16 * MIB, memory="hbm", device=0)
        assert lines == []
        spilled = await client.alloc(16 * MIB, memory="hbm", device=0, spill="dram")
        assert spilled.info.spilled
        spilled.array[:] = 1  # host memory after all
        [line] = lines
        assert "device 0" in line
        assert str(16 * MIB) in line
        assert client.plane.engine.counters().spilled_bytes == 16 * MIB


class Device:
    """Looks like torch.device."""

    type, index = "npu", 0


class Tensor:
    """Looks like a tensor of torch_npu."""

    device = Device()

    def __init__(self, address: int, length: int) -> None:
        self.address, self.length = address, length

    def data_ptr(self) -> int:
        return self.address

    def numel(self) -> int:
        return self.length // 2

    def element_size(self) -> int:
        return 2

    def is_contiguous(self) -> bool:
        return True


@simulated()
async def test_tensors_of_the_framework() -> None:
    acl = ctypes.CDLL(str(Path(os.environ["KVXFER_CANN_LIBDIR"]) / "libacl_rt.so"))
    acl.aclInit(None)
    assert acl.aclrtSetDevice(0) == 0
    address = ctypes.c_void_p()
    assert acl.aclrtMalloc(ctypes.byref(address), ctypes.c_size_t(4 * MIB), 1) == 0
    assert address.value is not None
    async with kvxfer.local(**SMALL) as client:
        tensor = Tensor(address.value, 4 * MIB)
        region = await client.register(tensor)
        assert (region.kind, region.device, region.length) == (MemoryKind.HBM, 0, 4 * MIB)
        same = await client.register(address=address.value, length=4 * MIB, memory="hbm", device=0)
        assert same.id == region.id
        await region.write(0, b"bytes of the framework")
        plain = await client.alloc(22)
        await client.get(plain, same.descriptor("r"))
        assert plain.array.tobytes() == b"bytes of the framework"
        await region.release()
        await same.release()
        with pytest.raises(AlignmentError, match="register the allocation"):
            await client.register(Tensor(address.value + 512, 2 * MIB))
        with pytest.raises(RegistrationError, match="driver did not allocate"):
            await client.register(np.zeros(MIB, dtype=np.uint8), device=0)
        host = await client.register(np.zeros(MIB, dtype=np.uint8))
        assert host.kind is MemoryKind.DRAM
    assert acl.aclrtFree(address) == 0


@simulated(HBM="32M")
async def test_whole_caches_on_devices() -> None:
    async with kvxfer.local(**SMALL) as client:
        geometry, table = small_geometry(), scattered(1, 8, 40, 16)
        source = await make_cache(client, geometry, 8, memory="hbm", device=0)
        sink = await make_cache(client, geometry, 8, memory="hbm", device=1)
        data = np.random.default_rng(5).standard_normal(source.regions[0].length // 4).astype(np.float32)
        await source.regions[0].write(0, data)
        async with client.offer("r", sink, table) as landing:
            async with client.push("r", to=client.addresses, cache=source, table=table) as push:
                await push.layers()
            await landing.wait()
        for layer in range(geometry.layers):
            assert np.array_equal(await read_tokens(sink, table, layer), await read_tokens(source, table, layer))
        await sink.regions[0].write(0, bytes(sink.regions[0].length))
        async with client.publish("s", source, table) as publication:
            pulled = await client.pull(publication, sink, table)
            assert pulled.bytes > 0
        for layer in range(geometry.layers):
            assert np.array_equal(await read_tokens(sink, table, layer), await read_tokens(source, table, layer))


@simulated(FAIL="malloc:1+:507899")
async def test_a_driver_that_fails_is_not_a_full_device() -> None:
    async with kvxfer.local(**SMALL) as client:
        with pytest.raises(TransportError, match="driver failed") as caught:
            await client.alloc(MIB, memory="hbm", device=0, spill="dram")
        assert caught.value.fields["vendor_status"] == 507899
        assert "injected" in str(caught.value)


@simulated(FAIL="malloc:*:107002")
async def test_a_missing_context_is_named() -> None:
    async with kvxfer.local(**SMALL) as client:
        with pytest.raises(TransportError, match="no context") as caught:
            await client.alloc(MIB, memory="hbm", device=0)
        assert "set a device first" in str(caught.value)


@simulated()
async def test_memory_of_a_device_is_not_mapped() -> None:
    async with kvxfer.local(**SMALL) as client:
        region = await client.alloc(MIB, memory="hbm", device=0)
        with pytest.raises(TransportError, match="cannot be mapped"):
            await map_host(client.plane, region.descriptor("r"))


@simulated()
async def test_a_cancelled_allocation_is_given_back() -> None:
    async with kvxfer.local(**SMALL) as client:
        engine = client.plane.engine
        waiting = asyncio.ensure_future(client.alloc(MIB, memory="hbm", device=0))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert client._allocator is not None
        await client._allocator.settle()
        for _ in range(1000):
            if engine.counters().arena_bytes == 0:
                break
            await asyncio.sleep(0.005)
        assert engine.counters().device_bytes == 0
    assert allocation.log.name == "kvxfer.memory"
