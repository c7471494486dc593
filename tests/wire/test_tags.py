"""Tags of notifications: every part at its ends, and any 64-bit value taken apart."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.errors import UsageError
from kvxfer.wire import tags
from kvxfer.wire.tags import CLAIM_MAX, KIND_MAX, LAYER_MAX, TAG_MAX, Tag


def test_the_layout_by_hand() -> None:
    assert tags.pack(tags.LAYER, 2, 3) == 0x01_000002_00000003
    assert tags.pack(tags.COMMIT, 1) == 0x02_000001_00000000
    assert (tags.LAYER, tags.COMMIT, tags.RELEASE) == (1, 2, 3)
    assert tags.pack(KIND_MAX, CLAIM_MAX, LAYER_MAX) == TAG_MAX


@settings(deadline=None, derandomize=True, database=None)
@given(st.integers(0, TAG_MAX))
def test_every_tag_survives(tag: int) -> None:
    parts = tags.unpack(tag)
    assert tags.pack(parts.kind, parts.claim, parts.layer) == tag


def test_a_kind_that_is_unknown_is_only_a_number() -> None:
    assert tags.unpack(0xFF_000000_00000001) == Tag(kind=255, claim=0, layer=1)


@pytest.mark.parametrize(
    ("kind", "claim", "layer", "name"),
    [
        *((KIND_MAX + 1, 0, 0, "kind"), (-1, 0, 0, "kind")),
        *((1, CLAIM_MAX + 1, 0, "claim"), (1, -1, 0, "claim")),
        *((1, 0, LAYER_MAX + 1, "layer"), (1, 0, -1, "layer")),
    ],
)
def test_parts_that_do_not_fit(kind: int, claim: int, layer: int, name: str) -> None:
    with pytest.raises(UsageError, match=f"notification's {name} must be"):
        tags.pack(kind, claim, layer)


@pytest.mark.parametrize("tag", [-1, TAG_MAX + 1])
def test_what_is_no_tag(tag: int) -> None:
    with pytest.raises(UsageError, match="64-bit"):
        tags.unpack(tag)
