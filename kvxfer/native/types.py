"""What the engine says, as values: its configuration, its transports, regions, grants and events."""

from __future__ import annotations

import os
import stat
import struct
import sys
from dataclasses import dataclass, field, fields
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvxfer.errors import ConfigError, ProtocolError, UsageError
from kvxfer.native.transports import accelerators_likely, expanded

if TYPE_CHECKING:
    from kvxfer.config import Config


MIB = 1 << 20
TEXTS = ("socket_dir", "tcp_bind", "tcp_congestion", "fault_spec", "counters_path", "hixl_bind", "hixl_options")
SAME_NUMBERS = (
    *("tcp_threads", "tcp_streams", "copy_threads", "inflight_max", "notify_max", "regions_max", "grants_max"),
    *("peers_max", "accepted_max", "segments_max", "inline_bytes_max", "nt_bytes_min", "chunk_bytes", "frame_bytes"),
    *("hbm_arena_bytes", "pinned_arena_bytes", "spin_us"),
)
NUMBERS = (*SAME_NUMBERS, "tcp_port", "hixl_port", "hixl_engine_port", "connect_ms", "handshake_ms", "cancel_ms")
FROM_CONFIG = (
    *SAME_NUMBERS,
    *(
        "transports",
        "tcp_congestion",
        "tcp_encryption",
        "fault_spec",
        "cross_memory_attach",
        "hugepages",
        "socket_dir",
        "numa_node",
        "engine_cpus",
    ),
    *("hixl_port", "hixl_engine_port", "hixl_options", "device_ipc", "tcp_zero_copy"),
)


class OpKind(IntEnum):
    """Direction of a transfer, seen from this side."""

    PUT = 1
    GET = 2


class Priority(IntEnum):
    """How urgent a transfer is."""

    CRITICAL = 0
    NORMAL = 1
    BULK = 2

    @classmethod
    def of(cls, word: object) -> Priority:
        """Of "critical", "normal" or "bulk"; anything else is a `UsageError`."""
        found = PRIORITIES.get(word) if isinstance(word, str) else None
        if found is not None:
            return found
        words = ", ".join(one.name.lower() for one in cls)
        raise UsageError(f"priority must be one of {words}", field="priority", value=repr(word)[:40])


PRIORITIES = {one.name.lower(): one for one in Priority}


class MemoryKind(IntEnum):
    """Where the bytes of a region are; see ``KVX_MEM_*`` in ``api.cdef.h``."""

    DRAM = 0
    HBM = 1
    PINNED = 2

    @property
    def word(self) -> str:
        """For messages and descriptors' peers: where the bytes are."""
        return ("dram", "hbm", "pinned dram")[self]


class EventKind(IntEnum):
    """What an event tells; see ``KVX_EV_*`` in ``api.cdef.h``."""

    TRANSFER = 1
    CONNECT = 2
    PEER_DOWN = 3
    IMPORT = 4
    REVOKE = 5
    RELEASE = 6
    NOTIFY = 7
    GRANT_LOST = 8
    PEER_CLOSED = 9


class Caps:
    """Bits of `TransportInfo.caps`."""

    PUT, GET, NOTIFY, INLINE, MAP, SAME_HOST, CHECK, OWN, ENCRYPTED = 1, 2, 4, 8, 16, 32, 64, 128, 256
    MAP_HBM, BLOCKS = 512, 1024


class ChoiceKind(IntEnum):
    """What became of a transport when one was chosen for a grant; see ``KVX_CHOICE_*`` in ``api.cdef.h``."""

    TAKEN = 0
    MEMORY = 1
    CHECKSUM = 2
    NOT_OFFERED = 3
    UNREACHABLE = 4
    REFUSED = 5


