"""Looking at ports, addresses, kernel settings of TCP, and NICs of the host."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgpack

from kvxfer.addresses import Address, is_loopback, is_numeric, is_wildcard, parse_address
from kvxfer.config import Config
from kvxfer.config.paths import check_socket_dir, daemon_socket, socket_dir
from kvxfer.config.user_secret import where_user_secret
from kvxfer.doctor.facts import (
    Bind,
    Candidate,
    Finding,
    FindingGroup,
    Network,
    PeerSeen,
    Program,
    RdmaPort,
    Tcp,
    size,
    some,
)
from kvxfer.doctor.host import Tree
from kvxfer.errors import ConfigError, KvxferError, UsageError
from kvxfer.net.credentials import DAY_S, Credentials
from kvxfer.net.dial import candidates, reason, resolve
from kvxfer.net.link import Link, LocalIdentity
from kvxfer.net.listeners import listen_tcp, peer_credentials
from kvxfer.wire import messages as m

# -- looking at other nodes: a plain connection to every address, then the daemon's own account of itself --------------


async def probe_peers(given: Sequence[str], config: Config, timeout_s: float) -> tuple[PeerSeen, ...]:
    """Each node, all at the same time."""
    return tuple(await asyncio.gather(*(_peer(text, config, timeout_s) for text in given)))


async def _peer(given: str, config: Config, timeout_s: float) -> PeerSeen:
    wanted = given.split(",")
    addresses, failures = await resolve(candidates(wanted))
    unresolved = [Candidate(address=label, error=reason(failure)) for label, failure in failures.items()]
    tried = await asyncio.gather(*(_connect(address, timeout_s) for address in addresses))
    seen = (*tried, *unresolved)
    try:
        status = await ask_status(wanted, config, timeout_s)
    except KvxferError as failure:
        return PeerSeen(given=given, candidates=seen, error=failure.message, hint=failure.hint or "")
    accelerator = status.get("accelerator")
    return PeerSeen(
        given=given,
        candidates=seen,
        version=str(status.get("version", "")),
        protocol=_whole(status.get("protocol")),
        transports=_texts(status.get("transports")),
        addresses=_texts(status.get("addresses")),
        data_advertise=_texts(status.get("data_advertise")),
        accelerator=accelerator if isinstance(accelerator, dict) else {},
    )


async def _connect(address: Address, timeout_s: float) -> Candidate:
    family = 6 if ":" in address.host else 4
    started = time.perf_counter()
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(address.host, address.port)
    except (OSError, TimeoutError) as failure:
        return Candidate(address=str(address), family=family, error=reason(failure))
    taken = time.perf_counter() - started
    writer.close()
    return Candidate(address=str(address), family=family, ms=taken * 1e3)


async def ask_status(addresses: Sequence[str], config: Config, timeout_s: float) -> dict[str, Any]:
    """The status of the daemon; as a tool, which may ask nothing else."""
    known = Credentials(config, unconfigured="look")
    node_id = "" if known.keys is None else known.keys.node_id  # it proves itself with the keys of its node
    facts = LocalIdentity(role="tool", name="doctor", namespace=config.namespace, node_id=node_id)
    link = await Link.dial(addresses, facts, config, credentials=known, timeout=timeout_s)
    try:
        reply = await link.request(m.Status(), timeout=timeout_s)
    finally:
        await link.aclose("that was all")
    body = reply.body if isinstance(reply, m.StatusReply) else b"\x80"
    try:
        status = msgpack.unpackb(body)
    except ValueError:
        return {}
    return status if isinstance(status, dict) else {}


def _texts(value: object) -> tuple[str, ...]:
    return tuple(str(item) for item in value) if isinstance(value, list | tuple) else ()


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0


CONNECT_S = 0.5
# Addresses that nobody has (RFC 5737, RFC 3849): a route to them means a route to somewhere. No packet is sent.
ELSEWHERE = {4: (socket.AF_INET, "192.0.2.1"), 6: (socket.AF_INET6, "2001:db8::1")}


def probe_network(config: Config, root: Path = Path("/")) -> Network:
    """Everything that `judge_network` wants to know. Ports are bound for a moment, without listening for long."""
    tree = Tree(root)
    directory = socket_dir(config)
    daemon = _daemon(daemon_socket(directory))
    secret, made, why_not = _user_secret(config)
    return Network(
        binds=tuple(_binds(config, bool(daemon))),
        local=_local(config),
        families=frozenset(kind for kind in ELSEWHERE if _has_route(kind)),
        socket_dir=str(directory),
        socket_dir_error=_directory_error(directory),
        user_secret=secret,
        user_secret_made=made,
        user_secret_error=why_not,
        daemon=daemon,
        tcp=_tcp(tree),
        rdma=tuple(_rdma(tree)),
    )


def _binds(config: Config, daemon: bool) -> Iterator[Bind]:
    wanted = [("listen", config.listen_address)]
    if config.http_address is not None:
        wanted.append(("http", config.http_address))
    wanted.append(("data_port", Address(config.data_bind_host, config.data_port)))
    for option, port in (("hixl_port", config.hixl_port), ("hixl_engine_port", config.hixl_engine_port)):
        if port:
            wanted.append((option, Address(config.hixl_bind_host, port)))
    for option, address in wanted:
        try:
            listen_tcp(option, address).close()
        except ConfigError as failure:
            number = int(failure.fields.get("errno") or errno.EINVAL)
            reason = failure.message.partition(": ")[2] or failure.message
            yield Bind(option=option, address=str(address), errno=number, reason=reason, ours=daemon)
        else:
            yield Bind(option=option, address=str(address))


def _local(config: Config) -> dict[str, bool]:
    """Which of the advertised numeric addresses this host has: those that can be bound."""
    texts = (*config.advertise, *config.data_advertise)
    hosts = {parse_address(text, default_port=0).host for text in texts}
    return {host: _is_local(host) for host in hosts if is_numeric(host)}


def _is_local(host: str) -> bool:
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as trial:
            trial.bind((host, 0))
    except OSError as failure:
        return failure.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
    return True


def _has_route(kind: int) -> bool:
    family, address = ELSEWHERE[kind]
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as trial:
            trial.connect((address, 9))
    except OSError:
        return False
    return True


def _directory_error(directory: Path) -> str:
    if not directory.exists():
        parent = directory.parent
        return "" if os.access(parent, os.W_OK | os.X_OK) else f"{directory} cannot be made: {parent} is not writable"
    try:
        check_socket_dir(directory)
    except ConfigError as failure:
        return failure.message
    return "" if os.access(directory, os.W_OK | os.X_OK) else f"{directory}: this user may not write there"


def _user_secret(config: Config) -> tuple[str, bool, str]:
    """Its file, whether it is there, and why not; nothing where something else is configured."""
    if config.has_proof:
        return "", False, ""
    try:
        path, made = where_user_secret(config)
    except ConfigError as failure:
        return "", False, f"{failure.message} ({failure.hint})"
    return str(path), made, ""


def _daemon(path: Path) -> str:
    """Who serves the Unix socket; empty: nobody."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(CONNECT_S)
        with contextlib.suppress(OSError):
            probe.connect(str(path))
            return f"a daemon (pid {peer_credentials(probe)[0]})"
    return ""


