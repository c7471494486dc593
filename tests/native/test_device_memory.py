"""Memory of devices: arenas and their accounts, registration of the application's memory, copies, and every reason why
it does not work. Over the simulator, whose device addresses the CPU cannot touch.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import queue
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvxfer.errors import (
    AlignmentError,
    IntegrityError,
    OutOfRange,
    OverlapError,
    ReadOnlyError,
    RegistrationError,
    TooLarge,
    TransportUnavailable,
    UnknownRegion,
    UsageError,
)
from kvxfer.native.engine import Engine, EngineConfig, Event, MemoryKind, OpKind, RegionInfo
from kvxfer.native.status import StatusCode, error_for
from tests.native.simulated import ROOT, environment, faults, simulated

KIB, MIB = 1 << 10, 1 << 20
HBM, PINNED, DRAM = MemoryKind.HBM, MemoryKind.PINNED, MemoryKind.DRAM
HUGE_ONLY = 1


@contextmanager
def opened(**changes: Any) -> Iterator[Engine]:
    values: dict[str, Any] = {
        "engine_id": os.urandom(16),
        "transports": (),
        "copy_threads": 1,
        "chunk_bytes": 64 * KIB,
        "hbm_arena_bytes": 16 * MIB,
        "pinned_arena_bytes": 2 * MIB,
    }
    engine = Engine(EngineConfig(**(values | changes)))
    engine.attach(asyncio.get_running_loop(), lambda event: None)
    try:
        yield engine
    finally:
        engine.close()
        assert engine.stray_events == 0


async def released(engine: Engine, *regions: RegionInfo) -> None:
    for region in regions:
        assert (await asyncio.wait_for(engine.release(region.id), 10)).status == 0


def acl_alloc(length: int, *, device: int = 0, policy: int = HUGE_ONLY) -> int:
    """What an application does without us."""
    acl = ctypes.CDLL(str(Path(os.environ["KVXFER_CANN_LIBDIR"]) / "libacl_rt.so"))
    acl.aclInit(None)
    assert acl.aclrtSetDevice(device) == 0
    address = ctypes.c_void_p()
    assert acl.aclrtMalloc(ctypes.byref(address), ctypes.c_size_t(length), policy) == 0
    assert address.value is not None
    return address.value


# -- arenas -----------------------------------------------------------------------------------------------------------


@simulated(HBM="64M")
async def test_regions_share_arenas_which_go_back_when_they_are_empty() -> None:
    with opened() as engine:
        total = engine.device(0).total_bytes
        first = engine.alloc(3 * MIB, kind=HBM, device=0)
        small = engine.alloc(700, kind=HBM, device=0)
        second = engine.alloc(2 * MIB, kind=HBM, device=0)
        assert [region.address % (2 * MIB) for region in (first, second)] == [0, 0]
        assert small.address % 512 == 0
        assert (first.on_device, first.shared, first.spilled, first.device, first.kind) == (True, False, False, 0, HBM)
        seen = engine.device(0)
        assert (seen.arena_bytes, seen.region_bytes, seen.registrations) == (16 * MIB, 5 * MIB + 700, 1)
        assert (seen.free_bytes, seen.available_bytes) == (total - 16 * MIB, total - 5 * MIB - 700)
        counters = engine.counters()
        assert (counters.arena_bytes, counters.device_bytes) == (16 * MIB, 5 * MIB + 700)
        assert counters.registered_bytes == counters.device_bytes
        await released(engine, first, second)
        assert engine.device(0).registrations == 1
        await released(engine, small)
        assert engine.device(0).free_bytes == total
        counters = engine.counters()
        assert (counters.arena_bytes, counters.device_bytes, counters.registered_bytes) == (0, 0, 0)
        engine.alloc(MIB, kind=HBM, device=1)
        assert (engine.device(1).free_bytes, engine.device(0).free_bytes) == (total - 16 * MIB, total)
    with opened() as engine:
        assert engine.device(1).free_bytes == total, "closing gives everything back"


@simulated(HBM="64M")
async def test_a_large_region_and_a_tight_device() -> None:
    with opened() as engine:
        engine.alloc(41 * MIB, kind=HBM, device=0)  # larger than an arena: one of its own, in whole 2 MiB
        assert engine.device(0).arena_bytes == 42 * MIB
        engine.alloc(10 * MIB, kind=HBM, device=0)
        assert engine.device(0).arena_bytes == 58 * MIB
        engine.alloc(6 * MIB, kind=HBM, device=0)  # what is left of the second one
        assert engine.device(0).arena_bytes == 58 * MIB
        engine.alloc(3 * MIB, kind=HBM, device=0)  # no room for a whole arena: a smaller one
        assert engine.device(0).arena_bytes == 62 * MIB
        with pytest.raises(RegistrationError) as caught:
            engine.alloc(5 * MIB, kind=HBM, device=0)
        fields = caught.value.fields
        assert (fields["free_bytes"], fields["total_bytes"], fields["device"]) == (2 * MIB, 64 * MIB, 0)
        assert (fields["vendor_status"], fields["memory"], fields["length"]) == (207001, "hbm", 5 * MIB)
        assert "contiguous" in str(caught.value)
        assert "spill" in str(caught.value)
        assert engine.counters().regions == 4


@simulated(HBM="16M")
async def test_a_full_device_spills_where_that_was_agreed() -> None:
    with opened() as engine:
        full = engine.alloc(16 * MIB, kind=HBM, device=0)
        spilled = engine.alloc(MIB, kind=HBM, device=0, spill=True)
        assert (spilled.kind, spilled.spilled, spilled.on_device, spilled.device) == (PINNED, True, False, 0)
        assert not np.frombuffer(engine.buffer(spilled), dtype=np.uint8).any()
        counters = engine.counters()
        assert (counters.spilled_bytes, counters.spills, counters.device_bytes) == (MIB, 1, 16 * MIB)
        await released(engine, spilled, full)
        assert (engine.counters().spilled_bytes, engine.counters().spills) == (0, 1)
        kept = engine.alloc(MIB, kind=HBM, device=0, spill=True)
        assert (kept.kind, kept.spilled) == (HBM, False)


@simulated(HBM="1G")
async def test_a_device_has_so_many_registrations_and_no_more() -> None:
    with opened(hbm_arena_bytes=2 * MIB) as engine:
        regions = [engine.alloc(2 * MIB, kind=HBM, device=0) for _ in range(253)]
        assert engine.device(0).registrations == 253
        with pytest.raises(TooLarge, match="253 registrations") as caught:
            engine.alloc(2 * MIB, kind=HBM, device=0)
        assert "few large regions" in str(caught.value)
        with pytest.raises(TooLarge, match="253 registrations"):
            engine.alloc(1, kind=PINNED, device=0)
        engine.alloc(2 * MIB, kind=HBM, device=1)
        await released(engine, regions[100])
        engine.alloc(2 * MIB, kind=HBM, device=0)


@simulated()
async def test_pinned_host_memory() -> None:
    with opened() as engine:
        region = engine.alloc(3 * MIB, kind=PINNED, device=1)
        assert (region.kind, region.device, region.on_device, region.shared) == (PINNED, 1, False, False)
        memory = np.frombuffer(engine.buffer(region), dtype=np.uint8)
        assert not memory.any()
        memory[:] = 7
        assert engine.read(region.id, 3 * MIB - 2, 2) == b"\7\7"
        assert engine.device(1).registrations == 1
        assert engine.device(1).region_bytes == 0
        address = region.address
        await released(engine, region)
        # It is still looked at: nobody else gets these bytes.
        other = engine.alloc(3 * MIB, kind=PINNED, device=1)
        assert other.address != address
        assert memory[5] == 7
        del memory
        third = engine.alloc(3 * MIB, kind=PINNED, device=1)
        assert not np.frombuffer(engine.buffer(third), dtype=np.uint8).any()
        late = np.frombuffer(engine.buffer(other), dtype=np.uint8)
        late[:] = 9
    assert late.sum() == 9 * len(late)
    del late


@simulated()
async def test_pinned_memory_by_numa_node() -> None:
    with opened() as engine:
        anywhere = engine.alloc(MIB, kind=PINNED, device=0)
        near = [engine.alloc(MIB // 2, 0, kind=PINNED, device=0) for _ in range(2)]
        assert anywhere.numa == "none"
        assert {region.numa for region in near} <= {"bound", "not applied"}  # containers may not choose
        assert {region.numa_node for region in near} == {0 if near[0].numa == "bound" else -1}
        assert engine.device(0).registrations == 2, "an arena is on one node"


@simulated()
async def test_pinned_memory_that_is_looked_at_goes_with_its_last_view() -> None:
    with opened() as engine:
        region = engine.alloc(MIB, kind=PINNED, device=0)
        view = engine.buffer(region)
        await released(engine, region)
        assert engine.counters().arena_bytes == 2 * MIB
        del view
        assert engine.counters().arena_bytes == 0
        regions = [engine.alloc(MIB, kind=PINNED, device=0) for _ in range(2)]
        views = [engine.buffer(region) for region in regions]
        del views
        await released(engine, *regions)
        assert engine.counters().arena_bytes == 0


@simulated()
async def test_arguments_that_make_no_sense() -> None:
    with opened() as engine:
        for kind, device in ((HBM, None), (PINNED, None), (DRAM, 0)):
            with pytest.raises(UsageError):
                engine.alloc(MIB, kind=kind, device=device)
            with pytest.raises(UsageError):
                engine.register(2 * MIB, 2 * MIB, kind=kind, device=device)
        for device in (2, 1000):
            with pytest.raises(TransportUnavailable, match="this process sees 2"):
                engine.alloc(MIB, kind=HBM, device=device)
            with pytest.raises(TransportUnavailable, match="this process sees 2"):
                engine.device(device)
        assert engine.device_count() == 2


# -- the application's memory -----------------------------------------------------------------------------------------


@simulated()
async def test_whole_allocations_of_the_application() -> None:
    with opened() as engine:
        address = acl_alloc(6 * MIB)
        region = engine.register(address, 6 * MIB, kind=HBM, device=0)
        assert (region.kind, region.device, region.on_device, region.address) == (HBM, 0, True, address)
        again = engine.register(address, 6 * MIB, kind=HBM, device=0)
        assert (again.id, again.references) == (region.id, 2)
        seen = engine.device(0)
        assert (seen.foreign_bytes, seen.region_bytes, seen.arena_bytes, seen.registrations) == (6 * MIB, 0, 0, 1)
        with pytest.raises(OverlapError) as caught:
            engine.register(address + 2 * MIB, 2 * MIB, kind=HBM, device=0)
        assert caught.value.fields["conflict"] == region.id
        engine.write(region.id, 6 * MIB - 4, b"tail")
        await released(engine, region, region)
        parts = [engine.register(address + at, 2 * MIB, kind=HBM, device=0) for at in (0, 4 * MIB)]
        assert engine.read(parts[1].id, 2 * MIB - 4, 4) == b"tail"
        frozen = engine.register(address + 2 * MIB, 2 * MIB, kind=HBM, device=0, read_only=True)
        with pytest.raises(ReadOnlyError):
            engine.write(frozen.id, 0, b"x")
    assert acl_alloc(2 * MIB) != address, "the memory stays the application's"


@simulated()
async def test_alignment_is_explained_with_its_numbers() -> None:
    with opened() as engine:
        address = acl_alloc(6 * MIB)
        with pytest.raises(AlignmentError, match="4096 bytes past a boundary of 2 MiB") as caught:
            engine.register(address + 4096, 2 * MIB, kind=HBM, device=0)
        fields = caught.value.fields
        assert fields["boundary"] == 2 * MIB
        assert fields["address"] == hex(address + 4096)
        assert (fields["allocation_address"], fields["allocation_length"]) == (address, 6 * MIB)
        assert f"address={address:#x}, length={6 * MIB}" in str(caught.value)
        with pytest.raises(AlignmentError, match="length 1049600 is not a multiple of 2 MiB"):
            engine.register(address, MIB + 1024, kind=HBM, device=0)
        assert engine.counters().regions == 0
        assert engine.device(0).registrations == 0
        # Up to the end of the allocation, the rest of the last page is nobody else's.
        small_pages = acl_alloc(MIB, policy=2)
        with pytest.raises(AlignmentError):
            engine.register(small_pages, MIB, kind=HBM, device=0)


@simulated(variant="8.5")
async def test_alignment_on_a_toolkit_that_knows_no_ranges() -> None:
    with opened() as engine:
        address = acl_alloc(6 * MIB)
        with pytest.raises(AlignmentError) as caught:
            engine.register(address + 4096, 2 * MIB, kind=HBM, device=0)
        assert "allocation_address" not in caught.value.fields
        assert "whole allocations" in str(caught.value)
        engine.register(address, 6 * MIB, kind=HBM, device=0)


@simulated()
async def test_memory_that_is_not_what_it_is_said_to_be() -> None:
    with opened() as engine:
        address = acl_alloc(2 * MIB, device=1)
        with pytest.raises(UsageError, match="of device 1, not of 0"):
            engine.register(address, 2 * MIB, kind=HBM, device=0)
        plain = np.zeros(4 * MIB, dtype=np.uint8)
        with pytest.raises(UsageError, match="not memory of a device"):
            engine.register(plain.ctypes.data, MIB, kind=HBM, device=0)
        with pytest.raises(RegistrationError, match="driver did not allocate") as caught:
            engine.register(plain.ctypes.data, MIB, kind=PINNED, device=0)
        assert caught.value.status == StatusCode.HOST_MEMORY
        assert "alloc(memory='dram', device=N)" in str(caught.value)
        assert engine.register(plain.ctypes.data, MIB).kind is DRAM
        with pytest.raises(UsageError):
            engine.register(address + 2 * MIB, 2 * MIB, kind=HBM, device=1)  # behind it
        mine = engine.alloc(2 * MIB, kind=HBM, device=0)
        with pytest.raises(OverlapError):
            engine.register(mine.address + 4 * MIB, 2 * MIB, kind=HBM, device=0)  # inside our arena


# -- copies -----------------------------------------------------------------------------------------------------------


@simulated()
async def test_reading_and_writing_every_kind() -> None:
    with opened() as engine:
        data = np.random.default_rng(1).integers(0, 256, 5 * MIB // 2, np.uint8)
        plain = np.zeros(len(data) + 9, dtype=np.uint8)
        regions = [engine.alloc(len(plain), kind=kind, device=device) for kind, device in ((HBM, 0), (PINNED, 1))]
        regions += [engine.alloc(len(plain)), engine.register(plain.ctypes.data, len(plain))]
        for region in regions:
            engine.write(region.id, 9, data)
            assert engine.read(region.id, 9, len(data)) == data.tobytes()
            engine.write(region.id, 0, b"")
            assert engine.read(region.id, region.length, 0) == b""
            for offset, length in ((0, len(plain) + 1), (len(plain), 1), ((1 << 64) - 1, 2)):
                with pytest.raises(OutOfRange):
                    engine.read(region.id, offset, length)
            with pytest.raises(OutOfRange):
                engine.write(region.id, region.length - 1, b"xx")
        with pytest.raises(UsageError, match=r"cannot touch .*await region.write"):
            engine.buffer(regions[0])
        await released(engine, regions[0])
        with pytest.raises(UnknownRegion):
            engine.read(regions[0].id, 0, 1)


async def moved(engine: Engine, kind: OpKind, region: int, import_: int, length: int, *, check: bool = False) -> Event:
    outcome = engine.submit_one(kind, region, import_, 0, 0, length, check=check)
    return outcome if isinstance(outcome, Event) else await asyncio.wait_for(outcome[1], 10)


async def imported(engine: Engine, region: RegionInfo) -> int:
    grant = engine.grant(region.id, 0, region.length, 3)
    peer, connected = engine.connect(0, engine.transports[0].endpoint)
    assert (await asyncio.wait_for(connected, 10)).status == 0
    fields = {"grant": grant.id, "generation": grant.generation, "length": grant.length, "access": 3, "key": grant.key}
    made, ready = engine.import_(peer, **fields)
    assert (await asyncio.wait_for(ready, 10)).status == 0
    return made


@simulated()
async def test_the_loop_moves_every_kind_to_every_kind() -> None:
    with opened() as engine:
        assert all(engine.transports[0].moves(kind) for kind in MemoryKind)
        length = 300 * KIB + 7
        kinds = ((HBM, 0), (HBM, 1), (PINNED, 0), (DRAM, None))
        ours = [engine.alloc(length, kind=kind, device=device) for kind, device in kinds]
        theirs = [engine.alloc(length, kind=kind, device=device) for kind, device in kinds]
        imports = [await imported(engine, region) for region in theirs]
        for number, (source, target) in enumerate((a, b) for a in range(4) for b in range(4)):
            data = np.random.default_rng(number).integers(0, 256, length, np.uint8).tobytes()
            engine.write(ours[source].id, 0, data)
            put = await moved(engine, OpKind.PUT, ours[source].id, imports[target], length, check=number % 2 == 0)
            assert (put.status, put.bytes) == (0, length)
            assert engine.read(theirs[target].id, 0, length) == data
            got = await moved(engine, OpKind.GET, ours[target].id, imports[target], length, check=number % 2 == 1)
            assert (got.status, got.bytes) == (0, length)
            assert engine.read(ours[target].id, 0, length) == data
        inline = engine.submit_one(OpKind.PUT, ours[0].id, imports[3], 0, 0, 8)
        assert not isinstance(inline, Event), "a driver's copy may block: not on the caller's thread"
        await asyncio.wait_for(inline[1], 10)


@simulated(PEER="0")
async def test_cards_that_do_not_reach_each_other_go_through_the_host() -> None:
    with opened(chunk_bytes=4 * MIB) as engine:
        length = 3 * MIB + 5
        source, target = (engine.alloc(length, kind=HBM, device=device) for device in (0, 1))
        data = np.random.default_rng(8).integers(0, 256, length, np.uint8).tobytes()
        engine.write(source.id, 0, data)
        event = await moved(engine, OpKind.PUT, source.id, await imported(engine, target), length)
        assert (event.status, event.bytes) == (0, length)
        assert engine.read(target.id, 0, length) == data


@simulated(HBM="64M")
async def test_many_threads_at_once() -> None:
    def work(engine: Engine, seed: int, made: queue.SimpleQueue[RegionInfo | None]) -> None:
        rng = random.Random(seed)
        for _ in range(60):
            kind, length = rng.choice((HBM, PINNED)), rng.choice((300, 70 * KIB, 2 * MIB, 3 * MIB))
            region = engine.alloc(length, kind=kind, device=rng.randrange(2), spill=kind is HBM)
            mark = rng.randbytes(64)
            engine.write(region.id, length - 64, mark)
            assert engine.read(region.id, length - 64, 64) == mark
            made.put(region)
        made.put(None)

    with opened(hbm_arena_bytes=4 * MIB) as engine:
        made: queue.SimpleQueue[RegionInfo | None] = queue.SimpleQueue()
        working = [asyncio.ensure_future(asyncio.to_thread(work, engine, seed, made)) for seed in range(4)]
        ended, views = 0, []
        while ended < len(working):
            region = await asyncio.to_thread(made.get, timeout=20)
            if region is None:
                ended += 1
                continue
            if not region.on_device and region.id % 3 == 0:
                views.append(engine.buffer(region))
            await released(engine, region)
            if len(views) > 5:
                views.pop(0)
        await asyncio.gather(*working)
        views.clear()
        counters = engine.counters()
        assert (counters.arena_bytes, counters.device_bytes, counters.spilled_bytes, counters.regions) == (0, 0, 0, 0)
        assert [engine.device(device).registrations for device in range(2)] == [0, 0]


@simulated()
async def test_damage_on_a_device_is_seen() -> None:
    with opened(transports=("fault+loop",), fault_spec="flip_rate=1") as engine:
        source, target = (engine.alloc(100 * KIB, kind=HBM, device=device) for device in (0, 1))
        event = await moved(engine, OpKind.PUT, source.id, await imported(engine, target), 100 * KIB, check=True)
        assert isinstance(error_for(event.status), IntegrityError)
        assert engine.read(target.id, 0, 1) == b"\1"


@simulated()
async def test_live_tokens_are_counted_and_pin() -> None:
    with opened(manual=True) as engine:
        source, target = (engine.alloc(MIB, kind=HBM, device=device) for device in (0, 1))
        grant = engine.grant(target.id, 0, MIB, 3)
        peer, connected = engine.connect(0, engine.transports[0].endpoint)
        engine.step(0)
        fields = {"generation": grant.generation, "length": MIB, "access": 3, "key": grant.key}
        made, ready = engine.import_(peer, grant=grant.id, **fields)
        engine.step(0)
        engine.drain()
        assert connected.result().status == ready.result().status == 0
        outcome = engine.submit_one(OpKind.PUT, source.id, made, 0, 0, MIB)
        assert not isinstance(outcome, Event)
        assert (engine.device(0).live_tokens, engine.device(1).live_tokens) == (1, 0)
        with pytest.raises(UsageError, match="in flight"):
            engine.release(source.id)
        while engine.step(0, 100):
            pass
        engine.drain()
        assert outcome[1].result().status == 0
        assert engine.device(0).live_tokens == 0


@simulated(FAIL="memcpy:3+:507899")
async def test_a_driver_that_fails_is_an_error_and_not_a_hang() -> None:
    with opened() as engine:
        region = engine.alloc(MIB, kind=HBM, device=0)
        engine.write(region.id, 0, bytes(128 * KIB))
        with pytest.raises(Exception, match="driver failed") as caught:
            engine.read(region.id, 0, 10)
        assert caught.value.fields["vendor_status"] == 507899  # type: ignore[attr-defined]
        await released(engine, region)


# -- processes --------------------------------------------------------------------------------------------------------


def test_without_libraries_the_reason_is_told(tmp_path: Path) -> None:
    code = (
        "import os\nfrom kvxfer.errors import TransportUnavailable\n"
        "from kvxfer.native.engine import Engine, EngineConfig, MemoryKind\n"
        "engine = Engine(EngineConfig(engine_id=bytes(16), transports=()))\n"
        "for call in (lambda: engine.alloc(9, kind=MemoryKind.HBM, device=0), engine.device_count):\n"
        "    try:\n        call()\n"
        "    except TransportUnavailable as error:\n        print(error)\n"
        "engine.close()\n"
    )
    settings = environment(tmp_path) | {"KVXFER_CANN_LIBDIR": str(tmp_path / "nowhere")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=settings, capture_output=True, text=True, timeout=60, check=True
    )
    assert len(done.stdout.splitlines()) == 2
    assert done.stdout.count(str(tmp_path / "nowhere")) == 2
    assert "not there. Start the process from a shell" in done.stdout.splitlines()[0]


VICTIM = """
import sys
from kvxfer.native.engine import Engine, EngineConfig, MemoryKind
engine = Engine(EngineConfig(engine_id=bytes(16), transports=(), hbm_arena_bytes=16 << 20))
engine.alloc(16 << 20, kind=MemoryKind.HBM, device=0)
print(engine.device(0).free_bytes, flush=True)
sys.stdin.read()
"""


def test_a_killed_process_leaves_no_device_memory_behind(tmp_path: Path) -> None:
    settings = environment(tmp_path, HBM="16M")
    command = [sys.executable, "-c", VICTIM]
    for _ in range(2):  # the second finds all of it again
        with subprocess.Popen(
            command, cwd=ROOT, env=settings, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as victim:
            assert victim.stdout is not None
            assert victim.stdout.readline() == "0\n"
            victim.kill()
            assert victim.wait(10) == -9
    assert faults(tmp_path) == []
