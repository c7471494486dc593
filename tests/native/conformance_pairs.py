"""What runs the conformance suite: its transports, and the fixture that gives a case its pair of engines."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any

import pytest
import pytest_asyncio

from tests.native.conformance import Pair, short_directory
from tests.native.owner_process import Owners

TRANSPORTS = ("loop", "shm", "tcp", "fault+loop", "fault+shm", "fault+tcp", "shm@process", "tcp@process")
TRANSPORTS += ("tcp@encrypted",)
if "KVXFER_CONFORMANCE" in os.environ:
    TRANSPORTS = tuple(os.environ["KVXFER_CONFORMANCE"].split(","))


@pytest.fixture(scope="session")
def owners() -> Iterator[Callable[[], Owners]]:
    """The process of the owners, started when first asked for; another one when a case left it in doubt."""
    kept: list[Owners] = []

    def get() -> Owners:
        if not kept or kept[-1].ended:
            kept.append(Owners())
        return kept[-1]

    yield get
    for one in kept:
        one.end()


def each(names: Iterable[str]) -> list[Any]:
    """As parameters: the loop of this process matters little to an engine of another one."""
    return [pytest.param(name, marks=pytest.mark.once) if name.endswith("@process") else name for name in names]


@pytest_asyncio.fixture(params=each(TRANSPORTS))
async def pair(request: pytest.FixtureRequest, owners: Callable[[], Owners]) -> AsyncIterator[Pair]:
    apart = owners() if request.param.endswith("@process") else None
    with short_directory() as directory:
        made = Pair(directory, request.param, apart)
        try:
            yield made
            made.close()
        except BaseException:
            if apart is not None:
                apart.end()
            raise
        finally:
            made.close()
