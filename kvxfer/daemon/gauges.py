"""The daemon's own state as samples for `/metrics`: one place that says what is counted and what it means."""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvxfer.daemon.identity import package_version
from kvxfer.daemon.metrics import Distribution, Sample
from kvxfer.logs import logger
from kvxfer.rendezvous.tally import BUCKETS_S
from kvxfer.wire.session import VERSIONS

if TYPE_CHECKING:
    from kvxfer.config import Config
    from kvxfer.server import Server

COUNTS = {
    "workers": "Workers linked to this daemon.",
    "postings": "Live offers, tickets, named regions and landings.",
    "posting_bytes": "Bytes of the bodies of all postings.",
    "claims": "Live claims on postings of this node.",
    "orphans": "Live claims whose claimant's daemon is out of reach.",
    "waiting": "Claims that wait for their posting.",
    "routes": "Live claims of this node's workers on postings of other nodes.",
    "channels": "Channels that hold or listen for messages.",
    "held_messages": "Messages that nobody has received yet.",
    "held_bytes": "Bytes of the messages that nobody has received yet.",
}

log = logger(__name__)


def samples(server: Server) -> Iterator[Sample | Distribution]:
    """Everything but the engines' counters. A part that cannot be told now leaves out nothing but itself."""
    failed = 0
    for part in (_program, _counts, _reports, _links, _credentials, _pool, _landings, _claims, _oddities):
        try:
            found = list(part(server))
        except Exception:  # whatever is wrong with one part, an operator needs the others now
            failed += 1
            log.exception("a part of the metrics cannot be told: %s", part.__name__.strip("_"))
        else:
            yield from found
    text = "Parts of this page that are missing because they could not be told; the log says why."
    yield Sample(name="kvxfer_metrics_missing", help=text, value=failed)


def _program(server: Server) -> Iterator[Sample]:
    build = {"version": package_version(), "protocol": str(VERSIONS[1]), "python": platform.python_version()}
    yield Sample(name="kvxfer_build_info", help="The running program.", value=1, labels=build)
    yield Sample(
        name="kvxfer_start_time_seconds", help="When this incarnation began, Unix time.", value=server.started_at
    )
    yield Sample(name="kvxfer_ready", help="1 while this daemon accepts work.", value=server.ready)
    text = "1 when what tcp moves is encrypted (tcp_encryption)."
    yield Sample(name="kvxfer_tcp_encryption", help=text, value=server.config.encrypts)


def _counts(server: Server) -> Iterator[Sample]:
    counts = server.registry.counts()
    for name, text in COUNTS.items():
        own = 1 if name == "workers" else 0  # the daemon takes part in its registry like a worker
        yield Sample(name=f"kvxfer_{name}", help=text, value=getattr(counts, name) - own)
    yield ignore_fingerprint(server.config)


def _oddities(server: Server) -> Iterator[Sample]:
    for (message, reason), value in server.registry.unexpected.items():
        labels = {"message": message, "reason": reason}
        text = "Messages that fitted no state; harmless."
        yield Sample(name="kvxfer_unexpected", help=text, value=value, labels=labels, counter=True)
    text = "Times that an engine's counters could not be read."
    yield Sample(name="kvxfer_counters_unreadable", help=text, value=server.engines.unreadable, counter=True)


def ignore_fingerprint(config: Config) -> Sample:
    """The override of the operator, visible wherever it is set."""
    text = "1 while this node's configuration lets caches of different models be moved (ignore_fingerprint)."
    return Sample(name="kvxfer_ignore_fingerprint", help=text, value=config.ignore_fingerprint)


def _reports(server: Server) -> Iterator[Sample]:
    reports = server.dispatcher.reports
    text = "Workers that move caches of different models (ignore_fingerprint in their configuration)."
    yield Sample(name="kvxfer_workers_ignore_fingerprint", help=text, value=reports.ignoring_fingerprints)
    text = "Workers that cannot work; /readyz says why."
    yield Sample(name="kvxfer_workers_unready", help=text, value=len(reports.unready))
    for kind, reason, value in reports.unexpected():
        text = "Notices on the data path that fitted nothing, of all workers; harmless."
        labels = {"type": kind, "reason": reason}
        yield Sample(name="kvxfer_unexpected_notifications", help=text, value=value, labels=labels, counter=True)


