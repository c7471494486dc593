"""Every message of the control plane: its number, its fields and their bounds.

Declarations, and what turns errors and lists of claims into fields; how messages are checked, encoded and decoded
stands in `codec`. Numbers and field names never change. All there is belongs to version 1 of the protocol. What a later
version adds will say so: a message by ``since``, a field of an older message by `codec.Since`. A message is sent to
those alone who speak its version (`Session.speaks`); fields that are unknown to a receiver are ignored, so a later
field may only say what can be left out, or has to be looked at in the handshake (`unread`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from kvxfer.config import (
    CHANNEL_CHARS_MAX,
    CLAIM_NUMBER_MAX,
    ECHO_BYTES_MAX,
    KEY_CHARS_MAX,
    NAMESPACE_CHARS_MAX,
    POSTING_BODY_BYTES_MAX,
)
from kvxfer.coverage import Box
from kvxfer.descriptors import CANDIDATES_MAX, ENDPOINT_CHARS_MAX
from kvxfer.errors import Field, InternalError, KvxferError, ProtocolError, from_code
from kvxfer.wire.codec import (
    I64_MIN,
    U64_MAX,
    Blob,
    BoxList,
    Flag,
    Hex,
    OneOf,
    Prose,
    Scalars,
    Seconds,
    Text,
    TextList,
    UInt,
    numbered,
)
from kvxfer.wire.codec import MESSAGES as MESSAGES
from kvxfer.wire.codec import Message as Message
from kvxfer.wire.codec import Unknown as Unknown
from kvxfer.wire.codec import decode as decode
from kvxfer.wire.codec import encode as encode

VERSION_MAX = 65535
FEATURES_MAX, FEATURE_CHARS_MAX = 32, 64
NAME_CHARS_MAX = 128
PATH_CHARS_MAX = 255
CODE_CHARS_MAX = 64
PROSE_CHARS_MAX = 1024
DETAILS_MAX, DETAIL_NAME_CHARS_MAX, DETAIL_CHARS_MAX = 32, 64, 1024
NONCE_BYTES, PROOF_BYTES, POSTING_SECRET_BYTES = 32, 32, 16
SECONDS_MAX = 31_536_000.0  # a year: longer than anything may last
VALUE_BYTES_MAX = 64 << 10
MAIL_DATA_BYTES_MAX = 16 << 20  # the ceiling of the option mail_bytes_max
CLAIMED_BODY_BYTES_MAX = POSTING_BODY_BYTES_MAX + (
    16 << 10
)  # a landing adds its descriptor to the body that was posted
STATUS_BODY_BYTES_MAX = 1 << 20
CONFIRM_BYTES_MAX = VALUE_BYTES_MAX  # what is asked fits the answer
LINK_ROLES = ("worker", "peer", "tool")
POSTING_KINDS = ("offer", "ticket", "region", "landing")
BOXES_MAX = 16
OUTCOMES = ("done", "failed", "cancelled")
POSTING_EVENTS = ("claimed", "settled", "lost", "orphaned", "expired", "withdrawn")

Rid = Annotated[int, UInt()]
Identity = Annotated[str, Hex(32)]
IdentityOrAny = Annotated[str, Hex(32, empty=True)]
Version = Annotated[int, UInt(VERSION_MAX, min=1)]
Features = Annotated[tuple[str, ...], TextList(FEATURES_MAX, FEATURE_CHARS_MAX)]
Nodes = Annotated[tuple[str, ...], TextList(CANDIDATES_MAX, ENDPOINT_CHARS_MAX)]
Nonce = Annotated[bytes, Blob(NONCE_BYTES, min=NONCE_BYTES)]
ProofBytes = Annotated[bytes, Blob(PROOF_BYTES, min=PROOF_BYTES, empty=True)]
PostingSecret = Annotated[bytes, Blob(POSTING_SECRET_BYTES, min=POSTING_SECRET_BYTES)]
PostingSecretOrNone = Annotated[bytes, Blob(POSTING_SECRET_BYTES, min=POSTING_SECRET_BYTES, empty=True)]
Code = Annotated[str, Text(CODE_CHARS_MAX, min=1)]
CodeOrNone = Annotated[str, Text(CODE_CHARS_MAX)]
Explanation = Annotated[str, Prose(PROSE_CHARS_MAX)]
Details = Annotated[Mapping[str, Field], Scalars(DETAILS_MAX, DETAIL_NAME_CHARS_MAX, DETAIL_CHARS_MAX)]
Key = Annotated[str, Text(KEY_CHARS_MAX, min=1)]
KeyOrNone = Annotated[str, Text(KEY_CHARS_MAX)]
Channel = Annotated[str, Text(CHANNEL_CHARS_MAX, min=1)]
ClaimNumber = Annotated[int, UInt(CLAIM_NUMBER_MAX)]
Duration = Annotated[float, Seconds(SECONDS_MAX)]
PostingBody = Annotated[bytes, Blob(POSTING_BODY_BYTES_MAX)]
MailData = Annotated[bytes, Blob(MAIL_DATA_BYTES_MAX)]
Namespace = Annotated[str, Text(NAMESPACE_CHARS_MAX)]  # empty: "default"; of a worker: its daemon's
Boxes = Annotated[tuple[Box, ...], BoxList(BOXES_MAX)]
EchoData = Annotated[bytes, Blob(ECHO_BYTES_MAX)]


# -- the handshake, and what belongs to the connection itself ---------------------------------------------------------


@numbered(1)
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Hello(Message):
    """Dialler, first: who I am and which versions I speak. `node_id` is empty for what is no node."""

    version_min: Version
    version_max: Version
    features: Features = ()
    role: Annotated[str, OneOf(LINK_ROLES)]
    node_id: IdentityOrAny = ""
    incarnation: Identity
    nonce: Nonce
    name: Annotated[str, Text(NAME_CHARS_MAX)] = ""
    pid: Annotated[int, UInt(2**32 - 1)] = 0
    engine_id: IdentityOrAny = ""
    counters_path: Annotated[str, Text(PATH_CHARS_MAX)] = ""
    namespace: Namespace = ""


@numbered(2)
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Welcome(Message):
    """Acceptor: the version and features that hold from here on, who I am, and the proof that I know the secret."""

    version: Version
    features: Features = ()
    node_id: Identity
    incarnation: Identity
    nonce: Nonce
    auth: Annotated[str, OneOf(("none", "hmac"))]
    proof: ProofBytes = b""
    namespace: Namespace = ""


@numbered(3)
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Proof(Message):
    """Dialler: the proof that I know the secret; empty when the acceptor asked for none."""

    proof: ProofBytes = b""


@numbered(4)
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Ready(Message):
    """Acceptor: the connection is open. `keepalive_s` is how soon the acceptor probes a silent connection."""

    session: Identity
    keepalive_s: Duration


@numbered(5)
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Refuse(Message):
    """Either side, instead of the next step of the handshake. Every version must be able to read this one."""

    code: Code
    message: Explanation = ""
    fields: Details = field(default_factory=dict)


@numbered(6)
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Ping(Message):
    """Asks whether the other side is alive; answered by `Pong`."""

    rid: Rid = 0


@numbered(7)
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Pong(Message):
    """Answers a `Ping`."""

    rid: Rid = 0


@numbered(8)
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Goodbye(Message):
    """I shall close this connection when what runs has ended; begin nothing new."""

    reason: Explanation = ""


@numbered(9)
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Error(Message):
    """The reply to a request that failed; with `rid` 0, the reason why the connection is closed."""

    rid: Rid = 0
    code: Code
    message: Explanation = ""
    fields: Details = field(default_factory=dict)
    retryable: Annotated[bool, Flag()] = False


@numbered(10)
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Done(Message):
    """The reply to a request that succeeded."""

    rid: Rid = 0
    value: Annotated[bytes, Blob(VALUE_BYTES_MAX)] = b""


# -- postings and claims ----------------------------------------------------------------------------------------------


@numbered(20)
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Post(Message):
    """Worker: here is something to be claimed. `claims_max` 0 means any number. Landings are posted by daemons alone.

    ``boxes`` are what an offer wants: then several claims write it, each another part. ``private``: found by posting
    and secret only, whatever its key.
    """

    rid: Rid = 0
    kind: Annotated[str, OneOf(POSTING_KINDS)]
    key: Key
    body: PostingBody = b""
    lease_s: Duration
    claims_max: Annotated[int, UInt(CLAIM_NUMBER_MAX)] = 0
    boxes: Boxes = ()
    private: Annotated[bool, Flag()] = False


@numbered(21)
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Posted(Message):
    """The reply to Post and Renew."""

    rid: Rid = 0
    posting: Identity
    secret: PostingSecret
    expires_in_s: Duration


@numbered(22)
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Renew(Message):
    """Worker: keep this posting for another `lease_s`."""

    rid: Rid = 0
    posting: Identity
    lease_s: Duration


@numbered(23)
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Withdraw(Message):
    """Worker: this posting is no more. Live claims hear of it."""

    rid: Rid = 0
    posting: Identity
    reason: Explanation = ""


@numbered(24)
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Claim(Message):
    """Take what is posted at a node, by kind and key or by posting and secret. No `node` means the daemon asked.

    An empty `node_id` or `incarnation` accepts any. Waits up to `wait_s` for something that is not posted yet.
    ``boxes`` are what the claimant has for an offer; none: all that is wanted.
    """

    rid: Rid = 0
    node: Nodes = ()
    node_id: IdentityOrAny = ""
    incarnation: IdentityOrAny = ""
    kind: Annotated[str, OneOf(POSTING_KINDS)]
    key: KeyOrNone = ""
    posting: IdentityOrAny = ""
    secret: PostingSecretOrNone = b""
    wait_s: Duration = 0.0
    engine_id: IdentityOrAny = ""
    boxes: Boxes = ()


@numbered(25)
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Claimed(Message):
    """The reply to Claim and Land: the posting's body, and the claim's number within the posting.

    Number 0, for an offer only: others write all that the claimant has for it, and there is no claim to settle.
    ``boxes`` are what the claim writes of an offer that said its own.
    """

    rid: Rid = 0
    posting: Identity
    claim: ClaimNumber
    body: Annotated[bytes, Blob(CLAIMED_BODY_BYTES_MAX)] = b""
    expires_in_s: Duration
    node_id: Identity
    incarnation: Identity
    boxes: Boxes = ()


@numbered(26)
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Settle(Message):
    """The claimant: this claim has ended, and how."""

    rid: Rid = 0
    node: Nodes = ()
    posting: Identity
    claim: ClaimNumber
    outcome: Annotated[str, OneOf(OUTCOMES)]
    code: CodeOrNone = ""
    detail: Explanation = ""


@numbered(27)
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PostingEvent(Message):
    """What happened to a posting or to one claim on it; `claim` 0 means all. On the wire its name is Event.

    With ``claimed``, ``boxes`` are what the claim writes of an offer that said its own.
    """

    posting: Identity
    claim: ClaimNumber = 0
    what: Annotated[str, OneOf(POSTING_EVENTS)]
    code: CodeOrNone = ""
    detail: Explanation = ""
    engine_id: IdentityOrAny = ""
    boxes: Boxes = ()


@numbered(28)
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class GiveUp(Message):
    """Whoever sent the Claim or Land numbered `request`: nobody takes its answer any more. It waits no longer, and what
    it was granted already ends. Not answered itself.
    """

    request: Rid


@numbered(29)
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Confirm(Message):
    """Owner: these claims were granted to you over the connection ``session``, which has ended. The `Done` that answers
    it holds those that you neither use nor are about to settle. Claims as `pack_claims` writes them.
    """

    rid: Rid = 0
    session: Identity
    claims: Annotated[bytes, Blob(CONFIRM_BYTES_MAX)]


@numbered(40)
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Land(Message):
    """Give me `length` bytes of a node's landing pool. Answered by Claimed; its body holds the descriptor.

    When the pool is full, waits up to `wait_s` for its turn.
    """

    rid: Rid = 0
    node: Nodes = ()
    key: Key
    length: Annotated[int, UInt(min=1)]
    body: PostingBody = b""
    lease_s: Duration
    engine_id: IdentityOrAny = ""
    wait_s: Annotated[float, Seconds(SECONDS_MAX)] = 0.0


# -- small messages between workers -----------------------------------------------------------------------------------


@numbered(30)
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Mail(Message):
    """Put `data` into a channel of a node."""

    rid: Rid = 0
    node: Nodes = ()
    channel: Channel
    data: MailData = b""


@numbered(31)
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Listen(Message):
    """Worker: deliver to me what is sent to this channel."""

    rid: Rid = 0
    channel: Channel


@numbered(32)
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Unlisten(Message):
    """Worker to daemon: it listens to this channel no more."""

    rid: Rid = 0
    channel: Channel


@numbered(33)
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Delivery(Message):
    """Daemon: this came for your channel. `source` is the node id of the sender's daemon, or empty."""

    channel: Channel
    data: MailData = b""
    source: IdentityOrAny = ""


