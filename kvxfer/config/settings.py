"""The configuration of a daemon and of the clients beside it: one frozen `Config`, made from defaults, a TOML file, the
environment and flags, in that order of rising precedence.

The idea: each option is declared once, with its documentation, unit and range (see `options.py`). The loader, the
command line, `kvxfer config` and the reference page are all generated from `CONFIG_OPTIONS`, and a value that is not
understood stops the start before any port is opened, with key, value, accepted range and source. Numbers that both
sides of a connection must agree on are not options; they stand here as constants.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from kvxfer.addresses import Address, is_loopback, is_numeric, is_wildcard, parse_address
from kvxfer.config.options import TEXT_CHARS_MAX, Option, format_size
from kvxfer.config.sources import (
    SECRET_BYTES_MAX,
    SECRET_BYTES_MIN,
    known,
    read_environment,
    read_file,
    read_flags,
    read_secret_file,
)
from kvxfer.errors import ConfigError

# Limits of the protocol itself: the same on every node.
KEY_CHARS_MAX = 256
CHANNEL_CHARS_MAX = 256
POSTING_BODY_BYTES_MAX = 6 << 20  # 4 for the longest block table in any order, 2 for the layout and the descriptors
ECHO_BYTES_MAX = 64 << 10
NAMESPACE_CHARS_MAX = 64
DEFAULT_NAMESPACE = "default"
CLAIM_NUMBER_MAX = (1 << 24) - 1
FRAME_UNAUTHENTICATED_BYTES_MAX = 16 << 10
FRAME_OVERHEAD_BYTES = 64 << 10  # room in a control frame for everything beside its largest field
SOCKET_DIR_CHARS_MAX = 80  # sun_path holds 107; the longest name below the directory has 22

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
TRANSPORTS = ("loop", "shm", "tcp", "hixl", "ucx")


def _option(kind: Any, default: Any, doc: str, low: float = 0, high: float = 0, **more: Any) -> Any:
    units = {"size": "bytes", "seconds": "s"}
    option = Option(kind=kind, default=default, doc=doc, min=low, max=high, unit=units.get(kind, ""), **more)
    return field(default=default, repr=not option.secret, metadata={"option": option})


def _int(default: int, low: int, high: int, doc: str) -> Any:
    return _option("int", default, doc, low, high)


def _size(default: int, low: int, high: int, doc: str) -> Any:
    return _option("size", default, doc, low, high)


def _seconds(default: float, low: float, high: float, doc: str) -> Any:
    return _option("seconds", default, doc, low, high)


def _text(default: str, doc: str, chars_max: int = TEXT_CHARS_MAX, **more: Any) -> Any:
    return _option("text", default, doc, 0, chars_max, **more)


def _path(doc: str) -> Any:
    return _text("", doc, empty=True, pattern=r"[^\0]+", expects="a path to a file")


_NAMESPACE = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Every option, validated. `Config()` holds the defaults of a daemon; `Config.embedded()` those inside a process.

    Sizes are in bytes, names ending in `_s` in seconds. Construction also takes the text forms that a file may hold
    (`landing_bytes_max="1GiB"`). Raises `ConfigError`.
    """

    # -- who and where --
    node_name: str = _text(
        "",
        "Name of this node in logs and metrics; empty: the host's name.",
        empty=True,
        pattern=r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}",
        expects="1 to 64 letters, digits, '.', '_' or '-', beginning with a letter or digit",
    )
    listen: str = _option(
        "address",
        "127.0.0.1:17800",
        "Where other nodes reach the daemon's control plane. Any address but loopback needs a secret or a certificate. "
        "Port 0: any.",
        numeric=True,
    )
    advertise: tuple[str, ...] = _option(
        "list",
        (),
        "Addresses that peers dial, best first; empty: the bound address. Port 0 or none: the bound port.",
        empty=True,
        wildcard=False,
    )
    http: str = _option(
        "address",
        "127.0.0.1:17801",
        "Where /metrics, /healthz and /readyz are served; empty: nowhere.",
        empty=True,
        numeric=True,
    )
    http_allow_remote: bool = _option(
        "bool", False, "Allow `http` on an address that other hosts reach: it has no login."
    )
    core_dumps: bool = _option(
        "bool", False, "A crash of `kvxfer serve` may leave a core dump. It would hold the secrets of the node."
    )
    socket_dir: str = _text(
        "",
        "Directory of the daemon's Unix socket; empty: $XDG_RUNTIME_DIR/kvxfer, else /tmp/kvxfer-<uid>.",
        empty=True,
        chars_max=SOCKET_DIR_CHARS_MAX,
        pattern=r"/.*",
        expects=f"an absolute path of at most {SOCKET_DIR_CHARS_MAX} characters",
    )
    secret: str = _text(
        "",
        "Shared secret of all nodes; prefer `secret_file`.",
        empty=True,
        secret=True,
        chars_max=SECRET_BYTES_MAX,
        expects=f"{SECRET_BYTES_MIN} to {SECRET_BYTES_MAX} bytes of UTF-8 text",
    )
    secret_file: str = _text(
        "",
        "File that holds the shared secret; only its owner may read it. Of several lines the first is used, all are "
        "accepted. Without any proof configured: a secret of this user, made at the first start.",
        empty=True,
        pattern=r"[^\0]+",
        expects="a path to a file that only its owner can read",
    )
    node_keys_file: str = _path(
        "File with this node's own keys, by `kvxfer keys`; they prove which node it is. Only its owner may read it."
    )
    tls_cert: str = _path("File with this node's certificate and its chain (PEM): mutual TLS between daemons.")
    tls_key: str = _path("File with the key of `tls_cert` (PEM, without a passphrase); only its owner may read it.")
    tls_ca: str = _path("File with the authorities (PEM) of which a peer must have a certificate.")
    reload_s: float = _seconds(
        5, 0.05, 3600, "How often the files of secret, node keys and certificate are looked at for changes."
    )
    reload_grace_s: float = _seconds(
        10, 0, 86400, "Connections proved by a secret or an authority that was taken away are closed after this time."
    )
    namespace: str = _text(
        DEFAULT_NAMESPACE,
        "What this node belongs to; postings of another namespace cannot be seen. For a worker, default: its daemon's.",
        chars_max=NAMESPACE_CHARS_MAX,
        pattern=_NAMESPACE,
        expects="1 to 64 letters, digits, '.', '_' or '-', beginning with a letter or digit",
    )
    allow_nodes: tuple[str, ...] = _option(
        "list",
        (),
        "Node ids that may connect, in either direction; empty: any that proves itself.",
        empty=True,
        pattern=r"[0-9a-f]{32}",
        expects="a list of node ids, 32 hex digits each",
        items_max=4096,
    )
    allow_namespaces: tuple[str, ...] = _option(
        "list",
        (),
        "Namespaces whose nodes and workers may connect, beside `namespace`. They see only what is theirs.",
        empty=True,
        pattern=_NAMESPACE,
        expects="a list of names as for `namespace`",
        items_max=64,
    )
    socket_uids: tuple[str, ...] = _option(
        "list",
        (),
        "Users, beside the daemon's own and root, that the Unix socket takes; a client takes a daemon of theirs.",
        empty=True,
        pattern=r"0|[1-9][0-9]{0,9}",
        expects="a list of numeric user ids",
    )
    # -- data plane --
    transports: tuple[str, ...] = _option(
        "list",
        ("auto",),
        "Transports in order of preference. `auto`: every one that this machine has (hixl, shm, tcp). Without it each"
        " one must be there. Each may be decorated as `fault+NAME`.",
        choices=(*TRANSPORTS, "auto"),
    )
    data_bind: str = _option(
        "host",
        "",
        "Address where engines listen for data; empty: the host of `listen`, for a worker what its daemon has.",
        empty=True,
        numeric=True,
    )
    data_port: int = _int(
        0, 0, 65535, "Port where engines listen for data; 0: any. A worker with its daemon's takes any."
    )
    data_advertise: tuple[str, ...] = _option(
        "list",
        (),
        "Addresses that peers' engines dial; empty: the bound address, for a worker what its daemon tells. The port is"
        " the bound one.",
        empty=True,
        wildcard=False,
    )
    tcp_streams: int = _int(2, 1, 32, "Connections per peer of the tcp transport.")
    tcp_threads: int = _int(2, 1, 64, "Threads that drive the tcp transport.")
    tcp_encryption: str = _text(
        "off",
        'Encrypt what tcp moves: "on" on both sides, or they refuse each other. Takes a control plane that nobody can '
        "read: certificates, or loopback.",
        choices=("off", "on"),
    )
    tcp_congestion: str = _text(
        "reno",
        "Congestion control between processes of this host (one that does not pace); empty: the system's.",
        empty=True,
        pattern=r"[a-z][a-z0-9_-]{0,14}",
        expects="the name of a congestion control, e.g. reno, cubic, bbr",
    )
    tcp_zero_copy: bool = _option(
        "bool", True, "Puts over tcp lend their pages to the kernel instead of copying them into it."
    )
    copy_threads: int = _int(2, 1, 64, "Threads that copy for the shm transport.")
    hugepages: bool = _option("bool", True, "Use hugepages for allocated regions when the host has some.")
    numa_node: str = _text(
        "",
        "NUMA node of the engine's threads: a number, or auto for that of the thread that opens it; empty: any.",
        empty=True,
        pattern=r"auto|[0-9]{1,3}",
        expects="auto, or the number of a node of this host",
    )
    engine_cpus: str = _text(
        "",
        "CPUs of the engine's threads: 0-3,8, or all; empty: those of the thread that opens it, which may be pinned.",
        empty=True,
        chars_max=200,
        pattern=r"all|[0-9]{1,5}(-[0-9]{1,5})?(,[0-9]{1,5}(-[0-9]{1,5})?)*",
        expects="all, or numbers and ranges separated by commas",
    )
    hbm_arena_bytes: int = _size(
        256 * MIB, 2 * MIB, 1 << 40, "Device memory is taken from an accelerator's driver in blocks of this size."
    )
    pinned_arena_bytes: int = _size(
        64 * MIB, 2 * MIB, 1 << 40, "The same for pinned host memory that an accelerator reaches."
    )
    cross_memory_attach: bool = _option("bool", True, "Reach memory that others allocated by cross-memory attach.")
    fault_spec: str = _text(
        "",
        "Faults that `fault+NAME` transports inject, for tests: seed=1,delay_ms=0..50,fail_rate=0.1.",
        empty=True,
        pattern=r"[a-z_]+=[0-9.+]+(,[a-z_]+=[0-9.+]+)*",
        expects="name=value pairs separated by commas",
    )
    spin_us: int = _int(
        0,
        0,
        1000,
        "Microseconds that tcp spins for the next message before it sleeps: quicker small transfers for CPU time.",
    )
    inline_bytes_max: int = _size(
        256 * KIB, 0, 1 * MIB, "Transfers up to this size are copied by the caller's thread (tcp: 128 KiB at most)."
    )
    nt_bytes_min: int = _size(128 * KIB, 0, 1 * GIB, "Copies from this size on use non-temporal stores.")
    chunk_bytes: int = _size(1 * MIB, 4 * KIB, 64 * MIB, "A running copy looks for its cancellation this often.")
    frame_bytes: int = _size(1 * MIB, 4 * KIB, 16 * MIB, "Largest payload of one data frame of the tcp transport.")
    inflight_max: int = _int(4096, 1, 1 << 20, "Live operations of one engine.")
    notify_max: int = _int(65536, 16, 1 << 22, "Notifications that arrived and were not yet read.")
    regions_max: int = _int(4096, 1, 1 << 20, "Registered regions of one engine.")
    grants_max: int = _int(65536, 1, 1 << 22, "Live grants of one engine.")
    peers_max: int = _int(1024, 1, 65536, "Engines that one engine is connected to; idle ones make room.")
    accepted_max: int = _int(1024, 1, 65536, "Engines that are connected to one engine.")
    segments_max: int = _int(65536, 1, 1 << 20, "Segments of one operation.")
    hixl_port: int = _int(0, 0, 65535, "Port of the daemon's side link of the hixl transport; 0: any.")
    hixl_engine_port: int = _int(
        0,
        0,
        65535 - 64,
        "Port of HIXL itself in the daemon, for its first accelerator, the others follow; 0: any. It has no login.",
    )
    hixl_options: str = _text(
        "",
        "For HIXL itself, the same on all nodes: KEY=VALUE;KEY=VALUE. Empty: its defaults without BufferPool.",
        empty=True,
        chars_max=1000,
        pattern=r"[A-Za-z]+=[^;]+(;[A-Za-z]+=[^;]+)*",
        expects="KEY=VALUE pairs separated by semicolons",
    )
    device_ipc: bool = _option(
        "bool", True, "Copy between accelerators of one host through mapped memory; false: HIXL moves it."
    )
    ping_device: str = _text(
        "",
        "Accelerator where the daemon keeps a block for `kvxfer ping` (in an arena of its own); empty: none.",
        empty=True,
        pattern=r"[0-9]{1,3}",
        expects="the number of an accelerator",
    )
    integrity: bool = _option("bool", False, "Checksum every transfer end to end.")
    ignore_fingerprint: bool = _option(
        "bool", False, "Move a cache even when both sides name different models, revisions or quantisations."
    )
    # -- admission --
    window_ops_max: int = _int(256, 1, 65536, "Operations in flight to one peer.")
    window_bytes_max: int = _size(
        256 * MIB, 64 * KIB, 1 << 40, "Bytes in flight to one peer, of one priority and of more urgent ones."
    )
    inflight_bytes_max: int = _size(
        1 * GIB, 64 * KIB, 1 << 42, "Bytes in flight to all peers together, counted the same way."
    )
    window_waiters_max: int = _int(16384, 1, 1 << 20, "Operations that wait for one peer's window.")
    waiters_max: int = _int(65536, 1, 1 << 22, "Operations that wait for the windows of all peers together.")
    # -- control plane --
    links_max: int = _int(1024, 1, 65536, "Incoming control connections.")
    handshakes_max: int = _int(64, 1, 4096, "Incoming control connections that have not yet proved themselves.")
    workers_max: int = _int(256, 1, 4096, "Workers of this node.")
    requests_max: int = _int(
        1024, 1, 65536, "Unanswered requests of one control connection; those that wait are under `waiting_max`."
    )
    link_queue_bytes_max: int = _size(
        16 * MIB, 64 * KIB, 1 * GIB, "Bytes that wait to be sent on one control connection."
    )
    link_queues_bytes_max: int = _size(
        256 * MIB, 1 * MIB, 1 << 40, "Bytes that wait to be sent on all control connections of the daemon together."
    )
    frame_control_bytes_max: int = _size(8 * MIB, 7 * MIB, 64 * MIB, "Largest frame of the control plane.")
    postings_max: int = _int(16384, 1, 1 << 22, "Live offers, tickets and named regions of this node.")
    posting_bytes_max: int = _size(1 * GIB, 6 * MIB, 1 << 40, "Bytes of all postings' bodies together.")
    claims_max: int = _int(65536, 1, 1 << 22, "Live claims on this node's postings.")
    waiting_max: int = _int(
        4096, 1, 1 << 20, "Requests that wait: here for a posting or for room, and for this node's workers elsewhere."
    )
    expired_memory_max: int = _int(16384, 0, 1 << 22, "Ended postings that are remembered, to say `lease_expired`.")
    mailboxes_max: int = _int(4096, 1, 1 << 20, "Channels that hold or listen for messages.")
    mailbox_messages_max: int = _int(1024, 1, 1 << 20, "Messages that one channel holds while nobody listens.")
    mailbox_bytes_max: int = _size(8 * MIB, 4 * KIB, 1 * GIB, "Bytes that one channel holds while nobody listens.")
    mailboxes_bytes_max: int = _size(64 * MIB, 4 * KIB, 16 * GIB, "Bytes that all channels hold together.")
    mail_bytes_max: int = _size(1 * MIB, 1, 16 * MIB, "Largest message.")
    mail_ttl_s: float = _seconds(30, 0.1, 3600, "How long an undelivered message is held.")
    landing_memory: str = _text(
        "dram",
        "Where landings lie: in host memory, or on the least loaded of some accelerators.",
        choices=("dram", "hbm"),
    )
    landing_devices: tuple[str, ...] = _option(
        "list",
        (),
        'With landing_memory = "hbm": the accelerators that take landings; empty: all.',
        empty=True,
        pattern=r"[0-9]{1,3}",
        expects="a list of numbers of accelerators",
    )
    landing_bytes_max: int = _size(
        256 * MIB, 0, 1 << 42, "Capacity of the landing pool, on accelerators of each one's part; 0: none."
    )
    landing_prewarm_bytes: int = _size(
        0, 0, 1 << 42, "Landing memory, of each part, that is allocated and touched at the start."
    )
    # -- times --
    lease_s: float = _seconds(60, 0.1, 86400, "Life of an offer or ticket that names none.")
    lease_s_max: float = _seconds(3600, 1, 604800, "Longest life of an offer or ticket.")
    wait_s_max: float = _seconds(3600, 0.1, 86400, "Longest time that a claim may wait for its posting.")
    timeout_s: float = _seconds(30, 0.01, 86400, "Deadline of a call that names none.")
    daemon_wait_s: float = _seconds(
        2, 0, 86400, "How long a call waits while this node's daemon is gone. Then DaemonUnavailable; 0: at once."
    )
    connect_s: float = _seconds(5, 0.05, 300, "Deadline of a connection attempt.")
    handshake_s: float = _seconds(5, 0.05, 60, "Deadline of the handshake on a new connection.")
    keepalive_s: float = _seconds(10, 0.05, 300, "A silent connection is probed after this time.")
    keepalive_live_s: float = _seconds(0.5, 0.05, 60, "The same, while live claims depend on the connection.")
    dead_s: float = _seconds(2, 0.05, 300, "A probe without an answer for so long means that the peer is lost.")
    peer_idle_s: float = _seconds(
        300, 1, 86400, "A connection to another node that nobody uses is closed after this time."
    )
    drain_s: float = _seconds(5, 0, 600, "Time that running transfers have to finish when the daemon is told to stop.")
    stall_s: float = _seconds(
        1, 0.05, 300, "A running transfer or landing that has not moved on for so long is called stalled."
    )
    cancel_s: float = _seconds(1, 0.05, 60, "A cancelled transfer that the peer does not settle resets its connection.")
    reconnect_min_s: float = _seconds(
        0.1, 0.01, 60, "Pause before the first attempt to reconnect; it doubles each time."
    )
    reconnect_max_s: float = _seconds(5, 0.01, 600, "Longest pause between attempts to reconnect.")
    # -- logging --
    log_level: str = _text("info", "Least severe log lines to write.", choices=("debug", "info", "warning", "error"))
    log_format: str = _text("text", "Form of log lines.", choices=("text", "json"))

    def __post_init__(self) -> None:
        for option in CONFIG_OPTIONS:
            object.__setattr__(self, option.name, option.parse(getattr(self, option.name), "argument"))
        for keys, why in self._conflicts():
            raise ConfigError(why, keys=keys)

    @classmethod
    def embedded(cls, **changes: Any) -> Config:
        """The defaults of a daemon inside another process: any port of 127.0.0.1, no HTTP; ``changes`` override them.

        Raises: `ConfigError` for an option that does not exist, or a value that is wrong.
        """
        for name in changes:
            known(name, "argument", BY_NAME)
        return cls(**({"listen": "127.0.0.1:0", "http": ""} | changes))

    @property
    def listen_address(self) -> Address:
        return parse_address(self.listen)

    @property
    def http_address(self) -> Address | None:
        return parse_address(self.http) if self.http else None

    @property
    def data_bind_host(self) -> str:
        """The numeric address where the engine listens."""
        host = self.data_bind or self.listen_address.host
        return host if is_numeric(host) else "127.0.0.1"

    @property
    def encrypts(self) -> bool:
        """Whether the data path is encrypted."""
        return self.tcp_encryption == "on"

    @property
    def hixl_bind_host(self) -> str:
        """The numeric address where hixl listens. It is also its engine's name, so what `data_advertise` names first
        takes the place of a wildcard.
        """
        if not is_wildcard(self.data_bind_host):
            return self.data_bind_host
        told = (parse_address(text, default_port=0).host for text in self.data_advertise)
        return next((host for host in told if is_numeric(host)), self.data_bind_host)

    def advertised(self, bound: Address) -> tuple[Address, ...]:
        """The addresses that peers shall dial, given what was bound. Raises `ConfigError`, never names a wildcard."""
        return _advertised("advertise", self.advertise, bound)

    def data_advertised(self, bound: Address) -> tuple[Address, ...]:
        """The same for the engine's data listener."""
        return _advertised("data_advertise", self.data_advertise, bound)

    def read_secrets(self) -> tuple[bytes, ...]:
        """The secrets of `secret` or `secret_file`: the first is used, all are accepted. Raises `ConfigError`."""
        if self.secret_file:
            return read_secret_file(self.secret_file)
        return (self.secret.encode(),) if self.secret else ()

    @property
    def has_proof(self) -> bool:
        """Whether this node was given something to prove itself with; else the secret of its user takes that place."""
        return bool(self.secret or self.secret_file or self.node_keys_file or self.tls_cert)

    @property
    def socket_users(self) -> frozenset[int]:
        """The users of `socket_uids`."""
        return frozenset(map(int, self.socket_uids))

    def check_security(self) -> None:
        """Refuse, with the way out, to serve other hosts without authentication. Raises `ConfigError`."""
        hint = f"set secret_file to a file (mode 0600) with at least {SECRET_BYTES_MIN} bytes, the same on all nodes"
        for key, host in (("listen", self.listen_address.host), ("data_bind", self.data_bind_host)):
            if not is_loopback(host) and not self.has_proof:
                why = f"{key} is reachable from other hosts, and without a secret or certificate anybody could join"
                raise ConfigError(
                    why,
                    key=key,
                    value=host,
                    hint=f"{hint}, or node_keys_file, or tls_cert, tls_key and tls_ca, or use 127.0.0.1",
                )
        if self.encrypts and not is_loopback(self.listen_address.host) and not self.tls_cert:
            why = (
                "tcp_encryption is on, and the control plane, which carries the keys, is open to whoever can read its "
                "packets"
            )
            hint = 'set tls_cert, tls_key and tls_ca, or tcp_encryption = "off"'
            raise ConfigError(why, key="tcp_encryption", value=self.tcp_encryption, hint=hint)
        http = self.http_address
        if http is not None and not http.is_loopback and not self.http_allow_remote:
            why = "http is reachable from other hosts and has no login"
            raise ConfigError(why, key="http", value=self.http, hint="set http_allow_remote = true, or use 127.0.0.1")
        self.read_secrets()

    def _conflicts(self) -> Iterator[tuple[str, str]]:
        """Values that are fine alone and wrong together: (keys, why)."""
        size = len(self.secret.encode())
        if self.secret and not SECRET_BYTES_MIN <= size <= SECRET_BYTES_MAX:
            yield "secret", f"the secret has {size} bytes; accepted: {SECRET_BYTES_MIN} to {SECRET_BYTES_MAX}"
        if self.secret and self.secret_file:
            yield "secret,secret_file", "secret and secret_file are both set; keep one"
        files = {name: getattr(self, name) for name in ("tls_cert", "tls_key", "tls_ca")}
        if any(files.values()) and not all(files.values()):
            missing = ", ".join(name for name, path in files.items() if not path)
            yield ",".join(files), f"tls_cert, tls_key and tls_ca are set together or not at all; missing: {missing}"
        for low, high in _ORDERED:
            if getattr(self, low) > getattr(self, high):
                shown = [f"{name} ({BY_NAME[name].show(getattr(self, name))})" for name in (low, high)]
                yield f"{low},{high}", f"{shown[0]} must not be larger than {shown[1]}"
        for key, largest in (
            ("mail_bytes_max", self.mail_bytes_max),
            ("frame_control_bytes_max", POSTING_BODY_BYTES_MAX),
        ):
            if largest + FRAME_OVERHEAD_BYTES > self.frame_control_bytes_max:
                needed = format_size(largest + FRAME_OVERHEAD_BYTES)
                yield f"{key},frame_control_bytes_max", f"frame_control_bytes_max must be at least {needed}, see {key}"


