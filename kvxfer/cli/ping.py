"""`kvxfer ping NODE`: is that node there, which ways lead to its memory, and how fast is each.

Needs no daemon on this side: it runs an embedded one. The control path is a message through both daemons. The data
path is measured once per pair of memories (host or accelerator, on each side) and transport, with a client that has
this transport only, so that nothing can fall back: a put and a get of one block, read back and compared, and a put of
the whole scratch region. Every daemon shares one in host memory under the name `kvxfer.ping`, and one on an accelerator
when its option `ping_device` says on which.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import uvloop

from kvxfer.addresses import as_node, parse_address
from kvxfer.cli.mtu import about_mtu, path_mtu
from kvxfer.client import Client
from kvxfer.config import TRANSPORTS as KNOWN
from kvxfer.config import Config, Loaded, load
from kvxfer.config.options import nearest
from kvxfer.dataplane.connections import moved
from kvxfer.descriptors import RemoteDescriptor
from kvxfer.doctor.facts import FindingState
from kvxfer.doctor.network import ask_status, judge_toolkits
from kvxfer.embedded import local
from kvxfer.errors import IntegrityError, KvxferError, UnknownTransfer, UsageError
from kvxfer.native.installed import installed
from kvxfer.native.transports import names_of
from kvxfer.native.types import MemoryKind, TransportInfo

# What a daemon shares, by the kind of memory that it is in.
PING_REGIONS = {MemoryKind.DRAM: "kvxfer.ping", MemoryKind.HBM: "kvxfer.ping.device"}
BLOCK_BYTES = 4096
COUNT_MAX = 100_000
TIMEOUT_S_MAX = 3600
WHOLE_COUNT = 20
COMPARE_TIMES = 5  # somebody else's ping may write between our put and our get
LOCAL = "loop"  # reaches only the daemon's own process, so it is never a way from here
TRANSPORTS = tuple(name for name in KNOWN if name != LOCAL)

# What belongs to a daemon's place on the network; the embedded one is on loopback and takes any port.
_PLACE = (
    *("listen", "advertise", "http", "http_allow_remote", "socket_dir", "data_bind", "data_port", "data_advertise"),
    *("hixl_port", "hixl_engine_port", "ping_device"),
)

EPILOG = """exit status: 0 the node answers and its memory can be reached (with --transport: by each one named);
1 it does not answer, or its memory cannot be reached; 2 the command line or the configuration is wrong.

examples:
  kvxfer ping 10.0.0.6:17800
  kvxfer ping 10.0.0.6:17800,192.168.1.6:17800      candidate addresses of one node
  kvxfer ping 127.0.0.1:17800 --transport shm       only this one, no fallback
  kvxfer ping 10.0.0.6:17800 --transport hixl       between accelerators (that daemon needs ping_device)

