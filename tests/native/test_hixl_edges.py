"""hixl between processes: what dies under a copy, cards that are not well, IPv6, and memory of the application."""

from __future__ import annotations

import os
import signal
import socket
from typing import Any

import pytest

from kvxfer.errors import KvxferError, TransportError, TransportUnavailable
from kvxfer.native._shim import ffi, lib
from kvxfer.native.engine import EventKind, GrantInfo, MemoryKind, OpKind
from kvxfer.native.status import StatusCode
from tests.native.hixl_process import MIB, Near, Other, control, other, settle, told, within
from tests.native.simulated import simulated

pytestmark = pytest.mark.once
PUT, GET = OpKind.PUT, OpKind.GET
BIG = 16 * MIB


async def owner_dies(device_ipc: bool) -> None:
    async with Near(device_ipc=device_ipc) as near:
        mine = near.alloc(BIG)
        async with other(device_ipc=device_ipc) as owner:
            import_ = await near.reach(owner, BIG)
            assert await near.move(PUT, mine, import_) == 0
            control(STALL=1)
            await settle()
            _, future = near.start(GET, mine, import_)
            owner.signal(signal.SIGKILL)
            assert (await within(future)).status == StatusCode.PEER_LOST
            near.fill(mine, 6)
            control()
            await settle()
            assert (near.read(mine) == 6).all(), "not a byte after its end"
            await near.event(EventKind.PEER_DOWN)
        async with other(device_ipc=device_ipc) as owner:
            assert await near.move(PUT, mine, await near.reach(owner, BIG)) == 0


async def initiator_dies(device_ipc: bool) -> None:
    async with Near(device_ipc=device_ipc) as near:
        mine = near.alloc(BIG, device=1)
        grant: GrantInfo = near.engine.grant(mine.id, 0, BIG, 3)
        async with other(device_ipc=device_ipc) as initiator:
            await initiator.call("reach", endpoint=near.endpoint, grant=told(grant, BIG))
            control(STALL=1)
            await settle()
            await initiator.call("put", length=BIG, value=3, wait=False)
            initiator.signal(signal.SIGKILL)
            await near.event(EventKind.GRANT_LOST)
            assert (await within(near.engine.revoke(grant.id))).status == 0
            near.fill(mine, 9)
            control()
            await settle()
            assert (near.read(mine) == 9).all()


@simulated()
async def test_an_owner_dies_under_a_copy() -> None:
    await owner_dies(device_ipc=True)


@simulated()
async def test_an_initiator_dies_while_it_writes() -> None:
    for device_ipc in (True, False):
        await initiator_dies(device_ipc)


@simulated()
async def test_a_card_that_is_not_well_is_not_connected() -> None:
    async with other() as owner, Near() as near:
        mine = near.alloc(MIB, fill=2)
        import_ = await near.reach(owner)
        control(owner.pid, DEVICE_LOST=1)
        control(os.getpid(), HANG="connect")  # a connect that is tried all the same would say TIMEOUT
        await settle()
        status = await near.move(PUT, mine, import_)
        assert status == StatusCode.DEVICE, StatusCode(status)
        control(owner.pid)
        control(os.getpid())
        await settle()
        assert await near.move(PUT, mine, import_) == 0


class Own:
    """Memory of a card that the application allocated."""

    def __init__(self, length: int, device: int) -> None:
        self.api = lib.kvx_ascend_get(ffi.new("char[256]"), 256)
        self.device = device
        memory = ffi.new("void **")
        assert self.api.device_use(device, ffi.NULL) == 0
        assert self.api.mem_alloc(device, lib.KVX_ASCEND_DEVICE, length, memory, ffi.NULL) == 0
        self.memory: Any = memory[0]
        self.address = int(ffi.cast("uintptr_t", self.memory))

    def free(self) -> None:
        assert self.api.mem_free(self.device, lib.KVX_ASCEND_DEVICE, self.memory, ffi.NULL) == 0


async def moves(near: Near, owner: Other, mine: Any, value: int) -> None:
    near.fill(mine, value)
    grant = await owner.call("offer", length=mine.length, kind="HBM", device=1)
    import_ = await near.import_(await near.connect(owner.endpoint), grant)
    assert await near.move(PUT, mine, import_) == 0
    assert (await owner.call("look", grant=grant["grant"]))[value] == mine.length
    await owner.call("fill", grant=grant["grant"], value=value + 1)
    assert await near.move(GET, mine, import_) == 0
    assert (near.read(mine) == value + 1).all()


@simulated()
async def test_memory_of_the_application() -> None:
    async with other() as owner, Near() as near:
        own = Own(4 * MIB, 0)
        mine = near.engine.register(own.address, 4 * MIB, kind=MemoryKind.HBM, device=0)
        await moves(near, owner, mine, 3)
        assert (await within(near.engine.release(mine.id))).status == 0
    own.free()  # whether the library let go of it on release is its own affair: after close it has


@simulated(CORRUPT="1")
async def test_what_cannot_be_checked_is_refused() -> None:
    """The library says COMPLETED of a transfer with a wrong byte, so nobody may be told that it was checked."""
    async with other() as owner, Near() as near:
        mine = near.alloc(MIB, fill=5)
        import_ = await near.reach(owner)
        with pytest.raises(KvxferError) as caught:
            near.start(PUT, mine, import_, check=True)
        assert caught.value.status == StatusCode.UNSUPPORTED
        assert await near.move(PUT, mine, import_) == 0


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 on this host's loopback")
@simulated()
async def test_ipv6() -> None:
    for device_ipc in (True, False):
        both = other(hixl_bind="::1", device_ipc=device_ipc), Near(hixl_bind="[::1]", device_ipc=device_ipc)
        async with both[0] as owner, both[1] as near:
            assert owner.endpoint.startswith("[::1]:")
            await moves(near, owner, near.alloc(MIB), 1)


@simulated()
async def test_addresses_that_it_cannot_take() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for changes, words in (
            ({"hixl_bind": "0.0.0.0"}, '"0.0.0.0".*set data_bind.*or let data_advertise name one first'),
            ({"hixl_bind": "192.0.2.1"}, '"192.0.2.1" port 0: .*set data_bind'),
            ({"hixl_port": port}, f"port {port}: Address already in use; set hixl_port"),
        ):
            with pytest.raises(TransportUnavailable, match=words):
                Near(**changes)


@simulated()
async def test_why_memory_of_a_card_is_refused() -> None:
    """The first region of a card opens the library's engine, and is told what that one said."""
    for options, fault, kind, words in (
        ("Nothing=1", "", TransportUnavailable, r'no engine option "Nothing" \(hixl_options\)'),
        (
            "RdmaTrafficClass=many",
            "",
            TransportUnavailable,
            "value in hixl_options may be wrong. .*vendor_status=103900",
        ),
        ("", "init:*:503900", TransportUnavailable, "injected.*vendor_status=503900"),
        ("", "register:*:503900", TransportError, "injected.*vendor_status=503900"),
    ):
        control(FAIL=fault)
        await settle()
        async with Near(hixl_options=options) as near:
            with pytest.raises(KvxferError, match=words) as caught:
                near.alloc(MIB)
            assert type(caught.value) is kind
            control()
            await settle()
            assert near.engine.alloc(MIB, kind=MemoryKind.DRAM).length == MIB
