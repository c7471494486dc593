"""What is legal on a control connection, and how long each state may last.

`TRANSITIONS` says which message is legal in which state and where it leads, `MAY_SEND` which messages a link of a given
role carries in which direction, `DEADLINES` which limit of the configuration ends each state. Nothing here knows which
side it is playing, and nothing else decides these three things.

    dialler:   HELLO_SENT --Welcome--> PROOF_SENT --Ready--> OPEN <--> PROBING
    acceptor:  ACCEPTED --Hello--> WELCOMED --Proof--> OPEN <--> PROBING
    both, from anywhere: CLOSED
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from kvxfer.wire import messages as m
from kvxfer.wire.auth import Side


class State(enum.Enum):
    """Where a connection stands."""

    HELLO_SENT = "waiting for Welcome"
    PROOF_SENT = "waiting for Ready"
    ACCEPTED = "waiting for Hello"
    WELCOMED = "waiting for Proof"
    OPEN = "open"
    PROBING = "waiting for a sign of life"
    CLOSED = "closed"


MessageType = type[m.Message]
_EITHER: frozenset[MessageType] = frozenset((m.Ping, m.Pong, m.Goodbye, m.Error))
_ANSWERS: frozenset[MessageType] = frozenset((m.Done, m.Posted, m.Claimed, m.StatusReply, m.EchoReply))
_TOOL_ASKS: frozenset[MessageType] = frozenset((m.Claim, m.GiveUp, m.Settle, m.Status, m.Echo))
_PEER_ASKS: frozenset[MessageType] = _TOOL_ASKS | {m.PostingEvent, m.Mail, m.Land, m.Confirm}
_WORKER_ASKS: frozenset[MessageType] = _TOOL_ASKS | {
    *(m.Post, m.Renew, m.Withdraw, m.Mail, m.Listen, m.Unlisten, m.Land, m.Report),
}

# Which messages may follow the handshake, by the link's role (the dialler's) and by who sends them.
MAY_SEND: Mapping[tuple[str, Side], frozenset[MessageType]] = {
    ("worker", "dialler"): _EITHER | _WORKER_ASKS,
    ("worker", "acceptor"): _EITHER | _ANSWERS | {m.PostingEvent, m.Delivery},
    ("peer", "dialler"): _EITHER | _PEER_ASKS | (_ANSWERS - {m.Posted}),
    ("peer", "acceptor"): _EITHER | _PEER_ASKS | (_ANSWERS - {m.Posted}),
    ("tool", "dialler"): _EITHER | _TOOL_ASKS,
    ("tool", "acceptor"): _EITHER | (_ANSWERS - {m.Posted}) | {m.PostingEvent},
}

_ANY: frozenset[MessageType] = frozenset().union(*MAY_SEND.values())

HANDSHAKE = frozenset((State.HELLO_SENT, State.PROOF_SENT, State.ACCEPTED, State.WELCOMED))

TRANSITIONS: Mapping[tuple[State, MessageType], State] = {
    (State.HELLO_SENT, m.Welcome): State.PROOF_SENT,
    (State.HELLO_SENT, m.Refuse): State.CLOSED,
    (State.PROOF_SENT, m.Ready): State.OPEN,
    (State.PROOF_SENT, m.Refuse): State.CLOSED,
    (State.ACCEPTED, m.Hello): State.WELCOMED,
    (State.WELCOMED, m.Proof): State.OPEN,
    (State.WELCOMED, m.Refuse): State.CLOSED,
    **{
        (state, kind): State.OPEN
        for state in (State.OPEN, State.PROBING)
        for kind in frozenset().union(*MAY_SEND.values())
    },
}

# The limit that ends a stay in each state. The handshake has one limit for all of its steps together.
DEADLINES: Mapping[State, str] = {
    State.HELLO_SENT: "handshake_s",
    State.PROOF_SENT: "handshake_s",
    State.ACCEPTED: "handshake_s",
    State.WELCOMED: "handshake_s",
    State.OPEN: "keepalive_s",  # while something live depends on the peer: keepalive_live_s
    State.PROBING: "dead_s",
}
