"""Looking at memory after its region has gone: zeros, never the end of the process, and no addresses left over."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvxfer.errors import UnknownRegion
from kvxfer.native.engine import Engine, EngineConfig, RegionInfo
from tests.native.conformance import MIB, within


def engine() -> Engine:
    made = Engine(EngineConfig(engine_id=os.urandom(16), transports=(), copy_threads=1))
    made.attach(asyncio.get_running_loop(), lambda event: None)
    return made


def is_mapped(region: RegionInfo) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(part, 16) for part in line.split(" ", 1)[0].split("-"))
        if low <= region.address < high:
            return True
    return False


@pytest.fixture(autouse=True)
def _no_collection_in_between() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


async def test_a_view_outlives_its_region() -> None:
    made = engine()
    region = made.alloc(MIB)
    array = np.frombuffer(made.buffer(region), dtype=np.uint8)
    array[:] = 7
    await within(made.release(region.id))
    assert not array.any()
    array[5] = 1
    part = array[:100]
    del array
    assert is_mapped(region)
    assert part[5] == 1
    del part
    assert not is_mapped(region)
    made.close()


async def test_a_view_outlives_its_engine() -> None:
    made = engine()
    region = made.alloc(MIB)
    view = made.buffer(region)
    view[0] = 9
    made.close()
    assert view[0] == 0
    assert is_mapped(region)
    del view
    assert not is_mapped(region)


async def test_without_views_the_addresses_go_at_once() -> None:
    made = engine()
    seen, never_seen, at_close = (made.alloc(MIB) for _ in range(3))
    view = made.buffer(seen)
    assert made.buffer(seen).obj is view.obj
    del view
    await within(made.release(seen.id))
    await within(made.release(never_seen.id))
    assert not is_mapped(seen)
    assert not is_mapped(never_seen)
    view = made.buffer(at_close)
    del view
    made.close()
    assert not is_mapped(at_close)


async def test_only_live_allocations_can_be_looked_at() -> None:
    made = engine()
    region = made.alloc(MIB)
    await within(made.release(region.id))
    with pytest.raises(UnknownRegion):
        made.buffer(region)
    memory = np.zeros(4096, dtype=np.uint8)
    registered = made.register(memory.ctypes.data, 4096)
    with pytest.raises(UnknownRegion):
        made.buffer(registered)
    made.close()


async def test_views_that_go_while_regions_do() -> None:
    """Views dropped by another thread at any moment of a release or a close."""
    for round_ in range(60):
        made = engine()
        regions = [made.alloc(4096) for _ in range(4)]
        views = [made.buffer(region) for region in regions]
        dropper = threading.Thread(target=views.clear)
        dropper.start()
        if round_ % 2:
            await within(asyncio.gather(*(made.release(region.id) for region in regions)))
        made.close()
        dropper.join()
        assert not any(is_mapped(region) for region in regions) or round_ % 2 == 0
        del views
