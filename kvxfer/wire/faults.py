"""Errors that cross the wire: the one place where an exception becomes a message, and a peer's message an exception.

A peer's text and fields are data: they are bounded by the message's own limits, cannot replace what this side knows
(who the peer is, which operation it was), and a code that is unknown here still becomes an error that carries it.
"""

from __future__ import annotations

import math

from kvxfer.errors import Field, InternalError, KvxferError, from_code
from kvxfer.wire.fields import I64_MIN, U64_MAX
from kvxfer.wire.messages import DETAIL_CHARS_MAX, DETAIL_NAME_CHARS_MAX, DETAILS_MAX, Error, Refuse

# Names that this side fills in itself, or that are parameters of an error's constructor.
_OURS = frozenset(("self", "code", "message", "unknown_code", "op_id", "peer", "status", "retryable"))
_TEXTS = ("hint", "transport")


def error_reply(error: BaseException, rid: int = 0) -> Error:
    """The message for an exception. What is not one of kvxfer's own says its type alone: its text may hold anything."""
    known = _known(error)
    return Error(rid=rid, code=known.code, message=known.message, fields=_details(known), retryable=known.retryable)


def refusal(error: BaseException) -> Refuse:
    """The same, for a handshake that ends here."""
    known = _known(error)
    return Refuse(code=known.code, message=known.message, fields=_details(known))


def exception_of(message: Error | Refuse) -> KvxferError:
    """The typed error that a peer's message names; the root class, with the code in its fields, for an unknown code."""
    fields: dict[str, Field] = {
        name: value
        for name, value in message.fields.items()
        if name not in _OURS and (name not in _TEXTS or isinstance(value, str))
    }
    text = message.message or message.code
    if isinstance(message, Refuse):
        return from_code(message.code, f"the other side refused the connection: {text}", **fields)
    error = from_code(message.code, text, **fields)
    error.retryable = message.retryable
    return error


def _known(error: BaseException) -> KvxferError:
    return error if isinstance(error, KvxferError) else InternalError(f"internal error: {type(error).__name__}")


def _details(error: KvxferError) -> dict[str, Field]:
    texts = {name: getattr(error, name) for name in _TEXTS}
    every = {**{name: text for name, text in texts.items() if text is not None}, **error.fields}
    return {name[:DETAIL_NAME_CHARS_MAX]: _bounded(value) for name, value in list(every.items())[:DETAILS_MAX]}


def _bounded(value: object) -> Field:
    """A value that the message accepts: what does not fit becomes text."""
    if value is None or type(value) is bool:
        return value
    if type(value) is int and I64_MIN <= value <= U64_MAX:
        return value
    if type(value) is float and math.isfinite(value):
        return value
    return str(value)[:DETAIL_CHARS_MAX]
