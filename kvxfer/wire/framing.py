"""From a stream of bytes to messages, in whatever pieces the bytes arrive.

The idea: bytes go in with `feed`, messages come out of an iterator, and an error comes out at the place in the stream
where it happened, after all messages before it. One chunk, or one byte at a time, gives the same. A frame's announced
length is looked at before anything is done for it, and whoever reads the messages may change the limit between two of
them (it is small until the other side has proved who it is).
"""

from __future__ import annotations

from collections.abc import Iterator

from kvxfer.config import FRAME_UNAUTHENTICATED_BYTES_MAX
from kvxfer.errors import FrameTooLong, NotKvxfer, ProtocolError
from kvxfer.wire.codec import LENGTH_BYTES, Message, Unknown, decode, encode

__all__ = ["FRAME_CEILING_BYTES", "PREAMBLE", "FrameDecoder", "encode"]

# The dialler sends this first. Not the first byte of TLS, not the beginning of any HTTP method, and a line end in the
# middle that a text-mode channel would have changed.
PREAMBLE = b"KVXC\r\n\x01\n"
FRAME_CEILING_BYTES = 64 << 20  # no configuration allows a longer frame
_STRANGERS = ((b"\x16\x03", "TLS"), (b"\x15\x03", "TLS"), (b"HTTP/", "HTTP"), (b"SSH-", "SSH"))
_HTTP_METHODS = (
    b"GET ",
    b"HEAD ",
    b"POST ",
    b"PUT ",
    b"OPTIONS ",
    b"CONNECT ",
    b"DELETE ",
    b"PATCH ",
    b"TRACE ",
    b"PRI ",
)


class FrameDecoder:
    """Turns received bytes into messages.

    ``expect_preamble`` is for the accepting side. After an error the decoder is finished: it raises the same error
    again.
    """

    __slots__ = ("_buffer", "_error", "_frames", "_preamble_left", "frame_bytes_max")

    def __init__(
        self, frame_bytes_max: int = FRAME_UNAUTHENTICATED_BYTES_MAX, *, expect_preamble: bool = False
    ) -> None:
        self.frame_bytes_max = frame_bytes_max  # without the 4 bytes of the length itself
        self._buffer = bytearray()
        self._preamble_left = len(PREAMBLE) if expect_preamble else 0
        self._frames = 0
        self._error: ProtocolError | None = None

    @property
    def buffered(self) -> int:
        """Bytes that were fed and have not yet come out in a message."""
        return len(self._buffer)

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[Message | Unknown]:
        """Take bytes; iterate the result for the messages that are complete.

        The iterator raises `NotKvxfer`, `FrameTooLong` or another `ProtocolError`, and nothing else. What is left in
        it when the reader stops early comes with the next call.
        """
        if self._error is None:
            self._buffer += data
        return self._messages()

    def _messages(self) -> Iterator[Message | Unknown]:
        while True:
            message = self._next()
            if message is None:
                return
            yield message

    def _next(self) -> Message | Unknown | None:
        if self._error is not None:
            raise self._error
        try:
            if self._preamble_left:
                self._take_preamble()
            payload = self._take_frame()
            return None if payload is None else decode(payload)
        except ProtocolError as wrong:
            self._error = wrong
            self._buffer.clear()
            raise

    def _take_preamble(self) -> None:
        expected = PREAMBLE[-self._preamble_left :]
        got = self._buffer[: len(expected)]
        if not expected.startswith(got):
            raise _not_kvxfer(PREAMBLE[: -self._preamble_left] + self._buffer)
        del self._buffer[: len(got)]
        self._preamble_left -= len(got)

    def _take_frame(self) -> bytes | None:
        buffer = self._buffer
        if self._preamble_left or len(buffer) < LENGTH_BYTES:
            return None
        length = int.from_bytes(buffer[:LENGTH_BYTES], "big")
        if length > self.frame_bytes_max:
            if not self._frames and length > FRAME_CEILING_BYTES:
                raise _not_kvxfer(buffer)
            raise FrameTooLong("a frame is longer than allowed", bytes=length, limit=self.frame_bytes_max)
        end = LENGTH_BYTES + length
        if len(buffer) < end:
            return None
        payload = bytes(memoryview(buffer)[LENGTH_BYTES:end])
        del buffer[:end]
        self._frames += 1
        return payload


def _not_kvxfer(beginning: bytes | bytearray) -> NotKvxfer:
    """Says what it looks like instead, as far as the bytes that are there tell."""
    known = [name for mark, name in _STRANGERS if beginning.startswith(mark)]
    if not known and beginning.startswith(_HTTP_METHODS):
        known = ["HTTP"]
    looks = f"; it looks like {known[0]}" if known else ""
    return NotKvxfer(
        f"the other side does not speak kvxfer's protocol{looks}",
        begins_with=bytes(beginning[:8]).hex(),
        hint="check the address and port: they must be those of a daemon's option `listen`",
    )
