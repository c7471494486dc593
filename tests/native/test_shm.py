"""The shm transport beyond what every transport promises: processes that freeze and die, memory without a descriptor,
mappings.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import resource
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvxfer.errors import Revoked
from kvxfer.native.engine import Event, EventKind, OpKind
from kvxfer.native.status import StatusCode
from tests.native.conformance import BOTH, KIB, MIB, Pair, Side, settled, short_directory, within
from tests.native.shm_owner import eventually

HERE = Path(__file__).parent
LENGTH = 256 * KIB


class Process:
    """A child that answers lines with lines."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def line(self) -> str:
        assert self.process.stdout is not None
        return (await within(self.process.stdout.readline())).decode().strip()

    async def ask(self, command: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(command.encode() + b"\n")
        return await self.line()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def freeze(self) -> None:
        """Stop all its threads; they stop one after the other."""
        self.signal(signal.SIGSTOP)
        tasks = Path(f"/proc/{self.process.pid}/task")

        def stopped() -> bool:
            return all((task / "stat").read_text().rpartition(") ")[2][0] == "T" for task in tasks.iterdir())

        await eventually(stopped)


@asynccontextmanager
async def child(script: str, what: dict[str, Any]) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(HERE / script), json.dumps(what)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=dict(os.environ),
    )
    try:
        yield Process(process)
    finally:
        if process.returncode is None:
            process.kill()
        await within(process.wait())
        process._transport.close()  # its own child may still hold the pipes


class Apart:
    """An initiator here, connected to an owner in another process."""

    def __init__(self, side: Side, owner: Process, told: dict[str, Any]) -> None:
        self.side, self.engine, self.owner, self.told = side, side.engine, owner, told
        self.mine, self.bytes = side.alloc(told["length"])
        self.peer = self.handle = 0

    async def connect(self) -> None:
        self.peer, connecting = self.engine.connect(1, self.told["endpoint"])
        assert (await within(connecting)).status == 0

    async def import_(self) -> Event:
        told = self.told
        self.handle, importing = self.engine.import_(
            self.peer,
            grant=told["grant"],
            generation=told["generation"],
            length=told["length"],
            access=BOTH,
            key=bytes.fromhex(told["key"]),
        )
        return await within(importing)

    def one(self, kind: OpKind, length: int, **more: Any) -> Any:
        return self.engine.submit_one(kind, self.mine.id, self.handle, 0, 0, length, **more)

    @property
    def counters(self) -> Any:
        return self.engine.counters().transports[1]


@asynccontextmanager
async def apart(how: str, length: int = LENGTH, *, theirs: dict[str, Any] | None = None, **changes: Any) -> Any:
    with short_directory() as directory:
        what = {"directory": str(directory), "how": how, "length": length, "settings": theirs or {}}
        async with child("shm_process.py", what) as owner:
            side = Side(directory, ("shm",), **changes)
            try:
                made = Apart(side, owner, json.loads(await owner.line()))
                await made.connect()
                yield made
            finally:
                side.close()


@asynccontextmanager
async def frozen_initiator(side: Side, grant: Any) -> AsyncIterator[Process]:
    """Another process that imported a grant of ours, stopped."""
    what = {
        "transport": "shm",
        "directory": side.engine.config.socket_dir,
        "endpoint": side.engine.transports[1].endpoint,
        "grant": grant.id,
        "generation": grant.generation,
        "length": grant.length,
        "key": grant.key.hex(),
        "secret": "",
    }
    async with child("victim.py", what) as initiator:
        assert await initiator.line() == "ready"
        await initiator.freeze()
        yield initiator


