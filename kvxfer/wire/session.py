"""One control connection as a state machine, for the side that dialled and the side that accepted.

The idea: `TRANSITIONS` says which message is legal in which state and where it leads, `MAY_SEND` which messages a link
of a given role carries in which direction, `DEADLINES` which limit of the configuration bounds each state. The code
below only looks things up in these tables and checks what a table cannot say. It does no I/O and reads no clock:
messages and `now` (seconds on a monotonic clock) go in, and a `Step` comes out with what to send and what happened.

    dialler:   HELLO_SENT --Welcome--> PROOF_SENT --Ready--> OPEN <--> PROBING
    acceptor:  ACCEPTED --Hello--> WELCOMED --Proof--> OPEN <--> PROBING
    both, from anywhere: CLOSED

After the handshake the session also decides about keepalive: a silent connection is probed with Ping, anything that
arrives is a sign of life, and silence after a probe means that the peer is lost.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from kvxfer.errors import (
    AuthenticationError,
    IdentityMismatch,
    KvxferError,
    NotKvxfer,
    PeerDraining,
    PeerLost,
    PeerUnreachable,
    ProtocolError,
    UnknownMessage,
    UsageError,
    VersionMismatch,
)
from kvxfer.net.credentials import NodeKeys
from kvxfer.wire import messages as m
from kvxfer.wire.auth import Side, find_secret, prove, transcript
from kvxfer.wire.codec import unread
from kvxfer.wire.messages import error_reply, exception_of, refusal

VERSIONS = (1, 1)  # the oldest and the newest protocol version that this code speaks
FEATURES: tuple[str, ...] = ()
LATE_PROBES_MAX = 2  # times that a probe is repeated because this side slept through its deadline


# -- the tables -------------------------------------------------------------------------------------------------------


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


# -- what goes in and comes out ---------------------------------------------------------------------------------------


class Limits(Protocol):
    """Durations in seconds, by the names of their options; a `Config` has them."""

    @property
    def handshake_s(self) -> float: ...
    @property
    def keepalive_s(self) -> float: ...
    @property
    def keepalive_live_s(self) -> float: ...
    @property
    def dead_s(self) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Who one side of a connection is. Of an acceptor, one learns node id, incarnation and namespace only."""

    role: str = "peer"
    node_id: str = ""
    incarnation: str
    name: str = ""
    pid: int = 0
    engine_id: str = ""
    counters_path: str = ""
    namespace: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Established:
    """The handshake is done; from here on `Deliver` and `Closed` follow, and frames may be long."""

    peer: Facts
    version: int
    features: tuple[str, ...]
    session: str
    authenticated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Deliver:
    """A message for whoever uses the connection: everything but Ping, Pong and the handshake."""

    message: m.Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """The connection has ended: send what the step says, then close. `error` is the reason, for everyone who waits."""

    error: KvxferError


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The outcome of one input: messages to send, in order, and at most one event."""

    send: tuple[m.Message, ...] = ()
    event: Established | Deliver | Closed | None = None


_NOTHING = Step()
SAME_SECRET = "give all nodes the same secret_file; a side without one has the secret of its user on its own host"


class Session:
    """The protocol of one connection.

    ``secret`` empty or None: none; the other side may also use one of ``more_secrets``. ``keys`` are this node's own,
    which also prove which node it is. ``auth_required`` (by default: whether there is a secret or a key) makes an
    acceptor demand the dialler's proof, and makes a dialler refuse an acceptor that offers none; a dialler with one of
    them proves itself whenever it is asked. ``nonce`` is 32 fresh random bytes,
    ``session_id`` (acceptor) 32 fresh hex digits. ``expected_node_id`` (dialler) refuses any other node.
    ``accept_roles`` (acceptor) are the link roles that may connect here. ``authorise`` gets the other side's facts once
    it has proved itself, and raises for whoever may not connect all the same.
    """

    def __init__(
        self,
        side: Side,
        facts: Facts,
        limits: Limits,
        *,
        nonce: bytes,
        now: float,
        session_id: str = "",
        secret: bytes | None = None,
        more_secrets: Sequence[bytes] = (),
        keys: NodeKeys | None = None,
        auth_required: bool | None = None,
        expected_node_id: str = "",
        accept_roles: Collection[str] = m.LINK_ROLES,
        authorise: Callable[[Facts], None] | None = None,
        versions: tuple[int, int] = VERSIONS,
        features: Sequence[str] = FEATURES,
    ) -> None:
        self.side: Side = side
        self.facts = facts
        self.state = State.HELLO_SENT if side == "dialler" else State.ACCEPTED
        self.link_role = facts.role if side == "dialler" else ""
        self.urgent = False
        self.proved_with = b""  # the secret with which the other side has proved itself
        self.version = 0  # of the protocol, as agreed; 0 until the connection is open
        self.goodbye: str | None = None  # the peer's reason, once it has said that it will leave
        self._limits = limits
        self._nonce = nonce
        self._session_id = session_id
        self._secret = secret or b""
        self._secrets = tuple(item for item in (self._secret, *more_secrets) if item)
        self._keys = keys
        self._authorise = authorise
        self._certified = ""  # the node id that the other side's certificate is for
        proves = bool(self._secret or keys)
        self._auth_required = proves if auth_required is None else auth_required
        self._expected_node_id = expected_node_id
        self._accept_roles = accept_roles
        self._versions = versions
        self._features = (*features, *(keys.features if keys is not None else ()))
        self._keepalive_s = limits.keepalive_s
        self._since = now  # start of the handshake; later: last sign of life, or the last probe
        self._probes = self._late_probes = 0
        self._peer: Facts | None = None
        self._hello: m.Hello | None = None
        self._welcome: m.Welcome | None = None
        if self._auth_required and not proves and side == "acceptor":
            raise UsageError("an acceptor that requires authentication needs a secret")

    # -- driving it ----------------------------------------------------------------------------------------------------

    def start(self, now: float) -> tuple[m.Message, ...]:
        """What to send first (after the preamble, for a dialler)."""
        self._since = now
        if self.side == "acceptor":
            return ()
        mine = self.facts
        self._hello = m.Hello(
            version_min=self._versions[0],
            version_max=self._versions[1],
            features=self._features,
            role=mine.role,
            node_id=mine.node_id,
            incarnation=mine.incarnation,
            nonce=self._nonce,
            name=mine.name,
            pid=mine.pid,
            engine_id=mine.engine_id,
            counters_path=mine.counters_path,
            namespace=mine.namespace,
        )
        return (self._hello,)

    def certify(self, node_id: str) -> None:
        """Before the first message: the channel below has proved that the other side is this node."""
        self._certified = node_id

    def receive(self, message: m.Message | m.Unknown, now: float) -> Step:
        """One message has arrived. Never raises: a bad message gives `Closed` with a `ProtocolError`."""
        state = self.state
        if state is State.CLOSED:
            return _NOTHING
        self.heard(now)
        if isinstance(message, m.Unknown):
            return self._receive_unknown(message)
        kind = type(message)
        following = TRANSITIONS.get((state, kind))
        if following is None:
            return self.fail(ProtocolError(f"{kind.__name__} is out of place", kind=kind.__name__, state=state.value))
        if state in HANDSHAKE:
            try:
                step = _HANDLERS[kind](self, message)
            except KvxferError as wrong:
                return self.fail(wrong)
            if self.state is not State.CLOSED:
                self.state = following
            return step
        return self._receive_open(message)

    def heard(self, now: float) -> None:
        """Bytes have arrived, even if they are no complete message yet: a sign of life."""
        if self.state is State.PROBING:
            self.state = State.OPEN
        if self.state is State.OPEN:
            self._since = now
            self._late_probes = 0

    def set_urgent(self, urgent: bool) -> None:
        """While something live depends on the peer, silence is probed after `keepalive_live_s`. Changes `deadline`."""
        self.urgent = urgent

    def deadline(self) -> float | None:
        """When `tick` is due, on the clock of `now`; None when closed."""
        if self.state is State.CLOSED:
            return None
        if self.state is State.OPEN:
            return self._since + self.keepalive_s
        return self._since + float(getattr(self._limits, DEADLINES[self.state]))

    @property
    def keepalive_s(self) -> float:
        """How long a silence is left alone at present: the shorter of both sides' settings."""
        return min(self._keepalive_s, self._limits.keepalive_live_s) if self.urgent else self._keepalive_s

    def tick(self, now: float) -> Step:
        """Time has passed. Does nothing before `deadline`."""
        due = self.deadline()
        if due is None or now < due:
            return _NOTHING
        if self.state is State.OPEN:
            return self._probe(now)
        dead_s = self._limits.dead_s
        if self.state is State.PROBING:
            if now - due > dead_s / 4 and self._late_probes < LATE_PROBES_MAX:
                # So late that this side slept, not the peer: its answer may lie unread in the socket.
                self._late_probes += 1
                return self._probe(now)
            return self.fail(PeerLost("the peer gave no sign of life", probed_s=dead_s, keepalive_s=self.keepalive_s))
        limit = self._limits.handshake_s
        error = PeerUnreachable if self.side == "dialler" else PeerLost
        return self.fail(error(f"the handshake took too long: still {self.state.value}", limit_s=limit))

    def fail(self, error: KvxferError) -> Step:
        """End the connection because of an error on this side (the decoder's, for one); the peer is told if it
        listens."""
        if self.state is State.CLOSED:
            return _NOTHING
        before, self.state = self.state, State.CLOSED
        silent = before is State.ACCEPTED and isinstance(error, NotKvxfer | PeerLost)
        if silent or before is State.PROBING or isinstance(error, NotKvxfer):
            return Step(event=Closed(error=error))
        notice = refusal(error) if before in HANDSHAKE else error_reply(error)
        return Step(send=(notice,), event=Closed(error=error))

    def end(self, buffered: int = 0) -> Step:
        """The stream has ended. ``buffered``: bytes of an unfinished message."""
        if self.state is State.CLOSED:
            return _NOTHING
        before, self.state = self.state, State.CLOSED
        error: KvxferError
        if self.goodbye is not None:
            error = PeerDraining(f"the peer has left: {self.goodbye}" if self.goodbye else "the peer has left")
        elif buffered:
            error = PeerLost("the connection ended in the middle of a message", bytes=buffered)
        elif before in HANDSHAKE:
            error = PeerLost(f"the connection ended during the handshake, {before.value}")
        else:
            error = PeerLost("the connection ended")
        return Step(event=Closed(error=error))

    def speaks(self, kind: MessageType) -> bool:
        """Whether the version that was agreed has this message. Before that nothing is known."""
        return kind.since <= self.version

    def check_send(self, message: m.Message) -> None:
        """Raises `UsageError` when this side may not send this message, `VersionMismatch` when the other is too old for
        it, so that no peer has to complain about it."""
        what = type(message).__name__
        if type(message) not in MAY_SEND.get((self.link_role, self.side), ()):
            raise UsageError(f"{what} is not for this side of a link", kind=what, role=self.link_role, side=self.side)
        if not self.speaks(type(message)):
            raise self.too_old(what, message.since)

    def too_old(self, what: str, since: int) -> VersionMismatch:
        """The error for what the agreed version does not have."""
        agreed, newest = self.version, self._versions[1]
        text = f"{what} came with version {since} of the protocol: the peer speaks version {agreed}, this side {newest}"
        error = VersionMismatch(text, hint="upgrade the node that speaks the older version")
        error.fields.update(kind=what, since=since, version=agreed, newest=newest)
        return error

    def not_known(self, what: str, error: UnknownMessage) -> UnknownMessage:
        """The same error, told by the peer, with all that one needs to know about it."""
        agreed, newest = self.version, self._versions[1]
        text = f"the peer does not know {what}: it speaks version {agreed} of the protocol, this side {newest}"
        found = UnknownMessage(text, peer=error.peer, retryable=False, hint="upgrade the node that lacks it")
        found.fields.update(kind=what, version=agreed, newest=newest)
        return found

    # -- the handshake -------------------------------------------------------------------------------------------------

    def _on_hello(self, hello: m.Hello) -> Step:
        low, high = max(hello.version_min, self._versions[0]), min(hello.version_max, self._versions[1])
        if hello.version_min > hello.version_max:
            raise ProtocolError("Hello has an empty range of versions", kind="Hello", field="version_min")
        if low > high:
            raise self._version_mismatch(hello.version_min, hello.version_max)
        if hello.role not in self._accept_roles:
            raise ProtocolError(f"no {hello.role} may connect here", kind="Hello", field="role")
        if hello.role == "peer" and not hello.node_id:
            raise ProtocolError("a peer must say its node id", kind="Hello", field="node_id")
        self._hello = hello
        self.link_role = hello.role
        self._peer = Facts(
            role=hello.role,
            node_id=hello.node_id,
            incarnation=hello.incarnation,
            name=hello.name,
            pid=hello.pid,
            engine_id=hello.engine_id,
            counters_path=hello.counters_path,
            namespace=hello.namespace,
        )
        if hello.node_id:
            self._check_certified(hello.node_id)
        self._welcome = self._make_welcome(hello, high)
        return Step(send=(self._welcome,))

    def _make_welcome(self, hello: m.Hello, version: int) -> m.Welcome:
        mine, required = self.facts, self._auth_required
        common = tuple(name for name in self._features if name in hello.features)
        auth = "hmac" if required else "none"

        def made(proof: bytes) -> m.Welcome:
            return m.Welcome(
                version=version,
                features=common,
                node_id=mine.node_id,
                incarnation=mine.incarnation,
                nonce=self._nonce,
                auth=auth,
                proof=proof,
                namespace=mine.namespace,
            )

        self._check_unread(made(b""), version)
        if not required:
            return made(b"")
        return made(prove(self._secret_for(hello), "acceptor", transcript(hello, made(b""))))

    def _secret_for(self, hello: m.Hello) -> bytes:
        """With what an acceptor proves itself: the key for this node where both have keys, else the shared secret."""
        key = b"" if self._keys is None else self._keys.presented_to(hello.node_id, hello.features)
        if key or self._secret:
            return key or self._secret
        if not hello.node_id:
            hint = "give the tool the node_keys_file of its own node"
            raise AuthenticationError("this node requires node keys, and the dialler does not say its node", hint=hint)
        hint = "give both nodes files of the same root, by `kvxfer keys`"
        raise AuthenticationError("this node and the dialler have no generation of node keys in common", hint=hint)

    def _accepted_from(self, node_id: str) -> tuple[bytes, ...]:
        """With what the other side may prove that it is this node."""
        return (*(() if self._keys is None else self._keys.accepted_from(node_id)), *self._secrets)

    def _on_welcome(self, welcome: m.Welcome) -> Step:
        hello = self._hello
        if hello is None:
            raise ProtocolError("Welcome came before Hello was sent", kind="Welcome")
        if not self._versions[0] <= welcome.version <= self._versions[1]:
            raise self._version_mismatch(welcome.version, welcome.version)
        if not set(welcome.features) <= set(hello.features):
            raise ProtocolError("Welcome has features that were not offered", kind="Welcome", field="features")
        self._check_unread(hello, welcome.version)
        said = transcript(hello, welcome)
        secret = self._check_acceptor(welcome, said)
        self._check_certified(welcome.node_id)
        if self._expected_node_id and welcome.node_id != self._expected_node_id:
            raise IdentityMismatch(
                "another node answers at this address", expected=self._expected_node_id, actual=welcome.node_id
            )
        self._welcome = welcome
        self._peer = Facts(node_id=welcome.node_id, incarnation=welcome.incarnation, namespace=welcome.namespace)
        self._check_authorised()
        proof = prove(secret, "dialler", said) if welcome.auth == "hmac" else b""
        return Step(send=(m.Proof(proof=proof),))

    def _check_certified(self, says: str) -> None:
        """Whoever has a certificate is the node that it is for, and no other."""
        if self._certified and says != self._certified:
            other = _other(self.side)
            hint = "set tls_cert there to the certificate of that node"
            why = f"the {other} says it is one node, and its certificate is for another"
            raise AuthenticationError(why, says=says, certified=self._certified, hint=hint)

    def _check_authorised(self) -> None:
        assert self._peer is not None
        if self._authorise is not None:
            self._authorise(replace(self._peer, node_id=self._peer.node_id or self._certified))

    def _check_acceptor(self, welcome: m.Welcome, said: bytes) -> bytes:
        """The secret that both sides know; empty when the acceptor asks for none."""
        if welcome.auth == "none":
            if self._auth_required:
                hint = "give that node the same secret_file, or take it away from this side"
                raise AuthenticationError(
                    "the peer does not ask for the shared secret, but this side requires it", hint=hint
                )
            return b""
        secrets = self._accepted_from(welcome.node_id)
        if not secrets:
            hint = "set secret_file, or node_keys_file, as on the other nodes"
            raise AuthenticationError("the peer requires a secret, and this side has none", hint=hint)
        found = find_secret(secrets, "acceptor", said, welcome.proof)
        if not found and self._keys is not None:
            why = "the peer does not prove with a key of its own that it is the node that it says"
            raise AuthenticationError(
                why, says=welcome.node_id, hint="give it the file that `kvxfer keys` wrote for it"
            )
        if not found:
            raise AuthenticationError("the peer's shared secret is not the same as this side's", hint=SAME_SECRET)
        self.proved_with = found
        return found

    def _on_proof(self, proof: m.Proof) -> Step:
        assert self._hello is not None
        assert self._welcome is not None
        if self._auth_required:
            said = transcript(self._hello, self._welcome)
            secrets = self._accepted_from(self._hello.node_id)
            self.proved_with = find_secret(secrets, "dialler", said, proof.proof)
            if not self.proved_with:
                raise AuthenticationError(
                    "the dialler's shared secret is missing or not the same as this side's"
                    if self._keys is None
                    else "the dialler does not prove with a key of its own that it is the node that it says"
                )
        self._check_authorised()
        ready = m.Ready(session=self._session_id, keepalive_s=self._keepalive_s)
        return Step(send=(ready,), event=self._established(self._session_id))

    def _on_ready(self, ready: m.Ready) -> Step:
        self._keepalive_s = min(self._keepalive_s, max(ready.keepalive_s, self._limits.keepalive_live_s))
        return Step(event=self._established(ready.session))

    def _on_refuse(self, refuse: m.Refuse) -> Step:
        self.state = State.CLOSED
        return Step(event=Closed(error=exception_of(refuse)))

    def _check_unread(self, mine: m.Hello | m.Welcome, version: int) -> None:
        """What this side says of itself and the other cannot read: it would take us for somebody else."""
        for name in unread(mine, version):
            raise self._too_old_for(name, type(mine).added[name], version)

    def _too_old_for(self, name: str, since: int, version: int) -> VersionMismatch:
        other = _other(self.side)
        text = f"the {other} speaks version {version}, and the {name} of the {self.side} needs version {since}"
        error = VersionMismatch(text, hint=f"upgrade the {other}, or set no {name} on the other side until then")
        error.fields.update(field=name, since=since, version=version, newest=self._versions[1])
        return error

    def _established(self, session: str) -> Established:
        assert self._peer is not None
        assert self._welcome is not None
        welcome = self._welcome
        self.version = welcome.version
        # A tool proves whose it is, and is no process of that node: nothing may be kept for the node in its name.
        own = self._keys is not None and self._peer.role == "tool"
        peer = replace(self._peer, node_id="") if own else self._peer
        return Established(
            peer=peer,
            version=welcome.version,
            features=welcome.features,
            session=session,
            authenticated=welcome.auth == "hmac" or bool(self._certified),
        )

    def _version_mismatch(self, low: int, high: int) -> VersionMismatch:
        mine, other = self._versions, _other(self.side)
        older = self.side if mine[1] < low else other
        error = VersionMismatch(
            f"no common protocol version: the {self.side} speaks {mine[0]} to {mine[1]}, the {other} {low} to {high}",
            hint=f"upgrade the {older}: versions that follow each other work together",
        )
        error.fields.update({f"{self.side}_min": mine[0], f"{self.side}_max": mine[1]})
        error.fields.update({f"{other}_min": low, f"{other}_max": high})
        return error

    # -- after the handshake -------------------------------------------------------------------------------------------

    def _receive_open(self, message: m.Message) -> Step:
        if type(message) not in MAY_SEND[self.link_role, _other(self.side)]:
            what, role = type(message).__name__, self.link_role
            return self.fail(ProtocolError(f"the peer may not send {what} on a {role} link", kind=what, role=role))
        if isinstance(message, m.Ping):
            return Step(send=(m.Pong(rid=message.rid),))
        if isinstance(message, m.Pong):
            return _NOTHING
        if isinstance(message, m.Goodbye):
            self.goodbye = message.reason
        elif isinstance(message, m.Error) and message.rid == 0:
            self.state = State.CLOSED
            return Step(event=Closed(error=exception_of(message)))
        return Step(event=Deliver(message=message))

    def _receive_unknown(self, message: m.Unknown) -> Step:
        error = UnknownMessage("a message type that this version does not know", number=message.number)
        if self.state in HANDSHAKE:
            return self.fail(error)
        # A request is answered, so that its sender need not wait for its deadline; anything else can be ignored.
        return Step(send=(error_reply(error, message.rid),)) if message.rid else _NOTHING

    def _probe(self, now: float) -> Step:
        self.state = State.PROBING
        self._since = now
        self._probes += 1
        return Step(send=(m.Ping(rid=self._probes),))


def _other(side: Side) -> Side:
    return "acceptor" if side == "dialler" else "dialler"


_HANDLERS: Mapping[MessageType, Callable[..., Step]] = {
    m.Hello: Session._on_hello,
    m.Welcome: Session._on_welcome,
    m.Proof: Session._on_proof,
    m.Ready: Session._on_ready,
    m.Refuse: Session._on_refuse,
}
