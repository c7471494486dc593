"""Whatever is frozen (SIGSTOP) - the own daemon, the other node's, the other worker - every public call ends at its own
deadline, its error says where it was, and what it began and gave up is taken back when the frozen one goes on."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvxfer
from kvxfer.client import Client, Peer
from kvxfer.config import Config, load
from kvxfer.errors import KvxferError
from kvxfer.flows.many import Move
from kvxfer.memory.region import KVCache, Region
from tests.cases.harness import Side, cluster, metric
from tests.support.nodes import make_cache, small_geometry

SLACK = float(os.environ.get("KVXFER_TEST_SLACK", "1"))
LIMIT_S = 1.0  # of every call
OPEN_S = 3.0  # of what was begun before anything froze
MARGIN_S = 1.0 * SLACK  # what an end may take: the settling of what ran (twice `cancel_s`), and a busy machine
TABLE = kvxfer.BlockTable.of([5, 0, 3], tokens=48)
pytestmark = [pytest.mark.once, pytest.mark.slow, pytest.mark.timeout(120)]


@dataclass(slots=True, kw_only=True)
class Ours:
    """What was made before anything froze: two clients of node A, of which ``fresh`` has reached nobody yet."""

    client: Client
    fresh: Client
    config: Config
    a: Side
    b: Side
    region: Region
    spare: Region
    other: Region
    cache: KVCache
    sink: KVCache
    late: KVCache
    pulled: KVCache
    theirs: Region  # of ``fresh``
    ticket: dict[str, Any]
    remote: kvxfer.RemoteDescriptor
    lent: kvxfer.RemoteDescriptor
    used: kvxfer.RemoteDescriptor  # of ``spare``, reached by the other worker
    share: Any
    lent_share: Any
    publication: Any
    landing: Any
    push: Any
    told: Any


@asynccontextmanager
async def ours(directory: Path, transport: str) -> AsyncIterator[Ours]:
    async with cluster(directory, transport) as sides, AsyncExitStack() as stack:
        a, b = sides["a"], sides["b"]
        options = {"transports": [transport], "timeout_s": LIMIT_S, "cancel_s": 0.2, "handshake_s": 0.5}
        config = load(flags=options).config
        client = await stack.enter_async_context(Client(a.socket, config=config))
        fresh = await stack.enter_async_context(Client(a.socket, config=config))
        await b.do("alloc", name="m", length=1 << 20)
        for name in "cd":
            await b.do("cache", name=name, blocks=8)
        blocks = [int(block) for block in TABLE.blocks]
        ticket = (await b.do("publish", name="t", cache="c", blocks=blocks, lease_s=60, consumers=8))["ticket"]
        await b.do("offer", name="open", cache="d", blocks=blocks, timeout=30)
        remote = kvxfer.RemoteDescriptor.from_dict((await b.do("describe", name="m"))["descriptor"])
        region, spare, other = [await client.alloc(1 << 20) for _ in range(3)]
        cache, sink, late, pulled = [await make_cache(client, small_geometry(), 8) for _ in range(4)]
        await client.put(region, remote, timeout=10)
        lent, used = region.descriptor("w"), spare.descriptor("rw")
        lent_share = await client.share(region, "reached", timeout=10)
        for number, descriptor in enumerate((used, lent_share.descriptor)):  # so that the other worker holds on to it
            await b.do("start", name=f"g{number}", way="get", region="m", descriptor=descriptor.to_dict())
            await b.do("outcome", name=f"g{number}")
        yield Ours(
            client=client,
            fresh=fresh,
            config=config,
            a=a,
            b=b,
            region=region,
            spare=spare,
            other=other,
            cache=cache,
            sink=sink,
            late=late,
            pulled=pulled,
            theirs=await fresh.alloc(1 << 20),
            ticket=ticket,
            remote=remote,
            lent=lent,
            used=used,
            share=await client.share(other, "early", timeout=10),
            lent_share=lent_share,
            publication=await client.publish("early", cache, TABLE, timeout=10).__aenter__(),
            landing=await client.offer("early", sink, TABLE, timeout=OPEN_S).__aenter__(),
            push=await client.push("open", to=b.node, cache=cache, table=TABLE, timeout=OPEN_S).__aenter__(),
            told=await stack.enter_async_context(client.notifications(lent)),
        )
        for side in (a, b):
            side.thaw()


async def rest(push: kvxfer.Push) -> None:
    """All layers of an open push, and its end."""
    try:
        await push.layers()
    except BaseException as error:
        await push.__aexit__(type(error), error, None)
        raise
    await push.__aexit__(None, None, None)


async def opened(o: Ours) -> None:
    await (await Client(o.a.socket, config=o.config).__aenter__()).aclose()


async def landed(o: Ours) -> None:
    await rest(await o.client.push("pooled", to=o.b.node, cache=o.cache, table=TABLE, land=True).__aenter__())


async def inside(block: Any) -> None:
    """Enter and leave at once."""
    async with block:
        pass


# Calls by name, each with a deadline of LIMIT_S (by argument or by `timeout_s`), or OPEN_S when it was begun before.
Call = Callable[[Ours], Awaitable[Any]]
CALLS: dict[str, Call] = {
    "connect": lambda o: o.client.connect(o.b.node, timeout=LIMIT_S),
    "ping": lambda o: Peer(o.client, tuple(o.b.node)).ping(),
    "send": lambda o: o.client.send(o.b.node, "c", b"x"),
    "recv": lambda o: o.client.recv("mine", timeout=LIMIT_S),
    "share": lambda o: o.client.share(o.region, "late"),
    "share, asked": lambda o: o.client.share(o.region, "later", timeout=LIMIT_S),
    "renew a share": lambda o: o.share.renew(30),
    "lookup": lambda o: o.client.lookup("nothing", node=o.b.node),
    "lookup, waiting": lambda o: o.client.lookup("nothing", node=o.b.node, wait_s=30, timeout=LIMIT_S),
    "offer": lambda o: inside(o.client.offer("late", o.late, TABLE, timeout=LIMIT_S)),
    "publish": lambda o: o.client.publish("late", o.cache, TABLE).__aenter__(),
    "publish, asked": lambda o: o.client.publish("later", o.cache, TABLE, timeout=LIMIT_S).__aenter__(),
    "renew a publication": lambda o: o.publication.renew(30),
    "wait for a release": lambda o: o.publication.wait_released(timeout=LIMIT_S),
    "push": lambda o: o.client.push("none", to=o.b.node, cache=o.cache, table=TABLE).__aenter__(),
    "push, landing": lambda o: landed(o),
    "pull": lambda o: o.client.pull(o.ticket, o.pulled, TABLE),
    "release": lambda o: o.fresh.release(o.ticket),
    "adopt": lambda o: o.client.adopt("nothing").__aenter__(),
    "put": lambda o: o.client.put(o.region, o.remote),
    "get": lambda o: o.client.get(o.other, o.remote),
    "put, told": lambda o: o.client.put(o.region[0:64], o.remote, visible=True),
    "put_many": lambda o: o.client.put_many([Move(o.region[0:4096], o.remote)], timeout=LIMIT_S),
    "put, unreached": lambda o: o.fresh.put(o.theirs, o.remote),
    "notifications": lambda o: o.told.next(timeout=LIMIT_S),
    "revoke": lambda o: o.spare.revoke(o.used),
    "release a region": lambda o: o.spare.release(),
    "withdraw a share": lambda o: o.lent_share.withdraw(timeout=LIMIT_S),
    "alloc": lambda o: o.client.alloc(4096),
    "register": lambda o: o.client.register(np.zeros(8192, np.uint8)),
    "write": lambda o: o.other.write(0, b"x"),
    "an open push": lambda o: rest(o.push),
    "an open offer": lambda o: o.landing.wait(),
    "a layer of it": lambda o: o.landing.layer(1),
    "client": opened,
}

OPEN = ("an open push", "an open offer", "a layer of it")

ANSWER, OTHER_SIDE = "timeout waiting for an answer", "timeout waiting for the other side"
CONNECTING, MOVING = "timeout connecting", "timeout transferring"
NOTHING = "unknown_transfer"  # the other side has answered: there is no such thing
ASKED_OF_OTHERS = ("connect", "ping", "send", "lookup", "lookup, waiting", "push", "push, landing", "pull", "release")
ASKED_OF_OWN = ("share", "share, asked", "renew a share", "offer", "publish", "publish, asked", "renew a publication")
NOBODY_CAME = dict.fromkeys(
    ("recv", "notifications", "wait for a release", "an open offer", "a layer of it"), OTHER_SIDE
)
EMPTY = dict.fromkeys(("lookup", "lookup, waiting", "push", "adopt"), NOTHING)
# What is not listed is done.
WANTED: dict[str, dict[str, str]] = {
    "own daemon": {
        **NOBODY_CAME,
        **dict.fromkeys((*ASKED_OF_OTHERS, *ASKED_OF_OWN, "adopt"), ANSWER),
        "client": "daemon_unavailable connecting",
    },
    "other daemon": {**NOBODY_CAME, **EMPTY, **dict.fromkeys(ASKED_OF_OTHERS, ANSWER)},
    "other worker": {
        **NOBODY_CAME,
        **EMPTY,
        "pull": CONNECTING,
        "put, unreached": CONNECTING,
        "put, told": MOVING,
        **dict.fromkeys(("revoke", "release a region", "withdraw a share"), OTHER_SIDE),  # it could still copy
        "an open push": "stalled transferring",
    },
}
OVER_TCP = {
    # The bytes lie in a socket, and the one who would take them out stands still.
    "other worker": {
        **dict.fromkeys(("put", "get", "put_many", "put, told"), MOVING),
        **dict.fromkeys(("revoke", "release a region", "withdraw a share"), "done"),  # the owner moves the bytes
        "an open push": "peer_lost",
    }
}


async def timed(o: Ours, name: str, began: float) -> tuple[str, float]:
    """How a call ended ("done", or code and state of its error), and how many seconds after its deadline."""
    deadline = began + (OPEN_S if name in OPEN else LIMIT_S)
    try:
        async with asyncio.timeout(60):
            await CALLS[name](o)
        how = "done"
    except KvxferError as error:
        how = f"{error.code} {error.fields.get('state', '')}".strip()
    except TimeoutError:
        how = "never"
    return how, time.monotonic() - deadline


# A frozen daemon is the same to both transports: the other half of the table runs under `make cases-full`.
PLAYED = [("own daemon", "shm"), ("other daemon", "tcp"), ("other worker", "shm"), ("other worker", "tcp")]
REST = [pytest.param(*pair, marks=pytest.mark.full) for pair in (("own daemon", "tcp"), ("other daemon", "shm"))]


@pytest.mark.parametrize(("frozen", "transport"), [*PLAYED, *REST])
async def test_every_call_ends_at_its_own_deadline(tmp_path: Path, frozen: str, transport: str) -> None:
    async with ours(tmp_path, transport) as o:
        process = {"own daemon": o.a.daemon, "other daemon": o.b.daemon, "other worker": o.b.process}[frozen]
        process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        ends = dict(zip(CALLS, await asyncio.gather(*(timed(o, name, began) for name in CALLS)), strict=True))
        wanted = dict.fromkeys(CALLS, "done") | WANTED[frozen]
        if transport == "tcp":
            wanted |= OVER_TCP.get(frozen, {})
        assert {name: how for name, (how, _) in ends.items()} == wanted
        late = {name: late_s for name, (_, late_s) in ends.items() if late_s > MARGIN_S}
        assert not late, "seconds after the deadline"
        process.send_signal(signal.SIGCONT)
        # One share and one publication were there before, and what the daemon itself posts for `kvxfer ping`; two of
        # each were made where the own daemon answered.
        made = 0 if frozen == "own daemon" else 4
        await nothing_stays(o, {"postings": 3 + made, "landings": frozen == "other worker"})
        await closed_in_time(o, process)


async def nothing_stays(o: Ours, wanted: dict[str, float]) -> None:
    """What was given up is taken back by everybody who heard of it."""
    deadline = time.monotonic() + 10 * SLACK
    while True:
        found = {"postings": await metric(o.a, "kvxfer_postings"), "landings": await metric(o.b, "kvxfer_landings")}
        for gauge in ("claims", "orphans", "waiting", "routes"):
            found[gauge] = sum([await metric(side, f"kvxfer_{gauge}") for side in (o.a, o.b)])
        found["blocks"] = o.client.reservations.pinned_blocks + o.client.reservations.quarantined_blocks
        if found == {**dict.fromkeys(found, 0), **wanted}:
            return
        assert time.monotonic() < deadline, found
        await asyncio.sleep(0.05)


async def closed_in_time(o: Ours, process: Any) -> None:
    """The end of a client, too, waits for nobody who stands still."""
    process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    await o.client.aclose()
    assert time.monotonic() - began < LIMIT_S + MARGIN_S
    process.send_signal(signal.SIGCONT)