_ORDERED = (
    ("lease_s", "lease_s_max"),
    ("mail_bytes_max", "mailbox_bytes_max"),
    ("mailbox_bytes_max", "mailboxes_bytes_max"),
    ("mailbox_bytes_max", "link_queue_bytes_max"),  # a new listener gets what was held at once
    ("frame_control_bytes_max", "link_queue_bytes_max"),
    ("landing_prewarm_bytes", "landing_bytes_max"),
    ("window_bytes_max", "inflight_bytes_max"),
    ("window_ops_max", "inflight_max"),
    ("handshakes_max", "links_max"),
    ("reconnect_min_s", "reconnect_max_s"),
)


def _declared() -> Iterator[Option]:
    for item in fields(Config):
        option: Option = item.metadata["option"]
        object.__setattr__(option, "name", item.name)  # the name stands once, at the field
        yield option


CONFIG_OPTIONS: tuple[Option, ...] = tuple(_declared())
BY_NAME: Mapping[str, Option] = {option.name: option for option in CONFIG_OPTIONS}


def _advertised(key: str, configured: tuple[str, ...], bound: Address) -> tuple[Address, ...]:
    wanted = tuple(parse_address(text, default_port=0) for text in configured)
    if not wanted and is_wildcard(bound.host):
        why = f"{bound} accepts on every interface, so peers must be told which address to dial"
        raise ConfigError(why, key=key, value="", hint=f"set {key} to an address of this host that peers can reach")
    return tuple(Address(item.host, item.port or bound.port) for item in wanted) or (bound,)


