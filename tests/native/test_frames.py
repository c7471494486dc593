"""Every field of every frame, as the parser of each side takes it: what a frame does not use is 0, and no value of what
it uses passes that the specification does not allow."""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvxfer.native.status import StatusCode
from tests.native import frames, kvxd
from tests.native.alone import compiled
from tests.native.kvxd import ACCEPTOR, DIALLER, SEGMENT_UNKNOWN, SIDE_ACCEPTOR, SIDE_DIALLER, Frame, Type
from tests.native.sources import named

MORE, HELLO, FRAME, PAYLOAD, TRAILER, ERROR = range(6)
OTHER = {DIALLER: ACCEPTOR, ACCEPTOR: DIALLER, SIDE_DIALLER: SIDE_ACCEPTOR, SIDE_ACCEPTOR: SIDE_DIALLER}
FRAME_BYTES = 1 << 20
FUZZ = Path(__file__).parent / "fuzz"
USED = {"flags": 0, "status": 0, "op": 1, "index": 1, "segment": 1, "grant": 1, "generation": 1, "tag": 1, "value": 1}
UNUSED = ("status", "op", "index", "segment", "grant", "generation", "length", "tag", "value")


class Parser:
    """`kvx_stream_rx`, from the outside."""

    def __init__(self, library: ctypes.CDLL, role: int) -> None:
        self.library, self.state = library, ctypes.create_string_buffer(1 << 16)
        library.kvx_rx_init(self.state, role, FRAME_BYTES)

    def takes(self, data: bytes) -> int:
        room = ctypes.c_uint32()
        at = self.library.kvx_rx_space(self.state, ctypes.byref(room))
        assert len(data) <= room.value
        ctypes.memmove(at, data, len(data))
        self.library.kvx_rx_received(self.state, len(data))
        return int(self.library.kvx_rx_next(self.state))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    more = "".join(f'#include "{named(name)}"\n' for name in ("auth.c", "copy.c"))
    panic = '#include "transport.h"\nvoid kvx_panic(const char *c, const char *f, int l) '
    panic += "{ (void)c, (void)f, (void)l; __builtin_trap(); }\n"
    loaded = compiled(tmp_path_factory.mktemp("stream"), "stream", more + panic)
    loaded.kvx_rx_space.restype = ctypes.c_void_p
    return loaded


def greeted(library: ctypes.CDLL, sender: int) -> Parser:
    parser = Parser(library, OTHER[sender])
    assert parser.takes(kvxd.hello(sender, bytes(16))) == HELLO
    return parser


def outcome(library: ctypes.CDLL, sender: int, frame: Frame) -> int:
    return greeted(library, sender).takes(frame.header() + bytes(16) + frame.list())


def usual(rule: frames.Rule) -> Frame:
    """A frame that is right."""
    values = {name: value for name, value in USED.items() if name in rule.uses}
    if rule.units:
        values["segments"] = ((1, 1),) * rule.units  # type: ignore[assignment]
    if "segments" in rule.uses:
        values |= {"length": 40, "segments": ((0, 40),)}  # type: ignore[dict-item]
    elif "length" in rule.uses:
        values["length"] = 40
    if rule.type == Type.ACK:
        values["segment"] = SEGMENT_UNKNOWN
    return Frame(type=rule.type, **values)


def one_wrong(rule: frames.Rule) -> Iterator[tuple[str, Frame]]:
    """Frames in each of which one field is what it must not be."""
    good = usual(rule)
    for name in UNUSED:
        if name not in rule.uses:
            for value in (1, 0x7FFFFFFF):
                yield name, replace(good, **{name: value})
    for bit in range(16):
        if not rule.flags >> bit & 1:
            yield f"flag {bit}", replace(good, flags=1 << bit)
    count = len(good.segments)
    for wrong in {0, 1, 2, 16, 17, 33} - {count}:
        if "segments" not in rule.uses:
            yield f"{wrong} units", replace(good, segments=((1, 1),) * wrong)
    if "segments" in rule.uses:
        for listed in ((), ((0, 0), (0, 40)), ((0, 39),), ((0, 41),), ((0, 2**64 - 1), (0, 41))):
            yield f"segments {listed}", replace(good, segments=listed)
    if "length" in rule.uses:
        for length in (0, FRAME_BYTES + 1, 2**64 - 1):
            yield f"length {length}", replace(good, length=length)


@pytest.mark.parametrize("rule", frames.RULES, ids=lambda rule: f"{rule.type.name}-{rule.sender}")
def test_what_a_frame_does_not_use_is_0(library: ctypes.CDLL, rule: frames.Rule) -> None:
    assert outcome(library, rule.sender, usual(rule)) == FRAME
    for name, frame in one_wrong(rule):
        assert outcome(library, rule.sender, frame) == ERROR, name


@pytest.mark.parametrize("sender", OTHER)
def test_nobody_sends_another_type(library: ctypes.CDLL, sender: int) -> None:
    known = {rule.type for rule in frames.RULES if rule.sender == sender}
    for number in set(range(256)) - known:
        for frame in (Frame(type=number), Frame(type=number, op=1), Frame(type=number, length=4, segments=((0, 4),))):
            assert outcome(library, sender, frame) == ERROR, number


@pytest.mark.parametrize("sender", [ACCEPTOR, SIDE_ACCEPTOR])
def test_every_status_of_an_answer(library: ctypes.CDLL, sender: int) -> None:
    for status in frames.STATUSES:
        for flags in (0, kvxd.F_BARE):
            for segment in (SEGMENT_UNKNOWN, 0, 5, 2**31, 2**32 - 2):
                frame = Frame(type=Type.ACK, op=1, status=status, flags=flags, segment=segment)
                wanted = FRAME if frames.ack_may_be(sender, flags, status, segment) else ERROR
                assert outcome(library, sender, frame) == wanted, (status, flags, segment)
        if sender == SIDE_ACCEPTOR:
            wanted = FRAME if status in (StatusCode.OK, StatusCode.DEVICE) else ERROR
            assert outcome(library, sender, Frame(type=Type.PONG, op=1, status=status)) == wanted, status


