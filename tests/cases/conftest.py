"""Two nodes for the whole run, shared by the cases that do not need others: starting four processes is what costs most.

`Cluster.fresh` gives each test clients of its own, and starts again whatever the test before it has killed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.cases.harness import Cluster, cluster


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def two_daemons(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """A and B, each a daemon and a worker."""
    async with cluster(tmp_path_factory.mktemp("nodes"), "tcp") as found:
        yield found


@pytest.fixture(params=["shm", "tcp"])
def nodes(request: pytest.FixtureRequest, two_daemons: Cluster) -> Cluster:
    """A and B over each transport; the test begins with `Cluster.fresh`."""
    two_daemons.transport = request.param
    return two_daemons


@pytest.fixture
def tcp_nodes(two_daemons: Cluster) -> Cluster:
    """A and B over tcp only, for cases that no transport can change."""
    two_daemons.transport = "tcp"
    return two_daemons