# -- looking at a daemon ----------------------------------------------------------------------------------------------


@numbered(50)
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Status(Message):
    """Asks a daemon for its status."""

    rid: Rid = 0


@numbered(51)
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class StatusReply(Message):
    """A msgpack map for tools to show."""

    rid: Rid = 0
    body: Annotated[bytes, Blob(STATUS_BODY_BYTES_MAX)] = b""


@numbered(54)
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Report(Message):
    """Worker: what this process says of itself, in the place of what it said before. Not answered.

    `unready` says why it cannot work; `unexpected` counts notices that fitted nothing, by "type reason".
    """

    unready: Explanation = ""
    ignore_fingerprint: Annotated[bool, Flag()] = False
    unexpected: Details = field(default_factory=dict)


@numbered(52)
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Echo(Message):
    """Send `data` back, by way of `node` if one is named."""

    rid: Rid = 0
    node: Nodes = ()
    data: EchoData = b""


@numbered(53)
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class EchoReply(Message):
    """The same bytes; ``via``: the address over which the daemon that relayed it reached the other node."""

    rid: Rid = 0
    data: EchoData = b""
    via: Annotated[str, Text(ENDPOINT_CHARS_MAX)] = ""


# -- lists of claims as bytes: for each the posting (16 bytes) and the claim's number (4 bytes, big-endian) -----------