@pytest.mark.parametrize("sender", [DIALLER, SIDE_DIALLER])
def test_an_import_says_which_way_it_goes(library: ctypes.CDLL, sender: int) -> None:
    [rule] = [rule for rule in frames.RULES if (rule.sender, rule.type) == (sender, Type.ATTACH)]
    for tag in (0, 1, 2, 3, 4, 7, 1 << 32, 1 << 32 | 3, 2**64 - 1):
        assert outcome(library, sender, replace(usual(rule), tag=tag)) == (FRAME if tag in (1, 2, 3) else ERROR), tag
    if sender == SIDE_DIALLER:
        assert outcome(library, sender, replace(usual(rule), segment=2**31)) == ERROR, "no process has this number"


HELLOS: dict[str, dict[str, int]] = {
    "the smallest": {"frame_bytes": 4096},
    "no payloads": {"frame_bytes": 0},
    "payloads of a byte": {"frame_bytes": 1},
    "nearly the smallest": {"frame_bytes": 4095},
    "another version": {"version": 3},
    "a status": {"status": 206},
    "a negative status": {"status": -1},
    "a second stream": {"stream": 1},
    "the last stream": {"stream": 31},
    "more streams than there may be": {"stream": 32},
}


@pytest.mark.parametrize("name", HELLOS)
@pytest.mark.parametrize("sender", OTHER)
def test_every_field_of_a_hello(library: ctypes.CDLL, sender: int, name: str) -> None:
    side = sender in (SIDE_DIALLER, SIDE_ACCEPTOR)
    owner = sender in (ACCEPTOR, SIDE_ACCEPTOR)
    good = name == "the smallest" or ("stream" in name and "more" not in name and not side)
    good = good or (owner and "status" in name)
    made = kvxd.hello(sender, bytes(16), **HELLOS[name])
    assert Parser(library, OTHER[sender]).takes(made) == (HELLO if good else ERROR)


@pytest.mark.parametrize("sender", OTHER)
def test_the_bytes_of_a_hello_that_mean_nothing(library: ctypes.CDLL, sender: int) -> None:
    usual_one = kvxd.hello(sender, bytes(16))
    for at in (*range(9, 12), *range(60, 64)):
        damaged = usual_one[:at] + b"\x01" + usual_one[at + 1 :]
        assert Parser(library, OTHER[sender]).takes(damaged) == ERROR, at
    for role in set(range(256)) - {sender}:
        damaged = usual_one[:6] + struct.pack("B", role) + usual_one[7:]
        assert Parser(library, OTHER[sender]).takes(damaged) == ERROR, role


# -- the tables and the code are of the same fields ------------------------------------------------------------------


def members(text: str, name: str) -> list[str]:
    """The members of a C structure, in order; of a union what is in it counts as one."""
    body = re.search(rf"typedef struct {name} \{{(.*?)^\}} {name};", text, re.S | re.M)
    assert body is not None, name
    plain = re.sub(r"/\*.*?\*/", "", body[1], flags=re.S)
    plain = re.sub(r"\n    union \{.*?\n    \};", "\n    uint8_t body;", plain, flags=re.S)
    return re.findall(r"(\w+)(?:\[[^\]]*\])?;", plain)


def test_the_tables_have_every_field_that_there_is() -> None:
    stream, shm = named("stream.h").read_text(), named("shm.h").read_text()
    assert members(stream, "kvx_frame") == [*frames.FRAME_FIELDS]
    assert members(stream, "kvx_hello") == [*frames.HELLO_FIELDS]
    assert members(shm, "shm_message") == [*frames.MESSAGE_FIELDS]
    types = re.search(r"enum kvx_frame_type \{(.*?)\}", stream, re.S)
    assert types is not None
    assert set(re.findall(r"KVX_FRAME_(\w+) =", types[1])) == {one.name for one in Type}
    assert {rule.type for rule in frames.RULES} | {Type.HELLO} == set(Type), "each type has a sender"


def test_the_fuzzers_know_every_field() -> None:
    text = (FUZZ / "fuzz_frames.h").read_text()

    def listed(name: str) -> list[str]:
        found = re.search(rf"#define {name}\(X\)(.*?)[^\\]\n", text, re.S)
        assert found is not None, name
        return re.findall(r"X\((\w+)\)", found[0].partition("(X)")[2])

    assert listed("FUZZ_FRAME_FIELDS") == [*frames.FRAME_FIELDS]
    assert {*listed("FUZZ_HELLO_FIELDS"), *listed("FUZZ_HELLO_BYTES")} == {*frames.HELLO_FIELDS}
    rows = re.findall(r"\{KVX_STREAM_(\w+), KVX_FRAME_(\w+), ([^}]*)\}", text)
    roles = {"DIALLER": DIALLER, "ACCEPTOR": ACCEPTOR, "SIDE_DIALLER": SIDE_DIALLER, "SIDE_ACCEPTOR": SIDE_ACCEPTOR}
    found = {}
    for role, type_, uses in rows:
        names = set(re.findall(r"U\((\w+)\)", uses)) | ({"grant", "generation"} if "FUZZ_GRANT" in uses else set())
        found[roles[role], Type[type_]] = names
    assert found == {
        (rule.sender, rule.type): rule.uses
        | ({"flags"} if rule.flags else set())
        | ({"segments"} if rule.units else set())
        for rule in frames.RULES
    }
