"""The choice of a transport for a pair of memories, over made-up transports; no engine."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from kvxfer.dataplane.connections import Requirements, by_preference, moved, rejection, remote_kind, requirement_bits
from kvxfer.descriptors import RemoteDescriptor
from kvxfer.native.types import Caps, ChoiceKind, MemoryKind, TransportInfo

DRAM, HBM, PINNED = MemoryKind
HOST = 1 << DRAM | 1 << PINNED
CARDS = 1 << HBM | 1 << PINNED
ALL = HOST | CARDS


def info(name: str, rank: int, memory: int, local: int, caps: int = Caps.CHECK) -> TransportInfo:
    return TransportInfo(
        index=rank,
        name=name,
        endpoint="somewhere",
        caps=caps,
        rank=rank,
        alignment=1,
        region_bytes_max=1 << 60,
        copies_per_byte=1,
        memory=memory,
        local_memory=local,
    )


OWN = info("own", 0, ALL, ALL, Caps.OWN | Caps.SAME_HOST | Caps.CHECK)
CARD = info("card", 1, CARDS, CARDS, 0)
NEAR = info("near", 2, HOST, ALL, Caps.SAME_HOST | Caps.MAP | Caps.CHECK)
FAR = info("far", 3, ALL, ALL)
EVERY = (FAR, NEAR, CARD, OWN)
DESCRIBED = RemoteDescriptor(
    node_id="0" * 32,
    incarnation="0" * 32,
    engine_id="1" * 32,
    region=1,
    grant=1,
    generation=1,
    length=1,
    access=1,
    key=b"k" * 16,
    endpoints={one.name: ("somewhere",) for one in EVERY},
)


def chosen(need: Requirements, *infos: TransportInfo) -> list[str]:
    found = [one for one in by_preference(infos or EVERY[:3], need) if rejection(one, need, DESCRIBED) is None]
    return [one.name for one in found]


@pytest.mark.parametrize(
    ("local", "remote", "expected"),
    [
        (DRAM, DRAM, ["near", "far"]),
        (DRAM, HBM, ["far"]),
        (HBM, DRAM, ["near", "far"]),
        (HBM, HBM, ["card", "far"]),
        (HBM, PINNED, ["near", "card", "far"]),
        (PINNED, HBM, ["card", "far"]),
        (PINNED, PINNED, ["near", "card", "far"]),
        (None, HBM, ["card", "far"]),
    ],
)
def test_each_pair_of_memories_has_its_order(local: MemoryKind | None, remote: MemoryKind, expected: list[str]) -> None:
    assert chosen(Requirements(local, remote)) == expected


def test_the_configured_order_stands_otherwise() -> None:
    assert chosen(Requirements(DRAM, DRAM), replace(FAR, rank=1), replace(NEAR, rank=2)) == ["far", "near"]
    assert chosen(Requirements(HBM, HBM), replace(FAR, rank=1), replace(CARD, rank=2)) == ["far", "card"]
    assert chosen(Requirements(PINNED, PINNED), replace(FAR, rank=1), replace(CARD, rank=2)) == ["far", "card"]


def test_who_wants_to_look_gets_what_can_be_mapped() -> None:
    assert chosen(Requirements(None, DRAM, mapped=True), replace(FAR, rank=1), NEAR) == ["near", "far"]


@pytest.mark.parametrize(
    ("need", "one", "kind", "text"),
    [
        (Requirements(DRAM, HBM), CARD, ChoiceKind.MEMORY, "card: it moves hbm and pinned dram only, not dram to hbm"),
        (
            Requirements(DRAM, HBM),
            NEAR,
            ChoiceKind.MEMORY,
            "near: it moves dram, hbm and pinned dram here, dram and pinned dram there",
        ),
        (Requirements(HBM, HBM, check=True), CARD, ChoiceKind.CHECKSUM, "card: it makes no checksums"),
        (Requirements(HBM, HBM), replace(FAR, name="new"), ChoiceKind.NOT_OFFERED, "new: the owner does not offer it"),
    ],
)
def test_the_reason_says_which_and_why(need: Requirements, one: TransportInfo, kind: ChoiceKind, text: str) -> None:
    found = rejection(one, need, DESCRIBED)
    assert found is not None
    assert (found.info, found.kind) == (one, kind)
    assert text in found.text


def test_a_notification_asks_nothing_of_our_memory() -> None:
    assert rejection(replace(CARD, local_memory=0), Requirements(None, HBM), DESCRIBED) is None
    assert rejection(CARD, Requirements(None, DRAM), DESCRIBED) is not None


def test_descriptors_say_where_the_bytes_are() -> None:
    assert remote_kind(DESCRIBED) is DRAM
    assert remote_kind(replace(DESCRIBED, pinned=True)) is PINNED
    assert remote_kind(replace(DESCRIBED, kind="hbm")) is HBM


def test_needs_do_not_share_a_number() -> None:
    needs = list(product((None, *MemoryKind), (False, True), (False, True)))
    assert len({requirement_bits(*need) for need in needs}) == len(needs)


def test_kinds_in_words() -> None:
    assert moved(CARD) == "hbm and pinned dram only"