ClaimKey = tuple[str, int]
POSTING_BYTES = 16
CLAIM_BYTES = POSTING_BYTES + 4
CLAIMS_MAX = CONFIRM_BYTES_MAX // CLAIM_BYTES  # in one message


def pack_claims(claims: Iterable[ClaimKey]) -> bytes:
    """Claims packed one after the other."""
    return b"".join(bytes.fromhex(posting) + number.to_bytes(4, "big") for posting, number in claims)


def count_claims(data: bytes) -> int:
    """How many there are, without looking at them. Raises `ProtocolError` for what is no such list."""
    if len(data) % CLAIM_BYTES:
        raise ProtocolError("a list of claims ends in the middle of one", bytes=len(data))
    return len(data) // CLAIM_BYTES


def claims_in_slices(data: bytes, length: int) -> Iterator[bytes]:
    """The same list in parts of ``length`` claims."""
    for first in range(0, len(data), length * CLAIM_BYTES):
        yield data[first : first + length * CLAIM_BYTES]


def unpack_claims(data: bytes) -> list[ClaimKey]:
    """Raises `ProtocolError` for what is no such list."""
    count_claims(data)
    found = []
    for first in range(0, len(data), CLAIM_BYTES):
        middle = first + POSTING_BYTES
        found.append((data[first:middle].hex(), int.from_bytes(data[middle : first + CLAIM_BYTES], "big")))
    if any(number > CLAIM_NUMBER_MAX for _, number in found):
        raise ProtocolError("a claim has a number that no claim can have", limit=CLAIM_NUMBER_MAX)
    return found


def claims_in_messages(claims: Sequence[ClaimKey]) -> Iterator[Sequence[ClaimKey]]:
    """In parts that fit into one message each."""
    for first in range(0, len(claims), CLAIMS_MAX):
        yield claims[first : first + CLAIMS_MAX]


# -- errors that cross the wire: the one place where an exception becomes a message, and a message an exception -------
# A peer's text and fields are data: they are bounded by the message's own limits, cannot replace what this side knows
# (who the peer is, which operation it was), and a code that is unknown here still becomes an error that carries it.


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
