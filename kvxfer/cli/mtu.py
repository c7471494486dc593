"""The largest packet of a path, when it is smaller than what this host's interface sends.

The kernel learns it from routers on the way, or from the route; small messages pass and say nothing of it, while large
ones are cut into more packets, or lost where a router's answer is filtered.
"""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from pathlib import Path

IP_MTU, IPV6_MTU = 14, 24  # <linux/in.h>, <linux/in6.h>: not in the module socket
SIOCGIFADDR, SIOCGIFMTU = 0x8915, 0x8921  # <linux/sockios.h>
IP_MAX = 65535  # loopback sends more than a packet may say
ANY_PORT = 9  # nothing is sent


def path_mtu(host: str) -> tuple[int, int, str] | None:
    """What the kernel knows of the path to a numeric address: its MTU, that of the interface, and the interface's name.

    None when it cannot be told.
    """
    family, level, option = socket.AF_INET, socket.IPPROTO_IP, IP_MTU
    if ":" in host:
        family, level, option = socket.AF_INET6, socket.IPPROTO_IPV6, IPV6_MTU
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, ANY_PORT))
            known, own = probe.getsockopt(level, option), str(probe.getsockname()[0])
        name = _interface(own)
        return None if name is None else (known, min(_mtu_of(name), IP_MAX), name)
    except (OSError, ValueError):
        return None


def about_mtu(host: str, found: tuple[int, int, str] | None) -> str:
    """For people; empty when there is nothing to say."""
    if found is None or found[0] >= found[1]:
        return ""
    known, own, name = found
    return (
        f"path MTU to {host}: {known} bytes, while {name} sends up to {own}: every large transfer is cut into more"
        " packets, and where a firewall drops the routers' answers (ICMP) it stalls; set the same MTU on the whole path"
    )


def _mtu_of(name: str) -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        answer = fcntl.ioctl(asker.fileno(), SIOCGIFMTU, struct.pack("256s", name.encode()))
    return int(struct.unpack_from("i", answer, 16)[0])


def _interface(address: str) -> str | None:
    """The interface that has this address."""
    if ":" in address:
        wanted = socket.inet_pton(socket.AF_INET6, address).hex()
        rows = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
        return next((row[5] for row in rows if row[0] == wanted), None)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # one without an address
                answer = fcntl.ioctl(asker.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None