# -- putting a `Config` together from its sources, and remembering which value came from where -------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A configuration and where each value came from: "default", "file PATH", "environment KEY" or "flag --KEY"."""

    config: Config
    origins: Mapping[str, str]
    warnings: tuple[str, ...]


def load(
    path: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> Loaded:
    """Read the configuration: flags over environment over file over defaults.

    `path` falls back to $KVXFER_CONFIG, `env` to the process's environment; flags that are None were not given.
    Raises `ConfigError` for whatever is unknown or wrong; an unknown KVXFER_* variable is a warning only, since it may
    belong to another version.
    """
    env = os.environ if env is None else env
    path = path or env.get("KVXFER_CONFIG") or None
    values: dict[str, Any] = {}
    origins = dict.fromkeys(BY_NAME, "default")
    layers = [] if path is None else [(f"file {os.fspath(path)}", read_file(path))]
    from_env, warnings = read_environment(env, BY_NAME)
    for source, raw in [*layers, *from_env, *read_flags(flags or {}, BY_NAME)]:
        for name, value in raw.items():
            values[name] = known(name, source, BY_NAME).parse(value, source)
            origins[name] = source
    try:
        config = Config(**values)
        if config.secret_file:
            config.read_secrets()
    except ConfigError as wrong:
        keys = str(wrong.fields.get("keys") or wrong.fields.get("key")).split(",")
        wrong.fields["source"] = "; ".join(f"{key}: {origins.get(key, 'default')}" for key in keys)
        raise
    return Loaded(config=config, origins=origins, warnings=warnings)
