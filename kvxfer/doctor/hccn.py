"""/etc/hccn.conf: the addresses of the cards' own network ports, `key_N=value` per line.

Only what matters for reaching other cards is looked at; other keys are of no concern here.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

_LINE = re.compile(r"([A-Za-z][A-Za-z0-9_]*?)_(\d{1,3})\s*=\s*(.*)")
_NETMASK_BITS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """The settings of one card's port; empty: not set."""

    device: int
    address: str = ""
    netmask: str = ""
    gateway: str = ""
    netdetect: str = ""

    @property
    def network(self) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
        """What it can reach directly; None when address or netmask make no sense."""
        try:
            return ipaddress.ip_network(f"{self.address}/{self.netmask or _NETMASK_BITS}", strict=False)
        except ValueError:
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All ports by device, and what is wrong with the text."""

    ports: dict[int, Port] = field(default_factory=dict)
    wrong: tuple[str, ...] = ()


def parse(text: str) -> Settings:
    """Read the file's text."""
    values: dict[int, dict[str, str]] = {}
    wrong: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            if "=" not in line:
                wrong.append(f"line {number} has no '='")
            continue  # a key without a card's number
        key, device, value = match[1].lower(), int(match[2]), match[3].strip()
        known = values.setdefault(device, {})
        if key in known and known[key] != value:
            wrong.append(f"line {number} sets {key}_{device} again, to another value")
        known[key] = value
    names = ("address", "netmask", "gateway", "netdetect")
    ports = {
        device: Port(device=device, **{name: known.get(name, "") for name in names})
        for device, known in sorted(values.items())
        if any(name in known for name in names)
    }
    return Settings(ports=ports, wrong=(*wrong, *_conflicts(ports)))


def _conflicts(ports: dict[int, Port]) -> list[str]:
    wrong: list[str] = []
    seen: dict[str, int] = {}
    for port in ports.values():
        if not port.address:
            wrong.append(f"card {port.device} has no address")
            continue
        network = port.network
        if network is None:
            wrong.append(f"card {port.device}: {port.address}/{port.netmask} is no address with a netmask")
            continue
        if port.address in seen:
            wrong.append(f"cards {seen[port.address]} and {port.device} have the same address {port.address}")
        seen[port.address] = port.device
        if port.gateway and not _inside(port.gateway, network):
            wrong.append(f"card {port.device}: gateway {port.gateway} is not in {network}")
    return wrong


def _inside(text: str, network: ipaddress.IPv4Network | ipaddress.IPv6Network) -> bool:
    try:
        return ipaddress.ip_address(text) in network
    except ValueError:
        return False


def families(ports: Sequence[Port]) -> frozenset[int]:
    """4, 6 or both: of which kind the cards' addresses are."""
    return frozenset(port.network.version for port in ports if port.network is not None)
