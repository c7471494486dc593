"""Addresses as people write them: `host:port`, `[v6]:port`, and what may be left out.

The idea that keeps it safe: text is never split at "some" colon. What has a bracket is IPv6, what has one colon is a
name or IPv4 with a port, what has more is a bare IPv6 address, and a bare IPv6 address whose last group could as well
be a port is refused instead of guessed. Parsing normalises, so formatting what was parsed and parsing it again changes
nothing.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvxfer.descriptors import CANDIDATES_MAX
from kvxfer.errors import UsageError

ADDRESS_CHARS_MAX = 255
PORT_MAX = 65535
_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")
_ZONE = re.compile(r"[A-Za-z0-9_.-]{1,15}")
_PORT = re.compile(r"[0-9]{1,5}")
BRACKET_HINT = "write IPv6 addresses in brackets: [{host}]:{port}"


@dataclass(frozen=True, slots=True, order=True)
class Address:
    """A host (name, IPv4 or compressed IPv6 without brackets) and a port; port 0 means "any" or "the bound one"."""

    host: str
    port: int

    def __str__(self) -> str:
        return format_address(self.host, self.port)

    @property
    def is_loopback(self) -> bool:
        return is_loopback(self.host)

    @property
    def is_wildcard(self) -> bool:
        return is_wildcard(self.host)


def format_address(host: str, port: int) -> str:
    """`host:port`, with brackets where the host is an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_address(text: str, *, default_port: int | None = None) -> Address:
    """Parse an address. Without `default_port` the port is required. Anything doubtful is a `UsageError`."""
    if not isinstance(text, str) or not text or len(text) > ADDRESS_CHARS_MAX:
        raise _bad(text, "an address is 1 to 255 characters")
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise _bad(text, "the bracket is not closed, or something other than :port follows it")
        return Address(_ipv6(host, text), _port(rest[1:] if rest else None, default_port, text))
    if text.count(":") >= 2:
        _refuse_doubtful(text)
        return Address(_ipv6(text, text), _port(None, default_port, text))
    name, colon, port = text.partition(":")
    return Address(_name_or_ipv4(name, text), _port(port if colon else None, default_port, text))


def parse_host(text: str) -> str:
    """Parse a host alone: a name, IPv4, or IPv6 with or without brackets. Raises `UsageError`."""
    if not isinstance(text, str) or not text or len(text) > ADDRESS_CHARS_MAX:
        raise _bad(text, "a host is 1 to 255 characters")
    if text.startswith("["):
        if not text.endswith("]"):
            raise _bad(text, "a host alone has no port")
        return _ipv6(text[1:-1], text)
    if text.count(":") >= 2:
        return _ipv6(text, text)
    if ":" in text:
        raise _bad(text, "a host alone has no port")
    return _name_or_ipv4(text, text)


def is_numeric(host: str) -> bool:
    """True for an IPv4 or IPv6 address, False for a name."""
    return _ip(host) is not None


def is_loopback(host: str) -> bool:
    """True when only this machine can reach it. Names other than `localhost` count as reachable from outside."""
    address = _ip(host)
    return host.lower() == "localhost" if address is None else address.is_loopback


def is_wildcard(host: str) -> bool:
    """True for 0.0.0.0 and ::, which can be bound but never dialled."""
    address = _ip(host)
    return address is not None and address.is_unspecified


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    # ::ffff:a.b.c.d behaves as the IPv4 address inside it
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _bad(text: object, why: str, hint: str | None = None) -> UsageError:
    return UsageError(f"bad address: {why}", address=repr(text)[:120], hint=hint)


def _port(text: str | None, default: int | None, whole: str) -> int:
    if text is None:
        if default is None:
            raise _bad(whole, "the port is missing", "write host:port or [ipv6]:port")
        return default
    if not _PORT.fullmatch(text) or int(text) > PORT_MAX:
        raise _bad(whole, f"the port must be a number from 0 to {PORT_MAX}")
    return int(text)


def _ipv6(text: str, whole: str) -> str:
    host, percent, zone = text.partition("%")
    try:
        address = ipaddress.IPv6Address(host)
    except ValueError as wrong:
        raise _bad(whole, "not an IPv6 address", BRACKET_HINT.format(host="2001:db8::1", port=9000)) from wrong
    if percent and not _ZONE.fullmatch(zone):
        raise _bad(whole, "bad zone after %")
    return str(address) + percent + zone


def _refuse_doubtful(text: str) -> None:
    """`2001:db8::1:9000` is an IPv6 address, but its writer may have meant port 9000."""
    head, _, tail = text.rpartition(":")
    if not _PORT.fullmatch(tail):
        return
    try:
        ipaddress.IPv6Address(head)
    except ValueError:
        return
    raise _bad(text, "the last group may be a port", BRACKET_HINT.format(host=head, port=tail))


def _name_or_ipv4(text: str, whole: str) -> str:
    labels = text.removesuffix(".").split(".")
    if len(text) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise _bad(whole, "not a host name or IP address")
    if labels[-1].isdigit():
        # resolvers read 127.1 or 0177.0.0.1 as addresses of their own choice; only the full dotted form is clear
        try:
            return str(ipaddress.IPv4Address(text))
        except ValueError as wrong:
            raise _bad(whole, "not an IPv4 address") from wrong
    return text.lower()


def as_node(node: str | Sequence[str]) -> tuple[str, ...]:
    """Candidate addresses as a tuple; () means this node. A mistyped address is refused here, before anything is
    sent.
    """
    candidates = (node,) if isinstance(node, str) else tuple(node)
    if len(candidates) > CANDIDATES_MAX:
        raise UsageError("too many candidate addresses", field="node", value=len(candidates), limit=CANDIDATES_MAX)
    for text in candidates:
        parse_address(text)
    return candidates