def _links(server: Server) -> Iterator[Sample]:
    live = {
        "worker": len(server.workers.links),
        "peer_in": len(server.peers.links),
        "peer_out": len(server.pool.links),
        "half_open": server.workers.half_open + server.peers.half_open,
    }
    for kind, value in live.items():
        yield Sample(name="kvxfer_links", help="Control connections.", value=value, labels={"kind": kind})
    for side, acceptor in (("unix", server.workers), ("tcp", server.peers)):
        text = "Incoming control connections that proved themselves."
        labels = {"listener": side}
        yield Sample(name="kvxfer_handshakes", help=text, value=acceptor.handshakes, labels=labels, counter=True)
        for reason, value in acceptor.refused.items():
            text = "Incoming control connections that were refused, or failed before they had proved themselves."
            labels = {"listener": side, "reason": reason}
            yield Sample(name="kvxfer_links_refused", help=text, value=value, labels=labels, counter=True)
    for (role, reason), value in server.links_ended.items():
        labels = {"role": role, "reason": reason}
        text = "Control connections that ended, by the other side's role and the reason."
        yield Sample(name="kvxfer_links_ended", help=text, value=value, labels=labels, counter=True)
    text = "Links that were dropped because the other side did not read."
    yield Sample(name="kvxfer_links_backpressured", help=text, value=server.dispatcher.backpressured, counter=True)
    text = "Events for workers that did not read, merged into later ones."
    yield Sample(name="kvxfer_events_merged", help=text, value=server.dispatcher.events.merged, counter=True)
    text = "Node ids that several daemons have at the same time; the log names them."
    yield Sample(name="kvxfer_twin_nodes", help=text, value=len(server.dispatcher.nodes.twins))
    text = "Bytes that have been received of control messages that are not complete."
    yield Sample(name="kvxfer_link_unfinished_bytes", help=text, value=server.dispatcher.queues.unfinished)
    text = "Bytes that wait to be sent on all control connections."
    yield Sample(name="kvxfer_link_queued_bytes", help=text, value=server.dispatcher.queues.total)
    text = "Settlements that another node could not be told yet; they are repeated."
    yield Sample(name="kvxfer_unsettled", help=text, value=len(server.forwarder.unsettled))
    text = "Replies that came after their request had been given up."
    yield Sample(name="kvxfer_late_replies", help=text, value=server.late_replies, counter=True)


def _credentials(server: Server) -> Iterator[Sample]:
    known = server.credentials
    for what, files in (("tls", "certificates"), ("secret", "the shared secret"), ("node_keys", "this node's keys")):
        text = f"New files of {files} that could not be used; the old ones stayed in force."
        name = f"kvxfer_{what}_reload_failures"
        yield Sample(name=name, help=text, value=known.failures[what], counter=True)
    text = "Seconds until this node's certificate is no longer valid; negative afterwards, infinite without one."
    left_s = math.inf if known.expires_in_s is None else known.expires_in_s
    yield Sample(name="kvxfer_tls_certificate_expires_seconds", help=text, value=left_s)


def _claims(server: Server) -> Iterator[Sample | Distribution]:
    tally = server.registry.tally
    for (kind, reason), value in tally.ended.items():
        text = "Claims on postings of this node that ended, each one once: a push (offer) or a pull (ticket) is one."
        labels = {"kind": kind, "reason": reason}
        yield Sample(name="kvxfer_claims_ended", help=text, value=value, labels=labels, counter=True)
    for (kind, reason), value in tally.refused.items():
        text = "Claims on postings of this node that were refused at once; lease_expired: a read that came too late."
        labels = {"kind": kind, "reason": reason}
        yield Sample(name="kvxfer_claims_refused", help=text, value=value, labels=labels, counter=True)
    for kind, durations in tally.durations.items():
        yield Distribution(
            name="kvxfer_claim_seconds",
            help="Life of the claims that ended, from the match of both sides to the end.",
            bounds_s=BUCKETS_S,
            counts=durations.counts,
            sum_s=durations.sum_s,
            labels={"kind": kind},
        )


def _pool(server: Server) -> Iterator[Sample | Distribution]:
    pool = server.pool
    for state, value in pool.states().items():
        text = "Known peers by the state of their circuit breaker."
        yield Sample(name="kvxfer_breaker_peers", help=text, value=value, labels={"state": state})
    for name, text, value in (
        ("pool_connects", "Attempts to connect to peers.", pool.connects),
        ("pool_connect_failures", "Attempts to connect to peers that failed.", pool.connect_failures),
        ("pool_evicted", "Links that were closed to make room for another peer.", pool.evicted),
    ):
        yield Sample(name=f"kvxfer_{name}", help=text, value=value, counter=True)

    yield Distribution(
        name="kvxfer_connect_seconds",
        help="Time from dialling a peer to the end of its handshake, of those that succeeded.",
        bounds_s=BUCKETS_S,
        counts=pool.connect_times.counts,
        sum_s=pool.connect_times.sum_s,
        labels={},
    )
    yield Sample(
        name="kvxfer_peers_unreached",
        help="Peers that this daemon shall stay connected to, and is not.",
        value=len(pool.unreached()),
    )


def _landings(server: Server) -> Iterator[Sample]:
    pool = server.landings
    for name, text, value in (
        ("landings", "Landings that are written, wait for adoption or are adopted.", pool.live),
        ("landings_quarantined", "Landings that have ended, and that a peer may still reach.", pool.quarantined),
    ):
        yield Sample(name=f"kvxfer_{name}", help=text, value=value)
    for part in pool.parts:
        on_host = part.device is None
        labels = {"memory": "dram" if on_host else "hbm", "device": "" if on_host else str(part.device)}
        for name, text, value in (
            ("landing_used_bytes", "Bytes of the landing pool in use, quarantined ones included.", part.used_bytes),
            ("landing_kept_bytes", "Bytes of the landing pool that are allocated and free.", part.kept_bytes),
            ("landing_bytes_max", "Capacity of the landing pool.", part.bytes_max),
        ):
            yield Sample(name=f"kvxfer_{name}", help=text, value=value, labels=labels)
    for name, text, value in (
        ("landings_committed", "Landings that were written to their end.", pool.landed),
        ("landings_refused", "Landings that were refused because the pool was full.", pool.refused),
    ):
        yield Sample(name=f"kvxfer_{name}", help=text, value=value, counter=True)