class Event(NamedTuple):
    """A completion (``token`` > 0) or a message from a peer. A named tuple: one is made per transfer, it must be cheap.

    ``status`` is a `kvxfer.native.status.Status`; ``bytes`` were moved and confirmed; ``segment`` is the index of
    the first segment that failed, or -1.
    """

    kind: int
    status: int
    token: int
    id: int
    tag: int
    value: int
    bytes: int
    sys_errno: int
    segment: int

    @property
    def answered_by(self) -> str:
        """Of a connect: the id (hex) of the engine that answered, by its own word; empty when it gave none."""
        number = self.tag.to_bytes(8, sys.byteorder) + self.value.to_bytes(8, sys.byteorder)
        return number.hex() if any(number) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Mirror of ``kvx_engine_config``: sizes in bytes, times in milliseconds. ``engine_id`` is 16 random bytes."""

    engine_id: bytes
    transports: tuple[str, ...] = ("shm", "tcp")
    socket_dir: str = ""
    tcp_bind: str = "127.0.0.1"
    tcp_port: int = 0
    tcp_congestion: str = "reno"
    tcp_threads: int = 2
    tcp_streams: int = 2
    tcp_encryption: str = "off"
    hixl_bind: str = "127.0.0.1"
    hixl_port: int = 0
    hixl_engine_port: int = 0
    hixl_options: str = ""
    fault_spec: str = ""
    counters_path: str = ""
    copy_threads: int = 2
    inflight_max: int = 4096
    notify_max: int = 65536
    regions_max: int = 4096
    grants_max: int = 65536
    peers_max: int = 1024
    accepted_max: int = 1024
    segments_max: int = 65536
    inline_bytes_max: int = 256 * 1024
    nt_bytes_min: int = 128 * 1024
    chunk_bytes: int = MIB
    frame_bytes: int = MIB
    hbm_arena_bytes: int = 256 * MIB
    pinned_arena_bytes: int = 64 * MIB
    connect_ms: int = 5000
    handshake_ms: int = 5000
    cancel_ms: int = 1000
    spin_us: int = 0
    manual: bool = False  # `loop` moves only in `Engine.step`
    cross_memory_attach: bool = True
    hugepages: bool = True
    numa_node: str = ""  # of its threads: a number, "auto", or "" for any
    engine_cpus: str = ""  # of its threads: "0-3,8", "all", or "" for those of the thread that opens it
    tcp_zero_copy: bool = True  # puts lend their pages to the kernel
    device_ipc: bool = True  # map device memory of other processes of this host

    @property
    def flags(self) -> int:
        """``KVX_ENGINE_*``."""
        allowed = (self.cross_memory_attach, self.hugepages, self.device_ipc)
        forbidden = sum(2 << bit for bit, it_is in enumerate(allowed) if not it_is)
        encrypt, copy = 16 * (self.tcp_encryption == "on"), 32 * (not self.tcp_zero_copy)
        return int(self.manual) | forbidden | encrypt | copy

    def fill(self, ffi: Any, native: Any) -> list[Any]:
        """Write into a ``kvx_engine_config``; the result keeps its strings alive."""
        if len(self.engine_id) != 16:
            raise ConfigError("engine_id must be 16 bytes", length=len(self.engine_id))
        texts = {name: os.fsencode(getattr(self, name)) for name in TEXTS}
        texts["transports"] = ",".join(self.transports).encode()
        keep = [(name, ffi.new("char[]", text)) for name, text in texts.items()]
        for name, value in keep:
            setattr(native, name, value)
        for name in NUMBERS:
            try:
                setattr(native, name, getattr(self, name))
            except OverflowError:
                raise ConfigError(f"{name} is out of range", value=getattr(self, name)) from None
        native.flags = self.flags
        native.engine_id = self.engine_id
        return keep

    @classmethod
    def from_config(cls, config: Config, engine_id: bytes, **overrides: Any) -> EngineConfig:
        """The engine's part of the configuration; ``overrides`` are fields of this class."""
        values: dict[str, Any] = {name: getattr(config, name) for name in FROM_CONFIG}
        values.update(
            transports=expanded(config.transports, accelerators=accelerators_likely()),
            tcp_bind=config.data_bind_host,
            tcp_port=config.data_port,
            hixl_bind=config.hixl_bind_host,
            connect_ms=round(config.connect_s * 1000),
            handshake_ms=round(config.handshake_s * 1000),
            cancel_ms=round(config.cancel_s * 1000),
        )
        values.update(overrides)
        return cls(engine_id=engine_id, **values)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportInfo:
    """What a transport can do. ``rank``: lower is better. ``copies_per_byte``: CPU copies of each byte, both sides."""

    index: int
    name: str
    endpoint: str
    caps: int
    rank: int
    alignment: int
    region_bytes_max: int
    copies_per_byte: float
    memory: int
    local_memory: int
    secret: bytes | None = field(default=None, repr=False)  # what a peer needs beside the endpoint

    def maps(self, kind: MemoryKind) -> bool:
        """An import of this kind of memory can be mapped: read in place, without a copy."""
        return bool(self.caps & (Caps.MAP_HBM if kind is MemoryKind.HBM else Caps.MAP))

    @property
    def same_host(self) -> bool:
        return bool(self.caps & Caps.SAME_HOST)

    @property
    def can_check(self) -> bool:
        """Transfers can be checksummed end to end."""
        return bool(self.caps & Caps.CHECK)

    @property
    def encrypted(self) -> bool:
        """What it sends to other hosts is encrypted."""
        return bool(self.caps & Caps.ENCRYPTED)

    @property
    def own_engine(self) -> bool:
        """Reaches memory of its own engine only."""
        return bool(self.caps & Caps.OWN)

    def moves(self, kind: MemoryKind) -> bool:
        """It reads and writes memory of this kind, on either side."""
        return bool((self.memory & self.local_memory) >> kind & 1)

    def reaches(self, local: MemoryKind | None, remote: MemoryKind) -> bool:
        """It moves bytes between our memory of one kind (None: no memory, only a notification) and an owner's."""
        return bool(self.memory >> remote & 1) and (local is None or bool(self.local_memory >> local & 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionInfo:
    """Registered memory, ``address`` and ``length`` in bytes. ``references``: how many registrations share it."""

    id: int
    generation: int
    address: int
    length: int
    flags: int
    references: int
    numa_node: int
    kind: MemoryKind
    device: int | None

    @property
    def shared(self) -> bool:
        """Peers on this host can map it."""
        return bool(self.flags & 1)

    @property
    def read_only(self) -> bool:
        return bool(self.flags & 4)

    @property
    def on_device(self) -> bool:
        """The CPU cannot touch it."""
        return bool(self.flags & 8)

    @property
    def spilled(self) -> bool:
        """Asked for on a device, which was full: it is pinned host memory."""
        return bool(self.flags & 16)

    @property
    def numa(self) -> str:
        """What became of the wish for a NUMA node: "none" was asked for, "bound", or "not applied"."""
        return "not applied" if self.flags & 32 else "bound" if self.numa_node >= 0 else "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """One accelerator, all sizes in bytes. ``arena_bytes`` is what this engine took of its memory, ``region_bytes``
    what its regions use of that, ``foreign_bytes`` what it registered for the application; ``live_tokens``: operations
    of this engine on its regions now.
    """

    device: int
    physical: int | None
    free_bytes: int
    total_bytes: int
    arena_bytes: int
    region_bytes: int
    foreign_bytes: int
    registrations: int
    live_tokens: int

    @property
    def available_bytes(self) -> int:
        """What a new region could get at most: free memory of the device, and free memory of this engine's arenas."""
        return self.free_bytes + self.arena_bytes - self.region_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantInfo:
    """The right to reach a part of a region: ``length`` in bytes, ``access`` 1 read, 2 write, 3 both."""

    id: int
    generation: int
    length: int
    access: int
    key: bytes = field(repr=False)


# -- the counters of an engine as frozen values: of this process, or from the counters file of another one
# The layout is ``kvx_counters`` of ``api.cdef.h`` (a test compares the two). Native threads change each number
# atomically, so a reader sees every number whole, though not all at one instant.


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
