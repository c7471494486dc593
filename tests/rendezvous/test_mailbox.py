"""Mail: early messages are held within limits, late ones are delivered at once, none is lost silently."""

from __future__ import annotations

from typing import Any

import pytest

from kvxfer.config import Config
from kvxfer.errors import BusyError, TooLarge, TooManyPending
from kvxfer.rendezvous.actions import Send
from kvxfer.rendezvous.mailbox import MESSAGE_OVERHEAD_BYTES, MailboxStore
from kvxfer.wire import messages as m
from tests.rendezvous.bench import THERE


def make(**changes: Any) -> MailboxStore:
    return MailboxStore(Config(**changes))


def texts(deliveries: list[Any]) -> list[bytes]:
    return [action.message.data for action in deliveries]


def test_a_listener_gets_mail_at_once() -> None:
    boxes = make()
    assert boxes.listen("w", "c") == []
    delivery = m.Delivery(channel="c", data=b"hello", source=THERE)
    assert boxes.mail(0.0, "s", "c", b"hello", THERE) == [Send(link="w", message=delivery)]
    assert boxes.held_messages == 0
    boxes.check()


def test_early_mail_is_held_in_order() -> None:
    boxes = make()
    for data in (b"1", b"2", b"3"):
        assert boxes.mail(0.0, "s", "c", data, THERE) == []
    assert texts(boxes.listen("w", "c")) == [b"1", b"2", b"3"]
    assert boxes.listen("w", "c") == []
    assert (boxes.held_messages, boxes.held_bytes) == (0, 0)
    boxes.check()


def test_held_mail_ends_one_by_one() -> None:
    boxes = make(mail_ttl_s=10)
    boxes.mail(0.0, "s", "c", b"1", THERE)
    boxes.mail(5.0, "s", "c", b"2", THERE)
    assert boxes.next_deadline() == 10.0
    boxes.expire(9.9)
    assert boxes.held_messages == 2
    boxes.expire(10.0)
    assert (boxes.held_messages, boxes.expired_messages, boxes.next_deadline()) == (1, 1, 15.0)
    boxes.check()
    boxes.expire(20.0)
    assert (len(boxes), boxes.held_bytes, boxes.next_deadline()) == (0, 0, None)
    boxes.check()


def test_messages_at_the_limit_and_one_more() -> None:
    boxes = make(mailbox_messages_max=2)
    boxes.mail(0.0, "s", "c", b"", THERE)
    boxes.mail(0.0, "s", "c", b"", THERE)
    with pytest.raises(BusyError) as caught:
        boxes.mail(0.0, "s", "c", b"", THERE)
    assert caught.value.code == "busy"
    boxes.mail(0.0, "s", "d", b"", THERE)
    boxes.check()


def test_bytes_at_the_limit_and_one_more() -> None:
    boxes = make(mailbox_bytes_max=4096, mail_bytes_max=4096)
    overhead = MESSAGE_OVERHEAD_BYTES + len("c" + THERE)
    boxes.mail(0.0, "s", "c", bytes(4096 - overhead), THERE)
    assert boxes.held_bytes == 4096
    with pytest.raises(BusyError):
        boxes.mail(0.0, "s", "c", b"", THERE)
    with pytest.raises(BusyError):
        boxes.mail(0.0, "s", "d", bytes(4096 - overhead + 1), THERE)
    assert len(boxes) == 1, "a refused message opens no channel"
    boxes.check()


def test_all_mailboxes_together() -> None:
    boxes = make(mailboxes_bytes_max=4096, mailbox_bytes_max=4096, mail_bytes_max=4096)
    boxes.mail(0.0, "s", "c", bytes(3000), THERE)
    with pytest.raises(TooManyPending):
        boxes.mail(0.0, "s", "d", bytes(3000), THERE)
    boxes.listen("w", "c")
    boxes.mail(0.0, "s", "d", bytes(3000), THERE)
    boxes.check()


def test_channels_at_the_limit_and_one_more() -> None:
    boxes = make(mailboxes_max=2)
    boxes.mail(0.0, "s", "a", b"", THERE)
    boxes.listen("w", "b")
    with pytest.raises(TooManyPending):
        boxes.mail(0.0, "s", "c", b"", THERE)
    with pytest.raises(TooManyPending):
        boxes.listen("w", "c")
    boxes.unlisten("w", "b")
    boxes.listen("w", "c")
    boxes.check()


def test_the_largest_message_and_one_byte_more() -> None:
    boxes = make(mail_bytes_max=10)
    boxes.mail(0.0, "s", "c", bytes(10), THERE)
    with pytest.raises(TooLarge) as caught:
        boxes.mail(0.0, "s", "c", bytes(11), THERE)
    assert caught.value.fields["mail_bytes_max"] == 10


def test_one_listener_per_channel() -> None:
    boxes = make()
    boxes.listen("w", "c")
    with pytest.raises(BusyError):
        boxes.listen("v", "c")
    boxes.unlisten("v", "c")
    boxes.unlisten("v", "unknown")
    assert boxes.mail(0.0, "s", "c", b"", THERE)[0].link == "w"
    boxes.forget("w")
    boxes.forget("w")
    assert len(boxes) == 0
    boxes.listen("v", "c")
    boxes.check()


def test_sender_that_takes_all_it_can_leaves_room_for_others() -> None:
    boxes = make(mailboxes_max=90)
    taken = 0
    with pytest.raises(TooManyPending):
        for number in range(100):
            boxes.mail(0.0, "greedy", f"c{number}", b"", THERE)
            taken += 1
    assert 70 < taken < 90
    boxes.mail(0.0, "modest", "m", b"", THERE)
    boxes.listen("listener", "l")
    boxes.check()
    boxes.expire(1000.0)
    assert (len(boxes), boxes.held_bytes) == (1, 0)
    boxes.mail(1000.0, "greedy", "again", b"", THERE)
    boxes.check()


def test_listener_that_takes_all_it_can_leaves_room_for_others() -> None:
    boxes = make(mailboxes_max=90)
    with pytest.raises(TooManyPending):
        for number in range(100):
            boxes.listen("greedy", f"c{number}")
    boxes.listen("modest", "m")
    boxes.mail(0.0, "modest", "n", b"", THERE)
    boxes.check()


def test_bytes_of_one_sender_leave_room_for_others() -> None:
    boxes = make(mailboxes_bytes_max=90_000, mailbox_bytes_max=90_000, mail_bytes_max=4096)
    with pytest.raises(TooManyPending):
        for _ in range(100):
            boxes.mail(0.0, "greedy", "c", bytes(936 - 1), THERE)
    assert 70_000 < boxes.held_bytes < 90_000
    boxes.mail(0.0, "modest", "m", bytes(936), THERE)
    boxes.check()
