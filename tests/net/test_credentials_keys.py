"""Node keys: every pair can meet, nobody can speak for another, files are strict."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from kvxfer.errors import AuthenticationError
from kvxfer.net.credentials import GENERATIONS_MAX, NodeKeys, node_named
from kvxfer.wire.session import Established, Facts
from tests.wire.test_session import ACCEPTOR, DIALLER, SECRET, Pair, acceptor, dialler

ROOT, NEXT = b"the root of all the keys", b"the root that comes next"
A, B, C = (digit * 32 for digit in "abc")
ALL = (A, B, C)


def keys(node: str, *others: str, roots: tuple[bytes, ...] = (ROOT,)) -> NodeKeys:
    return NodeKeys.derive(roots, node, others)


@pytest.mark.parametrize(("mine", "yours"), [((B,), (A,)), ((B,), ()), ((), (A,))])
def test_a_pair_meets_when_one_of_the_two_lists_the_other(mine: tuple[str, ...], yours: tuple[str, ...]) -> None:
    a, b = keys(A, *mine), keys(B, *yours)
    assert a.presented_to(B, b.features) in b.accepted_from(A)
    assert b.presented_to(A, a.features) in a.accepted_from(B)


def test_a_pair_where_nobody_lists_the_other_does_not_meet() -> None:
    a, b = keys(A), keys(B)
    assert a.presented_to(B, b.features) not in b.accepted_from(A)


def test_a_node_meets_itself() -> None:
    a = keys(A, B)
    assert a.presented_to(A, a.features) in a.accepted_from(A)


def test_all_that_a_node_has_or_can_derive_speaks_for_itself_alone() -> None:
    files = {node: keys(node, *ALL) for node in ALL}
    thief = files[C]
    known = {thief.generations[0].own, *thief.generations[0].peers.values()}
    for node, made in itertools.product((A, B, C), (NodeKeys.derive(sorted(known)[:1], C, ALL), thief)):
        known.update(made.accepted_from(node), [made.presented_to(node, made.features)])
    assert not known & set(files[B].accepted_from(A))
    assert not known & set(files[A].accepted_from(B))
    assert known & set(files[A].accepted_from(C))


def test_roots_nodes_and_pairs_give_different_keys() -> None:
    found = []
    for root, node in itertools.product((ROOT, NEXT), ALL):
        made = keys(node, *ALL, roots=(root,)).generations[0]
        found += [made.own, *made.peers.values()]
    assert len(set(found)) == len(found) == 2 * 3 * 3
    assert {len(key) for key in found} == {32}


def test_a_new_root_comes_in_two_steps_and_every_pair_meets_at_every_moment() -> None:
    steps = [keys(A, B, roots=roots) for roots in ((ROOT,), (NEXT, ROOT), (NEXT,))]
    others = [keys(B, A, roots=roots) for roots in ((ROOT,), (NEXT, ROOT), (NEXT,))]
    for at, other in itertools.product(range(3), repeat=2):
        a, b = steps[at], others[other]
        meets = bool(a.presented_to(B, b.features)) and a.presented_to(B, b.features) in b.accepted_from(A)
        assert meets == (abs(at - other) <= 1), (at, other)
    newest = steps[1].presented_to(B, others[1].features)
    assert newest == steps[2].presented_to(B, others[2].features)


def test_a_file_is_what_was_derived_and_shows_nothing() -> None:
    made = keys(A, B, C, roots=(NEXT, ROOT))
    text = made.render()
    assert NodeKeys.parse(text) == made
    assert NodeKeys.parse("# a comment\n\n" + text.replace("\n", "\n\n")) == made
    secret = made.generations[0].own
    assert secret.hex() not in repr(made)
    assert repr(secret)[2:10] not in repr(made)


@pytest.mark.parametrize(("old", "new", "words"), [
    ("kvxfer node keys 1", "kvxfer node keys 2", "first line"),
    (f"node {A}", "", "which node"),
    (f"node {A}", f"node {A}\nnode {B}", "line 3 names a second node"),
    (f"node {A}", "node A", "line 2 is none of"),
    (f"node {A}", f"node {A}\npeer {B} {'00' * 32}", "line 3 comes before"),
    (f"peer {B}", f"peer {A}", "its own node"),
    ("generation", "generations", "is none of"),
    ("peer", "pear", "is none of"),
])  # fmt: skip
def test_a_file_that_is_wrong_is_refused_without_showing_it(old: str, new: str, words: str) -> None:
    made = keys(A, B)
    text = made.render()
    assert old in text
    with pytest.raises(ValueError, match=words) as caught:
        NodeKeys.parse(text.replace(old, new, 1))
    assert made.generations[0].own.hex() not in str(caught.value)


@pytest.mark.parametrize("count", [0, GENERATIONS_MAX + 1])
def test_generations_are_few_and_different(count: int) -> None:
    roots = tuple(f"the root number {number}".encode() for number in range(count))
    with pytest.raises(ValueError, match="generations"):
        NodeKeys.parse(keys(A, B, roots=roots).render())
    with pytest.raises(ValueError, match="2 generations"):
        NodeKeys.parse(keys(A, B, roots=(ROOT, ROOT)).render())


def test_names_and_ids() -> None:
    assert node_named(A) == A
    assert node_named("node-a") == node_named("node-a") != node_named("node-b")
    assert len(node_named("node-a")) == 32


# -- in sessions ---------------------------------------------------------------------------------------------------


def known(*, roots: tuple[bytes, ...] = (ROOT,)) -> dict[str, NodeKeys]:
    both = (DIALLER.node_id, ACCEPTOR.node_id)
    return {node: keys(node, *both, roots=roots) for node in both}


def with_keys(mine: NodeKeys | None, yours: NodeKeys | None, me: Facts = DIALLER, **secrets: Any) -> Pair:
    return Pair(dialler(me, keys=mine, **secrets), acceptor(keys=yours, **secrets)).shake()


def test_nodes_prove_themselves_with_keys_of_their_own() -> None:
    files = known()
    pair = with_keys(files[DIALLER.node_id], files[ACCEPTOR.node_id])
    (here,), (there,) = pair.events["acceptor"], pair.events["dialler"]
    assert here.peer.node_id == DIALLER.node_id
    assert there.peer.node_id == ACCEPTOR.node_id
    assert here.authenticated
    assert there.authenticated


@pytest.mark.parametrize("listed", [(), (ACCEPTOR.node_id, DIALLER.node_id)])
def test_a_node_cannot_speak_for_another(listed: tuple[str, ...]) -> None:
    stranger = "cc" * 16
    thief = keys(stranger, *listed)
    files = known()
    for error in with_keys(thief, files[ACCEPTOR.node_id]).errors():  # it says that it is DIALLER
        assert type(error) is AuthenticationError
    for error in with_keys(files[DIALLER.node_id], thief).errors():  # it says that it is ACCEPTOR
        assert type(error) is AuthenticationError
    if listed:
        honest = with_keys(thief, files[ACCEPTOR.node_id], replace(DIALLER, node_id=stranger))
        assert honest.events["acceptor"][0].peer.node_id == stranger


def test_the_shared_secret_says_nothing_to_a_node_with_keys_alone() -> None:
    for error in Pair(dialler(secret=SECRET), acceptor(keys=known()[ACCEPTOR.node_id])).shake().errors():
        assert type(error) is AuthenticationError
    for error in Pair(dialler(keys=known()[DIALLER.node_id]), acceptor(secret=SECRET)).shake().errors():
        assert type(error) is AuthenticationError


def test_secret_and_keys_together_are_the_way_from_one_to_the_other() -> None:
    files = known()
    for mine, yours in itertools.product((None, files[DIALLER.node_id]), (None, files[ACCEPTOR.node_id])):
        pair = with_keys(mine, yours, secret=SECRET)
        assert isinstance(pair.events["acceptor"][0], Established), (mine, yours)


def test_a_new_root_in_two_steps_with_open_doors() -> None:
    steps = [known(roots=roots) for roots in ((ROOT,), (NEXT, ROOT), (NEXT,))]
    for mine, yours in itertools.product(range(3), repeat=2):
        pair = with_keys(steps[mine][DIALLER.node_id], steps[yours][ACCEPTOR.node_id])
        meets = isinstance(pair.events["acceptor"][-1], Established)
        assert meets == (abs(mine - yours) <= 1), (mine, yours)


def test_a_tool_proves_whose_it_is_and_is_not_that_node() -> None:
    files = known()
    tool = replace(DIALLER, role="tool")
    pair = with_keys(files[DIALLER.node_id], files[ACCEPTOR.node_id], tool)
    assert pair.events["acceptor"][0].peer.node_id == ""
    for error in with_keys(files[DIALLER.node_id], files[ACCEPTOR.node_id], replace(tool, node_id="")).errors():
        assert type(error) is AuthenticationError
