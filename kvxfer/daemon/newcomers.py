"""Connections that have not proved themselves yet, and which of them goes when there are too many.

The oldest one of the address that has most of them makes room for the next. Whoever opens many displaces its own; a
peer at another address is not touched, and one at the same address has the time that it takes to open as many again.
What a connection has said so far does not count: a greeting costs a stranger nothing.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)
V6_HOST_BITS = 64  # one IPv6 host has all addresses of its network


def source_of(host: str) -> str:
    """The address that a connection counts for: an IPv6 host's network, IPv4 inside IPv6 as IPv4."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((address, 128 - V6_HOST_BITS), strict=False))


class HalfOpenConnections(Generic[T]):
    """In the order of their arrival, counted for each address."""

    def __init__(self) -> None:
        self._all: dict[T, str] = {}
        self._by_source: dict[str, dict[T, None]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[T]:
        return iter(self._all)

    def __contains__(self, one: T) -> bool:
        return one in self._all

    def add(self, one: T, source: str) -> None:
        """It came in from ``source``."""
        self._all[one] = source
        self._by_source.setdefault(source, {})[one] = None

    def discard(self, one: T) -> bool:
        """It is none any more; whether it was."""
        source = self._all.pop(one, None)
        if source is None:
            return False
        those = self._by_source[source]
        del those[one]
        if not those:
            del self._by_source[source]
        return True

    def displaced(self) -> T | None:
        """Who makes room for another one; None when there is none."""
        if not self._all:
            return None
        most = max(self._by_source.values(), key=len)
        return next(iter(most))
