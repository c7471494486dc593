"""What the probes saw, as plain values. None or -1 means that the host does not tell; each class says which."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kvxfer.wire.session import VERSIONS

UNLIMITED = -1  # of a resource limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """This copy of kvxfer. ``native_error`` empty: the engine loads. ``packages``: name to version, "" missing."""

    version: str = "0+unknown"
    protocol: int = VERSIONS[1]
    python: tuple[int, int, int] = (3, 11, 0)
    implementation: str = "CPython"
    machine: str = "x86_64"
    native_path: str = ""
    native_error: str = ""
    encryption_error: str = ""  # why tcp could not encrypt here
    packages: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """One transport, opened alone. ``error`` empty: it works here. ``wanted``: configured on purpose."""

    name: str
    error: str = ""
    memory: str = ""
    encrypted: bool = False
    endpoint: str = ""
    listed: bool = True
    wanted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """Hugepages of one size, in pages."""

    page_bytes: int
    total: int
    free: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Numa:
    """``mbind_errno``: 0 allowed, None not tried. ``cards``: accelerator's PCI address to its node."""

    nodes: tuple[int, ...] = (0,)
    mbind_errno: int | None = 0
    cards: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """The monotonic clock. ``backwards``: how often it stepped back while it was looked at."""

    source: str = "tsc"
    backwards: int = 0
    read_ns: float = 50.0
    resolution_ns: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Limits are (soft, hard), UNLIMITED for none; sizes in bytes. ``capabilities``: names that this process has."""

    memlock: tuple[int, int] = (UNLIMITED, UNLIMITED)
    descriptors: tuple[int, int] = (65536, 65536)
    capabilities: frozenset[str] = frozenset()
    pages: tuple[Pages, ...] = ()
    memfd_errno: int = 0
    tmpfs_bytes: int | None = None
    memory_total: int = 0
    memory_available: int = 0
    container_limit: int | None = None
    container_used: int = 0
    ptrace_scope: int | None = 0
    attach_errno: int | None = 0
    maps_max: int = 65530
    numa: Numa = Numa()
    clock: Clock = Clock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bind:
    """An attempt to listen. ``errno`` 0: it worked. ``ours``: the port is held by this host's kvxfer daemon."""

    option: str
    address: str
    errno: int = 0
    reason: str = ""
    ours: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Tcp:
    """Settings of the kernel. ``buffers_max``: the largest receive and send buffer that it grows to by itself."""

    congestion: str = "cubic"
    available: tuple[str, ...] = ("reno", "cubic")
    allowed: tuple[str, ...] = ("reno", "cubic")
    buffers_max: tuple[int, int] = (16 << 20, 16 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaPort:
    """A port of a NIC of the host that can do RDMA."""

    device: str
    port: int
    state: str
    physical: str = ""
    layer: str = ""
    rate: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """``local``: numeric address to whether this host has it. ``families``: 4 and 6 as far as there is a route.
    ``user_secret``: its file, where no other proof is configured; ``user_secret_made``: it is there already.
    """

    binds: tuple[Bind, ...] = ()
    local: Mapping[str, bool] = field(default_factory=dict)
    families: frozenset[int] = frozenset((4, 6))
    socket_dir: str = ""
    socket_dir_error: str = ""
    user_secret: str = ""
    user_secret_made: bool = False
    user_secret_error: str = ""
    daemon: str = ""
    tcp: Tcp = Tcp()
    rdma: tuple[RdmaPort, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A numeric address of a peer, and how a plain TCP connection to it went. ``error`` empty: well."""

    address: str
    family: int = 4
    error: str = ""
    ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSeen:
    """Another node. ``error`` empty: its daemon answered, and the other fields are what it said."""

    given: str
    candidates: tuple[Candidate, ...] = ()
    error: str = ""
    hint: str = ""
    version: str = ""
    protocol: int = 0
    transports: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    data_advertise: tuple[str, ...] = ()
    accelerator: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One accelerator as ACL shows it; bytes of its memory. ``error``: why it could not be asked."""

    device: int
    free: int = 0
    total: int = 0
    healthy: bool = True
    physical: int | None = None
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """The libraries as a process of their own found them. ``why``: what is missing, when ``found`` is false."""

    found: bool = False
    why: str = ""
    simulated: bool = False
    soc: str = ""
    toolkit: str = ""
    reported: str = ""
    paths: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    cards: tuple[Card, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CardLink:
    """What hccn_tool says about the network port of one card; empty texts: it said nothing that we know."""

    device: int
    link: str = ""
    tls: str = ""
    health: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ascend:
    """Driver and toolkit as the file system shows them, and what the libraries say.

    ``denied``: device files that this user may not open. ``holders``: device to the processes that hold it open.
    ``hccn``: the text of /etc/hccn.conf, None when it cannot be read. ``directories``: places where the toolkit was
    looked for, and whether it is there. ``installed``: toolkit and driver as daemons tell each other.
    """

    devices: tuple[int, ...] = ()
    missing: tuple[str, ...] = ()
    denied: tuple[str, ...] = ()
    driver: str = ""
    hccn: str | None = None
    hccn_path: str = "/etc/hccn.conf"
    hccn_tool: str = ""
    links: tuple[CardLink, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    directories: tuple[tuple[str, bool], ...] = ()
    holders: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    nic_port_taken: bool = False
    installed: Mapping[str, object] = field(default_factory=dict)
    accelerator: Accelerator = Accelerator()


# -- one finding: what was looked at, how it is, what was found, what to do. And how numbers are written in it ---------


class FindingState(StrEnum):
    """How something is. `NOT_HERE` is no fault: the host lacks what another one may have."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"
    NOT_HERE = "not here"


_GRAVITY = {FindingState.NOT_HERE: 0, FindingState.OK: 1, FindingState.WARNING: 2, FindingState.PROBLEM: 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """``found`` is one line, and so is ``advice``: what to do about it, empty when nothing is to be done."""

    group: str
    check: str
    state: FindingState
    found: str
    advice: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "found", one_line(self.found))
        object.__setattr__(self, "advice", one_line(self.advice))


@dataclass(frozen=True, slots=True)
class FindingGroup:
    """Makes the findings of one group."""

    name: str

    def ok(self, check: str, found: str, advice: str = "") -> Finding:
        return Finding(group=self.name, check=check, state=FindingState.OK, found=found, advice=advice)

    def warning(self, check: str, found: str, advice: str) -> Finding:
        return Finding(group=self.name, check=check, state=FindingState.WARNING, found=found, advice=advice)

    def problem(self, check: str, found: str, advice: str) -> Finding:
        return Finding(group=self.name, check=check, state=FindingState.PROBLEM, found=found, advice=advice)

    def not_here(self, check: str, found: str, advice: str = "") -> Finding:
        return Finding(group=self.name, check=check, state=FindingState.NOT_HERE, found=found, advice=advice)


def worst(findings: Iterable[Finding]) -> FindingState:
    """The gravest state of all; OK when there are none."""
    return max((finding.state for finding in findings), key=_GRAVITY.__getitem__, default=FindingState.OK)


def one_line(text: str) -> str:
    """Without line ends and runs of blanks."""
    return " ".join(text.split())


def size(value: float) -> str:
    """A number of bytes as people read it."""
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= scale:
            return f"{value / scale:.1f}".removesuffix(".0") + f" {unit}"
    return f"{value:.0f} bytes"


def some(items: Iterable[object], limit: int = 8) -> str:
    """A comma list that stays short."""
    words = [str(item) for item in items]
    more = f" and {len(words) - limit} more" if len(words) > limit else ""
    return ", ".join(words[:limit]) + more