The shared secret comes from KVXFER_SECRET_FILE or from --config FILE, as for the daemon.
"""


@dataclass(frozen=True, slots=True)
class PingRow:
    """One measured path: latencies in microseconds, rate of the whole region in GB/s (0: not measured)."""

    path: str
    p50: float
    p90: float
    p99: float
    worst: float
    rate: float = 0.0


@dataclass(frozen=True, slots=True)
class PingPath:
    """A transport between two memories: usable or not, and why."""

    transport: str
    usable: bool
    why: str
    pair: str = "dram to dram"


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
    parser.add_argument(
        "--device", default="auto", metavar="N", help="accelerator of this side's memory (default: the least loaded)"
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
    if args.device != "auto" and not args.device.isdecimal():
        raise UsageError("--device must be a number, or auto", value=args.device[:40])
    node = as_node(args.node.split(","))
    if not 0 < args.timeout <= TIMEOUT_S_MAX:
        raise UsageError(f"--timeout must be a number of seconds up to {TIMEOUT_S_MAX}", value=args.timeout)
    logging.getLogger("kvxfer").addHandler(logging.NullHandler())  # the report says it all, once
    return uvloop.run(_ping(node, args, load(args.config)))


async def _ping(node: Sequence[str], args: argparse.Namespace, loaded: Loaded) -> int:
    options = _options(loaded, args.timeout)
    wanted = tuple(args.transport or names_of(loaded.config.transports))
    run = PingRun(node, args, options, wanted)
    try:
        async with local(**options) as client:
            peer = await client.connect(node, timeout=args.timeout + 1)
            _progress("measuring control ...")
            run.rows.append(await _measure("control", args.count, lambda: peer.ping(timeout=args.timeout)))
            targets = await run.targets(client)
        offered = [] if args.transport else [name for target in targets.values() for name in target.endpoints]
        names = [name for name in dict.fromkeys((*wanted, *offered)) if name != LOCAL]
        for name in names:
            await run.open(name, targets[MemoryKind.DRAM])
        for there, target in targets.items():
            for here in run.kinds():
                for name in names:
                    await run.measure(name, here, there, target)
    except KvxferError as error:
        error.peer = args.node  # rather than our own embedded daemon, which relayed it
        raise
    finally:
        _progress("")
    run.notes.extend(await _versions(args.node, node, loaded.config, args.timeout))
    run.notes.append(await _breakers(node, args, loaded))
    target = targets[MemoryKind.DRAM]
    run.notes.extend(_mtus(target))
    via = f", over {peer.address}" if peer.address else ""
    print(f"{args.node}: node {target.node_id[:12]} answers{via}\n")
    print(f"{table(run.rows, target.length)}\n\n{explain(run.ways)}")
    for note in run.notes:
        print(f"\n{note}")
    enough = all if args.transport else any
    usable = dict.fromkeys(wanted, False) if args.transport else {}
    for way in run.ways:
        usable[way.transport] = usable.get(way.transport, False) or way.usable
    return 0 if enough(usable.values()) else 1


@dataclass(slots=True)
class PingRun:
    """One call of the command: what it was asked, and what it has measured."""

    node: Sequence[str]
    args: argparse.Namespace
    options: dict[str, Any]
    wanted: Sequence[str]
    infos: dict[str, TransportInfo] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)  # of transports that are no way to this node at all
    rows: list[PingRow] = field(default_factory=list)
    ways: list[PingPath] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    async def targets(self, client: Client) -> dict[MemoryKind, RemoteDescriptor]:
        """The scratch regions of the node: in host memory always, on an accelerator where it has one."""
        found = {}
        for kind, name in PING_REGIONS.items():
            try:
                found[kind] = await client.lookup(name, node=self.node, timeout=self.args.timeout)
            except UnknownTransfer:
                if kind is MemoryKind.DRAM:
                    raise
        return found

    async def open(self, name: str, target: RemoteDescriptor) -> None:
        """Does a transport lead to this node, as far as both sides have it?"""
        if name not in target.endpoints:
            others = ", ".join(way for way in target.endpoints if way != LOCAL)
            self.reasons[name] = f"the node offers only {others}"
        elif name not in self.wanted:
            self.reasons[name] = f"not allowed on this side: transports = {','.join(self.wanted)}"
        else:
            try:
                async with local(**{**self.options, "transports": (name,)}) as client:
                    infos = client.plane.engine.transports
            except KvxferError as error:
                self.reasons[name] = str(error)
            else:
                self.infos[name] = next(info for info in infos if info.name != LOCAL)

    def kinds(self) -> list[MemoryKind]:
        """What this side's memory may be: the host's, and an accelerator's where something reaches it."""
        # One that moves only them has loaded what they need; on a host without any, nothing looks for them.
        infos = [info for info in self.infos.values() if not info.moves(MemoryKind.DRAM)]
        more = {kind for kind in PING_REGIONS for info in infos if info.moves(kind)}
        return sorted(more | {MemoryKind.DRAM})

    async def measure(self, name: str, here: MemoryKind, there: MemoryKind, target: RemoteDescriptor) -> None:
        """One transport between one kind of memory of this side and one of the node's."""
        pair = f"{here.word} to {there.word}"
        why = self.reasons.get(name, "")
        if not why and not self.infos[name].reaches(here, there):
            why = f"moves {moved(self.infos[name])}"
        if why:
            self.ways.append(PingPath(name, False, why, pair))
            return
        _progress(f"measuring {name}, {pair} ...")
        try:
            async with local(**{**self.options, "transports": (name,)}) as client:
                fresh = await client.lookup(PING_REGIONS[there], node=self.node, timeout=self.args.timeout)
                measured, why = await _data_path(client, fresh, name, (here, there), self.args)
        except IntegrityError:
            raise
        except KvxferError as error:
            _, _, reasons = error.message.partition("; ")
            self.ways.append(PingPath(name, False, reasons or str(error), pair))
            return
        self.rows.extend(measured)
        self.ways.append(PingPath(name, True, why, pair))
        if MemoryKind.HBM in (here, there) and not self.notes:
            self.notes.extend(await asyncio.to_thread(_about_accelerators))


