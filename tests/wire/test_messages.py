"""The set of messages: complete, documented, and within the limits of frames."""

from __future__ import annotations

from kvxfer.config import FRAME_OVERHEAD_BYTES, FRAME_UNAUTHENTICATED_BYTES_MAX, POSTING_BODY_BYTES_MAX, Config
from kvxfer.wire import messages as m
from tests.wire import reference
from tests.wire.samples import largest

NUMBERS = {
    1: m.Hello,
    2: m.Welcome,
    3: m.Proof,
    4: m.Ready,
    5: m.Refuse,
    6: m.Ping,
    7: m.Pong,
    8: m.Goodbye,
    9: m.Error,
    10: m.Done,
    20: m.Post,
    21: m.Posted,
    22: m.Renew,
    23: m.Withdraw,
    24: m.Claim,
    25: m.Claimed,
    26: m.Settle,
    27: m.PostingEvent,
    28: m.GiveUp,
    29: m.Confirm,
    30: m.Mail,
    31: m.Listen,
    32: m.Unlisten,
    33: m.Delivery,
    40: m.Land,
    50: m.Status,
    51: m.StatusReply,
    52: m.Echo,
    53: m.EchoReply,
    54: m.Report,
}


def largest_frame(message: type[m.Message]) -> int:
    return len(m.encode(message(**{name: largest(kind) for name, kind in message.kinds})))


def test_numbers() -> None:
    assert m.MESSAGES == NUMBERS


def test_the_page_tells_what_the_code_does() -> None:
    page = reference.PAGE.read_text()
    assert reference.renewed(page) == page, "run python -m tests.wire.reference"


def test_every_message_says_what_it_is_for() -> None:
    for message in m.MESSAGES.values():
        assert message.__doc__, message
        assert "(" not in message.__doc__.splitlines()[0], f"{message.__name__} has a generated docstring"


def test_the_handshake_fits_into_the_frames_that_are_allowed_for_it() -> None:
    for message in (m.Hello, m.Welcome, m.Proof, m.Ready):
        assert largest_frame(message) <= FRAME_UNAUTHENTICATED_BYTES_MAX, message


def test_everything_but_mail_fits_into_the_smallest_frame_that_may_be_configured() -> None:
    smallest = min(Config(mail_bytes_max=size).frame_control_bytes_max for size in (1, 1 << 20))
    for message in m.MESSAGES.values():
        if message not in (m.Mail, m.Delivery):
            assert largest_frame(message) <= smallest, message
            assert largest_frame(message) <= POSTING_BODY_BYTES_MAX + FRAME_OVERHEAD_BYTES, message
