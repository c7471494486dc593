"""A worker's transfers between two real clients, without vLLM: each mode, and what ends otherwise."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from kvxfer.client import Client
from kvxfer.geometry import BlockTable
from kvxfer.integrations.tensors import TensorCache
from kvxfer.integrations.vllm.caches import Part
from kvxfer.integrations.vllm.orders import Orders, Receive, SendOrder, Stream, Table
from kvxfer.integrations.vllm.params import Meeting, Remote
from kvxfer.integrations.vllm.results import ResultBatch, Results
from kvxfer.integrations.vllm.settings import Settings
from kvxfer.integrations.vllm.transfers import Transfers
from tests.conftest import slack
from tests.support.nodes import make_cache, small_geometry, tokens_of, two_nodes

LAYERS = ("a", "b", "c")
HERE = Table.of([3, 1, 2], 16, 0, 40)
THERE = Table.of([4, 6, 5], 16, 0, 40)
RECEIVED, SENT = "received", "sent"


@dataclass
class Side:
    """One worker."""

    client: Client
    transfers: Transfers
    results: Results
    part: Part

    async def ended(self, what: Callable[[ResultBatch], set[str]], request_id: str, limit: float = 10.0) -> ResultBatch:
        """Wait for a word about a request."""
        end = asyncio.get_running_loop().time() + limit * slack()
        while True:
            batch = self.results.take()
            if request_id in what(batch):
                return batch
            assert asyncio.get_running_loop().time() < end, "nothing was said"
            await asyncio.sleep(0.005)

    def follow(self, **orders: Any) -> None:
        self.transfers.follow(Orders(**orders))

    def failures(self) -> dict[str, int]:
        record = self.results.take_record()
        return {} if record is None else dict(record["failures"])


@asynccontextmanager
async def workers(**settings: Any) -> AsyncIterator[tuple[Side, Side]]:
    """A worker of a prefill engine and one of a decode engine, on two nodes; the former's cache holds numbers."""
    made = []
    given = Settings.of({"timeout_s": 5, "lease_s": 10, **settings})
    async with two_nodes(["shm"]) as clients:
        for name, client in zip("pd", clients, strict=True):
            cache = await make_cache(client, small_geometry(), 8)
            described = TensorCache(name="0.0", group=0, layers=LAYERS, shared_by={}, layout=cache.layout)
            part, results = Part(cache=cache, described=described, order=0), Results()
            transfers = Transfers(client, given, [part], channel=f"vllm/{name}/0", rank=0, results=results)
            await transfers.start()
            made.append(Side(client, transfers, results, part))
        numbers = made[0].part.cache.regions[0].array.view(np.float32)
        numbers[:] = np.arange(len(numbers))
        try:
            yield made[0], made[1]
        finally:
            for side in made:
                await side.transfers.aclose()


def same(one: Side, other: Side) -> bool:
    """All layers of the request are equal in both caches."""
    tables = [BlockTable.of(table.blocks, table.tokens) for table in (HERE, THERE)]
    return all(
        np.array_equal(tokens_of(one.part.cache, tables[0], layer), tokens_of(other.part.cache, tables[1], layer))
        for layer in range(len(LAYERS))
    )


def remote(side: Side, mode: str = "pull") -> Remote:
    return Remote(engine_id="p", request_id="p-1", tokens=40, mode=mode, compatibility="", ranks=(side.transfers.rank,))


def receive(side: Side, mode: str = "pull") -> dict[str, Receive]:
    return {"d-1": Receive(remote=remote(side, mode), tables=(THERE,))}


def send(mode: str = "pull") -> dict[str, SendOrder]:
    return {"p-1": SendOrder(tables=(HERE,), mode=mode)}


@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize("first", ["prefill", "decode"])
async def test_a_request_is_moved(mode: str, first: str) -> None:
    async with workers() as (prefill, decode):
        orders = [lambda: prefill.follow(send=send(mode)), lambda: decode.follow(receive=receive(prefill, mode))]
        for order in orders if first == "prefill" else reversed(orders):
            order()
            await asyncio.sleep(0)
        batch = await decode.ended(lambda batch: batch.received, "d-1")
        assert not batch.failed
        assert same(prefill, decode)
        await prefill.ended(lambda batch: batch.sent, "p-1")
        record = decode.results.take_record()
        assert record is not None
        assert (record[RECEIVED]["tokens"], record["failures"]) == ([40], {})


async def test_layers_are_written_as_they_come() -> None:
    async with workers(mode="layerwise") as (prefill, decode):
        meeting = Meeting(transfer_id="t", node=decode.client.addresses)
        decode.follow(receive={"d-1": Receive(remote=None, tables=(THERE,), meeting=meeting)})
        prefill.follow(stream={"p-1": Stream(tables=(HERE,), meeting=meeting)})
        for name in ("b", "not of ours", "a", "c"):
            prefill.transfers.layer_ready(name)
        assert not (await decode.ended(lambda batch: batch.received, "d-1")).failed
        assert same(prefill, decode)
        await prefill.ended(lambda batch: batch.sent, "p-1")


