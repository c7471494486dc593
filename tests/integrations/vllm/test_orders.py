"""Which blocks and slots hold a range of tokens."""

from __future__ import annotations

from kvxfer.integrations.vllm.orders import Table


def test_whole_request() -> None:
    assert Table.of([5, 6, 7], 32, 0, 70) == Table(blocks=(5, 6, 7), first=0, tokens=70, slot=0)


def test_what_a_prefix_hit_leaves() -> None:
    assert Table.of([5, 6, 7, 8], 32, 64, 100) == Table(blocks=(7, 8), first=64, tokens=36, slot=0)


def test_a_range_that_begins_inside_a_block() -> None:
    assert Table.of([5, 6], 64, 32, 100) == Table(blocks=(5, 6), first=32, tokens=68, slot=32)


def test_what_the_window_has_left_behind_is_no_part() -> None:
    assert Table.of([0, 0, 7, 8], 32, 0, 120) == Table(blocks=(7, 8), first=64, tokens=56, slot=0)
    assert Table.of([0, 0], 32, 0, 64).tokens == 0


def test_fewer_blocks_than_tokens() -> None:
    assert Table.of([5], 32, 0, 100) == Table(blocks=(5,), first=0, tokens=32, slot=0)
