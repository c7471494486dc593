"""Tickets in whatever shape they arrive, and the claims that are made with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from kvxfer.descriptors import Ticket
from kvxfer.wire.messages import Claim


class HasTicket(Protocol):
    """A publication or a landing, inside its block."""

    @property
    def ticket(self) -> Ticket: ...


AnyTicket = Ticket | HasTicket | Mapping[str, Any] | str


def as_ticket(given: AnyTicket) -> Ticket:
    """The ticket itself. Text is JSON; anything malformed is a `UsageError`."""
    if isinstance(given, Ticket):
        return given
    if isinstance(given, str):
        return Ticket.from_json(given)
    found = getattr(given, "ticket", None)
    return found if isinstance(found, Ticket) else Ticket.from_dict(given)  # type: ignore[arg-type]


def as_tickets(given: AnyTicket | Sequence[AnyTicket]) -> list[Ticket]:
    """One ticket, or a list of them, as tickets. Raises: `UsageError`."""
    several = isinstance(given, list | tuple)
    return [as_ticket(one) for one in given] if several else [as_ticket(given)]  # type: ignore[union-attr,arg-type]


def claim_of(ticket: Ticket, kind: str) -> Claim:
    """The claim of what a ticket names, which must be of this kind."""
    return Claim(
        node=ticket.addresses,
        node_id=ticket.node_id,
        incarnation=ticket.incarnation,
        kind=kind,
        posting=ticket.posting,
        secret=ticket.secret,
    )
