"""What `guided` can fuzz: the control plane's streams (framing, codec, messages, sessions), descriptors and tickets.

Each ``check`` states what must hold for any bytes whatever: the typed error or a value, and a value survives the way
there and back.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from random import Random
from typing import Any

import msgpack

from kvxfer.descriptors import RemoteDescriptor, Ticket
from kvxfer.errors import UsageError
from kvxfer.wire.framing import PREAMBLE
from tests.fuzz import wire
from tests.fuzz.guided import Target

WIRE = ("framing", "codec", "messages", "session", "auth")
DEEP = ("[" * 300 + "]" * 300, "[" * 980 + "]" * 980, '{"a":' * 300 + "1" + "}" * 300)
NUMBERS = ("0", "-1", "1.5", "1e999", "-1e999", "NaN", "Infinity", str(2**64), str(10**400), "9" * 5000, "true", "null")
TEXTS = ('""', '"x"', '"rw"', '"hbm"', '"zz"', '"nan"', '"\\ud800"', '"' + "a" * 32 + '"', '"' + "a" * 300 + '"')
ODD = (*NUMBERS, *TEXTS, "[]", "{}", '[""]', '{"":[]}', '{"tcp":"x"}', '["a","a","a","a","a","a","a","a","a"]', *DEEP)


def change_bytes(data: bytes, kept: list[bytes], random: Random) -> bytes:
    """Bits, bytes, cuts, and the tail of another input."""
    stream = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 4, 8))):
        if not stream or random.random() < 0.1:
            other = random.choice(kept)
            stream[random.randrange(len(stream) + 1) :] = other[random.randrange(len(other) + 1) :]
        else:
            random.choice(wire.MUTATIONS)(stream, random)
    return bytes(stream[: wire.STREAM_BYTES_MAX])


def change_stream(data: bytes, kept: list[bytes], random: Random) -> bytes:
    """Frames with other values in them, or in another order, or other bytes."""
    choice = random.random()
    if choice < 0.3:
        return change_bytes(data, kept, random)
    if choice < 0.4:
        return (data + random.choice(kept))[: wire.STREAM_BYTES_MAX]
    frames, place = [], 0
    while place + 4 <= len(data):
        end = place + 4 + int.from_bytes(data[place : place + 4], "big")
        frames.append(data[place:end])
        place = end
    if not frames:
        return wire.mutant(kept, random)
    at = random.randrange(len(frames))
    change = wire.with_other_bytes if choice < 0.6 else wire.with_other_values
    frames[at] = change(frames[at], random)
    if random.random() < 0.2:
        frames.insert(random.randrange(len(frames) + 1), random.choice(frames))
    return b"".join(frames)[: wire.STREAM_BYTES_MAX]


def change_json(data: bytes, kept: list[bytes], random: Random) -> bytes:
    """A field with an odd value, without it, with another one; or other bytes."""
    if random.random() < 0.2:
        return change_bytes(data, kept, random)
    try:
        fields = json.loads(data)
        parts = {json.dumps(name): json.dumps(value) for name, value in fields.items()}
    except (ValueError, AttributeError, RecursionError):
        return change_bytes(random.choice(kept), kept, random)
    for _ in range(random.choice((1, 1, 2, 3))):
        name = random.choice((*parts, '"extra"', '"pinned"'))
        if random.random() < 0.15:
            parts.pop(name, None)
        else:
            parts[name] = random.choice(ODD)
    return ("{" + ",".join(f"{name}:{value}" for name, value in parts.items()) + "}").encode()


def check_stream(data: bytes) -> None:
    wire.check(data, Random(len(data)))
    wire.decoded(iter((data,)))  # as it is: also without the preamble that check() puts before it


def check_opening(data: bytes) -> None:
    """The first bytes of a connection, whoever sends them: in one piece and in single bytes."""
    outcomes = []
    for chunks in ((data,), [data[place : place + 1] for place in range(len(data))]):
        decoder = wire.FrameDecoder(wire.FRAME_BYTES_MAX, expect_preamble=True)
        seen: list[object] = []
        try:
            for chunk in chunks:
                seen.extend(decoder.feed(chunk))
        except wire.ProtocolError as wrong:
            seen.append(type(wrong))
            assert decoder.buffered == 0
        outcomes.append(seen)
    assert outcomes[0] == outcomes[1]


def check_values(kind: Any, raw: object) -> None:
    try:
        value = kind.from_dict(raw)
    except UsageError as wrong:
        assert len(str(wrong)) < 2000, "an error is for people to read"
        return
    again = kind.from_dict(json.loads(json.dumps(value.to_dict())))
    assert again == value
    secret = value.key if isinstance(value, RemoteDescriptor) else value.secret
    assert secret.hex() not in repr(value)
    assert repr(secret) not in repr(value)


def capability(kind: Any) -> Callable[[bytes], None]:
    """Descriptors and tickets, as msgpack and as JSON."""

    def check(data: bytes) -> None:
        with contextlib.suppress(ValueError, msgpack.UnpackException):
            check_values(kind, msgpack.unpackb(data, strict_map_key=False))
        text = data.decode("utf-8", "surrogateescape")
        with contextlib.suppress(ValueError, RecursionError):
            check_values(kind, json.loads(text))
        if kind is Ticket:
            with contextlib.suppress(UsageError):
                assert Ticket.from_json(Ticket.from_json(text).to_json()) == Ticket.from_json(text)

    return check


def descriptors() -> list[bytes]:
    plain = RemoteDescriptor(
        node_id="0a" * 16,
        incarnation="1b" * 16,
        engine_id="2c" * 16,
        region=1,
        grant=2,
        generation=3,
        length=4096,
        access=3,
        key=bytes(range(16)),
        endpoints={"tcp": ("10.0.0.1:7000", "[::1]:7000"), "shm": ("boot:/run/x",)},
        expires_in_s=5.0,
    )
    fields = plain.to_dict()
    return [json.dumps(fields).encode(), json.dumps(fields | {"pinned": True}).encode(), msgpack.packb(fields)]


def tickets() -> list[bytes]:
    plain = Ticket(
        node_id="0a" * 16,
        incarnation="1b" * 16,
        addresses=("10.0.0.1:7000",),
        posting="3d" * 16,
        secret=bytes(range(16)),
        request_id="request",
        expires_in_s=30.0,
    )
    return [plain.to_json().encode(), msgpack.packb(plain.to_dict())]


def openings() -> list[bytes]:
    return [PREAMBLE + stream for stream in wire.handshakes()] + [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00"]


FRAMED = tuple(f"kvxfer.wire.{name}" for name in WIRE)
CAPABILITIES = ("kvxfer.descriptors",)
TARGETS = {
    target.name: target
    for target in (
        Target("opening", check_opening, FRAMED, openings, change_bytes),
        Target("sessions", check_stream, FRAMED, wire.corpus, change_stream),
        Target("descriptors", capability(RemoteDescriptor), CAPABILITIES, descriptors, change_json),
        Target("tickets", capability(Ticket), CAPABILITIES, tickets, change_json),
    )
}