def _tcp(tree: Tree) -> Tcp:
    base = "/proc/sys/net/ipv4"

    def words(name: str) -> tuple[str, ...]:
        return tuple((tree.text(f"{base}/{name}") or "").split())

    def largest(name: str) -> int:
        numbers = words(name)
        return int(numbers[2]) if len(numbers) == 3 and numbers[2].isdecimal() else 0

    return Tcp(
        congestion=tree.text(f"{base}/tcp_congestion_control") or "",
        available=words("tcp_available_congestion_control"),
        allowed=words("tcp_allowed_congestion_control"),
        buffers_max=(largest("tcp_rmem"), largest("tcp_wmem")),
    )


def _rdma(tree: Tree) -> Iterator[RdmaPort]:
    """States look like `4: ACTIVE` and `5: LinkUp`."""
    base = "/sys/class/infiniband"
    for device in tree.names(base):
        for name in tree.names(f"{base}/{device}/ports"):
            folder = f"{base}/{device}/ports/{name}"
            if name.isdecimal():
                yield RdmaPort(
                    device=device,
                    port=int(name),
                    state=(tree.text(f"{folder}/state") or "unknown").rpartition(": ")[2],
                    physical=(tree.text(f"{folder}/phys_state") or "").rpartition(": ")[2],
                    layer=tree.text(f"{folder}/link_layer") or "",
                    rate=tree.text(f"{folder}/rate") or "",
                )


