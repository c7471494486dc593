"""Looking at ports, addresses, kernel settings of TCP, and NICs of the host."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from kvxfer.addresses import Address, is_numeric, parse_address
from kvxfer.config import Config
from kvxfer.config.paths import check_socket_dir, daemon_socket, socket_dir
from kvxfer.config.user_secret import where_user_secret
from kvxfer.doctor.facts import Bind, Network, RdmaPort, Tcp
from kvxfer.doctor.probe_host import Tree
from kvxfer.errors import ConfigError
from kvxfer.net.listeners import listen_tcp, peer_credentials

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
