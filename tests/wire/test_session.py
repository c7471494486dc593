"""Both ends of a connection as state machines: every state with every message, the handshake, and keepalive."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest

from kvxfer.errors import (
    AuthenticationError,
    BusyError,
    IdentityMismatch,
    KvxferError,
    NotAllowed,
    NotKvxfer,
    PeerDraining,
    PeerLost,
    PeerUnreachable,
    ProtocolError,
    UnknownMessage,
    UsageError,
    VersionMismatch,
)
from kvxfer.wire import messages as m
from kvxfer.wire.auth import prove
from kvxfer.wire.session import (
    HANDSHAKE,
    MAY_SEND,
    TRANSITIONS,
    VERSIONS,
    Closed,
    Deliver,
    Established,
    Facts,
    Session,
    State,
    Step,
)
from tests.wire import golden
from tests.wire.samples import full

SECRET = b"a secret of 24 bytes ..."
OTHER_SECRET = b"another secret ........."


@dataclass
class Limits:
    handshake_s: float = 5.0
    keepalive_s: float = 10.0
    keepalive_live_s: float = 0.5
    dead_s: float = 2.0


LIMITS = Limits()
DIALLER = Facts(
    node_id="0d" * 16, incarnation="1d" * 16, name="dialler", pid=41, engine_id="2d" * 16, counters_path="/c"
)
ACCEPTOR = Facts(node_id="0a" * 16, incarnation="1a" * 16)


def dialler(facts: Facts = DIALLER, *, limits: Limits = LIMITS, **options: Any) -> Session:
    return Session("dialler", facts, limits, nonce=bytes(range(32)), now=0.0, **options)


def acceptor(facts: Facts = ACCEPTOR, *, limits: Limits = LIMITS, **options: Any) -> Session:
    return Session("acceptor", facts, limits, nonce=bytes(range(32, 64)), now=0.0, session_id="5e" * 16, **options)


class Pair:
    """Two sessions whose messages reach each other at once; `events` and `sent` keep what happened."""

    def __init__(self, one: Session, two: Session) -> None:
        self.ends = {"dialler": one, "acceptor": two}
        self.events: dict[str, list[Any]] = {"dialler": [], "acceptor": []}
        self.sent: dict[str, list[m.Message]] = {"dialler": [], "acceptor": []}

    def shake(self) -> Pair:
        assert self.ends["acceptor"].start(0.0) == ()
        self.carry("dialler", self.ends["dialler"].start(0.0))
        return self

    def carry(self, side: str, messages: tuple[m.Message, ...], now: float = 0.0) -> None:
        other = "acceptor" if side == "dialler" else "dialler"
        for message in messages:
            self.sent[side].append(message)
            self.take(other, self.ends[other].receive(message, now), now)

    def take(self, side: str, step: Step, now: float = 0.0) -> None:
        if step.event is not None:
            self.events[side].append(step.event)
        self.carry(side, step.send, now)

    def errors(self) -> tuple[KvxferError, KvxferError]:
        """Of the dialler and of the acceptor, both closed by their last event."""
        last = [self.events[side][-1] for side in ("dialler", "acceptor")]
        assert all(isinstance(event, Closed) for event in last), last
        assert all(end.state is State.CLOSED and end.deadline() is None for end in self.ends.values())
        return last[0].error, last[1].error


def established(role: str = "peer", **options: Any) -> Pair:
    pair = Pair(dialler(replace(DIALLER, role=role), **options), acceptor(**options)).shake()
    assert all(end.state is State.OPEN for end in pair.ends.values())
    return pair


# -- the handshake ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", m.LINK_ROLES)
@pytest.mark.parametrize("secret", [None, b"", SECRET])
def test_a_handshake(role: str, secret: bytes | None) -> None:
    me = replace(DIALLER, role=role)
    pair = Pair(dialler(me, secret=secret), acceptor(secret=secret)).shake()
    common = {"version": VERSIONS[1], "features": (), "session": "5e" * 16, "authenticated": bool(secret)}
    assert pair.events["acceptor"] == [Established(peer=me, **common)]
    assert pair.events["dialler"] == [Established(peer=ACCEPTOR, **common)]
    assert [type(message) for message in pair.sent["dialler"]] == [m.Hello, m.Proof]
    assert [type(message) for message in pair.sent["acceptor"]] == [m.Welcome, m.Ready]
    assert pair.ends["acceptor"].link_role == pair.ends["dialler"].link_role == role


@pytest.mark.parametrize("name", golden.HANDSHAKES)
def test_golden_handshakes(name: str) -> None:
    assert golden.handshake(name) == golden.load(golden.HANDSHAKES_FILE)[name]


def test_a_node_may_connect_to_itself() -> None:
    pair = Pair(dialler(ACCEPTOR, secret=SECRET, expected_node_id=ACCEPTOR.node_id), acceptor(secret=SECRET)).shake()
    assert isinstance(pair.events["dialler"][0], Established)


@pytest.mark.parametrize("mine", [None, SECRET, OTHER_SECRET])
@pytest.mark.parametrize("yours", [None, SECRET])
def test_secrets_that_differ(mine: bytes | None, yours: bytes | None) -> None:
    if mine == yours:
        return
    pair = Pair(dialler(secret=mine), acceptor(secret=yours)).shake()
    for error in pair.errors():
        assert type(error) is AuthenticationError
    assert isinstance(pair.sent["dialler"][-1], m.Refuse)
    assert pair.sent["dialler"][-1].code == "authentication"


def test_a_dialler_that_only_claims_to_know_the_secret() -> None:
    for forged in (b"", bytes(32), prove(OTHER_SECRET, "dialler", b"")):
        end = acceptor(secret=SECRET)
        end.receive(dialler().start(0.0)[0], 0.0)
        step = end.receive(m.Proof(proof=forged), 0.0)
        assert isinstance(step.send[0], m.Refuse)
        assert step.send[0].code == "authentication"
        assert isinstance(step.event, Closed)
        assert type(step.event.error) is AuthenticationError


def test_the_acceptors_own_proof_cannot_be_reflected() -> None:
    end = acceptor(secret=SECRET)
    welcome = end.receive(dialler().start(0.0)[0], 0.0).send[0]
    assert isinstance(welcome, m.Welcome)
    assert isinstance(end.receive(m.Proof(proof=welcome.proof), 0.0).event, Closed)


@pytest.mark.parametrize(
    "change",
    [
        *({"name": "other"}, {"version_max": 1, "version_min": 1, "pid": 1}, {"features": ("other",)}),
        *({"node_id": "0e" * 16}, {"role": "worker"}, {"nonce": b"\7" * 32}),
    ],
    ids=str,
)
def test_what_is_changed_on_the_way_is_noticed(change: dict[str, Any]) -> None:
    one, two = dialler(secret=SECRET), acceptor(secret=SECRET)
    hello = replace(one.start(0.0)[0], **change)
    step = one.receive(two.receive(hello, 0.0).send[0], 0.0)
    assert isinstance(step.event, Closed)
    assert type(step.event.error) is AuthenticationError


@pytest.mark.parametrize(
    ("mine", "yours", "fits"),
    [
        ((SECRET,), (OTHER_SECRET, SECRET), False),  # it proves itself with its first, which nobody else knows
        ((SECRET,), (SECRET, OTHER_SECRET), True),
        ((OTHER_SECRET, SECRET), (SECRET, OTHER_SECRET), True),
        ((OTHER_SECRET, SECRET), (SECRET,), True),
        ((OTHER_SECRET,), (SECRET,), False),
    ],
)
def test_of_several_secrets_the_first_is_used_and_all_are_accepted(
    mine: tuple[bytes, ...], yours: tuple[bytes, ...], fits: bool
) -> None:
    one, two = (dialler(secret=mine[0], more_secrets=mine[1:]), acceptor(secret=yours[0], more_secrets=yours[1:]))
    pair = Pair(one, two).shake()
    if fits:
        assert [event[0].authenticated for event in pair.events.values()] == [True, True]
    else:
        assert [type(error) for error in pair.errors()] == [AuthenticationError, AuthenticationError]


def test_a_certificate_says_who_the_other_side_is() -> None:
    one, two = dialler(), acceptor()
    one.certify(ACCEPTOR.node_id)
    two.certify(DIALLER.node_id)
    pair = Pair(one, two).shake()
    assert [event[0].authenticated for event in pair.events.values()] == [True, True]
    for side in (0, 1):
        ends = dialler(), acceptor()
        ends[side].certify("ff" * 16)
        errors = Pair(*ends).shake().errors()
        assert [type(error) for error in errors] == [AuthenticationError, AuthenticationError]
        assert errors[side].fields["certified"] == "ff" * 16


def test_namespaces_are_told_and_part_of_the_proof() -> None:
    one = dialler(replace(DIALLER, namespace="a"), secret=SECRET)
    two = acceptor(replace(ACCEPTOR, namespace="b"), secret=SECRET)
    pair = Pair(one, two).shake()
    assert [pair.events[side][0].peer.namespace for side in ("dialler", "acceptor")] == ["b", "a"]
    for side, change in (("dialler", "a"), ("acceptor", "b")):
        one = dialler(replace(DIALLER, namespace="a"), secret=SECRET)
        two = acceptor(replace(ACCEPTOR, namespace="b"), secret=SECRET)
        hello = one.start(0.0)[0]
        hello = replace(hello, namespace=change if side == "acceptor" else "")
        welcome = two.receive(hello, 0.0).send[0]
        welcome = replace(welcome, namespace="b" if side == "dialler" else "")
        event = one.receive(welcome, 0.0).event
        assert isinstance(event, Closed)
        assert type(event.error) is AuthenticationError


@pytest.mark.parametrize("side", ["dialler", "acceptor"])
def test_who_may_not_connect_is_refused_after_the_proof(side: str) -> None:
    asked: list[Facts] = []

    def authorise(facts: Facts) -> None:
        asked.append(facts)
        raise NotAllowed("not this one")

    def made(secret: bytes) -> Pair:
        options = {name: {"authorise": authorise} if name == side else {} for name in ("dialler", "acceptor")}
        two = acceptor(secret=secret, **options["acceptor"])
        return Pair(dialler(secret=SECRET, **options["dialler"]), two).shake()

    assert [type(error) for error in made(SECRET).errors()] == [NotAllowed, NotAllowed]
    [facts] = asked
    assert facts.node_id == (ACCEPTOR if side == "dialler" else DIALLER).node_id
    assert [type(error) for error in made(OTHER_SECRET).errors()] == [AuthenticationError, AuthenticationError]
    assert len(asked) == 1


def test_a_tool_is_judged_by_its_certificate() -> None:
    asked: list[Facts] = []
    end = acceptor(authorise=asked.append)
    end.certify("cc" * 16)
    Pair(dialler(replace(DIALLER, role="tool", node_id="")), end).shake()
    assert [(facts.role, facts.node_id) for facts in asked] == [("tool", "cc" * 16)]


def test_authentication_may_be_left_out_where_it_is_not_required() -> None:
    pair = Pair(dialler(secret=SECRET, auth_required=False), acceptor(secret=SECRET, auth_required=False)).shake()
    assert not pair.events["dialler"][0].authenticated
    pair = Pair(dialler(secret=SECRET, auth_required=False), acceptor(secret=SECRET)).shake()
    assert pair.events["dialler"][0].authenticated
    assert pair.events["acceptor"][0].authenticated


def test_an_acceptor_cannot_require_what_it_does_not_have() -> None:
    with pytest.raises(UsageError, match="needs a secret"):
        acceptor(auth_required=True)
    pair = Pair(dialler(auth_required=True), acceptor()).shake()
    assert type(pair.errors()[0]) is AuthenticationError


@pytest.mark.parametrize(
    ("mine", "yours", "common"),
    [((1, 1), (1, 1), 1), ((1, 2), (1, 1), 1), ((1, 2), (2, 3), 2), ((2, 3), (1, 2), 2), ((1, 5), (2, 4), 4)],
)
def test_the_newest_common_version(mine: tuple[int, int], yours: tuple[int, int], common: int) -> None:
    pair = Pair(dialler(versions=mine), acceptor(versions=yours)).shake()
    assert [pair.events[side][0].version for side in pair.events] == [common, common]


@pytest.mark.parametrize(("mine", "yours"), [((1, 1), (2, 3)), ((3, 4), (1, 2))])
def test_no_common_version(mine: tuple[int, int], yours: tuple[int, int]) -> None:
    pair = Pair(dialler(versions=mine), acceptor(versions=yours)).shake()
    ranges = {"dialler_min": mine[0], "dialler_max": mine[1], "acceptor_min": yours[0], "acceptor_max": yours[1]}
    for error in pair.errors():
        assert type(error) is VersionMismatch
        assert error.fields == ranges
        assert f"dialler {mine[0]} to {mine[1]}" in error.message.replace("speaks ", "")
    assert [type(message) for message in pair.sent["acceptor"]] == [m.Refuse]


def test_common_features() -> None:
    one, two = dialler(features=("a", "b", "c")), acceptor(features=("c", "x", "a"))
    pair = Pair(one, two).shake()
    assert [pair.events[side][0].features for side in pair.events] == [("c", "a"), ("c", "a")]


def test_another_node_answers() -> None:
    pair = Pair(dialler(expected_node_id="ff" * 16), acceptor()).shake()
    for error in pair.errors():
        assert type(error) is IdentityMismatch
        assert error.fields == {"expected": "ff" * 16, "actual": ACCEPTOR.node_id}


def test_an_acceptor_may_refuse_a_role() -> None:
    pair = Pair(dialler(replace(DIALLER, role="worker")), acceptor(accept_roles=("peer", "tool"))).shake()
    for error in pair.errors():
        assert type(error) is ProtocolError
        assert "no worker may connect here" in error.message


def test_a_server_without_room_refuses_with_a_reason() -> None:
    end = dialler()
    end.start(0.0)
    step = end.receive(m.Refuse(code="busy", message="64 handshakes already", fields={"limit": 64}), 0.0)
    assert step.send == ()
    assert isinstance(step.event, Closed)
    assert type(step.event.error) is BusyError
    assert step.event.error.fields == {"limit": 64}


HELLO = dialler().start(0.0)[0]
BAD_HELLOS = {
    "empty range": {"version_min": 2, "version_max": 1},
    "peer without node": {"node_id": ""},
}


@pytest.mark.parametrize("name", BAD_HELLOS)
def test_a_hello_that_makes_no_sense(name: str) -> None:
    step = acceptor().receive(replace(HELLO, **BAD_HELLOS[name]), 0.0)
    assert isinstance(step.event, Closed)
    assert type(step.event.error) is ProtocolError
    assert isinstance(step.send[0], m.Refuse)


BAD_WELCOMES: dict[str, tuple[dict[str, Any], type[KvxferError]]] = {
    "version that was not offered": ({"version": 3}, VersionMismatch),
    "features that were not offered": ({"features": ("x",)}, ProtocolError),
    "hmac without a secret here": ({"auth": "hmac"}, AuthenticationError),
}


@pytest.mark.parametrize("name", BAD_WELCOMES)
def test_a_welcome_that_makes_no_sense(name: str) -> None:
    change, expected = BAD_WELCOMES[name]
    end = dialler()
    welcome = acceptor().receive(end.start(0.0)[0], 0.0).send[0]
    step = end.receive(replace(welcome, **change), 0.0)
    assert isinstance(step.event, Closed)
    assert type(step.event.error) is expected
    assert isinstance(step.send[0], m.Refuse)


def test_a_welcome_before_hello_was_sent() -> None:
    step = dialler().receive(full(m.Welcome), 0.0)
    assert isinstance(step.event, Closed)
    assert type(step.event.error) is ProtocolError


# -- every state with every message -----------------------------------------------------------------------------------


def in_state(state: State, role: str = "peer", side: str = "") -> Session:
    """A session in a state, by way of the protocol."""
    if state in (State.OPEN, State.PROBING, State.CLOSED):
        end = established(role).ends[side or "acceptor"]
        if state is State.PROBING:
            end.tick(10.0)
        if state is State.CLOSED:
            end.end()
        return end
    one, two = dialler(replace(DIALLER, role=role)), acceptor()
    hello = one.start(0.0)[0]
    if state is State.PROOF_SENT:
        one.receive(two.receive(hello, 0.0).send[0], 0.0)
    if state is State.WELCOMED:
        two.receive(hello, 0.0)
    return one if state in (State.HELLO_SENT, State.PROOF_SENT) else two


def proper(message: type[m.Message]) -> m.Message:
    """A message whose contents are right for the sessions of this file."""
    pair = Pair(dialler(), acceptor()).shake()
    sent = [*pair.sent["dialler"], *pair.sent["acceptor"]]
    return next((found for found in sent if type(found) is message), full(message))


@pytest.mark.parametrize("state", State)
def test_every_state_with_every_message(state: State) -> None:
    for message in m.MESSAGES.values():
        for role, side in itertools.product(m.LINK_ROLES, ("dialler", "acceptor")):
            end = in_state(state, role, side)
            assert end.state is state
            step = end.receive(proper(message), 11.0)
            following = TRANSITIONS.get((state, message))
            after = state not in HANDSHAKE
            allowed = following and (not after or message in MAY_SEND[role, other(end.side)])
            if state is State.CLOSED:
                assert step == Step()
            elif allowed:
                assert end.state is following
                assert after or (isinstance(step.event, Closed) == (message is m.Refuse))
            else:
                assert_refused(end, step, in_handshake=not after)


def other(side: str) -> Any:
    return "acceptor" if side == "dialler" else "dialler"


def assert_refused(end: Session, step: Step, *, in_handshake: bool) -> None:
    assert end.state is State.CLOSED
    assert isinstance(step.event, Closed)
    assert type(step.event.error) is ProtocolError
    (notice,) = step.send
    assert isinstance(notice, m.Refuse if in_handshake else m.Error)
    assert notice.code == "protocol"


def test_unknown_messages() -> None:
    for state in HANDSHAKE:
        step = in_state(state).receive(m.Unknown(number=99, rid=5), 0.0)
        assert isinstance(step.event, Closed)
        assert type(step.event.error) is UnknownMessage
    end = in_state(State.OPEN)
    step = end.receive(m.Unknown(number=99, rid=5), 0.0)
    (reply,) = step.send
    assert isinstance(reply, m.Error)
    assert (reply.rid, reply.code, reply.fields) == (5, "unknown_message", {"number": 99})
    assert end.receive(m.Unknown(number=99, rid=0), 0.0) == Step()
    assert end.state is State.OPEN


# -- after the handshake ----------------------------------------------------------------------------------------------


def test_what_is_delivered() -> None:
    end = in_state(State.OPEN)
    claim = full(m.Claim)
    assert end.receive(claim, 0.0) == Step(event=Deliver(message=claim))
    assert end.receive(m.Ping(rid=9), 0.0) == Step(send=(m.Pong(rid=9),))
    assert end.receive(m.Pong(rid=9), 0.0) == Step()
    reply = m.Error(rid=3, code="busy")
    assert end.receive(reply, 0.0) == Step(event=Deliver(message=reply))


def test_the_peers_reason_for_closing() -> None:
    end = in_state(State.OPEN)
    step = end.receive(m.Error(rid=0, code="frame_too_long", message="too long"), 0.0)
    assert step.send == ()
    assert isinstance(step.event, Closed)
    assert step.event.error.code == "frame_too_long"
    assert end.state is State.CLOSED


@pytest.mark.parametrize("state", [state for state in State if state is not State.CLOSED])
def test_an_error_of_this_side_is_told(state: State) -> None:
    end = in_state(state)
    error = ProtocolError("a message is not valid msgpack")
    step = end.fail(error)
    assert step.event == Closed(error=error)
    assert [type(message) for message in step.send] == (
        [] if state is State.PROBING else [m.Refuse if state in HANDSHAKE else m.Error]
    )
    assert end.fail(error) == end.end() == end.tick(1e9) == Step()


def test_strangers_get_no_answer() -> None:
    for state in (State.ACCEPTED, State.HELLO_SENT):
        assert in_state(state).fail(NotKvxfer("x")).send == ()


def test_the_end_of_the_stream() -> None:
    def ended(end: Session, buffered: int = 0) -> KvxferError:
        event = end.end(buffered).event
        assert isinstance(event, Closed)
        assert end.state is State.CLOSED
        return event.error

    assert type(ended(in_state(State.OPEN))) is PeerLost
    assert ended(in_state(State.OPEN), 5).fields == {"bytes": 5}
    for state in HANDSHAKE:
        assert "during the handshake" in ended(in_state(state)).message
    end = in_state(State.OPEN)
    goodbye = m.Goodbye(reason="maintenance")
    assert end.receive(goodbye, 0.0) == Step(event=Deliver(message=goodbye))
    assert end.state is State.OPEN
    error = ended(end, 5)
    assert type(error) is PeerDraining
    assert "maintenance" in error.message


@pytest.mark.parametrize("role", m.LINK_ROLES)
@pytest.mark.parametrize("side", ["dialler", "acceptor"])
def test_what_may_not_be_sent_is_refused_here(role: str, side: Any) -> None:
    end = in_state(State.OPEN, role, side)
    for message in m.MESSAGES.values():
        if message in MAY_SEND[role, side]:
            end.check_send(full(message))
        else:
            with pytest.raises(UsageError, match=f"{message.__name__} is not for this side"):
                end.check_send(full(message))
    with pytest.raises(UsageError):
        acceptor().check_send(m.Ping())


# -- time -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", sorted(HANDSHAKE, key=str))
def test_the_handshake_as_a_whole_has_a_deadline(state: State) -> None:
    end = in_state(state)
    assert end.deadline() == 5.0
    assert end.tick(4.99) == Step()
    step = end.tick(5.0)
    assert isinstance(step.event, Closed)
    assert type(step.event.error) is (PeerUnreachable if end.side == "dialler" else PeerLost)
    assert len(step.send) == (0 if state is State.ACCEPTED else 1)


def test_a_slow_handshake_does_not_gain_time_step_by_step() -> None:
    one, two = dialler(), acceptor()
    two.receive(one.start(0.0)[0], 4.0)
    assert two.deadline() == 5.0
    two.heard(4.5)
    assert two.deadline() == 5.0


def test_start_begins_the_time() -> None:
    end = dialler()
    end.start(100.0)
    assert end.deadline() == 105.0


def test_a_silent_connection_is_probed_and_lives() -> None:
    end = in_state(State.OPEN)
    assert end.deadline() == 10.0
    assert end.tick(9.99) == Step()
    assert end.tick(10.0) == Step(send=(m.Ping(rid=1),))
    assert (end.state, end.deadline()) == (State.PROBING, 12.0)
    assert end.receive(m.Pong(rid=1), 11.0) == Step()
    assert (end.state, end.deadline()) == (State.OPEN, 21.0)
    assert end.tick(21.0) == Step(send=(m.Ping(rid=2),))
    end.heard(22.5)  # a piece of a long message
    assert (end.state, end.deadline()) == (State.OPEN, 32.5)


def test_a_dead_peer() -> None:
    end = in_state(State.OPEN)
    end.tick(10.0)
    assert end.tick(11.99) == Step()
    step = end.tick(12.0)
    assert step.send == ()
    assert isinstance(step.event, Closed)
    assert type(step.event.error) is PeerLost
    assert (end.state, end.deadline()) == (State.CLOSED, None)


def test_a_late_tick_is_this_sides_own_sleep() -> None:
    end = in_state(State.OPEN)
    assert end.tick(500.0) == Step(send=(m.Ping(rid=1),))
    assert end.tick(600.0) == Step(send=(m.Ping(rid=2),))
    assert end.deadline() == 602.0
    assert end.receive(m.Pong(rid=1), 601.0) == Step()
    assert end.state is State.OPEN


def test_a_side_that_always_sleeps_decides_all_the_same() -> None:
    end = in_state(State.OPEN)
    steps = [end.tick(now) for now in (100.0, 200.0, 300.0)]
    assert [type(step.send[0]) for step in steps] == [m.Ping] * 3
    assert isinstance(end.tick(400.0).event, Closed)


def test_urgency_shortens_the_silence() -> None:
    end = in_state(State.OPEN)
    end.set_urgent(True)
    assert (end.keepalive_s, end.deadline()) == (0.5, 0.5)
    assert end.tick(0.5).send == (m.Ping(rid=1),)
    end.receive(m.Pong(rid=1), 0.6)
    assert end.deadline() == 1.1
    end.set_urgent(False)
    assert end.deadline() == 10.6


@pytest.mark.parametrize(
    ("mine", "yours", "used"), [(10.0, 10.0, 10.0), (10.0, 3.0, 3.0), (3.0, 10.0, 3.0), (10.0, 0.001, 0.5)]
)
def test_the_dialler_learns_the_acceptors_keepalive(mine: float, yours: float, used: float) -> None:
    one, two = dialler(limits=Limits(keepalive_s=mine)), acceptor(limits=Limits(keepalive_s=yours))
    assert Pair(one, two).shake().ends["dialler"].keepalive_s == used


def test_both_sides_probe_each_other_without_end() -> None:
    pair = established()
    now = 0.0
    for _ in range(200):
        now, side = min((end.deadline() or 0.0, side) for side, end in pair.ends.items())
        pair.take(side, pair.ends[side].tick(now), now)
    assert all(end.state is State.OPEN for end in pair.ends.values())
    pings = [message for side in pair.sent for message in pair.sent[side] if isinstance(message, m.Ping)]
    assert 1 <= len(pings) <= 200
    assert now > 500.0