# -- judging addresses, ports, kernel settings, RDMA NICs and the nodes that were asked for ----------------------------
# Address families are the mistake that nobody sees: a daemon that listens on IPv4 and advertises an IPv6 address
# works for itself and for nobody else.


BUFFER_BYTES_MIN = 4 << 20
CERTIFICATE_DAYS_MIN = 7
_NETWORK = FindingGroup("network")
_RDMA = FindingGroup("rdma")
_PEERS = FindingGroup("peers")


def judge_network(network: Network, config: Config) -> Iterator[Finding]:
    """This host's own addresses, ports and settings."""
    if network.socket_dir_error:
        yield _NETWORK.problem("socket directory", network.socket_dir_error, "what it says, or set another socket_dir")
    else:
        running = f"; {network.daemon} is running" if network.daemon else "; no daemon is running"
        yield _NETWORK.ok("socket directory", network.socket_dir + running)
    yield from _judge_user_secret(network)
    yield from map(_bind, network.binds)
    yield from judge_addresses(network, config)
    yield _congestion(network, config)
    yield _buffers(network)
    yield from judge_rdma(network.rdma)


def _bind(bind: Bind) -> Finding:
    check = f"port of {bind.option}"
    if not bind.errno:
        return _NETWORK.ok(check, f"{bind.address} can be bound")
    if bind.errno == errno.EADDRINUSE and bind.ours:
        return _NETWORK.ok(check, f"{bind.address} is held by the daemon of this socket directory")
    advice = {
        errno.EADDRINUSE: f"stop what listens there (`ss -ltnp`), or set {bind.option} to another port (0: any)",
        errno.EADDRNOTAVAIL: f"no interface of this host has that address: set {bind.option} to one that it has",
        errno.EACCES: f"ports below 1024 need privileges: set {bind.option} to a higher one",
        errno.EAFNOSUPPORT: "this host has no such address family: use the other one",
    }.get(bind.errno, f"set {bind.option} to another address")
    return _NETWORK.problem(check, f"{bind.address}: {bind.reason}", advice)


def family(host: str) -> int:
    """4 or 6; 0 for a name. An IPv4 address in IPv6 clothes is IPv4."""
    if not is_numeric(host):
        return 0
    return 4 if ":" not in host or host.lower().startswith("::ffff:") else 6


def accepts(bound: str, dialled: str) -> bool:
    """Can a socket bound to one numeric address be reached by dialling the other, as far as the family tells?"""
    return not family(dialled) or not family(bound) or bound == "::" or family(bound) == family(dialled)


def judge_addresses(network: Network, config: Config) -> Iterator[Finding]:
    """What is bound against what peers are told to dial."""
    listen = config.listen_address.host
    for key, bound, told in (
        ("advertise", listen, config.advertise),
        ("data_advertise", config.data_bind_host, config.data_advertise),
    ):
        wrong = False
        if not told and is_wildcard(bound):
            wrong = True
            advice = f"set {key} to an address of this host that peers can reach"
            found = f"{bound} accepts on every interface and nothing says what peers shall dial"
            yield _NETWORK.problem(key, found, advice)
        for text in told:
            for finding in _advertised(key, bound, text, network):
                wrong = True
                yield finding
        if not wrong:
            shown = some(told) if told else bound
            yield _NETWORK.ok(key, f"{shown}, bound to {bound}" if told else f"peers dial the bound address {shown}")
    if listen != "localhost" and not accepts(config.data_bind_host, listen) and not config.data_advertise:
        found = f"control listens on {listen}, data on {config.data_bind_host}: two address families"
        yield _NETWORK.warning("data_bind", found, "peers need routes for both; use one family unless that is meant")
    try:
        config.check_security()
        yield from _certificate(Credentials(config, unconfigured="none"))
    except ConfigError as refused:
        key = str(refused.fields.get("key"))
        check = "certificate" if "tls" in key else "node keys" if "keys" in key else "secret"
        yield _NETWORK.problem(check, refused.message, refused.hint or "set secret_file")


