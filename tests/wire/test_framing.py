"""From bytes to messages: in any pieces, with the error at its place, and never more than announced and allowed."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.config import FRAME_UNAUTHENTICATED_BYTES_MAX
from kvxfer.errors import FrameTooLong, NotKvxfer, ProtocolError
from kvxfer.wire.framing import FRAME_CEILING_BYTES, PREAMBLE, FrameDecoder, encode
from kvxfer.wire.messages import Delivery, Mail, Message, Ping, Pong, Unknown
from tests.wire.samples import messages

Outcome = tuple[list[Message | Unknown], tuple[str, str] | None]


def outcome(decoder: FrameDecoder, chunks: list[bytes]) -> Outcome:
    """Messages, and class and text of the error; what a stranger looks like depends on how much of it is there."""
    seen: list[Message | Unknown] = []
    try:
        for chunk in chunks:
            for message in decoder.feed(chunk):
                seen.append(message)  # noqa: PERF402 - what came before an error counts
    except ProtocolError as wrong:
        return seen, (type(wrong).__name__, wrong.message.partition("; it looks like")[0])
    return seen, None


def bytewise(data: bytes) -> list[bytes]:
    return [data[place : place + 1] for place in range(len(data))]


# -- the beginning ----------------------------------------------------------------------------------------------------


def test_the_preamble_in_any_pieces() -> None:
    stream = PREAMBLE + encode(Ping(rid=1))
    for cut in range(len(stream)):
        decoder = FrameDecoder(expect_preamble=True)
        assert outcome(decoder, [stream[:cut], stream[cut:]]) == ([Ping(rid=1)], None)
        assert decoder.buffered == 0


def test_the_first_wrong_byte_is_the_last() -> None:
    for place in range(len(PREAMBLE)):
        wrong = PREAMBLE[:place] + bytes([PREAMBLE[place] ^ 1])
        for chunks in ([wrong], bytewise(wrong)):
            decoder = FrameDecoder(expect_preamble=True)
            assert outcome(decoder, chunks[:-1])[1] is None
            with pytest.raises(NotKvxfer):
                list(decoder.feed(chunks[-1]))
            assert decoder.buffered == 0


STRANGERS = {
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n": "HTTP",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n": "HTTP",
    b"\x16\x03\x01\x02\x00\x01\x00\x01": "TLS",
    b"SSH-2.0-OpenSSH_9.6\r\n": "SSH",
}


@pytest.mark.parametrize("greeting", STRANGERS)
def test_strangers_who_dial_are_recognised(greeting: bytes) -> None:
    with pytest.raises(NotKvxfer, match=f"looks like {STRANGERS[greeting]}") as caught:
        list(FrameDecoder(expect_preamble=True).feed(greeting))
    assert caught.value.fields["begins_with"] == greeting[:8].hex()


ANSWERS = (
    b"HTTP/1.1 400 Bad Request\r\n",
    b"SSH-2.0-OpenSSH_9.6\r\n",
    b"\x15\x03\x03\x00\x02\x02\x32",
    b"-ERR unknown command\r\n",
    b"220 mail.example.com ESMTP\r\n",
    PREAMBLE,
)


@pytest.mark.parametrize("answer", ANSWERS)
def test_strangers_who_answer_are_recognised(answer: bytes) -> None:
    with pytest.raises(NotKvxfer):
        list(FrameDecoder().feed(answer))


def test_a_kvxfer_that_announces_too_much_is_no_stranger() -> None:
    decoder = FrameDecoder(1000)
    assert outcome(decoder, [encode(Ping())])[1] is None
    with pytest.raises(FrameTooLong):
        list(decoder.feed(b"\xff\xff\xff\xff"))
    with pytest.raises(FrameTooLong):
        list(FrameDecoder(1000).feed(FRAME_CEILING_BYTES.to_bytes(4, "big")))


# -- lengths ----------------------------------------------------------------------------------------------------------


def test_a_frame_at_its_maximum_and_beyond() -> None:
    frame = encode(Mail(channel="c", data=b"x" * 500))
    size = len(frame) - 4
    assert len(outcome(FrameDecoder(size), [frame])[0]) == 1
    decoder = FrameDecoder(size - 1)
    with pytest.raises(FrameTooLong) as caught:
        list(decoder.feed(frame[:4]))  # before a byte of it has come
    assert caught.value.fields == {"bytes": size, "limit": size - 1}
    assert decoder.buffered == 0


def test_the_limit_starts_small() -> None:
    assert FrameDecoder().frame_bytes_max == FRAME_UNAUTHENTICATED_BYTES_MAX


def test_the_limit_may_change_between_two_messages_of_one_chunk() -> None:
    large = Delivery(channel="c", data=b"x" * 50_000)
    decoder = FrameDecoder()
    seen = []
    for message in decoder.feed(encode(Ping()) + encode(large) + encode(Pong())):
        seen.append(message)
        decoder.frame_bytes_max = 100_000
    assert seen == [Ping(), large, Pong()]


def test_an_empty_frame_is_no_message() -> None:
    with pytest.raises(ProtocolError, match="not an array"):
        list(FrameDecoder().feed(bytes(4)))


# -- errors and reading on --------------------------------------------------------------------------------------------


def test_messages_before_an_error_come_first_and_the_error_stays() -> None:
    decoder = FrameDecoder()
    stream = encode(Ping(rid=1)) + encode(Ping(rid=2)) + b"\x00\x00\x00\x01\xc0" + encode(Ping(rid=3))
    seen, error = outcome(decoder, [stream])
    assert seen == [Ping(rid=1), Ping(rid=2)]
    assert error is not None
    assert outcome(decoder, [encode(Ping(rid=4))]) == ([], error)
    assert decoder.buffered == 0


def test_an_unknown_message_is_no_error() -> None:
    stream = b"\x00\x00\x00\x08\x92\x63\x81\xa3rid\x05" + encode(Ping())
    assert outcome(FrameDecoder(), [stream]) == ([Unknown(number=99, rid=5), Ping()], None)


def test_a_reader_that_stops_early_loses_nothing() -> None:
    decoder = FrameDecoder()
    first = next(decoder.feed(encode(Ping(rid=1)) + encode(Ping(rid=2))))
    assert first == Ping(rid=1)
    assert decoder.buffered > 0
    assert list(decoder.feed(b"")) == [Ping(rid=2)]
    assert decoder.buffered == 0


def test_any_buffer_may_be_fed() -> None:
    frame = encode(Ping(rid=1))
    for data in (frame, bytearray(frame), memoryview(frame)):
        assert list(FrameDecoder().feed(data)) == [Ping(rid=1)]


# -- properties -------------------------------------------------------------------------------------------------------

quick = settings(max_examples=150, deadline=None, derandomize=True, database=None)


@quick
@given(st.lists(messages(), max_size=5), st.binary(max_size=30), st.data())
def test_pieces_do_not_matter(sent: list[Message], tail: bytes, data: st.DataObject) -> None:
    stream = PREAMBLE + b"".join(map(encode, sent)) + tail
    whole = outcome(FrameDecoder(1 << 20, expect_preamble=True), [stream])
    assert whole[0][: len(sent)] == sent
    assert outcome(FrameDecoder(1 << 20, expect_preamble=True), bytewise(stream)) == whole
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=5)))
    chunks = [stream[low:high] for low, high in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert outcome(FrameDecoder(1 << 20, expect_preamble=True), chunks) == whole


@quick
@given(st.binary(max_size=200), st.booleans())
def test_garbage_gives_messages_or_a_protocol_error(garbage: bytes, accepting: bool) -> None:
    stream = (PREAMBLE if accepting else b"") + garbage
    with contextlib.suppress(ProtocolError):
        for message in FrameDecoder(expect_preamble=accepting).feed(stream):
            assert isinstance(message, Message | Unknown)


def test_a_stranger_after_the_preamble_is_one_however_it_is_cut() -> None:
    stream = PREAMBLE + b"OPTIONS "
    whole = outcome(FrameDecoder(1 << 20, expect_preamble=True), [stream])
    assert whole[1] == ("NotKvxfer", "the other side does not speak kvxfer's protocol")
    assert outcome(FrameDecoder(1 << 20, expect_preamble=True), bytewise(stream)) == whole
