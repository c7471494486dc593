"""A registry with two workers, a peer and a clock, for the tests of its parts. Each call is followed by `check()`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kvxfer.config import Config
from kvxfer.errors import KvxferError, UsageError
from kvxfer.rendezvous.actions import Link, Refused, Send
from kvxfer.rendezvous.registry import Registry
from kvxfer.wire import messages as m

HERE, THERE, FAR = "a" * 32, "c" * 32, "f" * 32
NOW_INCARNATION, THEIR_INCARNATION = "b" * 32, "d" * 32


ASKED: dict[str, type[m.Message]] = {
    "post": m.Post,
    "renew": m.Renew,
    "withdraw": m.Withdraw,
    "claim": m.Claim,
    "give_up": m.GiveUp,
    "settle": m.Settle,
    "event_from_peer": m.PostingEvent,
    "mail": m.Mail,
    "listen": m.Listen,
    "unlisten": m.Unlisten,
}
BESIDE = ("source", "namespace")  # what is no field of the message


@dataclass(frozen=True)
class Seen:
    """What goes over a link; the fields of the message are its own."""

    link: Link
    message: m.Message

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "message"), name)


def changed(one: Seen, *, link: Link | None = None, **fields: Any) -> Seen:
    """The same with other fields."""
    return Seen(one.link if link is None else link, replace(one.message, **fields))  # type: ignore[type-var]


def said(kind: type[m.Message], /, link: Link, **fields: Any) -> Seen:
    return Seen(link, kind(**fields))


def is_a(action: Any, *kinds: type[m.Message]) -> bool:
    return isinstance(action, Seen) and isinstance(action.message, kinds)


def seen(actions: Any) -> Any:
    if not isinstance(actions, list):
        return actions
    return [Seen(action.link, action.message) if isinstance(action, Send) else action for action in actions]


class Asked:
    """A registry that is asked with the fields of messages, and answers with what is seen of it."""

    def __init__(self, registry: Registry) -> None:
        self.real = registry

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.real, name)
        if not callable(found):
            return found
        kind = ASKED.get(name)
        return lambda *given, **more: seen(found(*given, **more) if kind is None else ask(found, kind, *given, **more))

    def claimed_elsewhere(self, now: float, answer: Seen) -> list[Any]:
        assert isinstance(answer.message, m.Claimed)
        found: list[Any] = seen(self.real.claimed_elsewhere(now, answer.link, answer.message))
        return found


def ask(
    call: Callable[..., Any], message: type[m.Message], now: float, link: Link, rid: int = 0, /, **fields: Any
) -> Any:
    beside = {name: fields.pop(name) for name in BESIDE if name in fields}
    if message in (m.Post, m.Renew):
        fields.setdefault("lease_s", 0.0)
    if message not in (m.GiveUp, m.PostingEvent):
        fields["rid"] = rid
    try:
        made = message(**fields)
    except UsageError as wrong:  # nobody can send it
        return [Refused(link=link, rid=rid, error=wrong)]
    return call(now, link, made, **beside)


class Bench:
    """A registry with a worker `own`, a worker `other`, a link `peer` to THERE, and a clock."""

    def __init__(self, **changes: Any) -> None:
        numbers = itertools.count(1)
        self.registry = Asked(
            Registry(
                Config(**changes),
                node_id=HERE,
                incarnation=NOW_INCARNATION,
                random=lambda size: next(numbers).to_bytes(size, "big"),
            )
        )
        self.now = 0.0
        self._rid = 0
        self.registry.add_worker("own", "decode-0")
        self.registry.add_worker("other", "prefill-0")
        self.registry.add_peer(0.0, "peer", THERE, THEIR_INCARNATION, "node-c")

    def rid(self) -> int:
        self._rid += 1
        return self._rid

    def checked(self, actions: list[Any]) -> list[Any]:
        self.registry.check()
        return actions

    def post(self, link: Link = "own", kind: str = "offer", key: str = "R", **more: Any) -> list[Any]:
        return self.checked(self.registry.post(self.now, link, self.rid(), kind=kind, key=key, **more))

    def posted(self, link: Link = "own", kind: str = "offer", key: str = "R", **more: Any) -> Seen:
        (answer,) = self.post(link, kind, key, **more)
        assert is_a(answer, m.Posted)
        return answer

    def claim(self, link: Link = "peer", kind: str = "offer", key: str = "R", **more: Any) -> list[Any]:
        if "posting" in more:
            key = ""
        return self.checked(self.registry.claim(self.now, link, self.rid(), kind=kind, key=key, **more))

    def claimed(self, link: Link = "peer", kind: str = "offer", key: str = "R", **more: Any) -> Seen:
        notice, answer = self.claim(link, kind, key, **more)  # the owner is told first
        assert is_a(answer, m.Claimed)
        assert is_a(notice, m.PostingEvent)
        assert (notice.what, notice.claim) == ("claimed", answer.claim)
        return answer

    def settle(self, answer: Seen, outcome: str = "done", link: Link | None = None, **more: Any) -> list[Any]:
        return self.checked(
            self.registry.settle(
                self.now,
                answer.link if link is None else link,
                self.rid(),
                posting=answer.posting,
                claim=answer.claim,
                outcome=outcome,
                **more,
            )
        )

    def remove(self, link: Link) -> list[Any]:
        return self.checked(self.registry.remove(self.now, link))

    def expire(self, now: float) -> list[Any]:
        self.now = now
        return self.checked(self.registry.expire(now))


def refusal(actions: list[Any]) -> KvxferError:
    (answer,) = actions
    assert isinstance(answer, Refused)
    return answer.error


def told(actions: list[Any]) -> list[tuple[Link, str, int, str]]:
    return [(item.link, item.what, item.claim, item.code) for item in actions if is_a(item, m.PostingEvent)]
