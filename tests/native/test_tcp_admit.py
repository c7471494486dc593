"""How many connections an owner of tcp keeps, and whose: a half of its places for one grant, none without a grant."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace

import pytest

from kvxfer.native.types import GrantInfo
from tests.native import kvxd
from tests.native.conformance import BOTH, MIB
from tests.native.kvxd import Speaker, Type
from tests.native.tcp_owner import Owner, eventually, owner

DESCRIPTORS = 400
PLACES = DESCRIPTORS // 2
REFUSED = 206


@contextmanager
def few_descriptors(count: int) -> Iterator[None]:
    """Engines that open inside see this limit; what is open already stays."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@asynccontextmanager
async def small_owner() -> AsyncIterator[Owner]:
    """An owner with `PLACES` for connections; the test itself may open more."""
    with few_descriptors(DESCRIPTORS):
        opened = owner(accepted_max=1000)
        one = await opened.__aenter__()
    try:
        yield one
    finally:
        await opened.__aexit__(None, None, None)


def another_grant(one: Owner) -> GrantInfo:
    return one.engine.grant(one.region.id, MIB, one.length, BOTH)


async def prove(one: Owner, grant: GrantInfo, *, stream: int) -> tuple[Speaker, int]:
    """A connection that says it is this stream of many, and the answer to its key."""
    speaker = await kvxd.dial(one.endpoint)
    status = await speaker.greet(stream=stream)
    return (speaker, status) if status else (speaker, await attach(one, grant, speaker))


async def attach(one: Owner, grant: GrantInfo, speaker: Speaker) -> int:
    frame = replace(one.frame(Type.ATTACH), grant=grant.id, generation=grant.generation)
    speaker.send(frame, grant.key)
    answer = await speaker.frame(grant.key)
    assert answer.type == Type.ACK
    return answer.status


async def fill(one: Owner, grant: GrantInfo, count: int, held: list[Speaker]) -> list[int]:
    """Statuses other than "ok" of so many connections by one grant."""
    refused = []
    for index in range(count):
        speaker, status = await prove(one, grant, stream=1 + index % 31)
        held.append(speaker)
        if status:
            refused.append(status)
    return refused


async def test_one_grant_takes_half_of_the_places_whatever_its_holder_says_of_streams() -> None:
    held: list[Speaker] = []
    async with small_owner() as one:
        greedy, other = one.grant, another_grant(one)
        assert await fill(one, greedy, PLACES // 2, held) == []
        assert set(await fill(one, greedy, 20, held)) == {REFUSED}
        assert await fill(one, other, PLACES // 2, held) == [], "the other half is for others"
        assert set(await fill(one, another_grant(one), 3, held)) == {REFUSED}, "now it is full"
        for speaker in held[: PLACES // 4]:
            speaker.writer.close()
        await eventually_takes(one, another_grant(one))
        for speaker in held:
            speaker.writer.close()


async def eventually_takes(one: Owner, grant: GrantInfo) -> None:
    async with asyncio.timeout(10):
        while True:
            speaker, status = await prove(one, grant, stream=0)
            speaker.writer.close()
            if not status:
                return
            await asyncio.sleep(0.01)


async def test_connections_whose_grant_is_gone_make_room_at_once() -> None:
    held: list[Speaker] = []
    async with small_owner() as one:
        first, second, third = another_grant(one), another_grant(one), another_grant(one)
        assert await fill(one, first, PLACES // 2, held) == []
        assert await fill(one, second, PLACES // 2, held) == []
        await one.engine.revoke(first.id)
        assert await fill(one, third, PLACES // 4, held) == []
        gone = [speaker.closed() for speaker in held[: PLACES // 4]]
        assert set(await asyncio.gather(*gone)) == {b""}, "the oldest of them went"
        live = held[PLACES // 2]
        assert await attach(one, second, live) == 0, "who has a grant stays"
        for speaker in held:
            speaker.writer.close()


@pytest.mark.slow
async def test_a_connection_without_a_live_grant_ends_after_a_while() -> None:
    async with owner() as one:
        short, kept = another_grant(one), one.grant
        idle, status = await prove(one, short, stream=0)
        assert status == 0
        second, status = await prove(one, short, stream=3)
        assert status == 0
        assert await attach(one, kept, second) == 0, "a second grant over the same connection"
        given_back, status = await prove(one, short, stream=0)
        assert status == 0
        again, status = await prove(one, short, stream=0)
        assert status == 0
        frame = replace(one.frame(Type.DETACH, op=0), grant=short.id, generation=short.generation)
        given_back.send(frame, short.key)
        await one.engine.revoke(short.id)
        await asyncio.sleep(5)
        assert await attach(one, kept, again) == 0, "a new key in time keeps it"
        async with asyncio.timeout(30):
            assert await idle.closed() == b""
            assert await given_back.closed() == b""
        for speaker in (second, again):
            assert await attach(one, kept, speaker) == 0
        for speaker in (second, again, idle, given_back):
            speaker.writer.close()
        await eventually(lambda: one.count("peers_accepted") == 0)


async def test_a_second_grant_of_a_first_stream_is_counted_until_it_is_given_back() -> None:
    async with owner() as one:
        speaker, _ = await prove(one, one.grant, stream=0)
        other = another_grant(one)
        assert await attach(one, other, speaker) == 0
        assert one.engine.attached(other.id) == 1
        frame = replace(one.frame(Type.DETACH, op=0), grant=other.id, generation=other.generation)
        speaker.send(frame, other.key)
        await eventually(lambda: one.engine.attached(other.id) == 0)
        assert one.engine.attached(one.grant.id) == 1
        speaker.writer.close()