# -- copies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["alloc", "register"])
async def test_between_processes_each_byte_is_copied_once(how: str) -> None:
    async with apart(how) as pair:
        assert (await pair.import_()).status == 0
        pair.bytes[:] = 2
        for length in (100, 50 * KIB, LENGTH):
            assert (await settled(pair.one(OpKind.PUT, length))).status == 0
        assert await pair.owner.ask("sum") == str(2 * LENGTH)
        assert await pair.owner.ask("fill 7") == "done"
        assert (await settled(pair.one(OpKind.GET, LENGTH))).status == 0
        assert (pair.bytes == 7).all()
        assert pair.counters.copied_bytes == pair.counters.put_bytes + pair.counters.get_bytes
        assert pair.counters.put_bytes == 100 + 50 * KIB + LENGTH
        assert (pair.engine.mapping(pair.handle) is None) == (how == "register")


def mapped_bytes() -> int:
    """Shared memory in our page tables."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssShmem:")[2].split()[0]) * KIB


async def test_page_tables_are_filled_before_anybody_needs_them() -> None:
    async with apart("alloc", 16 * MIB) as pair:
        before = mapped_bytes()
        assert (await pair.import_()).status == 0
        await eventually(lambda: mapped_bytes() - before >= 16 * MIB)
        assert (await settled(pair.one(OpKind.PUT, MIB))).status == 0
        assert mapped_bytes() - before < 17 * MIB  # that was already there


async def test_a_mapping_that_goes_while_it_is_being_filled() -> None:
    async with apart("alloc", 64 * MIB) as pair:
        before = mapped_bytes()
        for _ in range(4):
            assert (await pair.import_()).status == 0
            assert (await within(pair.engine.close_peer(pair.peer))).kind == EventKind.PEER_CLOSED
            await eventually(lambda: mapped_bytes() - before < MIB)
            await pair.connect()


async def test_thousands_of_segments_by_cross_memory_attach() -> None:
    async with apart("register") as pair:
        assert (await pair.import_()).status == 0
        count = 3000
        pair.bytes[:] = np.arange(LENGTH, dtype=np.uint32).astype(np.uint8)
        offsets = np.arange(count, dtype=np.uint64) * 80
        rows = np.ascontiguousarray(np.stack([offsets, offsets[::-1], np.full(count, 64, np.uint64)], axis=1))
        for check in (False, True):
            event = await settled(pair.engine.submit(OpKind.PUT, pair.mine.id, pair.handle, rows, check=check))
            assert (event.status, event.bytes) == (0, count * 64)
        blocks = pair.bytes[: count * 80].reshape(count, 80)[:, :64].copy()
        pair.bytes[:] = 0
        for check in (False, True):
            rows[:, 0] = offsets[::-1]
            event = await settled(pair.engine.submit(OpKind.GET, pair.mine.id, pair.handle, rows, check=check))
            assert event.status == 0
            arrived = pair.bytes[: count * 80].reshape(count, 80)[:, :64]
            assert np.array_equal(arrived, blocks[::-1])


@pytest.mark.parametrize("where", ["ours", "theirs"])
async def test_without_cross_memory_attach(where: str) -> None:
    changes: dict[str, Any] = {"theirs": {"cross_memory_attach": False}}
    if where == "ours":
        changes = {"cross_memory_attach": False}
    async with apart("register", **changes) as pair:
        event = await pair.import_()
        assert (event.status, event.sys_errno) == (StatusCode.CMA_DENIED, 1)
    async with apart("alloc", **changes) as pair:
        assert (await pair.import_()).status == 0


async def test_adopting_copies_nothing() -> None:
    async with apart("alloc", 20 * MIB) as pair:
        assert (await pair.import_()).status == 0
        view = pair.engine.mapping(pair.handle)
        assert view is not None
        array = np.frombuffer(view, np.uint8)
        assert (array == 1).all()
        assert await pair.owner.ask("fill 5") == "done"
        assert (array == 5).all()
        assert pair.counters.copied_bytes == 0
        assert await pair.owner.ask("revoke") == "0"
        assert (array == 0).all(), "what the owner took back reads as zeros"
        assert await pair.owner.ask("sum") == str(5 * 20 * MIB)
        with pytest.raises(Revoked):
            pair.one(OpKind.PUT, 10)


async def test_no_room_for_a_descriptor() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with apart("alloc") as pair:
        taken = []
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 8, hard))
            while True:
                try:
                    taken.append(os.open("/dev/null", os.O_RDONLY))
                except OSError:
                    break
            event = await pair.import_()
            assert (event.status, event.sys_errno) == (StatusCode.FDS, errno.EMFILE)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for fd in taken:
                os.close(fd)
        assert (await pair.import_()).status == 0, "the connection is as good as before"
        assert (await settled(pair.one(OpKind.PUT, 100))).status == 0


def mappings() -> int:
    """Of shared regions, in this process."""
    return Path("/proc/self/maps").read_text().count("memfd:kvxfer")


async def test_grants_of_one_region_share_a_mapping() -> None:
    with short_directory() as directory:
        pair = Pair(directory, "shm")
        try:
            region, theirs = pair.owner.alloc(MIB)
            mine, _ = pair.initiator.alloc(MIB)
            peer = await pair.connect()
            before = mappings()
            for access in (3, 3, 1):
                grant = pair.owner.engine.grant(region.id, 0, MIB, access)
                await pair.import_(peer, grant)
            assert mappings() == before + 1 + 3, "one to copy through, and one each to look at"
            inside = pair.owner.engine.grant(region.id, 5000, 10_000, 3)
            handle = await pair.import_(peer, inside)
            assert mappings() == before + 1 + 4
            outcome = pair.initiator.engine.submit_one(OpKind.GET, mine.id, handle, 0, 0, 10_000)
            assert (await settled(outcome)).status == 0
            assert (await within(pair.owner.engine.revoke(inside.id))).status == 0
            assert mappings() == before + 1 + 3
            theirs = theirs[:0].copy()
            assert (await within(pair.owner.engine.release(region.id))).status == 0
            await eventually(lambda: mappings() == before - 1)
        finally:
            pair.close()


async def test_a_small_operation_overtakes_a_large_one() -> None:
    async with apart("alloc", 64 * MIB) as pair:
        assert (await pair.import_()).status == 0
        order: list[str] = []
        outcomes = [pair.one(OpKind.PUT, 64 * MIB), pair.one(OpKind.PUT, 100 * KIB)]
        for name, outcome in zip(("large", "small"), outcomes, strict=True):
            outcome[1].add_done_callback(lambda done, name=name: order.append(name))
        for outcome in outcomes:
            assert (await settled(outcome)).status == 0
        await asyncio.sleep(0)
        assert order == ["small", "large"]


# -- who is frozen, and who dies --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["alloc", "register"])
@pytest.mark.parametrize("then", [signal.SIGCONT, signal.SIGKILL])
async def test_a_frozen_initiator_keeps_the_memory(how: str, then: signal.Signals) -> None:
    with short_directory() as directory:
        side = Side(directory, ("shm",))
        try:
            region, _ = side.make(how, MIB)
            grant = side.engine.grant(region.id, 0, MIB, BOTH)
            async with frozen_initiator(side, grant) as initiator:
                releasing = side.engine.release(region.id)
                await asyncio.sleep(0.3)
                assert not releasing.done(), "it may go on at any time, and nobody can stop it"
                assert side.engine.counters().quarantined_grants == 1
                initiator.signal(then)
                assert (await within(releasing)).status == 0
        finally:
            side.close()


async def test_closing_does_not_wait_for_the_frozen_for_ever() -> None:
    with short_directory() as directory:
        side = Side(directory, ("shm",), cancel_ms=200)
        region, _ = side.register(MIB)
        grant = side.engine.grant(region.id, 0, MIB, BOTH)
        async with frozen_initiator(side, grant):
            started = time.monotonic()
            side.close()
            assert 0.1 < time.monotonic() - started < 2


async def test_a_frozen_owner_and_its_death() -> None:
    async with apart("alloc") as pair:
        assert (await pair.import_()).status == 0
        view = np.frombuffer(pair.engine.mapping(pair.handle), np.uint8)
        await pair.owner.freeze()
        pair.bytes[:] = 3
        assert (await settled(pair.one(OpKind.PUT, LENGTH))).status == 0, "nobody needs the owner for this"
        token, waiting = pair.one(OpKind.PUT, 100, notify=(1, 1))
        pair.engine.cancel(token)
        assert (await within(waiting)).status == StatusCode.CANCELLED
        _, waiting = pair.one(OpKind.PUT, LENGTH, notify=(2, 2))
        pair.owner.signal(signal.SIGKILL)
        assert (await within(waiting)).status == StatusCode.PEER_LOST
        assert (await pair.side.event(EventKind.PEER_DOWN)).id == pair.peer
        assert (view == 3).all(), "memory that is mapped outlives its owner"
        assert (await within(pair.engine.close_peer(pair.peer))).status == 0
        assert pair.counters.peers_lost == 1


def what_is_at(addresses: list[int]) -> set[str]:
    """What the kernel says is mapped there; `nothing` where nothing is."""
    rows = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    ranges = [([int(end, 16) for end in row[0].split("-")], " ".join(row[5:])) for row in rows]
    return {
        next((name or "zeros" for (low, high), name in ranges if low <= address < high), "nothing")
        for address in addresses
    }


async def test_addresses_of_a_view_that_outlives_its_import_go_with_it() -> None:
    async with apart("alloc") as pair:
        views, addresses = [], []
        for _ in range(20):
            assert (await pair.import_()).status == 0
            views.append(np.frombuffer(pair.engine.mapping(pair.handle), np.uint8))
            addresses.append(views[-1].__array_interface__["data"][0])
            pair.engine.release_import(pair.handle)
        await eventually(lambda: what_is_at(addresses) == {"zeros"})
        assert not any(view.any() for view in views)
        views.clear()
        assert what_is_at(addresses) == {"nothing"}


async def test_a_view_that_goes_while_its_import_goes_leaves_nothing() -> None:
    async with apart("alloc") as pair:
        addresses = []
        for _ in range(100):
            assert (await pair.import_()).status == 0
            view = np.frombuffer(pair.engine.mapping(pair.handle), np.uint8)
            addresses.append(view.__array_interface__["data"][0])
            pair.engine.release_import(pair.handle)
            del view
        await eventually(lambda: "zeros" not in what_is_at(addresses))


@asynccontextmanager
async def forked(process: Process) -> AsyncIterator[None]:
    """It has a child, which inherited all its sockets and mappings, and dies."""
    pid = int(await process.ask("fork"))
    try:
        process.signal(signal.SIGKILL)
        yield
    finally:
        os.kill(pid, signal.SIGKILL)


async def test_children_of_a_dead_owner_do_not_stand_for_it() -> None:
    async with apart("alloc") as pair:
        assert (await pair.import_()).status == 0
        async with forked(pair.owner):
            assert (await pair.side.event(EventKind.PEER_DOWN)).id == pair.peer


async def test_children_of_a_dead_initiator_do_not_stand_for_it() -> None:
    async with apart("alloc") as pair:
        side = pair.side
        grant = side.engine.grant(pair.mine.id, 0, LENGTH, BOTH)
        told = {"grant": grant.id, "generation": grant.generation, "length": LENGTH, "key": grant.key.hex()}
        told["endpoint"] = side.engine.transports[1].endpoint
        assert await pair.owner.ask(f"reach {json.dumps(told)}") == "0"
        async with forked(pair.owner):
            assert (await side.event(EventKind.GRANT_LOST)).id == grant.id
            assert (await within(side.engine.revoke(grant.id))).status == 0


async def test_idle_is_idle() -> None:
    def switches() -> int:
        total = 0
        for task in Path("/proc/self/task").iterdir():
            if (task / "comm").read_text().startswith("kvx-shm"):
                lines = (task / "status").read_text().splitlines()
                total += sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)
        assert total
        return total

    async with apart("alloc") as pair:
        assert (await pair.import_()).status == 0
        assert (await settled(pair.one(OpKind.PUT, 100, notify=(1, 1)))).status == 0
        await asyncio.sleep(0.05)
        before = switches()
        await asyncio.sleep(0.3)
        assert switches() == before
