"""`kvxfer serve`: run this node's daemon until SIGTERM or SIGINT, then drain.

The first of SIGTERM and SIGINT withdraws postings, refuses new work and waits up to `drain_s` for what is live; the
second one ends the process at once. SIGINT counts also where it was ignored at the start, as in a job that a shell put
into the background: a daemon ends with the script that started it. SIGHUP reads the files of secret and certificate
again. When the daemon is up it prints one line with everything that another program needs to reach it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import resource
import signal

import uvloop

from kvxfer.cli.logs import configure_logging
from kvxfer.cli.options import add_config_flags, load_from
from kvxfer.config import Config
from kvxfer.server import Server

log = logging.getLogger("kvxfer.serve")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "--peer",
        metavar="HOST:PORT[,HOST:PORT]",
        action="append",
        default=[],
        help="connect to this node at the start and stay connected; candidate addresses of one node are separated by "
        "commas; may be repeated",
    )
    parser.add_argument(
        "--wait-for-peers",
        action="store_true",
        help="/readyz says 503, and who is missing, until every --peer was reached once",
    )
    parser.add_argument("--json", action="store_true", help="print the line that says what was bound as JSON")
    add_config_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop; 0 after a drain."""
    loaded = load_from(args)
    configure_logging(loaded.config.log_level, loaded.config.log_format)
    for warning in loaded.warnings:
        log.warning("%s", warning)
    raise_descriptor_limit()
    if not loaded.config.core_dumps:
        forbid_core_dumps()
    peers = [peer.split(",") for peer in args.peer]
    work = serve(loaded.config, peers=peers, as_json=args.json, wait_for_peers=args.wait_for_peers)
    uvloop.run(work)
    return 0


def raise_descriptor_limit() -> None:
    """Use as many descriptors as this user may: each link, region and worker holds some."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def forbid_core_dumps() -> None:
    """Python's memory holds the node's secrets, and nothing of it can be left out of a dump.

    A limit of one byte is too small for a file, and the one value for which the kernel does not start a program that
    takes dumps either (core(5): a pattern that begins with ``|``). The hard limit stays.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0 if hard == 0 else 1, hard))


async def serve(config: Config, *, peers: list[list[str]], as_json: bool, wait_for_peers: bool = False) -> None:
    """Run a daemon until a signal; the second signal ends the process."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)
        log.info("%s: draining for up to %g s", signal.Signals(number).name, config.drain_s)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    async with Server(config) as server:
        loop.add_signal_handler(signal.SIGHUP, server.reload_credentials)
        server.waits_for_peers = wait_for_peers
        for peer in peers:
            server.preconnect(peer)
        print(announcement(server, as_json=as_json), flush=True)
        await stop.wait()
        await server.drain()
        await server.aclose("the daemon was told to stop")
    log.info("stopped")


def announcement(server: Server, *, as_json: bool) -> str:
    """What was bound, for people or programs."""
    http = f"http://{server.http_address}" if server.http_address else ""
    facts = {
        "node_id": server.node_id,
        "incarnation": server.incarnation,
        "pid": os.getpid(),
        "addresses": list(server.addresses),
        "socket": str(server.socket_path),
        "http": http,
        "transports": [info.name for info in server.engine.transports],
    }
    if as_json:
        return json.dumps(facts)
    where = ", ".join(server.addresses)
    transports = ", ".join(info.name for info in server.engine.transports)
    metrics = f", metrics {http}/metrics" if http else ""
    return f"kvxfer: ready: peers {where}, workers {server.socket_path}{metrics}, transports {transports}"
