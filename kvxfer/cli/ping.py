"""`kvxfer ping NODE`: is that node there, which ways lead to its memory, and how fast is each.

Needs no daemon on this side: it runs an embedded one. The control path is a message through both daemons; the data
path is measured per transport against the scratch region that every daemon shares under the name `kvxfer.ping`, each
with a put (written and confirmed) and a get (read back and compared).
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np

from kvxfer.addresses import parse_address
from kvxfer.client import Client, local
from kvxfer.config import load
from kvxfer.descriptors import RemoteDescriptor
from kvxfer.errors import IntegrityError, KvxferError, UsageError

PING_REGION = "kvxfer.ping"
BLOCK_BYTES = 4096
COUNT_MAX = 100_000


@dataclass(frozen=True, slots=True)
class Row:
    """One measured path: latencies in microseconds, rate of the largest block in GB/s (0 = not measured)."""

    path: str
    p50: float
    p90: float
    p99: float
    worst: float
    rate: float
    note: str = ""


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of this command."""
    parser.add_argument("node", help="the other node's control address, host:port or [v6]:port")
    parser.add_argument("--count", type=int, default=200, help="round trips per path (default 200)")
    parser.add_argument("--transport", action="append", help="only this transport (may be repeated); no fallback")
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds for each step (default 5)")
    parser.add_argument("--config", help="TOML file (for the shared secret)")


def run(args: argparse.Namespace) -> int:
    """Measure and print a table; 0 when every path worked, 1 when one did not."""
    if not 1 <= args.count <= COUNT_MAX:
        raise UsageError("--count is out of range", value=args.count, limit=COUNT_MAX)
    parse_address(args.node)
    return asyncio.run(_ping(args))


async def _ping(args: argparse.Namespace) -> int:
    base = load(args.config).config
    secret = {"secret": base.secret, "secret_file": base.secret_file}
    rows: list[Row] = []
    failures: list[str] = []
    async with local(**secret) as client:
        peer = await client.connect(args.node, timeout=args.timeout)
        rows.append(await _measure("control", args.count, lambda: peer.ping(timeout=args.timeout)))
        descriptor = await client.lookup(PING_REGION, node=args.node, timeout=args.timeout)
    for name in args.transport or [name for name in descriptor.endpoints if name != "loop"]:
        _progress(f"measuring {name} ...")
        try:
            async with local(transports=(name,), **secret) as client:
                descriptor = await client.lookup(PING_REGION, node=args.node, timeout=args.timeout)
                rows.extend(await _data_path(client, descriptor, name, args))
        except KvxferError as error:
            failures.append(f"{name}: {error}")
    _progress("")
    print(f"{args.node}: node {descriptor.node_id[:12]}, offers {', '.join(descriptor.endpoints)}")
    print(table(rows))
    for failure in failures:
        print(f"not usable from here: {failure}")
    return 1 if failures else 0


async def _data_path(client: Client, target: RemoteDescriptor, name: str, args: argparse.Namespace) -> list[Row]:
    size = target.length
    ours = await client.alloc(size)
    ours.array[:] = np.frombuffer(secrets.token_bytes(BLOCK_BYTES) * (size // BLOCK_BYTES), dtype=np.uint8)
    back = await client.alloc(BLOCK_BYTES)
    block = ours[0:BLOCK_BYTES]
    started = time.perf_counter()
    info = await client.plane.prepare(target)
    connect_ms = (time.perf_counter() - started) * 1e3

    async def put() -> None:
        await client.put(block, target, timeout=args.timeout)

    async def get() -> None:
        await client.get(back, target, timeout=args.timeout)

    writes = await _measure(f"{name} put 4 KiB", args.count, put)
    reads = await _measure(f"{name} get 4 KiB", args.count, get)
    if not np.array_equal(back.array, ours.array[:BLOCK_BYTES]):
        raise IntegrityError("what came back is not what was written", transport=name, peer=args.node)
    whole = await _measure("", 20, lambda: client.put(ours, target, timeout=args.timeout))
    rate = size / whole.p50 / 1e3
    note = f"connected in {connect_ms:.1f} ms, {info.copies_per_byte:g} copies per byte"
    return [Row(writes.path, writes.p50, writes.p90, writes.p99, writes.worst, rate, note), reads]


async def _measure(path: str, count: int, once: Callable[[], Awaitable[object]]) -> Row:
    await once()
    taken = []
    for _ in range(count):
        started = time.perf_counter()
        await once()
        taken.append((time.perf_counter() - started) * 1e6)
    p50, p90, p99 = np.percentile(taken, [50, 90, 99])
    return Row(path, float(p50), float(p90), float(p99), max(taken), 0.0)


def table(rows: list[Row]) -> str:
    """The rows as text: latencies in microseconds."""
    lines = [f"{'path':<20}{'p50 us':>10}{'p90 us':>10}{'p99 us':>10}{'max us':>10}{'1 MiB GB/s':>12}"]
    for row in rows:
        rate = f"{row.rate:.2f}" if row.rate else "-"
        line = f"{row.path:<20}{row.p50:>10.1f}{row.p90:>10.1f}{row.p99:>10.1f}{row.worst:>10.1f}{rate:>12}"
        lines.append(f"{line}  {row.note}".rstrip())
    return "\n".join(lines)


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{text:<40}", end="" if text else "\r", file=sys.stderr, flush=True)
