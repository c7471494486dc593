"""K07: memory is registered by one rule, as a whole or not at all, and never with its error dropped."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import kvxfer
from kvxfer.errors import AlignmentError, InvalidLength, OverlapError, RegistrationError, UsageError
from tests.cases.facts import pattern
from tests.cases.harness import BOTH
from tests.nodes import node, until
from tests.support.nodes import two_nodes

pytestmark = [pytest.mark.once, pytest.mark.timeout(120)]
PAGE = 4096


@BOTH
async def test_c38_an_empty_buffer_is_no_region(transport: str) -> None:
    async with two_nodes([transport]) as (a, b):
        before = a.plane.engine.counters()
        memory = np.zeros(PAGE, np.uint8)
        for wrong in (0, -1, 1.5, "4096", True, 1 << 70):
            with pytest.raises(InvalidLength):
                await a.alloc(wrong)  # type: ignore[arg-type]
            with pytest.raises((InvalidLength, ValueError)):
                await a.register(address=memory.ctypes.data, length=wrong)  # type: ignore[arg-type]
        for empty in (np.zeros(0, np.uint8), b"", bytearray()):
            with pytest.raises(InvalidLength):
                await a.register(empty)
        after = a.plane.engine.counters()
        assert (after.regions, after.grants) == (before.regions, before.grants), "nothing was published"
        await b.connect(a.addresses)
        source, target = await a.alloc(PAGE), await b.alloc(PAGE)
        source.array[:] = 5
        await a.put(source, target.descriptor("w"))
        assert (target.array == 5).all()


@BOTH
async def test_c39_the_same_range_twice_and_a_part_of_it(transport: str) -> None:
    async with two_nodes([transport]) as (a, b):
        memory = np.frombuffer(bytearray(pattern(39, 0, 8 * PAGE)), np.uint8)
        first, second = await a.register(memory), await a.register(memory)
        assert first.id == second.id
        target = await b.alloc(memory.nbytes)
        for part in (memory[PAGE : 3 * PAGE], memory[: 4 * PAGE], memory[PAGE:]):
            with pytest.raises(OverlapError) as overlap:
                await a.register(part)
            assert overlap.value.fields["conflict"] == first.id
            assert hex(memory.ctypes.data) in str(overlap.value), "the range that is in the way"
            assert str(memory.nbytes) in str(overlap.value)
        await first.release()
        await a.put(second, target.descriptor("w"))
        assert target.array.tobytes() == memory.tobytes(), "usable until the second release"
        await second.release()
        third = await a.register(memory)
        assert third.id != second.id
        await third.release()


@BOTH
async def test_c41_all_or_none_are_registered(transport: str) -> None:
    sizes = [PAGE * (number + 1) for number in range(5)]
    memories = [np.zeros(size, np.uint8) for size in sizes]
    async with two_nodes([f"fault+{transport}"], fault_spec="register_fail=3") as (a, _):
        before = a.plane.engine.counters()
        assert a.unready == ""
        with pytest.raises(RegistrationError) as failed:
            await a.register_many(memories)
        error = failed.value
        assert (error.fields["index"], error.fields["registered"], error.fields["of"]) == (2, 2, 5)
        assert error.fields["bytes"] == sizes[2]
        assert error.fields["errno"]
        assert error.hint
        after = a.plane.engine.counters()
        assert (after.regions, after.registered_bytes) == (before.regions, before.registered_bytes)
        assert after.grants == before.grants, "no descriptor was published"
        assert "memory could not be registered" in a.unready, "not ready, and it says why"
        assert len(await a.register_many(memories)) == 5
        assert a.unready == ""


async def test_c41_the_daemon_is_not_ready_and_says_why() -> None:
    memories = [np.zeros(PAGE, np.uint8) for _ in range(5)]
    async with node() as server:
        config = replace(server.config, transports=("fault+shm",), fault_spec="register_fail=3")
        async with kvxfer.Client(server.socket_path, config=config, name="prefill") as client:
            assert server._readyz().status == 200
            with pytest.raises(RegistrationError):
                await client.register_many(memories)
            await until(lambda: server._readyz().status == 503)
            said = server._readyz().body.decode()
            assert said.startswith("prefill")
            assert "memory could not be registered" in said
            assert "kvxfer_workers_unready 1.0" in server._scrape().body.decode()
            assert len(await client.register_many(memories)) == 5
            await until(lambda: server._readyz().status == 200)
            client._reporter.not_registered(RegistrationError("and then the worker ends"))
            await until(lambda: server._readyz().status == 503)
        await until(lambda: server._readyz().status == 200)


def at_odd_offset() -> tuple[Any, Any]:
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    address = libc.malloc(3 * PAGE)
    whole = (ctypes.c_char * (2 * PAGE)).from_address(address + 37)
    return np.frombuffer(whole, np.uint8), lambda: libc.free(ctypes.c_void_p(address))


@BOTH
async def test_c42_ordinary_memory_of_every_kind(transport: str) -> None:
    async with two_nodes([transport]) as (a, b):
        anonymous = mmap.mmap(-1, 2 * PAGE)
        odd, free = at_odd_offset()
        sources = {
            "malloc": odd,
            "mmap": np.frombuffer(anonymous, np.uint8),
            "bytearray": bytearray(2 * PAGE),
            "odd slice": np.zeros(2 * PAGE + 3, np.uint8)[3:],
            "shm": (await a.alloc(2 * PAGE)).array,
        }
        for number, (name, source) in enumerate(sources.items()):
            data = pattern(42, number, 2 * PAGE)
            memoryview(source).cast("B")[:] = data
            target = await b.alloc(2 * PAGE)
            region = await a.register(source) if name != "shm" else None
            if region is None:
                region = await a.alloc(2 * PAGE)
                region.array[:] = source
            await a.put(region, target.descriptor("w"))
            assert target.array.tobytes() == data, name
            target.array[:] = 0
            await a.get(region, target.descriptor("r"))
            assert not any(memoryview(source).cast("B")) or name == "shm", name
            await region.release()
        free()


@BOTH
async def test_c42_a_device_that_wants_alignment(transport: str) -> None:
    alignment = 64 << 10
    async with two_nodes([f"fault+{transport}"], fault_spec=f"align={alignment}") as (a, b):
        whole = np.zeros(4 * alignment, np.uint8)
        skip = -whole.ctypes.data % alignment
        with pytest.raises(AlignmentError) as unaligned:
            await a.register(whole[skip + PAGE : skip + PAGE + alignment])
        assert unaligned.value.fields["required"] == alignment
        assert unaligned.value.fields["got"] == PAGE
        for length in (1, PAGE, 3 * PAGE + 5, 3 << 20):
            source, target = await a.alloc(length), await b.alloc(length)
            assert source.info.address % alignment == 0
            source.array[:] = 7
            await a.put(source, target.descriptor("w"))
            assert (target.array == 7).all()
        region = await a.register(whole[skip : skip + alignment])
        await region.release()


@BOTH
async def test_c111_objects_are_not_bytes(transport: str) -> None:
    """A peer's put into an array of Python objects ended its owner."""
    async with two_nodes([transport]) as (_, b):
        before = b.plane.engine.counters().regions
        for wrong in (
            np.array([object(), "x", [1], {}], dtype=object),
            np.zeros(4, dtype=[("a", "i4"), ("o", "O")]),
            memoryview(np.array([object()], dtype=object)),
            (ctypes.c_void_p * 4)(),
        ):
            with pytest.raises(UsageError, match="holds objects or addresses"):
                await b.register(wrong)
        assert b.plane.engine.counters().regions == before
