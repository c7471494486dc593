"""What the registry wants done: frozen values that the server executes in order, without deciding anything itself.

`Link` is whatever the server uses to name a connection; the registry only hashes and compares it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from kvxfer.coverage import Box
from kvxfer.errors import KvxferError

Link = Hashable


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """Answer a request that has nothing to say but that it worked."""

    link: Link
    rid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Answer a request with an error."""

    link: Link
    rid: int
    error: KvxferError


@dataclass(frozen=True, slots=True, kw_only=True)
class Posted:
    """Answer a post or a renewal. `expires_in_s` 0: it lives as long as its worker."""

    link: Link
    rid: int
    posting: str
    secret: bytes = field(repr=False)
    expires_in_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """Answer a claim: it was matched, at once or after a wait. `claim` 0: others write all of it.

    `boxes`: what it writes of an offer that said its own.
    """

    link: Link
    rid: int
    posting: str
    claim: int
    body: bytes = field(repr=False)
    expires_in_s: float
    node_id: str
    incarnation: str
    boxes: tuple[Box, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Notify:
    """Send an event to the owner of a posting or to the link of a claimant. `claim` 0: the posting itself.

    `boxes`: what a new claim writes of an offer. `kind`: of the posting, where it is one of this node.
    """

    link: Link
    posting: str
    claim: int
    what: str
    code: str = ""
    detail: str = ""
    engine_id: str = ""
    boxes: tuple[Box, ...] = ()
    kind: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SettleElsewhere:
    """Send a settlement to the daemon of `node_id`; empty: to whoever answers at the addresses `node`.

    With a `link`, relay the answer to that worker's request `rid`.
    """

    node_id: str
    node: tuple[str, ...] = ()
    posting: str
    claim: int
    outcome: str
    code: str = ""
    detail: str = ""
    link: Link | None = None
    rid: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirm:
    """Ask the daemon at `link` which of these claims it does not know. The `session` that granted them has ended."""

    link: Link
    session: str
    claims: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deliver:
    """Hand a message to the worker that listens on its channel."""

    link: Link
    channel: str
    data: bytes = field(repr=False)
    source: str


Action = Done | Refused | Posted | Claimed | Notify | SettleElsewhere | Confirm | Deliver
