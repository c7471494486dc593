"""Keys of device memory: the driver admits the processes that attached to a grant, and nobody else who has the key."""

from __future__ import annotations

import asyncio
import sys

import pytest

from kvxfer.native._shim import ffi, lib
from kvxfer.native.engine import OpKind
from tests.native.hixl_process import LIMIT_S, MIB, Near, control, other, settle, told, within
from tests.native.simulated import simulated

pytestmark = pytest.mark.once


def key_of(address: int, length: int, device: int) -> str:
    """The key under which the driver knows an arena; asking again changes nothing."""
    api = lib.kvx_ascend_get(ffi.NULL, 0)
    key = ffi.new("char[65]")
    memory = ffi.cast("void *", address)
    assert api.ipc_export(device, memory, length, lib.KVX_ASCEND_IPC_NOBODY, key, ffi.NULL) == 0
    return bytes(ffi.string(key)).decode()


@simulated()
async def test_whoever_attached_may_map_and_a_stranger_with_the_key_may_not() -> None:
    control(HANG="connect")  # so it went by the mapping, or not at all
    async with other(device_ipc=True) as initiator, Near(device_ipc=True, hbm_arena_bytes=2 * MIB) as near:
        mine = near.alloc(2 * MIB, device=1)
        grant = near.engine.grant(mine.id, 0, 2 * MIB, 3)
        key = key_of(mine.address, 2 * MIB, 1)
        command = [sys.executable, "-m", "tests.native.ascend_table", "ipc_peer", key]
        for attached in (False, True):
            if attached:
                await initiator.call("reach", endpoint=near.endpoint, grant=told(grant, 2 * MIB))
                assert await initiator.call("put", length=2 * MIB, value=2, wait=True) == 0
                assert (near.read(mine) == 2).all()
            stranger = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
            _, said = await within(stranger.communicate(), 60)
            assert stranger.returncode != 0
            assert b"ipc_import: INVALID" in said


@simulated()
async def test_a_grant_that_is_revoked_before_the_answer_ends() -> None:
    """The driver is asked first, which may take long: a revoke in that moment comes behind the answer."""
    async with other(device_ipc=True) as initiator, Near(device_ipc=True) as near:
        mine = near.alloc(MIB, device=1)
        grant = near.engine.grant(mine.id, 0, MIB, 3)
        control(HANG="ipcpid")
        await settle()
        reaching = asyncio.ensure_future(initiator.call("reach", endpoint=near.endpoint, grant=told(grant, MIB)))
        async with asyncio.timeout(LIMIT_S):
            while near.engine.attached(grant.id) < 1:
                await asyncio.sleep(0.002)
        quiet = near.engine.revoke(grant.id)
        await asyncio.sleep(0)
        assert not quiet.done(), "whoever asks may get in yet"
        control()
        await reaching
        assert (await within(quiet)).status == 0
        assert near.engine.attached(grant.id) == -1


@simulated()
async def test_a_driver_that_refuses_leaves_the_network() -> None:
    async with other(device_ipc=True) as owner, Near(device_ipc=True) as near:
        control(owner.pid, FAIL="ipcpid:1:507899")
        await settle()
        mine = near.alloc(MIB, fill=3)
        assert await near.move(OpKind.PUT, mine, await near.reach(owner, MIB)) == 0
        [row] = [row for row in near.engine.counters().transports if row.name == "hixl"]
        assert row.put_bytes == MIB
