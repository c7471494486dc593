"""Facts that travel: remote descriptors and tickets, as frozen values that survive JSON.

A remote descriptor is a capability. Whoever holds it can reach exactly the bytes, in exactly the directions, that it
names; without it no byte of a region is readable or writable. It therefore travels only inside the control plane (or
wherever its owner chooses to send it), and its ``repr`` does not show the key.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvxfer.errors import UsageError

DESCRIPTOR_VERSION = 1
ACCESS_READ, ACCESS_WRITE = 1, 2
ACCESS_BY_NAME: Mapping[str, int] = {"r": ACCESS_READ, "w": ACCESS_WRITE, "rw": ACCESS_READ | ACCESS_WRITE}
ACCESS_NAMES: Mapping[int, str] = {value: name for name, value in ACCESS_BY_NAME.items()}
U64_MAX = 2**64 - 1
ENDPOINTS_MAX = 8
CANDIDATES_MAX = 8
SECONDS_MAX = 31_536_000.0
ENDPOINT_SECRET_BYTES = 32
ENDPOINT_CHARS_MAX = 255


def _require(condition: bool, what: str, value: object, whose: str = "descriptor") -> None:
    if not condition:  # `reprlib` goes only so deep and so far: the value is a stranger's
        raise UsageError(f"bad {whose}: {what}", value=reprlib.repr(value)[:80])


def _is_u64(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= U64_MAX


def _is_duration(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= SECONDS_MAX


def _texts(value: object) -> tuple[str, ...]:
    # A single text would fall apart into its characters.
    if not isinstance(value, list | tuple):
        raise TypeError("a list of texts is expected")
    return tuple(value)


def _is_hex(value: object, chars: int) -> bool:
    return isinstance(value, str) and len(value) == chars and all(c in "0123456789abcdef" for c in value)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteDescriptor:
    """What a peer needs to reach a range of a region: a packed remote key and the addresses of its owner.

    ``length`` is in bytes, ``expires_in_s`` in seconds from receipt (None: until it is revoked), ``key`` 16 bytes.

    ``engine_id`` is the owner's engine, another one after each start; ``node_id`` and ``incarnation`` are its daemon's.
    ``endpoints`` maps a transport's name to its candidate endpoints, best first. ``pinned``: host memory that an
    accelerator's DMA reaches too. ``secrets``: of the transports that encrypt, what connecting takes beside the
    endpoint.

    Raises: `UsageError` that names the field.
    """

    node_id: str
    incarnation: str
    engine_id: str
    region: int
    grant: int
    generation: int
    length: int
    access: int
    key: bytes = field(repr=False)
    kind: str = "dram"
    pinned: bool = False
    expires_in_s: float | None = None
    endpoints: Mapping[str, tuple[str, ...]]
    secrets: Mapping[str, bytes] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for name in ("node_id", "incarnation", "engine_id"):
            _require(_is_hex(getattr(self, name), 32), f"{name} must be 32 hex digits", getattr(self, name))
        for name in ("region", "grant", "generation"):
            _require(_is_u64(getattr(self, name)), f"{name} must be an unsigned 64-bit integer", getattr(self, name))
        _require(_is_u64(self.length) and self.length > 0, "length must be a positive 64-bit integer", self.length)
        _require(self.access in ACCESS_NAMES, "access must be r, w or rw", self.access)
        _require(isinstance(self.key, bytes) and len(self.key) == 16, "key must be 16 bytes", type(self.key))
        _require(self.kind in ("dram", "hbm"), "kind must be dram or hbm", self.kind)
        host = self.pinned is False or (self.pinned is True and self.kind == "dram")
        _require(host, "pinned must be true or false, and only of dram", self.pinned)
        _require(self.expires_in_s is None or _is_duration(self.expires_in_s), "expires_in_s", self.expires_in_s)
        _require(1 <= len(self.endpoints) <= ENDPOINTS_MAX, f"1 to {ENDPOINTS_MAX} endpoints", len(self.endpoints))
        for name, candidates in self.endpoints.items():
            _require(isinstance(name, str) and 0 < len(name) < 32, "transport name", name)
            _require(1 <= len(candidates) <= CANDIDATES_MAX, f"1 to {CANDIDATES_MAX} candidates", len(candidates))
            for text in candidates:
                _require(isinstance(text, str) and 0 < len(text) <= ENDPOINT_CHARS_MAX, "endpoint", text)
        for name, secret in self.secrets.items():
            _require(name in self.endpoints, "a secret of no endpoint", name)
            fits = isinstance(secret, bytes) and len(secret) == ENDPOINT_SECRET_BYTES
            _require(fits, f"a secret must be {ENDPOINT_SECRET_BYTES} bytes", type(secret))

    def to_dict(self) -> dict[str, Any]:
        """The descriptor as a dict of strings and numbers, which survives JSON and msgpack. It contains the key."""
        described = {
            "v": DESCRIPTOR_VERSION,
            "node_id": self.node_id,
            "incarnation": self.incarnation,
            "engine_id": self.engine_id,
            "region": self.region,
            "grant": self.grant,
            "generation": self.generation,
            "length": self.length,
            "access": ACCESS_NAMES[self.access],
            "key": self.key.hex(),
            "kind": self.kind,
            "expires_in_s": self.expires_in_s,
            "endpoints": {name: list(candidates) for name, candidates in self.endpoints.items()},
        }
        # Told only where it is so: those who do not know the word reach the memory as any other host memory.
        pinned = {"pinned": True} if self.pinned else {}
        # Those who do not know this one do not encrypt either, and are refused when they connect.
        secrets = {"secrets": {name: secret.hex() for name, secret in self.secrets.items()}} if self.secrets else {}
        return described | pinned | secrets

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> RemoteDescriptor:
        """Rebuild a descriptor from what `to_dict` gave. Raises: `UsageError` that names the field."""
        _require(isinstance(raw, Mapping), "not a mapping", raw)
        _require(raw.get("v") == DESCRIPTOR_VERSION, f"version must be {DESCRIPTOR_VERSION}", raw.get("v"))
        try:
            endpoints = {name: _texts(candidates) for name, candidates in dict(raw["endpoints"]).items()}
            expires = raw.get("expires_in_s")
            told = dict(raw.get("secrets", {}))
            return cls(
                node_id=raw["node_id"],
                incarnation=raw["incarnation"],
                engine_id=raw["engine_id"],
                region=raw["region"],
                grant=raw["grant"],
                generation=raw["generation"],
                length=raw["length"],
                access=ACCESS_BY_NAME.get(raw["access"], 0),
                key=bytes.fromhex(raw["key"]),
                kind=raw["kind"],
                pinned=raw.get("pinned", False),
                expires_in_s=None if expires is None else float(expires),
                endpoints=endpoints,
                secrets={name: bytes.fromhex(secret) for name, secret in told.items()},
            )
        except KeyError as missing:
            raise UsageError(f"bad descriptor: field {missing} is missing") from missing
        except (TypeError, ValueError, AttributeError, OverflowError) as wrong:
            if isinstance(wrong, UsageError):
                raise
            raise UsageError(f"bad descriptor: {wrong}") from wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """Prefill says "request R can be fetched here". Small; a router may carry it as JSON.

    It names a posting at the publisher's daemon; ``secret`` lets an authenticated node claim it. Geometry, block table
    and remote descriptors are handed over by the daemon at the claim, inside the control plane.
    """

    node_id: str
    incarnation: str
    addresses: tuple[str, ...]
    posting: str
    secret: bytes = field(repr=False)
    request_id: str
    expires_in_s: float

    def __post_init__(self) -> None:
        for name in ("node_id", "incarnation", "posting"):
            _require(_is_hex(getattr(self, name), 32), f"{name} must be 32 hex digits", getattr(self, name), "ticket")
        secret_fits = isinstance(self.secret, bytes) and len(self.secret) == 16
        _require(secret_fits, "secret must be 16 bytes", type(self.secret), "ticket")
        _require(1 <= len(self.addresses) <= CANDIDATES_MAX, "addresses", self.addresses, "ticket")
        for text in self.addresses:
            _require(isinstance(text, str) and 0 < len(text) <= ENDPOINT_CHARS_MAX, "address", text, "ticket")
        named = isinstance(self.request_id, str) and 0 < len(self.request_id) <= 256
        _require(named, "request_id", self.request_id, "ticket")
        _require(_is_duration(self.expires_in_s), "expires_in_s", self.expires_in_s, "ticket")

    def to_dict(self) -> dict[str, Any]:
        """The ticket as a dict of strings and numbers for a router to carry."""
        return {
            "v": DESCRIPTOR_VERSION,
            "node_id": self.node_id,
            "incarnation": self.incarnation,
            "addresses": list(self.addresses),
            "posting": self.posting,
            "secret": self.secret.hex(),
            "request_id": self.request_id,
            "expires_in_s": self.expires_in_s,
        }

    def to_json(self) -> str:
        """`to_dict` as JSON, without blanks."""
        return json.dumps(self.to_dict(), separators=(",", ":"))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Ticket:
        """Rebuild a ticket from what `to_dict` gave. Raises: `UsageError` that names the field."""
        _require(isinstance(raw, Mapping), "not a mapping", raw, "ticket")
        _require(raw.get("v") == DESCRIPTOR_VERSION, f"version must be {DESCRIPTOR_VERSION}", raw.get("v"), "ticket")
        try:
            return cls(
                node_id=raw["node_id"],
                incarnation=raw["incarnation"],
                addresses=_texts(raw["addresses"]),
                posting=raw["posting"],
                secret=bytes.fromhex(raw["secret"]),
                request_id=raw["request_id"],
                expires_in_s=float(raw["expires_in_s"]),
            )
        except KeyError as missing:
            raise UsageError(f"bad ticket: field {missing} is missing") from missing
        except (TypeError, ValueError, AttributeError, OverflowError) as wrong:
            if isinstance(wrong, UsageError):
                raise
            raise UsageError(f"bad ticket: {wrong}") from wrong

    @classmethod
    def from_json(cls, text: str) -> Ticket:
        """Rebuild a ticket from what `to_json` gave. Raises: `UsageError` that names the field."""
        try:
            raw = json.loads(text)
        except (ValueError, TypeError, RecursionError) as wrong:
            raise UsageError(f"bad ticket: not JSON: {wrong}") from wrong
        return cls.from_dict(raw)
