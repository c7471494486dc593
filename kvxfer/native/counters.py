"""The engine's counters as frozen values, read from this process's engine or from the counters file of another process.

The layout is ``kvx_counters`` of ``api.cdef.h`` (a test compares the two). Native threads change each number
atomically, so a reader sees every number whole, though not all at one instant.
"""

from __future__ import annotations

import os
import stat
import struct
from dataclasses import dataclass, fields
from pathlib import Path

from kvxfer.errors import ProtocolError

MAGIC = 0x4B565843544E5231
VERSION = 5
TRANSPORTS_MAX = 8
NAME_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportCounters:
    """One transport. ``*_bytes`` are bytes, ``peers_connected`` and ``peers_accepted`` gauges, all else counts."""

    name: str
    put_ops: int
    get_ops: int
    put_bytes: int
    get_bytes: int
    served_put_bytes: int
    served_get_bytes: int
    copied_bytes: int
    mapped_bytes: int
    staged_bytes: int
    lent_bytes: int
    segments: int
    frames: int
    inline_ops: int
    failed_ops: int
    cancelled_ops: int
    refused: int
    protocol_errors: int
    notifies_sent: int
    notifies_received: int
    peers_connected: int
    peers_accepted: int
    peers_lost: int
    chosen: int
    passed_memory: int
    passed_checksum: int
    passed_not_offered: int
    passed_unreachable: int
    passed_refused: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """One engine: gauges of the core (``spills`` and ``late`` are counts), a row per transport in order of index."""

    pid: int
    inflight: int
    regions: int
    grants: int
    imports: int
    peers: int
    threads: int
    registered_bytes: int
    quarantined_grants: int
    device_bytes: int
    arena_bytes: int
    spilled_bytes: int
    spills: int
    stalled: int
    late: int
    transports: tuple[TransportCounters, ...]


ROW_FIELDS = tuple(field.name for field in fields(TransportCounters))[1:]
CORE_FIELDS = tuple(field.name for field in fields(Counters))[:-1]
_HEAD = struct.Struct(f"=QII{len(CORE_FIELDS)}Q")
_NAMES = struct.Struct(f"={NAME_BYTES}s" + f"{NAME_BYTES}s" * (TRANSPORTS_MAX - 1))
_ROW = struct.Struct(f"={len(ROW_FIELDS)}Q")
COUNTERS_BYTES = _HEAD.size + _NAMES.size + TRANSPORTS_MAX * _ROW.size


def parse_counters(raw: bytes) -> Counters:
    """Decode a snapshot of ``kvx_counters``; raises `ProtocolError` when it is none."""
    if len(raw) < COUNTERS_BYTES:
        raise ProtocolError("a counters file is too short", length=len(raw), expected=COUNTERS_BYTES)
    magic, version, count, *core = _HEAD.unpack_from(raw)
    if magic != MAGIC or version != VERSION or count > TRANSPORTS_MAX:
        raise ProtocolError("not a counters file of this version", magic=hex(magic), version=version)
    names = _NAMES.unpack_from(raw, _HEAD.size)
    start = _HEAD.size + _NAMES.size
    rows = tuple(
        TransportCounters(
            name=names[index].split(b"\0", 1)[0].decode("ascii", "replace"),
            **dict(zip(ROW_FIELDS, _ROW.unpack_from(raw, start + index * _ROW.size), strict=True)),
        )
        for index in range(count)
    )
    return Counters(**dict(zip(CORE_FIELDS, core, strict=True)), transports=rows)


def read_counters(path: str | Path) -> Counters:
    """Read the counters file of any process. OSError when it is gone, `ProtocolError` when it is another file.

    Whoever named the file is not trusted: links are not followed, and nothing is read that could make us wait.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC
    descriptor = os.open(path, flags)  # a file object cannot be made of a directory
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ProtocolError("a counters file is no regular file")
        return parse_counters(os.read(descriptor, COUNTERS_BYTES))
    finally:
        os.close(descriptor)
