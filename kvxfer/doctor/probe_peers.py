"""Looking at other nodes: a plain connection to every address, then the daemon's own account of itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import msgpack

from kvxfer.addresses import Address
from kvxfer.config import Config
from kvxfer.doctor.facts import Candidate, PeerSeen
from kvxfer.errors import KvxferError
from kvxfer.net.credentials import Credentials
from kvxfer.net.dial import candidates, reason, resolve
from kvxfer.net.link import Link, LinkFacts
from kvxfer.wire import messages as m


async def probe_peers(given: Sequence[str], config: Config, timeout_s: float) -> tuple[PeerSeen, ...]:
    """Each node, all at the same time."""
    return tuple(await asyncio.gather(*(_peer(text, config, timeout_s) for text in given)))


async def _peer(given: str, config: Config, timeout_s: float) -> PeerSeen:
    wanted = given.split(",")
    addresses, failures = await resolve(candidates(wanted))
    unresolved = [Candidate(address=label, error=reason(failure)) for label, failure in failures.items()]
    tried = await asyncio.gather(*(_connect(address, timeout_s) for address in addresses))
    seen = (*tried, *unresolved)
    try:
        status = await ask_status(wanted, config, timeout_s)
    except KvxferError as failure:
        return PeerSeen(given=given, candidates=seen, error=failure.message, hint=failure.hint or "")
    accelerator = status.get("accelerator")
    return PeerSeen(
        given=given,
        candidates=seen,
        version=str(status.get("version", "")),
        protocol=_whole(status.get("protocol")),
        transports=_texts(status.get("transports")),
        addresses=_texts(status.get("addresses")),
        data_advertise=_texts(status.get("data_advertise")),
        accelerator=accelerator if isinstance(accelerator, dict) else {},
    )


async def _connect(address: Address, timeout_s: float) -> Candidate:
    family = 6 if ":" in address.host else 4
    started = time.perf_counter()
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(address.host, address.port)
    except (OSError, TimeoutError) as failure:
        return Candidate(address=str(address), family=family, error=reason(failure))
    taken = time.perf_counter() - started
    writer.close()
    return Candidate(address=str(address), family=family, ms=taken * 1e3)


async def ask_status(addresses: Sequence[str], config: Config, timeout_s: float) -> dict[str, Any]:
    """The status of the daemon; as a tool, which may ask nothing else."""
    known = Credentials(config, unconfigured="look")
    node_id = "" if known.keys is None else known.keys.node_id  # it proves itself with the keys of its node
    facts = LinkFacts(role="tool", name="doctor", namespace=config.namespace, node_id=node_id)
    link = await Link.dial(addresses, facts, config, credentials=known, timeout=timeout_s)
    try:
        reply = await link.request(m.Status(), timeout=timeout_s)
    finally:
        await link.aclose("that was all")
    body = reply.body if isinstance(reply, m.StatusReply) else b"\x80"
    try:
        status = msgpack.unpackb(body)
    except ValueError:
        return {}
    return status if isinstance(status, dict) else {}


def _texts(value: object) -> tuple[str, ...]:
    return tuple(str(item) for item in value) if isinstance(value, list | tuple) else ()


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0
