"""`kvxfer ping NODE`: is that node there, which ways lead to its memory, and how fast is each.

Needs no daemon on this side: it runs an embedded one. The control path is a message through both daemons. The data
path is measured once per transport, with a client that has this transport only, so that nothing can fall back: a put
and a get of one block, read back and compared, and a put of the whole scratch region that every daemon shares under
the name `kvxfer.ping`.
"""

from __future__ import annotations

import argparse
import logging
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import uvloop

from kvxfer.client import Client, local
from kvxfer.config import Loaded, load
from kvxfer.descriptors import RemoteDescriptor
from kvxfer.errors import IntegrityError, KvxferError, UsageError
from kvxfer.options import nearest
from kvxfer.peer import as_node

PING_REGION = "kvxfer.ping"
BLOCK_BYTES = 4096
COUNT_MAX = 100_000
TIMEOUT_S_MAX = 3600
WHOLE_COUNT = 20
COMPARE_TIMES = 5  # somebody else's ping may write between our put and our get
TRANSPORTS = ("shm", "tcp")  # `loop` reaches only the daemon's own process, so it is never a way from here

# What belongs to a daemon's place on the network; the embedded one is on loopback and takes any port.
_PLACE = ("listen", "advertise", "http", "http_allow_remote", "socket_dir", "data_bind", "data_port", "data_advertise")

EPILOG = """exit status: 0 the node answers and its memory can be reached (with --transport: by each one named);
1 it does not answer, or its memory cannot be reached; 2 the command line or the configuration is wrong.

examples:
  kvxfer ping 10.0.0.6:17800
  kvxfer ping 10.0.0.6:17800,192.168.1.6:17800      candidate addresses of one node
  kvxfer ping 127.0.0.1:17800 --transport shm       only this one, no fallback

The shared secret comes from KVXFER_SECRET_FILE or from --config FILE, as for the daemon.
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One measured path: latencies in microseconds, rate of the whole region in GB/s (0: not measured)."""

    path: str
    p50: float
    p90: float
    p99: float
    worst: float
    rate: float = 0.0


@dataclass(frozen=True, slots=True)
class Way:
    """A transport: usable or not, and why."""

    transport: str
    usable: bool
    why: str


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of this command."""
    parser.epilog = EPILOG
    parser.add_argument("node", metavar="HOST:PORT", help="the other daemon's `listen` address; IPv6 as [::1]:17800")
    parser.add_argument("--count", type=int, default=200, metavar="N", help="round trips per path (default 200)")
    parser.add_argument(
        "--transport",
        action="append",
        metavar="NAME",
        help=f"measure only this transport: {' or '.join(TRANSPORTS)} (may be repeated)",
    )
    parser.add_argument("--timeout", type=float, default=5.0, metavar="SECONDS", help="for each step (default 5)")
    parser.add_argument("--config", metavar="FILE", help="TOML file to read (default: $KVXFER_CONFIG)")


def run(args: argparse.Namespace) -> int:
    """Measure and print; see `EPILOG` for the exit status."""
    if not 1 <= args.count <= COUNT_MAX:
        raise UsageError(f"--count must be 1 to {COUNT_MAX}", value=args.count)
    for name in args.transport or ():
        if name not in TRANSPORTS:
            close = nearest(name, TRANSPORTS)
            hint = f"did you mean {close}?" if close else f"one of {', '.join(TRANSPORTS)}"
            raise UsageError("--transport: no such way to another node", value=name[:40], hint=hint)
    node = as_node(args.node.split(","))
    if not 0 < args.timeout <= TIMEOUT_S_MAX:
        raise UsageError(f"--timeout must be a number of seconds up to {TIMEOUT_S_MAX}", value=args.timeout)
    logging.getLogger("kvxfer").addHandler(logging.NullHandler())  # the report says it all, once
    return uvloop.run(_ping(node, args, load(args.config)))


async def _ping(node: Sequence[str], args: argparse.Namespace, loaded: Loaded) -> int:
    options = _options(loaded, args.timeout)
    wanted = tuple(args.transport or loaded.config.transports)
    rows: list[Row] = []
    ways: list[Way] = []
    try:
        async with local(**options) as client:
            peer = await client.connect(node, timeout=args.timeout + 1)
            _progress("measuring control ...")
            rows.append(await _measure("control", args.count, lambda: peer.ping(timeout=args.timeout)))
            target = await client.lookup(PING_REGION, node=node, timeout=args.timeout)
        for name in dict.fromkeys((*wanted, *(target.endpoints if not args.transport else ()))):
            if name != "loop":
                _progress(f"measuring {name} ...")
                ways.append(await _way(name, wanted, target, options, node, args, rows))
    except KvxferError as error:
        error.peer = args.node  # rather than our own embedded daemon, which relayed it
        raise
    finally:
        _progress("")
    print(f"{args.node}: node {target.node_id[:12]} answers\n\n{table(rows, target.length)}\n\n{explain(ways)}")
    enough = all if args.transport else any
    return 0 if enough(way.usable for way in ways) else 1


def _options(loaded: Loaded, timeout: float) -> dict[str, Any]:
    """The embedded daemon's options: what was configured, but for its place; attempts end before ``timeout``."""
    config = loaded.config
    given = {name for name, origin in loaded.origins.items() if origin != "default"}
    options = {name: getattr(config, name) for name in given.difference(_PLACE)}
    limit = max(timeout / 2, 0.05)
    return options | {"connect_s": min(config.connect_s, limit), "handshake_s": min(config.handshake_s, limit)}


