"""Owners that lie to an initiator of the shm transport: whatever they answer, it is refused, and nothing stays open."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kvxfer.native.engine import EventKind
from kvxfer.native.status import StatusCode
from tests.native import kvsm
from tests.native.conformance import KIB, Side, short_directory, within
from tests.native.kvsm import Hung, Message, Speaker, Type


@contextmanager
def impostor(side: Side) -> Iterator[tuple[socket.socket, str]]:
    """A listener of ours, and the endpoint that leads to it."""
    path = Path(side.engine.config.socket_dir) / "false.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()
        listener.settimeout(5)
        yield listener, side.engine.transports[1].endpoint.partition(":")[0] + f":{path}"


KEY = bytes(range(16))


async def lied_to(side: Side, answer: Message, make: Callable[[], int] | None, key: bytes | None) -> StatusCode:
    """The outcome of an import that is answered so."""
    with impostor(side) as (listener, endpoint):
        peer, connecting = side.engine.connect(1, endpoint)
        with Speaker(listener.accept()[0], dialler=False) as speaker:
            speaker.other = speaker.receive().body[:16]
            speaker.send(Message(type=Type.HELLO, body=speaker.nonce + bytes(16)))
            assert (await within(connecting)).status == 0
            _, importing = side.engine.import_(peer, grant=1, generation=1, length=8 * KIB, access=3, key=KEY)
            asked = speaker.receive(KEY)
            assert (asked.type, asked.proved) == (Type.IMPORT, True)
            fds = () if make is None else (make(),)
            speaker.send(replace(answer, handle=asked.handle), key, fds=fds)
            for fd in fds:
                os.close(fd)
            event = await within(importing)
            await within(side.engine.close_peer(peer))
            assert side.engine.counters().imports == 0
            return StatusCode(event.status)


def memory_file(length: int, *, sealed: bool = True) -> int:
    fd = os.memfd_create("kvxfer", os.MFD_ALLOW_SEALING)
    os.truncate(fd, length)
    if sealed:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


def file8() -> int:
    return memory_file(8 * KIB)


GOOD = Message(type=Type.IMPORTED, how=kvsm.BY_MAPPING, body=kvsm.imported_body(0))
REFUSED = Message(type=Type.IMPORTED)
LIES: dict[str, tuple[Message, Callable[[], int] | None, bytes | None, StatusCode]] = {
    "the truth": (GOOD, file8, KEY, StatusCode.OK),
    "no proof": (GOOD, file8, None, StatusCode.PEER_LOST),
    "no file": (GOOD, None, KEY, StatusCode.PEER_LOST),
    "a file that can shrink": (GOOD, lambda: memory_file(8 * KIB, sealed=False), KEY, StatusCode.NOT_KVXFER),
    "a file that is too short": (GOOD, lambda: memory_file(4 * KIB), KEY, StatusCode.NOT_KVXFER),
    "beyond the end": (replace(GOOD, body=kvsm.imported_body(KIB)), file8, KEY, StatusCode.NOT_KVXFER),
    "overflow": (replace(GOOD, body=kvsm.imported_body(2**64 - 1)), file8, KEY, StatusCode.NOT_KVXFER),
    "a device": (GOOD, lambda: os.open("/dev/zero", os.O_RDWR), KEY, StatusCode.NOT_KVXFER),
    "a file with an address": (replace(GOOD, how=kvsm.BY_ATTACH), file8, KEY, StatusCode.PEER_LOST),
    "an address of nothing": (
        replace(GOOD, how=kvsm.BY_ATTACH, body=kvsm.imported_body(4096, 4096)), None, KEY, StatusCode.CMA_DENIED,
    ),
    "neither": (replace(GOOD, how=0), None, KEY, StatusCode.PEER_LOST),
    "a refusal": (replace(GOOD, how=0, status=StatusCode.UNKNOWN), None, None, StatusCode.UNKNOWN),
    "a refusal of nothing": (replace(GOOD, how=0, status=-5), None, None, StatusCode.PEER_LOST),
    "a refusal with a file": (replace(GOOD, status=StatusCode.UNKNOWN), file8, KEY, StatusCode.PEER_LOST),
    "a refusal only for the key": (replace(REFUSED, status=StatusCode.RANGE), None, None, StatusCode.PEER_LOST),
    "a refusal with the key": (replace(REFUSED, status=StatusCode.RANGE), None, KEY, StatusCode.RANGE),
    "a full owner": (replace(REFUSED, status=StatusCode.REFUSED), None, KEY, StatusCode.REFUSED),
    "a bad errno": (replace(REFUSED, status=StatusCode.SYSTEM, sys_errno=-1), None, KEY, StatusCode.PEER_LOST),
    "a cancel": (replace(REFUSED, status=StatusCode.CANCELLED), None, KEY, StatusCode.PEER_LOST),
    "an address that wraps": (
        replace(GOOD, how=kvsm.BY_ATTACH, body=kvsm.imported_body(2**64 - 4096, 4096)),
        *(None, KEY, StatusCode.NOT_KVXFER),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LIES)
async def test_owners_that_lie(name: str) -> None:
    answer, make, key, expected = LIES[name]
    with short_directory() as directory:
        side = Side(directory, ("shm",))
        before = len(os.listdir("/proc/self/fd"))
        try:
            assert await lied_to(side, answer, make, key) == expected
            assert len(os.listdir("/proc/self/fd")) == before
        finally:
            side.close()


async def test_an_answer_to_nobody_ends_the_connection() -> None:
    with short_directory() as directory:
        side = Side(directory, ("shm",))
        try:
            with impostor(side) as (listener, endpoint):
                peer, connecting = side.engine.connect(1, endpoint)
                with Speaker(listener.accept()[0], dialler=False) as speaker:
                    speaker.receive()
                    speaker.send(Message(type=Type.HELLO, body=speaker.nonce + bytes(16)))
                    assert (await within(connecting)).status == 0
                    speaker.send(replace(GOOD, handle=99), KEY)
                    down = await side.event(EventKind.PEER_DOWN)
                    assert down.id == peer
                    with pytest.raises(Hung):
                        speaker.receive()
        finally:
            side.close()
