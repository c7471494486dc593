"""The conformance suite over hixl: run by `test_hixl_conformance.py` in a process that sees simulated cards."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite(
    "tests.native.conformance_moving", "tests.native.conformance_refusing", "tests.native.conformance_ending"
)

from tests.native.conformance_ending import *  # noqa: E402, F403
from tests.native.conformance_moving import *  # noqa: E402, F403
from tests.native.conformance_pairs import owners, pair  # noqa: E402, F401
from tests.native.conformance_refusing import *  # noqa: E402, F403

# Whatever is not run says why; nothing else is missing, also not with the owner in another process.
LEFT_OUT = {
    "test_offsets_beyond_four_gib": "registers plain memory; with a card's: test_hixl.test_what_it_moves_and_what_not",
    "test_read_only_memory": "plain memory; a card's has no read-only pages",
    "test_read_only_memory_can_be_read_by_peers": "likewise",
}
REGISTERED = "register]"  # ids of cases with plain memory; a card's, of the application: test_hixl_edges.py
for _name in LEFT_OUT:
    del globals()[_name]  # an error when there is no such case


@pytest.fixture(autouse=True)
def _plain_memory_is_left_out(request: pytest.FixtureRequest) -> None:
    assert not request.node.name.endswith(REGISTERED), "test_hixl_conformance.py leaves it out"