def _judge_user_secret(network: Network) -> Iterator[Finding]:
    check = "secret of this user"
    if network.user_secret_error:
        advice = "what it says; `kvxfer serve` does not start without a secret"
        yield _NETWORK.problem(check, network.user_secret_error, advice)
    elif network.user_secret:
        when = "" if network.user_secret_made else ", which the first daemon makes"
        yield _NETWORK.ok(check, f"nothing is configured: daemons of this user meet by {network.user_secret}{when}")


def _certificate(known: Credentials) -> Iterator[Finding]:
    if known.expires_in_s is None:
        return
    found = f"for node {known.node_id}, expires in {known.expires_in_s / DAY_S:.1f} days"
    if known.expires_in_s < CERTIFICATE_DAYS_MIN * DAY_S:
        yield _NETWORK.warning("certificate", found, "replace tls_cert and tls_key; a running daemon reads them again")
    else:
        yield _NETWORK.ok("certificate", found)


def _advertised(key: str, bound: str, text: str, network: Network) -> Iterator[Finding]:
    host = parse_address(text, default_port=0).host
    if is_loopback(bound) and not is_loopback(host):
        advice = "bind the address that is advertised, or a wildcard"
        yield _NETWORK.problem(key, f"{text} is advertised, but only {bound} is bound: nobody gets through", advice)
    elif not accepts(bound, host):
        found = f"{text} is IPv{family(host)}, but {bound} takes IPv{family(bound)} only"
        yield _NETWORK.problem(key, found, "advertise an address of the family that is bound, or bind [::] for both")
    elif network.local.get(host) is False:
        advice = "right behind NAT or a load balancer; otherwise a wrong or old address"
        yield _NETWORK.warning(key, f"{host} is no address of this host", advice)


def _congestion(network: Network, config: Config) -> Finding:
    kernel, wanted = network.tcp, config.tcp_congestion
    check = "tcp congestion control"
    if not wanted:
        return _NETWORK.ok(check, f"{kernel.congestion}, the system's, everywhere")
    if wanted not in kernel.available:
        advice = f"modprobe tcp_{wanted}, or set tcp_congestion to one of {some(kernel.available)}"
        return _NETWORK.warning(check, f"{wanted} is not there; {kernel.congestion} is used on loopback too", advice)
    return _NETWORK.ok(check, f"{wanted} between processes of this host, {kernel.congestion} elsewhere")


def _buffers(network: Network) -> Finding:
    received, sent = network.tcp.buffers_max
    found = f"the kernel grows them to {size(received)} (receive) and {size(sent)} (send)"
    if min(received, sent) < BUFFER_BYTES_MIN:
        advice = 'sysctl net.ipv4.tcp_rmem="4096 131072 16777216" net.ipv4.tcp_wmem="4096 16384 16777216"'
        return _NETWORK.warning("tcp buffers", found, advice)
    return _NETWORK.ok("tcp buffers", found)


def judge_rdma(ports: tuple[RdmaPort, ...]) -> Iterator[Finding]:
    """NICs of the host. Cards with ports of their own (see hccn) do not need them."""
    if not ports:
        yield _RDMA.not_here("host NICs", "no RDMA capable NIC of the host (/sys/class/infiniband is empty)")
        return
    for port in ports:
        check = f"{port.device} port {port.port}"
        found = ", ".join(word for word in (port.state, port.physical, port.layer, port.rate) if word)
        if port.state == "ACTIVE":
            yield _RDMA.ok(check, found)
        else:
            advice = "check cable, transceiver and switch port; `ip link` shows the interface"
            yield _RDMA.warning(check, f"is not up: {found}", advice)


# -- other nodes ------------------------------------------------------------------------------------------------------


