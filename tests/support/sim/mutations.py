"""Deliberate bugs, to see that the simulator sees them.

The idea: each changes one decision of production code (or one promise of the native engine) in the way in which a
programmer could get it wrong. A simulator that stays green with one of them would be worth little.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from kvxfer.client import Client
from kvxfer.daemon.landing import StagingPool
from kvxfer.daemon.pool import Pool
from kvxfer.daemon.settling import CompletionOutbox, Confirmations
from kvxfer.dataplane import connections as reach_module
from kvxfer.dataplane.admission import Admission, SubmitQueue
from kvxfer.dataplane.transfer import Transfer
from kvxfer.flows.control import Outbox
from kvxfer.flows.incoming import Incoming
from kvxfer.flows.offer import Landing
from kvxfer.rendezvous import book as book_module
from kvxfer.rendezvous import postings as postings_module
from kvxfer.rendezvous.book import Book
from kvxfer.rendezvous.mailbox import MailboxStore
from kvxfer.rendezvous.postings import ClaimEntry, Posting
from kvxfer.rendezvous.registry import Registry
from kvxfer.tasks import Deadline
from kvxfer.wire.session import HANDSHAKE, Session
from tests.support.sim.engine import SimEngine

Change = tuple[Any, str, Any]  # owner, name, what stands there instead


def _quarantine_skipped() -> list[Change]:
    """Blocks are free as soon as their user has left, not when the engine is quiet."""
    release = Client.release_when_quiet

    def at_once(client: Any, taken: Any, quiet: Any) -> Any:
        client.reservations.release(taken)
        held = client.reservations.acquire([], "nobody")
        return release(client, held, quiet)

    def settled(client: Any, taken: Any, transfers: Any) -> None:
        client.reservations.release(taken)

    return [(Client, "release_when_quiet", at_once), (Client, "release_when_settled", settled)]


def _generation_not_compared() -> list[Change]:
    """A descriptor of an earlier registration meets the import of the present one."""

    def key_of(found: Any) -> Any:
        return (found.engine_id, found.grant, 0, found.length, found.access, b"")

    def selection_key_of(found: Any, number: int) -> Any:
        return (*key_of(found), number)

    return [(reach_module, "key_of", key_of), (reach_module, "selection_key_of", selection_key_of)]


def _permit_returned_twice() -> list[Change]:
    """The end of an operation gives its place back two times."""
    done = Admission.done

    def twice(admission: Any, slot: Any) -> Any:
        state = admission._peers[slot.peer]
        state.ops -= 1
        state.bytes -= slot.bytes
        return done(admission, slot)

    return [(Admission, "done", twice)]


def _running_permit_given_up() -> list[Change]:
    """Who leaves the line although it was let in already gives nothing back."""

    def leave(line: Any, work: Any) -> bool:
        slot = work.slot
        if work not in line.everybody():
            return False
        if slot in line._queued:
            del line._queued[slot]
            line._started(line.admission.abandon(slot))
        line.going.pop(work, None)
        line.engine_full.pop(work, None)
        line._forget(work)
        work.slot = None
        return True

    return [(SubmitQueue, "leave", leave)]


def _visible_early() -> list[Change]:
    """The first layer that arrives counts as all of them."""
    on_data = Landing._on_data

    def early(landing: Any, event: Any) -> None:
        on_data(landing, event)
        if landing._seen and not landing._closed:
            landing._seen.update(range(landing._cache.layout.geometry.layers))
            landing._commit()
            landing._wake()

    return [(Landing, "_on_data", early)]


def _lease_never_expires() -> list[Change]:
    """Nobody looks at leases."""
    expire = Book.expire

    def only_waiters(book: Any, now: float) -> Any:
        before = dict(book._timeline._current)
        for key in before:
            if key[0] == "posting":
                book._timeline.set(key, now + 1000.0)
        return expire(book, now)

    return [(Book, "expire", only_waiters)]


def _lost_worker_not_told() -> list[Change]:
    """A dead worker's claimants are not told."""
    gone = Registry._worker_gone

    def silent(registry: Any, now: float, party: Any) -> Any:
        gone(registry, now, party)
        return []

    return [(Registry, "_worker_gone", silent)]


def _claim_granted_twice() -> list[Change]:
    """A ticket has one place more than its owner gave it."""

    def free(posting: Any) -> bool:
        places = posting.places + (posting.kind == "ticket")
        return not posting.places or posting.spent + len(posting.claims) < places

    return [(Posting, "free", property(free))]


def _one_commit_for_all() -> list[Change]:
    """The first push that is committed commits all."""

    def complete(incoming: Any) -> bool:
        return bool(incoming.committed)

    return [(Incoming, "complete", property(complete))]


def _written_is_committed() -> list[Change]:
    """A landing does not wait for the commit of a push that has written its part."""

    def complete(incoming: Any) -> bool:
        return bool(incoming._here.complete and incoming.committed)

    return [(Incoming, "complete", property(complete))]


def _overlap_granted() -> list[Change]:
    """What others write already is granted once more."""
    part_of = postings_module.part_of

    def again(posting: Any, boxes: Any) -> Any:
        taken, posting.taken = posting.taken, []
        try:
            return part_of(posting, boxes)
        finally:
            posting.taken = taken

    return [(book_module, "part_of", again)]


def _deadline_ignored() -> list[Change]:
    """The time that is left never becomes less."""
    return [
        (Deadline, "remaining", lambda _: 3600.0),
        (Transfer, "arm", lambda *_: None),
        (Landing, "_deadline_fired", lambda _: None),
    ]