async def test_a_stream_whose_blocks_are_taken_away_says_nothing() -> None:
    async with workers(mode="layerwise", timeout_s=2) as (prefill, decode):
        meeting = Meeting(transfer_id="t", node=decode.client.addresses)
        decode.follow(receive={"d-1": Receive(remote=None, tables=(THERE,), meeting=meeting)})
        prefill.follow(stream={"p-1": Stream(tables=(HERE,), meeting=meeting)})
        prefill.transfers.layer_ready("a")
        await prefill.transfers.stop_streams({"p-1", "another"})
        assert (await decode.ended(lambda batch: batch.failed, "d-1")).failed_blocks == {4, 5, 6}
        assert prefill.results.take().sent == set()


async def test_a_stream_that_is_aborted_at_once_is_reported() -> None:
    async with workers(mode="layerwise") as (prefill, decode):
        meeting = Meeting(transfer_id="t", node=decode.client.addresses)
        prefill.follow(stream={"p-1": Stream(tables=(HERE,), meeting=meeting)})
        prefill.follow(cancelled={"p-1"})
        await prefill.ended(lambda batch: batch.sent, "p-1")


@pytest.mark.parametrize("soon", [True, False])
async def test_an_aborted_request_lets_prefill_go(soon: bool) -> None:
    async with workers() as (prefill, decode):
        prefill.follow(send=send())
        decode.follow(receive=receive(prefill))
        if not soon:
            await asyncio.sleep(0)
        decode.transfers.stop({"d-1", "another"})
        await decode.ended(lambda batch: batch.received, "d-1")
        await prefill.ended(lambda batch: batch.sent, "p-1")


async def test_what_nobody_wants_is_dropped() -> None:
    async with workers() as (prefill, decode):
        prefill.follow(send=send())
        decode.follow(dropped=[remote(prefill)])
        await prefill.ended(lambda batch: batch.sent, "p-1")


async def test_dropped_before_it_was_kept() -> None:
    async with workers() as (prefill, decode):
        decode.follow(dropped=[remote(prefill)])
        while "p-1" not in prefill.transfers._kept:
            await asyncio.sleep(0.005)
        prefill.follow(send=send())
        await prefill.ended(lambda batch: batch.sent, "p-1", 3)


@pytest.mark.parametrize("mode", ["pull", "push"])
async def test_a_lease_ends(mode: str) -> None:
    async with workers(lease_s=0.3) as (prefill, _):
        prefill.follow(send=send(mode))
        await prefill.ended(lambda batch: batch.sent, "p-1")
        record = prefill.results.take_record()
        assert record is not None
        assert record["expired"] == 1


async def test_refused_by_the_scheduler() -> None:
    async with workers() as (_, decode):
        decode.follow(receive={"d-1": Receive(remote=None, tables=(THERE,), refused="unlike")})
        assert (await decode.ended(lambda batch: batch.failed, "d-1")).failed_blocks == {4, 5, 6}
        assert decode.failures() == {"usage": 1}


@pytest.mark.parametrize("mode", ["pull", "push"])
async def test_a_request_of_yesterday(mode: str) -> None:
    async with workers(timeout_s=0.5) as (prefill, decode):
        decode.follow(receive=receive(prefill, mode))
        await decode.ended(lambda batch: batch.failed, "d-1")
        assert sum(decode.failures().values()) == 1


@pytest.mark.parametrize("mode", ["pull", "push"])
async def test_prefill_has_ended(mode: str) -> None:
    async with workers() as (prefill, decode):
        orders = receive(prefill, mode)
        await prefill.transfers.aclose()
        await prefill.client.aclose()
        decode.follow(receive=orders)
        await decode.ended(lambda batch: batch.failed, "d-1", 4)


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xff",
        b"[]",
        b"[" * 60_000,
        json.dumps({"do": "tickets"}).encode(),
        json.dumps({"do": "tickets", "request": "p-1"}).encode(),
        json.dumps({"do": "tickets", "request": "p-1", "reply": "x", "node": 7}).encode(),
        json.dumps({"do": "offers", "request": "p-1", "offers": [1]}).encode(),
        json.dumps({"do": "fly", "request": "p-1"}).encode(),
        json.dumps({"do": ["drop"], "request": "p-1"}).encode(),
    ],
)
async def test_mail_that_makes_no_sense_changes_nothing(message: bytes) -> None:
    async with workers() as (prefill, decode):
        prefill.follow(send=send())
        if message:
            await decode.client.send(prefill.client.addresses, "vllm/p/0", message)
        decode.follow(receive=receive(prefill))
        assert not (await decode.ended(lambda batch: batch.received, "d-1")).failed


async def test_offers_that_are_no_tickets_end_the_request_and_no_more() -> None:
    async with workers() as (prefill, decode):
        prefill.follow(send=send("push"))
        told = json.dumps({"do": "offers", "request": "p-1", "offers": ["no ticket"]}).encode()
        await decode.client.send(prefill.client.addresses, "vllm/p/0", told)
        await prefill.ended(lambda batch: batch.sent, "p-1")
        assert sum(prefill.failures().values()) == 1
