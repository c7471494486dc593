"""What the registry wants done: frozen values that the daemon executes in order, without deciding anything itself.

`Link` is whatever the daemon uses to name a connection; the registry only hashes and compares it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from kvxfer.errors import KvxferError
from kvxfer.wire.messages import Message, Settle

Link = Hashable


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Send a message over a link: the answer to a request, a notification, or (`Confirm`) a question of this daemon.

    ``kind``: of the posting that a notification is about, where it is one of this node.
    """

    link: Link
    message: Message
    kind: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Answer a request with an error."""

    link: Link
    rid: int
    error: KvxferError


@dataclass(frozen=True, slots=True, kw_only=True)
class SettleElsewhere:
    """Send a settlement to the daemon of `node_id`; empty: to whoever answers at the addresses ``message.node``.

    With a `link`, relay the answer to that worker's request ``message.rid``.
    """

    node_id: str
    message: Settle
    link: Link | None = None


Action = Send | Refused | SettleElsewhere
