"""The nodes that are linked: how many connections one may have, and two daemons with one node id."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from kvxfer.config import Config
from kvxfer.daemon.nodes import NODE_LINKS_MAX, TOOLS_PART, Nodes
from kvxfer.errors import TooManyPending
from kvxfer.net.link import Link, LocalIdentity
from kvxfer.wire import messages as m
from kvxfer.wire.session import Facts
from tests.nodes import fast, node, small, until

OURS, THEIRS, THIRD = "a" * 32, "b" * 32, "c" * 32


class Known:
    """A link, as far as it is looked at."""

    def __init__(self, node_id: str, incarnation: str, role: str) -> None:
        self.peer = Facts(role=role, node_id=node_id, incarnation=incarnation)
        self.name = incarnation[:1]


def link(node_id: str, incarnation: str = "1" * 32, role: str = "peer") -> Any:
    return Known(node_id, incarnation, role)


def nodes(**changes: Any) -> Nodes:
    return Nodes(Config(**fast(**changes)), node_id=OURS, incarnation="0" * 32)


async def test_a_node_has_few_connections_and_others_have_theirs() -> None:
    found = nodes()
    links = [link(THEIRS) for _ in range(NODE_LINKS_MAX)]
    for one in links:
        found.admit(one.peer)
        found.add(one)
    with pytest.raises(TooManyPending, match="too many connections") as refused:
        found.admit(link(THEIRS, "2" * 32).peer)
    assert refused.value.fields == {"limit": NODE_LINKS_MAX, "node_id": THEIRS}
    assert refused.value.retryable
    found.admit(link(THIRD).peer)
    found.remove(links[0])
    found.admit(link(THEIRS).peer)
    assert found.others_than("")
    assert not found.others_than(THEIRS)
    found.close()


async def test_tools_have_a_part_of_all_connections_together() -> None:
    found = nodes(links_max=800)
    for number in range(800 // TOOLS_PART):
        one = link(THEIRS if number % 2 else "", role="tool")
        found.admit(one.peer)
        found.add(one)
    with pytest.raises(TooManyPending, match="tools"):
        found.admit(link(THIRD, role="tool").peer)
    found.admit(link(THEIRS).peer)
    assert not found.others_than("")


@pytest.mark.parametrize("whose", [THEIRS, OURS])
async def test_two_daemons_that_say_that_they_are_one_are_noticed(whose: str, caplog: pytest.LogCaptureFixture) -> None:
    found, first, second = nodes(), link(whose, "1" * 32), link(whose, "2" * 32)
    with caplog.at_level(logging.ERROR, "kvxfer.nodes"):
        found.add(first)
        found.add(second)
        await until(lambda: found.twins)
        assert whose in found.twins
        assert caplog.text.count("machine-id") == 1
    found.remove(second)
    assert (whose in found.twins) == (whose == OURS)
    found.remove(first)
    assert not found.twins
    found.close()


async def test_a_successor_is_no_twin(caplog: pytest.LogCaptureFixture) -> None:
    found, first, second = nodes(), link(THEIRS, "1" * 32), link(THEIRS, "2" * 32)
    with caplog.at_level(logging.ERROR, "kvxfer.nodes"):
        found.add(first)
        found.add(second)
        found.remove(first)
        await until(lambda: not found._twin_timers)
    assert not found.twins
    assert not caplog.records


async def test_a_node_that_opens_connections_for_ever_is_told_and_shuts_out_nobody() -> None:
    async with node(links_max=64) as server:

        async def dial(node_id: str) -> Link:
            identity, known = LocalIdentity(role="peer", node_id=node_id), server.credentials
            return await Link.dial(server.addresses, identity, small(), credentials=known)

        links = [await dial(THEIRS) for _ in range(NODE_LINKS_MAX)]
        for _ in range(100):
            with pytest.raises(TooManyPending, match="this node has too many connections here"):
                await dial(THEIRS)
        other = await dial(THIRD)
        assert isinstance(await other.request(m.Echo(data=b"x"), timeout=5), m.EchoReply)
        await asyncio.gather(*(one.aclose("done") for one in (other, *links)))
        await until(lambda: not server.dispatcher.links)
        await (await dial(THEIRS)).aclose("there is room again")
