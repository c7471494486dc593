"""Judging addresses, ports, kernel settings, RDMA NICs and the nodes that were asked for.

Address families are the mistake that nobody sees: a daemon that listens on IPv4 and advertises an IPv6 address works
for itself and for nobody else.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator

from kvxfer.addresses import is_loopback, is_numeric, is_wildcard, parse_address
from kvxfer.config import Config
from kvxfer.doctor.facts import Bind, Candidate, Network, PeerSeen, Program, RdmaPort
from kvxfer.doctor.finding import Finding, Group, size, some
from kvxfer.errors import ConfigError, UsageError
from kvxfer.net.credentials import DAY_S, Credentials

BUFFER_BYTES_MIN = 4 << 20
CERTIFICATE_DAYS_MIN = 7
_NETWORK = Group("network")
_RDMA = Group("rdma")
_PEERS = Group("peers")


def judge_network(network: Network, config: Config) -> Iterator[Finding]:
    """This host's own addresses, ports and settings."""
    if network.socket_dir_error:
        yield _NETWORK.problem("socket directory", network.socket_dir_error, "what it says, or set another socket_dir")
    else:
        running = f"; {network.daemon} is running" if network.daemon else "; no daemon is running"
        yield _NETWORK.ok("socket directory", network.socket_dir + running)
    yield from _user_secret(network)
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


def _user_secret(network: Network) -> Iterator[Finding]:
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