def judge_peer(
    peer: PeerSeen, ours: Program, transports: tuple[str, ...], accelerator: dict[str, object], network: Network
) -> Iterator[Finding]:
    """One node that was named with --peer: can it be reached, and does it fit?"""
    yield from (_candidate(candidate, network, peer) for candidate in peer.candidates)
    if peer.error:
        yield _PEERS.problem(peer.given, peer.error, peer.hint or "`kvxfer serve` there, then `kvxfer ping` from here")
        return
    yield from _versions(peer, ours)
    common = [name for name in transports if name in peer.transports]
    if not common:
        found = f"it has {some(peer.transports)}, this side {some(transports)}"
        advice = "no transport in common: set `transports` alike on both sides"
        yield _PEERS.problem(f"{peer.given} transports", found, advice)
    else:
        yield _PEERS.ok(f"{peer.given} transports", f"in common: {some(common)}; `kvxfer ping` measures them")
    yield from _their_addresses(peer, network)
    yield from judge_toolkits(peer.given, accelerator, peer.accelerator)


def _candidate(candidate: Candidate, network: Network, peer: PeerSeen) -> Finding:
    check = f"{peer.given} port"
    if not candidate.error:
        return _PEERS.ok(check, f"{candidate.address} accepts connections, {candidate.ms:.1f} ms")
    if candidate.family not in network.families:
        advice = f"this host has no IPv{candidate.family} route: use the node's other address family"
    else:
        advice = "is the daemon up, is this its `listen` address, does a firewall drop the port?"
    found = f"{candidate.address}: {candidate.error}"
    if peer.error:
        return _PEERS.problem(check, found, advice)
    return _PEERS.warning(check, found, advice)


def _versions(peer: PeerSeen, ours: Program) -> Iterator[Finding]:
    check = f"{peer.given} version"
    found = f"kvxfer {peer.version}, protocol {peer.protocol}; here {ours.version}, protocol {ours.protocol}"
    if peer.protocol != ours.protocol:
        yield _PEERS.warning(check, found, "they talk in the older protocol: bring both sides to one version")
    elif peer.version.split(".")[:2] != ours.version.split(".")[:2]:
        yield _PEERS.warning(check, found, "fine for a rolling upgrade; finish it")
    else:
        yield _PEERS.ok(check, found)


def _their_addresses(peer: PeerSeen, network: Network) -> Iterator[Finding]:
    for text in (*peer.addresses, *peer.data_advertise):
        try:
            host = parse_address(text, default_port=0).host
        except UsageError:
            continue
        kind = family(host)
        if kind and kind not in network.families:
            found = f"it tells others to dial {text}, and this host has no IPv{kind} route"
            advice = "let it advertise an address of the family that both sides have"
            yield _PEERS.problem(f"{peer.given} address", found, advice)
        elif is_loopback(host) and not all(is_loopback(parse_address(one).host) for one in peer.given.split(",")):
            found = f"it tells others to dial {text}, which is every host's own loopback"
            yield _PEERS.problem(f"{peer.given} address", found, "set `listen` or `advertise` on that node")


# What both sides may know of their accelerators, and the word for it.
_VERSIONS = {"toolkit": "toolkit", "reported": "version", "driver": "driver"}


def judge_toolkits(given: str, ours: dict[str, object], theirs: object) -> Iterator[Finding]:
    """Accelerator libraries of both ends, as far as both say what they have, loaded or only installed."""
    if not isinstance(theirs, dict) or not theirs or not ours:
        return
    check = f"{given} accelerator"
    found = f"there {_about(theirs)}; here {_about(ours)}"
    differ = [
        word for name, word in _VERSIONS.items() if name in ours and name in theirs and ours[name] != theirs[name]
    ]
    if "simulated" in ours and "simulated" in theirs and ours["simulated"] != theirs["simulated"]:
        yield _PEERS.problem(check, found, "one side is a simulation: unset KVXFER_CANN_LIBDIR there")
    elif differ:
        advice = "use one version on all nodes: defaults and layouts differ between them"
        yield _PEERS.warning(check, f"{found}; {some(differ)} differ{'s' if len(differ) == 1 else ''}", advice)
    else:
        yield _PEERS.ok(check, found)


def _about(side: dict[str, object]) -> str:
    known = [f"{word} {side[name]}" for name, word in _VERSIONS.items() if name in side]
    return ", ".join([str(side["soc"]) if "soc" in side else "libraries not loaded", *known])
