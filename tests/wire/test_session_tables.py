"""The tables are complete: every state has a deadline, every message a place."""

from __future__ import annotations

import dataclasses

from kvxfer.config import Config
from kvxfer.wire import messages as m
from kvxfer.wire.session import DEADLINES, HANDSHAKE, MAY_SEND, TRANSITIONS, State

SHAKING = {m.Hello, m.Welcome, m.Proof, m.Ready, m.Refuse}


def test_every_state_but_the_last_has_a_deadline() -> None:
    assert set(DEADLINES) == set(State) - {State.CLOSED}
    options = {item.name for item in dataclasses.fields(Config)}
    assert set(DEADLINES.values()) <= options


def test_every_state_is_reached_and_left() -> None:
    before = {state for state, _ in TRANSITIONS}
    after = set(TRANSITIONS.values())
    assert before == set(State) - {State.CLOSED}
    first = {State.HELLO_SENT, State.ACCEPTED}
    by_time_alone = {State.PROBING}
    assert after == set(State) - first - by_time_alone


def test_every_message_has_a_place() -> None:
    assert {message for _, message in TRANSITIONS} == set(m.MESSAGES.values())
    later = set().union(*MAY_SEND.values())
    assert later == set(m.MESSAGES.values()) - SHAKING


def test_the_handshake_ends_open_or_closed_and_never_returns() -> None:
    for (state, message), following in TRANSITIONS.items():
        if state in HANDSHAKE:
            assert message in SHAKING
            assert following is not state
        else:
            assert message not in SHAKING
            assert following is State.OPEN


def test_a_request_can_be_answered_by_the_other_side() -> None:
    answers = {m.Post: m.Posted, m.Renew: m.Posted, m.Claim: m.Claimed, m.Land: m.Claimed, m.Echo: m.EchoReply}
    answers |= {m.Status: m.StatusReply, m.Ping: m.Pong}
    answers |= dict.fromkeys((m.Withdraw, m.Settle, m.Mail, m.Listen, m.Unlisten), m.Done)
    for (role, side), messages in MAY_SEND.items():
        other = MAY_SEND[role, "acceptor" if side == "dialler" else "dialler"]
        for request, answer in answers.items():
            if request in messages:
                assert {answer, m.Error} <= other, (role, side, request)


def test_roles() -> None:
    assert {role for role, _ in MAY_SEND} == set(m.LINK_ROLES)
    assert MAY_SEND["peer", "dialler"] == MAY_SEND["peer", "acceptor"]
    only_workers = {m.Post, m.Renew, m.Withdraw, m.Listen, m.Unlisten}
    for (role, side), messages in MAY_SEND.items():
        assert only_workers <= messages or not only_workers & messages
        assert (only_workers <= messages) == (role == "worker" and side == "dialler")
        assert (m.Delivery in messages) == (role == "worker" and side == "acceptor")
