"""Registering several pieces of memory as one step: all of them or none."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from kvxfer.errors import KvxferError, RegistrationError, TransportError, UsageError
from kvxfer.memory.region import Region
from kvxfer.native.status import Status

SOURCES_MAX = 65536
# What the kernel would have said, where the engine knew it by a code of its own.
_ERRNO = {Status.NOMEM: "ENOMEM", Status.FDS: "EMFILE", Status.MEMLOCK: "ENOMEM", Status.SHM_SPACE: "ENOSPC"}


async def register_all(
    register: Callable[[Any], Awaitable[Region]], sources: object, on_failure: Callable[[KvxferError], None]
) -> tuple[Region, ...]:
    """See `Client.register_many`. Cancelled, it gives back what it has as well."""
    if not isinstance(sources, Sequence) or isinstance(sources, str | bytes) or not 0 < len(sources) <= SOURCES_MAX:
        raise UsageError("register_many takes a sequence of sources", field="sources", limit=SOURCES_MAX)
    made: list[Region] = []
    try:
        for source in sources:
            made.append(await register(source))  # noqa: PERF401 -- what was made before a failure has to be known
    except BaseException as error:
        await _give_back(made)
        if not isinstance(error, KvxferError):
            raise
        why = _named(error, sources, len(made))
        on_failure(why)
        raise why from error
    return tuple(made)


async def _give_back(made: Sequence[Region]) -> None:
    """Nobody else has seen these regions, so nothing can hold them; goes on when its caller is cancelled again."""
    quiet = asyncio.gather(*(region.release(drain=True) for region in made), return_exceptions=True)
    await asyncio.shield(quiet)


def _named(error: KvxferError, sources: Sequence[Any], index: int) -> KvxferError:
    """The error with what is known about the place: of this node as a `RegistrationError`, of the call as it is."""
    size = getattr(sources[index], "nbytes", None)
    found = error
    if isinstance(error, TransportError) and not isinstance(error, RegistrationError):
        found = RegistrationError(error.message, status=error.status, transport=error.transport, hint=error.hint)
        found.fields |= error.fields
    found.fields |= {
        "index": index,
        "registered": index,
        "of": len(sources),
        "bytes": error.fields.get("length", size if isinstance(size, int) else None),
    }
    found.fields.setdefault("errno", _ERRNO.get(Status(error.status)) if error.status in _ERRNO else None)
    found.hint = found.hint or "what was registered before it was given back; `kvxfer doctor` shows this node's limits"
    return found