def _mtus(target: RemoteDescriptor) -> list[str]:
    """Paths to the node's engine with a smaller MTU than this host's interface: known by now, after what was moved."""
    hosts = dict.fromkeys(parse_address(text).host for text in target.endpoints.get("tcp", ()))
    return [said for host in hosts if (said := about_mtu(host, path_mtu(host)))]


async def _versions(given: str, node: Sequence[str], config: Config, timeout: float) -> list[str]:
    """Accelerator libraries of both ends that do not match, whatever was measured over."""
    here = await asyncio.to_thread(installed)
    status = await ask_status(node, config, timeout) if here else {}
    findings = judge_toolkits(given, here, status.get("accelerator"))
    return [f"{one.check}: {one.found}; {one.advice}" for one in findings if one.state is not FindingState.OK]


def _about_accelerators() -> list[str]:
    """What was measured with, when it was an accelerator; loud when it was none."""
    from kvxfer.native.ascend import AscendInfo, probe

    found = probe()
    if not isinstance(found, AscendInfo):
        return []
    return [f"{found}; NO FIGURE HERE IS A HARDWARE FIGURE" if found.simulated else str(found)]


def _options(loaded: Loaded, timeout: float) -> dict[str, Any]:
    """The embedded daemon's options: what was configured, but for its place; attempts end before ``timeout``."""
    config = loaded.config
    given = {name for name, origin in loaded.origins.items() if origin != "default"}
    options = {name: getattr(config, name) for name in given.difference(_PLACE)}
    limit = max(timeout / 2, 0.05)
    return options | {"connect_s": min(config.connect_s, limit), "handshake_s": min(config.handshake_s, limit)}


