"""Strangers at the shm socket, and initiators that lie: no byte moves, nothing leaks, honest peers are served."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import random
import struct
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from kvxfer.native.engine import EventKind
from kvxfer.native.status import StatusCode
from tests.native import kvsm
from tests.native.conformance import READ, within
from tests.native.kvsm import Message, Speaker, Type
from tests.native.shm_owner import HANDLE, LENGTH, attached, eventually, import_of, owner, serves

# -- the protocol as it is ------------------------------------------------------------


async def test_an_honest_initiator() -> None:
    async with owner() as one:
        speaker, answer = attached(one)
        with speaker:
            assert answer.how == kvsm.BY_MAPPING
            [fd] = answer.fds
            with mmap.mmap(fd, 3 * LENGTH) as memory:
                at = struct.unpack_from("<Q", answer.body)[0]
                assert at == LENGTH
                memory[at : at + 4] = b"done"
            os.close(fd)
            assert bytes(one.bytes[LENGTH : LENGTH + 4]) == b"done"
            notify = Message(type=Type.NOTIFY, handle=HANDLE, body=kvsm.notify_body(77, 2**63, 4))
            speaker.send(notify, one.grant.key)
            told = speaker.receive(one.grant.key)
            assert (told.type, told.status, told.proved) == (Type.NOTIFIED, 0, True)
            assert struct.unpack_from("<Q", told.body)[0] == 77
            event = await one.event(EventKind.NOTIFY)
            assert (event.id, event.tag, event.value) == (one.grant.id, 2**63, 4)
            speaker.send(Message(type=Type.DROP, handle=HANDLE), one.grant.key)
            await eventually(lambda: one.engine.attached(one.grant.id) == 0)
            speaker.send(Message(type=Type.BYE))
        await eventually(lambda: one.count("peers_accepted") == 0)
        assert not [event for event in one.events if event.kind == EventKind.GRANT_LOST]
        assert one.count("protocol_errors") == 0


async def test_a_grant_is_quiet_when_the_initiator_says_so() -> None:
    async with owner() as one:
        speaker, answer = attached(one)
        with speaker:
            os.close(answer.fds[0])
            revoking = one.engine.revoke(one.grant.id)
            asked = speaker.receive(one.grant.key)
            assert (asked.type, asked.handle, asked.proved) == (Type.REVOKE, HANDLE, True)
            speaker.send(Message(type=Type.NOTIFY, handle=HANDLE, body=kvsm.notify_body(1, 1, 1)), one.grant.key)
            assert speaker.receive(one.grant.key).status == StatusCode.REVOKED
            await asyncio.sleep(0.05)
            assert not revoking.done()
            assert one.engine.counters().quarantined_grants == 1
            speaker.send(Message(type=Type.REVOKED, handle=HANDLE), one.grant.key)
            assert (await within(revoking)).status == 0


async def test_who_got_a_region_is_told_that_it_goes() -> None:
    async with owner() as one:
        speaker, answer = attached(one)
        with speaker:
            os.close(answer.fds[0])
            region = struct.unpack_from("<QQ", answer.body)[1]
            assert region == one.region.id
            speaker.send(Message(type=Type.DROP, handle=HANDLE), one.grant.key)
            await eventually(lambda: one.engine.attached(one.grant.id) == 0)
            one.bytes = one.bytes.copy()
            assert (await within(one.engine.release(region))).status == 0
            told = speaker.receive()
            assert (told.type, struct.unpack_from("<QQ", told.body)[1]) == (Type.FORGET, region)


async def test_a_read_only_grant_cannot_be_mapped_writable() -> None:
    async with owner(access=READ) as one:
        speaker, answer = attached(one)
        with speaker:
            [fd] = answer.fds
            with pytest.raises(PermissionError):
                mmap.mmap(fd, 3 * LENGTH)
            with mmap.mmap(fd, 3 * LENGTH, prot=mmap.PROT_READ) as memory:
                assert memory[0] == 3
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.write(fd, b"x")
            os.close(fd)


# -- initiators that lie ------------------------------------------------------------


def rubbish(rng: random.Random, speaker: Speaker, good: bytes) -> bytes:
    """Random bytes, or a good message with a few of its bits flipped, cut or lengthened."""
    if rng.random() < 0.3:
        return rng.randbytes(rng.randint(1, 300))
    damaged = bytearray(good)
    for _ in range(rng.randint(1, 4)):
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    length = rng.choice([len(damaged), rng.randint(1, len(damaged)), len(damaged)])
    return bytes(damaged[:length]) + rng.randbytes(rng.choice([0, 0, 5]))


async def test_random_and_damaged_messages() -> None:
    rng = random.Random(11)
    async with owner() as one:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(150):
            with kvsm.dial(one.endpoint) as speaker:
                messages: list[tuple[Message, bytes | None]] = [(Message(type=Type.HELLO, body=bytes(32)), None)]
                if rng.random() < 0.7:
                    speaker.greet()
                    kinds = [Type.IMPORT, Type.NOTIFY, Type.REVOKED, Type.DROP, Type.BYE, Type.REVOKE]
                    messages = [(replace(import_of(one.grant), type=kind), one.grant.key) for kind in kinds]
                message, key = rng.choice(messages)
                with contextlib.suppress(BrokenPipeError):
                    speaker.socket.send(rubbish(rng, speaker, speaker.encode(message, key)))
        await eventually(lambda: one.count("peers_accepted") == 0)
        assert one.count("protocol_errors") > 75
        assert await serves(one)
        await eventually(lambda: len(os.listdir("/proc/self/fd")) == before)


WRONG = {
    "another magic": Message(type=Type.DROP, handle=HANDLE, magic=1),
    "another version": Message(type=Type.DROP, handle=HANDLE, version=2),
    "no type": Message(type=0),
    "unknown type": Message(type=77),
    "a message of owners": Message(type=Type.REVOKE, handle=HANDLE),
    "a second hello": Message(type=Type.HELLO, body=bytes(32)),
    "an old counter": Message(type=Type.BYE, counter=1),
    "a counter to come": Message(type=Type.BYE, counter=9),
    "a handle that is not": Message(type=Type.DROP, handle=6),
    "giving back what nobody asked for": Message(type=Type.REVOKED, handle=HANDLE),
    "notifying through nothing": Message(type=Type.NOTIFY, handle=8),
}


@pytest.mark.parametrize("name", WRONG)
async def test_what_must_not_be_said(name: str) -> None:
    async with owner() as one:
        speaker, answer = attached(one)
        with speaker:
            os.close(answer.fds[0])
            speaker.send(WRONG[name], one.grant.key)
            assert speaker.closed()
            assert one.count("protocol_errors") == 1
            assert one.engine.attached(one.grant.id) == 1, "who was let in may be copying until it is gone"
        lost = await one.event(EventKind.GRANT_LOST)
        assert lost.id == one.grant.id
        assert await serves(one)


@pytest.mark.parametrize("kind", [Type.NOTIFY, Type.DROP])
async def test_every_message_is_proved(kind: Type) -> None:
    async with owner() as one:
        speaker, answer = attached(one)
        with speaker:
            os.close(answer.fds[0])
            speaker.send(Message(type=kind, handle=HANDLE, body=kvsm.notify_body(1, 2, 3)), bytes(16))
            assert speaker.closed()
        assert one.count("notifies_received") == 0


async def test_a_recorded_message_is_worth_nothing_on_another_connection() -> None:
    async with owner() as one:
        first, answer = attached(one)
        with first, kvsm.dial(one.endpoint) as second:
            os.close(answer.fds[0])
            second.greet()
            first.sent = second.sent
            second.socket.send(first.encode(import_of(one.grant), one.grant.key))
            assert second.receive().status == StatusCode.KEY
            assert one.count("refused") == 1


async def test_descriptors_that_nobody_asked_for_are_closed() -> None:
    async with owner() as one:
        before = len(os.listdir("/proc/self/fd"))
        for count in (1, 3, 8):
            with kvsm.dial(one.endpoint) as speaker, tempfile.TemporaryFile() as file:
                speaker.greet()
                speaker.send(import_of(one.grant), one.grant.key, fds=(file.fileno(),) * count)
                assert speaker.closed()
        await eventually(lambda: len(os.listdir("/proc/self/fd")) == before)
        assert one.count("protocol_errors") == 3


async def test_another_version_is_told() -> None:
    async with owner() as one:
        with kvsm.dial(one.endpoint) as speaker:
            assert speaker.greet(version=2).status == StatusCode.VERSION
            assert speaker.closed()


async def test_silence_ends() -> None:
    async with owner(handshake_ms=80) as one:
        with contextlib.ExitStack() as stack:
            silent = [stack.enter_context(kvsm.dial(one.endpoint)) for _ in range(70)]
            assert await serves(one), "more of them than may wait at once, and yet somebody gets in"
            assert all(speaker.closed() for speaker in silent)
        assert one.count("protocol_errors") == 70
        assert one.count("peers_accepted") == 0


async def test_more_connections_than_allowed() -> None:
    async with owner(accepted_max=2) as one:
        with kvsm.dial(one.endpoint) as first, kvsm.dial(one.endpoint) as second, kvsm.dial(one.endpoint) as third:
            assert (first.greet().status, second.greet().status) == (0, 0)
            assert third.greet().status == StatusCode.REFUSED
            assert third.closed()
            first.send(Message(type=Type.BYE))
        await eventually(lambda: one.count("peers_accepted") == 0)
        assert await serves(one)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
async def test_another_user_is_turned_away() -> None:
    async with owner() as one:
        path = Path(one.endpoint.partition(":")[2])
        assert one.mode_of_socket(0o755) == 0o600
        for mode, expected in ((0o600, "no door"), (0o666, "hung up")):
            os.chmod(path, mode)
            assert await stranger(path) == expected
        assert one.count("refused") == 1


async def stranger(path: Path) -> str:
    """How a process of another user fares."""
    script = (
        "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        "try:\n s.connect(sys.argv[1])\nexcept PermissionError: print('no door')\n"
        "else: s.settimeout(5); print('hung up' if s.recv(200) == b'' else 'let in')"
    )
    command = [sys.executable, "-c", script, str(path)]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    output, _ = await within(process.communicate())
    return output.decode().strip()
