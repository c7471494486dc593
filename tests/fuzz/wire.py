"""Seeded mutations of real streams, thrown at the decoder and at both sides of a session.

The corpus is what the golden tests hold (every message, whole handshakes) and `corpus/wire.txt` (inputs that once meant
something, one per line in hex). One seed gives one run. For longer runs than the test suite's, say
`python -m tests.fuzz.wire --seconds 600 --seed 1`; a failure prints the input to add to the corpus.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgpack

from kvxfer.errors import ProtocolError
from kvxfer.wire.framing import PREAMBLE, FrameDecoder, encode
from kvxfer.wire.messages import Message, Unknown
from kvxfer.wire.session import Closed, Deliver, Session, Step
from tests.wire import golden

CORPUS = Path(__file__).parent / "corpus" / "wire.txt"
FRAME_BYTES_MAX = 4096
STREAM_BYTES_MAX = 16 << 10
INTERESTING = bytes((0x00, 0x01, 0x7F, 0x80, 0x8F, 0x90, 0x92, 0x9F, 0xA0, 0xC0, 0xC1, 0xC4, 0xC6, 0xC7, 0xCB, 0xCF))
INTERESTING += bytes((0xD3, 0xD4, 0xD8, 0xD9, 0xDB, 0xDC, 0xDD, 0xDE, 0xDF, 0xE0, 0xFF))


def corpus() -> list[bytes]:
    """Streams to start from, without the preamble."""
    lines = (line.partition("#")[0].strip() for line in CORPUS.read_text().splitlines())
    return [*(bytes.fromhex(line) for line in lines if line), *golden.frames().values(), *handshakes()]


def handshakes() -> list[bytes]:
    """What each side of each golden handshake sends; with the right one first, a session gets to its open state."""
    streams = []
    for sent in golden.load(golden.HANDSHAKES_FILE).values():
        for side in ("dialler", "acceptor"):
            parts = (bytes.fromhex(part["bytes"]) for part in sent if part["from"] == side)
            streams.append(b"".join(parts).removeprefix(PREAMBLE))
    return streams


# -- mutations --------------------------------------------------------------------------------------------------------


def flip(stream: bytearray, random: Random) -> None:
    stream[random.randrange(len(stream))] ^= 1 << random.randrange(8)


def overwrite(stream: bytearray, random: Random) -> None:
    stream[random.randrange(len(stream))] = random.choice(INTERESTING)


def insert(stream: bytearray, random: Random) -> None:
    place = random.randrange(len(stream) + 1)
    stream[place:place] = bytes(random.choices(INTERESTING, k=random.randrange(1, 9)))


def remove(stream: bytearray, random: Random) -> None:
    place = random.randrange(len(stream))
    del stream[place : place + random.randrange(1, 9)]


def cut(stream: bytearray, random: Random) -> None:
    del stream[random.randrange(len(stream)) :]


def repeat(stream: bytearray, random: Random) -> None:
    low, high = sorted(random.choices(range(len(stream) + 1), k=2))
    stream[high:high] = stream[low:high]


MUTATIONS: tuple[Callable[[bytearray, Random], None], ...] = (flip, overwrite, insert, remove, cut, repeat)


def value(random: Random) -> Any:
    """Something that may stand in a field, in a wrong one most of the time."""
    text = random.choice(("", "x", "offer", "ab" * 16, "x" * random.choice((64, 65, 256, 257)), "ä\n\0"))
    number = random.choice((0, 1, -1, 2**24 - 1, 2**24, 2**63, 2**64 - 1, 0.5, -0.0, 1e308, float("nan"), float("inf")))
    simple = (text, number, text.encode(), bytes(random.choice((16, 32, 33))), None, True)
    return random.choice((*simple, *simple, [text], [number], {text: number}, {text: [number]}))


def with_other_values(frame: bytes, random: Random) -> bytes:
    """The same message with one field changed, removed or added; frames that are no message stay as they are."""
    try:
        number, fields = msgpack.unpackb(frame[4:])
        fields = dict(fields)
    except (ValueError, TypeError):
        return frame
    name = random.choice((*fields, "rid", "extra"))
    if random.random() < 0.1:
        fields.pop(name, None)
    else:
        fields[name] = value(random)
    if random.random() < 0.05:
        number = random.choice((0, 11, 99, 2**64 - 1))
    payload = msgpack.packb([number, fields])
    return len(payload).to_bytes(4, "big") + payload


def with_other_bytes(frame: bytes, random: Random) -> bytes:
    stream = bytearray(frame)
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        if stream:
            random.choice(MUTATIONS)(stream, random)
    if random.random() < 0.7 and len(stream) > 4:  # let the length fit again, to get further in
        stream[:4] = (len(stream) - 4).to_bytes(4, "big")
    return bytes(stream)


def mutant(streams: list[bytes], random: Random) -> bytes:
    """A few frames, some of them changed, half of the time behind a handshake."""
    parts = [random.choice(handshakes())] if random.random() < 0.5 else []
    for _ in range(random.choice((1, 1, 2, 4))):
        change = random.choice((with_other_values, with_other_values, with_other_bytes, lambda frame, _: frame))
        parts.append(change(random.choice(streams), random))
    return b"".join(parts)[:STREAM_BYTES_MAX]


# -- what must hold for any stream ------------------------------------------------------------------------------------


def decoded(chunks: Iterator[bytes]) -> tuple[list[Message | Unknown], tuple[type[ProtocolError], str] | None]:
    decoder = FrameDecoder(FRAME_BYTES_MAX, expect_preamble=True)
    seen: list[Message | Unknown] = []
    try:
        for chunk in (PREAMBLE, *chunks):
            for message in decoder.feed(chunk):
                seen.append(message)  # noqa: PERF402 - what came before an error counts
    except ProtocolError as wrong:
        assert decoder.buffered == 0
        return seen, (type(wrong), wrong.message)
    assert decoder.buffered <= FRAME_BYTES_MAX + 4
    return seen, None


def pieces(stream: bytes, random: Random) -> Iterator[bytes]:
    place = 0
    while place < len(stream):
        size = random.choice((1, 1, 2, 3, 7, 100, 5000))
        yield stream[place : place + size]
        place += size


def sessions() -> Iterator[Session]:
    for secret, versions in golden.HANDSHAKES.values():
        yield from golden.ends(secret, versions)


def drive(session: Session, messages: list[Message | Unknown]) -> int:
    """How many messages were delivered.

    A session takes any messages, answers with messages that can be encoded, and stays closed once it is.
    """
    session.start(0.0)
    closed, delivered = False, 0
    for place, message in enumerate(messages):
        step = session.receive(message, place * 0.1)
        assert not (closed and step != Step())
        for answer in step.send:
            encode(answer, FRAME_BYTES_MAX)
        if isinstance(step.event, Closed):
            closed = True
            str(step.event.error)
        delivered += isinstance(step.event, Deliver)
        assert (session.deadline() is None) == closed
    return delivered


def check(stream: bytes, random: Random) -> int:
    """Raises when a property does not hold. Gives the number of messages that came out of a session."""
    whole = decoded(iter((stream,)))
    assert decoded(pieces(stream, random)) == whole
    messages = whole[0]
    for message in messages:
        if isinstance(message, Message):
            assert decoded(iter((encode(message),))) == ([message], None)
    return sum(drive(session, messages) for session in sessions())


def run(seed: int, rounds: int | None = None, seconds: float | None = None) -> tuple[int, int]:
    """Rounds done, and messages that came out of the sessions."""
    random, streams = Random(seed), corpus()
    end = None if seconds is None else time.monotonic() + seconds
    done = messages = 0
    while (rounds is None or done < rounds) and (end is None or time.monotonic() < end):
        stream = mutant(streams, random)
        try:
            messages += check(stream, random)
        except BaseException:
            sys.stderr.write(f"seed {seed}, round {done}: {stream.hex()}\n")
            raise
        done += 1
    return done, messages


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    print("{} streams, {} messages".format(*run(arguments.seed, seconds=arguments.seconds)))
