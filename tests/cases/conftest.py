"""Two nodes for the whole run, shared by the cases that do not need others: starting four processes is what costs most.

`Cluster.fresh` gives each test clients of its own, and starts again whatever the test before it has killed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.cases.harness import Cluster, cluster, free_port


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def two_daemons(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """A and B, each a daemon and a worker; daemons that are started again come back on the same ports."""
    ports = {name: {"listen": f"127.0.0.1:{free_port()}", "data_port": free_port()} for name in "ab"}
    async with cluster(tmp_path_factory.mktemp("nodes"), "tcp", own_daemons=ports) as found:
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


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def behind_proxies(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """A behind two proxies, its healthy twin C, and B who talks to both; links are probed often."""
    times = {
        "keepalive_live_s": "0.2",
        "dead_s": "0.5",
        "connect_s": "1",
        "handshake_s": "1",
        "mail_ttl_s": "2",
        "mailboxes_max": "400",
    }
    directory = tmp_path_factory.mktemp("proxied")
    async with cluster(directory, "tcp", sides="abc", proxied="a", daemons=times) as found:
        yield found
