"""Every field of every frame and message of the data paths, from docs/wire-format.md: who sends it, what it may carry.

Nothing here knows the C code, whose own tables say the same. The tests go through these tables, so a field that is new
and is not listed here, or not by a fuzzer, is noticed (`test_frames.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from kvxfer.native.status import StatusCode
from tests.native import kvsm, kvxd
from tests.native.kvxd import ACCEPTOR, DIALLER, SEGMENT_UNKNOWN, SIDE_ACCEPTOR, SIDE_DIALLER, Type

HELLO_FIELDS = (
    "version",
    "role",
    "stream",
    "streams",
    "status",
    "frame_bytes",
    "nonce",
    "engine_id",
    "session",
    "share",
)
FRAME_FIELDS = ("type", "flags", "segments", "status", "op", "index", "segment", "grant", "generation", "length")
FRAME_FIELDS += ("tag", "value")
TRAILER_FIELDS = ("status", "crc", "zero", "mac")
MESSAGE_FIELDS = ("magic", "version", "type", "how", "counter", "status", "sys_errno", "handle", "body", "mac")

REFUSALS = frozenset(
    {
        *range(StatusCode.RANGE, StatusCode.INTEGRITY + 1),
        StatusCode.REFUSED,
        *range(StatusCode.NOMEM, StatusCode.INTERNAL),
    }
)
BARE_REFUSALS = frozenset({StatusCode.KEY, StatusCode.STALE, StatusCode.UNKNOWN, StatusCode.REVOKED})
STATUSES = (*StatusCode, -(2**31), -1, 17, 99, 109, 199, 210, 399, 401, 2**31 - 1)


@dataclass(frozen=True, slots=True)
class Rule:
    """A frame as ``sender`` may send it: the fields that it uses, its flags, how many units it has."""

    sender: int
    type: Type
    uses: frozenset[str]
    flags: int = 0
    units: int = 0


def _rule(sender: int, type_: Type, uses: str = "", *, flags: int = 0, units: int = 0) -> Rule:
    return Rule(sender, type_, frozenset(uses.split()), flags, units)


_GRANT = "grant generation"
_ACK = "status op segment"
RULES = (
    _rule(DIALLER, Type.ATTACH, f"op {_GRANT} tag value"),
    _rule(DIALLER, Type.DETACH, _GRANT),
    _rule(DIALLER, Type.PUT, f"op index {_GRANT} length segments", flags=kvxd.F_NOTIFY | kvxd.F_CHECK),
    _rule(DIALLER, Type.GET, f"op index {_GRANT} length segments", flags=kvxd.F_CHECK),
    _rule(DIALLER, Type.NOTIFY, f"op index {_GRANT} tag value"),
    _rule(DIALLER, Type.BYE),
    _rule(ACCEPTOR, Type.ACK, f"{_ACK} index", flags=kvxd.F_BARE),
    _rule(ACCEPTOR, Type.DATA, "op index length", flags=kvxd.F_CHECK),
    _rule(ACCEPTOR, Type.BYE),
    _rule(SIDE_DIALLER, Type.ATTACH, f"op segment {_GRANT} tag value", units=1),
    _rule(SIDE_DIALLER, Type.DETACH, "op"),
    _rule(SIDE_DIALLER, Type.QUIET, "op"),
    _rule(SIDE_DIALLER, Type.NOTIFY, f"op {_GRANT} tag value"),
    _rule(SIDE_DIALLER, Type.PING, "op tag value"),
    _rule(SIDE_DIALLER, Type.BYE),
    _rule(SIDE_ACCEPTOR, Type.LOCATION, "op", units=16),
    _rule(SIDE_ACCEPTOR, Type.ACK, _ACK, flags=kvxd.F_BARE),
    _rule(SIDE_ACCEPTOR, Type.REVOKE, "op"),
    _rule(SIDE_ACCEPTOR, Type.PONG, "status op tag"),
    _rule(SIDE_ACCEPTOR, Type.BYE),
)


def ack_may_be(sender: int, flags: int, status: int, segment: int) -> bool:
    """May an ``ACK`` like this be said at all? Whether its request has that segment is another question."""
    if flags == kvxd.F_BARE:
        return status in BARE_REFUSALS and segment == SEGMENT_UNKNOWN
    if status == StatusCode.OK or (sender == SIDE_ACCEPTOR and segment != SEGMENT_UNKNOWN):
        return segment == SEGMENT_UNKNOWN
    return status in REFUSALS


@dataclass(frozen=True, slots=True)
class MessageRule:
    """A message of KVSM: its sender (True: the dialler, None: both), its fields, and which of the 32 bytes it uses."""

    type: kvsm.Type
    by_dialler: bool | None
    uses: frozenset[str]
    body: tuple[int, int] = (0, 0)


def _message(type_: kvsm.Type, by_dialler: bool | None, uses: str = "", body: tuple[int, int] = (0, 0)) -> MessageRule:
    return MessageRule(type_, by_dialler, frozenset(uses.split()), body)


MESSAGES = (
    _message(kvsm.Type.HELLO, None, "status", (0, 32)),
    _message(kvsm.Type.IMPORT, True, "handle mac", (0, 28)),
    _message(kvsm.Type.IMPORTED, False, "how status sys_errno handle mac", (0, 32)),
    _message(kvsm.Type.REVOKE, False, "handle mac"),
    _message(kvsm.Type.REVOKED, True, "handle mac"),
    _message(kvsm.Type.DROP, True, "handle mac"),
    _message(kvsm.Type.NOTIFY, True, "handle mac", (0, 24)),
    _message(kvsm.Type.NOTIFIED, False, "status handle mac", (0, 8)),
    _message(kvsm.Type.FORGET, False, "", (8, 16)),
    _message(kvsm.Type.BYE, None),
)
