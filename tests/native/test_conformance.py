"""Every transport keeps the same promises: the whole suite, once per name in `conformance.TRANSPORTS`."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite(
    "tests.native.conformance_moving", "tests.native.conformance_refusing", "tests.native.conformance_ending"
)

from tests.native.conformance_ending import *  # noqa: E402, F403
from tests.native.conformance_moving import *  # noqa: E402, F403
from tests.native.conformance_pairs import owners, pair  # noqa: E402, F401
from tests.native.conformance_refusing import *  # noqa: E402, F403