async def _way(
    name: str,
    wanted: Sequence[str],
    target: RemoteDescriptor,
    options: dict[str, Any],
    node: Sequence[str],
    args: argparse.Namespace,
    rows: list[Row],
) -> Way:
    """Measure one transport; why it cannot be used, if so."""
    if name not in target.endpoints:
        return Way(name, False, f"the node offers only {', '.join(way for way in target.endpoints if way != 'loop')}")
    if name not in wanted:
        return Way(name, False, f"not allowed on this side: transports = {','.join(wanted)}")
    try:
        async with local(**{**options, "transports": (name,)}) as client:
            fresh = await client.lookup(PING_REGION, node=node, timeout=args.timeout)
            measured, why = await _data_path(client, fresh, name, args)
    except IntegrityError:
        raise
    except KvxferError as error:
        _, _, reasons = error.message.partition("; ")
        return Way(name, False, reasons or str(error))
    rows.extend(measured)
    return Way(name, True, why)


async def _data_path(
    client: Client, target: RemoteDescriptor, name: str, args: argparse.Namespace
) -> tuple[list[Row], str]:
    """Latency of one block both ways, rate of the whole region; and what to say about the transport."""
    ours = await client.alloc(target.length)
    ours.array[:] = np.frombuffer(secrets.token_bytes(target.length), dtype=np.uint8)
    back = await client.alloc(BLOCK_BYTES)
    block = ours[0:BLOCK_BYTES]
    started = time.perf_counter()
    info = await client.plane.prepare(target)
    connect_ms = (time.perf_counter() - started) * 1e3

    async def put() -> None:
        await client.put(block, target, timeout=args.timeout)

    async def get() -> None:
        await client.get(back, target, timeout=args.timeout)

    for _ in range(COMPARE_TIMES):
        await put()
        await get()
        if np.array_equal(back.array, ours.array[:BLOCK_BYTES]):
            break
    else:
        hint = "is another ping to this node running? if not, do not trust this path"
        raise IntegrityError("what came back is not what was written", transport=name, hint=hint)
    writes = await _measure(f"{name} put 4 KiB", args.count, put)
    reads = await _measure(f"{name} get 4 KiB", args.count, get)
    whole = await _measure("", WHOLE_COUNT, lambda: client.put(ours, target, timeout=args.timeout))
    rated = Row(writes.path, writes.p50, writes.p90, writes.p99, writes.worst, target.length / whole.p50 / 1e3)
    where = "memory of this host" if info.same_host else "over the network"
    copies = f"{info.copies_per_byte:g} {'copy' if info.copies_per_byte == 1 else 'copies'} per byte"
    return [rated, reads], f"{where}, {copies}, connected in {connect_ms:.1f} ms"


async def _measure(path: str, count: int, once: Callable[[], Awaitable[object]]) -> Row:
    await once()
    taken = []
    for _ in range(count):
        started = time.perf_counter()
        await once()
        taken.append((time.perf_counter() - started) * 1e6)
    p50, p90, p99 = np.percentile(taken, [50, 90, 99])
    return Row(path, float(p50), float(p90), float(p99), max(taken))


def table(rows: Sequence[Row], whole_bytes: int) -> str:
    """The rows as text: latencies in microseconds."""
    rate_title = f"{whole_bytes / (1 << 20):g} MiB GB/s"
    lines = [f"{'path':<14}{'p50 us':>10}{'p90 us':>10}{'p99 us':>10}{'max us':>10}{rate_title:>13}"]
    for row in rows:
        rate = f"{row.rate:.2f}" if row.rate else "-"
        lines.append(f"{row.path:<14}{row.p50:>10.1f}{row.p90:>10.1f}{row.p99:>10.1f}{row.worst:>10.1f}{rate:>13}")
    return "\n".join(lines)


def explain(ways: Sequence[Way]) -> str:
    """One line per transport, in order of preference: the first usable one is what transfers take."""
    lines, chosen = [], False
    for way in ways:
        verdict = "not usable" if not way.usable else "usable too" if chosen else "chosen"
        chosen = chosen or way.usable
        lines.append(f"{way.transport:<6}{verdict:<12}{way.why}")
    return "\n".join(lines)


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{text:<40}", end="" if text else "\r", file=sys.stderr, flush=True)
