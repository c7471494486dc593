"""What peers are told of an engine's transports: where each listens, and the secret that connecting to it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvxfer.addresses import format_address, parse_address
from kvxfer.native.facts import TransportInfo

WILDCARDS = ("0.0.0.0", "::")


def endpoints_of(transports: Sequence[TransportInfo], advertise: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
    """Each listening transport's endpoint, wildcards replaced by the advertised hosts."""
    endpoints: dict[str, tuple[str, ...]] = {}
    for info in transports:
        if not info.endpoint:
            continue
        candidates: tuple[str, ...] = (info.endpoint,)
        if not info.same_host:
            bound = parse_address(info.endpoint)
            hosts = tuple(advertise) if bound.host in WILDCARDS or advertise else (bound.host,)
            candidates = tuple(format_address(host, bound.port) for host in hosts)
        if candidates:
            endpoints[info.name] = candidates
    return endpoints


def secrets_of(transports: Sequence[TransportInfo]) -> Mapping[str, bytes]:
    """Of the transports that encrypt."""
    return {info.name: info.secret for info in transports if info.secret is not None}
