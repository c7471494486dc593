"""Node keys: every pair can meet, nobody can speak for another, files are strict."""

from __future__ import annotations

import itertools

import pytest

from kvxfer.wire.keys import GENERATIONS_MAX, NodeKeys, node_named

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
