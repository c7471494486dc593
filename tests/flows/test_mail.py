"""Receivers: order, cancellation, mail that nobody fetches, many channels, and the end of the client."""

from __future__ import annotations

import asyncio
import itertools

import pytest

import kvxfer
from kvxfer.client import Client
from kvxfer.errors import BusyError, ClosedError, KvxferError, TransferTimeout, UsageError
from kvxfer.flows.mail import CHANNELS_IDLE_MAX, MESSAGES_HIGH
from tests.nodes import until
from tests.steps import pair


async def test_receivers_are_served_in_the_order_in_which_they_asked() -> None:
    async with kvxfer.local() as client:
        receivers = [asyncio.ensure_future(client.recv("c", timeout=5)) for _ in range(5)]
        await asyncio.sleep(0.01)
        receivers[1].cancel()
        for value in range(4):
            await client.send((), "c", bytes([value]))
        results = await asyncio.gather(*receivers, return_exceptions=True)
        assert isinstance(results.pop(1), asyncio.CancelledError)
        assert results == [b"\x00", b"\x01", b"\x02", b"\x03"]


async def test_a_timeout_takes_nothing() -> None:
    async with kvxfer.local() as client:
        for number in range(20):
            receiving = asyncio.ensure_future(client.recv("c", timeout=0.001 * (1 + number % 3)))
            await client.send((), "c", b"x")
            try:
                assert await receiving == b"x"
            except TransferTimeout:
                assert await client.recv("c", timeout=5) == b"x"


async def test_mail_that_nobody_fetches_comes_back_to_its_senders_as_busy() -> None:
    async with pair("shm", mailbox_messages_max=10) as both:
        client, to = both.b, both.b.addresses
        with pytest.raises(TransferTimeout):
            await client.recv("c", timeout=0.02)
        sent = 0
        with pytest.raises(BusyError):
            while True:
                await both.a.send(to, "c", sent.to_bytes(4))
                sent += 1
        assert MESSAGES_HIGH <= sent < MESSAGES_HIGH * 20
        assert [int.from_bytes(await client.recv("c", timeout=5)) for _ in range(sent)] == list(range(sent))
        await both.a.send(to, "c", b"again")
        assert await client.recv("c", timeout=5) == b"again"


async def test_channels_that_nobody_waits_for_are_left() -> None:
    async with pair("shm") as both:
        for number in range(CHANNELS_IDLE_MAX * 2):
            await both.b.send((), f"c{number}", b"x")
            assert await both.b.recv(f"c{number}", timeout=5) == b"x"
        await until(lambda: both.servers[1].registry.counts().channels <= CHANNELS_IDLE_MAX)
        await until(lambda: len(both.b._boxes._boxes) <= CHANNELS_IDLE_MAX)
        await both.b.send((), "c0", b"y")
        assert await both.b.recv("c0", timeout=5) == b"y"


async def test_a_channel_that_another_worker_listens_to_is_busy_for_everybody_who_waits() -> None:
    async with pair("shm") as both:
        server = both.servers[1]
        async with Client(server.socket_path, config=server.config) as other:
            holding = asyncio.ensure_future(other.recv("c", timeout=5))
            await until(lambda: server.registry.counts().channels == 1)
            results = await asyncio.gather(*(both.b.recv("c", timeout=5) for _ in range(3)), return_exceptions=True)
            assert all(isinstance(result, BusyError) for result in results), results
            await both.a.send(both.b.addresses, "c", b"x")
            assert await holding == b"x"


async def test_closing_the_client_ends_receivers() -> None:
    async with kvxfer.local() as client:
        waiting = asyncio.ensure_future(client.recv("c", timeout=60))
        await asyncio.sleep(0.01)
        await client.aclose()
        with pytest.raises(ClosedError):
            await waiting
        with pytest.raises(ClosedError):
            await client.recv("c", timeout=5)


async def test_bad_channels_and_messages_are_refused() -> None:
    async with kvxfer.local(mail_bytes_max=100) as client:
        for channel in ("", "x" * 257, None, 5):
            with pytest.raises(UsageError):
                await client.recv(channel)  # type: ignore[arg-type]
            with pytest.raises(UsageError):
                await client.send((), channel, b"")  # type: ignore[arg-type]
        for data in (b"x" * 101, "text", None):
            with pytest.raises(KvxferError):
                await client.send((), "c", data)  # type: ignore[arg-type]
        await client.send((), "c" * 256, bytearray(100))


async def test_channels_with_mail_that_nobody_fetches_are_left_after_its_time() -> None:
    async with pair("shm", mail_ttl_s=0.1) as both:
        for number in range(CHANNELS_IDLE_MAX + 20):
            with pytest.raises(TransferTimeout):
                await both.b.recv(f"c{number}", timeout=0.002)
            await both.a.send(both.b.addresses, f"c{number}", b"too late")
        for number in itertools.count():  # each use of a channel leaves some of the others
            await both.a.send(both.b.addresses, f"d{number % 40}", b"x")
            assert await both.b.recv(f"d{number % 40}", timeout=5) == b"x"
            if len(both.b._boxes._boxes) <= CHANNELS_IDLE_MAX and number >= 40:
                break
