"""What a way to somebody's memory is: a connection, an import over it, and the names under which both are shared.

The names hold everything that makes a grant a capability, the key included: a descriptor that only claims to be of the
same engine and grant never meets the import of the genuine one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvxfer.descriptors import RemoteDescriptor
from kvxfer.errors import KvxferError, StaleDescriptor, UnknownTransfer
from kvxfer.native.engine import TransportInfo

ImportKey = tuple[str, int, int, int, int, bytes]
WayKey = tuple[ImportKey, int]  # and the transport's index
Place = tuple[str, int, str, bytes | None]  # engine id, transport's index, endpoint, and the secret that it takes
NeedKey = tuple[str, int, int, int, int, bytes, int]  # an ImportKey, and what is asked (`number_of`)


@dataclass(slots=True, eq=False)
class Route:
    """A connection to one engine over one transport."""

    engine_id: str
    info: TransportInfo
    endpoint: str
    place: Place = field(repr=False)  # it holds a secret
    peer: int
    imports: set[WayKey] = field(default_factory=set, repr=False)  # they hold the keys of grants
    down: bool = False
    held: int = 0  # imports whose mapping an application looks at: a connection that ended stays as long
    used: int = 0  # see `idle.py`
    importing: int = 0
    fresh: bool = True  # made for an import that has yet to begin
    heard: float = 0.0  # when the other side was last known to answer over it, on the loop's clock


@dataclass(slots=True, eq=False)
class Import:
    """A remote grant that is ready for use. ``unwanted``: it goes when the last user has gone. ``needs``: what it was
    chosen for.
    """

    key: WayKey = field(repr=False)
    route: Route
    handle: int
    length: int
    users: int = 0
    unwanted: bool = False
    held: bool = False
    needs: set[NeedKey] = field(default_factory=set, repr=False)


def stale(error: KvxferError) -> KvxferError:
    """Whoever holds a descriptor that its owner does not know (any more) holds an old one."""
    if type(error) is not UnknownTransfer:
        return error
    found = StaleDescriptor(
        "the owner has taken this memory back",
        op_id=error.op_id,
        peer=error.peer,
        transport=error.transport,
        status=error.status,
        hint="get a new descriptor",
    )
    found.fields.update(error.fields)
    return found


def place_of(descriptor: RemoteDescriptor, info: TransportInfo, endpoint: str) -> Place:
    return (descriptor.engine_id, info.index, endpoint, descriptor.secrets.get(info.name))


def key_of(descriptor: RemoteDescriptor) -> ImportKey:
    return (
        descriptor.engine_id,
        descriptor.grant,
        descriptor.generation,
        descriptor.length,
        descriptor.access,
        descriptor.key,
    )


def need_key_of(descriptor: RemoteDescriptor, number: int) -> NeedKey:
    return (*key_of(descriptor), number)