async def _data_path(
    client: Client,
    target: RemoteDescriptor,
    name: str,
    pair: tuple[MemoryKind, MemoryKind],
    args: argparse.Namespace,
) -> tuple[list[PingRow], str]:
    """Latency of one block both ways, rate of the whole region; and what to say about the transport."""
    here, there = pair
    device: Any = int(args.device) if args.device.isdecimal() else args.device
    where = {"memory": "hbm", "device": device} if here is MemoryKind.HBM else {}
    ours = await client.alloc(target.length, **where)
    back = await client.alloc(BLOCK_BYTES, **where)
    written = np.frombuffer(secrets.token_bytes(target.length), dtype=np.uint8)
    await ours.write(0, written)
    block = ours[0:BLOCK_BYTES]
    started = time.perf_counter()
    info = await client.plane.prepare(target, here)
    connect_ms = (time.perf_counter() - started) * 1e3

    async def put() -> None:
        await client.put(block, target, timeout=args.timeout)

    async def get() -> None:
        await client.get(back, target, timeout=args.timeout)

    for _ in range(COMPARE_TIMES):
        await put()
        await get()
        if np.array_equal(await back.read(), written[:BLOCK_BYTES]):
            break
    else:
        hint = "is another ping to this node running? if not, do not trust this path"
        raise IntegrityError("what came back is not what was written", transport=name, hint=hint)
    between = "" if here is there is MemoryKind.DRAM else f" {here.word}-{there.word}"
    writes = await _measure(f"{name}{between} put 4 KiB", args.count, put)
    reads = await _measure(f"{name}{between} get 4 KiB", args.count, get)
    whole = await _measure("", WHOLE_COUNT, lambda: client.put(ours, target, timeout=args.timeout))
    rated = PingRow(writes.path, writes.p50, writes.p90, writes.p99, writes.worst, target.length / whole.p50 / 1e3)
    far = "over the network" if info.moves(MemoryKind.DRAM) else "between accelerators"
    way = "memory of this host" if info.same_host else far
    copies = f"{info.copies_per_byte:g} {'copy' if info.copies_per_byte == 1 else 'copies'} per byte"
    sealed = ", encrypted" if info.encrypted else ""
    return [rated, reads], f"{way}{sealed}, {copies}, connected in {connect_ms:.1f} ms"


async def _measure(path: str, count: int, once: Callable[[], Awaitable[object]]) -> PingRow:
    await once()
    taken = []
    for _ in range(count):
        started = time.perf_counter()
        await once()
        taken.append((time.perf_counter() - started) * 1e6)
    p50, p90, p99 = np.percentile(taken, [50, 90, 99])
    return PingRow(path, float(p50), float(p90), float(p99), max(taken))


def table(rows: Sequence[PingRow], whole_bytes: int) -> str:
    """The rows as text: latencies in microseconds."""
    rate_title = f"{whole_bytes / (1 << 20):g} MiB GB/s"
    width = max(14, *(len(row.path) + 2 for row in rows))
    lines = [f"{'path':<{width}}{'p50 us':>10}{'p90 us':>10}{'p99 us':>10}{'max us':>10}{rate_title:>13}"]
    for row in rows:
        rate = f"{row.rate:.2f}" if row.rate else "-"
        lines.append(f"{row.path:<{width}}{row.p50:>10.1f}{row.p90:>10.1f}{row.p99:>10.1f}{row.worst:>10.1f}{rate:>13}")
    return "\n".join(lines)


def explain(ways: Sequence[PingPath]) -> str:
    """One line per transport, in order of preference, for each pair of memories: the first usable one is taken."""
    blocks = []
    pairs = list(dict.fromkeys(way.pair for way in ways))
    for pair in pairs:
        lines = [f"{pair}:"] if len(pairs) > 1 else []
        chosen = False
        for way in (way for way in ways if way.pair == pair):
            verdict = "not usable" if not way.usable else "usable too" if chosen else "chosen"
            chosen = chosen or way.usable
            lines.append(f"{way.transport:<6}{verdict:<12}{way.why}")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


async def _breakers(node: Sequence[str], args: argparse.Namespace, loaded: Loaded) -> str:
    try:
        status = await ask_status(node, loaded.config, args.timeout)
    except KvxferError as error:
        return f"the node does not tell its status: {error}"
    return about_breakers(status.get("breakers"), status.get("breakers_open"))


def about_breakers(states: object, open_ones: object) -> str:
    """Which nodes the other node has given up for a while, and why: it refuses to try them at once."""
    if not isinstance(states, dict) or not isinstance(open_ones, list):
        return "the node says nothing of its circuit breakers"
    counts = ", ".join(f"{number} {state}" for state, number in sorted(states.items()) if number)
    return "\n".join((f"its circuit breakers: {counts or 'none yet'}", *(f"  open: {one}" for one in open_ones)))


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{text:<40}", end="" if text else "\r", file=sys.stderr, flush=True)
