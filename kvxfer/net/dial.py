"""Reaching the other end of a control connection: candidate addresses, tried staggered, each failure kept.

The idea: a name is resolved first, so that every numeric address is a candidate of its own; a silent one (a dead
interface, a black hole, an impostor that accepts and says nothing) delays the next by a quarter of a second, not by its
whole time-out. What a peer *says* (not kvxfer, wrong secret, another node) outweighs what the network says when nothing
worked.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Generic, TypeVar

from kvxfer.addresses import Address, is_numeric, parse_address
from kvxfer.errors import (
    NO_PORTS_HINT,
    AuthenticationError,
    BusyError,
    IdentityMismatch,
    KvxferError,
    NotAllowed,
    PeerLost,
    PeerUnreachable,
    ProtocolError,
    ResourceExhausted,
    UsageError,
)
from kvxfer.tasks import TaskOwner

# -- try several ways to the same end, staggered, and keep the first that works ----------------------------------------
# Attempts start in order of preference: the next one when the last one failed, or when it has been silent for a
# while. Every failure is kept, so that "unreachable" can say why for each candidate. Whatever does not win is
# cancelled and awaited before the race returns; a second winner is handed to ``discard``.


T = TypeVar("T")
Attempt = tuple[str, Callable[[], Awaitable[T]]]
Failures = dict[str, Exception]


class _Race(Generic[T]):
    def __init__(
        self, attempts: Sequence[Attempt[T]], stagger_s: float, discard: Callable[[T], None], failures: Failures
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._attempts = attempts
        self._stagger_s = stagger_s
        self._discard = discard
        self._owner = TaskOwner("race")
        self._started = self._failed = 0
        self._timer: asyncio.TimerHandle | None = None
        self._winner: asyncio.Future[T | None] = self._loop.create_future()
        self._failures = failures

    def _start_next(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._winner.done() or self._started == len(self._attempts):
            return
        label, attempt = self._attempts[self._started]
        self._started += 1
        self._owner.spawn(self._run(label, attempt), label)
        if self._started < len(self._attempts):
            self._timer = self._loop.call_later(self._stagger_s, self._start_next)

    async def _run(self, label: str, attempt: Callable[[], Awaitable[T]]) -> None:
        try:
            value = await attempt()
        except (KvxferError, OSError) as failure:
            self._failures[label] = failure
            self._failed += 1
            if self._failed == len(self._attempts) and not self._winner.done():
                self._winner.set_result(None)
            self._start_next()
            return
        if self._winner.done():
            self._discard(value)
        else:
            self._winner.set_result(value)

    async def run(self) -> T | None:
        self._start_next()
        value: T | None = None
        try:
            value = await self._winner
        except asyncio.CancelledError:
            if self._winner.done() and not self._winner.cancelled():
                value = self._winner.result()
            self._drop(value)
            raise
        finally:
            if self._timer is not None:
                self._timer.cancel()
            try:
                await self._owner.aclose()
            except asyncio.CancelledError:
                self._drop(value)
                raise
        return value

    def _drop(self, value: T | None) -> None:
        if value is not None:
            self._discard(value)


async def first_success(
    attempts: Sequence[Attempt[T]], *, stagger_s: float, discard: Callable[[T], None], failures: Failures
) -> T | None:
    """The first value that an attempt returned, None when all failed.

    Failures are put into ``failures`` by label as they happen, so they are known even when a time limit ends the race.
    """
    if len(attempts) == 1:  # the usual case needs no task
        label, attempt = attempts[0]
        try:
            return await attempt()
        except (KvxferError, OSError) as failure:
            failures[label] = failure
            return None
    return await _Race(attempts, stagger_s, discard, failures).run()


STAGGER_S = 0.25  # the next candidate starts when the last one has been silent for this long
CANDIDATES_MAX = 8
RESOLVED_MAX = 16  # numeric addresses that the candidates may resolve to, together
# What a peer said, the most telling first; anything else means that the network could not even ask.
TELLING = (AuthenticationError, NotAllowed, IdentityMismatch, ProtocolError, BusyError)
OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL)


def candidates(texts: Sequence[str]) -> tuple[Address, ...]:
    """The parsed candidates, in order, without repetitions. Raises `UsageError` for what is no dialable address."""
    if not 1 <= len(texts) <= CANDIDATES_MAX:
        raise UsageError(f"1 to {CANDIDATES_MAX} candidate addresses", value=len(texts))
    parsed = tuple(dict.fromkeys(parse_address(text) for text in texts))
    for address in parsed:
        if address.is_wildcard or address.port == 0:
            raise UsageError("nobody can dial this address", address=str(address), hint="a host and a port above 0")
    return parsed


async def resolve(addresses: Iterable[Address]) -> tuple[list[Address], Failures]:
    """Numeric addresses for all candidates (families of one name alternate as the resolver orders them)."""
    loop = asyncio.get_running_loop()
    found: dict[Address, None] = {}
    failures: Failures = {}
    for address in addresses:
        if is_numeric(address.host.partition("%")[0]):
            found[address] = None
            continue
        try:
            rows = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        except OSError as failure:
            failures[str(address)] = failure
            continue
        for row in rows:
            found[Address(str(row[4][0]), address.port)] = None
    return list(found)[:RESOLVED_MAX], failures


async def dial_any(
    texts: Sequence[str],
    attempt: Callable[[Address], Awaitable[T]],
    *,
    timeout: float,
    discard: Callable[[T], None],
) -> T:
    """The first candidate that ``attempt`` succeeds with, within ``timeout`` seconds in all.

    Raises `PeerUnreachable` with each candidate's reason; or what a peer refused with, when one was reached.
    """
    wanted = candidates(texts)
    failures: Failures = {}
    try:
        async with asyncio.timeout(timeout):
            addresses, failures = await resolve(wanted)
            if addresses:
                tries = [(str(address), _bound(attempt, address)) for address in addresses]
                value = await first_success(tries, stagger_s=STAGGER_S, discard=discard, failures=failures)
                if value is not None:
                    return value
    except TimeoutError:
        for address in wanted:
            failures.setdefault(str(address), TimeoutError(f"no answer within {timeout:g} s"))
    raise unreachable(failures)


def _bound(attempt: Callable[[Address], Awaitable[T]], address: Address) -> Callable[[], Awaitable[T]]:
    return lambda: attempt(address)


def unreachable(failures: Failures) -> KvxferError:
    """One error out of the reasons of all candidates."""
    reasons = {label: reason(failure) for label, failure in failures.items()}
    for kind in TELLING:
        for label, failure in failures.items():
            if isinstance(failure, kind):
                failure.peer = failure.peer or label
                others = {other: why for other, why in reasons.items() if other != label}
                failure.fields.update(others)
                return failure
    hint = "is `kvxfer serve` running there, and is this its `listen` address?"
    if any(isinstance(failure, PeerLost) for failure in failures.values()):
        hint = (
            "something took the connection and hung up: is this the port of `listen`, not one of `http` or of data? The"
            " log of a daemon there says whom it refused"
        )
    error: KvxferError = PeerUnreachable("no candidate address answers", hint=hint)
    if any(isinstance(failure, OSError) and failure.errno in OUT_OF_DESCRIPTORS for failure in failures.values()):
        error = ResourceExhausted("this process cannot open another connection", retryable=True)
        if any(isinstance(failure, OSError) and failure.errno == errno.EADDRNOTAVAIL for failure in failures.values()):
            error.hint = NO_PORTS_HINT
    error.fields.update(reasons)
    return error


def reason(failure: Exception) -> str:
    """Why one candidate failed, in a few words."""
    if isinstance(failure, KvxferError):
        return failure.message
    if isinstance(failure, TimeoutError):
        return str(failure) or "timed out"
    if isinstance(failure, OSError):
        # the event loops put their own words into strerror; the system's are shorter and the same in both
        system = failure.errno is not None and failure.errno > 0 and not isinstance(failure, socket.gaierror)
        return os.strerror(failure.errno or 0) if system else failure.strerror or str(failure)
    return repr(failure)
