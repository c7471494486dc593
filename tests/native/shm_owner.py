"""An owner for the tests of the shm socket: its grant lies between memory that nobody may touch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from kvxfer.native.engine import GrantInfo, OpKind
from tests.native import kvsm
from tests.native.conformance import BOTH, KIB, Side, settled, short_directory, within
from tests.native.kvsm import Message, Speaker, Type

LENGTH = 64 * KIB
HANDLE = 5


class Owner(Side):
    """An engine that grants a region between memory that nobody may touch."""

    def __init__(self, directory: Path, *, access: int = BOTH, **changes: Any) -> None:
        super().__init__(directory, ("shm",), **changes)
        self.region, self.bytes = self.alloc(3 * LENGTH)
        self.bytes[:] = 3
        self.grant = self.engine.grant(self.region.id, LENGTH, LENGTH, access)
        self.endpoint = self.engine.transports[1].endpoint

    def count(self, name: str) -> int:
        return int(getattr(self.engine.counters().transports[1], name))

    def mode_of_socket(self, directory_mode: int) -> int:
        """Its permissions; others may look into its directory from now on."""
        path = Path(self.endpoint.partition(":")[2])
        path.parent.chmod(directory_mode)
        return path.stat().st_mode & 0o777

    def outside_is_untouched(self) -> bool:
        return bool((self.bytes[:LENGTH] == 3).all() and (self.bytes[2 * LENGTH :] == 3).all())


@asynccontextmanager
async def owner(**changes: Any) -> AsyncIterator[Owner]:
    with short_directory() as directory:
        made = Owner(directory, **changes)
        try:
            yield made
            assert made.outside_is_untouched()
        finally:
            made.close()


async def eventually(condition: Callable[[], bool]) -> None:
    async def wait() -> None:
        while not condition():
            await asyncio.sleep(0.002)

    await within(wait())


def import_of(grant: GrantInfo, **changes: Any) -> Message:
    values = {"grant": grant.id, "generation": grant.generation, "length": grant.length, "access": grant.access}
    return Message(type=Type.IMPORT, handle=HANDLE, body=kvsm.import_body(**(values | changes)))


def attached(one: Owner) -> tuple[Speaker, Message]:
    """A connection with an import, as an honest initiator has it."""
    speaker = kvsm.dial(one.endpoint)
    assert speaker.greet().status == 0
    speaker.send(import_of(one.grant), one.grant.key)
    answer = speaker.receive(one.grant.key)
    assert (answer.type, answer.status, answer.handle, answer.proved) == (Type.IMPORTED, 0, HANDLE, True)
    return speaker, answer


async def serves(one: Owner) -> bool:
    """Does the owner still serve another engine that holds the key?"""
    other = Side(Path(one.engine.config.socket_dir), ("shm",))
    try:
        mine, mine_bytes = other.alloc(KIB)
        mine_bytes[:] = 9
        peer, connecting = other.engine.connect(1, one.endpoint)
        assert (await within(connecting)).status == 0
        grant = one.grant
        handle, importing = other.engine.import_(
            peer, grant=grant.id, generation=grant.generation, length=grant.length, access=grant.access, key=grant.key
        )
        assert (await within(importing)).status == 0
        outcome = other.engine.submit_one(OpKind.PUT, mine.id, handle, 0, 0, KIB)
        return (await settled(outcome)).status == 0 and bool((one.bytes[LENGTH : LENGTH + KIB] == 9).all())
    finally:
        other.close()