def _mail_dropped() -> list[Change]:
    """A message that nobody listens for is forgotten."""
    mail = MailboxStore.mail

    def drop(boxes: Any, now: float, sender: Any, channel: str, data: bytes, source: str) -> Any:
        box = boxes._channels.get(channel)
        return [] if box is None or box.listener is None else mail(boxes, now, sender, channel, data, source)

    return [(MailboxStore, "mail", drop)]


def _stale_incarnation() -> list[Change]:
    """A restarted daemon inherits the claims of the one before it."""

    def adopt(book: Any, party: Any) -> Any:
        back = list(book._orphans.get(party.node_id, {}).values())
        for claim in back:
            book._forget_orphan(claim)
        book.reassign(back, party)
        return []

    return [(Book, "reconcile_orphans", adopt)]


def _secret_not_compared() -> list[Change]:
    """Any secret opens a ticket."""

    class Equal:
        @staticmethod
        def compare_digest(_: Any, __: Any) -> bool:
            return True

    return [(book_module, "hmac", Equal)]


def _cancel_too_early() -> list[Change]:
    """`cancel` returns although the engine still moves bytes."""

    async def cancel(transfer: Any) -> Any:
        from kvxfer.errors import TransferCancelled

        transfer.request_cancel(TransferCancelled("cancelled"))
        return transfer

    return [(Transfer, "cancel", cancel)]


def _notification_before_bytes() -> list[Change]:
    """The engine tells the owner before the bytes are there."""
    take = SimEngine._take_piece

    def early(engine: Any, op: Any, rows: Any, contents: Any, last: bool) -> None:
        if op.notify is not None and not op.told and not last:
            op.told = True
            engine._notified(op.source.grant, op.notify)
            op.notify = None
        take(engine, op, rows, contents, last)

    return [(SimEngine, "_take_piece", early)]


def _address_kept() -> list[Change]:
    """A node is looked for where it was first."""
    peer = Pool._peer

    def kept(pool: Any, addresses: Any, node_id: str) -> Any:
        known = pool._peers.get(node_id)
        return peer(pool, known.addresses if known is not None else addresses, node_id)

    return [(Pool, "_peer", kept)]


def _silence_trusted() -> list[Change]:
    """Nobody asks a silent peer whether it is still there."""
    deadline = Session.deadline

    def patient(session: Any) -> Any:
        due = deadline(session)
        return due if due is None or session.state in HANDSHAKE else due + 1000.0

    return [(Session, "deadline", patient)]


def _another_clock() -> list[Change]:
    """Deadlines are counted by the time of the world, as if all hosts had one clock."""

    def after(_: Any, seconds: float) -> Any:
        loop: Any = asyncio.get_running_loop()
        return Deadline(loop.now + seconds)

    return [(Deadline, "after", classmethod(after))]


def _newest_version_taken() -> list[Change]:
    """The acceptor takes the newest version that the dialler offers."""
    make = Session._make_welcome

    def newest(session: Any, hello: Any, _: int) -> Any:
        return make(session, hello, hello.version_max)

    return [(Session, "_make_welcome", newest)]


def _settlement_said_once() -> list[Change]:
    """A settlement that found nobody is not said again."""
    return [(CompletionOutbox, "keep", lambda *_: None)]


def _lost_grant_kept() -> list[Change]:
    """The owner of a claim does not ask whether its grant arrived."""
    return [(Confirmations, "ask", lambda *_: None)]


def _grant_denied_too_early() -> list[Change]:
    """A node says that it does not know a claim while the grant may still arrive, over the old connection."""

    async def at_once(_: Any, __: str) -> None:
        pass

    return [(Confirmations, "_end_of", at_once), (Registry, "unknown_to_us", lambda _, __, claims: list(claims))]


def _settlement_forgotten() -> list[Change]:
    """A worker forgets a settlement as soon as it has told its daemon."""
    return [(Outbox, "add", lambda *_: None)]


def _given_up_grant_kept() -> list[Change]:
    """Who gives up a claim that was granted meanwhile is not listened to: it says so again when the answer is there."""
    give_up = Book.give_up

    def waiting_only(book: Any, now: float, what: Any) -> Any:
        return [] if isinstance(what, ClaimEntry) else give_up(book, now, what)

    return [(Book, "give_up", waiting_only)]


def _given_up_landing_made() -> list[Change]:
    """Who gives up a landing while its memory is allocated gets it all the same."""
    return [(StagingPool, "give_up", lambda pool, link, request: pool._line.give_up(link, request))]


MUTATIONS: Mapping[str, Callable[[], list[Change]]] = {
    "quarantine_skipped": _quarantine_skipped,
    "generation_not_compared": _generation_not_compared,
    "permit_returned_twice": _permit_returned_twice,
    "running_permit_given_up": _running_permit_given_up,
    "visible_early": _visible_early,
    "lease_never_expires": _lease_never_expires,
    "lost_worker_not_told": _lost_worker_not_told,
    "claim_granted_twice": _claim_granted_twice,
    "one_commit_for_all": _one_commit_for_all,
    "written_is_committed": _written_is_committed,
    "overlap_granted": _overlap_granted,
    "deadline_ignored": _deadline_ignored,
    "mail_dropped": _mail_dropped,
    "stale_incarnation": _stale_incarnation,
    "secret_not_compared": _secret_not_compared,
    "cancel_too_early": _cancel_too_early,
    "notification_before_bytes": _notification_before_bytes,
    "address_kept": _address_kept,
    "settlement_said_once": _settlement_said_once,
    "silence_trusted": _silence_trusted,
    "another_clock": _another_clock,
    "newest_version_taken": _newest_version_taken,
    "lost_grant_kept": _lost_grant_kept,
    "grant_denied_too_early": _grant_denied_too_early,
    "settlement_forgotten": _settlement_forgotten,
    "given_up_grant_kept": _given_up_grant_kept,
    "given_up_landing_made": _given_up_landing_made,
}
