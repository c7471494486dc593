"""Cutting both protocols into frames: in whatever pieces the bytes come, and nothing else passes for a frame."""

from __future__ import annotations

import struct

import pytest

from kvxfer.errors import ProtocolError
from kvxfer.wire import messages as m
from kvxfer.wire.framing import PREAMBLE, encode
from tests.support.frames import CONTROL, DATA, Splitter


def header(kind: int, *, segments: int = 0, payload: int = 0) -> bytes:
    head = bytearray(88)
    head[:6] = b"KVXD\x01" + bytes([kind])
    struct.pack_into("<I", head, 8, segments)
    struct.pack_into("<Q", head, 48, payload)
    return bytes(head)


CONTROL_STREAM = PREAMBLE + encode(m.Ping(rid=7)) + encode(m.Goodbye(reason="x")) + b"\0\0\0\x02\x92\x63"
DATA_STREAM = b"".join(
    (
        bytes(64),
        header(4, segments=2, payload=100) + bytes(2 * 16 + 100 + 32),
        header(5, segments=1, payload=5000) + bytes(16),
        header(7),
        header(99),
    )
)
NAMES = {
    CONTROL: ["PREAMBLE", "Ping", "Goodbye", "OTHER"],
    DATA: ["HELLO", "PUT", "GET", "ACK", "OTHER"],
}


@pytest.mark.parametrize("step", [1, 3, 1 << 20])
@pytest.mark.parametrize("protocol", [CONTROL, DATA])
def test_frames_come_out_whole(protocol: object, step: int) -> None:
    stream = CONTROL_STREAM if protocol is CONTROL else DATA_STREAM
    splitter = Splitter(protocol, dialler=True)  # type: ignore[arg-type]
    frames = [frame for at in range(0, len(stream), step) for frame in splitter.feed(stream[at : at + step])]
    assert [frame.name for frame in frames] == NAMES[protocol]  # type: ignore[index]
    assert b"".join(frame.raw for frame in frames) == stream
    assert splitter.buffered == 0


def test_every_message_has_its_name() -> None:
    from kvxfer.wire.codec import MESSAGES

    splitter = Splitter(CONTROL, dialler=False)
    for number, declared in MESSAGES.items():
        coded = bytes([number]) if number < 128 else bytes([0xCC, number])
        payload = b"\x92" + coded + b"\x80\0\0"
        [frame] = splitter.feed(len(payload).to_bytes(4, "big") + payload)
        assert frame.name == declared.__name__


@pytest.mark.parametrize("wrong", [b"\xff" * 100, b"HTTP/1.1 200 OK\r\n" + bytes(100)])
def test_what_is_no_frame_is_refused(wrong: bytes) -> None:
    splitter = Splitter(CONTROL, dialler=False)
    with pytest.raises(ProtocolError):
        list(splitter.feed(wrong))
    data = Splitter(DATA, dialler=True)
    with pytest.raises(ProtocolError):
        list(data.feed(bytes(64) + wrong))
