"""Which transport for which pair of memories: the decision itself, without a connection.

A transfer needs a way from one kind of memory here to one kind there. The transports are gone through in order; the
first that moves both kinds, and is offered by the owner, is tried. Those that were passed over keep their reason.

One order is not that of the configuration: between accelerators' transports and those that stay inside this host, the
latter go first when the remote memory is the host's. They fail at once when the owner is elsewhere, and if he is here,
a detour through his card would be the longer way.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvxfer.descriptors import RemoteDescriptor
from kvxfer.native.facts import ChoiceKind, MemoryKind, TransportInfo

ANY_KIND = len(MemoryKind)


@dataclass(frozen=True, slots=True)
class Need:
    """What a transfer asks of a transport. ``local`` None: no memory of ours, only a notification or a look.

    ``check``: checksums. ``mapped``: the memory is to be looked at in place, if any way allows that.
    """

    local: MemoryKind | None
    remote: MemoryKind
    check: bool = False
    mapped: bool = False

    @property
    def pair(self) -> str:
        """For people: from here to there, whichever way the bytes go."""
        return f"{'any memory' if self.local is None else self.local.word} to {self.remote.word}"


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A transport that was not taken. ``info`` None: this engine does not have it."""

    info: TransportInfo | None
    kind: ChoiceKind
    text: str


@dataclass(frozen=True, slots=True)
class Choice:
    """Why a transport was chosen for an engine and a pair of memories, and why better ones were not."""

    engine_id: str
    pair: str
    transport: str
    endpoint: str
    passed_over: tuple[str, ...]


def kind_there(descriptor: RemoteDescriptor) -> MemoryKind:
    """Where the bytes of a descriptor are."""
    if descriptor.kind == "hbm":
        return MemoryKind.HBM
    return MemoryKind.PINNED if descriptor.pinned else MemoryKind.DRAM


def number_of(local: MemoryKind | None, check: bool, mapped: bool) -> int:
    """What a transfer asks beside its descriptor, as one small number: the key of a choice is made per transfer."""
    return (ANY_KIND if local is None else local) | check << 2 | mapped << 3


def in_order(infos: Iterable[TransportInfo], need: Need) -> list[TransportInfo]:
    """The transports, best first; see above."""
    known = list(infos)
    near = max((info.rank for info in known if info.same_host and not info.own_engine), default=-1)
    host_memory = need.remote is not MemoryKind.HBM

    def place(info: TransportInfo) -> tuple[bool, float, int]:
        detour = host_memory and not info.moves(MemoryKind.DRAM)
        return (
            need.mapped and not info.maps(need.remote),
            max(info.rank, near + 0.5) if detour else info.rank,
            info.rank,
        )

    return sorted(known, key=place)


def unfit(info: TransportInfo, need: Need, descriptor: RemoteDescriptor) -> PassedOver | None:
    """Why this transport is none for this need; None when it may be tried."""
    if info.name not in descriptor.endpoints:
        return PassedOver(info, ChoiceKind.NOT_OFFERED, f"{info.name}: the owner does not offer it")
    if encryption_differs(info, descriptor):
        here, there = ("on", "off") if info.encrypted else ("off", "on")
        return PassedOver(info, ChoiceKind.REFUSED, f"{info.name}: tcp_encryption is {here} here and {there} there")
    if not info.reaches(need.local, need.remote):
        return PassedOver(info, ChoiceKind.MEMORY, f"{info.name}: it moves {moved(info)}, not {need.pair}")
    if need.check and not info.can_check:
        return PassedOver(info, ChoiceKind.CHECKSUM, f"{info.name}: it makes no checksums, and they were asked for")
    return None


def encryption_differs(info: TransportInfo, descriptor: RemoteDescriptor) -> bool:
    """One side encrypts what this transport moves and the other does not."""
    return info.name in descriptor.endpoints and info.encrypted != (info.name in descriptor.secrets)


def moved(info: TransportInfo) -> str:
    """The kinds of memory that it moves, for people."""
    here, there = _words(info.local_memory), _words(info.memory)
    return f"{here} only" if here == there else f"{here} here, {there} there"


def _words(kinds: int) -> str:
    *first, last = [kind.word for kind in MemoryKind if kinds >> kind & 1] or ["nothing"]
    return f"{', '.join(first)} and {last}" if first else last
