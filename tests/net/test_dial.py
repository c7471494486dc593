"""Candidate addresses: what may be dialled, staggering over real sockets, and one error with every reason."""

from __future__ import annotations

import asyncio
import errno
import socket
import time

import pytest

from kvxfer.addresses import Address
from kvxfer.errors import (
    AuthenticationError,
    IdentityMismatch,
    NotKvxfer,
    PeerLost,
    PeerUnreachable,
    ResourceExhausted,
    UsageError,
)
from kvxfer.net.dial import CANDIDATES_MAX, candidates, dial_any, reason, resolve, unreachable


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


async def connect(address: Address) -> Address:
    _, writer = await asyncio.open_connection(address.host, address.port)
    writer.close()
    return address


async def dial(texts: list[str], *, timeout: float = 5.0) -> Address:
    return await dial_any(texts, connect, timeout=timeout, discard=lambda _: None)


@pytest.mark.parametrize(
    "texts",
    [[], ["127.0.0.1:1"] * (CANDIDATES_MAX + 1), ["0.0.0.0:5"], ["[::]:5"], ["127.0.0.1:0"], ["host"], ["1:2:3"]],
)
def test_what_cannot_be_dialled_is_refused(texts: list[str]) -> None:
    with pytest.raises(UsageError):
        candidates(texts)


def test_candidates_keep_order_and_drop_repetitions() -> None:
    assert candidates(["b:2", "a:1", "b:2"]) == (Address("b", 2), Address("a", 1))


async def test_names_resolve_and_failures_stay() -> None:
    found, failures = await resolve([Address("localhost", 7), Address("no-such-host.invalid", 8)])
    assert Address("127.0.0.1", 7) in found
    assert list(failures) == ["no-such-host.invalid:8"]


async def test_first_candidate_that_answers_wins() -> None:
    listener = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    async with listener:
        assert await dial([f"127.0.0.1:{free_port()}", f"localhost:{port}"]) in (
            Address("127.0.0.1", port),
            Address("::1", port),
        )


async def test_unreachable_names_every_candidate_and_its_reason() -> None:
    ports = [free_port(), free_port()]
    with pytest.raises(PeerUnreachable) as caught:
        await dial([f"127.0.0.1:{port}" for port in ports])
    for port in ports:
        assert caught.value.fields[f"127.0.0.1:{port}"] == "Connection refused"
        assert f"127.0.0.1:{port}" in str(caught.value)


async def test_time_limit_holds_and_keeps_reasons() -> None:
    refused = f"127.0.0.1:{free_port()}"

    async def attempt(address: Address) -> Address:
        if str(address) == refused:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "refused")
        await asyncio.sleep(60)
        return address

    started = time.monotonic()
    with pytest.raises(PeerUnreachable) as caught:
        await dial_any([refused, "127.0.0.1:9"], attempt, timeout=0.2, discard=lambda _: None)
    assert time.monotonic() - started < 2
    assert caught.value.fields[refused] == "Connection refused"
    assert caught.value.fields["127.0.0.1:9"] == "no answer within 0.2 s"


@pytest.mark.parametrize("said", [NotKvxfer("no"), AuthenticationError("no"), IdentityMismatch("no")])
def test_what_a_peer_said_outweighs_the_network(said: NotKvxfer | AuthenticationError | IdentityMismatch) -> None:
    error = unreachable({"a:1": TimeoutError(), "b:2": said})
    assert error is said
    assert error.peer == "b:2"
    assert error.fields["a:1"] == "timed out"


def test_who_hung_up_may_be_another_port() -> None:
    refused, hung_up = ConnectionRefusedError(errno.ECONNREFUSED, "refused"), PeerLost("the connection ended")
    assert "is `kvxfer serve` running there" in str(unreachable({"a:1": refused}))
    assert "is this the port of `listen`, not one of `http`" in str(unreachable({"a:1": refused, "b:2": hung_up}))


def test_out_of_descriptors_is_this_nodes_problem() -> None:
    assert isinstance(unreachable({"a:1": OSError(errno.EMFILE, "too many")}), ResourceExhausted)


def test_reasons_are_short() -> None:
    assert reason(OSError(errno.ECONNREFUSED, "Connect call failed ('127.0.0.1', 1)")) == "Connection refused"
    assert reason(socket.gaierror(-2, "Name or service not known")) == "Name or service not known"
